"""The paper's three networks (Appendix P) and a small one for audits, each as an encoder and a head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import NoReturn

import torch
from torch import Tensor, nn

from stobatch.config import ModelConfig
from stobatch.errors import ModelError
from stobatch.models.affine import AffineEncoder, ConvEncoder
from stobatch.models.classifier import Classifier
from stobatch.models.layered import build_layered, require_size
from stobatch.models.network import NORMALISATIONS, Head, Network, require_fit
from stobatch.models.residual import Norm, ResidualBlock, Shape
from stobatch.registry import ARCHITECTURES


def mnist_body(hidden: Shape, norm: Norm, last_hidden_size: int) -> nn.Module:
    maps, height, width = hidden
    pooled = (height // 2, width // 2)
    size = [(side + 4 - 5) // 2 + 1 for side in pooled]
    return nn.Sequential(
        nn.ReLU(inplace=True),
        nn.AvgPool2d(2),
        nn.Conv2d(maps, 64, 5, stride=2, padding=2),
        norm((64, *size)),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * prod(size), last_hidden_size),
        norm((last_hidden_size,)),
    )


def small_body(hidden: Shape, norm: Norm, last_hidden_size: int) -> nn.Module:
    """Return one dense layer: small enough to train thousands side by side, as audits do."""
    return nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(prod(hidden), last_hidden_size), norm((last_hidden_size,)))


class _DenseConv(nn.Module):
    """The CIFAR-10 network's second layer: its output stands beside its input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 5, padding=2)

    def forward(self, values: Tensor) -> Tensor:
        return torch.cat([torch.relu(self.conv(values)), values], dim=1)


def cifar10_body(hidden: Shape, norm: Norm, last_hidden_size: int) -> nn.Module:
    maps, height, width = hidden
    return nn.Sequential(
        nn.ReLU(inplace=True),
        _DenseConv(maps),
        norm((2 * maps, height, width)),
        nn.Conv2d(2 * maps, 256, 5, padding=2),
        norm((256, height, width)),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(256 * (height // 2) * (width // 2), last_hidden_size),
        norm((last_hidden_size,)),
    )


def resnet18_body(hidden: Shape, norm: Norm, last_hidden_size: int) -> nn.Module:
    layers: list[nn.Module] = []
    shape = hidden
    for channels, first_stride in ((64, 1), (128, 1), (256, 2), (512, 2)):
        for stride in (first_stride, 1):
            block = ResidualBlock(shape, channels, stride, norm)
            layers.append(block)
            shape = block.shape
    return nn.Sequential(
        *layers,
        norm(shape),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(shape[0], last_hidden_size),
        norm((last_hidden_size,)),
    )


@dataclass(frozen=True)
class Architecture:
    """How a network in two parts is made: its first affine layer from the shape of an input, and what follows it from
    the shape of the hidden values, a kind of normalisation and the size of the last hidden layer."""

    encoder: Callable[[Shape], AffineEncoder]
    body: Callable[[Shape, Norm, int], nn.Module]


def _handed_over(*_: object) -> NoReturn:
    raise ModelError(
        "architecture 'custom' has to be handed over in Python.",
        why="A run holds the weights of a network of your own, and not its code.",
        remedy="Give it as network=...: any nn.Module, or what stobatch.from_layers makes of one.",
    )


def _patches(num_maps: int, kernel: int, *, padding: int) -> Callable[[Shape], ConvEncoder]:
    return partial(ConvEncoder, num_maps=num_maps, kernel=kernel, stride=2, padding=padding)


MNIST_CNN = Architecture(_patches(32, 5, padding=2), mnist_body)
"""d = 25 and β = 14² on 28x28 images, so Δ_R = (14² + 2) x 25."""
CIFAR10_CNN = Architecture(_patches(128, 4, padding=1), cifar10_body)
"""d = 3 x 16 and β = 14² on 28x28 crops."""
RESNET18 = Architecture(_patches(64, 7, padding=3), resnet18_body)
"""d = 3 x 49 and β = 32² on 64x64 images."""
SMALL_CNN = Architecture(_patches(4, 3, padding=1), small_body)
"""d = 9 and β = 16 on 8x8 images."""
HANDED_OVER = Architecture(_handed_over, _handed_over)


def _shape(values: tuple[int, ...]) -> Shape:
    if len(values) != 3:
        raise ModelError(
            f"inputs of shape {values} are not images.", remedy="Hand over your own network: model.architecture=custom."
        )
    return values[0], values[1], values[2]


def build_encoder(config: ModelConfig, input_shape: tuple[int, ...]) -> AffineEncoder:
    """Only the encoder: all that a plan needs to know of the network."""
    architecture: Architecture = ARCHITECTURES.require(config.architecture)
    return architecture.encoder(_shape(input_shape))


def build(
    config: ModelConfig, input_shape: tuple[int, ...], num_classes: int, generator: torch.Generator
) -> Classifier:
    """Return a network with freshly drawn parameters: one of the paper's, or what a list of layers says."""
    if config.layers is not None:
        return build_layered(config.layers, input_shape, num_classes, generator, first_weights=config.first_weights)
    architecture: Architecture = ARCHITECTURES.require(config.architecture)
    encoder = architecture.encoder(_shape(input_shape))
    norm, hidden = NORMALISATIONS[config.normalisation], _shape(encoder.hidden_shape)
    require_size(prod(hidden) * config.last_hidden_size)
    body = architecture.body(hidden, norm, config.last_hidden_size)
    network = Network(encoder, Head(norm(hidden), body, nn.Linear(config.last_hidden_size, num_classes, bias=False)))
    initialise(network, generator)
    require_fit(network)
    return network


def initialise(network: Network, generator: torch.Generator) -> None:
    """Xavier-uniform weights and zero biases, from the given generator only."""
    for name, parameter in network.named_parameters():
        if parameter.ndim >= 2:
            nn.init.xavier_uniform_(parameter, generator=generator)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
