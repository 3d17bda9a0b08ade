"""Deterministic certificates: bounds on every score of a network in a box around an input."""
