"""A noise layer behind the first affine layer: its settings, and certificates as published and the sharpest there are.

Both see the same votes. PixelDP (Lecuyer et al., 2019) makes the network (ε, δ)-DP towards the input's values and asks
for a margin of e^{2ε} and δ; SecureSGD and SecureSGD-AGM (Phan et al., 2019) do the same with other theorems about
the noise. Randomised smoothing asks for the exact trade-off of the noise instead, so it never proves less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stobatch.attacks.expectation import Sample
from stobatch.baselines.noise_layer import LayerGaussian, LayerNoise
from stobatch.config import CertificationConfig, MethodConfig, RunConfig
from stobatch.dp.gaussian import Calibration
from stobatch.dp.plan import PlanRow
from stobatch.errors import DataError, ModelError, SettingError
from stobatch.models import AffineEncoder, Network, budget_mb, require_per_example, rows_in_memory
from stobatch.models.validators import unchanged
from stobatch.published.radius import published_robustness_epsilon
from stobatch.settings import setting
from stobatch.types import PAPER_RANGE, Norm, Radius, Status
from stobatch.verifier import ASSUMPTIONS, CertificateKind, Flags, Labels, Verifier, require_same_scores
from stobatch.votes.confidence import Floats, clopper_pearson
from stobatch.votes.counting import VoteCounter
from stobatch.votes.margins import check_probabilities
from stobatch.votes.noise import vote_samples

DELTAS: Floats = np.geomspace(0.001, 0.3, 128)
"""What δ the published rule is tried with: PixelDP's own range. Ten times as many raise no radius by two percent."""
_INSIDE = 1 - 1e-9
"""The theorem asks for a strict inequality."""
_CPU_ROWS = 400
"""Rows of one pass on a CPU: enough to fill the cores, few enough to stay in the cache."""


def margin_epsilon(top_lower: Floats, runner_up_upper: Floats, delta: Floats) -> Floats:
    """Return the ε below which p_A > e^{2ε} p_B + (1 + e^ε) δ (`published.radius.is_robust`); 0 where no ε will do.

    A quadratic in e^ε, with its larger root written so that p_B = 0 is no special case.
    """
    check_probabilities(top_lower, runner_up_upper, delta)
    spare = np.maximum(top_lower - delta, 0.0)
    growth = 2 * spare / (delta + np.sqrt(delta**2 + 4 * runner_up_upper * spare))
    epsilon: Floats = np.log(np.maximum(growth, 1.0))
    return epsilon


def margin_deviations(calibration: Calibration, top_lower: Floats, runner_up_upper: Floats) -> Floats:
    """Return the largest shift, in deviations of Gaussian noise, that the margin withstands at the best δ."""
    top, runner_up = np.asarray(top_lower)[..., None], np.asarray(runner_up_upper)[..., None]
    epsilon = margin_epsilon(top, runner_up, DELTAS)
    withstood: Floats = np.where(epsilon > 0, calibration.deviations(epsilon, DELTAS), 0.0).max(-1)
    return withstood


def published_radius(
    noise: LayerNoise, calibration: Calibration | None, norm: Norm, top_lower: Floats, runner_up_upper: Floats
) -> Floats:
    """Return PixelDP's own radius: the largest perturbation for which the noise is DP enough for the margin.

    **Guarantee.** Let p_A be at most the probability that the classifier behind the noise says A, and p_B at least that
    of every other class. Then A stays the most probable class within the radius. Without a calibration, which is for
    Laplace noise, δ = 0 and the limit is ½ ln(p_A/p_B).
    """
    factors = noise.factors(norm, noise.num_inputs)
    if calibration is None:
        size = factors.per_epsilon * published_robustness_epsilon(top_lower, runner_up_upper)
    else:
        size = factors.per_deviation * margin_deviations(calibration, top_lower, runner_up_upper)
    return np.where(top_lower > runner_up_upper, _INSIDE * size, 0.0)


@dataclass(frozen=True)
class NoiseLayerCertificates:
    """The answers for a batch of inputs; every column has one entry per input. Radii stand by the kind's name."""

    label: Labels
    abstain: Flags
    top_lower: Floats
    runner_up_upper: Floats
    draws: Labels
    radii: dict[str, Floats]

    def columns(self) -> dict[str, NDArray[Any]]:
        plain = {name: values for name, values in vars(self).items() if name != "radii"}
        return plain | {_column(name): sizes for name, sizes in self.radii.items()}


def _column(kind: str) -> str:
    return "radius_" + kind.replace(" ", "_")


@final
class NoiseLayerVerifier(Verifier):
    """The most frequent class of a network with fresh noise behind its first layer; what is deployed is that vote.

    **Guarantee** (published and tight radius). For each input separately, with probability at least
    1 - failure_probability over the draws, no perturbation up to the radius changes the most probable class. All K
    lower and K upper bounds hold at once, each failing with probability failure_probability/(2K), so choosing the
    class on the same draws costs nothing. Assumes a per-example network (checked), exact arithmetic, ideal noise.

    The published comparisons of these methods attack in l-infinity and read the l2 radius as one of l-infinity. That
    number is reported too where l-infinity is asked about, as a claim: it does not hold.
    """

    def __init__(
        self,
        network: Network,
        noise: LayerNoise,
        calibration: Calibration | None,
        norm: Norm,
        settings: CertificationConfig,
        *,
        source: str,
        memory_mb: int = 512,
    ) -> None:
        _require_fit(network, noise, calibration)
        self.network, self.noise, self.calibration, self.norm = network, noise, calibration, norm
        self.settings, self.source, self.memory_mb = settings, source, memory_mb
        self.rows_at_once = rows_in_memory(network, memory_mb, most=_CPU_ROWS)
        with torch.no_grad():
            require_per_example(network, self.rows_at_once)

    @property
    def kinds(self) -> tuple[CertificateKind, ...]:
        unit, failure = Radius(1.0, self.norm, PAPER_RANGE), self.settings.failure_probability
        own = f"{self.source}: its own theorem, with the sensitivity of the first layer for this norm"
        exact = "randomised smoothing: the exact trade-off of the noise in the first layer"
        kinds = [
            CertificateKind(*("tight", Status.PROVED, exact, unit, failure, ASSUMPTIONS), column=_column("tight")),
            CertificateKind(
                *("published", Status.PROVED, own, unit, failure, ASSUMPTIONS), column=_column("published")
            ),
        ]
        if self.norm is Norm.LINF:
            misread = (
                f"{self.source}: the l2 radius of the method's own rule read as an l-infinity one, as released "
                "code of SecureSGD does; not valid"
            )
            kinds.append(
                CertificateKind(*("as compared", Status.CLAIMED, misread, unit, None), column=_column("as compared"))
            )
        return tuple(kinds)

    def with_draws(self, draws: int) -> NoiseLayerVerifier:
        settings = self.settings.replace(noise_draws=draws)
        return NoiseLayerVerifier(
            *(self.network, self.noise, self.calibration, self.norm, settings),
            source=self.source,
            memory_mb=self.memory_mb,
        )

    def samples(self) -> dict[str, Sample]:
        return vote_samples(self.network, self.network.head, self.noise)

    def counter(self, inputs: Tensor) -> VoteCounter:
        """Return a counter of the votes for these inputs over ever more draws."""
        inputs = inputs.to(self.network.encoder.weight)
        return VoteCounter(self.network.head, self.noise, inputs, self.network.num_classes, self.rows_at_once)

    def verify(self, inputs: Tensor, generator: torch.Generator) -> NoiseLayerCertificates:
        if not len(inputs):
            raise DataError("there are no inputs to certify.", remedy="Give at least one.")
        if not bool(((inputs >= PAPER_RANGE.low) & (inputs <= PAPER_RANGE.high)).all()):
            raise DataError(
                f"inputs to certify are outside {PAPER_RANGE} or NaN.",
                remedy="Scale pixels with x / 127.5 - 1 and remove NaNs.",
            )
        with unchanged(self.network):
            votes = self.counter(inputs).votes(np.arange(len(inputs)), self.settings.noise_draws, generator)
            require_same_scores(
                self.network, lambda part: self.network.head(self.noise.noise_free(part)), inputs, self.rows_at_once
            )
        return self.judge(votes.cpu().double().numpy())

    def judge(self, votes: Floats) -> NoiseLayerCertificates:
        """Turn votes, inputs x classes, into verdicts; separate from `verify` so that given votes can be judged."""
        num_classes, draws, label = votes.shape[1], self.settings.noise_draws, votes.argmax(1)
        lower, upper = clopper_pearson(votes, draws, self.settings.failure_probability / (2 * num_classes))
        chosen = np.arange(num_classes) == label[:, None]
        top = lower[chosen]
        # The runner-up is also bounded by what the top class leaves over.
        runner_up = np.minimum(np.where(chosen, 0.0, upper).max(1), 1 - top)
        radii = {
            "tight": self.noise.radius(self.norm, top, runner_up, self.noise.num_inputs),
            "published": published_radius(self.noise, self.calibration, self.norm, top, runner_up),
        }
        if self.norm is Norm.LINF:
            radii["as compared"] = published_radius(self.noise, self.calibration, Norm.L2, top, runner_up)
        return NoiseLayerCertificates(label, top <= runner_up, top, runner_up, np.full(len(label), draws), radii)


def _require_fit(network: Network, noise: LayerNoise, calibration: Calibration | None) -> None:
    if isinstance(noise, LayerGaussian) != (calibration is not None):
        raise SettingError(
            f"{type(noise).__name__} with the calibration {calibration.name if calibration else None} has no theorem.",
            why="Calibrations are theorems about Gaussian noise; Laplace noise needs none.",
            remedy="Give Gaussian noise one of stobatch.dp.gaussian.CALIBRATIONS, and Laplace noise None.",
        )
    weight = noise.encoder.weight
    same = network.encoder.hidden_shape == noise.encoder.hidden_shape and weight.shape == network.encoder.weight.shape
    if not same or not torch.equal(weight, network.encoder.weight.detach().to(weight)):
        raise ModelError(
            "the noise was made for another first layer than the network's.",
            why="The certificate would be about other weights than those deployed.",
            remedy="Make the noise from network.encoder, after the last step of training.",
        )
    if bool(network.input_noise.any()) or bool(network.hidden_noise.any()):
        raise ModelError(
            "the network carries fixed noise.",
            why="This certificate is about a network whose only noise is drawn afresh in every pass.",
            remedy="Use VerifiedInference, or a network without fixed noise.",
        )


_POWER_STEPS = 20


class NoiseLayerSettings(MethodConfig):
    """What the noise is made for: perturbations up to a bound, to a privacy level of pixels."""

    construction_bound: float = setting(
        0.1, above=0, doc="The perturbation L that the noise is made for, l2 over [-1, 1] (l1 for Laplace noise)"
    )
    robustness_epsilon: float = setting(1.0, above=0, doc="ε_r of the noise at that bound")
    robustness_delta: float = setting(0.05, above=0, below=0.5, doc="δ_r of the noise at that bound")

    def gaussian_stddev(self, calibration: Calibration) -> float:
        """Return the noise's standard deviation for a first layer of norm 1, by a theorem on the Gaussian mechanism."""
        return calibration.stddev(self.robustness_epsilon, self.robustness_delta, self.construction_bound)

    def rows(self, size: float, meaning: str, delta: float) -> list[PlanRow]:
        """Return the noise layer's rows of a plan; Laplace noise has a δ_r of 0 under any settings."""
        return [
            PlanRow("construction bound", "L", self.construction_bound, "perturbations the noise is made for", ""),
            PlanRow("robustness epsilon", "ε_r", self.robustness_epsilon, "at the bound", "Eq. 4"),
            PlanRow("robustness delta", "δ_r", delta, "at the bound", "Eq. 4"),
            PlanRow("noise of the layer", "", size, f"{meaning}, for a first layer of norm 1", ""),
        ]


def register_buffers(network: Network) -> None:
    """Add even noise to begin with: `noise_spread` is √(K r), whose mean square is 1."""
    network.register_buffer("noise_spread", torch.ones(network.encoder.hidden_shape))


def spread_of(network: Network) -> Tensor:
    assert isinstance(network.noise_spread, Tensor)
    return network.noise_spread


@torch.no_grad()
def shrink(encoder: AffineEncoder, size: Tensor) -> None:
    """Divide θ1 by its size where that is above 1; a little more, so that doing it again changes no bit."""
    encoder.weight.mul_(torch.where(size > 1, (1 - 1e-6) / size, torch.ones_like(size)))


@torch.no_grad()
def limit_norm(encoder: AffineEncoder, spread: Tensor) -> None:
    """Shrink θ1 so that ‖diag(1/spread) A‖₂, as the noise sees it, is at most 1; by power iteration.

    The norm is estimated from below, so that it may stay a little above 1; certificates do not rely on it.
    """
    point = 1 + torch.rand((1, *encoder.input_shape), generator=torch.Generator().manual_seed(0)).to(encoder.weight)
    square, growth = spread.to(point).square(), point.norm()
    for _ in range(_POWER_STEPS):
        point = encoder.decode(encoder(point / growth.clamp(min=1e-30)) / square)
        growth = point.norm()
    shrink(encoder, growth.sqrt())


def gaussian_verifier(
    config: RunConfig, network: Network, stddev: float, calibration: Calibration, source: str
) -> Verifier:
    """Return the verifier by votes over the noise layer, certified by the method's own rule and by the tight one."""
    noise = LayerGaussian(network.encoder, stddev * spread_of(network))
    return NoiseLayerVerifier(
        *(network, noise, calibration, Norm(config.evaluation.norm), config.certification),
        source=source, memory_mb=budget_mb(config.machine),
    )  # fmt: skip
