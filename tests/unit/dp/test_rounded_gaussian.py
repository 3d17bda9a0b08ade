"""Noise on a grid: exactly a rounded normal number, whatever the machine, and rounding that commutes with shifts.

The oracle computes every draw in rational and arbitrary-precision arithmetic from the same bits. Seeds are fixed in
all statistical tests; for a random seed each would raise a false alarm with a probability of 1e-9.
"""

from __future__ import annotations

import hashlib
import math
import sys
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import binom, chi2, norm
from support.noise_checks import FALSE_ALARM, dependent, not_gaussian

from stobatch.dp import noise as rounded_gaussian
from stobatch.dp.noise import COARSEST, FINEST, Grid, rounded_normal
from stobatch.seeds import BLOCK, Seeds, Stream
from stobatch.training.exact_sum import ExactSum

KEY = b"0123456789abcdef0123456789abcdef"


def stream(name: str = "noise") -> Stream:
    return Seeds.reproducible(7).stream(name)


def words_of(key: bytes, block: int, count: int) -> list[int]:
    """The words of a block, written down from the definition."""
    label = b"stobatch 1    words" + block.to_bytes(16, "little")
    content = hashlib.shake_256(label + key).digest(8 * count)
    return [int.from_bytes(content[8 * i : 8 * i + 8], "little") for i in range(count)]


def slow_draws(key: bytes, count: int, stddev: float, step: float) -> list[int]:
    """round(stddev · √(-2 ln U) cos θ / step) and its twin, with 600 bits of U and θ and 500 digits."""
    found: list[int] = []
    with mpmath.workprec(900):
        for block, start in enumerate(range(0, count, BLOCK)):
            size = min(BLOCK, count - start + count % 2)
            words = words_of(key, block, size)
            cosines, sines = [], []
            for pair in range(size // 2):
                bits = []
                for place in (pair, size // 2 + pair):
                    label = b"stobatch 1  further" + (BLOCK * block + place).to_bytes(16, "little")
                    more = int.from_bytes(hashlib.shake_256(label + key).digest(64), "big")
                    word = words[place]
                    bits.append(((word - 2**64 if place >= size // 2 and word >= 2**63 else word) << 512) + more)
                radius = mpmath.sqrt(-2 * mpmath.log(mpmath.mpf(bits[0]) / mpmath.mpf(2) ** 576))
                angle = mpmath.pi * mpmath.mpf(bits[1]) / mpmath.mpf(2) ** 575
                scale = mpmath.mpf(stddev) / mpmath.mpf(step) * radius
                cosines.append(int(mpmath.nint(scale * mpmath.cos(angle))))
                sines.append(int(mpmath.nint(scale * mpmath.sin(angle))))
            found += cosines + sines
    return found[:count]


def steps_of(values: NDArray[np.float64], step: float) -> list[int]:
    return [int(value) for value in values / step]


@pytest.mark.parametrize("count", [1, 2, 7, 400])
@pytest.mark.parametrize("stddev", [1.0, 0.7309, 1e-7, 1234.5])
def test_every_draw_is_the_rounded_normal_number_of_its_bits(count: int, stddev: float) -> None:
    step = Grid.for_noise(stddev).step
    assert steps_of(rounded_normal(Stream(KEY), count, stddev, step), step) == slow_draws(KEY, count, stddev, step)


def test_draws_beyond_a_block_are_right_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """With short blocks; the last one is shorter."""
    for module in (rounded_gaussian, sys.modules["stobatch.seeds"], sys.modules[__name__]):
        monkeypatch.setattr(module, "BLOCK", 64)
    step = Grid.for_noise(1.3).step
    assert steps_of(rounded_normal(Stream(KEY), 151, 1.3, step), step) == slow_draws(KEY, 151, 1.3, step)


@pytest.mark.parametrize("grid", [-44, -47, -49])
def test_draws_that_float64_cannot_decide_are_right(grid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On finer and finer grids more and more of them, and on the last one all, take the slow way."""
    slow, certain = list[int](), rounded_gaussian.round_exactly

    def counted(*given: Any) -> float:
        slow.append(given[-1])
        return certain(*given)

    monkeypatch.setattr(rounded_gaussian, "round_exactly", counted)
    found = rounded_normal(Stream(KEY), 300, 1.0, 2.0**grid)
    assert steps_of(found, 2.0**grid) == slow_draws(KEY, 300, 1.0, 2.0**grid)
    assert len(slow) >= {-44: 10, -47: 90, -49: 270}[grid]


def nearest_of_float64(words: NDArray[np.uint64], ratio: float) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """The broken twin: float64 is trusted."""
    return _round_fast(words, ratio)[0], np.array([], dtype=np.int64)


_round_fast = rounded_gaussian._round_fast


def test_trusting_float64_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounded_gaussian, "_round_fast", nearest_of_float64)
    found = rounded_normal(Stream(KEY), 2000, 1.0, 2.0**-47)
    assert steps_of(found, 2.0**-47) != slow_draws(KEY, 2000, 1.0, 2.0**-47)


class Forced(Stream):
    """Words that are chosen, and further bits that may be: 512 of the angle's, and zeros for the radius."""

    def __init__(self, words: list[int], further: int | None = None) -> None:
        super().__init__(KEY)
        self.chosen_words, self.further = words, further
        self.asked: list[int] = []

    def blocks(self, count: int) -> Any:
        yield np.array(self.chosen_words[:count], dtype=np.uint64)

    def further_bits(self, position: int, words: int) -> int:
        self.asked.append(words)
        if self.further is None:
            return super().further_bits(position, words)
        return self.further >> (512 - 64 * words) if position else 0


@pytest.mark.parametrize("word", [0, 1, 2**20, 2**63, 2**64 - 1])
@pytest.mark.parametrize("turn", [0, 1, 2**62, 2**63, 2**64 - 1])
def test_the_ends_of_the_range_are_decided_by_further_bits(word: int, turn: int) -> None:
    """U next to 0 or 1, and angles at which a cosine or a sine vanishes."""
    forced = Forced([word, turn])
    found = rounded_normal(forced, 2, 1.0, 2.0**-32)
    with mpmath.workprec(900):
        bits = [(word << 512) + Stream.further_bits(forced, 0, 8)]
        bits.append(((turn - 2**64 if turn >= 2**63 else turn) << 512) + Stream.further_bits(forced, 1, 8))
        radius = mpmath.sqrt(-2 * mpmath.log(mpmath.mpf(bits[0]) / mpmath.mpf(2) ** 576)) * 2**32
        angle = mpmath.pi * mpmath.mpf(bits[1]) / mpmath.mpf(2) ** 575
        exact = [int(mpmath.nint(radius * part(angle))) for part in (mpmath.cos, mpmath.sin)]
    assert steps_of(found, 2.0**-32) == exact


def test_a_number_next_to_a_boundary_is_decided_by_further_bits() -> None:
    """θ is chosen so that R cos θ / step lies within 2⁻²⁰⁰ of a half; more and more bits are asked for."""
    with mpmath.workprec(1200):
        word = 2**62 + 12345
        uniform = mpmath.mpf((word << 512) + 0) / mpmath.mpf(2) ** 576
        radius = mpmath.sqrt(-2 * mpmath.log(uniform))
        target = (mpmath.mpf(2**31) + mpmath.mpf(0.5)) / mpmath.mpf(2**32)
        turn = mpmath.acos(target / radius) / mpmath.pi * mpmath.mpf(2) ** 575
        for side in (-1, 1):
            bits = int(mpmath.floor(turn)) - side * 2**300
            leading, further = divmod(bits, 2**512)

            near = Forced([word, leading], further)
            found = rounded_normal(near, 1, 1.0, 2.0**-32)
            assert steps_of(found, 2.0**-32) == [2**31 + (1 if side > 0 else 0)]
            assert max(near.asked) >= 3


# Its law.


def test_the_law_is_normal_in_its_middle_and_in_its_tails() -> None:
    values = torch.from_numpy(rounded_normal(stream(), 400_000, 1.5, Grid.for_noise(1.5).step))
    assert not not_gaussian(values, 1.5)
    for deviations in (3.0, 4.0):
        beyond, chance = int((values.abs() > 1.5 * deviations).sum()), 2 * norm.sf(deviations)
        low, high = binom.ppf(FALSE_ALARM / 2, len(values), chance), binom.isf(FALSE_ALARM / 2, len(values), chance)
        assert low <= beyond <= high


def suspicious_cells(steps: NDArray[np.float64], stddev: float) -> bool:
    """Pearson's test of the probabilities of single multiples of a coarse grid, which a rounded normal number has."""
    cells = np.arange(-4, 5)
    edges = np.concatenate([[-np.inf], cells[:-1] + 0.5, [np.inf]]) / stddev
    expected = np.diff(norm.cdf(edges)) * len(steps)
    seen = np.array([(np.clip(steps, -4, 4) == cell).sum() for cell in cells])
    return bool(((seen - expected) ** 2 / expected).sum() > chi2.isf(FALSE_ALARM, len(cells) - 1))


def test_single_multiples_have_the_probabilities_of_a_rounded_normal_number() -> None:
    drawn = rounded_normal(stream(), 200_000, 1.2, 1.0)
    assert not suspicious_cells(drawn, 1.2)
    # Broken twins: rounding down and half a step up, too little noise, and a Laplace number.
    assert suspicious_cells(np.floor(rounded_normal(stream(), 200_000, 1.2, 2.0**-20)) + 1, 1.2)
    assert suspicious_cells(rounded_normal(stream(), 200_000, 1.15, 1.0), 1.2)
    laplace = np.random.default_rng(0).laplace(0, 1.2 / math.sqrt(2), 200_000)
    assert suspicious_cells(np.rint(laplace), 1.2)


def test_low_bits_of_the_multiple_are_fair_whatever_its_size() -> None:
    """In floating point the last bits of large numbers are zeros; here the last binary digit is a coin everywhere."""
    step = Grid.for_noise(1.0).step
    drawn = np.abs(rounded_normal(stream(), 100_000, 1.0, step) / step)
    for large in (drawn < 2**31, drawn >= 2**32):
        odd, count = int((drawn[large] % 2).sum()), int(large.sum())
        assert binom.ppf(FALSE_ALARM / 2, count, 0.5) <= odd <= binom.isf(FALSE_ALARM / 2, count, 0.5)
    floats = np.abs(np.random.default_rng(0).standard_normal(100_000)) * 2.0**52
    assert not (floats[floats >= 2.0**53] % 2).any(), "which tells it from numbers that float64 rounds"


def test_cosines_sines_and_names_are_independent() -> None:
    drawn = torch.from_numpy(rounded_normal(stream(), 40_000, 1.0, 2.0**-32))
    other = torch.from_numpy(rounded_normal(stream("other"), 20_000, 1.0, 2.0**-32))
    parts = [*drawn.split(20_000), drawn.abs().split(20_000)[0] - drawn.abs().median(), other]
    assert not dependent(parts)
    assert dependent([*parts, drawn[:20_000]])


# The same bits everywhere.

RECORDED = "1b67dcdc47d4d6abce033cc7be83bfda1f0654da77091175603345139f69452d"


def test_the_noise_is_the_recorded_one() -> None:
    """Recorded once. Log, sin and cos round differently on other vector units; the noise does not."""
    drawn = rounded_normal(Stream(b"k" * 32), 100_000, 1.3, 2.0**-34)
    assert hashlib.sha256(drawn.tobytes()).hexdigest() == RECORDED


# Rounding commutes with shifts, and costs next to nothing.


@settings(max_examples=100)
@example(exponent=-24, noise=0, shift=1, parts=[0.2199999988079071])
@given(
    exponent=st.integers(-60, -24),
    noise=st.integers(-(2**36), 2**36),
    shift=st.integers(-(2**20), 2**20),
    parts=st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=6),
)
def test_a_sum_and_its_noise_are_rounded_as_the_sum_alone(
    exponent: int, noise: int, shift: int, parts: list[float]
) -> None:
    """round(s + n) = round(s) + n for n on the grid, in the sum that training uses, whatever the order."""
    grid = Grid(2.0**exponent)

    def total(*values: float) -> Fraction:
        sums = ExactSum({"x": torch.zeros(1, dtype=torch.float64)}, grid)
        for value in values:
            sums.add({"x": torch.tensor([value], dtype=torch.float64)})
        return Fraction(sums.mean(1)["x"].item())

    alone = total(*parts)
    assert alone / Fraction(grid.step) == int(alone / Fraction(grid.step))
    exact = sum((Fraction(part) for part in parts), Fraction(0))
    slack = Fraction(2) ** -53 * 64 + len(parts) * Fraction(2) ** -65
    assert abs(alone - exact) <= Fraction(grid.step) / 2 + slack
    offset = (noise + shift) * grid.step
    if abs(float(alone) + offset) < 2.0**52 * grid.step:
        assert total(*parts, offset) == alone + Fraction(offset) == total(offset, *reversed(parts))


def test_rounding_puts_at_most_a_step_between_two_sums_in_each_value() -> None:
    """A search for two sums, one example apart, that rounding drives further apart than C + √d · step."""
    generator, worst = torch.Generator().manual_seed(0), 0.0
    grid, size = Grid(2.0**-24), 400
    for _ in range(200):
        base, added = torch.randn(2, size, generator=generator, dtype=torch.float64)
        # Next to a boundary, where rounding does most.
        base = (base / grid.step).floor().add(0.5).mul(grid.step) - 2.0**-50
        added = added / added.norm() * 1e-7
        sums = []
        for parts in ((base,), (base, added)):
            total = ExactSum({"x": torch.zeros(size, dtype=torch.float64)}, grid)
            for part in parts:
                total.add({"x": part})
            sums.append(total.mean(1)["x"])
        worst = max(worst, float((sums[1] - sums[0]).norm()))
        assert worst <= 1e-7 + math.sqrt(size) * grid.step
    assert worst > 1e-7 + 0.3 * math.sqrt(size) * grid.step, "the allowance is needed"


@pytest.mark.parametrize("stddev", [1e-30, 1e-9, 0.01, 1.0, 100.0, 1e9])
def test_steps_are_powers_of_two_that_sums_are_exact_on(stddev: float) -> None:
    step = Grid.for_noise(stddev).step
    assert math.frexp(step)[0] == 0.5
    assert FINEST <= step <= COARSEST
    assert 2**32 <= stddev / step < 2**33 or step in (FINEST, COARSEST)


def half_to_even(sums: ExactSum, count: int) -> dict[str, torch.Tensor]:
    """The broken twin: the usual rounding, which sends a half to its even neighbour."""
    assert sums.grid is not None
    step, (coarse, fine) = sums.grid.step, sums.buffer
    return {"x": ((coarse + fine) / step).round() * step}


def test_rounding_halves_to_even_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ExactSum, "mean", half_to_even)
    with pytest.raises(AssertionError):
        test_a_sum_and_its_noise_are_rounded_as_the_sum_alone()


def test_a_grid_that_float64_cannot_count_on_is_refused() -> None:
    with pytest.raises(ValueError, match="float64"):
        rounded_normal(stream(), 5, 1.0, 2.0**-50)


def test_no_noise_is_nothing() -> None:
    assert not rounded_normal(stream(), 5, 0.0, 2.0**-30).any()
    assert rounded_normal(stream(), 0, 1.0, 2.0**-30).shape == (0,)


# Samples.


@pytest.mark.parametrize("rate", [0.0, 2.0**-70, 1e-19, 1 / 3, 0.5, 1 - 2.0**-53, 1.0])
def test_a_sampling_rate_is_never_exceeded(rate: float) -> None:
    """The words that are chosen are those below the largest threshold that does not exceed the rate."""
    threshold = int(Fraction(rate) * 2**64)
    assert threshold <= Fraction(rate) * 2**64 < threshold + 1
    edges = sorted({0, 1, max(0, threshold - 1), threshold, threshold + 1, 2**64 - 1})
    edges = [edge for edge in edges if edge < 2**64]
    found = Forced(edges).choose(len(edges), rate)
    assert found.tolist() == [edge < threshold for edge in edges]


def test_streams_are_read_by_position() -> None:
    whole = np.concatenate(list(Stream(KEY).blocks(BLOCK + 10)))
    assert [int(word) for word in whole[:5]] == words_of(KEY, 0, 5)
    assert [int(word) for word in whole[BLOCK:]] == words_of(KEY, 1, 10)
    assert Stream(KEY).further_bits(3, 2) >> 64 == Stream(KEY).further_bits(3, 1)
