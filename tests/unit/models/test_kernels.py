"""Rewritten linear layers against the layers themselves, which are their oracles."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from stobatch.models import kernels
from stobatch.models.affine import ConvEncoder, DenseEncoder
from stobatch.models.kernels import BlockTranspose, ColumnConvolution, DenseConvolution

FORMS = [
    (side, kernel, stride, padding)
    for side in (8, 12, 28, 30)
    for kernel in (1, 2, 3, 4, 5, 7)
    for stride in (1, 2, 3, 4)
    for padding in (0, 1, 2, 3)
    if kernel <= side + 2 * padding
]


@pytest.fixture(autouse=True)
def wide_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only speed depends on the processor: the rewritten layers are right on all of them."""
    monkeypatch.setattr(kernels, "has_wide_vectors", lambda: True)


def encoder(side: int, kernel: int, stride: int, padding: int) -> ConvEncoder:
    made = ConvEncoder((1, side, side), 6, kernel, stride=stride, padding=padding)
    nn.init.normal_(made.weight, generator=torch.Generator().manual_seed(kernel)).requires_grad_(False)
    return made


def test_neighbouring_columns_as_channels_give_the_same_maps() -> None:
    rewritten = 0
    for form in FORMS:
        layer, inputs = encoder(*form), torch.randn(3, 1, form[0], form[0])
        if (faster := ColumnConvolution.of(layer)) is not None:
            assert torch.allclose(faster(inputs), layer(inputs), rtol=1e-4, atol=1e-4), form
            rewritten += 1
    assert rewritten > 30


def test_blocks_of_pixels_give_the_same_transpose() -> None:
    rewritten = 0
    for form in FORMS:
        layer = encoder(*form)
        hidden = torch.randn(3, *layer.hidden_shape)
        if (faster := BlockTranspose.of(layer)) is not None:
            assert torch.allclose(faster(hidden), layer.decode(hidden), rtol=1e-4, atol=1e-4), form
            rewritten += 1
    assert rewritten > 30


def test_the_papers_first_layer_is_rewritten() -> None:
    layer = encoder(28, 5, 2, 2)
    assert ColumnConvolution.of(layer) is not None
    assert BlockTranspose.of(layer) is not None


def test_what_would_gain_nothing_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    coloured = ConvEncoder((3, 28, 28), 6, 5, stride=2, padding=2)
    for layer in (coloured, DenseEncoder((1, 8, 8), 6), encoder(28, 5, 2, 2).double()):
        assert ColumnConvolution.of(layer) is None
        assert BlockTranspose.of(layer) is None
    assert not any(map(DenseConvolution.pays_for, (nn.Linear(256, 10), nn.Linear(512, 512).double(), nn.ReLU())))
    assert DenseConvolution.pays_for(nn.Linear(512, 512))
    monkeypatch.setattr(kernels, "has_wide_vectors", lambda: False)
    assert BlockTranspose.of(encoder(28, 5, 2, 2)) is None
    assert not DenseConvolution.pays_for(nn.Linear(512, 512))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 40, 157])
def test_a_dense_layer_in_groups_is_the_layer_forwards_and_back(rows: int, bias: bool) -> None:
    layer, values = nn.Linear(96, 40, bias=bias).requires_grad_(False), torch.randn(rows, 96, requires_grad=True)
    results = [module(values) for module in (DenseConvolution(layer), layer)]
    assert torch.allclose(*results, rtol=1e-4, atol=1e-5)
    direction = torch.randn(rows, 40)
    gradients = [torch.autograd.grad((result * direction).sum(), values)[0] for result in results]
    assert torch.allclose(*gradients, rtol=1e-4, atol=1e-5)


def test_a_row_has_the_same_bits_beside_any_others() -> None:
    layer, values = DenseConvolution(nn.Linear(1024, 256).requires_grad_(False)), torch.randn(357, 1024)
    whole = layer(values)
    back = layer.transpose(whole)
    for count in (16, 31, 32, 100, 157, 320):
        assert torch.equal(layer(values[:count]), whole[:count])
        assert torch.equal(layer(values[-count:]), whole[-count:])
        assert torch.equal(layer.transpose(whole[:count]), back[:count])


def test_the_gradient_is_that_of_a_plain_convolution() -> None:
    layer, inputs = encoder(28, 5, 2, 2), torch.randn(2, 1, 28, 28, requires_grad=True)
    plain = F.conv2d(inputs, layer.weight, stride=2, padding=2)
    direction = torch.randn_like(plain)
    (gradient,) = torch.autograd.grad((plain * direction).sum(), inputs)
    faster = BlockTranspose.of(layer)
    assert faster is not None
    assert torch.allclose(faster(direction), gradient, rtol=1e-4, atol=1e-4)
