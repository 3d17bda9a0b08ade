"""Per-example losses for DP-SGD: whatever an example is made into, it stays one contribution.

Each term turns an example into a loss by means of that example alone: its noisy views, its own adversarial point, the
bounds of its own box. So the gradient of any mixture is one vector per example, and clipping that vector bounds what
the example can do, however many views and attacks went into it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from stobatch.bounds.boxes import Box, worst_case_scores
from stobatch.dp.clipping import Batch
from stobatch.models import Classifier, HandedOver, Layered, Network
from stobatch.models.scattering import Scattering
from stobatch.published.losses import reconstruction_losses


@dataclass(frozen=True)
class Ramp:
    """How far training has come towards its full difficulty: 0 while warming up, then a straight line to 1."""

    warm_up: float
    length: float

    def share(self, progress: float) -> float:
        """For progress from 0 to 1.

        >>> [Ramp(0.2, 0.5).share(progress) for progress in (0.1, 0.45, 0.9)]
        [0.0, 0.5, 1.0]
        """
        return (
            min(1.0, max(0.0, (progress - self.warm_up) / self.length))
            if self.length
            else float(progress >= self.warm_up)
        )


class Term(ABC):
    """One way to make a loss of an example. `share` is how much of the full difficulty applies."""

    ramped: bool = False
    """Whether it waits for the ramp; until then its weight belongs to plain cross-entropy."""
    takes_features: bool = False
    """Whether features of a fixed first layer may stand in the examples' place."""

    def prepare(
        self, network: Classifier, inputs: Tensor, labels: Tensor, share: float, normal: NormalSampler
    ) -> Batch:
        """Return what the loss needs beside inputs and labels, with one leading entry per example; held fixed."""
        return ()

    @abstractmethod
    def losses(self, network: nn.Module, inputs: Tensor, labels: Tensor, prepared: Batch, share: float) -> Tensor:
        """Return one loss per example."""


NormalSampler = Callable[[tuple[int, ...]], Tensor]
"""Standard normal numbers of a shape, fresh at every call and independent of all data."""


@final
class CrossEntropy(Term):
    """Of the example as it is."""

    takes_features = True

    def losses(self, network: nn.Module, inputs: Tensor, labels: Tensor, prepared: Batch, share: float) -> Tensor:
        return F.cross_entropy(network(inputs), labels, reduction="none")


@final
@dataclass(frozen=True)
class IntervalBounds(Term):
    """Of the worst that interval bounds allow in the example's box; the box grows along the ramp."""

    radius: float
    ramped = True

    def losses(self, network: nn.Module, inputs: Tensor, labels: Tensor, prepared: Batch, share: float) -> Tensor:
        return F.cross_entropy(self.worst(network, inputs, labels, share), labels, reduction="none")

    def worst(self, network: nn.Module, inputs: Tensor, labels: Tensor, share: float) -> Tensor:
        """Return the scores, less the label's, that are worst for each example."""
        assert isinstance(network, Layered | HandedOver)
        layers = network.layers if isinstance(network, Layered) else network.module
        return worst_case_scores(layers, Box.around(inputs, share * self.radius), labels)


Attack = Callable[[Classifier, Tensor, Tensor, float], Tensor]
"""From a network, examples, labels and a radius to a point for each example, crafted from that example alone."""


@final
@dataclass(frozen=True)
class SmallBox(Term):
    """Of the worst that interval bounds allow in a small box around the example's own adversarial point (SABR).

    `box_share` of the radius is the small box's, the attack has the rest, so the box stays in the example's own. At 1
    it is `IntervalBounds`, near 0 `Adversarial` (Müller et al., 2023).

    **Guarantee.** The point is crafted from this example and the present parameters, which are released: no other
    example, and no number that several share. So an example's contribution is its own, and clipping bounds it as ever.
    """

    radius: float
    box_share: float
    attack: Attack
    ramped = True

    def prepare(
        self, network: Classifier, inputs: Tensor, labels: Tensor, share: float, normal: NormalSampler
    ) -> Batch:
        return (self.attack(network, inputs, labels, (1 - self.box_share) * share * self.radius),)

    def losses(self, network: nn.Module, inputs: Tensor, labels: Tensor, prepared: Batch, share: float) -> Tensor:
        return IntervalBounds(self.box_share * self.radius).losses(network, prepared[0], labels, (), share)


@final
@dataclass(frozen=True)
class MixedScores(Term):
    """Of scores between those at the example's own adversarial point and the worst in its box (CC-IBP).

    `box_share` is the weight of the worst ones. At 1 it is `IntervalBounds`, near 0 `Adversarial` (De Palma et al.,
    2024).

    **Guarantee.** As for `SmallBox`: nothing of another example enters.
    """

    radius: float
    box_share: float
    attack: Attack
    ramped = True

    def prepare(
        self, network: Classifier, inputs: Tensor, labels: Tensor, share: float, normal: NormalSampler
    ) -> Batch:
        return (self.attack(network, inputs, labels, share * self.radius),)

    def losses(self, network: nn.Module, inputs: Tensor, labels: Tensor, prepared: Batch, share: float) -> Tensor:
        # Worst scores are differences from the label's, and so are made those at the point; the softmax does not mind.
        attacked = network(prepared[0])
        gaps = attacked - attacked.gather(1, labels[:, None])
        worst = IntervalBounds(self.radius).worst(network, inputs, labels, share)
        return F.cross_entropy((1 - self.box_share) * gaps + self.box_share * worst, labels, reduction="none")


@final
@dataclass(frozen=True)
class Adversarial(Term):
    """Of the example's own adversarial point; `attack` crafts it against the present network."""

    radius: float
    attack: Attack
    ramped = True

    def prepare(
        self, network: Classifier, inputs: Tensor, labels: Tensor, share: float, normal: NormalSampler
    ) -> Batch:
        return (self.attack(network, inputs, labels, share * self.radius),)

    def losses(self, network: nn.Module, inputs: Tensor, labels: Tensor, prepared: Batch, share: float) -> Tensor:
        return F.cross_entropy(network(prepared[0]), labels, reduction="none")


@final
@dataclass(frozen=True)
class Margin(Term):
    """Of the example with its scattering moved against it, as far in l2 as a picture within the radius could, about."""

    radius: float
    ramped = True
    takes_features = True

    @torch.no_grad()
    def prepare(
        self, network: Classifier, inputs: Tensor, labels: Tensor, share: float, normal: NormalSampler
    ) -> Batch:
        assert isinstance(network, Layered)
        front, head = network.layers[0], network.layers[-1]
        assert isinstance(front, Scattering)
        assert isinstance(head, nn.Linear)
        features = front(inputs)
        scores = head(features.flatten(1))
        errors = scores.softmax(1) - F.one_hot(labels, scores.shape[1])
        against = front.lifted(errors @ head.weight)
        lengths = against.flatten(1).norm(dim=1).clamp(min=torch.finfo(against.dtype).tiny)
        moved = front.folded(against * (share * self.radius / lengths).view(-1, 1, 1, 1))
        return ((features + moved).flatten(1),)

    def losses(self, network: nn.Module, inputs: Tensor, labels: Tensor, prepared: Batch, share: float) -> Tensor:
        assert isinstance(network, Layered)
        return F.cross_entropy(network.layers[-1](prepared[0]), labels, reduction="none")


@final
@dataclass(frozen=True)
class NoisyViews(Term):
    """The mean over several noisy views of the example, as a smoothed classifier will see it.

    With a radius all views are moved first, by one shift within it in l2, against the example: steps of the gradient of
    their mean loss (SmoothAdv, Salman et al., 2019). The radius grows along the ramp.

    **Guarantee.** As for `SmallBox`: the shift is the example's own.
    """

    draw: Callable[[tuple[int, ...], NormalSampler], Tensor]
    num_views: int
    radius: float = 0.0
    steps: int = 1

    def prepare(
        self, network: Classifier, inputs: Tensor, labels: Tensor, share: float, normal: NormalSampler
    ) -> Batch:
        views = inputs.unsqueeze(1) + self.draw((len(inputs), self.num_views, *inputs.shape[1:]), normal).to(inputs)
        if share * self.radius and len(inputs):
            views = views + self._against(network, views, labels, share * self.radius)
        return (views,)

    def _against(self, network: Classifier, views: Tensor, labels: Tensor, radius: float) -> Tensor:
        """Return a shift for each example, with a second dimension for its views."""
        shift = torch.zeros_like(views[:, :1])
        for _ in range(self.steps):
            moving = shift.clone().requires_grad_()
            with torch.enable_grad():
                total = self.losses(network, views, labels, (views + moving,), 1.0).sum()
            (gradient,) = torch.autograd.grad(total, moving)
            shift = _shortened(shift + _shortened(gradient.nan_to_num(), 2 * radius / self.steps, exactly=True), radius)
        return shift

    def losses(self, network: nn.Module, inputs: Tensor, labels: Tensor, prepared: Batch, share: float) -> Tensor:
        (views,) = prepared
        scores = network(views.flatten(0, 1))
        each = F.cross_entropy(scores, labels.repeat_interleave(self.num_views), reduction="none")
        return each.reshape(len(labels), self.num_views).mean(1)


def _shortened(vectors: Tensor, length: float, *, exactly: bool = False) -> Tensor:
    """Return each example's vector with at most this l2 length, or exactly this one; zero stays zero."""
    lengths = vectors.flatten(1).norm(dim=1).clamp(min=torch.finfo(vectors.dtype).tiny)
    factors: Tensor = length / lengths
    factors = factors if exactly else factors.clamp(max=1.0)
    return vectors * factors.view(-1, *[1] * (vectors.ndim - 1))


@final
@dataclass(frozen=True)
class NoisyHidden(Term):
    """Of the example with fresh Gaussian noise behind the first layer, as a network with a noise layer will answer.

    The network says how its noise is spread: `noise_spread` has an entry per hidden value, of mean square 1.
    """

    stddev: float

    def prepare(
        self, network: Classifier, inputs: Tensor, labels: Tensor, share: float, normal: NormalSampler
    ) -> Batch:
        assert isinstance(network, Network)
        assert isinstance(network.noise_spread, Tensor)
        return (normal((len(inputs), *network.encoder.hidden_shape)).to(inputs) * (self.stddev * network.noise_spread),)

    def losses(self, network: nn.Module, inputs: Tensor, labels: Tensor, prepared: Batch, share: float) -> Tensor:
        assert isinstance(network, Network)
        scores = network.head(network.noisy_hidden(inputs) + prepared[0])
        return F.cross_entropy(scores, labels, reduction="none")


@final
class Reconstruction(Term):
    """The paper's auto-encoder objective R̃ (Eq. 6) of the first layer, for networks that have an encoder."""

    def losses(self, network: nn.Module, inputs: Tensor, labels: Tensor, prepared: Batch, share: float) -> Tensor:
        assert isinstance(network, Network)
        return reconstruction_losses(network.encoder, inputs)


@final
@dataclass(frozen=True)
class Objective:
    """A weighted mixture of terms, with a ramp for those that are hard."""

    terms: tuple[tuple[float, Term], ...]
    ramp: Ramp

    @property
    def takes_features(self) -> bool:
        """Whether features of a fixed first layer may stand in the examples' place."""
        return all(term.takes_features for _, term in self.terms)

    def prepare(
        self, network: Classifier, inputs: Tensor, labels: Tensor, progress: float, normal: NormalSampler
    ) -> tuple[Batch, Callable[[nn.Module, Batch], Tensor]]:
        """Return the batch with all that is fixed for this step, and the losses as a function of it and the
        parameters.
        """
        share = self.ramp.share(progress)
        plain = sum(weight * (1 - share) for weight, term in self.terms if term.ramped)
        plain += sum(weight for weight, term in self.terms if isinstance(term, CrossEntropy))
        others = [(w * (share if t.ramped else 1.0), t) for w, t in self.terms if not isinstance(t, CrossEntropy)]
        active = [(weight, term) for weight, term in ((plain, CrossEntropy()), *others) if weight]
        parts = [term.prepare(network, inputs, labels, share, normal) for _, term in active]

        def losses(module: nn.Module, batch: Batch) -> Tensor:
            given, wanted, *rest = batch
            total = given.new_zeros(len(wanted))
            for (weight, term), part in zip(active, parts, strict=True):
                own, rest = tuple(rest[: len(part)]), rest[len(part) :]
                total = total + weight * term.losses(module, given, wanted, own, share)
            return total

        return (inputs, labels, *(entry for part in parts for entry in part)), losses


_BLOCK = {"cpu": 64, "cuda": 4096}
"""Rows of a stream. A GPU draws as quickly for many rows as for few, and pays for every call."""


def sampler_by_blocks(stream: Callable[[int], torch.Generator], rows: slice, device: torch.device) -> NormalSampler:
    """Normal numbers for some rows of a sample: the same for a row however the sample is cut into pieces.

    Every block of rows has a stream, drawn from for the whole block; one that lies in two pieces is drawn twice.
    """
    size = _BLOCK.get(device.type, _BLOCK["cpu"])
    blocks = range(rows.start // size, -(-rows.stop // size))
    drawers: list[NormalSampler] = []

    def draw(shape: tuple[int, ...]) -> Tensor:
        if not drawers:
            drawers.extend(normal_sampler(stream(block), device) for block in blocks)
        whole = torch.cat([drawer((size, *shape[1:])) for drawer in drawers])
        first = rows.start - blocks.start * size
        return whole[first : first + shape[0]]

    return draw


def normal_sampler(generator: torch.Generator, device: torch.device) -> NormalSampler:
    """Drawn where they are needed: views take more numbers than a CPU can send to a GPU in time."""
    if device.type == "cpu":
        return lambda shape: torch.randn(shape, generator=generator)
    there = torch.Generator(device).manual_seed(int(torch.randint(2**62, (), generator=generator)))
    return lambda shape: torch.randn(shape, generator=there, device=device)
