"""Attacks on randomised models: the expectation over their noise, with fresh draws at every step."""

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
"""Makes the function that averages over so many fresh draws."""

_SAMPLES_TO_JUDGE = 8
"""Times more draws for comparing two points than for a step: steps average out over the walk, a comparison does not."""
_AGREEMENT = 0.5
"""Mean cosine that two independent gradients must have: each then has 0.7 with the true one."""


@dataclass(frozen=True)
class Expectation:
    """A randomised function as a victim: every step sees the mean over `draws` fresh draws."""

    sample: Sample
    draws: int
    passes_per_draw: int = 1
    passes: int = field(init=False)

    def __post_init__(self) -> None:
        if self.draws < 1:
            raise SettingError(f"noise draws of {self.draws} give no gradient.", remedy="Use at least 1.")
        object.__setattr__(self, "passes", self.draws * self.passes_per_draw)

    @property
    def deterministic(self) -> bool:
        return False

    def draw(self, generator: torch.Generator) -> Scores:
        return self.sample(self.draws, generator)

    def draw_to_judge(self, generator: torch.Generator) -> Scores:
        several = [self.draw(generator) for _ in range(_SAMPLES_TO_JUDGE)]
        return lambda points: (
            torch.stack([scores(points).log_softmax(1) for scores in several]).logsumexp(0) - log(len(several))
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
        """As many draws as two independent gradients need to agree on these points; a power of two up to `most`."""
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
        # A sure model's gradients are tiny, and the cosine takes what is tiny for zero.
        gradients.append(gradient / gradient.abs().amax(1, keepdim=True).clamp(min=torch.finfo(gradient.dtype).tiny))
    return float(nn.functional.cosine_similarity(gradients[0], gradients[1]).mean())


def of_module(module: nn.Module) -> Sample:
    """Return a module that draws random numbers as it runs (dropout, noise layers): log of its mean probabilities."""

    def sample(draws: int, generator: torch.Generator) -> Scores:
        seed = int(torch.randint(2**62, (), generator=generator))

        def scores(points: Tensor) -> Tensor:
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                logs = torch.stack([module(points).log_softmax(1) for _ in range(draws)])
            return logs.logsumexp(0) - log(draws)

        return scores

    return sample
