"""Canaries: records inserted into a training to measure what it leaks about one record.

A gradient canary is the worst record that the proof allows: its whole contribution lies in one coordinate of the
parameters, with a sign that alternates from step to step. An observer of the steps adds them up with the same signs:
steady gradients of other examples cancel, noise that is fresh in every step grows like the square root of the steps,
and noise that is reused cancels too, which reveals its reuse.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import numpy as np
import torch
from torch import Tensor

from stobatch.config import CanaryConfig, RunConfig
from stobatch.data import DatasetInfo, Examples
from stobatch.dp.plan import TrainedPart
from stobatch.errors import SettingError
from stobatch.seeds import Seeds

LENGTH = 100.0
"""Norm of a canary's gradient before clipping, in clipping norms: without clipping it is easy to detect."""


@dataclass(frozen=True)
class GradientCanaries:
    """A distinct coordinate of the flattened parameters for each canary."""

    coordinates: Tensor

    @classmethod
    def draw(cls, num: int, num_parameters: int, generator: np.random.Generator) -> Self:
        """Draw distinct coordinates."""
        if num > num_parameters:
            raise SettingError(
                f"{num} gradient canaries do not fit {num_parameters} parameters.",
                why="Each needs a coordinate of its own.",
                remedy=f"Plant at most {num_parameters}, or input canaries.",
            )
        return cls(torch.from_numpy(generator.choice(num_parameters, num, replace=False)))

    @staticmethod
    def sign(step: int) -> int:
        """Return the sign of all canaries in a step."""
        return 1 if step % 2 == 0 else -1

    def add(self, total: dict[str, Tensor], which: Tensor, step: int, length: float) -> None:
        """Add the contributions of some canaries to sums by parameter, in place."""
        for name, _, positions in self._by_parameter(total, self.coordinates[which]):
            value = total[name]
            # Flattened in the order of the axes, whatever the order in memory.
            gradients = torch.full((len(positions),), self.sign(step) * length, dtype=value.dtype)
            canaries = torch.zeros(value.numel(), dtype=value.dtype).index_add_(0, positions, gradients)
            value += canaries.reshape(value.shape).to(value.device)

    def read(self, values: dict[str, Tensor], step: int) -> Tensor:
        """Return the value at each canary's coordinate, times the sign of the step; 0 in frozen parameters."""
        scores = torch.zeros(len(self.coordinates), dtype=torch.float64)
        for name, canaries, positions in self._by_parameter(values, self.coordinates):
            scores[canaries] = values[name].reshape(-1)[positions.to(values[name].device)].double().cpu()
        return scores * self.sign(step)

    @staticmethod
    def _by_parameter(values: dict[str, Tensor], coordinates: Tensor) -> list[tuple[str, Tensor, Tensor]]:
        """Return (parameter, which coordinates lie in it, their positions in it) for each parameter with a canary."""
        ends = list(accumulate((value.numel() for value in values.values()), initial=0))
        parts = []
        for name, start, end in zip(values, ends, ends[1:], strict=False):
            inside = ((coordinates >= start) & (coordinates < end)).nonzero().flatten()
            if len(inside):
                parts.append((name, inside, coordinates[inside] - start))
        return parts


@dataclass(frozen=True)
class Canaries:
    """Canaries of a training: gradient canaries, or images with labels. Which are included is secret."""

    included: Tensor
    gradients: GradientCanaries | None = None
    inputs: Tensor | None = None
    labels: Tensor | None = None


def coins(num: int, generator: np.random.Generator) -> Tensor:
    """Return which canaries are included: independent fair coins."""
    return torch.from_numpy(generator.random(num) < 0.5)


def draw_canaries(config: CanaryConfig, info: DatasetInfo, num_parameters: int, seeds: Seeds) -> Canaries:
    """Return the run's canaries and their coins, from its own seeds; never written to disk."""
    included = coins(config.num, seeds.philox("canaries", "coins"))
    if config.kind == "gradient":
        stream = seeds.philox("canaries", "places")
        return Canaries(included, GradientCanaries.draw(config.num, num_parameters, stream))
    stream = seeds.philox("canaries", "images")
    images = torch.from_numpy(stream.random((config.num, *info.input_shape), dtype=np.float32)).round() * 2 - 1
    labels = torch.from_numpy(stream.integers(info.num_classes, size=config.num))
    return Canaries(included, inputs=images, labels=labels)


def replace_by_canaries(records: Examples, canaries: Canaries) -> Examples:
    """Replace the last records by canaries, with their label or the next one, for replace-one neighbours."""
    assert canaries.inputs is not None
    assert canaries.labels is not None
    num_kept = len(records) - len(canaries.labels)
    if num_kept < 1:
        raise SettingError(
            f"{len(canaries.labels)} input canaries leave none of {len(records)} records.",
            why="Where neighbours have one size, each canary takes the place of a record.",
            remedy=f"Plant at most {len(records) // 2}: canaries.num.",
        )
    labels = torch.where(canaries.included, canaries.labels, (canaries.labels + 1) % records.num_classes)
    first = records.take(slice(num_kept))
    return Examples(torch.cat([first.inputs, canaries.inputs]), torch.cat([first.labels, labels]), records.num_classes)


CANARY_SCORES = "canary_scores.safetensors"
"""File in the private folder with each canary's score."""


def draw_run_canaries(
    config: RunConfig, info: DatasetInfo, network: torch.nn.Module, parts: TrainedPart | None, seeds: Seeds
) -> Canaries:
    """Draw the canaries of a run; coordinates of gradient canaries are of trained parameters only."""
    trained = parts.trained if parts else sum(p.numel() for p in network.parameters())
    return draw_canaries(config.canaries, info, trained, seeds)
