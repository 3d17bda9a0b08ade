"""Thousands of small models of the published mechanism, trained side by side: what a many-run audit needs.

Every tensor has a leading axis with one entry per model. Noise, batches, first weights and attack sizes are drawn from
each model's own seeds exactly as `PublishedTrainable` draws them, so each model ends where that would have ended, up to
rounding (tests/unit/published/test_stobatch_stack.py); what is gained is one pass instead of a thousand.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F  # noqa: N812
from torch.nn.grad import conv2d_weight

from stobatch.config import RunConfig
from stobatch.data import Examples
from stobatch.data.partition import fixed_disjoint_batches
from stobatch.models import Network
from stobatch.models.affine import AffineEncoder, ConvEncoder, limit_columns
from stobatch.models.network import ReferenceNorm, calibrating
from stobatch.optimisers import OPTIMISERS
from stobatch.progress import Tick
from stobatch.published.losses import example_weights, label_noise_term, taylor_loss
from stobatch.published.noise import PrivateNoise
from stobatch.published.settings import PublishedConfig, schedule_of
from stobatch.seeds import Seeds
from stobatch.training.descent import Descent
from stobatch.training.loop import ManyModels
from stobatch.types import PAPER_RANGE

Tensors = dict[str, Tensor]


class _Calls(nn.Module):
    """A function of a network as a module, so that parameters and buffers can be substituted in it."""

    def __init__(self, network: Network, function: Callable[..., Any]) -> None:
        super().__init__()
        self.network, self.function = network, function

    def forward(self, *arguments: Any) -> Any:
        return self.function(self.network, *arguments)


class _AsMatrix(nn.Module):
    """An encoder as the matrix that it is. Models have small images: products of matrices beat a convolution each."""

    matrix: Tensor

    def __init__(self, encoder: AffineEncoder) -> None:
        super().__init__()
        self.weight, self.hidden_shape = encoder.weight, encoder.hidden_shape
        self.register_buffer("matrix", torch.empty(prod(encoder.hidden_shape), prod(encoder.input_shape)))

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs.flatten(1) @ self.matrix.t()).reshape(-1, *self.hidden_shape)


@dataclass(frozen=True)
class _Encoders:
    """From the weights of many encoders to their matrices, and from sums over matrices back to weights."""

    like: AffineEncoder

    def _basis(self, weight: Tensor) -> Tensor:
        size = prod(self.like.input_shape)
        return torch.eye(size, dtype=weight.dtype).reshape(size, *self.like.input_shape)

    def matrices(self, weight: Tensor) -> Tensor:
        """[models, hidden values, inputs]."""
        models, like = len(weight), self.like
        if not isinstance(like, ConvEncoder):
            return weight
        maps = F.conv2d(self._basis(weight), weight.flatten(0, 1), stride=like.stride, padding=like.padding)
        return maps.reshape(len(maps), models, -1).permute(1, 2, 0).contiguous()

    def weights(self, matrices: Tensor) -> Tensor:
        """Return the transpose of `matrices`."""
        models, like = len(matrices), self.like
        if not isinstance(like, ConvEncoder):
            return matrices
        maps = matrices.permute(2, 0, 1).reshape(-1, models * like.num_maps, *like.hidden_shape[1:])
        shape = (models * like.num_maps, *like.weight.shape[1:])
        found = conv2d_weight(self._basis(matrices), list(shape), maps, stride=like.stride, padding=like.padding)  # type: ignore[no-untyped-call]
        weights: Tensor = found.unflatten(0, (models, -1))
        return weights


class PublishedStack(ManyModels):
    """Algorithm 1, or 4, for many models at once; training examples are crafted by I-FGSM alone."""

    def __init__(
        self,
        config: RunConfig,
        method: PublishedConfig,
        networks: Sequence[Network],
        noises: Sequence[PrivateNoise],
        pool: Examples,
        members: Tensor,
        seeds: Sequence[Seeds],
    ) -> None:
        self.config, self.method, self.network = config, method, networks[0]
        self.encoders = _Encoders(self.network.encoder)
        self.tensors: Tensors = {
            name: torch.stack([dict(network.named_parameters())[name].detach() for network in networks])
            for name, _ in self.network.named_parameters()
        }
        self.head = [name for name in self.tensors if name.startswith("head.")]
        self.tensors |= {
            name: torch.stack([getattr(noise, name) for noise in noises]).to(self.network.dtype)
            for name in ("input_noise", "hidden_noise")
        }
        self.label_noise = torch.stack([noise.label_noise for noise in noises])
        self.batches = torch.stack(
            [fixed_disjoint_batches(members.shape[1], method.batch_size, each.generator("batches")) for each in seeds]
        )
        self.schedules = [schedule_of(method, self.batches.shape[1], each) for each in seeds]
        self.seeds, self.labels = seeds, pool.labels[members]
        self.noisy_inputs = pool.inputs[members] + self.tensors["input_noise"].unsqueeze(1)
        self.network = copy.deepcopy(self.network)
        self.network.encoder = _AsMatrix(self.network.encoder)  # type: ignore[assignment]
        self._after_update()

    def _each(self, function: Callable[..., Any], *arguments: Tensor) -> Any:
        """Return a function of (network, ...) for every model with its own tensors."""
        module = _Calls(self.network, function)

        def one(tensors: Tensors, *rest: Tensor) -> Any:
            return functional_call(module, {f"network.{name}": value for name, value in tensors.items()}, rest)

        return vmap(one)(self.tensors, *arguments)

    def train(self, tick: Tick) -> None:
        encoder, head = self.tensors["encoder.weight"], [self.tensors[name] for name in self.head]
        rate = self.config.training.learning_rate
        rules = [
            OPTIMISERS["adam"]([encoder], lr=rate),  # type: ignore[call-arg]
            OPTIMISERS[self.config.training.optimiser](head, lr=rate),  # type: ignore[call-arg]
        ]
        descent = Descent(self.config.training, self.tensors, rules)
        for step in range(self.config.training.steps):
            tasks = [schedule.tasks(step) for schedule in self.schedules]
            sums: Tensors = {}
            for turn in range(len(tasks[0])):
                found = self._gradients([each[turn] for each in tasks], step)
                sums = {name: sums[name] + value if sums else value for name, value in found.items()}
            for name, value in sums.items():
                self.tensors[name].grad = value / len(tasks[0])
            descent.move(step)
            self._after_update()
            tick(1 / self.config.training.steps)

    def _gradients(self, tasks: Sequence[Any], step: int) -> Tensors:
        """Return what `PublishedTrainable.gradients` computes for each model."""
        own = torch.arange(len(tasks))
        benign = self.batches[own, [task.benign_batch for task in tasks]]
        source = self.batches[own, [task.adversarial_batch for task in tasks]]
        rows = own.unsqueeze(1)
        generators = [
            each.generator("step", step, "trainer", t.trainer) for each, t in zip(self.seeds, tasks, strict=True)
        ]
        sizes = [(1 - float(torch.rand((), generator=g))) * self.method.train_attack_max_radius for g in generators]
        centres = self.noisy_inputs[rows, source]
        adversarial = self._crafted(centres, torch.tensor(sizes, dtype=centres.dtype))
        inputs = torch.cat([self.noisy_inputs[rows, benign], adversarial], 1)
        labels = torch.cat([self.labels[rows, benign], self.labels[rows, source]], 1)
        weights = example_weights(benign.shape[1], source.shape[1], self.method.adversarial_weight)
        hidden = self._each(Network.noisy_hidden, inputs)
        # Eq. 19 as a sum over matrices, ½ - x̄ against h̄.
        sums = hidden.flatten(2).transpose(1, 2) @ (0.5 - inputs).flatten(2)
        gradients: Tensors = {"encoder.weight": self.encoders.weights(sums)}
        heads = {name: self.tensors[name] for name in self.head}
        gradients |= vmap(grad(partial(self._loss, weights=weights)))(
            heads, self._norms(), hidden, labels, self.label_noise
        )
        return gradients

    def _norms(self) -> Tensors:
        return {
            name: value for name, value in self.tensors.items() if name.startswith("head.") and name not in self.head
        }

    def _loss(
        self, head: Tensors, norms: Tensors, hidden: Tensor, labels: Tensor, noise: Tensor, *, weights: Tensor
    ) -> Tensor:
        values = {name.removeprefix("head."): value for name, value in {**head, **norms}.items()}
        scores = functional_call(self.network.head, values, (hidden.clone(),))
        losses = weights * taylor_loss(scores, labels, self.method.taylor)
        return losses.sum() - label_noise_term(values["output.weight"], noise)

    def _crafted(self, centres: Tensor, sizes: Tensor) -> Tensor:
        """I-FGSM from perturbed inputs, away from what each model predicts at the present point."""
        sizes = sizes.reshape(-1, *[1] * (centres.ndim - 1))
        shift = self.tensors["input_noise"].unsqueeze(1)
        lower = torch.maximum(centres - sizes, PAPER_RANGE.low + shift)
        upper = torch.minimum(centres + sizes, PAPER_RANGE.high + shift)
        points, steps = centres, self.method.train_attack_steps
        for _ in range(steps):
            slope = self._each(_climb, points)
            points = torch.clamp(points + slope.sign() * (sizes / steps), lower, upper)
        return points

    def _after_update(self) -> None:
        weight = self.tensors["encoder.weight"]
        limit_columns(weight.view(-1, *self.encoders.like.weight.shape[1:]), self.method.encoder_norm_bound)
        self.tensors["encoder.matrix"] = self.encoders.matrices(weight)
        self._calibrate()

    def _calibrate(self) -> None:
        """The reference statistics of every model, layer by layer, as `Network.calibrate` takes them."""
        layers = {name: layer for name, layer in self.network.named_modules() if isinstance(layer, ReferenceNorm)}

        def statistics(network: Network) -> Tensors:
            seen: Tensors = {}

            def keep(name: str, layer: ReferenceNorm, *_: Any) -> None:
                seen[f"{name}.mean"], seen[f"{name}.spread"] = layer.mean, layer.spread

            hooks = [layer.register_forward_hook(partial(keep, name)) for name, layer in layers.items()]
            try:
                network(network.anchors)
            finally:
                for hook in hooks:
                    hook.remove()
            return seen

        with calibrating(self.network) as needed:
            if needed:
                self.tensors |= self._each(statistics)

    @torch.no_grad()
    def logits(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self._each(lambda network: network(inputs))
        return scores


def _climb(network: Network, points: Tensor) -> Tensor:
    """Return the gradient of the loss at the predicted labels, by inputs."""

    def loss(inputs: Tensor) -> Tensor:
        scores = network.scores_of_noisy(inputs)
        return nn.functional.cross_entropy(scores, scores.detach().argmax(1), reduction="sum")

    slope: Tensor = grad(loss)(points)
    return slope
