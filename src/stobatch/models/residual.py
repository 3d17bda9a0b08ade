"""Residual blocks, and convolutions whose kernels are standardised on their way: what deep private networks are made of.

A kernel of mean 0 does not see what is common to a patch, which behind ReLU is most of it, and of length 1 it cannot
grow with the noise of training. So an example's gradient is shorter where it says nothing, and less of it is clipped.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from stobatch.dp.layer_gradients import ConvGradients, LayerUse, WeightForm, know, note

Shape = tuple[int, int, int]
Norm = Callable[[tuple[int, ...]], nn.Module]
_SHORTEST = 1e-6
"""Of a kernel without its mean: a constant kernel becomes zero instead of a direction that rounding chose."""


class StandardisedConv2d(nn.Conv2d):
    """A convolution with each kernel less its mean, over its length (weight standardisation, Qiao et al., 2019)."""

    def standardised(self) -> Tensor:
        """Return the kernels that the inputs meet."""
        return self._directions() / self._lengths()

    def _directions(self) -> Tensor:
        return self.weight - self.weight.mean((1, 2, 3), keepdim=True)

    def _lengths(self) -> Tensor:
        return self._directions().flatten(1).norm(dim=1).clamp(min=_SHORTEST).view(-1, 1, 1, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self._conv_forward(inputs, self.standardised(), self.bias)
        note(self, inputs, outputs, WeightForm.WEIGHT)
        return outputs


class _StandardisedGradients(ConvGradients):
    """Of the kernels V before they are standardised: with n the kernel that is used, l its length before and G the
    gradient at n, (G - mean(G) - n (n·G)) / l. The mean and n are public, so each example's is formed from its own G.
    """

    always_formed = True

    def __init__(self, layer: nn.Module, met: list[LayerUse], num_examples: int) -> None:
        assert isinstance(layer, StandardisedConv2d)
        with torch.no_grad():
            # Patch x maps, as gradients are formed.
            self.used = layer.standardised().permute(2, 3, 1, 0).flatten(0, 2)
            self.lengths = layer._lengths().flatten()
        super().__init__(layer, met, num_examples)

    def _finished(self, formed: Tensor) -> Tensor:
        whole = formed.to(self.used.dtype)
        along = (whole * self.used).sum(1, keepdim=True)
        return whole.sub(whole.mean(1, keepdim=True)).sub_(self.used * along).div_(self.lengths).to(formed.dtype)


know(StandardisedConv2d, _StandardisedGradients)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions, each after normalisation and ReLU, beside a shortcut (ResNet-v2)."""

    def __init__(
        self, shape: Shape, channels: int, stride: int, norm: Norm, conv: type[nn.Conv2d] = nn.Conv2d
    ) -> None:
        super().__init__()
        before, height, width = shape
        self.shape: Shape = (channels, -(-height // stride), -(-width // stride))
        self.first_norm, self.second_norm = norm(shape), norm(self.shape)
        self.first = conv(before, channels, 3, stride=stride, padding=1, bias=False)
        self.second = conv(channels, channels, 3, padding=1, bias=False)
        same = before == channels and stride == 1
        self.shortcut = nn.Identity() if same else conv(before, channels, 1, stride=stride, bias=False)

    def forward(self, values: Tensor) -> Tensor:
        active = torch.relu(self.first_norm(values))
        out: Tensor = self.second(torch.relu(self.second_norm(self.first(active)))) + self.shortcut(active)
        return out
