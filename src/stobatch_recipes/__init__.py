"""Functions that return complete configurations."""
