"""Learning without labels: two changed views of an image shall be more alike than views of different images (SimCLR).

It fits any network whose scores are a linear function of its last hidden values: those values, the features, are what
is trained, and the last layer is left as it was drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from stobatch.errors import ModelError
from stobatch.models import Classifier

TEMPERATURE = 0.2
_PROJECTED = 64
_SMALLEST_CROP = 0.5
"""Of a view's side over the image's."""
_BRIGHTNESS, _CONTRAST = 0.3, 0.4


class Contrast(nn.Module):
    """A network's features behind a small projection that is thrown away after training."""

    def __init__(self, network: Classifier, generator: torch.Generator) -> None:
        super().__init__()
        self.network = network
        width = last_layer(network).in_features
        self.projection = nn.Sequential(nn.Linear(width, _PROJECTED), nn.ReLU(), nn.Linear(_PROJECTED, _PROJECTED))
        for layer in self.projection:
            if isinstance(layer, nn.Linear):
                nn.init.kaiming_normal_(layer.weight, generator=generator)
                nn.init.zeros_(layer.bias)
        self.projection.to(network.device, network.dtype)

    def loss(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the mean cross-entropy of finding each view's partner among all other views."""
        with features_of(self.network) as seen:
            self.network(torch.cat([first, second]))
        return find_partners(self.projection(seen[0].flatten(1)))


def find_partners(projected: Tensor) -> Tensor:
    """Return the loss of 2n projections of which i and n + i belong together.

    Where partners coincide and all others are orthogonal to them, what is left is the softmax's own part:

    >>> apart = torch.eye(2).repeat(2, 1)
    >>> float(find_partners(apart)) - float(torch.log(1 + 2 * torch.exp(torch.tensor(-1 / TEMPERATURE))))
    0.0
    """
    unit = F.normalize(projected, dim=1)
    alike = unit @ unit.T / TEMPERATURE
    alike = alike.masked_fill(torch.eye(len(alike), dtype=torch.bool, device=alike.device), -torch.inf)
    return F.cross_entropy(alike, torch.arange(len(alike), device=alike.device).roll(len(alike) // 2))


def last_layer(network: Classifier) -> nn.Linear:
    """Return the linear layer that makes the scores."""
    linear = [module for module in network.modules() if isinstance(module, nn.Linear)]
    if not linear or linear[-1].out_features != network.num_classes:
        raise ModelError(
            "the network does not end with a linear layer of one output for each class.",
            why="A contrastive loss trains what stands before it.",
            remedy="End it with such a layer, or train it on labelled images.",
        )
    return linear[-1]


@contextmanager
def features_of(network: Classifier) -> Iterator[list[Tensor]]:
    """Collect what the last layer is given in each pass of the block."""
    seen: list[Tensor] = []
    hook = last_layer(network).register_forward_pre_hook(lambda layer, given: seen.append(given[0]))
    try:
        yield seen
    finally:
        hook.remove()


def view(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return a view of each image: a part of it at full size, with other brightness, contrast and colours.

    Colour images may be mirrored; grey ones are not, since digits and letters change their meaning.
    """
    count, channels = images.shape[:2]

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand((count, *shape), generator=generator)

    side = uniform(_SMALLEST_CROP, 1)
    mirrored = torch.where(uniform(0, 1) < 0.5, -1.0, 1.0) if channels > 1 else torch.ones(count)
    x, y = ((1 - side) * uniform(-1, 1) for _ in range(2))
    zero = torch.zeros(count)
    part = torch.stack([side * mirrored, zero, x, zero, side, y], 1).view(-1, 2, 3)
    grid = F.affine_grid(part, list(images.shape), align_corners=False)
    cut = F.grid_sample(images, grid.to(images), padding_mode="reflection", align_corners=False)
    gain = uniform(1 - _CONTRAST, 1 + _CONTRAST, 1, 1, 1) * uniform(
        1 - _CONTRAST / 2, 1 + _CONTRAST / 2, channels, 1, 1
    )
    lift = uniform(-_BRIGHTNESS, _BRIGHTNESS, 1, 1, 1)
    middle = cut.mean((2, 3), keepdim=True)
    return ((cut - middle) * gain + middle + lift).clamp(-1, 1)
