"""Sums of clipped per-example gradients: what DP-SGD adds noise to.

**Guarantee.** Whatever the network, the losses and the data are, adding or removing one example changes the sum by a
vector of norm at most `clip_norm`, because each example's gradient depends on that example alone and is shortened to
that norm, with an allowance for rounding; an example whose gradient is not finite adds nothing. What is rounded when
contributions are summed is not part of this bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from stobatch.dp.layer_gradients import KNOWN, LayerGradients, LayerUse, Tape, is_known, squared_lengths
from stobatch.errors import ModelError

Batch = tuple[Tensor, ...]
"""Tensors with one leading entry per example."""
Losses = Callable[[nn.Module, Batch], Tensor]
"""One loss per example, each a function of its own entries of the batch and the parameters alone."""


@dataclass(frozen=True)
class ClippedSum:
    """Σ min(1, C/‖g_i‖) g_i, and how long the gradients were. The norms are private: they never leave training."""

    gradients: dict[str, Tensor]
    norms: Tensor


def clipping_weights(norms: Tensor, clip_norm: float, dtype: torch.dtype | None = None) -> Tensor:
    """min(1, C/norm) in some precision, less its own rounding, and 0 for what is not finite."""
    dtype = dtype or norms.dtype
    shortest = clip_norm * (1 - 4 * torch.finfo(dtype).eps)
    weights = (shortest / norms.clamp(min=1e-12)).clamp(max=1.0)
    return torch.where(norms.isfinite(), weights, 0.0).to(dtype)


def clipped_sum(network: nn.Module, losses: Losses, batch: Batch, clip_norm: float) -> ClippedSum:
    """By one backward pass: norms from what each layer saw, then one weighted sum.

    Every parameter has to belong to a layer that the tape records; `clipped_sum_by_example` serves any network.
    """
    if len(batch[0]) == 0:
        return ClippedSum(_zeros(network), batch[0].new_zeros(0, dtype=torch.float64))
    with Tape(network) as tape, torch.enable_grad():
        values = losses(network, batch)
        total = values.sum()
    tape.require_intact()
    uses = [(layer, use) for layer, all_uses in tape.uses.items() for use in all_uses]
    if not uses:
        return ClippedSum(_zeros(network), values.new_zeros(len(values), dtype=torch.float64))
    gradients = torch.autograd.grad(total, [use.at for _, use in uses], allow_unused=True)
    met: dict[nn.Module, list[LayerUse]] = {}
    for (layer, use), gradient in zip(uses, gradients, strict=True):
        if gradient is not None:
            met.setdefault(layer, []).append(_in_full(LayerUse(use, gradient), layer))
    with torch.no_grad(), torch.autocast(values.device.type, enabled=False):
        layers = {layer: KNOWN[type(layer)](layer, parts, len(values)) for layer, parts in met.items()}
        none = values.new_zeros(len(values), dtype=torch.float64)
        norms = sum((part.squared_norms() for part in layers.values()), start=none).sqrt()
        finite = norms.isfinite()
        if not bool(finite.all()):
            # Zero times infinity is no number, so such examples are left out rather than weighted by zero.
            rest = clipped_sum(network, losses, tuple(entry[finite] for entry in batch), clip_norm)
            return ClippedSum(rest.gradients, norms)
        weights = clipping_weights(norms, clip_norm, next(next(iter(layers)).parameters(recurse=False)).dtype)
        return ClippedSum(_summed(network, layers, weights), norms)


def _in_full(met: LayerUse, layer: nn.Module) -> LayerUse:
    """In the precision of the parameters, whatever the passes were made in.

    What is added is then the sum of the very products whose norms are taken: a contribution may be rough, and its bound
    is not.
    """
    full = next(layer.parameters(recurse=False)).dtype
    return LayerUse(replace(met.use, inputs=met.use.inputs.to(full)), met.gradient.to(full))


def _zeros(network: nn.Module) -> dict[str, Tensor]:
    return {name: torch.zeros_like(p) for name, p in network.named_parameters() if p.requires_grad}


def _summed(network: nn.Module, layers: dict[nn.Module, LayerGradients], weights: Tensor) -> dict[str, Tensor]:
    total = _zeros(network)
    for prefix, layer in network.named_modules():
        if layer in layers:
            for name, value in layers[layer].weighted_sum(weights).items():
                full = f"{prefix}.{name}" if prefix else name
                if full in total:
                    total[full] = value
    return total


class _LossOf(nn.Module):
    """The losses as a module, so that parameters can be substituted in whatever they do with the network."""

    def __init__(self, network: nn.Module, losses: Losses) -> None:
        super().__init__()
        self.network, self.losses = network, losses

    def forward(self, *batch: Tensor) -> Tensor:
        return self.losses(self.network, batch)


def _places(network: nn.Module) -> dict[str, str]:
    """Where each parameter stands, once for each module that holds it, with its own name.

    `functional_call` would find these itself, but leaves a stand-in behind in a module that is registered twice.
    """
    names = {p: name for name, p in network.named_parameters()}
    return {
        f"{prefix}.{name}".removeprefix("."): names[p]
        for prefix, module in network.named_modules()
        for name, p in module.named_parameters(recurse=False, remove_duplicate=False)
    }


def clipped_sum_by_example(network: nn.Module, losses: Losses, batch: Batch, clip_norm: float) -> ClippedSum:
    """By forming every example's gradient with `torch.func`: for any network, and the test of the fast path."""
    if len(batch[0]) == 0:
        return ClippedSum(_zeros(network), batch[0].new_zeros(0, dtype=torch.float64))
    module = _LossOf(network, losses)
    parameters = {name: p.detach() for name, p in network.named_parameters() if p.requires_grad}
    places = _places(network)

    def loss(values: dict[str, Tensor], example: Batch) -> Tensor:
        substitutes = {f"network.{place}": values[name] for place, name in places.items() if name in values}
        each: Tensor = functional_call(module, substitutes, tuple(e[None] for e in example), tie_weights=False)
        return each.sum()

    formed: dict[str, Tensor] = vmap(grad(loss), in_dims=(None, 0))(parameters, batch)
    with torch.autocast(batch[0].device.type, enabled=False):
        norms = torch.stack([squared_lengths(g) for g in formed.values()]).sum(0).sqrt()
        finite = norms.isfinite()
        total = {
            name: torch.tensordot(clipping_weights(norms, clip_norm, g.dtype)[finite], g[finite], 1)
            for name, g in formed.items()
        }
    return ClippedSum(total, norms)


def is_recorded(network: nn.Module) -> bool:
    """Whether every parameter belongs to a layer whose gradients are known from what it saw."""
    known = {id(p) for layer in network.modules() if is_known(layer) for p in layer.parameters(recurse=False)}
    return all(id(p) in known for p in network.parameters() if p.requires_grad)


@contextmanager
def _stirred(network: nn.Module) -> Iterator[None]:
    """Every weight moved for a moment: where weights start at zero gradients vanish, and mistakes with them."""
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in network.parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=generator).to(p) / math.sqrt(p.numel() / len(p)))
    try:
        yield
    finally:
        with torch.no_grad():
            for name, p in network.named_parameters():
                p.copy_(before[name])


Clipper = Callable[[nn.Module, Losses, Batch, float], ClippedSum]


def clipped_sum_in_chunks(
    network: nn.Module, losses: Losses, batch: Batch, clip_norm: float, chunk: int, *, by: Clipper = clipped_sum
) -> ClippedSum:
    """The same sum, a chunk of the batch at a time: what one chunk needs stays in the cache, and memory is bounded.

    **Guarantee.** That of the whole: each example is clipped in its own chunk, and a sum of sums is the sum.
    """
    total, norms = _zeros(network), []
    for part in zip(*(torch.split(entry, chunk) for entry in batch), strict=True):
        clipped = by(network, losses, part, clip_norm)
        norms.append(clipped.norms)
        for name, value in clipped.gradients.items():
            total[name] += value
    return ClippedSum(total, torch.cat(norms))


def clipper_for(network: nn.Module, losses: Losses, probe: Batch) -> Clipper:
    """The fast way where it is right, else the way that is always right.

    A weight that is used outside its layer's call, or shared, escapes the tape, and so do rows in another order than
    the examples'. So the fast way is tried on a public probe first, of several examples: its norms and its sum have to
    agree with those of formed gradients. Nor does it serve networks that overwrite what layers were given.
    """
    if not is_recorded(network) or len(probe[0]) < 2:
        return clipped_sum_by_example
    with _stirred(network):
        slow = clipped_sum_by_example(network, losses, probe, 1.0)
        try:
            fast = clipped_sum(network, losses, probe, 1.0)
        except ModelError:
            return clipped_sum_by_example
    return clipped_sum if _agree(fast, slow, slow, _TOLERANCE) else clipped_sum_by_example


def is_right_in_full(network: nn.Module, losses: Losses, batch: Batch, *, rough: bool) -> bool:
    """Whether the fast way is right for some examples of a batch as large as those of training.

    Formed gradients of the whole batch would not fit. So the norms of a few of its examples are compared with formed
    ones, and so is what their removal takes from the sum. `rough` is for passes in bfloat16, which keep eight bits.
    """
    count = len(batch[0])
    few = torch.tensor(sorted({0, count // 3, 2 * count // 3, count - 1}), device=batch[0].device)
    rest = torch.ones(count, dtype=torch.bool, device=batch[0].device).index_fill(0, few, False)
    with _stirred(network):
        whole = clipped_sum(network, losses, batch, 1.0)
        others = clipped_sum(network, losses, tuple(entry[rest] for entry in batch), 1.0)
        slow = clipped_sum_by_example(network, losses, tuple(entry[few] for entry in batch), 1.0)
    taken = {name: value - others.gradients[name] for name, value in whole.gradients.items()}
    return _agree(ClippedSum(taken, whole.norms[few]), slow, whole, _ROUGH_TOLERANCE if rough else _TOLERANCE)


_TOLERANCE, _ROUGH_TOLERANCE = 1e-2, 0.2


def _agree(fast: ClippedSum, slow: ClippedSum, whole: ClippedSum, tolerance: float) -> bool:
    # A gradient that vanishes but for rounding is compared with the whole.
    rounding = 1e-3 * tolerance * torch.cat([value.flatten() for value in whole.gradients.values()]).norm()
    pairs = [(fast.gradients[name], value) for name, value in slow.gradients.items()] + [(fast.norms, slow.norms)]
    return all(bool((one - other).norm() <= tolerance * other.norm() + rounding) for one, other in pairs)
