"""Fold a network for attacks, which evaluate it and its input gradient thousands of times between parameter updates.

All that does not depend on the inputs is computed once: fixed noise is passed through the first layer, and each
reference normalisation becomes part of the weights and one addition. The input gradient of the first layer is its
transpose, and large products are made as `models.kernels` says; PyTorch's backward pass of a convolution with few
channels takes three times as long.

The scores equal those of the network up to rounding. An attack follows them; callers evaluate the network itself at the
points that an attack returns.
"""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn

from stobatch.models.affine import AffineEncoder, ConvEncoder, DenseEncoder
from stobatch.models.kernels import BlockTranspose, ColumnConvolution, DenseConvolution, with_transpose
from stobatch.models.network import Network, ReferenceNorm
from stobatch.models.validators import keeps_nothing


@torch.no_grad()
def fold(network: object, *, noisy_inputs: bool = False) -> nn.Module | None:
    """Return a module with the scores of a network at its current parameters; None where folding is not known to pay.

    With `noisy_inputs` the inputs already carry the fixed noise χ1/m.
    """
    if not isinstance(network, Network) or not keeps_nothing(network):
        return None
    if network.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return None
    head, body, encoder, shift = network.head, network.head.body, network.encoder.copy(), network.hidden_noise
    if not isinstance(body, nn.Sequential) or type(network) is not Network:
        return None
    if type(encoder) not in (ConvEncoder, DenseEncoder) or type(head.norm) not in (ReferenceNorm, nn.Identity):
        return None
    if not noisy_inputs:
        shift = shift + encoder(network.input_noise.unsqueeze(0))[0]
    layers: list[nn.Module] = [_First(encoder, shift)]
    for layer in (head.norm, *body, nn.Hardtanh(), head.output):
        last = layers[-1]
        affine = type(last) in (_First, _Conv, nn.Linear)
        if type(layer) is ReferenceNorm and affine:
            assert isinstance(last, _First | _Conv | nn.Linear)
            _absorb(layer, last)
        elif type(layer) is nn.Conv2d:
            layers.append(_Conv(layer))
        elif type(layer) is nn.Linear and type(last) is nn.Flatten and (last.start_dim, last.end_dim) == (1, -1):
            maps = nn.Sequential(*layers[:-1])(network.anchors[:1])[0]
            layers[-1:] = [_FlattenLast(), _reordered(layer, maps)]
        elif type(layer) is nn.ReLU:
            # The result of an affine layer has no other reader, and may be overwritten.
            layers.append(nn.ReLU(inplace=affine))
        else:
            layers.append(deepcopy(layer))
    return nn.Sequential(*map(_with_its_kernels, layers)).requires_grad_(False)


def _with_its_kernels(layer: nn.Module) -> nn.Module:
    """Return a layer whose weights are final, ready for its passes."""
    if isinstance(layer, _First):
        layer.set_kernels()
    return DenseConvolution(layer) if isinstance(layer, nn.Linear) and DenseConvolution.pays_for(layer) else layer


class _First(nn.Module):
    """h = θ1ᵀx + shift, with θ1 as its backward pass."""

    def __init__(self, encoder: AffineEncoder, shift: Tensor) -> None:
        super().__init__()
        self.encoder, self.weight, self.shift = encoder, encoder.weight, _channels_last(shift)
        self.product, self.transpose = encoder.forward, encoder.decode

    def set_kernels(self) -> None:
        """Use faster kernels for the present weights, where there are any."""
        self.product = ColumnConvolution.of(self.encoder) or self.encoder.forward
        self.transpose = BlockTranspose.of(self.encoder) or self.encoder.decode

    def forward(self, inputs: Tensor) -> Tensor:
        return with_transpose(inputs, self).add_(self.shift)


class _Conv(nn.Module):
    """A convolution whose bias may differ from position to position."""

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__()
        self.layer = deepcopy(layer)
        self.layer.bias, self.weight = None, self.layer.weight
        self.weight.data = self.weight.data.contiguous(memory_format=torch.channels_last)
        self.shift = torch.zeros(1) if layer.bias is None else layer.bias.reshape(-1, 1, 1)

    def forward(self, values: Tensor) -> Tensor:
        found: Tensor = self.layer(values)
        return found.add_(self.shift)


class _FlattenLast(nn.Module):
    """Maps as one vector with their channels innermost, as they are in memory."""

    def forward(self, maps: Tensor) -> Tensor:
        return maps.permute(0, 2, 3, 1).flatten(1) if maps.ndim == 4 else maps.flatten(1)


def _reordered(layer: nn.Linear, values: Tensor) -> nn.Linear:
    """Return a linear layer for such maps with their channels innermost."""
    layer = deepcopy(layer)
    if values.ndim == 3:
        by_maps = layer.weight.reshape(-1, *values.shape)
        layer.weight = nn.Parameter(by_maps.permute(0, 2, 3, 1).flatten(1))
    return layer


def _absorb(norm: ReferenceNorm, layer: _First | _Conv | nn.Linear) -> None:
    """Normalise what a layer returns by its weights and its shift, in place."""
    layer.weight.data.div_(norm.spread)
    if isinstance(layer, nn.Linear):
        bias = 0.0 if layer.bias is None else layer.bias
        layer.bias = nn.Parameter((bias - norm.mean) / norm.spread)
    else:
        layer.shift = _channels_last((layer.shift - norm.mean) / norm.spread)


def _channels_last(shift: Tensor) -> Tensor:
    """Return one example's maps in the memory format of a batch of them."""
    return shift.unsqueeze(0).contiguous(memory_format=torch.channels_last)[0] if shift.ndim == 3 else shift
