"""Methods that read a little more than their proof says, each caught by the check that is meant for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import access
import pytest
import torch
from small import SMALL
from torch import Tensor

from stobatch import RunConfig
from stobatch.methods import Method
from stobatch.sound.losses import NormalSampler
from stobatch.sound.method import Sound
from stobatch.sound.step import DpSgdTrainable
from stobatch.training.engines import Gradients, TrainerTask
from stobatch.training.engines.base import DeviceRank

CONFIG = SMALL["sound"]
ROW = torch.tensor([3])
TINY = 1e-3


class Peeking(DpSgdTrainable):
    """Looks at one fixed example in every step, and lets a trace of its gradient through."""

    def parts(self, task: TrainerTask, step: int, share: DeviceRank) -> Iterator[Gradients]:
        yield from super().parts(task, step, share)
        scale = TINY / (self.plan.clip_norm * self.plan.denominator)
        yield {name: value * scale for name, value in self._of(*self.reader.fetch(ROW), step).items()}

    def _of(self, inputs: Tensor, labels: Tensor, step: int) -> Gradients:
        def no_coins(shape: tuple[int, ...]) -> Tensor:
            return torch.zeros(shape)

        return self._clipped(inputs, labels, step, no_coins)


class Watching(DpSgdTrainable):
    """Looks at an example between steps, say to follow its loss."""

    def after_update(self) -> None:
        super().after_update()
        self.reader.fetch(ROW)


class Centring(DpSgdTrainable):
    """Takes the mean of all inputs before the first step, say to normalise them."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.mean = self.examples.in_memory().inputs.mean()


class Remembering(Peeking):
    """Keeps the first sample, and lets a trace of it through in later steps; it never fetches what it did not draw."""

    kept: tuple[Tensor, Tensor] | None = None

    def _clipped(self, inputs: Tensor, labels: Tensor, step: int, coins: NormalSampler, per: int = 1) -> Gradients:
        if self.kept is None:
            self.kept = inputs, labels
        return super()._clipped(inputs, labels, step, coins, per)

    def parts(self, task: TrainerTask, step: int, share: DeviceRank) -> Iterator[Gradients]:
        yield from DpSgdTrainable.parts(self, task, step, share)
        if step and self.kept is not None:
            scale = TINY / (self.plan.clip_norm * self.plan.denominator)
            yield {name: value * scale for name, value in self._of(*self.kept, step).items()}


class Unclipped(DpSgdTrainable):
    """Lets an example add three times what the plan says."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.clip_norm *= 3


class Silent(DpSgdTrainable):
    """Adds no noise where nobody was drawn, as when a step without examples is left out."""

    def parts(self, task: TrainerTask, step: int, share: DeviceRank) -> Iterator[Gradients]:
        pieces = list(super().parts(task, step, share))
        yield from pieces if len(pieces) > 1 else []


def twin(trainable: type[DpSgdTrainable]) -> Method:
    """The sound method with another step."""
    return type("Twin", (Sound,), {"trainable": trainable})()  # type: ignore[no-any-return]


Check = Callable[[Method, RunConfig, Path], list[str]]


def preparing(method: Method, config: RunConfig, _: Path) -> list[str]:
    return access.reads_of_preparation(method, config)


def silence(method: Method, config: RunConfig, _: Path) -> list[str]:
    return access.silent_releases(method, config)


@pytest.mark.parametrize(
    ("trainable", "check", "said"),
    [
        (Peeking, access.unaccounted_reads, "its sample has"),
        (Peeking, access.early_parameters, "moves the parameters before release"),
        (Watching, access.unaccounted_reads, "1 examples read outside of a release"),
        (Centring, access.unaccounted_reads, "300 examples read outside of a release"),
        (Centring, preparing, "300 examples read before the first step"),
        (Remembering, access.undue_influence, "which did not draw it"),
        (Unclipped, access.undue_influence, "more than"),
        (Silent, silence, "has no noise on"),
    ],
)
def test_a_twin_is_caught(
    trainable: type[DpSgdTrainable], check: Check, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "watched_rows", lambda drawn: [_late(drawn), _early(drawn)])
    found = check(twin(trainable), CONFIG, tmp_path)
    assert any(said in complaint for complaint in found), found


def _late(drawn: list[set[int]]) -> int:
    """The peeped-at record, if it comes late; the check is then about it."""
    return int(ROW) if int(ROW) not in drawn[0] else max(drawn[-1])


def _early(drawn: list[set[int]]) -> int:
    return min(drawn[0])


def test_one_that_remembers_reads_only_what_it_drew(tmp_path: Path) -> None:
    """Which is why reads alone are not enough."""
    assert not access.unaccounted_reads(twin(Remembering), CONFIG, tmp_path / "run")


@pytest.mark.parametrize("check", [access.unaccounted_reads, access.undue_influence, access.early_parameters, silence])
def test_the_method_itself_is_not_caught(check: Check, tmp_path: Path) -> None:
    assert not check(twin(DpSgdTrainable), CONFIG, tmp_path / "run")


@pytest.mark.parametrize(
    ("drawn", "said"),
    [
        ([set(range(30))] * 12, "all samples have 30 records"),
        ([set(range(20 * n, 21 * n + 25)) | {299} for n in range(12)], "records [299]"),
        ([set(range(n, n + 100 + n)) for n in range(12)], "were drawn at a rate"),
    ],
    ids=["one fixed batch", "one record always", "too many"],
)
def test_samples_that_are_no_poisson_samples_are_caught(drawn: list[set[int]], said: str) -> None:
    found = access.unlike_poisson(drawn, 300, 0.1)
    assert any(said in complaint for complaint in found), found
