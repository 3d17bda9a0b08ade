"""Low-rank adapters: W + B A in the place of a fixed W, of linear layers and of convolutions.

The rows of A read a layer's inputs, or its patches, and the columns of B write its outputs; W itself stays as it is.
B starts at zero, so an adapted network is at first the network that it was. When a training ends, the product is added
to W (`merge`): what is deployed, bounded and certified is a plain network.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from math import sqrt
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from stobatch.dp.layer_gradients import (
    NUMBERS_AT_ONCE,
    ConvGradients,
    LayerGradients,
    LayerUse,
    WeightForm,
    class_pairs,
    has_layer_gradients,
    record_use,
    register_layer,
    sign,
    squared_norm_bounds,
)

N = TypeVar("N", bound=nn.Module)


class Adapted(nn.Module):
    """What adapted layers have in common: `fixed` is W, `up` is B (outputs x rank), `down` is A (rank x inputs)."""

    fixed: nn.Parameter
    up: nn.Parameter
    down: nn.Parameter

    @property
    def weight(self) -> Tensor:
        """W + B A, in the shape of W."""
        return self.fixed + (self.up @ self.down).view_as(self.fixed)


class AdaptedLinear(Adapted, nn.Linear):  # type: ignore[override]
    """A linear layer with weight W + B A."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = F.linear(inputs, self.weight, self.bias)
        record_use(self, inputs, outputs, WeightForm.WEIGHT)
        return outputs


class AdaptedConv2d(Adapted, nn.Conv2d):  # type: ignore[override]
    """A convolution with weight W + B A, a row of A being a kernel and B mixing the maps that they give."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self._conv_forward(inputs, self.weight, self.bias)
        record_use(self, inputs, outputs, WeightForm.WEIGHT)
        return outputs


_ADAPTED: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: AdaptedLinear, nn.Conv2d: AdaptedConv2d}
_PLAIN = {adapted: plain for plain, adapted in _ADAPTED.items()}


def adapter_size(layer: nn.Module, rank: int) -> int | None:
    """Return the number of values in an adapter of a layer; None where it takes none, or is no larger than that.

    >>> adapter_size(nn.Linear(100, 10), 2), adapter_size(nn.Linear(4, 3), 2), adapter_size(nn.ReLU(), 2)
    (220, None, None)
    """
    if type(layer) not in _ADAPTED or not has_layer_gradients(layer):
        return None
    weight = layer.get_parameter("weight")
    size = rank * (len(weight) + weight[0].numel())
    return size if size < weight.numel() else None


def adapt(layer: nn.Module, rank: int, generator: torch.Generator) -> None:
    """Turn a layer into an adapted one, in place: every module that holds it keeps holding it."""
    fixed = layer.get_parameter("weight")
    outputs, inputs = len(fixed), fixed[0].numel()
    # Of variance 1/inputs, as a fresh layer's weights: A·a has the size of a, whatever the layer's is.
    down = torch.randn(rank, inputs, generator=generator) / sqrt(inputs)
    others = {name: p for name, p in layer.named_parameters(recurse=False) if name != "weight"}
    layer._parameters.clear()
    layer.__class__ = _ADAPTED[type(layer)]
    for name, p in {
        "fixed": nn.Parameter(fixed.detach(), requires_grad=False),
        "up": nn.Parameter(fixed.detach().new_zeros(outputs, rank)),
        "down": nn.Parameter(down.to(fixed)),
    }.items():
        layer.register_parameter(name, p)
    layer.register_parameter("bias", others.get("bias"))


def merge(network: nn.Module) -> None:
    """Add every adapter to the weight that it stands beside, in place; the layers are plain ones again."""
    for layer in list(network.modules()):
        if isinstance(layer, Adapted):
            weight, bias, plain = layer.weight.detach(), layer._parameters.get("bias"), _PLAIN[type(layer)]
            layer._parameters.clear()
            layer.__class__ = plain  # type: ignore[assignment]
            layer.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
            layer.register_parameter("bias", bias)


def as_deployed(network: N) -> N:
    """Return the network that will be deployed: itself, or a copy in which its adapters are merged."""
    if not any(isinstance(layer, Adapted) for layer in network.modules()):
        return network
    found = copy.deepcopy(network)
    merge(found)
    return found


class _AdapterGradients(LayerGradients):
    """Of W + B A: an example's gradient G of the whole weight is G Aᵀ at B, and Bᵀ G at A.

    Both have the adapter's size, which is small, so they are formed: what is clipped is what is added. G itself is not
    formed where it is Σ g aᵀ, and a few examples at a time where it is a gradient of |W + B A|.
    """

    weight: Tensor
    """The whole, in the layer's own shape."""

    def _form(self, up: Tensor, down: Tensor, bias: Tensor) -> None:
        at_up, at_down = bias.new_zeros(self.num_examples, *up.shape), bias.new_zeros(self.num_examples, *down.shape)
        first = 0
        for a, g in self._rows(WeightForm.WEIGHT):
            # G = Σ g aᵀ, so G Aᵀ = Σ g (A a)ᵀ and Bᵀ G = Σ (Bᵀ g) aᵀ.
            some, first = slice(first, first + len(a)), first + len(a)
            at_up[some] += torch.bmm(g.mT, a @ down.mT)
            at_down[some] += torch.bmm((g @ up).mT, a)
        for some, formed in self._whole():
            at_up[some] += formed @ down.mT
            at_down[some] += up.mT @ formed
        self.gradients = self._trained({"up": at_up, "down": self._as_stored(at_down), "bias": bias})

    def _rows(self, kind: WeightForm) -> Iterator[tuple[Tensor, Tensor]]:
        """(inputs, gradients) as examples x rows of each x values, of a few examples at a time."""
        raise NotImplementedError

    def _whole(self) -> Iterator[tuple[slice, Tensor]]:
        """G of some examples, examples x outputs x inputs, for each use of another form than W + B A itself."""
        signs, first = sign(self._by_row(self.weight)), 0
        for r, h in self._rows(WeightForm.ABSOLUTE):
            yield slice(first, first + len(r)), signs * torch.bmm(h.mT, r)
            first += len(r)

    def _by_row(self, kernels: Tensor) -> Tensor:
        """Weights as a matrix, with the inputs in the order that rows have."""
        return kernels

    def _as_stored(self, at_down: Tensor) -> Tensor:
        """The gradients of A with the inputs in the order that A has."""
        return at_down

    def squared_norms(self) -> Tensor:
        return torch.stack([squared_norm_bounds(value) for value in self.gradients.values()]).sum(0)

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        return {name: (weights @ value.flatten(1)).view(value.shape[1:]) for name, value in self.gradients.items()}


class _LinearAdapterGradients(_AdapterGradients):
    """Of an adapted linear layer."""

    def __init__(self, layer: nn.Module, uses: list[LayerUse], num_examples: int) -> None:
        super().__init__(layer, uses, num_examples)
        assert isinstance(layer, AdaptedLinear)
        self.weight = layer.weight.detach()
        none = self.weight.new_zeros(num_examples, len(self.weight))
        bias = sum((use.rows(num_examples)[1].sum(1) for use in self.uses[WeightForm.WEIGHT]), start=none)
        self._form(layer.up.detach(), layer.down.detach(), bias)

    def _rows(self, kind: WeightForm) -> Iterator[tuple[Tensor, Tensor]]:
        uses = [use.rows(self.num_examples) for use in self.uses[kind]]
        if uses:
            a, g = (torch.cat(values, 1) for values in zip(*uses, strict=True))
            yield from zip(torch.split(a, self._few), torch.split(g, self._few), strict=True)

    @property
    def _few(self) -> int:
        numbers_at_once = NUMBERS_AT_ONCE.get(self.weight.device.type, NUMBERS_AT_ONCE["cpu"])
        return max(1, numbers_at_once // self.weight.numel())

    def _whole(self) -> Iterator[tuple[slice, Tensor]]:
        yield from super()._whole()
        # As in `LinearGradients`: the pair (j, k) adds +h S ⊙ r to row j and -h S ⊙ r to row k.
        pair_first, pair_second = class_pairs(len(self.weight), self.weight.device)
        first = 0
        for radius, gradient in self._rows(WeightForm.DIFFERENCES):
            pairs = sign(self.weight[pair_first] - self.weight[pair_second]) * torch.bmm(gradient.mT, radius)
            formed = pairs.new_zeros(len(radius), *self.weight.shape)
            yield (
                slice(first, first + len(radius)),
                formed.index_add(1, pair_first, pairs).index_add(1, pair_second, -pairs),
            )
            first += len(radius)


class _ConvAdapterGradients(_AdapterGradients, ConvGradients):
    """Of an adapted convolution: a linear layer on patches, whose values lie there with the channels last."""

    takes_bfloat16 = False

    def __init__(self, layer: nn.Module, uses: list[LayerUse], num_examples: int) -> None:
        LayerGradients.__init__(self, layer, uses, num_examples)
        assert isinstance(layer, AdaptedConv2d)
        self.window, self.weight = self.window_of(layer), layer.weight.detach()
        down = layer.down.detach().view(-1, *self.weight.shape[1:])
        self._form(layer.up.detach(), self._by_row(down), self._bias_gradients())

    def _rows(self, kind: WeightForm) -> Iterator[tuple[Tensor, Tensor]]:
        if self.uses[kind]:
            yield from ConvGradients._rows(self, kind)

    def _by_row(self, kernels: Tensor) -> Tensor:
        return kernels.permute(0, 2, 3, 1).flatten(1)

    def _as_stored(self, at_down: Tensor) -> Tensor:
        _, channels, *kernel = self.weight.shape
        kernels = at_down.reshape(*at_down.shape[:2], *kernel, channels)
        return kernels.permute(0, 1, 4, 2, 3).flatten(2)


register_layer(AdaptedLinear, _LinearAdapterGradients)
register_layer(AdaptedConv2d, _ConvAdapterGradients)
