"""Per-example losses and random views for DP-SGD: everything derived from an example is part of its one gradient.

Each term computes an example's loss from that example alone: its noisy views, its own adversarial point, the bounds of
its own box. So the gradient of any weighted sum is one vector per example, and clipping that vector bounds the
example's contribution, however many views and attacks it contains. Augmented copies stored as records of their own
would cost privacy; views inside the contribution do not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from stobatch.bounds.boxes import TrainingBox, worst_case_scores
from stobatch.dp.clipping import Batch
from stobatch.models import Classifier, HandedOver, Layered, Network
from stobatch.models.scattering import Scattering
from stobatch.published.losses import reconstruction_losses
from stobatch.types import PAPER_RANGE


@dataclass(frozen=True)
class Ramp:
    """A schedule from 0 during the warm-up linearly to 1, for radii and weights of hard losses."""

    warm_up: float
    length: float

    def share(self, progress: float) -> float:
        """Return the value at this progress, the share of steps done.

        >>> [Ramp(0.2, 0.5).share(progress) for progress in (0.1, 0.45, 0.9)]
        [0.0, 0.5, 1.0]
        """
        return (
            min(1.0, max(0.0, (progress - self.warm_up) / self.length))
            if self.length
            else float(progress >= self.warm_up)
        )


class Term(ABC):
    """One per-example loss. `share` is the ramp's value, from 0 to 1."""

    ramped: bool = False
    """Whether its weight follows the ramp; the rest of its weight goes to plain cross-entropy."""
    takes_features: bool = False
    """Whether features of a fixed first layer may replace the inputs."""

    def prepare(
        self, network: Classifier, inputs: Tensor, labels: Tensor, share: float, normal: NormalSampler
    ) -> Batch:
        """Return further tensors that the loss needs, constant during the step, with one leading entry per example."""
        return ()

    @abstractmethod
    def losses(self, network: nn.Module, inputs: Tensor, labels: Tensor, prepared: Batch, share: float) -> Tensor:
        """Return one loss per example."""


NormalSampler = Callable[[tuple[int, ...]], Tensor]
"""Returns standard normal numbers of a shape, fresh at every call and independent of all data."""


@final
class CrossEntropy(Term):
    """Cross-entropy on the clean example."""

    takes_features = True

    def losses(self, network: nn.Module, inputs: Tensor, labels: Tensor, prepared: Batch, share: float) -> Tensor:
        return F.cross_entropy(network(inputs), labels, reduction="none")


@final
@dataclass(frozen=True)
class IBP(Term):
    """Cross-entropy on the worst-case scores of interval bound propagation (Gowal et al., 2019).

    The box's radius follows the ramp.
    """

    radius: float
    ramped = True

    def losses(self, network: nn.Module, inputs: Tensor, labels: Tensor, prepared: Batch, share: float) -> Tensor:
        return F.cross_entropy(self.worst(network, inputs, labels, share), labels, reduction="none")

    def worst(self, network: nn.Module, inputs: Tensor, labels: Tensor, share: float) -> Tensor:
        """Return upper bounds on score_k - score_label, examples x classes k."""
        assert isinstance(network, Layered | HandedOver)
        layers = network.layers if isinstance(network, Layered) else network.module
        return worst_case_scores(layers, TrainingBox.around(inputs, share * self.radius), labels)


Attack = Callable[[Classifier, Tensor, Tensor, float], Tensor]
"""Maps a network, inputs, labels and a radius to adversarial points, each crafted from its own example alone."""


@final
@dataclass(frozen=True)
class SABR(Term):
    """IBP loss in a small box around the example's own adversarial point (SABR, Müller et al., 2023).

    The small box has `box_share` of the radius and the attack the rest, so it stays inside the example's own box. At 1
    it is `IBP`, near 0 `Adversarial`.

    **Guarantee.** The point is crafted from this example and the current parameters, which are released: from no other
    example and no shared random numbers. So the contribution depends on this example alone, and clipping bounds it.
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
        return IBP(self.box_share * self.radius).losses(network, prepared[0], labels, (), share)


@final
@dataclass(frozen=True)
class CCIBP(Term):
    """Cross-entropy on a convex combination of adversarial and worst-case scores (CC-IBP, De Palma et al., 2024).

    `box_share` is the weight of the worst-case ones. At 1 it is `IBP`, near 0 `Adversarial`.

    **Guarantee.** As for `SABR`: no other example is used.
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
        # Worst-case scores are relative to the label's; make adversarial ones relative too, which softmax ignores.
        scores = network(prepared[0])
        adversarial = scores - scores.gather(1, labels[:, None])
        worst = IBP(self.radius).worst(network, inputs, labels, share)
        return F.cross_entropy((1 - self.box_share) * adversarial + self.box_share * worst, labels, reduction="none")


@final
@dataclass(frozen=True)
class Adversarial(Term):
    """Cross-entropy at the example's own adversarial point, crafted against the current network."""

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
    """Cross-entropy at scattering features moved against the label by `radius` in l2.

    Scattering is almost 1-Lipschitz, so these are about as far as features of an input within the radius can be.
    """

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
        # The gradient of the loss at the features is errors · W; lifted, it is a gradient at the maps.
        errors = scores.softmax(1) - F.one_hot(labels, scores.shape[1])
        gradient = front.lifted(errors @ head.weight)
        norms = gradient.flatten(1).norm(dim=1).clamp(min=torch.finfo(gradient.dtype).tiny)
        shift = front.folded(gradient * (share * self.radius / norms).view(-1, 1, 1, 1))
        return ((features + shift).flatten(1),)

    def losses(self, network: nn.Module, inputs: Tensor, labels: Tensor, prepared: Batch, share: float) -> Tensor:
        assert isinstance(network, Layered)
        return F.cross_entropy(network.layers[-1](prepared[0]), labels, reduction="none")


@final
@dataclass(frozen=True)
class NoisyViews(Term):
    """Mean cross-entropy over several noisy views of the example, as in randomised smoothing.

    With a radius all views are first moved by one adversarial shift within it in l2, by gradient steps on their mean
    loss (SmoothAdv, Salman et al., 2019). The radius follows the ramp.

    **Guarantee.** As for `SABR`: the shift depends on this example alone.
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
            views = views + self._adversarial_shift(network, views, labels, share * self.radius)
        return (views,)

    def _adversarial_shift(self, network: Classifier, views: Tensor, labels: Tensor, radius: float) -> Tensor:
        """Return a shift for each example, examples x 1 x input, to be added to all its views."""
        shift = torch.zeros_like(views[:, :1])
        for _ in range(self.steps):
            leaf = shift.clone().requires_grad_()
            with torch.enable_grad():
                total = self.losses(network, views, labels, (views + leaf,), 1.0).sum()
            (gradient,) = torch.autograd.grad(total, leaf)
            step = _scale_to_norm(gradient.nan_to_num(), 2 * radius / self.steps, exactly=True)
            shift = _scale_to_norm(shift + step, radius)
        return shift

    def losses(self, network: nn.Module, inputs: Tensor, labels: Tensor, prepared: Batch, share: float) -> Tensor:
        (views,) = prepared
        scores = network(views.flatten(0, 1))
        losses = F.cross_entropy(scores, labels.repeat_interleave(self.num_views), reduction="none")
        return losses.reshape(len(labels), self.num_views).mean(1)


def _scale_to_norm(vectors: Tensor, norm: float, *, exactly: bool = False) -> Tensor:
    """Return each example's vector scaled to at most this l2 norm, or exactly this one; zero stays zero."""
    norms = vectors.flatten(1).norm(dim=1).clamp(min=torch.finfo(vectors.dtype).tiny)
    factors: Tensor = norm / norms
    factors = factors if exactly else factors.clamp(max=1.0)
    return vectors * factors.view(-1, *[1] * (vectors.ndim - 1))


@final
@dataclass(frozen=True)
class NoisyHidden(Term):
    """Cross-entropy with fresh Gaussian noise behind the first layer, as in networks with a noise layer.

    The network's `noise_spread` scales the noise of each hidden value; its mean square is 1.
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
    """The paper's auto-encoder objective R̃ (Eq. 6) of the first layer, for networks with an encoder."""

    def losses(self, network: nn.Module, inputs: Tensor, labels: Tensor, prepared: Batch, share: float) -> Tensor:
        assert isinstance(network, Network)
        return reconstruction_losses(network.encoder, inputs)


@final
@dataclass(frozen=True)
class Objective:
    """A weighted sum of terms, with a ramp for those that are `ramped`."""

    terms: tuple[tuple[float, Term], ...]
    ramp: Ramp

    @property
    def takes_features(self) -> bool:
        """Whether features of a fixed first layer may replace the inputs."""
        return all(term.takes_features for _, term in self.terms)

    def prepare(
        self, network: Classifier, inputs: Tensor, labels: Tensor, progress: float, normal: NormalSampler
    ) -> tuple[Batch, Callable[[nn.Module, Batch], Tensor]]:
        """Return the batch with all constants of this step, and the losses as a function of network and batch."""
        share = self.ramp.share(progress)
        # The weight that ramped terms do not have yet goes to plain cross-entropy.
        clean_weight = sum(weight * (1 - share) for weight, term in self.terms if term.ramped)
        clean_weight += sum(weight for weight, term in self.terms if isinstance(term, CrossEntropy))
        others = [(w * (share if t.ramped else 1.0), t) for w, t in self.terms if not isinstance(t, CrossEntropy)]
        active = [(weight, term) for weight, term in ((clean_weight, CrossEntropy()), *others) if weight]
        parts = [term.prepare(network, inputs, labels, share, normal) for _, term in active]

        def losses(module: nn.Module, batch: Batch) -> Tensor:
            batch_inputs, batch_labels, *rest = batch
            total = batch_inputs.new_zeros(len(batch_labels))
            for (weight, term), part in zip(active, parts, strict=True):
                prepared, rest = tuple(rest[: len(part)]), rest[len(part) :]
                total = total + weight * term.losses(module, batch_inputs, batch_labels, prepared, share)
            return total

        return (inputs, labels, *(entry for part in parts for entry in part)), losses


_BLOCK = {"cpu": 64, "cuda": 4096}
"""Rows that share a stream of random numbers: many on a GPU, where every call has a fixed cost."""


def sampler_by_blocks(stream: Callable[[int], torch.Generator], rows: slice, device: torch.device) -> NormalSampler:
    """Return a normal sampler for some rows of a sample that does not depend on how the sample is cut into pieces.

    Every block of rows has its own stream, from which the whole block is drawn; a block in two pieces is drawn twice.
    """
    size = _BLOCK.get(device.type, _BLOCK["cpu"])
    blocks = range(rows.start // size, -(-rows.stop // size))
    samplers: list[NormalSampler] = []

    def draw(shape: tuple[int, ...]) -> Tensor:
        if not samplers:
            samplers.extend(normal_sampler(stream(block), device) for block in blocks)
        whole = torch.cat([sampler((size, *shape[1:])) for sampler in samplers])
        first = rows.start - blocks.start * size
        return whole[first : first + shape[0]]

    return draw


def normal_sampler(generator: torch.Generator, device: torch.device) -> NormalSampler:
    """Return a normal sampler that draws on the device: views need more numbers than a CPU can send to a GPU."""
    if device.type == "cpu":
        return lambda shape: torch.randn(shape, generator=generator)
    on_device = torch.Generator(device).manual_seed(int(torch.randint(2**62, (), generator=generator)))
    return lambda shape: torch.randn(shape, generator=on_device, device=device)


VIEWS = ("crop", "flip", "noise")


@dataclass(frozen=True)
class RandomViews:
    """Random views of each example, by the given kinds in the order of `VIEWS`; no kind means the example itself."""

    kinds: tuple[str, ...]
    num: int
    most_shift: int
    stddev: float

    def draw(self, inputs: Tensor, labels: Tensor, normal: NormalSampler) -> tuple[Tensor, Tensor]:
        """Return `num` views of each example, one after the other, with its label.

        `normal` is called for one row per view, so that a view does not depend on how a sample is cut into pieces.
        """
        if not self.kinds:
            return inputs, labels
        views, count = inputs.repeat_interleave(self.num, 0), len(inputs) * self.num
        if "crop" in self.kinds and self.most_shift:
            views = _crop(views, self.most_shift, normal((count, 2)).to(views.device))
        if "flip" in self.kinds:
            mirrored = normal((count,)).to(views.device) < 0
            views = torch.where(mirrored.view(-1, 1, 1, 1), views.flip(3), views)
        if "noise" in self.kinds:
            noise = normal(tuple(views.shape)).to(views)
            views = (views + self.stddev * noise).clamp(PAPER_RANGE.low, PAPER_RANGE.high)
        return views, labels.repeat_interleave(self.num)


def _crop(images: Tensor, most: int, normal: Tensor) -> Tensor:
    """Shift each image by up to `most` pixels in each direction, repeating its edge."""
    # Φ of a normal number is uniform, so each of the 2·most + 1 shifts is equally likely.
    uniform = torch.special.ndtr(normal.double())
    shifts = (uniform * (2 * most + 1)).long().clamp(max=2 * most)
    count, channels, height, width = images.shape
    padded = F.pad(images, (most, most, most, most), mode="replicate")
    rows = shifts[:, 0].view(-1, 1, 1, 1) + torch.arange(height, device=images.device).view(1, 1, -1, 1)
    columns = shifts[:, 1].view(-1, 1, 1, 1) + torch.arange(width, device=images.device).view(1, 1, 1, -1)
    index = torch.arange(count, device=images.device).view(-1, 1, 1, 1)
    return padded[index, torch.arange(channels, device=images.device).view(1, -1, 1, 1), rows, columns]
