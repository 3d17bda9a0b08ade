"""How released gradients move the parameters: the descent rules, and their learning rate in each step.

The rate is a function of the settings and of the step's number alone. So it tells nothing of the data, it needs no room
in a checkpoint, and every process, every resumed run and every audit that trains models of its own has the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import cos, pi

import torch
from torch import Tensor

from stobatch.config import RunConfig, TrainingConfig
from stobatch.errors import ModelError
from stobatch.later import Later
from stobatch.models import Network
from stobatch.optimisers import OPTIMISERS
from stobatch.training.engines import Gradients


def rate_share(training: TrainingConfig, step: int) -> float:
    """Return the share of the learning rate that a step descends with, the first step being 0.

    It is read off in the middle of the step, so that no step has a rate of 0: it would cost privacy and move nothing.

    >>> [rate_share(TrainingConfig(steps=4, schedule="linear"), step) for step in range(4)]
    [0.875, 0.625, 0.375, 0.125]
    >>> [rate_share(TrainingConfig(steps=4, warm_up=0.5), step) for step in range(4)]
    [0.25, 0.75, 1.0, 1.0]
    """
    progress, warm_up = (step + 0.5) / training.steps, training.warm_up
    if progress < warm_up:
        return progress / warm_up
    along = (progress - warm_up) / (1 - warm_up)
    if training.schedule == "linear":
        return 1 - along
    return (1 + cos(pi * along)) / 2 if training.schedule == "cosine" else 1.0


class Descent:
    """Moves parameters by the descent rules of a training, at the rate of each step."""

    def __init__(
        self,
        training: TrainingConfig,
        parameters: Mapping[str, Tensor],
        optimisers: Sequence[torch.optim.Optimizer],
        later: Later | None = None,
    ) -> None:
        """Take the rules as a method makes them: the rates they have now are those that the schedule scales.

        With `later` a step of a GPU that is not made of numbers is found when its owner looks.
        """
        self.training, self.parameters, self.optimisers, self.later = training, parameters, optimisers, later
        self.rates = [[float(group["lr"]) for group in optimiser.param_groups] for optimiser in optimisers]

    def step(self, step: int, gradients: Gradients) -> None:
        """Descend on what a step released, if it is finite."""
        names = tuple(gradients)
        # A step may release nothing.
        if names:
            # One look at all of them: each waits for the GPU.
            sound = torch.stack([gradient.isfinite().all() for gradient in gradients.values()])
            if self.later is None:
                _require_numbers(names, sound.tolist())
            else:
                self.later.ask(sound, lambda seen: _require_numbers(names, seen))
        for name, gradient in gradients.items():
            # A step may release something else, which is not descended on.
            if name in self.parameters:
                self.parameters[name].grad = gradient
        self.move(step)

    def move(self, step: int) -> None:
        """Descend on the gradients that the parameters hold, and forget them."""
        share = rate_share(self.training, step)
        for optimiser, rates in zip(self.optimisers, self.rates, strict=True):
            for group, rate in zip(optimiser.param_groups, rates, strict=True):
                group["lr"] = rate * share
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)


def _require_numbers(names: Sequence[str], sound: Sequence[bool]) -> None:
    for name, finite in zip(names, sound, strict=True):
        if not finite:
            raise ModelError(
                f"what was released of {name} is not a number.",
                why="The parameters have diverged.",
                remedy="Lower training.learning_rate, or start again with another seed.",
            )


def encoder_and_head(
    network: Network, config: RunConfig, encoder_rule: str | None = None
) -> list[torch.optim.Optimizer]:
    """Return one descent rule for θ1, which may have its own, and one for θ2."""
    usual = config.training.optimiser
    rules = ((encoder_rule or usual, network.encoder), (usual, network.head))
    return [OPTIMISERS[name](part.parameters(), lr=config.training.learning_rate) for name, part in rules]  # type: ignore[call-arg]
