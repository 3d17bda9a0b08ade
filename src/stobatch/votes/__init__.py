"""Certificates by vote: what fresh noise proves about the classifier behind it."""
