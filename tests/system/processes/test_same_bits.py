"""One process and several train the same model: parameters, optimiser, history, plan and guarantee, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import checkpoints
from support.groups import Server, arguments, differences, same_guarantee

import stobatch
from stobatch.config import DataConfig
from stobatch.data import load
from stobatch.data.shard_writing import write_shards
from stobatch.seeds import Seeds

Changes = dict[str, Any]
DOUBLE: Changes = {"machine__precision": "float64"}
VIEWS: Changes = {
    "method__views_weight": 0.5,
    "method__smoothing_stddev": 0.3,
    "method__adversarial_weight": 0.3,
    "method__attack_steps": 2,
    "method__warm_up": 0.0,
}
EACH: Changes = {"trainers__num": 4, "trainers__per_step": 2}
SHARES: Changes = {"trainers__num": 4, "trainers__per_step": 4, "trainers__noise": "shares"}
CASES: dict[str, tuple[str, Changes]] = {
    "sound": ("sound", {}),
    "sound in double": ("sound", DOUBLE),
    "sound with views": ("sound", VIEWS),
    "sound with canaries": ("sound", {"canaries__num": 50}),
    "sound at a rate of each step's own": ("sound", {"training__schedule": "cosine", "training__warm_up": 0.3}),
    "four trainers, two at once": ("sound", EACH),
    "four trainers with shares of the noise": ("sound", {**SHARES, **DOUBLE}),
    "shards": ("sound", {"data__name": "shards", "data__train_limit": None}),
    "shards of two trainers": (
        "sound",
        {"data__name": "shards", "data__train_limit": None, "trainers__num": 2, "trainers__per_step": 2},
    ),
    "published, two trainers at once": (
        "published",
        {"method__schedule": "stochastic", "method__trainers_per_step": 2},
    ),
    "published in double, one after the other": ("published", {"method__schedule": "iterative", **DOUBLE}),
    "vanilla": ("vanilla", {}),
    "vanilla in double": ("vanilla", DOUBLE),
}
# Each case meets numbers of processes that divide its work and ones that do not; devices_per_trainer comes with some.
GROUPS: list[tuple[str, int, int | None]] = [
    ("sound", 2, None),
    ("sound", 3, 3),
    ("sound", 4, None),
    ("sound in double", 3, None),
    ("sound with views", 2, 2),
    ("sound with canaries", 2, None),
    ("sound at a rate of each step's own", 3, None),
    ("four trainers, two at once", 2, None),
    ("four trainers, two at once", 2, 2),
    ("four trainers, two at once", 3, None),
    ("four trainers, two at once", 4, 2),
    ("four trainers with shares of the noise", 2, 1),
    ("four trainers with shares of the noise", 3, None),
    ("shards", 2, None),
    ("shards", 4, None),
    ("shards of two trainers", 4, None),
    ("published, two trainers at once", 2, None),
    ("published, two trainers at once", 4, 4),
    ("published in double, one after the other", 3, None),
    ("vanilla", 2, None),
    ("vanilla in double", 4, 4),
]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "shards"
    write_shards(load(DataConfig(train_limit=2000, test_limit=100)), folder, 5, Seeds.reproducible(1))
    return folder


@pytest.fixture(scope="module")
def trained(
    group: Server, tmp_path_factory: pytest.TempPathFactory, shards: Path
) -> Callable[[str, int, int | None], Path]:
    """The run directory of a case in so many processes, each made once."""
    made: dict[tuple[str, int, int | None], Path] = {}

    def train(case: str, processes: int, devices: int | None = None) -> Path:
        key = (case, processes, devices)
        if key not in made:
            kind, changes = CASES[case]
            place = {"machine__data_root": str(shards)} if changes.get("data__name") == "shards" else {}
            out = tmp_path_factory.mktemp("trained") / "run"
            layout = {"machine__devices_per_trainer": devices}
            ended = group(processes, "train", "--out", out, *arguments(kind, **changes, **place, **layout))
            assert ended.codes == [0] * max(processes, 1), ended.err
            made[key] = out
        return made[key]

    return train


@pytest.mark.slow
@pytest.mark.parametrize(("case", "processes", "devices"), GROUPS)
def test_any_number_of_processes_gives_the_bits_of_one(trained, case, processes, devices):
    alone, together = trained(case, 0), trained(case, processes, devices)
    assert not differences(alone, together)
    assert same_guarantee(alone, together)
    assert stobatch.load(together).run.read("training")["processes"] == processes
    precision = {value.dtype for name, value in checkpoints.tensors(together).items() if name.startswith("network.")}
    assert precision == {torch.float64 if "double" in case or "shares" in case else torch.float32}


def test_one_process_under_torchrun_is_a_group_of_one(trained):
    assert not differences(trained("sound", 0), trained("sound", 1))


def trained_with(
    group: Server, out: Path, processes: int, twin: dict[str, Any], kind: str = "sound", **changes: Any
) -> Path:
    ended = group(processes, "train", "--out", out, *arguments(kind, **changes), everywhere=twin)
    assert ended.codes == [0] * max(processes, 1), ended.err
    return out


def furthest(one: Path, other: Path) -> float:
    """The largest difference between two parameters, over the largest parameter."""
    ours, theirs = (
        {k: v for k, v in checkpoints.tensors(run).items() if k.startswith("network.")} for run in (one, other)
    )
    assert ours.keys() == theirs.keys()
    largest = max(float(value.abs().max()) for value in theirs.values())
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours) / largest


def test_a_plain_sum_is_told_apart(group, tmp_path):
    """The broken twin: gradients that are added as they come depend on who adds them."""
    twin = {"plain_sums": True}
    alone, two, three = (trained_with(group, tmp_path / str(n), n, twin) for n in (0, 2, 3))
    for one, other in ((alone, two), (alone, three), (two, three)):
        assert {name for name in differences(one, other) if name.startswith("network.")}
        assert furthest(one, other) < 1e-5, "rounding, and nothing else"


TOLERANCE = 1e-5
"""A sum of 400 gradients rounded to float32 once or twice, over six steps: 2⁻²⁴ each, with room for growth."""


def test_without_exact_sums_parameters_differ_by_rounding_alone(group, trained, tmp_path):
    alone = trained("vanilla", 0)
    for processes in (2, 3):
        rough = trained_with(group, tmp_path / str(processes), processes, {}, "vanilla", machine__exact_sums=False)
        assert 0 < furthest(rough, alone) < TOLERANCE


def test_sums_under_noise_are_exact_always(group, trained, tmp_path):
    """The proof needs it: rounded on their way, they would not lie on the grid of the noise."""
    asked = trained_with(group, tmp_path / "run", 2, {}, machine__exact_sums=False)
    assert not differences(asked, trained("sound", 0))


def test_bfloat16_trains_with_the_same_guarantee(group, trained, tmp_path):
    alone = trained("sound", 0)
    runs = [trained_with(group, tmp_path / str(n), n, {}, machine__precision="bfloat16") for n in (0, 2)]
    for run in runs:
        assert furthest(run, alone) > TOLERANCE, "it was meant to compute otherwise"
        assert same_guarantee(run, alone)
        assert (run / "plan.json").read_bytes() == (alone / "plan.json").read_bytes()
    assert not differences(*runs)
