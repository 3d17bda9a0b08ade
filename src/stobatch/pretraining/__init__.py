"""Priors: weights trained without privacy on what is public, for private trainings to start from."""
