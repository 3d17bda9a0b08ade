"""The network f(x) = g(a(x, θ1), θ2), with the noise where Algorithm 1 puts it, and the normalisations it may have.

Batch normalisation mixes examples, which voids every bound; by default statistics of public images stand in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from stobatch.errors import ModelError
from stobatch.models.affine import AffineEncoder, ConvEncoder, DenseEncoder
from stobatch.models.classifier import Classifier

NUM_ANCHORS = 64
_VARIANCE_FLOOR = 1e-6


class ReferenceNorm(nn.Module):
    """Subtract, unit by unit, the mean over public reference images and divide by their overall spread.

    **Guarantee.** Between two calibrations this is a fixed affine map: it mixes no examples and reads no data. The
    statistics are functions of the parameters, the private noise and public images. They reveal that noise, so they
    are no part of `state_dict()` and are taken anew whenever a network is loaded.
    """

    mean: Tensor
    spread: Tensor

    def __init__(self, unit_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.calibrating, self.overwrites = False, False
        self.register_buffer("mean", torch.zeros(unit_shape), persistent=False)
        self.register_buffer("spread", torch.ones(()), persistent=False)

    def forward(self, values: Tensor) -> Tensor:
        if self.calibrating:
            self.mean = torch.empty_like(values[:1]).copy_(values.mean(0, keepdim=True))[0]
            self.spread = (values - self.mean).square().mean().add(_VARIANCE_FLOOR).sqrt()
        kind = values.device.type
        if torch.is_autocast_enabled(kind):
            # What is normalised has a size of 1, so the layers after it may have it in the lower precision.
            return ((values - self.mean) / self.spread).to(torch.get_autocast_dtype(kind))
        return (values.sub_(self.mean) if self.overwrites else values - self.mean).div_(self.spread)

    def of_shift(self, shift: Tensor) -> Tensor:
        """Return what a shift of the values becomes: the map is affine between calibrations."""
        return shift / self.spread


def anchors(input_shape: tuple[int, ...]) -> Tensor:
    """Public reference images: uniform noise from a fixed generator, the same for everyone."""
    return torch.rand(NUM_ANCHORS, *input_shape, generator=torch.Generator().manual_seed(0)) * 2 - 1


@contextmanager
def calibrating(network: nn.Module) -> Iterator[bool]:
    """Let every `ReferenceNorm` take its statistics from what passes through it in the block."""
    layers = [module for module in network.modules() if isinstance(module, ReferenceNorm)]
    for layer in layers:
        layer.calibrating = True
    try:
        with torch.no_grad():
            yield bool(layers)
    finally:
        for layer in layers:
            layer.calibrating = False


def group_norm(channels: int, *, on_maps: bool) -> nn.GroupNorm:
    """Return a normalisation over groups of maps; vectors get one group, since a group of one value becomes zero."""
    return nn.GroupNorm(next(groups for groups in (8, 4, 2, 1) if channels % groups == 0) if on_maps else 1, channels)


NORMALISATIONS: dict[str, Callable[[tuple[int, ...]], nn.Module]] = {
    "reference": ReferenceNorm,
    "group": lambda shape: group_norm(shape[0], on_maps=len(shape) == 3),
    "none": lambda shape: nn.Identity(),
    "batch": lambda shape: nn.BatchNorm2d(shape[0]) if len(shape) == 3 else nn.BatchNorm1d(shape[0]),
}
"""Makes a normalisation layer for units of the given shape."""


class Head(nn.Module):
    """g: from the noisy hidden layer to class scores, through a last hidden layer bounded in [-1, 1].

    The output layer has no bias, so that the Taylor objective's coefficients are exactly h_π and h_π y (Lemma 4).
    A head may overwrite the hidden values it is given.
    """

    def __init__(self, norm: nn.Module, body: nn.Module, output: nn.Linear) -> None:
        super().__init__()
        self.norm, self.body, self.output = norm, body, output
        if isinstance(norm, ReferenceNorm):
            norm.overwrites = True
        self.grouped = any(isinstance(module, nn.GroupNorm) for module in self.modules())

    def scores_of_normalised(self, hidden: Tensor) -> Tensor:
        """Return what follows the first normalisation; verified inference normalises once for many draws."""
        last_hidden: Tensor = self.body(hidden)
        scores: Tensor = self.output(last_hidden.clamp(-1, 1))
        return scores

    def forward(self, hidden: Tensor) -> Tensor:
        if self.grouped:
            # The backward pass of PyTorch's group normalisation crashes the process on channels-last values that need
            # no gradient themselves, which is what training hands over.
            hidden = hidden.contiguous()
        return self.scores_of_normalised(self.norm(hidden))


class Network(Classifier):
    """A classifier from inputs in [-1, 1] to logits, split after its first affine layer.

    The fixed noise χ1/m and 2χ2/m is part of the deployed function (Appendix N), but not of `state_dict()`: it is
    private and is stored apart.
    """

    input_noise: Tensor
    hidden_noise: Tensor
    anchors: Tensor

    def __init__(self, encoder: AffineEncoder, head: Head) -> None:
        super().__init__()
        self.encoder, self.head, self.input_shape = encoder, head, encoder.input_shape
        self.register_buffer("input_noise", torch.zeros(encoder.input_shape), persistent=False)
        self.register_buffer("hidden_noise", torch.zeros(encoder.hidden_shape), persistent=False)
        self.register_buffer("anchors", anchors(encoder.input_shape), persistent=False)

    def set_noise(self, input_noise: Tensor, hidden_noise: Tensor) -> None:
        """Fix χ1/m and 2χ2/m, as applied."""
        self.input_noise.copy_(input_noise)
        self.hidden_noise.copy_(hidden_noise)

    def noisy_hidden(self, noisy_inputs: Tensor) -> Tensor:
        """h̄ = θ1ᵀx̄ + 2χ2/m, never in mixed precision: beside noise of 10, bfloat16 rounds to multiples of 0.06."""
        with torch.autocast(noisy_inputs.device.type, enabled=False):
            hidden: Tensor = self.encoder(noisy_inputs)
            return hidden.add_(self.hidden_noise)

    def scores_of_noisy(self, noisy_inputs: Tensor) -> Tensor:
        """Class scores of inputs that already carry χ1/m: all that training ever sees of the data."""
        scores: Tensor = self.head(self.noisy_hidden(noisy_inputs))
        return scores

    def forward(self, inputs: Tensor) -> Tensor:
        return self.scores_of_noisy(inputs + self.input_noise)

    def calibrate(self) -> None:
        """Refresh the reference statistics for the present parameters; does nothing without reference layers."""
        with calibrating(self) as needed:
            if needed:
                self(self.anchors)

    @property
    def num_classes(self) -> int:
        return self.head.output.out_features

    @property
    def last_hidden_size(self) -> int:
        return self.head.output.in_features


def from_layers(
    first: nn.Conv2d | nn.Linear, body: nn.Module, last: nn.Linear, input_shape: tuple[int, ...]
) -> Network:
    """Adapt your own module: its first affine layer, everything between, and its output layer.

    The last hidden values are clamped to [-1, 1] for you; biases of the first and the output layer are dropped.
    """
    encoder: AffineEncoder
    if not isinstance(first, nn.Conv2d | nn.Linear) or not isinstance(last, nn.Linear):
        raise ModelError(
            f"the first layer is {type(first).__name__} and the last {type(last).__name__}.",
            why="The mechanism needs an affine layer at either end.",
            remedy="Start with a Conv2d or Linear layer and end with a Linear one.",
        )
    if isinstance(first, nn.Conv2d):
        kernel, stride, padding = first.kernel_size, first.stride, first.padding
        plain = len(set(kernel)) == len(set(stride)) == len(set(padding)) == 1 and not isinstance(padding, str)
        plain = plain and first.groups == 1 and set(first.dilation) == {1} and first.padding_mode == "zeros"
        if not plain or len(input_shape) != 3:
            raise ModelError(
                "the first convolution must be square, undilated and ungrouped, padded with a number of zeros.",
                remedy="Start your network with such a Conv2d or with a Linear layer.",
            )
        channels, height, width = input_shape
        encoder = ConvEncoder(
            (channels, height, width), first.out_channels, kernel[0], stride=stride[0], padding=int(padding[0])
        )
    else:
        encoder = DenseEncoder(input_shape, first.out_features)
    if first.weight.shape != encoder.weight.shape:
        raise ModelError(
            f"the first layer has weights {tuple(first.weight.shape)}, inputs of {input_shape} need "
            f"{tuple(encoder.weight.shape)}.",
            remedy="Give the shape of one input, as in input_shape=(1, 28, 28).",
        )
    encoder.weight.data.copy_(first.weight.data)
    output = nn.Linear(last.in_features, last.out_features, bias=False)
    output.weight.data.copy_(last.weight.data)
    network = Network(encoder, Head(nn.Identity(), body, output))
    require_fit(network)
    return network


@torch.no_grad()
def require_fit(network: Network) -> None:
    """Try the network on public images, so that layers that do not fit are found before anything is read."""
    try:
        scores = network(network.anchors[:2])
    except RuntimeError as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ModelError(
            f"the layers do not fit inputs of {network.encoder.input_shape}: {reason}.",
            remedy="Change the layers, or give inputs of the size they are made for.",
        ) from None
    if scores.shape != (2, network.num_classes):
        raise ModelError(
            f"two inputs give scores of shape {tuple(scores.shape)}, not (2, {network.num_classes}).",
            remedy="Flatten the hidden values before the last layer.",
        )
