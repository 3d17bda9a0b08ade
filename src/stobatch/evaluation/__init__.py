"""Scores from per-example records, each with its protocol and its confidence interval."""
