"""Sensitivities, noise, budgets, plans, and what is guaranteed by whom."""
