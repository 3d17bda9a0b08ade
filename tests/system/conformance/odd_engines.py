"""Engines that watch a training: one that notes every release, and one that is several devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from watched import Watched

from stobatch.dp.noise import Grid
from stobatch.training.engines import Averaged, Engine, Gradients, Stop, TrainerTask, never
from stobatch.training.engines.base import SINGLE_DEVICE, DeviceRank, Parts
from stobatch.training.exact_sum import ExactSum


def copied(tensors: Mapping[str, Tensor]) -> Gradients:
    return {name: value.detach().clone() for name, value in tensors.items()}


class Noting(Engine):
    """Computes as one process does, and notes what each release was and from which parameters.

    `told` is what to say instead: the releases of another training. One that hears them is, release by release, the
    mechanism of its own data given what was released before. That is what composition is about.
    """

    def __init__(self, examples: Watched | None = None, told: Sequence[Gradients] | None = None) -> None:
        self.examples, self.told = examples, told
        self.releases: list[Gradients] = []
        self.began_at: list[Gradients] = []

    def average(
        self,
        tasks: Sequence[TrainerTask],
        parts: Parts,
        parameters: Mapping[str, Tensor],
        stop: Stop = never,
        grid: Grid | None = None,
    ) -> Averaged:
        self.began_at.append(copied(parameters))
        total = ExactSum(parameters, grid)
        for task in tasks:
            for part in self._watching(parts(task, SINGLE_DEVICE)):
                total.add(part)
        own = total.mean(len(tasks))
        self.releases.append(copied(own))
        return Averaged(copied(self.told[len(self.releases) - 1]) if self.told else own, stop())

    def _watching(self, parts: Iterable[Gradients]) -> Iterator[Gradients]:
        """The release begins anew for each part: what reads between two of them is not part of it."""
        waiting = iter(parts)
        while True:
            self._inside(len(self.releases))
            part = next(waiting, None)
            self._inside(None)
            if part is None:
                return
            yield part

    def _inside(self, release: int | None) -> None:
        if self.examples is not None:
            self.examples.release = release

    def exchange(self, topic: str, text: str) -> list[str]:
        return [text]


class Devices(Engine):
    """Each trainer has several devices, and their sums are added with the last first, as an all-reduce may do.

    One of them can be absent, to see that it is missed.
    """

    def __init__(self, count: int, absent: int | None = None) -> None:
        self.count, self.absent = count, absent
        self.releases: list[Gradients] = []
        self.parts_of = [0] * count

    def average(
        self,
        tasks: Sequence[TrainerTask],
        parts: Parts,
        parameters: Mapping[str, Tensor],
        stop: Stop = never,
        grid: Grid | None = None,
    ) -> Averaged:
        total = ExactSum(parameters, grid)
        for task in reversed(tasks):
            for device in reversed(range(self.count)):
                own = ExactSum(parameters)
                for part in parts(task, DeviceRank(device, self.count)) if device != self.absent else ():
                    own.add(part)
                    self.parts_of[device] += 1
                total.buffer += own.buffer
        self.releases.append(total.mean(len(tasks)))
        return Averaged(copied(self.releases[-1]), stop())

    def exchange(self, topic: str, text: str) -> list[str]:
        return [text]


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """To the last bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Over all parameters together, in double precision."""
    return float(torch.cat([(one[name].double() - other[name].double()).flatten() for name in one]).norm())
