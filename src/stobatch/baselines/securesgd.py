"""SecureSGD (Phan et al., 2019): DP-SGD for privacy, and a noise layer whose noise goes where the loss is vulnerable.

SecureSGD-AGM has even noise, calibrated by the analytic Gaussian mechanism. The published algorithm learns where the
loss is vulnerable from raw data, outside its account; here that is a step of the account (`RelevanceTrainable`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from math import prod
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from stobatch.baselines.noise_layer_verifier import (
    NoiseLayerSettings,
    gaussian_verifier,
    limit_norm,
    register_buffers,
    spread_of,
)
from stobatch.config import RunConfig
from stobatch.data import DatasetInfo
from stobatch.dp.clipping import clipping_weights
from stobatch.dp.gaussian import Analytic, Calibration, Extended, heterogeneous_stddevs
from stobatch.dp.plan import DpSgdPlan, Plan, PlanRow
from stobatch.errors import SettingError
from stobatch.methods import split_network
from stobatch.models import Classifier, Network
from stobatch.settings import setting
from stobatch.sound.losses import NoisyHidden, NormalSampler, Objective, Ramp
from stobatch.sound.method import DpSgdFamily
from stobatch.sound.settings import DpSgdSettings
from stobatch.sound.step import DpSgdTrainable
from stobatch.training.engines import Gradients
from stobatch.verifier import Verifier

RELEVANCE = "relevance"


class RelevanceTrainable(DpSgdTrainable):
    """DP-SGD of which one step releases relevances, and descends on nothing."""

    @property
    @abstractmethod
    def relevance_step(self) -> int:
        """Return the number of the step that releases relevances."""

    @abstractmethod
    def relevances(self, inputs: Tensor, labels: Tensor, sampler: NormalSampler) -> Tensor:
        """Return the relevance of each value of the layer, for each example: a function of that example alone."""

    @abstractmethod
    def take(self, relevance: Tensor) -> None:
        """Keep the released mean over examples, noise included, in a buffer of the network."""

    @property
    @abstractmethod
    def relevance_shape(self) -> tuple[int, ...]:
        """Return the shape of the layer."""

    @property
    def largest_release(self) -> int:
        return max(super().largest_release, prod(self.relevance_shape))

    def targets(self, step: int) -> Mapping[str, Tensor]:
        if step != self.relevance_step:
            return super().targets(step)
        return {RELEVANCE: torch.zeros(self.relevance_shape, device=self.network.device, dtype=self.network.dtype)}

    def _clipped_rows(self, inputs: Tensor, labels: Tensor, step: int, normal: NormalSampler, per: int) -> Gradients:
        if step != self.relevance_step:
            return super()._clipped_rows(inputs, labels, step, normal, per)
        relevances = self.relevances(inputs, labels, normal).detach()
        # In float64, and vectors with NaN or infinite values left out: the bound must not depend on what the data do.
        rows = relevances.reshape(len(relevances) // per, per, -1).double().mean(1)
        rows = torch.where(rows.isfinite().all(1, keepdim=True), rows, 0.0)
        weights = clipping_weights(rows.norm(dim=1), self.clip_norm)
        return {RELEVANCE: (weights @ rows).reshape(self.relevance_shape).to(relevances.dtype)}

    def released(self, step: int, gradients: Gradients) -> None:
        super().released(step, gradients)
        if step == self.relevance_step:
            self.take(gradients[RELEVANCE])


_split = partial(split_network, method="SecureSGD")


class SecureSgdAgmConfig(DpSgdSettings, NoiseLayerSettings, name="securesgd_agm"):
    """Even noise, by the analytic Gaussian mechanism (Balle and Wang, 2018)."""

    calibration: ClassVar[Calibration] = Analytic()

    @property
    def layer_stddev(self) -> float:
        return self.gaussian_stddev(self.calibration)

    def objective(self, attack_chunk: int) -> Objective:
        return Objective(((1.0, NoisyHidden(self.layer_stddev)),), Ramp(0.0, 0.0))


class SecureSgdConfig(SecureSgdAgmConfig, name="securesgd"):
    """Noise in proportion to vulnerability, by the heterogeneous Gaussian mechanism."""

    calibration: ClassVar[Calibration] = Extended()
    even_share: float = setting(
        0.5, above=0, at_most=1, doc="Share of the noise's variance spread evenly; vulnerable values get the rest"
    )
    relevance_after: float = setting(
        0.3, at_least=0, below=1, doc="Share of the steps before the one that releases vulnerabilities"
    )


@dataclass(frozen=True, kw_only=True)
class SecureSgdPlan(DpSgdPlan):
    """DP-SGD's plan, and the noise layer's numbers."""

    settings: SecureSgdAgmConfig

    def sizes(self) -> dict[str, object]:
        return {**super().sizes(), "settings": self.settings.to_dict()}

    def _assumptions(self) -> tuple[str, ...]:
        if not isinstance(self.settings, SecureSgdConfig):
            return super()._assumptions()
        paid = "one of the steps releases vulnerabilities in place of a gradient, clipped and noised alike"
        return (*super()._assumptions(), paid)

    def rows(self) -> list[PlanRow]:
        theorem = f"standard deviation, {self.settings.calibration.name} Gaussian mechanism"
        return super().rows() + self.settings.rows(self.settings.layer_stddev, theorem, self.settings.robustness_delta)


class EvenLayer(DpSgdTrainable):
    """DP-SGD on cross-entropy under fresh noise behind the first layer.

    That layer has norm 1, or where it is not trained the norm it has: certificates use the actual norm.
    """

    network: Network

    def recalibrate(self) -> None:
        if self.network.encoder.weight.requires_grad:
            limit_norm(self.network.encoder, spread_of(self.network))
        super().recalibrate()


class VulnerableLayer(RelevanceTrainable, EvenLayer):
    """The same; one step releases how much the loss depends on each hidden value, and the noise follows."""

    released_state = frozenset({"noise_spread"})

    @property
    def relevance_step(self) -> int:
        assert isinstance(self.config, SecureSgdConfig)
        return int(self.config.relevance_after * self.plan.steps)

    @property
    def relevance_shape(self) -> tuple[int, ...]:
        return self.network.encoder.hidden_shape

    def relevances(self, inputs: Tensor, labels: Tensor, sampler: NormalSampler) -> Tensor:
        """Return |∂loss/∂h| of each example, in a noisy pass."""
        assert isinstance(self.config, SecureSgdConfig)
        network = self.network
        with torch.no_grad():
            noise = sampler((len(inputs), *self.relevance_shape)).to(inputs)
            hidden = network.noisy_hidden(inputs) + noise * (self.config.layer_stddev * spread_of(network))
        with torch.enable_grad():
            leaf = hidden.requires_grad_()
            # A head may overwrite what it is given, and a leaf must stay.
            loss = F.cross_entropy(network.head(leaf * 1), labels, reduction="sum")
            (slope,) = torch.autograd.grad(loss, leaf)
        return slope.abs()

    def take(self, relevance: Tensor) -> None:
        assert isinstance(self.config, SecureSgdConfig)
        even, vulnerable = self.config.even_share, relevance.clamp(min=0).double()
        shares = even + (1 - even) * vulnerable / vulnerable.mean().clamp(min=1e-30)
        spread_of(self.network).copy_(heterogeneous_stddevs(1.0, shares))


class SecureSgdAgm(DpSgdFamily):
    """Privacy, and votes over even noise in the first hidden layer."""

    config_class = SecureSgdAgmConfig
    trainable = EvenLayer
    has_trainers = False
    source: ClassVar[str] = "SecureSGD-AGM: PixelDP's Proposition 1 by the analytic Gaussian mechanism"

    def plan(self, config: RunConfig, info: DatasetInfo, network: Classifier | None) -> SecureSgdPlan:
        method = config.method
        assert isinstance(method, SecureSgdAgmConfig)
        plan = super().plan(config, info, network)
        _ = method.layer_stddev  # a bound that no noise is enough for is found here
        if config.training.steps < 2 and isinstance(method, SecureSgdConfig):
            raise SettingError("the only step would release relevances.", remedy="Set training.steps=2 or more.")
        own = {field.name: getattr(plan, field.name) for field in fields(plan)}
        return SecureSgdPlan(**own, settings=method)

    def register_buffers(self, network: Classifier) -> None:
        register_buffers(_split(network))

    def require_trainable(self, config: RunConfig, network: Classifier) -> None:
        _split(network)

    certificates = ("votes",)

    def certifies(self, config: RunConfig) -> bool:
        return True

    def verifiers(self, config: RunConfig, plan: Plan, network: Classifier) -> tuple[Verifier, ...]:
        method = config.method
        assert isinstance(method, SecureSgdAgmConfig)
        return (gaussian_verifier(config, _split(network), method.layer_stddev, method.calibration, self.source),)


class SecureSgd(SecureSgdAgm):
    """Privacy, and votes over noise that is larger where the loss is more vulnerable."""

    config_class = SecureSgdConfig
    trainable = VulnerableLayer
    source = "SecureSGD: PixelDP's Proposition 1 by the heterogeneous Gaussian mechanism"
