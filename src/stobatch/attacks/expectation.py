"""Attacks on randomised models: expectation over transformation (Athalye et al., 2018), fresh draws at every step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import log

import torch
from torch import Tensor, nn

from stobatch.attacks.goals import Goal
from stobatch.attacks.loop import Scores
from stobatch.errors import SettingError

Sample = Callable[[int, torch.Generator], Scores]
"""Maps a number of draws and a generator to a function from points to log mean probabilities over those draws."""

_DRAWS_TO_COMPARE = 8
"""Times more draws to compare two points than for a step: errors of steps average out, those of comparisons do not."""
_AGREEMENT = 0.5
"""Mean cosine that two independent gradients g + e, g + e' must have: each then has √0.5 = 0.7 with the true g."""


@dataclass(frozen=True)
class Expectation:
    """A randomised victim: every step takes the gradient of the mean over `draws` fresh draws."""

    sample: Sample
    draws: int
    passes_per_draw: int = 1
    passes: int = field(init=False)

    def __post_init__(self) -> None:
        if self.draws < 1:
            raise SettingError(f"{self.draws} noise draws give no gradient.", remedy="Use at least 1.")
        object.__setattr__(self, "passes", self.draws * self.passes_per_draw)

    @property
    def deterministic(self) -> bool:
        return False

    def draw(self, generator: torch.Generator) -> Scores:
        return self.sample(self.draws, generator)

    def draw_to_compare(self, generator: torch.Generator) -> Scores:
        samples = [self.draw(generator) for _ in range(_DRAWS_TO_COMPARE)]
        return lambda points: (
            torch.stack([scores(points).log_softmax(1) for scores in samples]).logsumexp(0) - log(len(samples))
        )

    @classmethod
    def adaptive(
        cls,
        sample: Sample,
        points: Tensor,
        goal: Goal,
        generator: torch.Generator,
        *,
        passes_per_draw: int = 1,
        most: int = 16,
    ) -> Expectation:
        """Return a victim with as many draws as two independent gradients need to agree: a power of 2 up to `most`."""
        draws = 1
        while 2 * draws <= most and _agreement(sample, draws, points, goal, generator) < _AGREEMENT:
            draws *= 2
        return cls(sample, draws, passes_per_draw)


def _agreement(sample: Sample, draws: int, points: Tensor, goal: Goal, generator: torch.Generator) -> float:
    """Return the mean cosine of two gradients from independent draws."""
    gradients = []
    for _ in range(2):
        leaf = points.detach().requires_grad_()
        with torch.enable_grad():
            total = goal.objective(sample(draws, generator)(leaf), slice(None)).sum()
        gradient = torch.autograd.grad(total, leaf)[0].flatten(1)
        # Confident models have tiny gradients, which cosine_similarity would clamp to zero.
        gradients.append(gradient / gradient.abs().amax(1, keepdim=True).clamp(min=torch.finfo(gradient.dtype).tiny))
    return float(nn.functional.cosine_similarity(gradients[0], gradients[1]).mean())


def module_sample(module: nn.Module) -> Sample:
    """Return the log mean probabilities of a module that draws random numbers as it runs (dropout, noise layers)."""

    def sample(draws: int, generator: torch.Generator) -> Scores:
        seed = int(torch.randint(2**62, (), generator=generator))

        def scores(points: Tensor) -> Tensor:
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                logs = torch.stack([module(points).log_softmax(1) for _ in range(draws)])
            return logs.logsumexp(0) - log(draws)

        return scores

    return sample
