"""PixelDP (Lecuyer et al., 2019): a noise layer certifies predictions. It does nothing for the training data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from stobatch.baselines.noise_layer import LayerLaplace
from stobatch.baselines.noise_layer_verifier import (
    NoiseLayerSettings,
    NoiseLayerVerifier,
    gaussian_verifier,
    limit_norm,
    register_buffers,
    shrink,
    spread_of,
)
from stobatch.baselines.plain import OpenTrainable, require_batches
from stobatch.config import RunConfig
from stobatch.data import DatasetInfo, TrainingExamples
from stobatch.dp.gaussian import Classical
from stobatch.dp.plan import OpenPlan, Plan, PlanRow
from stobatch.methods import Method, require_per_example_at_size, split_network
from stobatch.models import AffineEncoder, Classifier, Network, budget_mb, require_per_example
from stobatch.seeds import Seeds
from stobatch.settings import setting
from stobatch.sound.losses import NormalSampler
from stobatch.sound.settings import view_noise
from stobatch.types import Norm
from stobatch.verifier import Verifier

_SOURCE = "PixelDP, Proposition 1"

_split = partial(split_network, method="PixelDP")


class PixelDpConfig(NoiseLayerSettings, name="pixeldp"):
    """Noise for perturbations up to the construction bound; ε_r at most 1, as its theorem has it."""

    layer_noise: str = setting(
        "gaussian", choices=("gaussian", "laplace"), doc="Gaussian for l2, Laplace for l1 bounds"
    )
    batch_size: int = setting(256, at_least=1, doc="Examples of a step")

    @property
    def size(self) -> float:
        """Return the noise for a first layer of norm 1: standard deviation if Gaussian, scale if Laplace."""
        if self.layer_noise == "laplace":
            return self.construction_bound / self.robustness_epsilon
        return self.gaussian_stddev(Classical())


@dataclass(frozen=True)
class PixelDpPlan(OpenPlan):
    """No privacy; and the noise layer's numbers."""

    settings: PixelDpConfig

    def sizes(self) -> dict[str, object]:
        return {**super().sizes(), "settings": self.settings.to_dict()}

    def rows(self) -> list[PlanRow]:
        settings = self.settings
        meaning, delta = {
            "gaussian": ("standard deviation, classical Gaussian mechanism", settings.robustness_delta),
            "laplace": ("scale L/ε_r, Laplace", 0.0),
        }[settings.layer_noise]
        return super().rows() + settings.rows(settings.size, meaning, delta)


class GaussianLayer(OpenTrainable):
    """Cross-entropy under fresh noise behind a first layer of l2 norm 1."""

    network: Network

    def __init__(
        self, network: Network, train: TrainingExamples, seeds: Seeds, *, size: float, batch_size: int,
        memory_mb: int, pieces: int,
    ) -> None:  # fmt: skip
        self.size = size
        super().__init__(network, train, seeds, batch_size=batch_size, memory_mb=memory_mb, pieces=pieces)

    def noise(self, shape: tuple[int, ...], sampler: NormalSampler) -> Tensor:
        return sampler(shape) * (self.size * spread_of(self.network))

    def scores(self, inputs: Tensor, sampler: NormalSampler) -> Tensor:
        network = self.network
        noise = self.noise((len(inputs), *network.encoder.hidden_shape), sampler).to(inputs)
        logits: Tensor = network.head(network.noisy_hidden(inputs) + noise)
        return logits

    def after_update(self) -> None:
        self.limit()
        super().after_update()

    def limit(self) -> None:
        limit_norm(self.network.encoder, spread_of(self.network))


class LaplaceLayer(GaussianLayer):
    """The same with Laplace noise, behind a first layer of l1 norm 1."""

    def noise(self, shape: tuple[int, ...], sampler: NormalSampler) -> Tensor:
        return view_noise("laplace", 2**0.5 * self.size, shape, sampler)

    def limit(self) -> None:
        limit_l1_norm(self.network.encoder)


@torch.no_grad()
def limit_l1_norm(encoder: AffineEncoder) -> None:
    """Shrink θ1 so that no input value moves the hidden layer by more than its own size, in l1."""
    sums = encoder.absolute().decode(torch.ones(1, *encoder.hidden_shape).to(encoder.weight))
    shrink(encoder, sums.max())


_LAYERS: dict[str, type[GaussianLayer]] = {"gaussian": GaussianLayer, "laplace": LaplaceLayer}


class PixelDp(Method):
    """Certificates without privacy."""

    config_class = PixelDpConfig
    certificates = ("votes",)

    def plan(self, config: RunConfig, info: DatasetInfo, network: Classifier | None) -> PixelDpPlan:
        method = config.method
        assert isinstance(method, PixelDpConfig)
        require_batches(info, method.batch_size, batches=1)
        _ = method.size  # an ε_r that the theorem does not cover is found here
        return PixelDpPlan(info.num_train, method.batch_size, "PixelDP", method)

    def register_buffers(self, network: Classifier) -> None:
        register_buffers(_split(network))

    def prepare(
        self, config: RunConfig, plan: Plan, network: Classifier, train: TrainingExamples, seeds: Seeds
    ) -> GaussianLayer:
        method = config.method
        assert isinstance(method, PixelDpConfig)
        require_per_example(network)
        trainable = _LAYERS[method.layer_noise](
            _split(network), train, seeds, size=method.size, batch_size=method.batch_size,
            memory_mb=budget_mb(config.machine), pieces=config.machine.pieces,
        )  # fmt: skip
        require_per_example_at_size(config, network, min(trainable.chunk, method.batch_size))
        return trainable

    def verifiers(self, config: RunConfig, plan: Plan, network: Classifier) -> tuple[Verifier, ...]:
        method = config.method
        assert isinstance(method, PixelDpConfig)
        if method.layer_noise == "gaussian":
            return (gaussian_verifier(config, _split(network), method.size, Classical(), _SOURCE),)
        split, norm, memory_mb = _split(network), Norm(config.evaluation.norm), budget_mb(config.machine)
        noise = LayerLaplace(split.encoder, method.size)
        return (
            NoiseLayerVerifier(split, noise, None, norm, config.certification, source=_SOURCE, memory_mb=memory_mb),
        )
