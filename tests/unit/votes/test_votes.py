"""Certificates by vote: they agree with known distances, fail as rarely as they say, and refuse what voids them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import binom, norm
from torch import Tensor, nn

from stobatch.errors import DataError, ModelError, SettingError
from stobatch.types import PAPER_RANGE, UNIT_RANGE, InputRange, Norm, Radius, Status
from stobatch.votes.confidence import LOOK_EVERY, clopper_pearson
from stobatch.votes.counting import SmoothedClassifier, VoteCertificates, VoteSettings
from stobatch.votes.noise import GaussianNoise, HiddenGaussian, LaplaceNoise

FALSE_ALARM = 1e-9
WIDE = InputRange(-100, 100)
Floats = NDArray[np.float64]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class HalfSpace(nn.Module):
    """Class 0 where the first value is positive, else class 1."""

    def forward(self, inputs: Tensor) -> Tensor:
        first = inputs.flatten(1)[:, 0]
        return torch.stack([first, -first], 1)


class Tied(nn.Module):
    """Ten classes that N(0, 1) noise around 0 makes equally probable."""

    def forward(self, inputs: Tensor) -> Tensor:
        rank = (10 * torch.special.ndtr(inputs[:, 0])).long().clamp(0, 9)
        return nn.functional.one_hot(rank, 10).float()


def at_distances(*distances: float, d: int = 4) -> Tensor:
    inputs = torch.zeros(len(distances), d)
    inputs[:, 0] = torch.tensor(distances)
    return inputs


def half_space(draws: int = 2000, **changes: object) -> SmoothedClassifier:
    settings = VoteSettings(draws=draws).replace(**changes)
    return SmoothedClassifier(HalfSpace(), GaussianNoise(0.5), 2, settings, input_range=WIDE)


# What is answered


def test_radii_approach_the_distance_from_below_and_undecided_inputs_abstain() -> None:
    """False alarm: a radius beyond its distance has probability 1e-9 by the guarantee; the seed is fixed, too."""
    distances = (0.3, -0.3, 0.8, 0.0)
    verdicts = half_space(20_000, failure_probability=1e-9).certify(at_distances(*distances), seeded())
    assert verdicts.label[:3].tolist() == [0, 1, 0]
    assert verdicts.abstain.tolist() == [False, False, False, True]
    for size, distance in zip(verdicts.radius_l2[:3], np.abs(distances), strict=False):
        assert 0.85 * distance < size <= distance
    assert np.allclose(verdicts.radius_l1, verdicts.radius_l2)
    assert np.allclose(verdicts.radius_linf, verdicts.radius_l2 / 2)
    assert verdicts.radius_l2[3] == 0


def test_the_bound_is_clopper_pearson_on_the_counted_draws_alone() -> None:
    verdicts = half_space(500).certify(at_distances(50.0), seeded())
    expected, _ = clopper_pearson(np.array([500.0]), 500, 0.001)
    assert verdicts.top_lower == pytest.approx(expected)
    assert verdicts.draws.tolist() == [500]


def same(first: VoteCertificates, second: VoteCertificates) -> bool:
    pairs = zip(first.columns().values(), second.columns().values(), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("rows", [1, 7, 130, 100_000])
@pytest.mark.parametrize("radii", [None, [Radius(0.2, Norm.L2, WIDE)]], ids=["fixed", "settled"])
def test_answers_depend_on_the_generator_alone_not_on_the_memory(rows: int, radii: list[Radius] | None) -> None:
    inputs = at_distances(0.1, 0.2, 0.5, -0.7, 0.0)
    expected = half_space(330).certify(inputs, seeded(1), radii)
    assert same(half_space(330, rows_at_once=rows).certify(inputs, seeded(1), radii), expected)
    assert not same(half_space(330, rows_at_once=rows).certify(inputs, seeded(2), radii), expected)


def test_an_input_gets_the_same_answer_in_any_company() -> None:
    inputs = at_distances(0.1, 0.2, 0.5)
    together = half_space().certify(inputs, seeded(1))
    alone = half_space().certify(inputs[1:2], seeded(1))
    assert together.top_lower[1] == alone.top_lower[0]


def test_given_radii_are_decided_with_fewer_draws() -> None:
    """Clear inputs at failure probability 1e-9: each answer is wrong with at most that probability."""
    inputs, settings = at_distances(3.0, 0.45, 0.02, -3.0), {"failure_probability": 1e-9}
    asked = [Radius(0.15, Norm.L2, WIDE), Radius(0.75, Norm.L2, WIDE)]
    settled = half_space(20_000, **settings).certify(inputs, seeded(), asked)
    fixed = half_space(20_000, **settings).certify(inputs, seeded())
    for radius in asked:
        assert (settled.certified(radius) == fixed.certified(radius)).all()
    assert settled.certified(asked[0]).tolist() == [True, True, False, True]
    assert settled.certified(asked[1]).tolist() == [True, False, False, True]
    assert (settled.draws < 20_000 / 5).all()


def test_a_label_can_be_decided_without_a_radius() -> None:
    verdicts = half_space().certify(at_distances(0.3), seeded(), [Radius(0.0, Norm.L2, WIDE)])
    assert not verdicts.abstain[0]
    assert verdicts.draws[0] <= 5 * LOOK_EVERY


def test_a_radius_in_another_unit_is_converted() -> None:
    inputs = at_distances(1.0) / 2
    classifier = SmoothedClassifier(HalfSpace(), GaussianNoise(0.5), 2, VoteSettings(draws=2000))
    for unit, factor in ((PAPER_RANGE, 1.0), (UNIT_RANGE, 0.5)):
        asked = [Radius(0.2 * factor, Norm.L2, unit)]
        verdicts = classifier.certify(inputs, seeded(), asked)
        assert verdicts.certified(asked[0]).all()
        assert verdicts.range == PAPER_RANGE
        assert not verdicts.certified(Radius(10 * factor, Norm.L2, unit)).any()


def test_twice_the_range_and_the_noise_give_twice_the_radius() -> None:
    """Item 20: pixels in [0, 1] and the same pixels in [0, 2]."""
    inputs = at_distances(0.4, 0.9)
    narrow, wide = (
        SmoothedClassifier(HalfSpace(), GaussianNoise(0.5 * c), 2, input_range=InputRange(0, c)) for c in (1, 2)
    )
    first, second = narrow.certify(inputs, seeded()), wide.certify(2 * inputs, seeded())
    for norm_ in Norm:
        assert second.radius(norm_) == pytest.approx(2 * first.radius(norm_))
        asked = Radius(0.3, norm_, InputRange(0, 1))
        assert (first.certified(asked) == second.certified(asked)).all()


def test_noise_in_the_first_layer_proves_more_and_still_not_too_much() -> None:
    """The layer is one weight of 0.5: σ_eff = √(0.5² + (0.5/0.5)²) in front of the same half-space.

    At failure probability 1e-9 no radius exceeds its distance but for that chance.
    """
    layer = nn.Linear(4, 1, bias=False)
    layer.weight.data.copy_(torch.tensor([[0.5, 0.0, 0.0, 0.0]]))
    noise = HiddenGaussian.behind(layer, (4,), at_input=0.5, at_hidden=0.5)
    settings = VoteSettings(draws=20_000, failure_probability=1e-9)
    distances = np.array([0.5, 1.5])
    verdicts = SmoothedClassifier(HalfSpace(), noise, 2, settings, input_range=WIDE).certify(
        at_distances(*distances), seeded()
    )
    assert (verdicts.radius_l2 <= distances).all()
    assert (verdicts.radius_l2 > 0.8 * distances).all()
    expected = norm.cdf(distances / np.sqrt(0.5**2 + 1))
    assert verdicts.top_lower == pytest.approx(expected, abs=0.03)


def test_the_columns_say_what_they_mean() -> None:
    classifier = half_space()
    assert [kind.unit.norm for kind in classifier.kinds] == list(Norm)
    assert all(kind.status == Status.PROVED and kind.failure_probability == 0.001 for kind in classifier.kinds)
    columns = classifier.certify(at_distances(1.0), seeded()).columns()
    assert set(columns) == {"label", "abstain", "top_lower", "draws", "radius_l1", "radius_l2", "radius_linf"}


# How often it fails (item 20)

TRIALS = 500


def tied_classifier(failure: float = 0.05) -> SmoothedClassifier:
    settings = VoteSettings(failure_probability=failure, selection_draws=100, draws=200)
    return SmoothedClassifier(Tied(), GaussianNoise(1.0), 10, settings)


@pytest.mark.parametrize("radii", [None, [Radius(0.0, Norm.L2), Radius(0.5, Norm.L2)]], ids=["fixed", "settled"])
def test_the_bound_of_the_chosen_class_fails_as_rarely_as_stated(radii: list[Radius] | None) -> None:
    """Ten tied classes: the chosen one is chosen by luck, and its probability is 0.1 all the same.

    The alarm sounds beyond the 1e-9 quantile of a binomial law with the stated failure probability.
    """
    classifier, zero = tied_classifier(), torch.zeros(1, 1)
    bounds = [classifier.certify(zero, seeded(seed), radii).top_lower[0] for seed in range(TRIALS)]
    assert (np.array(bounds) > 0.1 + 1e-6).sum() <= binom.isf(FALSE_ALARM, TRIALS, 0.05)


def test_choosing_and_counting_on_the_same_draws_is_caught() -> None:
    """The broken twin of the test above: the lucky class is bounded by the draws that made it lucky."""
    counts = np.random.default_rng(0).multinomial(200, np.full(10, 0.1), TRIALS).max(1).astype(np.float64)
    lower, _ = clopper_pearson(counts, 200, 0.05)
    assert (lower > 0.1).sum() > binom.isf(FALSE_ALARM, TRIALS, 0.05)


@pytest.mark.parametrize("radii", [None, [Radius(0.0, Norm.L2)]], ids=["fixed", "settled"])
def test_two_tied_classes_are_told_apart_as_rarely_as_stated(radii: list[Radius] | None) -> None:
    """On the boundary every label without abstention is a failure; same alarm."""
    settings = VoteSettings(failure_probability=0.05, selection_draws=20, draws=300)
    classifier = SmoothedClassifier(HalfSpace(), GaussianNoise(1.0), 2, settings)
    answered = sum(not classifier.certify(torch.zeros(1, 1), seeded(s), radii).abstain[0] for s in range(TRIALS))
    assert answered <= binom.isf(FALSE_ALARM, TRIALS, 0.05)


def test_predictions_at_a_tie_abstain_as_rarely_wrong_as_stated() -> None:
    """Same alarm; the twin, a label from the leading count alone, would answer nearly always."""
    classifier, zero = tied_classifier(), torch.zeros(1, 1)
    answered = sum(not classifier.predict(zero, seeded(seed), draws=200)[1][0] for seed in range(TRIALS))
    assert answered <= binom.isf(FALSE_ALARM, TRIALS, 0.05)
    assert binom.isf(FALSE_ALARM, TRIALS, 0.05) < TRIALS / 2


def test_predictions_of_clear_inputs_are_given() -> None:
    """Both inputs are 4 deviations from the boundary: 100 draws disagree with probability below 1e-20."""
    label, abstain = half_space().predict(at_distances(2.0, -2.0), seeded(), draws=100)
    assert label.tolist() == [0, 1]
    assert not abstain.any()


# What is refused


class Scores(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.body(inputs)
        return out


class MeanOfBatch(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs - inputs.mean(0)


class NotANumber(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.where(inputs > 0.5, float("nan"))


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (nn.BatchNorm1d(4), "training mode"),
        (nn.BatchNorm1d(4, track_running_stats=False).eval(), "different scores in two batches"),
        (nn.Dropout(0.5), "different scores in two batches"),
        (MeanOfBatch(), "different scores in two batches"),
        (nn.Linear(4, 3), r"scores of shape \(4, 3\)"),
        (NotANumber(), "NaN or infinite"),
    ],
    ids=["batch norm", "batch statistics", "dropout", "mean", "shape", "nan"],
)
def test_networks_that_void_the_guarantee_are_refused(network: nn.Module, message: str) -> None:
    classifier = SmoothedClassifier(Scores(network), GaussianNoise(0.5), 4)
    with pytest.raises(ModelError, match=message):
        classifier.certify(torch.zeros(2, 4), seeded())


def test_batch_norm_with_fixed_statistics_is_a_per_example_layer() -> None:
    SmoothedClassifier(nn.BatchNorm1d(4).eval(), LaplaceNoise(0.5), 4).certify(torch.zeros(2, 4), seeded())


@pytest.mark.parametrize("value", [1.01, -1.01, float("nan"), float("inf")])
def test_inputs_outside_their_range_are_refused(value: float) -> None:
    classifier = SmoothedClassifier(HalfSpace(), GaussianNoise(0.5), 2)
    with pytest.raises(DataError, match="outside"):
        classifier.certify(torch.full((2, 4), value), seeded())
    with pytest.raises(DataError, match="no inputs"):
        classifier.certify(torch.zeros(0, 4), seeded())


@pytest.mark.parametrize("change", [{"draws": 0}, {"failure_probability": 1.0}, {"rows_at_once": 0}])
def test_settings_out_of_range_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(SettingError, match="not allowed"):
        VoteSettings(**change)
