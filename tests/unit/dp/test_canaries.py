"""Canaries: what a gradient canary adds and where, what is read back, and the coins that decide who is in.

Statistical tests alarm falsely with probability 1e-9 each, and each has a broken twin that it catches.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom
from torch import Tensor

from stobatch.config import CanaryConfig
from stobatch.data import DatasetInfo
from stobatch.dp.canaries import GradientCanaries, coins, draw_canaries
from stobatch.errors import SettingError
from stobatch.seeds import Seeds

FALSE_ALARM = 1e-9
SHAPES = {"first": (4, 3, 5, 5), "second": (4,), "third": (6, 4, 1, 1), "fourth": (7, 24), "last": (7,)}
TOTAL = sum(int(np.prod(shape)) for shape in SHAPES.values())


def parameters(
    memory_format: torch.memory_format = torch.contiguous_format, seed: int | None = None
) -> dict[str, Tensor]:
    """Sums by parameter, zero or at random; convolutions in the given order in memory."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in SHAPES.items():
        value = torch.zeros(shape) if generator is None else torch.randn(shape, generator=generator)
        found[name] = value.contiguous(memory_format=memory_format) if len(shape) == 4 else value
    return found


def end_to_end(values: dict[str, Tensor]) -> Tensor:
    """All values in the order of their axes, whatever their order in memory."""
    return torch.cat([torch.tensor([float(value[i]) for i in np.ndindex(*value.shape)]) for value in values.values()])


FORMATS = pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])


@FORMATS
@pytest.mark.parametrize("step", [0, 1, 6, 7])
def test_a_canary_adds_its_length_with_the_sign_of_the_step_at_its_own_coordinate(
    memory_format: torch.memory_format, step: int
) -> None:
    canaries = GradientCanaries.draw(40, TOTAL, np.random.default_rng(3))
    which = torch.tensor([0, 3, 17, 39])
    total, before = (parameters(memory_format, seed=1) for _ in range(2))
    canaries.add(total, which, step, 0.375)
    expected = end_to_end(before)
    expected[canaries.coordinates[which]] += 0.375 if step % 2 == 0 else -0.375
    assert torch.equal(end_to_end(total), expected)
    for name, value in total.items():
        assert value.stride() == before[name].stride(), "the order in memory is the training's own"


@FORMATS
def test_a_coordinate_in_memory_order_is_caught(memory_format: torch.memory_format) -> None:
    """The broken twin: places counted in memory, which for channels-last values are other places."""

    def add_in_memory(total: dict[str, Tensor], coordinates: Tensor) -> None:
        for name, _, places in GradientCanaries._by_parameter(total, coordinates):
            torch.as_strided(total[name], (total[name].numel(),), (1,))[places] += 1.0

    canaries = GradientCanaries(torch.arange(50))
    total, right = parameters(memory_format), parameters(memory_format)
    add_in_memory(total, canaries.coordinates)
    canaries.add(right, torch.arange(50), 0, 1.0)
    assert torch.equal(end_to_end(total), end_to_end(right)) == (memory_format is torch.contiguous_format)


@FORMATS
@given(num=st.integers(1, TOTAL), step=st.integers(0, 9), seed=st.integers(0, 2**31), data=st.data())
def test_what_is_read_is_what_was_added(
    memory_format: torch.memory_format, num: int, step: int, seed: int, data: st.DataObject
) -> None:
    canaries = GradientCanaries.draw(num, TOTAL, np.random.default_rng(seed))
    included = torch.from_numpy(np.random.default_rng(seed + 1).random(num) < data.draw(st.floats(0, 1)))
    total = parameters(memory_format)
    canaries.add(total, included.nonzero().flatten(), step, 2.5)
    read = canaries.read(total, step)
    assert read.dtype == torch.float64
    assert torch.equal(read, 2.5 * included.double())
    # With the sign of another step it would count against the canary.
    assert torch.equal(canaries.read(total, step + 1), -2.5 * included.double())
    # Nothing landed anywhere else.
    assert float(end_to_end(total).abs().sum()) == 2.5 * int(included.sum())


@FORMATS
def test_what_stood_there_before_is_read_too(memory_format: torch.memory_format) -> None:
    canaries = GradientCanaries.draw(TOTAL, TOTAL, np.random.default_rng(0))
    values = parameters(memory_format, seed=2)
    assert torch.equal(canaries.read(values, 0), end_to_end(values)[canaries.coordinates].double())
    assert torch.equal(canaries.read(values, 1), -end_to_end(values)[canaries.coordinates].double())


def test_a_canary_that_is_added_to_nothing_changes_nothing() -> None:
    values, before = parameters(seed=2), parameters(seed=2)
    GradientCanaries(torch.arange(5)).add(values, torch.tensor([], dtype=torch.long), 0, 1.0)
    assert all(torch.equal(values[name], before[name]) for name in values)


def test_nothing_is_read_where_a_parameter_is_missing() -> None:
    """A frozen one, say: a canary that pulls there has no effect, and its score says so."""
    values = parameters(seed=2)
    del values["last"]
    canaries = GradientCanaries(torch.tensor([3, TOTAL - 2]))
    before = end_to_end(values)
    canaries.add(values, torch.tensor([1]), 0, 1.0)
    assert torch.equal(end_to_end(values), before)
    assert canaries.read(values, 0).tolist() == [float(before[3]), 0.0]


def test_double_precision_stays() -> None:
    total = {name: value.double() for name, value in parameters().items()}
    canaries = GradientCanaries(torch.tensor([0, TOTAL - 1]))
    canaries.add(total, torch.tensor([1]), 1, 0.1)
    assert canaries.read(total, 1).tolist() == [0.0, 0.1]


@given(st.integers(1, 500), st.integers(0, 300), st.integers(0, 2**31))
def test_no_two_canaries_share_a_coordinate(num: int, spare: int, seed: int) -> None:
    canaries = GradientCanaries.draw(num, num + spare, np.random.default_rng(seed))
    found = canaries.coordinates.tolist()
    assert len(found) == len(set(found)) == num
    assert min(found) >= 0
    assert max(found) < num + spare


def test_more_canaries_than_parameters_are_refused() -> None:
    with pytest.raises(SettingError, match="101 gradient canaries do not fit 100 parameters") as caught:
        GradientCanaries.draw(101, 100, np.random.default_rng(0))
    assert "at most 100" in caught.value.remedy
    assert sorted(GradientCanaries.draw(100, 100, np.random.default_rng(0)).coordinates.tolist()) == list(range(100))


# Coins.

Draw = Callable[[int, np.random.Generator], Tensor]


def suspicious(draw: Draw, count: int = 20_000, runs: int = 6) -> list[str]:
    """What is wrong with coins that should be fair and independent: their share, neighbours, or two runs."""
    found = [draw(count, Seeds.reproducible(run).philox("canaries", "coins")) for run in range(runs)]
    neighbours = [(row[1:] == row[:-1])[::2] for row in found]
    other_runs = [one == other for one, other in zip(found[::2], found[1::2], strict=True)]
    signs = []
    for name, parts in (("share", found), ("neighbours", neighbours), ("runs", other_runs)):
        hits, tries = int(sum(part.sum() for part in parts)), sum(len(part) for part in parts)
        low, high = binom.ppf(FALSE_ALARM / 6, tries, 0.5), binom.isf(FALSE_ALARM / 6, tries, 0.5)
        signs += [] if low <= hits <= high else [name]
    return signs


def test_coins_are_fair_and_independent() -> None:
    assert suspicious(coins) == []
    assert coins(7, np.random.default_rng(0)).dtype == torch.bool


def biased(num: int, generator: np.random.Generator) -> Tensor:
    return torch.from_numpy(generator.random(num) < 0.53)


def sticky(num: int, generator: np.random.Generator) -> Tensor:
    return coins(num // 2, generator).repeat_interleave(2)


def alternating(num: int, generator: np.random.Generator) -> Tensor:
    return torch.arange(num) % 2 == 0


def repeated(num: int, generator: np.random.Generator) -> Tensor:
    return coins(num, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("draw", "signs"),
    [(biased, {"share"}), (sticky, {"neighbours"}), (alternating, {"neighbours", "runs"}), (repeated, {"runs"})],
)
def test_other_coins_are_caught(draw: Draw, signs: set[str]) -> None:
    assert signs <= set(suspicious(draw))


# The canaries of a run.

INFO = DatasetInfo("made up", (1, 8, 8), 10, 64, 1, tuple("0123456789"))


def test_a_runs_canaries_follow_from_its_seeds_alone() -> None:
    config = CanaryConfig(num=300)
    one, again = (draw_canaries(config, INFO, 650, Seeds.reproducible(3)) for _ in range(2))
    other = draw_canaries(config, INFO, 650, Seeds.reproducible(4))
    assert one.gradients is not None
    assert again.gradients is not None
    assert other.gradients is not None
    assert torch.equal(one.included, again.included)
    assert torch.equal(one.gradients.coordinates, again.gradients.coordinates)
    assert not torch.equal(one.included, other.included)
    assert not torch.equal(one.gradients.coordinates, other.gradients.coordinates)
    assert one.inputs is None


def test_coins_say_nothing_about_places_and_images() -> None:
    """Each has a stream of its own: a canary's coin is not to be read off its coordinate, pixels or label."""
    num, seeds = 20_000, Seeds.reproducible(8)
    gradient = draw_canaries(CanaryConfig(num=num), INFO, 10 * num, seeds)
    images = draw_canaries(CanaryConfig(num=num, kind="input"), INFO, 650, seeds)
    assert gradient.gradients is not None
    assert images.inputs is not None
    assert images.labels is not None
    assert torch.equal(gradient.included, images.included)
    seen = {
        "place": gradient.gradients.coordinates < 5 * num,
        "pixel": images.inputs[:, 0, 0, 0] > 0,
        "label": images.labels < 5,
    }
    low, high = binom.ppf(FALSE_ALARM / 6, num, 0.5), binom.isf(FALSE_ALARM / 6, num, 0.5)
    for name, side in seen.items():
        assert low <= int((side == gradient.included).sum()) <= high, name
    assert not low <= int((gradient.included == gradient.included).sum()) <= high


def test_input_canaries_are_black_and_white_with_any_label() -> None:
    found = draw_canaries(CanaryConfig(num=500, kind="input"), INFO, 0, Seeds.reproducible(1))
    assert found.gradients is None
    assert found.inputs is not None
    assert found.labels is not None
    assert found.inputs.shape == (500, 1, 8, 8)
    assert found.inputs.dtype == torch.float32
    assert found.inputs.unique().tolist() == [-1.0, 1.0]
    assert found.labels.unique().tolist() == list(range(10))
    # Copies of one image with two coins would tell on each other.
    assert len(found.inputs.flatten(1).unique(dim=0)) == 500
