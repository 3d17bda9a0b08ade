"""The strided convolution over phases is the plain one, and a head may overwrite what it is given."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from stobatch.models import ConvEncoder, ReferenceNorm
from stobatch.models.network import Head, Network

ROUNDING = 1e-12


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@dataclass(frozen=True)
class Layer:
    shape: tuple[int, int, int]
    maps: int
    kernel: int
    stride: int
    padding: int

    def encoder(self) -> ConvEncoder:
        made = ConvEncoder(self.shape, self.maps, self.kernel, stride=self.stride, padding=self.padding).double()
        made.weight.data = torch.randn(made.weight.shape, generator=seeded(1), dtype=torch.float64)
        return made

    @property
    def divides(self) -> bool:
        """A square image that falls apart into more than one phase."""
        _, height, width = self.shape
        return self.stride > 1 and height == width and height % self.stride == 0


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    stride, kernel, padding = (draw(st.integers(*ends)) for ends in ((1, 4), (1, 7), (0, 5)))
    whole = st.integers(1, 4).map(lambda times: times * stride)
    height = draw(whole | st.integers(1, 15))
    width = draw(st.just(height) | st.integers(1, 15))
    assume(min(height, width) + 2 * padding >= kernel)
    return Layer((draw(st.integers(1, 3)), height, width), draw(st.integers(1, 3)), kernel, stride, padding)


def same_as_the_plain_convolution(layer: Layer, encoder: ConvEncoder) -> bool:
    """Values, and the gradients of a random weighted sum with respect to inputs and weights."""
    inputs = torch.randn(2, *layer.shape, generator=seeded(2), dtype=torch.float64)
    found = []
    for plain in (False, True):
        leaf, weight = inputs.clone().requires_grad_(), encoder.weight
        out = F.conv2d(leaf, weight, stride=layer.stride, padding=layer.padding) if plain else encoder(leaf)
        push = torch.randn(out.shape, generator=seeded(3), dtype=torch.float64)
        found.append((out.detach(), *torch.autograd.grad((out * push).sum(), (leaf, weight))))
    pairs = list(zip(*found, strict=True))
    return all(a.shape == b.shape for a, b in pairs) and all(torch.allclose(a, b, 0, ROUNDING * 1e2) for a, b in pairs)


@given(layer=layers())
def test_the_phase_convolution_is_the_plain_one(layer: Layer) -> None:
    encoder = layer.encoder()
    assert (encoder.phases is not None) == layer.divides
    assert same_as_the_plain_convolution(layer, encoder)


PAPER = [Layer((1, 28, 28), 32, 5, 2, 2), Layer((3, 28, 28), 8, 4, 2, 1), Layer((3, 64, 64), 4, 7, 2, 3)]
ODD = [
    Layer((1, 4, 4), 2, 1, 2, 3),  # more padding than kernel
    Layer((2, 9, 9), 2, 2, 3, 0),  # pixels that no kernel reads
    Layer((1, 8, 8), 1, 7, 4, 0),  # the last phase is cut
    Layer((1, 2, 2), 1, 6, 2, 2),  # one output
]


@pytest.mark.parametrize("layer", [*PAPER, *ODD], ids=str)
def test_the_papers_encoders_and_odd_ones_use_phases(layer: Layer) -> None:
    encoder = layer.encoder()
    assert encoder.phases is not None
    assert same_as_the_plain_convolution(layer, encoder)


@pytest.mark.parametrize(
    "layer",
    [Layer((1, 28, 28), 2, 5, 1, 2), Layer((1, 9, 9), 2, 3, 2, 1), Layer((1, 8, 12), 2, 3, 2, 1)],
    ids=["stride 1", "a remainder", "not square"],
)
def test_images_without_phases_fall_back(layer: Layer) -> None:
    encoder = layer.encoder()
    assert encoder.phases is None
    assert same_as_the_plain_convolution(layer, encoder)


@pytest.mark.parametrize("layer", PAPER, ids=str)
@pytest.mark.parametrize("place", [0, 7, 15])
def test_a_misplaced_weight_is_caught(layer: Layer, place: int) -> None:
    """The broken twin: two neighbouring weights of the kernel have changed places."""
    encoder = layer.encoder()
    assert encoder.phases is not None
    places = list(encoder.phases.places)
    places[place], places[place - 1] = places[place - 1], places[place]
    encoder.phases = replace(encoder.phases, places=tuple(places))
    assert not same_as_the_plain_convolution(layer, encoder)


def test_wrong_padding_is_caught() -> None:
    encoder = PAPER[0].encoder()
    assert encoder.phases is not None
    before, after = encoder.phases.padding
    encoder.phases = replace(encoder.phases, padding=(before - 1, after + 1))
    assert not same_as_the_plain_convolution(PAPER[0], encoder)


def network() -> Network:
    torch.manual_seed(0)
    encoder = ConvEncoder((1, 8, 8), 3, 3, stride=2, padding=1)
    body = nn.Sequential(nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(48, 6), ReferenceNorm((6,)))
    made = Network(encoder, Head(ReferenceNorm((3, 4, 4)), body, nn.Linear(6, 4, bias=False))).double()
    made.set_noise(*(0.3 * torch.randn(shape, generator=seeded(4)) for shape in ((1, 8, 8), (3, 4, 4))))
    made.calibrate()
    return made


def test_statistics_are_those_of_the_public_images_by_hand() -> None:
    made = network()
    public = torch.rand(64, 1, 8, 8, generator=seeded(0)).double() * 2 - 1
    hidden = F.conv2d(public + made.input_noise, made.encoder.weight, stride=2, padding=1) + made.hidden_noise

    def normalised(values: np.ndarray, layer: nn.Module) -> np.ndarray:
        assert isinstance(layer, ReferenceNorm)
        mean = values.mean(0)
        spread = np.sqrt(((values - mean) ** 2).mean() + 1e-6)
        assert np.allclose(layer.mean, mean, atol=ROUNDING)
        assert float(layer.spread) == pytest.approx(spread, rel=ROUNDING)
        return (values - mean) / spread

    first = normalised(hidden.detach().numpy(), made.head.norm)
    last = made.head.body[2](torch.from_numpy(first.clip(0)).flatten(1))
    normalised(last.detach().numpy(), made.head.body[3])


def scores_and_gradients(made: Network, inputs: Tensor) -> list[Tensor]:
    leaf = inputs.clone().requires_grad_()
    scores = made(leaf)
    push = torch.randn(scores.shape, generator=seeded(5), dtype=torch.float64)
    gradients = torch.autograd.grad((scores * push).sum(), (leaf, *made.parameters()))
    return [scores.detach(), *gradients]


def test_a_head_that_overwrites_gives_the_same_scores_and_gradients() -> None:
    made, inputs = network(), torch.rand(5, 1, 8, 8, generator=seeded(6), dtype=torch.float64) * 2 - 1
    norm = made.head.norm
    assert isinstance(norm, ReferenceNorm)
    assert norm.overwrites
    assert not made.head.body[3].overwrites, "only hidden values that nobody else reads are overwritten"
    overwriting = scores_and_gradients(made, inputs)
    norm.overwrites = False
    for ours, theirs in zip(overwriting, scores_and_gradients(made, inputs), strict=True):
        assert torch.equal(ours, theirs)
    assert overwriting[1].abs().sum() > 0


@pytest.mark.parametrize("overwrites", [False, True])
def test_hidden_values_are_overwritten_only_where_allowed(overwrites: bool) -> None:
    norm = ReferenceNorm((3,))
    norm.mean, norm.spread, norm.overwrites = torch.tensor([1.0, 2.0, 3.0]), torch.tensor(2.0), overwrites
    hidden = torch.tensor([[5.0, 6.0, 7.0]])
    assert torch.equal(norm(hidden), torch.full((1, 3), 2.0))
    assert torch.equal(hidden, torch.full((1, 3), 2.0) if overwrites else torch.tensor([[5.0, 6.0, 7.0]]))
