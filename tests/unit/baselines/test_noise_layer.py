"""Noise in the first layer: how far it reaches, what PixelDP's rule makes of it, and networks of known distance."""

from __future__ import annotations

from math import exp, sqrt

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import binom, kstwo, laplace, norm
from support.noise_checks import FALSE_ALARM, not_gaussian
from torch import Tensor, nn

from stobatch.baselines import noise_layer, noise_layer_verifier
from stobatch.baselines.noise_layer import LayerGaussian, LayerLaplace, LayerNoise, layer_sensitivity
from stobatch.baselines.noise_layer_verifier import DELTAS, NoiseLayerVerifier, margin_epsilon, published_radius
from stobatch.config import CertificationConfig, ModelConfig
from stobatch.dp.gaussian import CALIBRATIONS, Analytic, Calibration, Classical, Extended, heterogeneous_stddevs
from stobatch.errors import DataError, ModelError, SettingError
from stobatch.models import ConvEncoder, DenseEncoder, Head, Network, build
from stobatch.published.radius import is_robust
from stobatch.types import Norm, Status
from stobatch.votes.confidence import clopper_pearson
from stobatch.votes.margins import hidden_shift

Floats = NDArray[np.float64]
NORMS = list(Norm)
ORDER = {Norm.L1: 1.0, Norm.L2: 2.0, Norm.LINF: float("inf")}
DUAL = {Norm.L1: float("inf"), Norm.L2: 2.0, Norm.LINF: 1.0}
RULES: list[Calibration | None] = [*CALIBRATIONS.values(), None]
NAMES = [*CALIBRATIONS, "laplace"]
norms = st.sampled_from(NORMS)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def dense(A: Floats) -> DenseEncoder:
    encoder = DenseEncoder((A.shape[1],), A.shape[0]).double()
    encoder.weight.data.copy_(torch.from_numpy(A))
    return encoder


def gaussian(A: Floats, stddev: Floats | float) -> LayerGaussian:
    return LayerGaussian(dense(A), torch.as_tensor(stddev, dtype=torch.float64))


def noise_for(rule: Calibration | None, A: Floats, stddev: Floats) -> LayerNoise:
    return LayerLaplace(dense(A), float(stddev.mean())) if rule is None else gaussian(A, stddev)


def random_layer(random: np.random.Generator) -> tuple[Floats, Floats]:
    """Weights, and a standard deviation for each hidden value."""
    rows, columns = random.integers(1, 7, 2)
    return random.normal(size=(rows, columns)) * random.uniform(0.1, 3), random.uniform(0.05, 2, rows)


def moves_of_unit_size(norm_: Norm, scaled: Floats, random: np.random.Generator) -> Floats:
    """Random ones, spikes, signs, and singular directions, which are the worst in l2."""
    d = scaled.shape[1]
    some = np.concatenate([random.normal(size=(20, d)), np.eye(d), np.linalg.svd(scaled)[2]])
    moves = np.concatenate([some, np.sign(some)])
    return moves / np.linalg.norm(moves, ord=ORDER[norm_], axis=1, keepdims=True)


# How far a perturbation moves the layer


def excess_over_the_reach(mistake: str = "") -> dict[Norm, float]:
    """The largest share of the claimed deviations that a perturbation of unit size causes, over 500 random layers."""
    random, worst = np.random.default_rng(0), dict.fromkeys(NORMS, 0.0)
    for _ in range(500):
        A, stddev = random_layer(random)
        claimed = np.full_like(stddev, stddev.mean()) if mistake == "mean deviation" else stddev
        for norm_ in NORMS:
            from_ = Norm.L2 if mistake == "l2 for all" else norm_
            deviations = 1 / gaussian(A, claimed).factors(from_, A.shape[1]).per_deviation
            scaled = A / stddev[:, None]
            caused = np.linalg.norm(moves_of_unit_size(norm_, scaled, random) @ scaled.T, axis=1).max()
            worst[norm_] = max(worst[norm_], caused / deviations)
    return worst


def test_no_perturbation_causes_more_deviations_than_claimed() -> None:
    """And the worst of l1 and l2 cause just as many."""
    worst = excess_over_the_reach()
    assert max(worst.values()) <= 1
    assert worst[Norm.L1] == pytest.approx(1, abs=1e-8)
    assert worst[Norm.L2] == pytest.approx(1, abs=1e-8)


@pytest.mark.parametrize("mistake", ["mean deviation", "l2 for all"])
def test_wrong_reaches_are_exceeded(mistake: str) -> None:
    """The broken twins: one deviation, the mean, for all; and the l2 reach read as that of l-infinity."""
    assert excess_over_the_reach(mistake)[Norm.LINF] > 1.5


@given(st.integers(0, 2**32 - 1))
def test_in_l2_every_layer_is_reached_exactly(seed: int) -> None:
    A, stddev = random_layer(np.random.default_rng(seed))
    expected = np.linalg.norm(A / stddev[:, None], 2)
    assert gaussian(A, stddev).factors(Norm.L2, A.shape[1]).per_deviation == pytest.approx(1 / expected, rel=1e-6)


@given(st.integers(0, 2**32 - 1))
def test_in_linf_one_neuron_and_one_input_are_reached_exactly(seed: int) -> None:
    """With one neuron the sum over |G| is the square of the row sum; with one input all norms agree."""
    weights = np.random.default_rng(seed).normal(size=(1, 5))
    assert 1 / gaussian(weights, 0.5).factors(Norm.LINF, 5).per_deviation == pytest.approx(np.abs(weights).sum() / 0.5)
    for norm_ in NORMS:
        found = gaussian(weights.T, 0.5).factors(norm_, 1).per_deviation
        assert 1 / found == pytest.approx(np.linalg.norm(weights) / 0.5)


def test_a_convolution_counts_as_its_matrix_with_a_deviation_for_each_position() -> None:
    torch.manual_seed(0)
    conv = ConvEncoder((2, 6, 6), 3, 3, stride=2, padding=1).double()
    stddev = torch.rand(conv.hidden_shape, dtype=torch.float64) + 0.1
    with torch.no_grad():
        A = conv(torch.eye(72, dtype=torch.float64).reshape(72, 2, 6, 6)).flatten(1).t().numpy()
    found, expected = LayerGaussian(conv, stddev), gaussian(A, stddev.flatten().numpy())
    for norm_ in NORMS:
        assert found.factors(norm_, 72).per_deviation == pytest.approx(expected.factors(norm_, 72).per_deviation)


def test_large_inputs_get_a_bound_that_is_no_worse_than_the_layer_over_its_least_deviation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    random = np.random.default_rng(0)
    for _ in range(100):
        A, stddev = random_layer(random)
        exact = layer_sensitivity(dense(A), torch.from_numpy(stddev))
        with monkeypatch.context() as patch:
            patch.setattr(noise_layer, "EXACT_SPECTRUM_UP_TO", 0)
            bound = layer_sensitivity(dense(A), torch.from_numpy(stddev))
        schur = sqrt(np.abs(A).sum(0).max() * np.abs(A).sum(1).max()) / stddev.min()
        assert exact[Norm.L2] <= bound[Norm.L2] <= schur * (1 + 1e-8)
        assert exact[Norm.LINF] <= bound[Norm.LINF] * (1 + 1e-8)
        assert exact[Norm.L1] == bound[Norm.L1]


@pytest.mark.parametrize("norm_", NORMS)
def test_laplace_noise_reaches_as_far_as_the_norms_of_the_layer_say(norm_: Norm) -> None:
    A, _ = random_layer(np.random.default_rng(3))
    shift, found = hidden_shift(norm_, dense(A)), LayerLaplace(dense(A), 0.7).factors(norm_, A.shape[1])
    assert found.per_epsilon == pytest.approx(0.7 / shift.l1)
    assert found.per_deviation == pytest.approx(sqrt(2 / np.pi) * 0.7 / shift.l2)


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_a_layer_without_weights_hides_everything_and_divides_by_nothing(rule: Calibration | None) -> None:
    noise = noise_for(rule, np.zeros((3, 4)), np.ones(3))
    for norm_ in NORMS:
        for size in (
            published_radius(noise, rule, norm_, np.array([0.9]), np.array([0.1])),
            noise.radius(norm_, np.array([0.9]), np.array([0.1]), 4),
        ):
            assert np.isfinite(size).all()
            assert (size > 1e100).all()


def test_noise_calibrated_to_the_sensitivity_certifies_what_it_was_made_for() -> None:
    """Uneven noise that is (1, 0.05)-DP for l2 moves of size 0.3: with a margin for that, the rule proves 0.3."""
    A, shares = np.random.default_rng(0).normal(size=(5, 4)), torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    unit = heterogeneous_stddevs(1.0, shares)
    delta = DELTAS[np.abs(DELTAS - 0.05).argmin()]
    runner_up = np.array([0.02])
    top = exp(2) * runner_up + (1 + exp(1)) * delta
    for rule in CALIBRATIONS.values():
        sigma = rule.stddev(1.0, delta, 0.3 * layer_sensitivity(dense(A), unit)[Norm.L2])
        noise = LayerGaussian(dense(A), sigma * unit)
        assert published_radius(noise, rule, Norm.L2, top, runner_up)[0] >= 0.3 * (1 - 1e-6)
    assert published_radius(noise, Analytic(), Norm.L2, top, runner_up)[0] < 0.33


# The published rule


def slow_limit(rule: Calibration | None, top: float, runner_up: float) -> float:
    """By bisection for ε in the rule as printed, δ by δ; in units of the sensitivity that unit noise can hide."""
    best = 0.0
    for delta in [0.0] if rule is None else DELTAS:
        low, high = 0.0, 40.0
        if not is_robust(top, runner_up, low, delta):
            continue
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if is_robust(top, runner_up, middle, delta) else (low, middle)
        if rule is None:
            best = max(best, low)
        elif low > 0:
            best = max(best, 1 / rule.stddev(min(low, rule.largest_epsilon), delta, 1.0))
    return best


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_the_published_radius_is_that_of_a_slow_search(rule: Calibration | None) -> None:
    random = np.random.default_rng(0)
    A, stddev = random_layer(random)
    noise = noise_for(rule, A, stddev)
    top = np.array([0.9, 0.6, 0.51, 0.35, 0.999, 0.3, 0.7])
    runner_up = np.array([0.1, 0.2, 0.49, 0.3, 0.001, 0.4, 1e-6])
    limits = np.array([slow_limit(rule, p, q) for p, q in zip(top, runner_up, strict=True)])
    for norm_ in NORMS:
        reach = noise.factors(norm_, A.shape[1])
        expected = (reach.per_epsilon if rule is None else reach.per_deviation) * limits
        assert published_radius(noise, rule, norm_, top, runner_up) == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert limits[-2] == 0


def test_a_margin_of_one_epsilon_is_caught() -> None:
    """The broken twin: e^ε in place of e^{2ε} gives a larger ε than the rule as printed allows."""
    epsilon = np.log((0.9 - 0.01) / (0.1 + 0.01))
    assert not is_robust(0.9, 0.1, float(epsilon), 0.01)
    found = float(margin_epsilon(np.array(0.9), np.array(0.1), np.array(0.01)))
    assert is_robust(0.9, 0.1, found - 1e-9, 0.01)
    assert not is_robust(0.9, 0.1, found + 1e-9, 0.01)


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_the_published_rule_never_proves_more_than_the_exact_one(rule: Calibration | None) -> None:
    """2000 pairs of bounds, the extremes of both included; p_A + p_B <= 1, as the verifier sees to."""
    random = np.random.default_rng(0)
    top = np.concatenate([random.uniform(0, 1, 1000), 1 - 10 ** random.uniform(-17, 0, 1000), [1.0, 0.5]])
    runner_up = (1 - top) * np.concatenate([random.uniform(0, 1, 1000), np.ones(1000), [1.0, 1.0]])
    noise = noise_for(rule, np.ones((2, 3)), np.array([0.5, 2.0]))
    for norm_ in NORMS if rule is None else [Norm.LINF]:  # Laplace noise has two measures, which take turns
        published = published_radius(noise, rule, norm_, top, runner_up)
        assert (published <= noise.radius(norm_, top, runner_up, 3) * (1 + 1e-9)).all()
        assert (published[top <= runner_up] == 0).all()
        assert (published > 0).mean() > 0.4


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.floats(0.05, 0.999), st.floats(0, 1), st.floats(0, 1), norms)
def test_published_radii_grow_with_votes_and_shrink_with_the_runner_up(
    rule: Calibration | None, seed: int, top: float, share: float, more: float, norm_: Norm
) -> None:
    noise, runner_up = noise_for(rule, *random_layer(np.random.default_rng(seed))), share * (1 - top)
    tops, others = np.array([top, top, top + more * (1 - top)]), np.array([runner_up, runner_up * more, runner_up])
    found = published_radius(noise, rule, norm_, tops, others)
    assert (found[1:] >= found[0] * (1 - 1e-9)).all()


def test_the_better_theorem_proves_more() -> None:
    noise, top, runner_up = gaussian(np.eye(3), 1.0), np.array([0.99]), np.array([0.005])
    classical, extended, analytic = (
        float(published_radius(noise, rule, Norm.L2, top, runner_up)[0])
        for rule in (Classical(), Extended(), Analytic())
    )
    assert classical < extended < analytic < float(noise.radius(Norm.L2, top, runner_up, 3)[0])


def test_more_values_of_delta_would_hardly_prove_more(monkeypatch: pytest.MonkeyPatch) -> None:
    noise, top = gaussian(np.eye(2), 1.0), np.linspace(0.6, 0.999, 60)
    coarse = {name: published_radius(noise, rule, Norm.L2, top, 1 - top) for name, rule in CALIBRATIONS.items()}
    monkeypatch.setattr(noise_layer_verifier, "DELTAS", np.geomspace(DELTAS[0], DELTAS[-1], 10 * len(DELTAS) - 9))
    for name, rule in CALIBRATIONS.items():
        fine = published_radius(noise, rule, Norm.L2, top, 1 - top)
        assert (coarse[name] <= fine * (1 + 1e-9)).all()
        assert (fine <= coarse[name] * 1.02).all()


# Networks of known distance


def two_classes(A: Floats, q: Floats) -> Network:
    """Class 0 where q·(Ax + noise) > 0, else class 1."""
    body, output = nn.Linear(len(q), 1, bias=False), nn.Linear(1, 2, bias=False)
    body.weight.data.copy_(torch.from_numpy(q[None]))
    output.weight.data.copy_(torch.tensor([[1.0], [-1.0]]))
    return Network(dense(A), Head(nn.Identity(), body, output)).double().requires_grad_(False)


def verifier_of(
    network: Network, noise: LayerNoise, norm_: Norm = Norm.L2, draws: int = 2000, failure: float = 0.05
) -> NoiseLayerVerifier:
    certification = CertificationConfig(noise_draws=draws, failure_probability=failure)
    rule = None if isinstance(noise, LayerLaplace) else Analytic()
    return NoiseLayerVerifier(network, noise, rule, norm_, certification, source="a test")


LAYER = np.array([[2.0, 0.0, 0.0], [0.0, 1.0, 0.5], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
STDDEV = np.array([0.1, 0.8, 1.5, 3.0])
TOWARDS = np.array([1.0, 0.0, 0.0, 0.0])
"""The class hangs on the hidden value that has the least noise."""


def at(*firsts: float) -> Tensor:
    inputs = torch.zeros(len(firsts), 3, dtype=torch.float64)
    inputs[:, 0] = torch.tensor(firsts)
    return inputs


@pytest.mark.parametrize("norm_", NORMS)
@pytest.mark.parametrize("kind", ["gaussian", "laplace"])
def test_radii_never_exceed_the_distance_to_the_other_class(kind: str, norm_: Norm) -> None:
    """Each certificate may fail with 1e-12, so that 20 runs of 5 inputs raise a false alarm with less than 1e-9."""
    network, inputs = two_classes(LAYER, TOWARDS), at(0.03, 0.06, -0.09, 0.5, 0.0)
    noise = gaussian(LAYER, STDDEV) if kind == "gaussian" else LayerLaplace(dense(LAYER), 0.1)
    distance = np.abs(inputs[:, 0].numpy())
    for seed in range(20):
        found = verifier_of(network, noise, norm_, 1000, 1e-12).verify(inputs, seeded(seed))
        assert (found.radii["published"] <= found.radii["tight"]).all()
        assert (found.radii["tight"] <= distance).all()
        assert found.abstain.tolist() == (found.top_lower <= found.runner_up_upper).tolist()
        assert found.abstain[-1]
        assert found.label[1:4].tolist() == [0, 1, 0]


def test_in_l2_the_exact_radius_approaches_the_distance() -> None:
    """q·A is the direction that the least noise hides worst; Z from 50,000 draws is within 10% but for 1e-9."""
    network, noise = two_classes(LAYER, TOWARDS), gaussian(LAYER, STDDEV)
    found = verifier_of(network, noise, draws=50_000, failure=1e-9).verify(at(0.05), seeded())
    assert 0.045 - 0.002 < found.radii["tight"][0] <= 0.05


def test_the_formula_of_even_noise_used_for_uneven_noise_is_caught() -> None:
    """The broken twin: the mean deviation over the layer's norm certifies beyond the other class."""
    network, noise = two_classes(LAYER, TOWARDS), gaussian(LAYER, STDDEV)
    found = verifier_of(network, noise, failure=1e-12).verify(at(0.06), seeded())
    wrong = gaussian(LAYER, STDDEV.mean()).radius(Norm.L2, found.top_lower, found.runner_up_upper, 3)
    assert wrong[0] > 5 * 0.06
    assert found.radii["tight"][0] <= 0.06


TRIALS = 600


def test_an_input_on_the_boundary_is_decided_as_rarely_as_stated() -> None:
    """Both classes have probability 1/2, so every decision is a failure.

    The alarm sounds beyond the 1e-9 quantile of a binomial law with the stated failure probability. The class is
    chosen on the counted draws: the twin, which spends all of the probability on one bound of the chosen class, fails
    nearly twice as often as stated and is caught.
    """
    verifier = verifier_of(two_classes(LAYER, TOWARDS), gaussian(LAYER, STDDEV), draws=200, failure=0.2)
    counts = [verifier.counter(at(0.0)).votes(np.arange(1), 200, seeded(seed)) for seed in range(TRIALS)]
    votes, most = torch.cat(counts).double().numpy(), binom.isf(FALSE_ALARM, TRIALS, 0.2)
    assert 0 < (~verifier.judge(votes).abstain).sum() <= most
    lower, _ = clopper_pearson(votes.max(1), 200, 0.2)
    assert (lower > 0.5).sum() > most


def test_reading_an_l2_radius_as_one_of_linf_is_refuted_by_an_example() -> None:
    """64 inputs that count alike: the other class is 0.8 away in l2 and 0.1 in l-infinity.

    At every point asked about one draw names the class with probability above 0.9, so the majority of 2000 errs with
    less than 1e-100.
    """
    d = 64
    network, noise = two_classes(np.eye(d), np.ones(d)), gaussian(np.eye(d), 0.2)
    verifier = verifier_of(network, noise, Norm.LINF, failure=1e-9)
    inputs = torch.full((1, d), 0.1, dtype=torch.float64)
    found = verifier.verify(inputs, seeded())
    claimed, published, tight = (float(found.radii[name][0]) for name in ("as compared", "published", "tight"))
    assert found.label[0] == 0
    assert 0 < published <= tight <= 0.1 < claimed
    moved = verifier.verify(inputs - claimed, seeded(1))
    assert moved.label[0] == 1
    assert not moved.abstain[0]
    for size in (published, tight):
        assert verifier.verify(inputs - size, seeded(1)).label[0] == 0
    assert claimed == pytest.approx(sqrt(d) * published)


# What is answered, and how


def test_the_bounds_are_those_of_the_counts() -> None:
    verifier = verifier_of(two_classes(LAYER, TOWARDS), gaussian(LAYER, STDDEV), draws=1000)
    votes = np.array([[900.0, 60.0, 40.0], [10.0, 510.0, 480.0], [0.0, 0.0, 1000.0]])
    found = verifier.judge(votes)
    lower, upper = clopper_pearson(votes, 1000, 0.05 / 6)
    assert found.label.tolist() == [0, 1, 2]
    assert found.top_lower.tolist() == [lower[0, 0], lower[1, 1], lower[2, 2]]
    assert found.runner_up_upper.tolist() == [upper[0, 1], upper[1, 2], min(upper[2, 1], 1 - lower[2, 2])]
    assert found.abstain.tolist() == [False, True, False]
    assert (found.radii["tight"] > 0).tolist() == [True, False, True]


@pytest.mark.parametrize("norm_", NORMS)
def test_the_columns_and_kinds_say_what_they_mean(norm_: Norm) -> None:
    verifier = verifier_of(two_classes(LAYER, TOWARDS), gaussian(LAYER, STDDEV), norm_, draws=100)
    columns = verifier.verify(at(0.1, 0.2), seeded()).columns()
    plain = ["label", "abstain", "top_lower", "runner_up_upper", "draws"]
    assert list(columns) == plain + [kind.column for kind in verifier.kinds]
    assert all(len(values) == 2 for values in columns.values())
    assert columns["draws"].tolist() == [100, 100]
    names = ["tight", "published"] + ["as compared"] * (norm_ is Norm.LINF)
    assert [kind.name for kind in verifier.kinds] == names
    assert all(kind.unit.norm is norm_ and kind.function == "vote" for kind in verifier.kinds)
    for kind in verifier.kinds:
        claimed = kind.name == "as compared"
        assert kind.status == (Status.CLAIMED if claimed else Status.PROVED)
        assert kind.failure_probability == (None if claimed else 0.05)
        assert ("not valid" in kind.source) == claimed
    assert verifier.kinds[1].source.startswith("a test: its own theorem")


@pytest.mark.parametrize("rows", [1, 7, 130, 100_000])
def test_answers_depend_on_the_generator_alone_not_on_the_memory(rows: int) -> None:
    verifier = verifier_of(two_classes(LAYER, TOWARDS), gaussian(LAYER, STDDEV), draws=330)
    inputs = at(0.01, 0.02, -0.05)
    expected = verifier.verify(inputs, seeded(1))
    verifier.rows_at_once = rows
    assert (verifier.verify(inputs, seeded(1)).top_lower == expected.top_lower).all()
    assert (verifier.verify(inputs[1:2], seeded(1)).top_lower == expected.top_lower[1:2]).all()
    assert not (verifier.verify(inputs, seeded(2)).top_lower == expected.top_lower).all()


def test_other_draws_keep_everything_else() -> None:
    verifier = verifier_of(two_classes(LAYER, TOWARDS), LayerLaplace(dense(LAYER), 0.3), Norm.L1)
    more = verifier.with_draws(300)
    assert more.settings == verifier.settings.replace(noise_draws=300)
    assert more.kinds == verifier.kinds
    assert more.verify(at(0.1), seeded()).draws.tolist() == [300]


SHAPES = {"gaussian": norm, "laplace": laplace}


@pytest.mark.parametrize("kind", SHAPES)
def test_every_hidden_value_gets_noise_of_its_own_size(kind: str) -> None:
    """Kolmogorov-Smirnov on 50,000 draws of each of 4 values, a false-alarm rate of 1e-9 each; twins 10% larger."""
    noise = gaussian(LAYER, STDDEV) if kind == "gaussian" else LayerLaplace(dense(LAYER), 0.3)
    drawn = noise.draw((50_000, 3), seeded())
    assert drawn.shape == (50_000, 4)
    assert drawn.dtype == torch.float64

    def wrong(sample: Tensor, size: float) -> bool:
        if kind == "gaussian":
            return not_gaussian(sample, size)
        ordered = laplace.cdf(np.sort(sample.numpy()), scale=size)
        return bool(np.abs(ordered - np.arange(50_000) / 50_000).max() > kstwo.isf(FALSE_ALARM, 50_000) + 1 / 50_000)

    for sample, size in zip(drawn.T, STDDEV if kind == "gaussian" else [0.3] * 4, strict=True):
        assert not wrong(sample, size)
        assert wrong(sample * 1.1, size)


def test_training_on_does_not_change_what_was_certified() -> None:
    encoder, stddev = dense(LAYER), torch.ones(4)
    noise = LayerGaussian(encoder, stddev)
    seen, reach = noise.noise_free(at(0.5)), noise.factors(Norm.L2, 3)
    encoder.weight.data.mul_(10)
    stddev.mul_(10)
    assert torch.equal(noise.noise_free(at(0.5)), seen)
    assert noise.factors(Norm.L2, 3) == reach
    assert not noise.encoder.weight.requires_grad


@pytest.fixture(scope="module")
def images() -> Network:
    network = build(ModelConfig(architecture="mnist_cnn"), (1, 28, 28), 10, seeded())
    assert isinstance(network, Network)
    network.calibrate()
    return network.requires_grad_(False)


def test_it_works_on_the_networks_of_the_paper(images: Network) -> None:
    """The head overwrites what it is given, so the same question twice shows whether anything needed is lost."""
    shares = torch.rand(images.encoder.hidden_shape, generator=seeded(3)) + 0.5
    noise = LayerGaussian(images.encoder, heterogeneous_stddevs(0.01, shares))
    verifier = verifier_of(images, noise, Norm.LINF, draws=200)
    inputs = torch.rand(6, 1, 28, 28, generator=seeded(1)) * 2 - 1
    first, second = (verifier.verify(inputs, seeded(2)) for _ in range(2))
    for name, values in first.columns().items():
        assert np.array_equal(values, second.columns()[name])
    assert (first.radii["published"] <= first.radii["tight"]).all()
    assert (first.radii["tight"] > 0).any()
    assert first.label[~first.abstain].tolist() == images(inputs).argmax(1).numpy()[~first.abstain].tolist()
    counter = verifier.counter(inputs)
    counter.votes(np.arange(6), 50, seeded())
    assert torch.equal(counter.noise_free, images.encoder(inputs))


def test_an_attacker_differentiates_the_mean_probability_and_a_sharpened_one(images: Network) -> None:
    noise = LayerGaussian(images.encoder, torch.tensor(0.05))
    samples = verifier_of(images, noise).samples()
    points = (torch.rand(3, 1, 28, 28, generator=seeded(1)) * 2 - 1).requires_grad_()
    shifts = noise.draw((4, 1, 28, 28), seeded(5))
    for name, sharpness in (("score", 1.0), ("vote", 4.0)):
        scores = samples[name](4, seeded(5))
        found = scores(points)
        by_hand = [(sharpness * images.head(images.encoder(points) + shift)).softmax(1) for shift in shifts]
        assert torch.allclose(found.exp(), torch.stack(by_hand).mean(0), atol=1e-6)
        assert torch.equal(scores(points), found), "a draw stays what it is"
        (gradient,) = torch.autograd.grad(found[:, 0].sum(), points)
        assert gradient.isfinite().all()
        assert gradient.abs().max() > 0


# What is refused


def test_noise_that_is_none_is_refused() -> None:
    for size in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(SettingError, match="above 0"):
            gaussian(LAYER, np.array([1.0, 1.0, size, 1.0]))
        with pytest.raises(SettingError, match="above 0"):
            LayerLaplace(dense(LAYER), size)
    with pytest.raises(SettingError, match=r"shape \(3,\), the first layer gives values of shape \(4,\)"):
        gaussian(LAYER, np.ones(3))
    with pytest.raises(ModelError, match="takes 3 values, the inputs have 5"):
        gaussian(LAYER, 1.0).factors(Norm.L2, 5)


def test_a_network_that_the_noise_was_not_made_for_is_refused() -> None:
    network, noise = two_classes(LAYER, TOWARDS), gaussian(2 * LAYER, STDDEV)
    with pytest.raises(ModelError, match="another first layer"):
        verifier_of(network, noise)
    with pytest.raises(ModelError, match="another first layer"):
        verifier_of(network, gaussian(LAYER[:3], STDDEV[:3]))
    network.set_noise(torch.zeros(3), torch.ones(4))
    with pytest.raises(ModelError, match="carries fixed noise"):
        verifier_of(network, gaussian(LAYER, STDDEV))


def test_networks_that_mix_examples_are_refused() -> None:
    network = two_classes(LAYER, TOWARDS)
    network.head.body = nn.Sequential(nn.BatchNorm1d(4), network.head.body).double()
    with pytest.raises(ModelError, match="BatchNorm1d"):
        verifier_of(network, gaussian(LAYER, STDDEV))


def test_rules_about_other_noise_are_refused() -> None:
    network, config = two_classes(LAYER, TOWARDS), CertificationConfig()
    for noise, rule in ((gaussian(LAYER, STDDEV), None), (LayerLaplace(dense(LAYER), 1.0), Classical())):
        with pytest.raises(SettingError, match="has no theorem"):
            NoiseLayerVerifier(network, noise, rule, Norm.L2, config, source="a test")


@pytest.mark.parametrize("value", [1.01, -1.01, float("nan")])
def test_inputs_outside_their_range_are_refused(value: float) -> None:
    verifier = verifier_of(two_classes(LAYER, TOWARDS), gaussian(LAYER, STDDEV))
    with pytest.raises(DataError, match="outside"):
        verifier.verify(at(value), seeded())
    with pytest.raises(DataError, match="no inputs"):
        verifier.verify(at(), seeded())


def test_scores_that_are_not_numbers_are_refused() -> None:
    network = two_classes(LAYER, TOWARDS)
    verifier = verifier_of(network, gaussian(LAYER, STDDEV))
    network.head.output.weight.data.fill_(float("nan"))
    with pytest.raises(ModelError, match="NaN"):
        verifier.verify(at(0.1), seeded())
