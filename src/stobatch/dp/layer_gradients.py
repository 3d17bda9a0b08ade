"""Per-example gradients of one layer: their norms, and their weighted sum, rarely formed one by one (ghost clipping).

A layer y = Wa with gradient g at its outputs has the weight gradient Σ_rows g aᵀ. Interval bounds also multiply by |W|:
with inputs r and gradient h at the outputs that part is Σ (h rᵀ) ⊙ S, S = sign(W). Since S² = 1, its norm is known
without forming it, and the cross term of both is (g ⊙ h)ᵀ S (a ⊙ r), a matrix product for all examples at once.
The proofs are in docs/guarantees/clipping.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from enum import Enum
from types import TracebackType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F  # noqa: N812
from torch.nn.grad import conv2d_weight

from stobatch.errors import ModelError

NUMBERS_AT_ONCE = {"cpu": 2**20, "cuda": 2**26}
"""Values of patches that are copied at once: a few megabytes, which fit into a CPU's cache; a GPU takes more."""


@dataclass(frozen=True)
class LayerUse:
    """A recorded use of a layer, and the gradient of the summed losses at its outputs."""

    use: RecordedUse
    gradient: Tensor

    def rows(self, num_examples: int) -> tuple[Tensor, Tensor]:
        """Return (inputs, gradients) as examples x rows x values, for layers that act on the last dimension."""
        a, g = self.use.inputs, self.gradient
        return a.reshape(num_examples, -1, a.shape[-1]), g.reshape(num_examples, -1, g.shape[-1])

    def transposed(self) -> LayerUse:
        """Return a use of Wᵀ as one of W: ⟨Wᵀa, g⟩ = ⟨Wg, a⟩, so inputs and gradient swap; others unchanged."""
        if self.use.form is not WeightForm.TRANSPOSE:
            return self
        return LayerUse(replace(self.use, inputs=self.gradient, form=WeightForm.WEIGHT), self.use.inputs)


def sign(weight: Tensor) -> Tensor:
    """Return ±1, never 0: a subgradient of |W| whose entries all have size 1."""
    return torch.where(weight < 0, -1.0, 1.0).to(weight)


def absolute(weight: Tensor) -> Tensor:
    """Return |W|, with the subgradient `sign` that the norms below assume."""
    return weight * sign(weight.detach())


def class_pairs(num_classes: int, device: torch.device) -> Tensor:
    """Return all pairs of classes j < k, as 2 x pairs."""
    return torch.triu_indices(num_classes, num_classes, 1, device=device)


class LayerGradients(ABC):
    """The per-example gradients of one layer."""

    takes_bfloat16: ClassVar[bool] = False
    """Whether inputs and gradients may be bfloat16; else they are converted to float32 before."""

    def __init__(self, layer: nn.Module, uses: list[LayerUse], num_examples: int) -> None:
        self.trained = {name for name, p in layer.named_parameters(recurse=False) if p.requires_grad}
        self.num_examples = num_examples
        of_weight = [use.transposed() for use in uses]
        self.uses = {form: [use for use in of_weight if use.use.form is form] for form in WeightForm}

    @abstractmethod
    def squared_norms(self) -> Tensor:
        """Return ‖g_i‖² over this layer's trained parameters, one per example, in float64; never too small."""

    def _trained(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value for name, value in values.items() if name in self.trained}

    @abstractmethod
    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        """Return Σ w_i g_i for each trained parameter."""


def _concatenate_rows(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the rows of several uses as those of one, without a copy if there is one use."""
    return pairs[0] if len(pairs) == 1 else (torch.cat([a for a, _ in pairs], 1), torch.cat([g for _, g in pairs], 1))


def _gram(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return the squared norm of Σ_s g_s a_sᵀ, which is Σ_st (a_s·a_t)(g_s·g_t); and its size Σ ‖a_s‖ ‖g_s‖.

    The size is what the norm would be if no rows cancelled. Both come from the same inner products.
    """
    if first.shape[1] == 1:
        # One row: ‖g aᵀ‖ = ‖g‖ ‖a‖, and nothing can cancel.
        single = squared_norm_bounds(first) * squared_norm_bounds(second)
        return single, single.sqrt()
    # ⟨g_s a_sᵀ, g_t a_tᵀ⟩ = (a_s·a_t)(g_s·g_t): examples x rows x rows, whatever the size of the weight.
    a, g = torch.bmm(first, first.mT), torch.bmm(second, second.mT)
    size = (a.diagonal(dim1=1, dim2=2) * g.diagonal(dim1=1, dim2=2)).double().sqrt().sum(1)
    return (a * g).sum((1, 2), dtype=torch.float64), size


def _unit_roundoff(values: Tensor) -> float:
    """Return the largest relative error of one operation on such values."""
    is_tf32 = values.is_cuda and values.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    return 2.0**-11 if is_tf32 else torch.finfo(values.dtype).eps / 2


def _allowance(num_terms: int, unit: float) -> float:
    """Return at least γ + γ² with γ = nu/(1 - nu), the error of n operations in any order (Higham, 2002, chapter 3)."""
    return 1.25 * num_terms * unit


def squared_norm_bounds(values: Tensor) -> Tensor:
    """Return Σ of squares over all but the first dimension, in float64, rounded up: never too small.

    Squares of bfloat16 values are exact in float32.
    """
    rows = values.reshape(len(values), -1, values.shape[-1] if values.ndim > 1 else 1)
    if values.dtype is torch.bfloat16:
        # Without a float32 copy of the values.
        lengths: Tensor = torch.linalg.vector_norm(rows, dim=2, dtype=torch.float32)
        total = lengths.double().square().sum(1)
        return total * (1 + _allowance(rows.shape[2] + 8, torch.finfo(torch.float32).eps / 2))
    total = rows.square().sum(2).sum(1, dtype=torch.float64)
    return total * (1 + _allowance(rows.shape[2] + 2, torch.finfo(values.dtype).eps / 2))


def weighted_rows(weights: Tensor, values: Tensor) -> Tensor:
    """Return Σ w_i v_i in the precision of the weights; bfloat16 values are accumulated in float32."""
    flat = values.flatten(1)
    if flat.dtype is weights.dtype:
        total = weights @ flat
    elif not flat.is_cuda:
        total = weights @ flat.to(weights.dtype)
    else:
        # One pass over the values, which dominates the time: the weights become three bfloat16 rows that sum to them,
        # so that every product w·v is exact.
        total = torch.mm(split_bfloat16(weights), flat, out_dtype=weights.dtype).sum(0)
    shaped: Tensor = total.view(values.shape[1:])
    return shaped


def split_bfloat16(values: Tensor) -> Tensor:
    """Return float32 values as three rows of bfloat16 that sum to them exactly: 8 of their 24 bits in each."""
    first = values.bfloat16()
    second = (values - first).bfloat16()
    return torch.stack([first, second, (values - first - second).bfloat16()])


def _cancellation_allowance(size: Tensor, num_terms: int, unit: float) -> Tensor:
    """Return a bound on the rounding error of a squared norm whose terms, of this total size, may cancel.

    Without it an example whose rows nearly cancel could get too small a norm, and be added unclipped. Each inner
    product of rows errs by at most nu ‖a_s‖ ‖a_t‖, so Σ (a_s·a_t)(g_s·g_t) errs by at most that share of size², with
    size = Σ ‖a_s‖ ‖g_s‖, even where the sum itself is tiny.
    """
    return _allowance(num_terms, unit) * size.square()


class LinearGradients(LayerGradients):
    """Gradients of y = Wa + b: norms from inner products of rows; formed only for unusual combinations of uses."""

    def __init__(self, layer: nn.Module, uses: list[LayerUse], num_examples: int) -> None:
        super().__init__(layer, uses, num_examples)
        self.weight = layer.get_parameter("weight").detach()
        # Examples x rows x values: inputs a of W and gradients g at its outputs; r and h likewise of |W|.
        self.a, self.g = self._concatenate_rows(WeightForm.WEIGHT)
        self.r, self.h = self._concatenate_rows(WeightForm.ABSOLUTE)
        differences = [use.rows(num_examples) for use in self.uses[WeightForm.DIFFERENCES]]
        usual = not differences or (sum(r.shape[1] for r, _ in differences) == 1 and not self.uses[WeightForm.ABSOLUTE])
        self.formed = None if usual or "weight" not in self.trained else self._formed()

    def _concatenate_rows(self, kind: WeightForm) -> tuple[Tensor, Tensor]:
        pairs = [use.rows(self.num_examples) for use in self.uses[kind]]
        if not pairs:
            out, into = self.weight.shape
            return self.weight.new_zeros(self.num_examples, 0, into), self.weight.new_zeros(self.num_examples, 0, out)
        return _concatenate_rows(pairs)

    def squared_norms(self) -> Tensor:
        total = self.weight.new_zeros(self.num_examples, dtype=torch.float64)
        if "weight" in self.trained:
            total = self._weight_squared_norms()
        if "bias" in self.trained:
            total = total + squared_norm_bounds(self.g.sum(1))
        return total

    def _weight_squared_norms(self) -> Tensor:
        if self.formed is not None:
            return squared_norm_bounds(self.formed)
        total, size = _gram(self.a, self.g)
        if self.uses[WeightForm.ABSOLUTE]:
            # ⟨g_s a_sᵀ, S ⊙ h_t r_tᵀ⟩ = Σ_jk (g_s ⊙ h_t)_j S_jk (a_s ⊙ r_t)_k for every row s of W and every row t of
            # |W|: examples x pairs of rows x values, with S applied to all of them by one matrix product.
            mixed_out = (self.g[:, :, None] * self.h[:, None]).flatten(1, 2)
            mixed_in = (self.a[:, :, None] * self.r[:, None]).flatten(1, 2)
            cross = (F.linear(mixed_in, sign(self.weight)) * mixed_out).sum((1, 2), dtype=torch.float64)
            absolute_total, absolute_size = _gram(self.r, self.h)
            total, size = total + absolute_total + 2 * cross, size + absolute_size
        for use in self.uses[WeightForm.DIFFERENCES]:
            radius, gradient = use.rows(self.num_examples)
            total = total + self._differences(use)
            # Each pair adds ±h S ⊙ r to two rows of the gradient.
            size = size + 2 * gradient.abs().sum((1, 2), dtype=torch.float64) * squared_norm_bounds(radius).sqrt()
        # A single row is an exact product; everything else is a sum whose terms may cancel.
        if self.a.shape[1] == 1 and not self.uses[WeightForm.ABSOLUTE] and not self.uses[WeightForm.DIFFERENCES]:
            return total
        pairs = len(self.weight) ** 2 if self.uses[WeightForm.DIFFERENCES] else 0
        num_terms = sum(self.weight.shape) + pairs + 8
        return total.clamp(min=0) + _cancellation_allowance(size, num_terms, _unit_roundoff(self.weight))

    def _formed(self) -> Tensor:
        """Return each example's gradient of W, as examples x outputs x inputs."""
        total = torch.bmm(self.g.mT, self.a) + sign(self.weight) * torch.bmm(self.h.mT, self.r)
        first, second = class_pairs(len(self.weight), self.weight.device)
        for use in self.uses[WeightForm.DIFFERENCES]:
            radius, gradient = use.rows(self.num_examples)
            pairs = self._pair_signs() * torch.bmm(gradient.mT, radius)
            total = total.index_add(1, first, pairs).index_add(1, second, -pairs)
        return total

    def _pair_signs(self) -> Tensor:
        """Return sign(W_j - W_k) for all pairs of classes j < k, as pairs x inputs."""
        first, second = class_pairs(len(self.weight), self.weight.device)
        return sign(self.weight[first] - self.weight[second])

    def _differences(self, use: LayerUse) -> Tensor:
        """Return what |W_j - W_k| r for pairs of classes adds to the squared norm, its cross term with g aᵀ included.

        With h the gradient at the output of the pair (j, k) and S its signs, the pair adds +h S ⊙ r to row j and
        -h S ⊙ r to row k of the gradient. Only pairs with the label y have h ≠ 0. So the row of another class j is one
        such term, of norm |h| ‖r‖, and the label's row is V ⊙ r with V the signed sum over all its pairs.
        """
        assert use.use.labels is not None
        (radius, gradient), labels = use.rows(self.num_examples), use.use.labels
        # Examples x inputs, and examples x pairs of classes.
        radius, h = radius[:, 0], gradient[:, 0]
        first, second = class_pairs(len(self.weight), self.weight.device)
        signs = self._pair_signs()
        label_h = torch.where(labels[:, None] == first, 1.0, -1.0).to(h) * h
        total = squared_norm_bounds(h) * squared_norm_bounds(radius) + squared_norm_bounds((label_h @ signs) * radius)
        for row in range(self.a.shape[1]):
            # ⟨g aᵀ, +h S ⊙ r in row j, -h S ⊙ r in row k⟩ = (g_j - g_k) h Σ S ⊙ a ⊙ r.
            gap = self.g[:, row][:, first] - self.g[:, row][:, second]
            total = total + 2 * (((gap * h) @ signs) * self.a[:, row] * radius).sum(1, dtype=torch.float64)
        return total

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        bias = {"bias": weights @ self.g.sum(1)}
        return self._trained(bias if "weight" not in self.trained else {"weight": self._weighted_sum(weights)} | bias)

    def _weighted_sum(self, weights: Tensor) -> Tensor:
        if self.formed is not None:
            return (weights @ self.formed.flatten(1)).reshape_as(self.weight)
        row_weights = weights[:, None, None]
        total = (self.g * row_weights).flatten(0, 1).mT @ self.a.flatten(0, 1)
        if self.uses[WeightForm.ABSOLUTE]:
            total = total + sign(self.weight) * ((self.h * row_weights).flatten(0, 1).mT @ self.r.flatten(0, 1))
        for use in self.uses[WeightForm.DIFFERENCES]:
            radius, gradient = use.rows(self.num_examples)
            pairs = self._pair_signs() * ((gradient * row_weights).flatten(0, 1).mT @ radius.flatten(0, 1))
            first, second = class_pairs(len(self.weight), self.weight.device)
            total = total.index_add(0, first, pairs).index_add(0, second, -pairs)
        return total


@dataclass(frozen=True)
class Window:
    """Stride, padding and dilation of a kernel, each as (vertical, horizontal)."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...] = (1, 1)


class ConvGradients(LayerGradients):
    """Gradients of a convolution: a linear layer on patches, with a row for each position.

    Where positions are few and weights many, norms come from inner products of rows, and the weighted sum is the
    gradient of weighted outputs. Else each example's gradient is formed, which is then smaller than its rows. In
    bfloat16 it always is: it stays in bfloat16, and a multiple of exactly the values whose norm was taken is added.
    """

    takes_bfloat16 = True
    always_formed: ClassVar[bool] = False
    """Whether the parameter is not the kernel itself, so that each example's gradient has to be formed."""

    def __init__(self, layer: nn.Module, uses: list[LayerUse], num_examples: int) -> None:
        super().__init__(layer, uses, num_examples)
        self.window, self.weight = self.window_of(layer), layer.get_parameter("weight").detach()
        of_weight, of_absolute = self.uses[WeightForm.WEIGHT], self.uses[WeightForm.ABSOLUTE]
        maps, patch = len(self.weight), self.weight[0].numel()
        positions = sum(use.gradient.numel() for use in of_weight) // (num_examples * maps)
        # Values to read for each example: its rows, positions x (patch + maps), or its gradient, patch x maps.
        bfloat16 = any(use.gradient.dtype is torch.bfloat16 for use in of_weight)
        by_rows = not (of_absolute or bfloat16 or self.always_formed) and positions * (patch + maps) < patch * maps
        self.formed: Tensor | None = None
        self.weight_squared_norms = self.weight.new_zeros(num_examples, dtype=torch.float64)
        if "weight" in self.trained:
            self.formed = None if by_rows else self._formed()
            self.weight_squared_norms = (
                self._squared_norms_by_rows() if self.formed is None else squared_norm_bounds(self.formed)
            )
        self.bias = self._bias_gradients()

    def _bias_gradients(self) -> Tensor:
        """Return each example's gradient of b, as examples x maps."""
        zeros = self.weight.new_zeros(self.num_examples, len(self.weight))
        if "bias" not in self.trained:
            return zeros
        return sum(
            (_channel_sums(use.gradient, self.num_examples) for use in self.uses[WeightForm.WEIGHT]), start=zeros
        )

    @staticmethod
    def window_of(layer: nn.Module) -> Window:
        assert isinstance(layer, nn.Conv2d)
        assert not isinstance(layer.padding, str)
        return Window(layer.stride, layer.padding, layer.dilation)

    def _rows(self, kind: WeightForm) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (patches, gradients) as examples x rows x values, a few examples at a time."""
        uses = [(self._patches(use), use.gradient.permute(0, 2, 3, 1)) for use in self.uses[kind]]
        by_example = [tuple(v.reshape(self.num_examples, -1, *v.shape[1:]) for v in pair) for pair in uses]
        numbers_at_once = NUMBERS_AT_ONCE.get(self.weight.device.type, NUMBERS_AT_ONCE["cpu"])
        few = max(1, numbers_at_once // sum(a[0].numel() for a, _ in by_example))
        for start in range(0, self.num_examples, few):
            some = slice(start, start + few)
            yield _concatenate_rows([(a[some].flatten(1, 3).flatten(2), g[some].flatten(1, 3)) for a, g in by_example])

    def _patches(self, use: LayerUse) -> Tensor:
        """Return a view of the padded images, as images x height x width x kernel height x kernel width x channels.

        With channels last a patch is a few runs of memory: several times faster to copy than by F.unfold.
        """
        window, (channels, *kernel) = self.window, self.weight.shape[1:]
        vertical, horizontal = window.padding
        images = F.pad(use.use.inputs.permute(0, 2, 3, 1), (0, 0, horizontal, horizontal, vertical, vertical))
        image, row, pixel, channel = images.stride()
        # (y, x, ky, kx, c) lies at stride·(y, x) + dilation·(ky, kx) of the padded image: a view, nothing is copied.
        position = window.stride[0] * row, window.stride[1] * pixel
        offset = window.dilation[0] * row, window.dilation[1] * pixel
        return images.as_strided(
            (len(images), *use.gradient.shape[2:], *kernel, channels), (image, *position, *offset, channel)
        )

    def _squared_norms_by_rows(self) -> Tensor:
        parts = []
        for a, g in self._rows(WeightForm.WEIGHT):
            total, size = _gram(a, g)
            allowance = _cancellation_allowance(size, a.shape[2] + g.shape[2] + 8, _unit_roundoff(a))
            parts.append(total.clamp(min=0) + allowance)
        return torch.cat(parts)

    def _formed(self) -> Tensor:
        """Return each example's gradient of W, as examples x patch x maps."""
        signs = sign(self.weight).permute(2, 3, 1, 0).flatten(0, 2)
        total = torch.zeros_like(signs)
        if self.uses[WeightForm.WEIGHT]:
            total = torch.cat([self._from_rows(a, g) for a, g in self._rows(WeightForm.WEIGHT)])
        if self.uses[WeightForm.ABSOLUTE]:
            total = total + torch.cat([signs * torch.bmm(r.mT, h) for r, h in self._rows(WeightForm.ABSOLUTE)])
        return total

    def _from_rows(self, patches: Tensor, gradients: Tensor) -> Tensor:
        """Return the gradients of some examples from their rows, as examples x patch x maps."""
        return torch.bmm(patches.mT, gradients)

    def squared_norms(self) -> Tensor:
        norms = self._trained({"weight": self.weight_squared_norms, "bias": squared_norm_bounds(self.bias)})
        return torch.stack(list(norms.values())).sum(0)

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        if "weight" not in self.trained:
            return self._trained({"bias": weights @ self.bias})
        if self.formed is not None:
            maps, channels, *kernel = self.weight.shape
            weight = weighted_rows(weights, self.formed).view(*kernel, channels, maps).permute(3, 2, 0, 1)
        else:
            weight = torch.stack([self._weighted_use(use, weights) for use in self.uses[WeightForm.WEIGHT]]).sum(0)
        return self._trained({"weight": weight, "bias": weights @ self.bias})

    def _weighted_use(self, use: LayerUse, weights: Tensor) -> Tensor:
        # The gradient is linear in the output gradients: weight those, and one convolution sums over all examples.
        window, image_weights = self.window, weights.repeat_interleave(len(use.gradient) // self.num_examples)
        total: Tensor = conv2d_weight(  # type: ignore[no-untyped-call]
            use.use.inputs,
            self.weight.shape,
            use.gradient * image_weights[:, None, None, None],
            window.stride,
            window.padding,
            window.dilation,
        )
        return total


class GroupNormGradients(LayerGradients):
    """Gradients of scale and shift of a group normalisation; both are short, so they are formed."""

    takes_bfloat16 = True

    def __init__(self, layer: nn.GroupNorm, uses: list[LayerUse], num_examples: int) -> None:
        super().__init__(layer, uses, num_examples)
        scales, shifts = [], []
        for use in self.uses[WeightForm.WEIGHT]:
            # y = scale ⊙ normalised(x) + shift, channel by channel: the gradients are Σ g ⊙ normalised(x) and Σ g.
            normalised = F.group_norm(use.use.inputs, layer.num_groups, eps=layer.eps)
            scales.append(_channel_sums(use.gradient * normalised, num_examples))
            shifts.append(_channel_sums(use.gradient, num_examples))
        self.gradients = self._trained({"weight": torch.stack(scales).sum(0), "bias": torch.stack(shifts).sum(0)})

    def squared_norms(self) -> Tensor:
        return torch.stack([squared_norm_bounds(value) for value in self.gradients.values()]).sum(0)

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        return {name: weights @ value for name, value in self.gradients.items()}


def _channel_sums(values: Tensor, num_examples: int) -> Tensor:
    """Return sums over everything but examples and channels, as examples x channels; bfloat16 in float32."""
    rows, channels = len(values) // num_examples, values.shape[1]
    dtype = torch.promote_types(values.dtype, torch.float32)
    return values.reshape(num_examples, rows, channels, -1).sum((1, 3), dtype=dtype)


LAYER_GRADIENTS: dict[type[nn.Module], type[LayerGradients]] = {
    nn.Linear: LinearGradients,
    nn.Conv2d: ConvGradients,
    nn.GroupNorm: GroupNormGradients,
}


def register_layer(kind: type[nn.Module], gradients: type[LayerGradients]) -> None:
    """Register the gradients of a layer class, whose forward calls `record_use` at every use of its weight."""
    LAYER_GRADIENTS[kind] = gradients


def has_layer_gradients(layer: nn.Module) -> bool:
    """Return whether a layer has a rule here; of convolutions, the ungrouped ones with zero padding only."""
    plain = not isinstance(layer, nn.Conv2d) or (
        layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    )
    return plain and type(layer) in LAYER_GRADIENTS


RECORDED = (nn.Linear, nn.Conv2d, nn.GroupNorm)
"""PyTorch's layers, which a forward hook records; other layers call `record_use`."""


class WeightForm(Enum):
    """The form of a layer's weight W that inputs were multiplied by."""

    WEIGHT = "W a + b"
    TRANSPOSE = "Wᵀ a, of a layer without bias"
    ABSOLUTE = "|W| a"
    DIFFERENCES = "|W_j - W_k| a for every pair of classes j < k"


@dataclass(frozen=True)
class RecordedUse:
    """One application of a layer. Rows belong to examples in order; an example may have several rows."""

    inputs: Tensor
    at: GradientEdge
    """The edge of the autograd graph that computed its outputs."""
    form: WeightForm = WeightForm.WEIGHT
    labels: Tensor | None = None
    """For `DIFFERENCES`: each example's class; only pairs with that class have a gradient."""


_ACTIVE: ContextVar[Tape | None] = ContextVar("tape", default=None)


@dataclass
class Tape:
    """Record the uses of every layer in `network` while it is open."""

    network: nn.Module
    uses: dict[nn.Module, list[RecordedUse]] = field(default_factory=dict)
    _versions: list[tuple[Tensor, int]] = field(default_factory=list)
    _hooks: list[Any] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._layers = set(self.network.modules())
        for layer in self._layers:
            if type(layer) in RECORDED:
                self._hooks.append(layer.register_forward_hook(self._record))
        self._token = _ACTIVE.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _ACTIVE.reset(self._token)
        for hook in self._hooks:
            hook.remove()

    def _record(self, layer: nn.Module, inputs: Sequence[Tensor], outputs: Tensor) -> None:
        self.add(layer, inputs[0], outputs)

    def add(
        self,
        layer: nn.Module,
        inputs: Tensor,
        outputs: Tensor,
        form: WeightForm = WeightForm.WEIGHT,
        labels: Tensor | None = None,
    ) -> None:
        if not outputs.requires_grad or not any(p.requires_grad for p in layer.parameters(recurse=False)):
            return  # passes of an attack, and layers that are not trained
        if layer not in self._layers:
            return  # a layer of another network
        # The edge and not the tensor: an in-place operation would replace the tensor's edge by its own.
        self.uses.setdefault(layer, []).append(RecordedUse(inputs.detach(), get_gradient_edge(outputs), form, labels))
        # Overwriting a view rewrites its history: the recorded edge would no longer be on the backward path.
        unchanged = (inputs, outputs) if outputs._is_view() else (inputs,)
        self._versions += [(tensor, tensor._version) for tensor in unchanged]

    def require_intact(self) -> None:
        """Raise if a later layer overwrote recorded values: gradients would be wrong."""
        if any(tensor._version != version for tensor, version in self._versions):
            raise ModelError(
                "a layer overwrites another layer's values.",
                why="Each example's gradient is computed from the inputs of its layers.",
                remedy="Use layers with inplace=False.",
            )


def record_use(
    layer: nn.Module, inputs: Tensor, outputs: Tensor, form: WeightForm, labels: Tensor | None = None
) -> None:
    """Record a use of a layer's weight on the open tape, if there is one."""
    tape = _ACTIVE.get()
    if tape is not None:
        tape.add(layer, inputs, outputs, form, labels)
