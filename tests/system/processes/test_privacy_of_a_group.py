"""What real processes release: noise once and no more, drawn by each trainer for itself, and every record read once.

Each statistical check raises a false alarm with a probability below 1e-6, and each has twins: programs with one
mistake, which the same check must notice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from math import frexp, sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from support.groups import Server, arguments
from torch import Tensor

import stobatch
from stobatch.dp.plan import DpSgdPlan, TrainersPlan

ALARM = 1e-6
"""The false-alarm rate of each check."""
EACH: dict[str, Any] = {"trainers__num": 3, "trainers__per_step": 3}
SHARES: dict[str, Any] = {"trainers__num": 4, "trainers__per_step": 4, "trainers__noise": "shares"}


@dataclass(frozen=True)
class Observed:
    """What the steps released, what each trainer handed to the sum, and the plan."""

    releases: Tensor
    messages: dict[tuple[int, int], Tensor]
    """By step and trainer, summed over its devices."""
    plan: DpSgdPlan


Observe = Callable[..., Observed]


@pytest.fixture
def observe(group: Server, tmp_path: Path) -> Observe:
    def train(processes: int, twin: dict[str, Any] | None = None, **changes: Any) -> Observed:
        """Examples add nothing here."""
        out = tmp_path / "run"
        everywhere = {"without_examples": True, "record": str(tmp_path), **(twin or {})}
        ended = group(processes, "train", "--out", out, *arguments(**changes), everywhere=everywhere)
        assert ended.codes == [0] * processes, ended.err
        kept = [torch.load(tmp_path / f"recorded-{rank}.pt") for rank in range(processes)]
        releases = [torch.stack(one["releases"]) for one in kept]
        assert all(torch.equal(releases[0], other) for other in releases), "all hold the same release"
        messages: dict[tuple[int, int], Tensor] = {}
        for one in kept:
            for step, trainer, _, value in one["parts"]:
                messages[step, trainer] = messages.get((step, trainer), torch.zeros_like(value)) + value
        plan = stobatch.load(out).plan
        assert isinstance(plan, DpSgdPlan)
        return Observed(releases[0].double(), messages, plan)

    return train


def has_variance(values: Tensor, stddev: float) -> bool:
    """Two-sided chi-square test of independent normal numbers of mean 0."""
    law = stats.chi2(values.numel())
    found = float((values / stddev).square().sum())
    return bool(min(law.cdf(found), law.sf(found)) > ALARM / 2)


def independent(one: Tensor, other: Tensor, pairs: int) -> bool:
    """Of so many pairs this is one: their correlation is that of independent normal numbers."""
    found = float((one @ other) / (one.norm() * other.norm()))
    return bool(2 * stats.norm.sf(abs(found) * sqrt(len(one))) > ALARM / pairs)


def on_the_mean(plan: DpSgdPlan) -> float:
    """Of the noise on what a step releases, in units of the clipping norm, by hand: σ/B of one owner, or of shares."""
    if isinstance(plan, TrainersPlan) and not plan.noise_shares:
        # Each divides σC by its own part of the batch, B/𝒩, and the average of 𝒩 of them has 1/√𝒩 of that.
        return plan.noise_multiplier * plan.per_step / plan.expected_batch_size / sqrt(plan.per_step)
    return plan.noise_multiplier / plan.expected_batch_size


@pytest.mark.parametrize(
    ("processes", "changes"),
    [
        pytest.param(2, {}, id="one trainer"),
        pytest.param(3, {}, id="one trainer, three devices"),
        pytest.param(3, EACH, id="three trainers"),
        pytest.param(2, SHARES, id="shares"),
        pytest.param(2, SHARES | {"machine__devices_per_trainer": 2}, id="shares, two devices each"),
    ],
)
def test_a_release_has_the_planned_noise_once(observe: Observe, processes: int, changes: dict[str, Any]) -> None:
    seen = observe(processes, **changes)
    assert seen.releases.numel() > 10_000
    assert has_variance(seen.releases, on_the_mean(seen.plan))


TWINS = {
    "every device adds the noise": (2, {"noise_of": "everyone"}, {}),
    "no device adds the noise": (2, {"noise_of": "nobody"}, {}),
    "all trainers draw one share": (2, {"one_seed_for_all": True}, SHARES),
    "every device adds its trainer's share": (
        2,
        {"noise_of": "everyone"},
        SHARES | {"machine__devices_per_trainer": 2},
    ),
}


@pytest.mark.parametrize("twin", TWINS)
def test_noise_that_is_not_as_planned_is_noticed(observe: Observe, twin: str) -> None:
    processes, mistake, changes = TWINS[twin]
    seen = observe(processes, mistake, **changes)
    assert not has_variance(seen.releases, on_the_mean(seen.plan))
    times = float(seen.releases.std() / on_the_mean(seen.plan)) ** 2
    # Two devices draw the same numbers, so that the variance is four times as large; so it is for four equal shares.
    assert times == pytest.approx(0.0 if twin == "no device adds the noise" else 4.0, rel=0.1)


@pytest.mark.parametrize("changes", [EACH, SHARES], ids=["each", "shares"])
def test_trainers_draw_noise_of_their_own_in_every_step(observe: Observe, changes: dict[str, Any]) -> None:
    seen = observe(2 if changes is SHARES else 3, **changes)
    assert isinstance(seen.plan, TrainersPlan)
    pairs = list(combinations(seen.messages.values(), 2))
    assert all(independent(one, other, len(pairs)) for one, other in pairs)
    # Messages are shrunk by a power of two; what the sum is divided by comes afterwards.
    alone = seen.plan.noise_stddev * 2.0 ** -frexp(seen.plan.clip_norm * seen.plan.denominator)[1]
    for message in seen.messages.values():
        assert has_variance(message, alone)


def test_trainers_that_share_a_seed_are_noticed(observe: Observe) -> None:
    """The twin: who sees two messages of a step takes their difference, and no noise is left."""
    seen = observe(3, {"one_seed_for_all": True}, **EACH)
    first, second = seen.messages[0, 0], seen.messages[0, 1]
    assert not independent(first, second, len(seen.messages))
    assert float((first - second).abs().max()) == 0.0
    assert float(first.abs().max()) > 0.0


# Sampling.


@dataclass(frozen=True)
class Read:
    """Which examples which process read, in every step and for every trainer."""

    by_step: dict[int, list[int]]
    trainers_of: dict[int, set[int]]
    plan: DpSgdPlan
    steps: int


@pytest.fixture
def read(group: Server, tmp_path: Path) -> Callable[..., Read]:
    def train(processes: int, twin: dict[str, Any] | None = None, **changes: Any) -> Read:
        out = tmp_path / "run"
        everywhere = {"record_samples": str(tmp_path), **(twin or {})}
        ended = group(processes, "train", "--out", out, *arguments(**changes), everywhere=everywhere)
        assert ended.codes == [0] * processes, ended.err
        by_step, trainers_of = dict[int, list[int]](), dict[int, set[int]]()
        for rank in range(processes):
            for line in (tmp_path / f"samples-{rank}.txt").read_text().splitlines():
                step, trainer, *rows = map(int, line.split())
                by_step.setdefault(step, []).extend(rows)
                for row in rows:
                    trainers_of.setdefault(row, set()).add(trainer)
        plan = stobatch.load(out).plan
        assert isinstance(plan, DpSgdPlan)
        return Read(by_step, trainers_of, plan, plan.steps)

    return train


def read_once(seen: Read) -> bool:
    """In a step no record is read twice, and over all steps it is read for one trainer alone."""
    once = all(max(Counter(rows).values()) == 1 for rows in seen.by_step.values())
    return once and all(len(trainers) == 1 for trainers in seen.trainers_of.values())


def at_the_planned_rate(seen: Read) -> bool:
    """Binomial test, over all records that a step may take and all steps."""
    plan = seen.plan
    taking_part = plan.per_step / plan.num_trainers if isinstance(plan, TrainersPlan) else 1.0
    trials = round(plan.num_examples * taking_part) * seen.steps
    taken = sum(len(rows) for rows in seen.by_step.values())
    return bool(stats.binomtest(taken, trials, plan.sampling_rate).pvalue > ALARM)


PAIRS: dict[str, Any] = {"trainers__num": 4, "trainers__per_step": 2}


@pytest.mark.parametrize(
    ("processes", "changes"),
    [pytest.param(3, {}, id="one trainer"), pytest.param(4, PAIRS, id="two of four trainers, two devices each")],
)
def test_a_record_is_read_by_one_device_and_at_the_planned_rate(
    read: Callable[..., Read], processes: int, changes: dict[str, Any]
) -> None:
    seen = read(processes, **changes)
    assert read_once(seen)
    assert at_the_planned_rate(seen)
    sizes = [len(rows) for rows in seen.by_step.values()]
    assert len(set(sizes)) > 1, "Poisson samples differ in size"


def test_records_of_two_trainers_are_noticed(read: Callable[..., Read]) -> None:
    """The twin: fifty records at each border belong to both neighbours."""
    everyone = {"trainers__num": 4, "trainers__per_step": 4}
    assert not read_once(read(2, {"overlapping_holdings": 50}, **everyone))


def test_another_rate_is_noticed(read: Callable[..., Read]) -> None:
    """The twin: a third more than planned; whoever is read is read once."""
    seen = read(2, {"other_rate": 4 / 3})
    assert read_once(seen)
    assert not at_the_planned_rate(seen)
