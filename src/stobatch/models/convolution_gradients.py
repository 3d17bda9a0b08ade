"""Gradients of convolutions with large kernels on a GPU, in bfloat16.

By weights it is Σ over positions g xᵀ, for each place of the kernel with the inputs moved to it: products of channels
by channels, over far more positions than there are channels. One kernel sums them in float32 and leaves them so; cuDNN,
which rounds to bfloat16, takes up to four times as long where pictures are small. By inputs it is cuDNN's, from
gradients with channels innermost in memory: PyTorch would copy them for it, at a fifth of the card's bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.nn.grad import conv2d_weight
from torch.overrides import TorchFunctionMode

_CHANNELS = 128
"""What the kernel's tiles are cut to: both numbers of channels are multiples of it."""
_SMALLEST_SIDE = 5
"""With kernels of 3 x 3 cuDNN's gradients are near the card's rate."""


@torch.library.custom_op(
    "stobatch::weight_gradient",
    mutates_args=(),
    schema="(Tensor inputs, Tensor gradients, int side, int padding) -> Tensor",
)
def weight_gradient(inputs: Tensor, gradients: Tensor, side: int, padding: int) -> Tensor:
    """Return the gradient in float32, of inputs and of gradients by outputs with stride 1."""
    if inputs.is_cuda:
        from stobatch.models.triton_kernels import sum_of_products

        return sum_of_products(inputs, gradients, side, padding)
    shape = [gradients.shape[1], inputs.shape[1], side, side]
    found: Tensor = conv2d_weight(inputs.float(), shape, gradients.float(), padding=padding)  # type: ignore[no-untyped-call]
    return found


@weight_gradient.register_fake
def _(inputs: Tensor, gradients: Tensor, side: int, padding: int) -> Tensor:
    return inputs.new_empty(gradients.shape[1], inputs.shape[1], side, side, dtype=torch.float32)


class _Convolution(torch.autograd.Function):
    """A convolution of stride 1 in bfloat16; its weights, and their gradient, are float32."""

    @staticmethod
    def forward(context: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
        inputs, kernels = inputs.to(torch.bfloat16), weight.to(torch.bfloat16)
        context.save_for_backward(inputs, kernels)
        context.padding = padding
        return F.conv2d(inputs, kernels, None if bias is None else bias.to(torch.bfloat16), padding=padding)

    @staticmethod
    def backward(context: Any, gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (inputs, kernels), padding = context.saved_tensors, context.padding
        # Compiled, this is how the pass before it writes them, and no copy.
        gradients = gradients.contiguous(memory_format=torch.channels_last)
        by_inputs, by_weight, by_bias = context.needs_input_grad[:3]
        found: list[Tensor | None] = [None, None, None]
        if by_inputs:
            window = ([1, 1], [padding, padding], [1, 1], False, [0, 0], 1)
            which = [True, False, False]
            found[0] = torch.ops.aten.convolution_backward(gradients, inputs, kernels, None, *window, which)[0]
        if by_weight:
            found[1] = weight_gradient(inputs, gradients, kernels.shape[-1], padding)
        if by_bias:
            found[2] = gradients.sum((0, 2, 3), dtype=torch.float32)
        return found[0], found[1], found[2], None


def pays(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: tuple[int, ...] = (1, 1),
    padding: tuple[int, ...] | str = (0, 0),
    dilation: tuple[int, ...] = (1, 1),
    groups: int = 1,
) -> bool:
    """Return whether a convolution's gradients are faster here."""
    kind, (maps, channels, *sides) = inputs.device.type, weight.shape
    return (
        (kind == "cuda" and torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.bfloat16)
        and weight.dtype is torch.float32
        and (stride == dilation == (1, 1) and groups == 1 and not isinstance(padding, str))
        and (len(set(sides)) == len(set(padding)) == 1 and sides[0] >= _SMALLEST_SIDE)
        and maps % _CHANNELS == channels % _CHANNELS == 0
    )


class _Gradients(TorchFunctionMode):
    """Gives convolutions in the block these gradients where it pays."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, arguments: Any = (), settings: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.conv2d and not settings and pays(*arguments):
            inputs, weight, bias, _, padding = arguments[:5]
            return _Convolution.apply(inputs, weight, bias, padding[0])  # type: ignore[no-untyped-call]
        return function(*arguments, **(settings or {}))


def with_fast_gradients(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the same function, whose convolutions have these gradients where it pays."""

    def call(values: Tensor) -> Tensor:
        with _Gradients():
            return function(values)

    return call
