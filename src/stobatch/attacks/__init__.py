"""Attacks inside norm balls: one loop, small classes, every returned point checked."""

from stobatch.attacks.apgd import APGD
from stobatch.attacks.ball import Ball
from stobatch.attacks.ensemble import (
    Attacked,
    Budget,
    EveryAim,
    Restarts,
    attack,
    make_attack,
    paper_ensemble,
    restarted,
)
from stobatch.attacks.expectation import Expectation, of_module
from stobatch.attacks.goals import Goal
from stobatch.attacks.loop import Attack, GradientAttack, Plain, Scores, Victim, craft, ensemble_slices
from stobatch.attacks.pgd import FGSM, IFGSM, MIM, Madry
from stobatch.attacks.square import Square
from stobatch.registry import ATTACKS

__all__ = [
    "APGD",
    "ATTACKS",
    "FGSM",
    "IFGSM",
    "MIM",
    "Attack",
    "Attacked",
    "Ball",
    "Budget",
    "EveryAim",
    "Expectation",
    "Goal",
    "GradientAttack",
    "Madry",
    "Plain",
    "Restarts",
    "Scores",
    "Square",
    "Victim",
    "attack",
    "craft",
    "ensemble_slices",
    "make_attack",
    "of_module",
    "paper_ensemble",
    "restarted",
]
