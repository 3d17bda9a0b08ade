"""What a vote says at a point, counted over fresh draws, and whether a label has lost there."""

from __future__ import annotations

from dataclasses import dataclass
from functools import singledispatch
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stobatch.baselines.noise_layer_verifier import NoiseLayerVerifier
from stobatch.errors import ModelError
from stobatch.published.monte_carlo import tally_products
from stobatch.published.verified_inference import VerifiedInference
from stobatch.sound.verifiers import VotesVerifier
from stobatch.verifier import ForeignVerifier, Labels, Verifier
from stobatch.votes.confidence import Floats
from stobatch.votes.counting import VoteCounter


@dataclass(frozen=True)
class VoteCounts:
    """The sum over independent draws of what each class gets, points x classes; no class gets more than 1 of a draw."""

    sums: Floats
    draws: int
    whole: bool
    """Whether every draw gives 1 to one class and nothing to the others."""

    def rival(self, label: Labels) -> Labels:
        """Return, for each point, the class that is most likely to have overtaken its label."""
        others = self.sums.copy()
        others[np.arange(len(label)), label] = -np.inf
        best: Labels = others.argmax(1)
        return best

    def lead(self, label: Labels, rival: Labels) -> Floats:
        """Return the share of the draws by which the label is ahead of the rival."""
        rows = np.arange(len(label))
        lead: Floats = (self.sums[rows, label] - self.sums[rows, rival]) / self.draws
        return lead

    def chance(self, label: Labels, rival: Labels) -> Floats:
        """Return how probable so large a lead of the rival is.

        **Guarantee.** Where the label's expected share is at least that of a rival named before these draws, the value
        is at most t with probability at most t, for every t: by an exact sign test on whole votes, by Hoeffding's
        inequality on scores.
        """
        if self.whole:
            from scipy.stats import binom

            rows = np.arange(len(label))
            against, both = self.sums[rows, rival], self.sums[rows, rival] + self.sums[rows, label]
            test: Floats = binom.sf(against - 1, both, 0.5)
            return test
        # Differences of two scores lie in [-1, 1].
        return np.exp(-self.draws * np.maximum(-self.lead(label, rival), 0) ** 2 / 2)


@singledispatch
def count(verifier: Any, points: Tensor, draws: int, generator: torch.Generator) -> VoteCounts:
    """Return what the deployed vote of a verifier says at each point, over fresh draws.

    The deployed vote itself and not the smooth form that attacks follow, so that nothing is called broken that a user
    would not see broken. A verifier of your own joins in with `count.register`.
    """
    raise ModelError(
        f"{type(verifier).__name__} deploys a vote, and nothing is known about how it counts.",
        remedy="Register a function with stobatch.auditing.vote_counts.count.register.",
    )


def can_count(verifier: Verifier) -> bool:
    """Return whether it is known how the vote of such a verifier is counted."""
    own = verifier.own if isinstance(verifier, ForeignVerifier) else verifier
    return count.dispatch(type(own)) is not count.dispatch(object)


@count.register
def _(verifier: ForeignVerifier, points: Tensor, draws: int, generator: torch.Generator) -> VoteCounts:
    return count(verifier.own, points, draws, generator)


@count.register
def _(verifier: VerifiedInference, points: Tensor, draws: int, generator: torch.Generator) -> VoteCounts:
    points = points.to(verifier.network.encoder.weight)
    tally = tally_products(verifier.network, points, verifier.noise, draws, generator, verifier.memory_mb)
    whole = verifier.config.interval == "clopper_pearson"
    return VoteCounts((tally.votes if whole else tally.scores).cpu().double().numpy(), draws, whole)


@count.register
def _(verifier: VotesVerifier, points: Tensor, draws: int, generator: torch.Generator) -> VoteCounts:
    counter = counter_of(verifier, points)
    votes = counter.votes(np.arange(len(points)), draws, generator)
    return VoteCounts(votes.cpu().double().numpy(), draws, whole=True)


@count.register
def _(verifier: NoiseLayerVerifier, points: Tensor, draws: int, generator: torch.Generator) -> VoteCounts:
    votes = verifier.counter(points).votes(np.arange(len(points)), draws, generator)
    return VoteCounts(votes.cpu().double().numpy(), draws, whole=True)


def counter_of(verifier: VotesVerifier, points: Tensor) -> VoteCounter:
    """Return a counter of the votes of a smoothed classifier at these points."""
    return VoteCounter(
        verifier.behind_noise,
        verifier.noise,
        points.to(verifier.network.device),
        verifier.network.num_classes,
        verifier.settings.rows_at_once,
    )
