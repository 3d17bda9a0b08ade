"""Canaries: records planted in a training to measure what it leaks about one record.

A gradient canary is a record as bad as the proof allows: its whole contribution lies in one coordinate of the
parameters, and it pulls there and back by turns. Whoever sees the steps adds them up with the same signs: what examples
pull steadily cancels, noise that is fresh in every step adds up like its square root, and noise that is not fresh
cancels too, which is how its reuse is found.
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
"""How many times the clipping norm a canary's gradient is before it is clipped: without clipping it stands out."""


@dataclass(frozen=True)
class GradientCanaries:
    """One coordinate of the parameters, laid end to end, for each canary; no two share one."""

    coordinates: Tensor

    @classmethod
    def draw(cls, num: int, num_parameters: int, generator: np.random.Generator) -> Self:
        if num > num_parameters:
            raise SettingError(
                f"{num} gradient canaries do not fit {num_parameters} parameters.",
                why="Each needs a coordinate of its own.",
                remedy=f"Plant at most {num_parameters}, or input canaries.",
            )
        return cls(torch.from_numpy(generator.choice(num_parameters, num, replace=False)))

    @staticmethod
    def sign(step: int) -> int:
        return 1 if step % 2 == 0 else -1

    def add(self, total: dict[str, Tensor], which: Tensor, step: int, length: float) -> None:
        """Add the contributions of some canaries to sums by parameter, in place."""
        for name, _, places in self._by_parameter(total, self.coordinates[which]):
            value = total[name]
            # Laid end to end in the order of the axes, whatever the order in memory.
            pulls = torch.full((len(places),), self.sign(step) * length, dtype=value.dtype)
            own = torch.zeros(value.numel(), dtype=value.dtype).index_add_(0, places, pulls)
            value += own.reshape(value.shape).to(value.device)

    def read(self, values: dict[str, Tensor], step: int) -> Tensor:
        """Return what stands at each canary's coordinate, with the sign of the step."""
        # Where a parameter is frozen nothing stands, with a canary or without.
        found = torch.zeros(len(self.coordinates), dtype=torch.float64)
        for name, own, places in self._by_parameter(values, self.coordinates):
            found[own] = values[name].reshape(-1)[places.to(values[name].device)].double().cpu()
        return found * self.sign(step)

    @staticmethod
    def _by_parameter(values: dict[str, Tensor], coordinates: Tensor) -> list[tuple[str, Tensor, Tensor]]:
        """(parameter, which of the coordinates lie in it, where in it)."""
        ends = list(accumulate((value.numel() for value in values.values()), initial=0))
        parts = []
        for name, start, end in zip(values, ends, ends[1:], strict=False):
            own = ((coordinates >= start) & (coordinates < end)).nonzero().flatten()
            if len(own):
                parts.append((name, own, coordinates[own] - start))
        return parts


@dataclass(frozen=True)
class Planted:
    """Records beside the training data: gradient canaries, or images with labels; which are in is secret."""

    included: Tensor
    gradients: GradientCanaries | None = None
    inputs: Tensor | None = None
    labels: Tensor | None = None


def coins(num: int, generator: np.random.Generator) -> Tensor:
    """Return which canaries are in: independent and fair."""
    return torch.from_numpy(generator.random(num) < 0.5)


def draw_canaries(config: CanaryConfig, info: DatasetInfo, num_parameters: int, seeds: Seeds) -> Planted:
    """Return the run's canaries and their coins, from its own seeds: secret where those are, and never written down."""
    included = coins(config.num, seeds.philox("canaries", "coins"))
    if config.kind == "gradient":
        stream = seeds.philox("canaries", "places")
        return Planted(included, GradientCanaries.draw(config.num, num_parameters, stream))
    stream = seeds.philox("canaries", "images")
    images = torch.from_numpy(stream.random((config.num, *info.input_shape), dtype=np.float32)).round() * 2 - 1
    labels = torch.from_numpy(stream.integers(info.num_classes, size=config.num))
    return Planted(included, inputs=images, labels=labels)


def replace_by_canaries(records: Examples, canaries: Planted) -> Examples:
    """For replace-one neighbours: canaries take the place of the last records, with their label or the next one."""
    assert canaries.inputs is not None
    assert canaries.labels is not None
    kept = len(records) - len(canaries.labels)
    if kept < 1:
        raise SettingError(
            f"{len(canaries.labels)} input canaries leave none of {len(records)} records.",
            why="Where neighbours have one size, each canary takes the place of a record.",
            remedy=f"Plant at most {len(records) // 2}: canaries.num.",
        )
    labels = torch.where(canaries.included, canaries.labels, (canaries.labels + 1) % records.num_classes)
    first = records.take(slice(kept))
    return Examples(torch.cat([first.inputs, canaries.inputs]), torch.cat([first.labels, labels]), records.num_classes)


CANARY_SCORES = "canary_scores.safetensors"
"""In the private folder: what the steps showed of each canary."""


def draw_run_canaries(
    config: RunConfig, info: DatasetInfo, network: torch.nn.Module, parts: TrainedPart | None, seeds: Seeds
) -> Planted:
    """Draw those of a run; canaries of the gradient are of what is trained alone."""
    trained = parts.trained if parts else sum(p.numel() for p in network.parameters())
    return draw_canaries(config.canaries, info, trained, seeds)
