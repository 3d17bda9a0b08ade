"""`pretrain`: train a recipe's network on public images, without privacy, and write it as a prior with its card.

Supervised, it descends on the recipe's own losses, so that a prior for a method that certifies by boxes is made
certifiable too. There is no clipping and no noise, and nothing private is read: of the recipe's data only the shape of
an input and the number of classes count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from stobatch import data
from stobatch.config import ModelConfig, RunConfig, require_config
from stobatch.data import DatasetInfo
from stobatch.data.overlap import digest_records
from stobatch.errors import ModelError, SettingError
from stobatch.evaluation.tables import data_root
from stobatch.loading import fresh_network
from stobatch.methods import method_of
from stobatch.models import Classifier
from stobatch.optimisers import OPTIMISERS
from stobatch.pretraining.contrastive import Contrast, view
from stobatch.pretraining.images import PublicImages, public_images
from stobatch.progress import progress
from stobatch.results import PriorCard
from stobatch.results.prior import prior_files, require_new_prior, write_prior
from stobatch.runs import source as source_code
from stobatch.seeds import Seeds
from stobatch.sound.losses import CrossEntropy, Objective, Ramp, normal_sampler
from stobatch.sound.settings import DpSgdSettings
from stobatch.training.device import use_device
from stobatch.votes.noise import GaussianNoise, LaplaceNoise

STEPS, BATCH_SIZE, LEARNING_RATE = 4000, 256, 0.003
_FALLING = 0.5
"""Share of the steps over which the learning rate falls to 0, at the end."""
_ATTACKED_AT_ONCE = 512
NONE = "none"
"""In place of names that `may_contain` could have."""

Loss = Callable[[Tensor, Tensor, float, torch.Generator], Tensor]
"""Of a batch of images and labels at some progress from 0 to 1."""


def pretrain(
    config: RunConfig,
    source: str,
    out: str | Path,
    *,
    steps: int = STEPS,
    batch_size: int = BATCH_SIZE,
    learning_rate: float = LEARNING_RATE,
    objective: str | None = None,
    licence: str | None = None,
    may_contain: Sequence[str] | None = None,
    seed: int = 0,
    network: nn.Module | None = None,
    quiet: bool = False,
) -> PriorCard:
    """Make a prior for the network of these settings from public images, and return its card.

    `source` is `digits` (`fonts`, `strokes`), `dead-leaves`, `generators`, a public data set (`tiny_imagenet:30` for
    its first 30 classes) or a folder of images.
    `objective` is `supervised`, the default where there are labels, or `contrastive`. `licence` and `may_contain` are
    what only you know of a folder: without the latter its card says that the prior may have seen anything.

    **Guarantee.** Nothing is written before training has ended; the same arguments on the same machine and versions
    give the same weights.
    """
    require_config(config)
    _require_positive(steps=steps, batch_size=batch_size, learning_rate=learning_rate)
    out = Path(out)
    require_new_prior(out)
    device, seeds = use_device(config.machine), Seeds.reproducible(seed)
    info = _describe(config, network)
    with progress("images", 1, quiet=quiet) as advance:
        images = public_images(
            source, config.data, info.input_shape, root=data_root(config), seeds=seeds, count=steps * batch_size,
            licence=licence,
        )  # fmt: skip
        advance(1)
    objective = _objective(objective, images, source)
    classes = images.num_classes if objective == "supervised" and images.num_classes else info.num_classes
    if isinstance(network, Classifier) and network.num_classes != classes:
        raise ModelError(
            f"your network has {network.num_classes} classes, {source} has {classes}.",
            remedy="Hand over one with as many, or set objective='contrastive'.",
        )
    net = fresh_network(config, replace(info, num_classes=classes), seeds, network)
    own = tuple(net.state_dict())  # a start is of the network, without what the method keeps in it
    method_of(config).register_buffers(net)
    net.to(device)
    last_loss = _train(net, images, objective, config, seeds, (steps, batch_size, learning_rate), quiet)
    card = PriorCard(
        name=prior_files(out)[0].stem,
        made_by=f"stobatch pretrain, version {source_code()['stobatch']}",
        architecture=None if network is not None else _plain_model(config.model).to_dict(),
        input_shape=info.input_shape,
        num_classes=classes,
        sources=images.sources,
        may_contain=images.may_contain if may_contain is None else tuple(n for n in may_contain if n != NONE),
        weights_sha256="",
        method="supervised" if objective == "supervised" else "contrastive",
        settings={
            "steps": steps,
            "batch_size": batch_size,
            "learning_rate": learning_rate,
            "seed": seed,
            "losses_of": config.method.to_dict() if objective == "supervised" else None,
            "last_loss": last_loss,
            "torch": torch.__version__,
            "commit": source_code()["commit"],
            "device": str(device),
        },
        tuned_on=images.tuned_on,
    )
    weights = net.state_dict()
    digests = None if images.records is None else digest_records(images.records)
    return write_prior(out, {name: weights[name] for name in own}, card, digests)


def _require_positive(**numbers: float) -> None:
    for name, number in numbers.items():
        if not 0 < number < float("inf"):
            raise SettingError(f"{name}={number} is not allowed.", remedy=f"Give {name} a number above 0.")


def _plain_model(model: ModelConfig) -> ModelConfig:
    """Return the network without what is to be private training's own: a prior is trained whole."""
    return ModelConfig(
        architecture=model.architecture, normalisation=model.normalisation, last_hidden_size=model.last_hidden_size
    )


def _describe(config: RunConfig, network: nn.Module | None) -> DatasetInfo:
    """Return the shape of inputs and the number of classes; of data that are handed over a classifier knows them."""
    if not isinstance(network, Classifier):
        return data.describe(config.data, data_root(config))
    channels, height, width = network.input_shape
    names = tuple(map(str, range(network.num_classes)))
    return DatasetInfo("network", (channels, height, width), network.num_classes, 1, 1, names)


def _objective(asked: str | None, images: PublicImages, source: str) -> str:
    if asked not in (None, "supervised", "contrastive"):
        raise SettingError(f"objective={asked} is not allowed.", remedy="Use supervised or contrastive.")
    if asked == "supervised" and images.num_classes is None:
        raise SettingError(
            f"the images of {source} have no labels.", remedy="Set objective=contrastive, or put them in class folders."
        )
    return asked or ("contrastive" if images.num_classes is None else "supervised")


def _train(
    network: Classifier,
    images: PublicImages,
    objective: str,
    config: RunConfig,
    seeds: Seeds,
    settings: tuple[int, int, float],
    quiet: bool,
) -> float:
    """Descend with Adam, and return the last loss."""
    steps, batch_size, learning_rate = settings
    loss_of, parameters = (_supervised if objective == "supervised" else _contrastive)(network, config, seeds)
    optimiser = OPTIMISERS["adam"](parameters, lr=learning_rate)  # type: ignore[call-arg]
    network.train()
    network.calibrate()
    loss = torch.zeros(())
    with progress("pretrain", steps, quiet=quiet) as advance:
        for step in range(steps):
            generator = seeds.generator("step", step)
            inputs, labels = images.draw(batch_size, generator)
            optimiser.param_groups[0]["lr"] = learning_rate * min(1.0, (steps - step) / (_FALLING * steps))
            there = inputs.to(network.device, network.dtype), labels.to(network.device)
            loss = loss_of(*there, step / steps, generator)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            network.calibrate()
            advance(1)
    network.eval()
    last = float(loss.detach())
    if not torch.isfinite(loss.detach()):
        raise ModelError("the loss is not a number any more.", remedy="Lower the learning rate.")
    return last


def _supervised(network: Classifier, config: RunConfig, seeds: Seeds) -> tuple[Loss, list[nn.Parameter]]:
    """Return the losses of the recipe's method; of a method that has none per example, cross-entropy."""
    method = config.method
    if isinstance(method, DpSgdSettings):
        mixture = method.objective(_ATTACKED_AT_ONCE)
    else:
        mixture = Objective(((1.0, CrossEntropy()),), Ramp(0.0, 0.0))

    def loss(inputs: Tensor, labels: Tensor, done: float, generator: torch.Generator) -> Tensor:
        normal = normal_sampler(generator, network.device)
        batch, losses = mixture.prepare(network, inputs, labels, done, normal)
        return losses(network, batch).mean()

    return loss, list(network.parameters())


def _contrastive(network: Classifier, config: RunConfig, seeds: Seeds) -> tuple[Loss, list[nn.Parameter]]:
    """Return losses of two views of each image; under the noise that the method takes votes with, where it does."""
    contrast, method = Contrast(network, seeds.generator("projection")), config.method
    noise = method.noise if isinstance(method, DpSgdSettings) else None
    if not isinstance(noise, GaussianNoise | LaplaceNoise):
        noise = None

    def seen(images: Tensor, generator: torch.Generator) -> Tensor:
        views = view(images.cpu(), generator)
        return (views if noise is None else views + noise.draw(tuple(views.shape), generator)).to(images)

    def loss(inputs: Tensor, labels: Tensor, done: float, generator: torch.Generator) -> Tensor:
        return contrast.loss(seen(inputs, generator), seen(inputs, generator))

    return loss, list(contrast.parameters())
