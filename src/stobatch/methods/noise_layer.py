"""A noise layer behind the first affine layer: how large its noise is, how it is spread, and how it is certified.

PixelDP put it there to certify, SecureSGD spreads it unevenly. Training adds fresh noise to every example; the vote of
verified inference does so to every invocation. The certificate computes the first layer's norm exactly, from the
weights that are deployed; what training does to keep that norm near 1 is a matter of accuracy alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stobatch.certification import LayerGaussian, NoiseLayerVerifier, Verifier
from stobatch.config import MethodConfig, RunConfig
from stobatch.models import AffineEncoder, Network
from stobatch.privacy.gaussian import Calibration
from stobatch.privacy.plan import PlanRow
from stobatch.settings import setting
from stobatch.types import Norm

_POWER_STEPS = 20


@dataclass(frozen=True)
class NoiseLayerSettings(MethodConfig):
    """What the noise is made for: perturbations up to a bound, to a privacy level of pixels."""

    construction_bound: float = setting(
        0.1, above=0, doc="The perturbation L that the noise is made for, l2 over [-1, 1] (l1 for Laplace noise)"
    )
    robustness_epsilon: float = setting(1.0, above=0, doc="ε_r of the noise at that bound")
    robustness_delta: float = setting(0.05, above=0, below=0.5, doc="δ_r of the noise at that bound")

    def gaussian_stddev(self, calibration: Calibration) -> float:
        """Of the noise, by a theorem on the Gaussian mechanism, for a first layer of norm 1."""
        return calibration.stddev(self.robustness_epsilon, self.robustness_delta, self.construction_bound)

    def rows(self, size: float, meaning: str, delta: float) -> list[PlanRow]:
        """Of a plan: the noise layer's numbers; Laplace noise has a δ_r of 0, whatever the settings say."""
        return [
            PlanRow("construction bound", "L", self.construction_bound, "perturbations the noise is made for", ""),
            PlanRow("robustness epsilon", "ε_r", self.robustness_epsilon, "at the bound", "Eq. 4"),
            PlanRow("robustness delta", "δ_r", delta, "at the bound", "Eq. 4"),
            PlanRow("noise of the layer", "", size, f"{meaning}, for a first layer of norm 1", ""),
        ]


def furnish(network: Network) -> None:
    """Even noise to begin with: `noise_spread` is √(K r), whose mean square is 1."""
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
    """Votes over the noise layer, certified by the method's own rule and by the tight one."""
    noise = LayerGaussian(network.encoder, stddev * spread_of(network))
    return NoiseLayerVerifier(
        *(network, noise, calibration, Norm(config.evaluation.norm), config.certification),
        source=source, memory_mb=config.machine.memory_mb,
    )  # fmt: skip
