"""Sums of clipped per-example gradients: what DP-SGD adds noise to.

`clipped_sum` serves any module in a user's own loop. It chooses between three algorithms for the same sum:
`clipped_sum_in_one_pass` computes norms from layer inputs and output gradients and hardly ever forms a per-example
gradient (ghost clipping, Goodfellow, 2015; Li et al., 2022); `clipped_sum_by_example` forms them all, for any network;
`clipped_sum_mixed` forms those of parameters outside known layers only.

**Guarantee.** For any network, losses and data, adding or removing one example changes the sum by a vector of norm at
most `clip_norm`: each example's gradient depends on that example alone and is scaled to that norm at most, with an
allowance for rounding; an example whose gradient is not finite adds nothing. How the sum of contributions rounds is not
part of this bound. The proof is in docs/guarantees/clipping.md.
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

from stobatch.dp.layer_gradients import (
    LAYER_GRADIENTS,
    LayerGradients,
    LayerUse,
    Tape,
    has_layer_gradients,
    squared_norm_bounds,
)
from stobatch.dp.mixing import FEW_ROWS, mixing_experiment, require_no_mixing_layers
from stobatch.dp.noise import Grid
from stobatch.errors import DataError, ModelError, SettingError

Batch = tuple[Tensor, ...]
"""Tensors with one leading entry per example."""
Losses = Callable[[nn.Module, Batch], Tensor]
"""One loss per example, each a function of its own entries of the batch and the parameters alone."""


@dataclass(frozen=True)
class ClippedSum:
    """Σ min(1, C/‖g_i‖) g_i by parameter, and the norms ‖g_i‖, which are private and never leave training."""

    gradients: dict[str, Tensor]
    norms: Tensor


def clipping_weights(norms: Tensor, clip_norm: float, dtype: torch.dtype | None = None) -> Tensor:
    """Return min(1, C/norm) in the given precision, reduced by an allowance for rounding; 0 for norms not finite."""
    dtype = dtype or norms.dtype
    # Three roundings follow, each by a factor of at most 1 + eps/2: of the quotient, of its conversion to `dtype`, and
    # of each product w_i g_i. Four eps cover them twice over, so that ‖w_i g_i‖ <= C as computed.
    reduced_norm = clip_norm * (1 - 4 * torch.finfo(dtype).eps)
    weights = (reduced_norm / norms.clamp(min=1e-12)).clamp(max=1.0)
    return torch.where(norms.isfinite(), weights, 0.0).to(dtype)


def clipped_sum_in_one_pass(network: nn.Module, losses: Losses, batch: Batch, clip_norm: float) -> ClippedSum:
    """Clip by one backward pass: all norms from layer inputs and output gradients, then one weighted sum.

    Every trained parameter has to belong to a layer with a rule in `layer_gradients`.
    """
    return _clipped_sum(network, losses, batch, clip_norm, ())


def clipped_sum_mixed(network: nn.Module, losses: Losses, batch: Batch, clip_norm: float) -> ClippedSum:
    """Clip by one backward pass for layers with a rule; form the per-example gradients of all other parameters."""
    return _clipped_sum(network, losses, batch, clip_norm, parameters_without_rule(network))


def _clipped_sum(
    network: nn.Module, losses: Losses, batch: Batch, clip_norm: float, others: Sequence[str]
) -> ClippedSum:
    if len(batch[0]) == 0:
        return ClippedSum(_zeros(network), batch[0].new_zeros(0, dtype=torch.float64))
    formed = _example_gradients(network, losses, batch, others) if others else {}
    # Why one pass suffices: ℓ_i depends on the rows of example i alone, so the gradient of Σ ℓ_i at a layer's outputs y
    # has in the rows of i exactly ∂ℓ_i/∂y. With the layer's inputs a, which the tape recorded, the example's gradient
    # of the weight is Σ_rows (∂ℓ_i/∂y) aᵀ: its norm and its part in a weighted sum follow without forming it.
    with Tape(network) as tape, torch.enable_grad():
        values = losses(network, batch)
        total = values.sum()
    tape.require_intact()
    uses = [(layer, use) for layer, all_uses in tape.uses.items() if has_layer_gradients(layer) for use in all_uses]
    if not uses and not formed:
        return ClippedSum(_zeros(network), values.new_zeros(len(values), dtype=torch.float64))
    # Gradients at layer outputs only: those at parameters would be summed over the batch.
    gradients = torch.autograd.grad(total, [use.at for _, use in uses], allow_unused=True) if uses else ()
    uses_by_layer: dict[nn.Module, list[LayerUse]] = {}
    for (layer, use), gradient in zip(uses, gradients, strict=True):
        if gradient is not None:
            uses_by_layer.setdefault(layer, []).append(_to_full_precision(LayerUse(use, gradient), layer))
    with torch.no_grad(), torch.autocast(values.device.type, enabled=False):
        layers = {
            layer: LAYER_GRADIENTS[type(layer)](layer, own_uses, len(values))
            for layer, own_uses in uses_by_layer.items()
        }
        # min(1, C/‖g_i‖) needs the norm over all parameters: first all norms, then all weighted sums.
        of_formed = sum((squared_norm_bounds(g) for g in formed.values()), start=values.new_zeros(len(values)).double())
        norms = sum((part.squared_norms() for part in layers.values()), start=of_formed).sqrt()
        finite = norms.isfinite()
        if not bool(finite.all()):
            # 0 · inf is NaN, so such examples are left out rather than weighted by zero.
            rest = _clipped_sum(network, losses, tuple(entry[finite] for entry in batch), clip_norm, others)
            return ClippedSum(rest.gradients, norms)
        sums = _zeros(network)
        if layers:
            weights = clipping_weights(norms, clip_norm, next(next(iter(layers)).parameters(recurse=False)).dtype)
            sums = _weighted_sums(network, layers, weights)
        for name, g in formed.items():
            sums[name] = torch.tensordot(clipping_weights(norms, clip_norm, g.dtype), g, 1)
        return ClippedSum(sums, norms)


def _to_full_precision(layer_use: LayerUse, layer: nn.Module) -> LayerUse:
    """Return a use in the precision of the parameters; layers that form bfloat16 gradients keep bfloat16.

    The sum then adds exactly the products, or multiples of exactly the gradients, whose norms are taken: in low
    precision a contribution may be inaccurate, but its norm is still bounded.
    """
    use, gradient = layer_use.use, layer_use.gradient
    if LAYER_GRADIENTS[type(layer)].takes_bfloat16 and gradient.dtype is torch.bfloat16:
        return LayerUse(replace(use, inputs=use.inputs.to(torch.bfloat16)), gradient)
    full = next(layer.parameters(recurse=False)).dtype
    return LayerUse(replace(use, inputs=use.inputs.to(full)), gradient.to(full))


def _zeros(network: nn.Module) -> dict[str, Tensor]:
    return {name: torch.zeros_like(p) for name, p in network.named_parameters() if p.requires_grad}


def _weighted_sums(network: nn.Module, layers: dict[nn.Module, LayerGradients], weights: Tensor) -> dict[str, Tensor]:
    total = _zeros(network)
    for prefix, layer in network.named_modules():
        if layer in layers:
            for name, value in layers[layer].weighted_sum(weights).items():
                full = f"{prefix}.{name}" if prefix else name
                if full in total:
                    total[full] = value
    return total


class _LossOf(nn.Module):
    """Losses as a module, so that `functional_call` can substitute the network's parameters."""

    def __init__(self, network: nn.Module, losses: Losses) -> None:
        super().__init__()
        self.network, self.losses = network, losses

    def forward(self, *batch: Tensor) -> Tensor:
        return self.losses(self.network, batch)


def _qualified_names(network: nn.Module) -> dict[str, str]:
    """Return all qualified names of each parameter, mapped to its first one; a shared parameter has several.

    `functional_call` with tied weights would leave a substitute behind in a module that is registered twice.
    """
    names = {p: name for name, p in network.named_parameters()}
    return {
        f"{prefix}.{name}".removeprefix("."): names[p]
        for prefix, module in network.named_modules()
        for name, p in module.named_parameters(recurse=False, remove_duplicate=False)
    }


def clipped_sum_by_example(network: nn.Module, losses: Losses, batch: Batch, clip_norm: float) -> ClippedSum:
    """Clip after forming every example's gradient by `torch.func`: for any network, and an oracle of the fast path."""
    if len(batch[0]) == 0:
        return ClippedSum(_zeros(network), batch[0].new_zeros(0, dtype=torch.float64))
    return _clip_gradients(_example_gradients(network, losses, batch, _zeros(network)), clip_norm)


def clipped_sum_by_loop(network: nn.Module, losses: Losses, batch: Batch, clip_norm: float) -> ClippedSum:
    """Clip after a backward pass for each example: correct wherever autograd is, and an oracle for the others.

    Unlike `torch.func`, it does not import PyTorch's compiler, which takes 1.5 seconds.
    """
    trained = {name: p for name, p in network.named_parameters() if p.requires_grad}
    sums, norms = _zeros(network), [batch[0].new_zeros(0, dtype=torch.float64)]
    for row in range(len(batch[0])):
        with torch.enable_grad():
            loss = losses(network, tuple(entry[row : row + 1] for entry in batch)).sum()
            gradients = (
                torch.autograd.grad(loss, list(trained.values()), allow_unused=True, materialize_grads=True)
                if loss.requires_grad
                else [torch.zeros_like(p) for p in trained.values()]
            )
        # One example's gradient at a time: those of a whole batch would take more memory than the path they check.
        clipped = _clip_gradients({name: g[None] for name, g in zip(trained, gradients, strict=True)}, clip_norm)
        norms.append(clipped.norms)
        for name, gradient in clipped.gradients.items():
            sums[name] += gradient
    return ClippedSum(sums, torch.cat(norms))


def _clip_gradients(formed: dict[str, Tensor], clip_norm: float) -> ClippedSum:
    """Return the clipped sum of per-example gradients, each of shape examples x parameter."""
    with torch.autocast(next(iter(formed.values())).device.type, enabled=False):
        norms = torch.stack([squared_norm_bounds(g) for g in formed.values()]).sum(0).sqrt()
        finite = norms.isfinite()
        total = {
            name: torch.tensordot(clipping_weights(norms, clip_norm, g.dtype)[finite], g[finite], 1)
            for name, g in formed.items()
        }
    return ClippedSum(total, norms)


def _example_gradients(network: nn.Module, losses: Losses, batch: Batch, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the per-example gradients of these parameters, each of shape examples x parameter."""
    module, selected = _LossOf(network, losses), set(names)
    parameters = {name: p.detach() for name, p in network.named_parameters() if name in selected}
    qualified_names = _qualified_names(network)

    def loss(values: dict[str, Tensor], example: Batch) -> Tensor:
        substitutes = {f"network.{name}": values[first] for name, first in qualified_names.items() if first in values}
        value: Tensor = functional_call(module, substitutes, tuple(e[None] for e in example), tie_weights=False)
        return value.sum()

    gradients: dict[str, Tensor] = vmap(grad(loss), in_dims=(None, 0))(parameters, batch)
    return gradients


def parameters_without_rule(network: nn.Module) -> list[str]:
    """Return the names of trained parameters that belong to no layer with a rule in `layer_gradients`."""
    known = {
        id(p) for layer in network.modules() if has_layer_gradients(layer) for p in layer.parameters(recurse=False)
    }
    return [name for name, p in network.named_parameters() if p.requires_grad and id(p) not in known]


@contextmanager
def perturbed_weights(network: nn.Module) -> Iterator[None]:
    """Perturb all weights within the block: with weights of zero, gradients vanish and comparisons see nothing."""
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
    """Return the same sum, computed chunk by chunk: memory is bounded, and a chunk stays in the cache.

    **Guarantee.** As without chunks: each example is clipped in its own chunk.
    """
    total, norms = _zeros(network), []
    for part in zip(*(torch.split(entry, chunk) for entry in batch), strict=True):
        clipped = by(network, losses, part, clip_norm)
        norms.append(clipped.norms)
        for name, value in clipped.gradients.items():
            total[name] += value
    return ClippedSum(total, torch.cat(norms))


def clipper_for(
    network: nn.Module, losses: Losses, probe: Batch, *, oracle: Clipper = clipped_sum_by_example
) -> Clipper:
    """Return the fast algorithm where it is correct for this network, else the one that always is.

    A weight used outside its layer's call, or shared, escapes the tape, and so do rows in another order than the
    examples'. So the fast algorithm is compared with the `oracle`, norms and sum, on a probe of several public
    examples. Networks that overwrite layer inputs are not served by it either.

    The default oracle, `torch.func`, also raises at code that branches on values, by which one example might influence
    another. For layers known not to, a backward pass for each example will do.
    """
    trained = sum(p.requires_grad for p in network.parameters())
    others = len(parameters_without_rule(network))
    if not trained:
        return clipped_sum_in_one_pass
    if others == trained or len(probe[0]) < 2:
        return clipped_sum_by_example
    clipper = clipped_sum_mixed if others else clipped_sum_in_one_pass
    with perturbed_weights(network):
        expected = oracle(network, losses, probe, 1.0)
        try:
            fast = clipper(network, losses, probe, 1.0)
        except ModelError:
            return clipped_sum_by_example
    return clipper if _agree(fast, expected, expected, _TOLERANCE) else clipped_sum_by_example


def bytes_per_example(network: nn.Module, clipper: Clipper) -> int:
    """Return how many bytes of per-example gradients a clipper forms for each example."""
    others = set(parameters_without_rule(network))
    return sum(
        p.numel() * p.element_size()
        for name, p in network.named_parameters()
        if p.requires_grad and (clipper is clipped_sum_by_example or (clipper is clipped_sum_mixed and name in others))
    )


def agrees_on_batch(
    network: nn.Module,
    losses: Losses,
    batch: Batch,
    *,
    bfloat16: bool,
    clipper: Clipper = clipped_sum_in_one_pass,
    oracle: Clipper = clipped_sum_by_example,
) -> bool:
    """Return whether a clipper agrees with the oracle on some examples of a batch as large as those of training.

    Per-example gradients of the whole batch would not fit into memory. So the norms of a few examples are compared, and
    the difference that removing them makes to the sum. Passes in `bfloat16` keep eight bits, and get a wide tolerance.
    """
    count = len(batch[0])
    few = torch.tensor(sorted({0, count // 3, 2 * count // 3, count - 1}), device=batch[0].device)
    rest = torch.ones(count, dtype=torch.bool, device=batch[0].device).index_fill(0, few, False)
    with perturbed_weights(network):
        whole = clipper(network, losses, batch, 1.0)
        others = clipper(network, losses, tuple(entry[rest] for entry in batch), 1.0)
        expected = oracle(network, losses, tuple(entry[few] for entry in batch), 1.0)
    removed = {name: value - others.gradients[name] for name, value in whole.gradients.items()}
    tolerance = _BFLOAT16_TOLERANCE if bfloat16 else _TOLERANCE
    return _agree(ClippedSum(removed, whole.norms[few]), expected, whole, tolerance)


_TOLERANCE, _BFLOAT16_TOLERANCE = 1e-2, 0.2


def _agree(fast: ClippedSum, expected: ClippedSum, whole: ClippedSum, tolerance: float) -> bool:
    """Return whether sums and norms agree; a gradient that is only rounding is compared with the size of the whole."""
    rounding = 1e-3 * tolerance * torch.cat([value.flatten() for value in whole.gradients.values()]).norm()
    pairs = [(fast.gradients[name], value) for name, value in expected.gradients.items()]
    pairs.append((fast.norms, expected.norms))
    return all(bool((one - other).norm() <= tolerance * other.norm() + rounding) for one, other in pairs)


@dataclass(frozen=True, eq=False, repr=False)
class ClippedGradients(Mapping[str, Tensor]):
    """Σ min(1, C/‖g_i‖) g_i by parameter name; not private before noise is added.

    **Guarantee.** Adding or removing one example changes it, as one vector over all parameters, by at most `clip_norm`,
    up to how the sum of contributions rounds in the parameters' precision.
    """

    gradients: dict[str, Tensor]
    clip_norm: float
    in_one_pass: bool
    """Whether one backward pass was enough, or each example's gradient was formed."""

    def noise_stddev(self, noise_multiplier: float) -> float:
        """Return σ(C + √d·step): rounding d values to the noise's grid adds √d·step to the sensitivity (`add_noise`).

        >>> round(ClippedGradients({"weight": torch.zeros(100)}, 2.0, True).noise_stddev(1.5), 6)
        3.0
        """
        # A larger deviation may have a coarser grid, so the step is doubled until it is the result's own.
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
        how = "in one pass" if self.in_one_pass else "example by example"
        return (
            f"<clipped gradients of {len(self)} parameters, {values} values; each example at most {self.clip_norm:g} "
            f"in l2, clipped {how}; no noise yet, NOT private>"
        )


def clipped_sum(module: nn.Module, losses: Losses, batch: Batch, clip_norm: float) -> ClippedGradients:
    """Sum the gradients of a batch, each example's clipped to `clip_norm`, for a user's own training loop.

    `losses(module, batch)` returns one loss per example; each is a function of its own rows of the batch alone. The sum
    comes from one backward pass where every trained weight belongs to a Linear, Conv2d or GroupNorm layer that is used
    as it is, else from every example's own gradient, which costs memory and time. On the first batch of a module and
    its losses both are compared; and it is checked that examples do not mix and that passes leave buffers unchanged.

    **Guarantee.** As for `ClippedGradients`. Assumes that these checks hold for later batches too. The module's
    gradients and parameters are left unchanged.

    >>> model = nn.Linear(2, 1)
    >>> squares = lambda model, batch: (model(batch[0])[:, 0] - batch[1]).square()
    >>> clipped_sum(model, squares, (torch.ones(3, 2), torch.ones(3)), clip_norm=0.1)
    <clipped gradients of 2 parameters, 3 values; each example at most 0.1 in l2, clipped in one pass; no noise yet, \
NOT private>
    """
    if not 0 < clip_norm < math.inf:
        raise SettingError(
            f"clip_norm={clip_norm} is not a positive number.",
            why="It bounds what one example adds to the sum, and the noise is a multiple of it.",
            remedy="Use a number above 0, such as 1.",
        )
    if not isinstance(batch, tuple) or len({len(entry) for entry in batch}) != 1:
        raise DataError(
            f"the batch is a {type(batch).__name__} of entries of lengths {[len(entry) for entry in batch][:4]}.",
            remedy="Give a tuple of tensors with one leading entry per example, such as (inputs, labels).",
        )
    require_no_mixing_layers(module, remedy="Use stobatch.models.replace_batch_norm(module).")
    clipper = _choose_clipper(module, losses, batch)
    if num_bytes := bytes_per_example(module, clipper):
        clipper = partial(clipped_sum_in_chunks, chunk=max(1, _BYTES_AT_ONCE // num_bytes), by=clipper)
    clipped = clipper(module, losses, batch, clip_norm)
    return ClippedGradients(clipped.gradients, clip_norm, clipper is clipped_sum_in_one_pass)


_BYTES_AT_ONCE = 2**29
"""Bytes of per-example gradients that are formed at once."""

_CHOSEN: WeakKeyDictionary[nn.Module, tuple[ReferenceType[Losses], bool, Clipper]] = WeakKeyDictionary()
"""For each module: its losses, its mode, and the clipper that was chosen for them."""


def _choose_clipper(module: nn.Module, losses: Losses, batch: Batch) -> Clipper:
    """Return the clipper chosen earlier for this module and these losses, or choose one on this batch.

    The batch is private: the choice changes the time of a step, and the result by rounding only.
    """
    if module in _CHOSEN and _CHOSEN[module][0]() is losses and _CHOSEN[module][1] == module.training:
        return _CHOSEN[module][2]
    if len(batch[0]) < 2:
        return clipped_sum_by_example
    check_losses(module, losses, tuple(entry[:FEW_ROWS] for entry in batch))
    try:
        clipper = clipper_for(module, losses, tuple(entry[:FEW_ROWS] for entry in batch))
        if clipper is not clipped_sum_by_example and len(batch[0]) > FEW_ROWS:
            bfloat16 = torch.is_autocast_enabled(batch[0].device.type)
            if not agrees_on_batch(module, losses, batch, bfloat16=bfloat16, clipper=clipper):
                clipper = clipped_sum_by_example
    except RuntimeError as error:
        raise ModelError(
            f"the gradients of single examples cannot be formed: {str(error).splitlines()[0]}",
            why="torch.func.vmap does not support what the module or the losses do; random layers are one cause.",
            remedy="Remove dropout and data-dependent branches, or use layers that PyTorch vectorises.",
        ) from error
    _CHOSEN[module] = ref(losses), module.training, clipper
    return clipper


def check_losses(module: nn.Module, losses: Losses, few: Batch) -> None:
    """Raise unless each of a few examples has its own loss, examples do not mix, and buffers stay unchanged."""
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
            if change := mixing_experiment(
                lambda inputs: losses(module, (inputs, *few[1:])), few[0], (-1.0, 0.0, 1.0), generator
            ):
                raise ModelError(
                    "changing one example of a batch changes another example's loss.",
                    why=f"Some layer or loss mixes examples or draws random numbers, found with {change}.",
                    remedy="Remove it (dropout, batch statistics, means over the batch), so that a clipped gradient is "
                    "about one example.",
                )
    for name, value in module.named_buffers():
        if name not in before or not torch.equal(value, before[name]):
            raise ModelError(
                f"passing examples through the module changes its '{name}'.",
                why="A buffer that depends on private examples is released without noise.",
                remedy="Use layers without running statistics or counters.",
            )


def weigh_classes(losses: Losses, weights: Tensor | None) -> Losses:
    """Return each loss times the public weight of its label, the second entry of the batch."""
    if weights is None:
        return losses
    return lambda module, batch: losses(module, batch) * weights[batch[1]]


def group_rows(batch: Batch, losses: Losses, per: int) -> tuple[Batch, Losses]:
    """Return the batch with one leading entry per unit of `per` consecutive rows, and the mean loss of each unit.

    The gradient of that mean is one vector per unit, so clipping bounds the whole unit.

    **Guarantee.** A unit's loss is a function of its own rows alone, if each row's loss is one of that row.
    """
    if per == 1:
        return batch, losses

    def mean(module: nn.Module, units: Batch) -> Tensor:
        rows = losses(module, tuple(entry.flatten(0, 1) for entry in units))
        return rows.reshape(-1, per).mean(1)

    return tuple(entry.reshape(-1, per, *entry.shape[1:]) for entry in batch), mean
