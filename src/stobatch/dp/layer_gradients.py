"""Each example's gradient of one layer, known by its norm and by its part in a weighted sum; rarely formed itself.

A layer that met inputs a with gradient g at its outputs has the gradient Σ g aᵀ. Interval bounds also multiply with
|W|, whose gradient is (h rᵀ) ⊙ S with S = sign(W); since S² = 1, the norm of that part is known without forming it,
and the cross term of both is (g ⊙ h)ᵀ S (a ⊙ r), a matrix product for all examples at once.
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

AT_A_TIME = {"cpu": 2**20, "cuda": 2**26}
"""How many numbers of patches are copied at once: a few megabytes, which stay in a CPU's cache; more fill a GPU."""


@dataclass(frozen=True)
class LayerUse:
    """A use and the gradient of the summed losses at its outputs."""

    use: Use
    gradient: Tensor

    def rows(self, num_examples: int) -> tuple[Tensor, Tensor]:
        """(inputs, gradients) as examples x rows of each x values, for layers that act on the last dimension."""
        a, g = self.use.inputs, self.gradient
        return a.reshape(num_examples, -1, a.shape[-1]), g.reshape(num_examples, -1, g.shape[-1])

    def turned(self) -> LayerUse:
        """Return a use of Wᵀ as one of W: ⟨Wᵀa, g⟩ = ⟨Wg, a⟩, so inputs and gradient change places."""
        if self.use.meets is not WeightForm.TRANSPOSE:
            return self
        return LayerUse(replace(self.use, inputs=self.gradient, meets=WeightForm.WEIGHT), self.use.inputs)


def sign(weight: Tensor) -> Tensor:
    """±1, never 0, so that it is also a subgradient of |W| whose entries are known in size."""
    return torch.where(weight < 0, -1.0, 1.0).to(weight)


def absolute(weight: Tensor) -> Tensor:
    """|W|, with the gradient that the norms below assume."""
    return weight * sign(weight.detach())


def class_pairs(num_classes: int, device: torch.device) -> Tensor:
    """Return all j < k, as 2 x pairs."""
    return torch.triu_indices(num_classes, num_classes, 1, device=device)


class LayerGradients(ABC):
    """The gradients of all examples for one layer."""

    takes_bfloat16: ClassVar[bool] = False
    """Whether inputs and gradients may come as passes in bfloat16 made them; else they are float32 before."""

    def __init__(self, layer: nn.Module, met: list[LayerUse], num_examples: int) -> None:
        self.trained = {name for name, p in layer.named_parameters(recurse=False) if p.requires_grad}
        self.num_examples = num_examples
        turned = [m.turned() for m in met]
        self.met = {meets: [m for m in turned if m.use.meets is meets] for meets in WeightForm}

    @abstractmethod
    def squared_norms(self) -> Tensor:
        """‖g_i‖² over this layer's trained parameters, for every example, in float64; never less than it."""

    def _trained(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value for name, value in values.items() if name in self.trained}

    @abstractmethod
    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        """Σ w_i g_i for each trained parameter."""


def _joined(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the rows of several uses as those of one; a single use, which is usual, is not copied."""
    return pairs[0] if len(pairs) == 1 else (torch.cat([a for a, _ in pairs], 1), torch.cat([g for _, g in pairs], 1))


def _gram(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Σ over pairs of rows (a_s·a_t)(g_s·g_t), the squared norm of Σ g aᵀ; and Σ ‖a_s‖ ‖g_s‖, as if no rows cancelled.

    Both come from the same inner products, since the rows are too long to be read twice.
    """
    if first.shape[1] == 1:
        # ‖g aᵀ‖ = ‖g‖ ‖a‖: nothing can cancel.
        single = squared_lengths(first) * squared_lengths(second)
        return single, single.sqrt()
    # ⟨g_s a_sᵀ, g_t a_tᵀ⟩ = (a_s·a_t)(g_s·g_t), examples x rows x rows of each: the weight's size does not enter.
    a, g = torch.bmm(first, first.mT), torch.bmm(second, second.mT)
    size = (a.diagonal(dim1=1, dim2=2) * g.diagonal(dim1=1, dim2=2)).double().sqrt().sum(1)
    return (a * g).sum((1, 2), dtype=torch.float64), size


def _unit(values: Tensor) -> float:
    """Return the most that an operation on such values errs by, relative to its result."""
    rough = values.is_cuda and values.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    return 2.0**-11 if rough else torch.finfo(values.dtype).eps / 2


def _allowance(num_terms: int, unit: float) -> float:
    """At least nu/(1 - nu) and its square together: no order of n operations errs by more (Higham, 2002, chapter 3)."""
    return 1.25 * num_terms * unit


def squared_lengths(values: Tensor) -> Tensor:
    """Σ of squares over all but the first dimension, in float64, and never less than that.

    Of bfloat16 too: its squares are float32 numbers.
    """
    rows = values.reshape(len(values), -1, values.shape[-1] if values.ndim > 1 else 1)
    if values.dtype is torch.bfloat16:
        # Reads each number once, and copies none.
        lengths: Tensor = torch.linalg.vector_norm(rows, dim=2, dtype=torch.float32)
        total = lengths.double().square().sum(1)
        return total * (1 + _allowance(rows.shape[2] + 8, torch.finfo(torch.float32).eps / 2))
    total = rows.square().sum(2).sum(1, dtype=torch.float64)
    return total * (1 + _allowance(rows.shape[2] + 2, torch.finfo(values.dtype).eps / 2))


def weighted_rows(weights: Tensor, values: Tensor) -> Tensor:
    """Σ w_i v_i, in the precision of the weights; bfloat16 values are multiplied as they are, and summed in float32."""
    flat = values.flatten(1)
    if flat.dtype is weights.dtype:
        summed = weights @ flat
    elif not flat.is_cuda:
        summed = weights @ flat.to(weights.dtype)
    else:
        # Reading the values is what takes time, so all three parts are multiplied in one go; w·v is the exact product.
        summed = torch.mm(in_bfloat16(weights), flat, out_dtype=weights.dtype).sum(0)
    found: Tensor = summed.view(values.shape[1:])
    return found


def in_bfloat16(values: Tensor) -> Tensor:
    """Return float32 numbers as three bfloat16 numbers each, 8 bits of its 24 in every row; their sum is the number."""
    first = values.bfloat16()
    second = (values - first).bfloat16()
    return torch.stack([first, second, (values - first - second).bfloat16()])


def _hidden(size: Tensor, num_terms: int, unit: float) -> Tensor:
    """Return how much of a squared norm rounding can hide where terms of this size in total cancel, at its worst.

    Without it an example whose rows all but cancel would seem short, and would be added unclipped. Each inner product
    of rows errs by at most nu ‖a_s‖ ‖a_t‖, so Σ (a_s·a_t)(g_s·g_t) errs by that share of (Σ ‖a_s‖ ‖g_s‖)², the size
    squared, whatever the sum itself is.
    """
    return _allowance(num_terms, unit) * size.square()


class LinearGradients(LayerGradients):
    """Of y = Wa + b. Norms come from inner products of rows; a gradient is formed for unusual mixtures only."""

    def __init__(self, layer: nn.Module, met: list[LayerUse], num_examples: int) -> None:
        super().__init__(layer, met, num_examples)
        self.weight = layer.get_parameter("weight").detach()
        # Examples x rows x values: a into W and g at its outputs, r into |W| and h at its outputs.
        self.a, self.g = self._joined(WeightForm.WEIGHT)
        self.r, self.h = self._joined(WeightForm.ABSOLUTE)
        differences = [met.rows(num_examples) for met in self.met[WeightForm.DIFFERENCES]]
        usual = not differences or (sum(r.shape[1] for r, _ in differences) == 1 and not self.met[WeightForm.ABSOLUTE])
        self.formed = None if usual or "weight" not in self.trained else self._formed()

    def _joined(self, kind: WeightForm) -> tuple[Tensor, Tensor]:
        pairs = [met.rows(self.num_examples) for met in self.met[kind]]
        if not pairs:
            out, into = self.weight.shape
            return self.weight.new_zeros(self.num_examples, 0, into), self.weight.new_zeros(self.num_examples, 0, out)
        return _joined(pairs)

    def squared_norms(self) -> Tensor:
        total = self.weight.new_zeros(self.num_examples, dtype=torch.float64)
        if "weight" in self.trained:
            total = self._of_weight()
        if "bias" in self.trained:
            total = total + squared_lengths(self.g.sum(1))
        return total

    def _of_weight(self) -> Tensor:
        if self.formed is not None:
            return squared_lengths(self.formed)
        total, size = _gram(self.a, self.g)
        if self.met[WeightForm.ABSOLUTE]:
            # ⟨g_s a_sᵀ, S ⊙ h_t r_tᵀ⟩ = Σ_jk (g_s ⊙ h_t)_j S_jk (a_s ⊙ r_t)_k: every row s of one kind meets every row
            # t of the other, examples x pairs of rows x values, and S is applied to all of them by one product.
            mixed_out = (self.g[:, :, None] * self.h[:, None]).flatten(1, 2)
            mixed_in = (self.a[:, :, None] * self.r[:, None]).flatten(1, 2)
            cross = (F.linear(mixed_in, sign(self.weight)) * mixed_out).sum((1, 2), dtype=torch.float64)
            of_absolute, size_of_absolute = _gram(self.r, self.h)
            total, size = total + of_absolute + 2 * cross, size + size_of_absolute
        for met in self.met[WeightForm.DIFFERENCES]:
            radius, pulled = met.rows(self.num_examples)
            total = total + self._differences(met)
            # Each pair pulls at two rows of W, ±h S ⊙ r at each.
            size = size + 2 * pulled.abs().sum((1, 2), dtype=torch.float64) * squared_lengths(radius).sqrt()
        # A single row was an exact product; all else is a sum in which terms may have cancelled.
        if self.a.shape[1] == 1 and not self.met[WeightForm.ABSOLUTE] and not self.met[WeightForm.DIFFERENCES]:
            return total
        pairs = len(self.weight) ** 2 if self.met[WeightForm.DIFFERENCES] else 0
        return total.clamp(min=0) + _hidden(size, sum(self.weight.shape) + pairs + 8, _unit(self.weight))

    def _formed(self) -> Tensor:
        """Return each example's gradient of W, as examples x outputs x inputs."""
        total = torch.bmm(self.g.mT, self.a) + sign(self.weight) * torch.bmm(self.h.mT, self.r)
        first, second = class_pairs(len(self.weight), self.weight.device)
        for met in self.met[WeightForm.DIFFERENCES]:
            radius, pulled = met.rows(self.num_examples)
            pairs = self._signs_of_pairs() * torch.bmm(pulled.mT, radius)
            total = total.index_add(1, first, pairs).index_add(1, second, -pairs)
        return total

    def _signs_of_pairs(self) -> Tensor:
        first, second = class_pairs(len(self.weight), self.weight.device)
        return sign(self.weight[first] - self.weight[second])

    def _differences(self, met: LayerUse) -> Tensor:
        """The part of |W_j - W_y|: one row each for the other classes j, and the negative sum of them for the label.

        A pair (j, k) that has the label y gives ±h S r to the rows of j and k. The rows of other classes are orthogonal
        to each other and have norm |h| ‖r‖; the label's row is V ⊙ r, V being the signed sum over its pairs.
        """
        assert met.use.labels is not None
        (radius, pulled), labels = met.rows(self.num_examples), met.use.labels
        radius, pulled = radius[:, 0], pulled[:, 0]
        first, second = class_pairs(len(self.weight), self.weight.device)
        signs = self._signs_of_pairs()
        # Examples x pairs of classes; `pulled` is zero at pairs without the label.
        of_label = torch.where(labels[:, None] == first, 1.0, -1.0).to(pulled) * pulled
        total = squared_lengths(pulled) * squared_lengths(radius) + squared_lengths((of_label @ signs) * radius)
        for row in range(self.a.shape[1]):
            # The cross term with g aᵀ: the pair (j, k) pulls at row j with +h S r and at row k with -h S r.
            gap = self.g[:, row][:, first] - self.g[:, row][:, second]
            total = total + 2 * (((gap * pulled) @ signs) * self.a[:, row] * radius).sum(1, dtype=torch.float64)
        return total

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        bias = {"bias": weights @ self.g.sum(1)}
        return self._trained(bias if "weight" not in self.trained else {"weight": self._weighted_sum(weights)} | bias)

    def _weighted_sum(self, weights: Tensor) -> Tensor:
        if self.formed is not None:
            return (weights @ self.formed.flatten(1)).reshape_as(self.weight)
        each = weights[:, None, None]
        total = (self.g * each).flatten(0, 1).mT @ self.a.flatten(0, 1)
        if self.met[WeightForm.ABSOLUTE]:
            total = total + sign(self.weight) * ((self.h * each).flatten(0, 1).mT @ self.r.flatten(0, 1))
        for met in self.met[WeightForm.DIFFERENCES]:
            radius, pulled = met.rows(self.num_examples)
            pairs = self._signs_of_pairs() * ((pulled * each).flatten(0, 1).mT @ radius.flatten(0, 1))
            first, second = class_pairs(len(self.weight), self.weight.device)
            total = total.index_add(0, first, pairs).index_add(0, second, -pairs)
        return total


@dataclass(frozen=True)
class Window:
    """How a kernel moves over pictures: a number for either side."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...] = (1, 1)


class ConvGradients(LayerGradients):
    """Of a convolution: a linear layer on patches, with a row for each position.

    Where patches are few and weights many, norms come from inner products of rows, and the weighted sum is the gradient
    of weighted outputs; else each example's gradient is formed, which is then smaller than its rows. In bfloat16 it
    always is: it stays in bfloat16, and what is added is a multiple of the very numbers whose norm was taken.
    """

    takes_bfloat16 = True
    always_formed: ClassVar[bool] = False
    """Whether gradients of rows are not those of the parameter, so that each example's has to be formed."""

    def __init__(self, layer: nn.Module, met: list[LayerUse], num_examples: int) -> None:
        super().__init__(layer, met, num_examples)
        self.window, self.weight = self.window_of(layer), layer.get_parameter("weight").detach()
        usual, moved = self.met[WeightForm.WEIGHT], self.met[WeightForm.ABSOLUTE]
        maps, patch = len(self.weight), self.weight[0].numel()
        positions = sum(m.gradient.numel() for m in usual) // (num_examples * maps)
        # Numbers to read for each example: its rows, positions x (patch + maps), or its gradient, patch x maps.
        rough = any(m.gradient.dtype is torch.bfloat16 for m in usual)
        by_rows = not (moved or rough or self.always_formed) and positions * (patch + maps) < patch * maps
        self.formed: Tensor | None = None
        self.of_weight = self.weight.new_zeros(num_examples, dtype=torch.float64)
        if "weight" in self.trained:
            self.formed = None if by_rows else self._formed()
            self.of_weight = self._of_rows() if self.formed is None else squared_lengths(self.formed)
        self.bias = self._of_bias()

    def _of_bias(self) -> Tensor:
        """Return each example's gradient of b, as examples x maps."""
        none = self.weight.new_zeros(self.num_examples, len(self.weight))
        if "bias" not in self.trained:
            return none
        return sum((_channels(m.gradient, self.num_examples) for m in self.met[WeightForm.WEIGHT]), start=none)

    @staticmethod
    def window_of(layer: nn.Module) -> Window:
        assert isinstance(layer, nn.Conv2d)
        assert not isinstance(layer.padding, str)
        return Window(layer.stride, layer.padding, layer.dilation)

    def _rows(self, kind: WeightForm) -> Iterator[tuple[Tensor, Tensor]]:
        """(patches, gradients) as examples x rows of each x values, of a few examples at a time."""
        uses = [(self._patches(m), m.gradient.permute(0, 2, 3, 1)) for m in self.met[kind]]
        of_each = [tuple(values.reshape(self.num_examples, -1, *values.shape[1:]) for values in pair) for pair in uses]
        at_a_time = AT_A_TIME.get(self.weight.device.type, AT_A_TIME["cpu"])
        few = max(1, at_a_time // sum(a[0].numel() for a, _ in of_each))
        for start in range(0, self.num_examples, few):
            some = slice(start, start + few)
            yield _joined([(a[some].flatten(1, 3).flatten(2), g[some].flatten(1, 3)) for a, g in of_each])

    def _patches(self, met: LayerUse) -> Tensor:
        """Return a view of the padded images, as images x height x width x the patch there.

        Channels last, a patch is a few runs of memory: several times faster to copy than by F.unfold.
        """
        (high, wide), (down, right), (lower, further) = self.window.padding, self.window.stride, self.window.dilation
        channels, *kernel = self.weight.shape[1:]
        images = F.pad(met.use.inputs.permute(0, 2, 3, 1), (0, 0, wide, wide, high, high))
        image, row, pixel, channel = images.stride()
        # (y, x, ky, kx, c) lies at stride·(y, x) + dilation·(ky, kx) of the padded image: a view, nothing is copied.
        return images.as_strided(
            (len(images), *met.gradient.shape[2:], *kernel, channels),
            (image, down * row, right * pixel, lower * row, further * pixel, channel),
        )

    def _of_rows(self) -> Tensor:
        parts = []
        for a, g in self._rows(WeightForm.WEIGHT):
            total, size = _gram(a, g)
            parts.append(total.clamp(min=0) + _hidden(size, a.shape[2] + g.shape[2] + 8, _unit(a)))
        return torch.cat(parts)

    def _formed(self) -> Tensor:
        """Return each example's gradient of W, as examples x patch x maps."""
        signs = sign(self.weight).permute(2, 3, 1, 0).flatten(0, 2)
        total = torch.zeros_like(signs)
        if self.met[WeightForm.WEIGHT]:
            total = torch.cat([self._of_some(a, g) for a, g in self._rows(WeightForm.WEIGHT)])
        if self.met[WeightForm.ABSOLUTE]:
            total = total + torch.cat([signs * torch.bmm(r.mT, h) for r, h in self._rows(WeightForm.ABSOLUTE)])
        return total

    def _of_some(self, patches: Tensor, gradients: Tensor) -> Tensor:
        """Return the gradients of some examples from their rows."""
        return torch.bmm(patches.mT, gradients)

    def squared_norms(self) -> Tensor:
        norms = self._trained({"weight": self.of_weight, "bias": squared_lengths(self.bias)})
        return torch.stack(list(norms.values())).sum(0)

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        if "weight" not in self.trained:
            return self._trained({"bias": weights @ self.bias})
        if self.formed is not None:
            maps, channels, *kernel = self.weight.shape
            weight = weighted_rows(weights, self.formed).view(*kernel, channels, maps).permute(3, 2, 0, 1)
        else:
            weight = torch.stack([self._of_weighted(m, weights) for m in self.met[WeightForm.WEIGHT]]).sum(0)
        return self._trained({"weight": weight, "bias": weights @ self.bias})

    def _of_weighted(self, met: LayerUse, weights: Tensor) -> Tensor:
        # Weighted outputs first: the gradient is linear in them, and one convolution sums over images and positions.
        window, each = self.window, weights.repeat_interleave(len(met.gradient) // self.num_examples)
        total: Tensor = conv2d_weight(  # type: ignore[no-untyped-call]
            met.use.inputs,
            self.weight.shape,
            met.gradient * each[:, None, None, None],
            window.stride,
            window.padding,
            window.dilation,
        )
        return total


class GroupNormGradients(LayerGradients):
    """Of scale and shift after a normalisation over groups; both are short, so they are formed."""

    takes_bfloat16 = True

    def __init__(self, layer: nn.GroupNorm, met: list[LayerUse], num_examples: int) -> None:
        super().__init__(layer, met, num_examples)
        scales, shifts = [], []
        for m in self.met[WeightForm.WEIGHT]:
            # y = scale ⊙ normalised(x) + shift, channel by channel: the gradients are Σ g ⊙ normalised(x) and Σ g.
            normalised = F.group_norm(m.use.inputs, layer.num_groups, eps=layer.eps)
            scales.append(_channels(m.gradient * normalised, num_examples))
            shifts.append(_channels(m.gradient, num_examples))
        self.of = self._trained({"weight": torch.stack(scales).sum(0), "bias": torch.stack(shifts).sum(0)})

    def squared_norms(self) -> Tensor:
        return torch.stack([squared_lengths(value) for value in self.of.values()]).sum(0)

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        return {name: weights @ value for name, value in self.of.items()}


def _channels(values: Tensor, num_examples: int) -> Tensor:
    """Summed over everything but examples and channels; bfloat16 in float32."""
    rows, channels = len(values) // num_examples, values.shape[1]
    dtype = torch.promote_types(values.dtype, torch.float32)
    return values.reshape(num_examples, rows, channels, -1).sum((1, 3), dtype=dtype)


KNOWN: dict[type[nn.Module], type[LayerGradients]] = {
    nn.Linear: LinearGradients,
    nn.Conv2d: ConvGradients,
    nn.GroupNorm: GroupNormGradients,
}


def know(kind: type[nn.Module], gradients: type[LayerGradients]) -> None:
    """Layers of our own say how their gradients are known; they tell an open tape of every use of their weight."""
    KNOWN[kind] = gradients


def is_known(layer: nn.Module) -> bool:
    """Return whether a layer's gradients are known here; of convolutions, the plain ones only."""
    plain = not isinstance(layer, nn.Conv2d) or (
        layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    )
    return plain and type(layer) in KNOWN


RECORDED = (nn.Linear, nn.Conv2d, nn.GroupNorm)
"""PyTorch's layers whose gradients are known from their inputs and outputs; other layers `note` their uses."""


class WeightForm(Enum):
    """What of a layer's weight W the inputs were multiplied with."""

    WEIGHT = "W a + b"
    TRANSPOSE = "Wᵀ a, of a layer without bias"
    ABSOLUTE = "|W| a"
    DIFFERENCES = "|W_j - W_k| a for every pair of classes j < k"


@dataclass(frozen=True)
class Use:
    """One application of a layer. Rows belong to examples in order; an example may have several rows."""

    inputs: Tensor
    at: GradientEdge
    """Where in the graph its outputs were made."""
    meets: WeightForm = WeightForm.WEIGHT
    labels: Tensor | None = None
    """Of `DIFFERENCES`: each example's class, which every pair that matters to it contains."""


_ACTIVE: ContextVar[Tape | None] = ContextVar("tape", default=None)


@dataclass
class Tape:
    """Records the uses of every layer in `network` while it is open."""

    network: nn.Module
    uses: dict[nn.Module, list[Use]] = field(default_factory=dict)
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
        meets: WeightForm = WeightForm.WEIGHT,
        labels: Tensor | None = None,
    ) -> None:
        if not outputs.requires_grad or not any(p.requires_grad for p in layer.parameters(recurse=False)):
            return  # an attack's own passes, and layers that are not trained
        if layer not in self._layers:
            return  # another network's
        # The edge and not the tensor: an operation in place would replace the tensor's place in the graph by its own.
        self.uses.setdefault(layer, []).append(Use(inputs.detach(), get_gradient_edge(outputs), meets, labels))
        # Overwriting a view changes the graph behind it: the place where it was made is no longer on the way.
        intact = (inputs, outputs) if outputs._is_view() else (inputs,)
        self._versions += [(tensor, tensor._version) for tensor in intact]

    def require_intact(self) -> None:
        """Raise if a later layer overwrote what has to stay: gradients would be taken at the wrong place."""
        if any(tensor._version != version for tensor, version in self._versions):
            raise ModelError(
                "a layer overwrites another layer's values.",
                why="Each example's gradient is told from the values that its layers saw.",
                remedy="Use layers with inplace=False.",
            )


def note(layer: nn.Module, inputs: Tensor, outputs: Tensor, meets: WeightForm, labels: Tensor | None = None) -> None:
    """Tell the open tape, if there is one, of a use that no forward hook sees."""
    tape = _ACTIVE.get()
    if tape is not None:
        tape.add(layer, inputs, outputs, meets, labels)
