"""Attacks in the l-infinity ball: one loop, small classes, fused ensembles."""

from stobatch.attacks.gradient import Ball, GradientAttack, craft, ensemble_slices, input_gradient
from stobatch.attacks.rules import ATTACKS, FGSM, IFGSM, MIM, Madry, training_ensemble

__all__ = [
    "ATTACKS",
    "FGSM",
    "IFGSM",
    "MIM",
    "Ball",
    "GradientAttack",
    "Madry",
    "craft",
    "ensemble_slices",
    "input_gradient",
    "training_ensemble",
]
