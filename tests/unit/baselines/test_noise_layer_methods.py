"""Methods with a noise layer, and plain training, which is the same without one.

The noise is as large as planned for every hidden value, the first layer is kept near norm 1, and what PixelDP promises
at its construction bound is certified for what was trained. Statistical tests alarm falsely with probability 1e-9 for
each quantity that they look at, and each has broken twins that it catches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from math import e, exp, log, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2, gamma, kstwo, laplace
from support.noise_checks import FALSE_ALARM, dependent, not_gaussian
from support.private_steps import BATCH, CLASSES, CLIP, pictures, sampling, settings
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import stobatch
from stobatch.baselines import noise_layer_verifier
from stobatch.baselines.noise_layer import LayerGaussian, LayerLaplace, layer_sensitivity
from stobatch.baselines.noise_layer_verifier import (
    NoiseLayerVerifier,
    limit_norm,
    published_radius,
    register_buffers,
    spread_of,
)
from stobatch.baselines.pixeldp import GaussianLayer, PixelDpConfig, limit_l1_norm
from stobatch.baselines.plain import OpenTrainable, PlainConfig
from stobatch.baselines.securesgd import SecureSgdAgmConfig, SecureSgdConfig
from stobatch.config import MethodConfig, RunConfig
from stobatch.data import Dataset
from stobatch.dp.gaussian import gaussian_delta
from stobatch.errors import SettingError
from stobatch.methods import method_of
from stobatch.models import AffineEncoder, ConvEncoder, DenseEncoder, Network, build
from stobatch.seeds import Seeds
from stobatch.sound.losses import NoisyHidden, NormalSampler, Objective, Ramp
from stobatch.sound.step import DpSgdTrainable
from stobatch.training import Trainable
from stobatch.types import Norm

PRIVATE: dict[str, Any] = {"epsilon": 3.0, "delta": 1e-3, "batch_size": BATCH, "clip_norm": CLIP}
HIDDEN = (4, 3, 3)


def config_of(method: MethodConfig, **changes: Any) -> RunConfig:
    return settings("small_cnn").replace(method=method).override_all(changes)


def bound(method: MethodConfig, data: Dataset | None = None) -> Trainable:
    config, data = config_of(method), data or pictures()
    network = build(config.model, data.info.input_shape, CLASSES, torch.Generator().manual_seed(2))
    register_buffers(network)
    plan = stobatch.plan(config, dataset=data)
    return method_of(config).prepare(config, plan, network, data.train, Seeds.reproducible(4))


def uneven(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """As a relevance step leaves it: half of the variance is even."""
    shares = 0.5 + 0.5 * torch.rand(shape, generator=torch.Generator().manual_seed(seed)).log().neg()
    return (shares / shares.mean()).sqrt()


# The norm of the first layer.


ENCODERS: dict[str, Callable[[], AffineEncoder]] = {
    "one neuron": lambda: DenseEncoder((7,), 1),
    "few neurons": lambda: DenseEncoder((1, 6, 6), 20),
    "as many as inputs": lambda: DenseEncoder((100,), 100),
    "many neurons": lambda: DenseEncoder((5,), 200),
    "convolution": lambda: ConvEncoder((1, 8, 8), 8, 3, stride=2, padding=1),
    "convolution of colours": lambda: ConvEncoder((3, 10, 10), 6, 3, stride=1, padding=1),
    "convolution of odd images": lambda: ConvEncoder((2, 9, 9), 5, 4, stride=3, padding=0),
}
POWER_STEPS = 20
SCALES = (0.01, 1.0, 30.0)


def encoders(name: str) -> list[tuple[AffineEncoder, Tensor]]:
    """Random ones of a shape, each with a spread of its noise: even, or uneven."""
    found = []
    for seed, scale in enumerate(SCALES):
        encoder = ENCODERS[name]()
        drawn = torch.randn(encoder.weight.shape, generator=torch.Generator().manual_seed(seed))
        encoder.weight.data.copy_(drawn * scale)
        found += [(encoder, torch.ones(encoder.hidden_shape)), (encoder.copy(), uneven(encoder.hidden_shape, seed))]
    return found


def norm_of(encoder: AffineEncoder, spread: Tensor) -> float:
    return layer_sensitivity(encoder, spread)[Norm.L2]


def matrix(encoder: AffineEncoder, spread: Tensor) -> Tensor:
    """diag(1/spread) A, column by column."""
    size = int(np.prod(encoder.input_shape))
    columns: Tensor = encoder.copy().double()(torch.eye(size, dtype=torch.float64).reshape(size, *encoder.input_shape))
    return (columns.detach() / spread.double()).flatten(1).t()


def most_that_may_stay(encoder: AffineEncoder, spread: Tensor) -> float:
    """What k steps of power iteration may miss at most: |cos|^(-1/2k), of the angle between its start and the truth.

    Its estimates of the largest eigenvalue never fall, so the last is at least their geometric mean, which is
    (‖Gᵏb‖/‖b‖)^(1/k) >= λ |cos|^(1/k).
    """
    start = 1 + torch.rand((1, *encoder.input_shape), generator=torch.Generator().manual_seed(0))
    *_, directions = torch.linalg.svd(matrix(encoder, spread), full_matrices=False)
    cosine = abs(float(directions[0] @ start.flatten().double() / start.double().norm()))
    return float(cosine ** (-1 / (2 * POWER_STEPS)))


@pytest.mark.parametrize("name", ENCODERS)
def test_the_norm_of_a_layer_is_limited_as_its_noise_sees_it(name: str) -> None:
    limited = 0
    for encoder, spread in encoders(name):
        before, size = encoder.weight.detach().clone(), norm_of(encoder, spread)
        limit_norm(encoder, spread)
        if size < 1:
            assert torch.equal(encoder.weight, before), "a layer within the limit is left alone"
            continue
        limited += 1
        left = norm_of(encoder, spread)
        assert 1 - 1e-5 <= left <= most_that_may_stay(encoder, spread) * (1 + 1e-5)
        assert left < 1.1
        ratio = encoder.weight.detach() / before
        assert torch.allclose(ratio, ratio.mean(), rtol=1e-5), "it shrinks as a whole"
    assert limited >= 2


def test_a_limit_that_ignores_how_the_noise_is_spread_is_caught() -> None:
    """The broken twin: the norm of A itself."""
    for encoder, _ in encoders("convolution")[2:]:
        quiet = (torch.arange(8) < 4).reshape(8, 1, 1).expand(encoder.hidden_shape)
        spread = torch.where(quiet, 0.3, sqrt(2 - 0.3**2))
        limit_norm(encoder, torch.ones_like(spread))
        assert norm_of(encoder, spread) > 1.5


@pytest.mark.parametrize("name", ENCODERS)
def test_limiting_is_deterministic_and_touches_no_random_state(name: str) -> None:
    for encoder, spread in encoders(name):
        twin, state = encoder.copy(), torch.get_rng_state()
        limit_norm(encoder, spread)
        assert torch.equal(state, torch.get_rng_state())
        torch.manual_seed(1)
        limit_norm(twin, spread)
        assert torch.equal(encoder.weight, twin.weight)
        torch.set_rng_state(state)


@pytest.mark.parametrize("name", ENCODERS)
def test_the_l1_norm_is_limited_exactly(name: str) -> None:
    for encoder, _ in encoders(name):
        before = encoder.weight.detach().clone()
        ones = torch.ones(encoder.hidden_shape)
        size = float(matrix(encoder, ones).abs().sum(0).max())
        limit_l1_norm(encoder)
        if size < 1:
            assert torch.equal(encoder.weight, before)
        else:
            assert float(matrix(encoder, ones).abs().sum(0).max()) == pytest.approx(1, abs=1e-5)
            assert torch.allclose(encoder.weight.detach() / before, torch.tensor(1 / size), rtol=1e-5)


def test_what_was_limited_is_left_alone() -> None:
    """A training that is resumed limits the layer once more, and promises the bits of an undisturbed one."""
    changed = []
    for name in ENCODERS:
        for encoder, spread in encoders(name):
            for limit in (lambda one, by=spread: limit_norm(one, by), limit_l1_norm):
                limit(encoder)
                before = encoder.weight.detach().clone()
                limit(encoder)
                changed.append(not torch.equal(before, encoder.weight))
    assert sum(changed) == 0


def test_the_deployed_layer_is_within_the_limit(tmp_path: Path) -> None:
    method = SecureSgdConfig(**PRIVATE, relevance_after=0.9, even_share=0.1)
    config = config_of(method, **{"training.steps": 30})
    model = stobatch.train(config, tmp_path / "run", dataset=pictures(), quiet=True)
    assert isinstance(model.network, Network)
    assert norm_of(model.network.encoder, spread_of(model.network)) <= 1.1


# Noise of training.


ROWS, STEPS = 60, 4


def blank() -> Dataset:
    """Inputs of zero, which the first layer maps to zero: behind it there is noise and nothing else."""
    inputs = torch.zeros(ROWS + 6, 1, 6, 6)
    labels = torch.arange(ROWS + 6) % CLASSES
    parts = (inputs[:ROWS], labels[:ROWS], inputs[ROWS:], labels[ROWS:])
    return stobatch.from_tensors(*parts, num_classes=CLASSES)


def noise_of(trainable: Trainable, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """What the head was given on top of the first layer's zeros: steps x examples x hidden values."""
    if isinstance(trainable, DpSgdTrainable):
        sampling(monkeypatch, *range(ROWS))
    assert isinstance(trainable.network, Network)
    seen: list[Tensor] = []
    handle = trainable.network.head.register_forward_pre_hook(
        lambda _, given: seen.append(given[0].detach().clone().flatten(1))
    )
    # A step that releases relevances makes the same pass.
    for step in range(STEPS):
        (task,) = trainable.tasks(step)
        trainable.gradients(task, step)
    handle.remove()
    return torch.cat(seen).reshape(STEPS, ROWS, -1).double()


def suspicious(noise: Tensor, sizes: Tensor, law: str) -> set[str]:
    """What is wrong with noise that should be fresh for every step and example, of the given law and sizes.

    Each of the four is a false alarm with probability `FALSE_ALARM` at most; sizes are those of each hidden value.
    """
    scaled = noise / sizes.double().flatten()
    count, share = STEPS * ROWS, FALSE_ALARM / scaled.shape[-1] / 2
    if law == "gaussian":
        totals, by = scaled.square().sum((0, 1)).numpy(), chi2(count)
        other_law = not_gaussian(scaled.flatten(), 1.0)
    else:
        totals, by = scaled.abs().sum((0, 1)).numpy(), gamma(count)
        other_law = not_laplace(scaled.flatten())
    found = {"law"} if other_law else set[str]()
    found |= {"sizes"} if (totals < by.ppf(share)).any() or (totals > by.isf(share)).any() else set()
    found |= {"steps"} if dependent([step.flatten() for step in noise]) else set()
    return found | ({"examples"} if dependent([noise[:, row].flatten() for row in range(ROWS)]) else set())


def not_laplace(sample: Tensor) -> bool:
    """Kolmogorov-Smirnov, with the exact law of its distance."""
    ordered = laplace.cdf(np.sort(sample.numpy()))
    ranks = np.arange(len(ordered) + 1) / len(ordered)
    return bool(max((ranks[1:] - ordered).max(), (ordered - ranks[:-1]).max()) > kstwo.isf(FALSE_ALARM, len(ordered)))


METHODS: dict[str, MethodConfig] = {
    "pixeldp, gaussian": PixelDpConfig(batch_size=ROWS, construction_bound=0.3, robustness_epsilon=0.7),
    "pixeldp, laplace": PixelDpConfig(batch_size=ROWS, layer_noise="laplace", robustness_epsilon=2.5),
    "securesgd": SecureSgdConfig(**PRIVATE, robustness_epsilon=2.5),
    "securesgd_agm": SecureSgdAgmConfig(**PRIVATE, construction_bound=0.3),
}
PLANNED = {
    "pixeldp, gaussian": 0.3 * sqrt(2 * log(1.25 / 0.05)) / 0.7,
    "pixeldp, laplace": 0.1 / 2.5,
    "securesgd": 0.1 * (sqrt(log(sqrt(2 / np.pi) / 0.05)) + sqrt(log(sqrt(2 / np.pi) / 0.05) + 2.5)) / (sqrt(2) * 2.5),
    "securesgd_agm": 0.3 * 1.2443,
}
"""Written out; of the analytic mechanism, which has no closed form, σ for ε = 1, δ = 0.05 and sensitivity 1."""
EVERY = pytest.mark.parametrize("name", METHODS)


def with_noise(name: str) -> tuple[Trainable, Tensor]:
    """A trainable on blank inputs, and the sizes that its noise should have; those of SecureSGD are uneven."""
    trainable = bound(METHODS[name], blank())
    assert isinstance(trainable.network, Network)
    if name == "securesgd":
        spread_of(trainable.network).copy_(uneven(HIDDEN))
    return trainable, PLANNED[name] * spread_of(trainable.network)


def law_of(name: str) -> str:
    return "laplace" if name.endswith("laplace") else "gaussian"


@EVERY
def test_every_hidden_value_of_every_example_gets_fresh_noise_of_the_planned_size(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainable, sizes = with_noise(name)
    assert suspicious(noise_of(trainable, monkeypatch), sizes, law_of(name)) == set()


def halve(trainable: Trainable) -> None:
    if isinstance(trainable, GaussianLayer):
        trainable.size /= 2
    else:
        assert isinstance(trainable, DpSgdTrainable)
        assert isinstance(trainable.config, SecureSgdAgmConfig)
        trainable.objective = Objective(((1.0, NoisyHidden(trainable.config.layer_stddev / 2)),), Ramp(0.0, 0.0))


@EVERY
def test_half_the_noise_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainable, sizes = with_noise(name)
    halve(trainable)
    found = noise_of(trainable, monkeypatch)
    if name == "securesgd":
        # One of its steps releases relevances, and makes its noise itself.
        found[2] /= 2
    assert suspicious(found, sizes, law_of(name)) == {"law", "sizes"}


@EVERY
def test_noise_that_all_examples_share_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_for_all(stream: Any, rows: slice, device: torch.device) -> NormalSampler:
        generator = stream(0)
        return lambda shape: torch.randn((1, *shape[1:]), generator=generator).expand(shape)

    trainable, sizes = with_noise(name)
    for module in ("baselines.plain", "sound.step"):
        monkeypatch.setattr(f"stobatch.{module}.sampler_by_blocks", one_for_all)
    assert "examples" in suspicious(noise_of(trainable, monkeypatch), sizes, law_of(name))


class Forgetful(Seeds):
    """The step is no part of a path."""

    def _digest(self, *path: str | int) -> bytes:
        return super()._digest(*(part for part in path if isinstance(part, str)))


@EVERY
def test_noise_that_repeats_in_the_next_step_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainable, sizes = with_noise(name)
    assert isinstance(trainable, OpenTrainable | DpSgdTrainable)
    trainable.seeds = Forgetful(4, public=True)
    assert "steps" in suspicious(noise_of(trainable, monkeypatch), sizes, law_of(name))


def test_noise_of_another_spread_or_law_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    trainable, sizes = with_noise("securesgd")
    noise = noise_of(trainable, monkeypatch)
    assert "sizes" in suspicious(noise, sizes.square().mean().sqrt().expand(HIDDEN), "gaussian")
    assert "sizes" in suspicious(noise, sizes.flip(0), "gaussian")
    # Gaussian noise of the standard deviation that Laplace noise has.
    assert "law" in suspicious(noise, sizes / sqrt(2), "laplace")


# Sizes of noise.


def test_pixeldp_has_the_noise_of_its_theorem() -> None:
    for bound_, epsilon, delta in ((0.1, 1.0, 0.05), (0.5, 0.3, 0.01), (2.0, 0.9, 0.2)):
        method = PixelDpConfig(construction_bound=bound_, robustness_epsilon=epsilon, robustness_delta=delta)
        assert method.size == pytest.approx(bound_ * sqrt(2 * log(1.25 / delta)) / epsilon, rel=1e-12)
        assert method.replace(layer_noise="laplace").size == pytest.approx(bound_ / epsilon, rel=1e-12)


def test_beyond_its_theorem_pixeldp_is_refused_at_plan_time() -> None:
    data = pictures()
    for epsilon in (1.0 + 1e-9, 4.0):
        method = PixelDpConfig(batch_size=8, robustness_epsilon=epsilon)
        with pytest.raises(SettingError, match="outside the classical theorem") as caught:
            stobatch.plan(config_of(method), dataset=data)
        assert "another calibration" in caught.value.remedy
        # The theorem about Laplace noise, and those that SecureSGD rests on, hold for every ε.
        stobatch.plan(config_of(method.replace(layer_noise="laplace")), dataset=data)
        for like in (SecureSgdConfig, SecureSgdAgmConfig):
            stobatch.plan(config_of(like(**PRIVATE, robustness_epsilon=epsilon)), dataset=data)
    stobatch.plan(config_of(PixelDpConfig(batch_size=8, robustness_epsilon=1.0)), dataset=data)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("delta", [1e-5, 0.05, 0.4])
def test_both_securesgds_satisfy_the_definition_and_the_analytic_one_with_less_noise(
    epsilon: float, delta: float
) -> None:
    given: dict[str, Any] = {"construction_bound": 0.3, "robustness_epsilon": epsilon, "robustness_delta": delta}
    extended, analytic = SecureSgdConfig(**given).layer_stddev, SecureSgdAgmConfig(**given).layer_stddev
    assert analytic < extended
    assert gaussian_delta(epsilon, 0.3 / extended) <= delta
    assert 0.999999 * delta <= gaussian_delta(epsilon, 0.3 / analytic) <= delta
    # The broken twin: a little less noise is too little.
    assert gaussian_delta(epsilon, 0.3 / (0.99 * analytic)) > delta


# What is promised at the construction bound.


@cache
def trained(folder: Path, name: str) -> stobatch.TrainedModel:
    """A small model of a method, certified in the norm that its noise is made for."""
    norm = "l1" if name.endswith("laplace") else "l2"
    method = METHODS[name].replace(robustness_epsilon=1.0, construction_bound=0.2)
    if isinstance(method, PixelDpConfig):
        method = method.replace(batch_size=8)
    config = config_of(method, **{"evaluation.norm": norm, "training.steps": 12})
    return stobatch.train(config, folder / name.replace(", ", "-"), dataset=pictures(), quiet=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trained")


BOUND = 0.2
MARGINS = [(e**2 * low + (1 + e) * 0.05 + 1e-6, low) for low in (1e-9, 0.01, 0.05, 0.09)]
"""Probabilities of the first and second class that Eq. 4 calls robust for ε_r = 1 and δ_r = 0.05, just so."""


def radii(verifier: NoiseLayerVerifier, pairs: list[tuple[float, float]]) -> tuple[Tensor, Tensor]:
    """By the method's own rule and by the exact one, at the verifier's norm."""
    top, runner_up = (np.array(column) for column in zip(*pairs, strict=True))
    noise, norm = verifier.noise, verifier.norm
    own = published_radius(noise, verifier.calibration, norm, top, runner_up)
    exact = noise.radius(norm, top, runner_up, noise.num_inputs)
    return torch.from_numpy(own), torch.from_numpy(exact)


def verifier_of(model: stobatch.TrainedModel) -> NoiseLayerVerifier:
    (verifier,) = model.verifiers()
    assert isinstance(verifier, NoiseLayerVerifier)
    return verifier


@pytest.mark.parametrize("name", [name for name in METHODS if not name.endswith("laplace")])
def test_at_its_bound_the_noise_is_as_private_towards_pixels_as_planned(name: str, folder: Path) -> None:
    """(ε_r, δ_r)-PixelDP at L, for a layer of norm 1: so whatever has that margin is certified at L, norm aside.

    Two percent are for the values of δ that the rule tries.
    """
    model = trained(folder, name)
    verifier = verifier_of(model)
    assert isinstance(model.network, Network)
    size = norm_of(model.network.encoder, spread_of(model.network))
    assert 0.5 < size < 1.1
    promised = 0.98 * BOUND / size
    own, exact = radii(verifier, MARGINS)
    assert bool((own >= promised).all())
    assert bool((exact >= own).all())
    # The broken twin: half the noise.
    assert isinstance(verifier.noise, LayerGaussian)
    verifier.noise = LayerGaussian(verifier.noise.encoder, verifier.noise.stddev / 2)
    assert bool((radii(verifier, MARGINS)[0] < promised).any())


def test_certain_votes_are_certified_as_far_as_the_classical_theorem_goes(folder: Path) -> None:
    """ε stays at 1, and the largest δ that leaves a margin is 1/(1 + e): L √(ln(1.25/δ_r)/ln(1.25(1 + e)))."""
    model = trained(folder, "pixeldp, gaussian")
    assert isinstance(model.network, Network)
    size = norm_of(model.network.encoder, spread_of(model.network))
    own, _ = radii(verifier_of(model), [(1 - 1e-9, 1e-9)])
    farthest = BOUND / size * sqrt(log(1.25 / 0.05) / log(1.25 * (1 + e)))
    assert farthest > 1.4 * BOUND / size
    assert 0.98 * farthest <= float(own) <= farthest


def test_laplace_noise_is_certified_at_its_bound_where_the_odds_are_e_to_twice_epsilon(folder: Path) -> None:
    model = trained(folder, "pixeldp, laplace")
    verifier = verifier_of(model)
    assert verifier.norm is Norm.L1
    assert isinstance(verifier.noise, LayerLaplace)
    size = float(matrix(verifier.noise.encoder, torch.ones(HIDDEN)).abs().sum(0).max())
    assert size == pytest.approx(1, abs=1e-5)
    own, exact = radii(verifier, [(odds * 0.01, 0.01) for odds in (exp(2), exp(1), 1.0)])
    assert own.tolist() == pytest.approx([BOUND, BOUND / 2, 0.0], rel=1e-5)
    assert bool((exact >= own).all())


# Audits.


AUDIT: dict[str, Any] = {
    "audit.instruments": ("certificates",), "audit.num_inputs": 3, "audit.attack_steps": 4, "audit.restarts": 1,
    "audit.judging_draws": 400, "audit.confidence": 1 - 1e-9,
}  # fmt: skip


def findings(run: Path) -> dict[str, dict[str, Any]]:
    """Of an audit, by the kind of certificate."""
    stobatch.certify(run, dataset=pictures(), quiet=True)
    document = stobatch.audit(run, overrides=AUDIT, dataset=pictures(), seed=1, quiet=True).to_dict()
    return {finding["about"]: finding for finding in document["findings"]}


def for_audits(out: Path, noise: str, norm: str) -> None:
    method = PixelDpConfig(batch_size=8, construction_bound=0.05, layer_noise=noise)
    changes = {"evaluation.norm": norm, "training.steps": 60, "certification.noise_draws": 300}
    stobatch.train(config_of(method, **changes), out, dataset=pictures(), quiet=True)


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("noise", ["gaussian", "laplace"])
def test_an_audit_of_certificates_refutes_none_that_is_proved(norm: str, noise: str, tmp_path: Path) -> None:
    """A false alarm has probability 1e-9."""
    for_audits(tmp_path / "run", noise, norm)
    found = findings(tmp_path / "run")
    assert found.keys() == {"tight", "published"} | ({"as compared"} if norm == "linf" else set())
    for name, finding in found.items():
        assert finding["claim_status"] == ("claimed" if name == "as compared" else "proved")
        if finding["claim_status"] == "proved":
            assert finding["details"]["attacked"] > 0
            assert finding["verdict"] != "refuted"


@pytest.mark.slow
def test_an_audit_refutes_a_rule_that_claims_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken twin: radii of the published rule forty times too large."""

    def careless(*given: Any) -> Any:
        return 40 * published_radius(*given)

    for_audits(tmp_path / "run", "gaussian", "l2")
    monkeypatch.setattr(noise_layer_verifier, "published_radius", careless)
    found = findings(tmp_path / "run")
    assert found["published"]["verdict"] == "refuted"
    assert found["tight"]["verdict"] != "refuted"


# Without the noise layer: plain training.


def slow_gradient(trainable: OpenTrainable, step: int, noise: Tensor | None) -> dict[str, Tensor]:
    """Of the mean loss of the step's batch, in float64."""
    network = copy.deepcopy(trainable.network).double()
    assert isinstance(network, Network)
    order = torch.randperm(trainable.num_examples, generator=trainable.seeds.generator("step", step, "trainer", 0))
    inputs, labels = trainable.reader.fetch(order[: trainable.batch_size])
    hidden = network.encoder(inputs.double())
    scores = network.head(hidden if noise is None else hidden + noise)
    parameters = dict(network.named_parameters())
    gradients = torch.autograd.grad(F.cross_entropy(scores, labels), list(parameters.values()))
    return dict(zip(parameters, gradients, strict=True))


@pytest.mark.parametrize("chunk", [833, 3])
@pytest.mark.parametrize("method", [PlainConfig(batch_size=8), PixelDpConfig(batch_size=8)], ids=lambda one: one.name)
def test_a_step_is_the_gradient_of_the_mean_loss(method: MethodConfig, chunk: int) -> None:
    trainable = bound(method)
    assert isinstance(trainable, OpenTrainable)
    trainable.chunk = chunk
    for step in (0, 5):
        noise = None
        if isinstance(method, PixelDpConfig):
            coins = torch.randn((64, *HIDDEN), generator=trainable.seeds.generator("step", step, "noise", 0))
            noise = coins[:8].double() * method.size
        (task,) = trainable.tasks(step)
        found, expected = trainable.gradients(task, step), slow_gradient(trainable, step, noise)
        assert found.keys() == expected.keys()
        assert all(torch.allclose(found[name].double(), expected[name], rtol=1e-4, atol=1e-6) for name in found)
        # The broken twins: another step's batch, and for a noise layer no noise.
        other = slow_gradient(trainable, step + 1, noise)
        assert not all(torch.allclose(found[name].double(), other[name], rtol=1e-2, atol=1e-4) for name in found)
        if noise is not None:
            silent = slow_gradient(trainable, step, None)
            assert not all(torch.allclose(found[name].double(), silent[name], rtol=1e-2, atol=1e-4) for name in found)
