"""Attacks inside norm balls: one loop, small classes, every returned point checked."""

from stobatch.attacks.apgd import APGD
from stobatch.attacks.ball import Ball
from stobatch.attacks.ensemble import (
    AttackResult,
    Budget,
    MultiTargeted,
    Restarts,
    attack,
    make_attack,
    paper_ensemble,
    with_restarts,
)
from stobatch.attacks.expectation import Expectation, module_sample
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
    "AttackResult",
    "Ball",
    "Budget",
    "Expectation",
    "Goal",
    "GradientAttack",
    "Madry",
    "MultiTargeted",
    "Plain",
    "Restarts",
    "Scores",
    "Square",
    "Victim",
    "attack",
    "craft",
    "ensemble_slices",
    "make_attack",
    "module_sample",
    "paper_ensemble",
    "with_restarts",
]
