"""Differential privacy on any torch module: clipping, noise, accounting, plans and guarantees."""
