"""Sums of clipped per-example gradients: what DP-SGD adds noise to.

`clipped_sum` serves any module in a loop of one's own. Under it are three ways to the same sum:
`clipped_sum_in_one_pass`, which hardly ever forms an example's gradient; `clipped_sum_by_example`, which forms them all
and serves any network; and `clipped_sum_partly_formed`, which forms those of the parameters that one pass leaves over.

**Guarantee.** Whatever the network, the losses and the data are, adding or removing one example changes the sum by a
vector of norm at most `clip_norm`, because each example's gradient depends on that example alone and is shortened to
that norm, with an allowance for rounding; an example whose gradient is not finite adds nothing. What is rounded when
contributions are summed is not part of this bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from stobatch.dp.layer_gradients import KNOWN, LayerGradients, LayerUse, Tape, is_known, squared_lengths
from stobatch.dp.mixing import FEW_ROWS, mixing_experiment, require_no_mixing_layers
from stobatch.dp.noise import Grid
from stobatch.errors import DataError, ModelError, SettingError

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
    # Three roundings follow, each by a factor of at most 1 + eps/2: of the quotient, of its conversion to `dtype`, and
    # of each product w_i g_i. Four eps pay for them twice over, so that ‖w_i g_i‖ <= C as computed.
    shortest = clip_norm * (1 - 4 * torch.finfo(dtype).eps)
    weights = (shortest / norms.clamp(min=1e-12)).clamp(max=1.0)
    return torch.where(norms.isfinite(), weights, 0.0).to(dtype)


def clipped_sum_in_one_pass(network: nn.Module, losses: Losses, batch: Batch, clip_norm: float) -> ClippedSum:
    """By one backward pass: norms from what each layer saw, then one weighted sum.

    Every parameter has to belong to a layer that the tape records; `clipped_sum_by_example` serves any network.
    """
    return _clipped_sum(network, losses, batch, clip_norm, ())


def clipped_sum_partly_formed(network: nn.Module, losses: Losses, batch: Batch, clip_norm: float) -> ClippedSum:
    """By one backward pass for layers that the tape records; of all other parameters, gradients are formed."""
    return _clipped_sum(network, losses, batch, clip_norm, unrecorded(network))


def _clipped_sum(
    network: nn.Module, losses: Losses, batch: Batch, clip_norm: float, others: Sequence[str]
) -> ClippedSum:
    if len(batch[0]) == 0:
        return ClippedSum(_zeros(network), batch[0].new_zeros(0, dtype=torch.float64))
    formed = _formed(network, losses, batch, others) if others else {}
    # The loss ℓ_i depends on the rows of example i alone. So the gradient of Σ ℓ_i at a layer's outputs y has in the
    # rows of i just ∂ℓ_i/∂y: one backward pass gives every example's, and with the inputs a that the tape kept, the
    # gradient Σ_rows (∂ℓ_i/∂y) aᵀ of its weight is known without being formed.
    with Tape(network) as tape, torch.enable_grad():
        values = losses(network, batch)
        total = values.sum()
    tape.require_intact()
    uses = [(layer, use) for layer, all_uses in tape.uses.items() if is_known(layer) for use in all_uses]
    if not uses and not formed:
        return ClippedSum(_zeros(network), values.new_zeros(len(values), dtype=torch.float64))
    # At outputs only, never for parameters: the sum over the batch that autograd would form there is not wanted.
    gradients = torch.autograd.grad(total, [use.at for _, use in uses], allow_unused=True) if uses else ()
    met: dict[nn.Module, list[LayerUse]] = {}
    for (layer, use), gradient in zip(uses, gradients, strict=True):
        if gradient is not None:
            met.setdefault(layer, []).append(_in_full(LayerUse(use, gradient), layer))
    with torch.no_grad(), torch.autocast(values.device.type, enabled=False):
        layers = {layer: KNOWN[type(layer)](layer, parts, len(values)) for layer, parts in met.items()}
        none = sum((squared_lengths(g) for g in formed.values()), start=values.new_zeros(len(values)).double())
        # An example's weight min(1, C/‖g_i‖) needs its norm over all layers: first all norms, then all weighted sums.
        norms = sum((part.squared_norms() for part in layers.values()), start=none).sqrt()
        finite = norms.isfinite()
        if not bool(finite.all()):
            # Zero times infinity is no number, so such examples are left out rather than weighted by zero.
            rest = _clipped_sum(network, losses, tuple(entry[finite] for entry in batch), clip_norm, others)
            return ClippedSum(rest.gradients, norms)
        summed = _zeros(network)
        if layers:
            weights = clipping_weights(norms, clip_norm, next(next(iter(layers)).parameters(recurse=False)).dtype)
            summed = _summed(network, layers, weights)
        for name, g in formed.items():
            summed[name] = torch.tensordot(clipping_weights(norms, clip_norm, g.dtype), g, 1)
        return ClippedSum(summed, norms)


def _in_full(met: LayerUse, layer: nn.Module) -> LayerUse:
    """In the precision of the parameters, whatever the passes were made in; of layers that form gradients, as it is.

    What is added is then the sum of the very products whose norms are taken, or a multiple of the very gradient: a
    contribution may be rough, and its bound is not.
    """
    if KNOWN[type(layer)].takes_bfloat16 and met.gradient.dtype is torch.bfloat16:
        return LayerUse(replace(met.use, inputs=met.use.inputs.to(torch.bfloat16)), met.gradient)
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
    """Return where each parameter stands, once for each module that holds it, with its own name.

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
    return _clip_formed(_formed(network, losses, batch, _zeros(network)), clip_norm)


def clipped_sum_one_by_one(network: nn.Module, losses: Losses, batch: Batch, clip_norm: float) -> ClippedSum:
    """By a backward pass for each example: right wherever autograd is, and an oracle for the other ways.

    Unlike `torch.func`, it does not import PyTorch's compiler, which takes a second and a half of every start.
    """
    trained = {name: p for name, p in network.named_parameters() if p.requires_grad}
    formed: dict[str, list[Tensor]] = {name: [] for name in trained}
    for row in range(len(batch[0])):
        with torch.enable_grad():
            loss = losses(network, tuple(entry[row : row + 1] for entry in batch)).sum()
            gradients = (
                torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
                if loss.requires_grad
                else [None] * len(trained)
            )
        for (name, p), gradient in zip(trained.items(), gradients, strict=True):
            formed[name].append(torch.zeros_like(p) if gradient is None else gradient)
    return _clip_formed({name: torch.stack(each) for name, each in formed.items()}, clip_norm)


def _clip_formed(formed: dict[str, Tensor], clip_norm: float) -> ClippedSum:
    """Return the clipped sum of gradients that were formed, each as examples x the parameter's shape."""
    with torch.autocast(next(iter(formed.values())).device.type, enabled=False):
        norms = torch.stack([squared_lengths(g) for g in formed.values()]).sum(0).sqrt()
        finite = norms.isfinite()
        total = {
            name: torch.tensordot(clipping_weights(norms, clip_norm, g.dtype)[finite], g[finite], 1)
            for name, g in formed.items()
        }
    return ClippedSum(total, norms)


def _formed(network: nn.Module, losses: Losses, batch: Batch, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the gradients of these parameters, as examples x the parameter's shape."""
    module, wanted = _LossOf(network, losses), set(names)
    parameters = {name: p.detach() for name, p in network.named_parameters() if name in wanted}
    places = _places(network)

    def loss(values: dict[str, Tensor], example: Batch) -> Tensor:
        substitutes = {f"network.{place}": values[name] for place, name in places.items() if name in values}
        each: Tensor = functional_call(module, substitutes, tuple(e[None] for e in example), tie_weights=False)
        return each.sum()

    formed: dict[str, Tensor] = vmap(grad(loss), in_dims=(None, 0))(parameters, batch)
    return formed


def unrecorded(network: nn.Module) -> list[str]:
    """Return the names of trained parameters that belong to no layer whose gradients are known from what it saw."""
    known = {id(p) for layer in network.modules() if is_known(layer) for p in layer.parameters(recurse=False)}
    return [name for name, p in network.named_parameters() if p.requires_grad and id(p) not in known]


@contextmanager
def stirred(network: nn.Module) -> Iterator[None]:
    """Every weight moved for a moment: where weights start at zero gradients vanish, and mistakes with them."""
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in network.parameters():
            if p.requires_grad:
                fan_in = p.numel() / len(p) if p.ndim else 1
                p.add_(torch.randn(p.shape, generator=generator).to(p) / math.sqrt(fan_in))
    try:
        yield
    finally:
        with torch.no_grad():
            for name, p in network.named_parameters():
                p.copy_(before[name])


Clipper = Callable[[nn.Module, Losses, Batch, float], ClippedSum]


def clipped_sum_in_chunks(
    network: nn.Module,
    losses: Losses,
    batch: Batch,
    clip_norm: float,
    chunk: int,
    *,
    by: Clipper = clipped_sum_in_one_pass,
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


def clipper_for(network: nn.Module, losses: Losses, probe: Batch, *, slow: Clipper = clipped_sum_by_example) -> Clipper:
    """Return the fast way where it is right, else the way that is always right.

    A weight that is used outside its layer's call, or shared, escapes the tape, and so do rows in another order than
    the examples'. So the fast way is tried on a public probe first, of several examples: its norms and its sum have to
    agree with those of the `slow` way. Nor does it serve networks that overwrite what layers were given. Parameters
    that no layer of the tape holds are formed beside it.

    By default that is forming gradients with `torch.func`, which also raises at code that branches on values and so
    may let one example decide over another. Of layers that are known not to, a pass for each example will do.
    """
    trained = sum(p.requires_grad for p in network.parameters())
    left_over = len(unrecorded(network))
    if not trained:
        return clipped_sum_in_one_pass
    if left_over == trained or len(probe[0]) < 2:
        return clipped_sum_by_example
    way = clipped_sum_partly_formed if left_over else clipped_sum_in_one_pass
    with stirred(network):
        right = slow(network, losses, probe, 1.0)
        try:
            fast = way(network, losses, probe, 1.0)
        except ModelError:
            return clipped_sum_by_example
    return way if _agree(fast, right, right, _TOLERANCE) else clipped_sum_by_example


def formed_at_once(network: nn.Module, way: Clipper) -> int:
    """Return how many bytes of gradients a way of clipping forms for each example."""
    left_over = set(unrecorded(network))
    return sum(
        p.numel() * p.element_size()
        for name, p in network.named_parameters()
        if p.requires_grad
        and (way is clipped_sum_by_example or (way is clipped_sum_partly_formed and name in left_over))
    )


def is_right_in_full(
    network: nn.Module,
    losses: Losses,
    batch: Batch,
    *,
    rough: bool,
    way: Clipper = clipped_sum_in_one_pass,
    slow: Clipper = clipped_sum_by_example,
) -> bool:
    """Return whether the fast way is right for some examples of a batch as large as those of training.

    Formed gradients of the whole batch would not fit. So the norms of a few of its examples are compared with formed
    ones, and so is what their removal takes from the sum. `rough` is for passes in bfloat16, which keep eight bits.
    """
    count = len(batch[0])
    few = torch.tensor(sorted({0, count // 3, 2 * count // 3, count - 1}), device=batch[0].device)
    rest = torch.ones(count, dtype=torch.bool, device=batch[0].device).index_fill(0, few, False)
    with stirred(network):
        whole = way(network, losses, batch, 1.0)
        others = way(network, losses, tuple(entry[rest] for entry in batch), 1.0)
        right = slow(network, losses, tuple(entry[few] for entry in batch), 1.0)
    taken = {name: value - others.gradients[name] for name, value in whole.gradients.items()}
    return _agree(ClippedSum(taken, whole.norms[few]), right, whole, _ROUGH_TOLERANCE if rough else _TOLERANCE)


_TOLERANCE, _ROUGH_TOLERANCE = 1e-2, 0.2


def _agree(fast: ClippedSum, slow: ClippedSum, whole: ClippedSum, tolerance: float) -> bool:
    # A gradient that vanishes but for rounding is compared with the whole.
    rounding = 1e-3 * tolerance * torch.cat([value.flatten() for value in whole.gradients.values()]).norm()
    pairs = [(fast.gradients[name], value) for name, value in slow.gradients.items()] + [(fast.norms, slow.norms)]
    return all(bool((one - other).norm() <= tolerance * other.norm() + rounding) for one, other in pairs)


@dataclass(frozen=True, eq=False, repr=False)
class ClippedGradients(Mapping[str, Tensor]):
    """Σ min(1, C/‖g_i‖) g_i by parameter name: to be noised, and not private before.

    **Guarantee.** Adding or removing one example changes it, as one vector over all parameters, by at most `clip_norm`,
    but for how the sum of contributions rounds in the parameters' precision.
    """

    gradients: dict[str, Tensor]
    clip_norm: float
    in_one_pass: bool
    """Whether one backward pass was enough, or each example's gradient was formed."""

    def noise_stddev(self, noise_multiplier: float) -> float:
        """σ(C + √d·step): σC, and what pays for rounding the sum to the noise's grid (`add_noise`).

        >>> round(ClippedGradients({"weight": torch.zeros(100)}, 2.0, True).noise_stddev(1.5), 6)
        3.0
        """
        step = Grid.for_noise(noise_multiplier * self.clip_norm).step
        values = sum(value.numel() for value in self.gradients.values())
        while True:
            stddev = noise_multiplier * (self.clip_norm + math.sqrt(values) * step)
            if Grid.for_noise(stddev).step <= step:
                return stddev
            step *= 2

    def __getitem__(self, name: str) -> Tensor:
        return self.gradients[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.gradients)

    def __len__(self) -> int:
        return len(self.gradients)

    def __repr__(self) -> str:
        values = sum(value.numel() for value in self.gradients.values())
        way = "in one pass" if self.in_one_pass else "example by example"
        return (
            f"<clipped gradients of {len(self)} parameters, {values} values; each example at most {self.clip_norm:g} "
            f"in l2, clipped {way}; no noise yet, NOT private>"
        )


def clipped_sum(module: nn.Module, losses: Losses, batch: Batch, clip_norm: float) -> ClippedGradients:
    """Sum the gradients of a batch, each example's clipped to `clip_norm`, for a training loop of one's own.

    `losses(module, batch)` returns one loss per example; each is a function of its own rows of the batch alone. The sum
    comes from one backward pass where every trained weight belongs to a Linear, Conv2d or GroupNorm layer that is used
    as it is, else from every example's own gradient, which costs memory and time. Which of the two is right is tried
    out on the first batch that a module and its losses are seen with, by comparing them; so is that examples do not mix
    and that passes leave no trace in the module's buffers.

    **Guarantee.** That of `ClippedGradients`. Assumes that what was tried out holds for later batches as well. The
    module's gradients and parameters are left as they are.

    >>> model = nn.Linear(2, 1)
    >>> squares = lambda model, batch: (model(batch[0])[:, 0] - batch[1]).square()
    >>> clipped_sum(model, squares, (torch.ones(3, 2), torch.ones(3)), clip_norm=0.1)
    <clipped gradients of 2 parameters, 3 values; each example at most 0.1 in l2, clipped in one pass; no noise yet, \
NOT private>
    """
    if not 0 < clip_norm < math.inf:
        raise SettingError(
            f"clip_norm={clip_norm} is not a length.",
            why="It bounds what one example adds to the sum, and the noise is a multiple of it.",
            remedy="Use a number above 0, such as 1.",
        )
    if not isinstance(batch, tuple) or len({len(entry) for entry in batch}) != 1:
        raise DataError(
            f"the batch is a {type(batch).__name__} of entries of lengths {[len(entry) for entry in batch][:4]}.",
            remedy="Give a tuple of tensors with one leading entry per example, such as (inputs, labels).",
        )
    require_no_mixing_layers(module, remedy="Use stobatch.models.replace_batch_norm(module).")
    way = _way_for(module, losses, batch)
    if formed := formed_at_once(module, way):
        way = partial(clipped_sum_in_chunks, chunk=max(1, _FORMED_AT_ONCE // formed), by=way)
    found = way(module, losses, batch, clip_norm)
    return ClippedGradients(found.gradients, clip_norm, way is clipped_sum_in_one_pass)


_FORMED_AT_ONCE = 2**29
"""Bytes of gradients that are formed at once."""

_TRIED: WeakKeyDictionary[nn.Module, tuple[ReferenceType[Losses], bool, Clipper]] = WeakKeyDictionary()
"""The way that was found right for a module, its losses and its mode."""


def _way_for(module: nn.Module, losses: Losses, batch: Batch) -> Clipper:
    """Return the way that was right for this module and these losses before, or is for this batch.

    A private batch may be looked at here: what is found changes the time that a step takes, and the result by rounding.
    """
    if module in _TRIED and _TRIED[module][0]() is losses and _TRIED[module][1] == module.training:
        return _TRIED[module][2]
    if len(batch[0]) < 2:
        return clipped_sum_by_example
    _try_out(module, losses, tuple(entry[:FEW_ROWS] for entry in batch))
    try:
        way = clipper_for(module, losses, tuple(entry[:FEW_ROWS] for entry in batch))
        if way is not clipped_sum_by_example and len(batch[0]) > FEW_ROWS:
            rough = torch.is_autocast_enabled(batch[0].device.type)
            way = way if is_right_in_full(module, losses, batch, rough=rough, way=way) else clipped_sum_by_example
    except RuntimeError as error:
        raise ModelError(
            f"the gradients of single examples cannot be formed: {str(error).splitlines()[0]}",
            why="torch.func.vmap does not follow what the module or the losses do; random layers are one cause.",
            remedy="Remove dropout and data-dependent branches, or use layers that PyTorch vectorises.",
        ) from error
    _TRIED[module] = ref(losses), module.training, way
    return way


def _try_out(module: nn.Module, losses: Losses, few: Batch) -> None:
    """Raise unless a few examples have a loss each, do not reach each other's, and leave the buffers as they were."""
    before = {name: value.clone() for name, value in module.named_buffers()}
    with torch.no_grad():
        values = losses(module, few)
        if values.shape != few[0].shape[:1]:
            raise ModelError(
                f"losses returned the shape {tuple(values.shape)} for {len(few[0])} examples.",
                why="Each example's gradient is that of its own loss.",
                remedy="Return one loss per example, as with reduction='none'.",
            )
        if few[0].is_floating_point():
            generator = torch.Generator().manual_seed(1)
            if found := mixing_experiment(
                lambda inputs: losses(module, (inputs, *few[1:])), few[0], (-1.0, 0.0, 1.0), generator
            ):
                raise ModelError(
                    "changing one example of a batch changes another example's loss.",
                    why=f"Some layer or loss mixes examples or draws random numbers, found with {found}.",
                    remedy="Remove it (dropout, batch statistics, means over the batch), so that a clipped gradient is "
                    "about one example.",
                )
    for name, value in module.named_buffers():
        if name not in before or not torch.equal(value, before[name]):
            raise ModelError(
                f"passing examples through the module changes its '{name}'.",
                why="What it writes down is a statement about private examples, without noise.",
                remedy="Use layers that keep nothing: no running statistics or counters.",
            )


def weigh_classes(losses: Losses, weights: Tensor | None) -> Losses:
    """Return each loss times the public weight of its label, the second entry of the batch."""
    if weights is None:
        return losses
    return lambda module, batch: losses(module, batch) * weights[batch[1]]


def in_units(batch: Batch, losses: Losses, per: int) -> tuple[Batch, Losses]:
    """Return the batch with one leading entry per unit of `per` consecutive rows, and the mean loss of each unit.

    The gradient of that mean is one vector per unit, so whatever clips a sum of contributions clips it as one.

    **Guarantee.** A unit's loss is a function of its own rows alone, if each row's loss is one of that row.
    """
    if per == 1:
        return batch, losses

    def mean(module: nn.Module, units: Batch) -> Tensor:
        rows = losses(module, tuple(entry.flatten(0, 1) for entry in units))
        return rows.reshape(-1, per).mean(1)

    return tuple(entry.reshape(-1, per, *entry.shape[1:]) for entry in batch), mean
