"""Residual blocks, and convolutions whose kernels are centred on their way: what deep private networks are made of.

A kernel of mean 0 does not see what is common to a patch, which behind ReLU is most of it. So an example's gradient is
shorter where it says nothing, and less of the rest is clipped.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from stobatch.dp.layer_gradients import ConvGradients, GroupNormGradients, WeightForm, record_use, register_layer

Shape = tuple[int, int, int]
Norm = Callable[[tuple[int, ...]], nn.Module]


class CentredConv2d(nn.Conv2d):
    """A convolution with each kernel less its mean: the same sums over each patch less its mean.

    Half of weight standardisation (Qiao et al., 2019); the other half, a length of 1, is what a normalisation behind
    the convolution gives.
    """

    def centred(self) -> Tensor:
        """Return the kernels that the inputs meet."""
        return self.weight - self.weight.mean((1, 2, 3), keepdim=True)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self._conv_forward(inputs, self.centred(), self.bias)
        record_use(self, inputs, outputs, WeightForm.WEIGHT)
        return outputs


class _CentredGradients(ConvGradients):
    """Of the kernels before they are centred: Σ g (a - mean(a))ᵀ, over the patches a and the gradients g there."""

    always_formed = True

    def _from_rows(self, patches: Tensor, gradients: Tensor) -> Tensor:
        # Σ g aᵀ less one number for each map, Σ g mean(a): patches themselves are too many to be written again.
        common = torch.bmm(patches.mean(2, keepdim=True).mT, gradients)
        return torch.baddbmm(common.expand(-1, patches.shape[2], -1), patches.mT, gradients, beta=-1)


register_layer(CentredConv2d, _CentredGradients)


class RoughGroupNorm(nn.GroupNorm):
    """A group normalisation that leaves bfloat16 in bfloat16; its statistics are float32 inside. Else the usual."""

    def forward(self, inputs: Tensor) -> Tensor:
        kind = inputs.device.type
        if torch.is_autocast_enabled(kind):
            low = torch.get_autocast_dtype(kind)
            with torch.autocast(kind, enabled=False):
                given = (inputs.to(low), self.num_groups, self.weight.to(low), self.bias.to(low))
                outputs = F.group_norm(*given, self.eps)
        else:
            outputs = super().forward(inputs)
        record_use(self, inputs, outputs, WeightForm.WEIGHT)
        return outputs


register_layer(RoughGroupNorm, GroupNormGradients)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions, each after normalisation and ReLU, beside a shortcut (ResNet-v2)."""

    def __init__(self, shape: Shape, channels: int, stride: int, norm: Norm, conv: type[nn.Conv2d] = nn.Conv2d) -> None:
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
