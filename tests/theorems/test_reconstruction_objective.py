"""Eq. 5 and Eq. 6 (the auto-encoder's objective) and Eq. 19 (its gradient), against independent oracles."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from stobatch.models import AffineEncoder, ConvEncoder, DenseEncoder
from stobatch.published.losses import reconstruction_gradient, reconstruction_loss

Uniform = Callable[..., Tensor]

GEOMETRIES = [(9, 5, 2, 2), (10, 5, 2, 2), (10, 4, 2, 1), (11, 4, 2, 1), (8, 3, 1, 1), (12, 7, 3, 3), (7, 2, 3, 0)]
"""(size, kernel, stride, padding); where stride does not divide, the last rows are never read."""


def encoders() -> list[AffineEncoder]:
    made: list[AffineEncoder] = [DenseEncoder((3, 4), 7)]
    made += [ConvEncoder((2, size, size), 3, k, stride=s, padding=p) for size, k, s, p in GEOMETRIES]
    made.append(ConvEncoder((1, 9, 12), 3, 4, stride=2, padding=1))
    for encoder in made:
        torch.nn.init.xavier_uniform_(encoder.weight, generator=torch.Generator().manual_seed(3))
    return [encoder.double() for encoder in made]


def dense_matrix(encoder: AffineEncoder) -> Tensor:
    """A with h = Ax, from basis vectors through the stock operators only."""
    size = torch.Size(encoder.input_shape).numel()
    basis = torch.eye(size, dtype=torch.float64).reshape(size, *encoder.input_shape)
    return stock_forward(encoder, basis).detach().flatten(1).t()


def stock_forward(encoder: AffineEncoder, inputs: Tensor) -> Tensor:
    if isinstance(encoder, ConvEncoder):
        return F.conv2d(inputs, encoder.weight, stride=encoder.stride, padding=encoder.padding)
    return F.linear(inputs.flatten(1), encoder.weight)


@pytest.fixture(params=range(len(encoders())), ids=lambda index: type(encoders()[index]).__name__ + str(index))
def encoder(request: pytest.FixtureRequest) -> AffineEncoder:
    return encoders()[request.param]


def test_decoding_is_the_exact_transpose_of_encoding(encoder: AffineEncoder, uniform: Uniform) -> None:
    hidden = uniform(4, *encoder.hidden_shape)
    expected = hidden.flatten(1) @ dense_matrix(encoder)
    assert torch.allclose(encoder.decode(hidden).flatten(1), expected, rtol=0, atol=1e-12)
    inputs = uniform(4, *encoder.input_shape, seed=1)
    left, right = (encoder(inputs) * hidden).sum(), (inputs * encoder.decode(hidden)).sum()
    assert float((left - right).detach().abs()) < 1e-11


def test_the_objective_is_the_published_double_sum(encoder: AffineEncoder, uniform: Uniform) -> None:
    noisy, noise = uniform(4, *encoder.input_shape), uniform(*encoder.hidden_shape, seed=1)
    A = dense_matrix(encoder)
    expected = 0.0
    for record in noisy.flatten(1):
        noisy_hidden = A @ record + noise.flatten()
        reconstruction = A.t() @ noisy_hidden
        expected += float(sum(0.5 * A[:, j] @ noisy_hidden for j in range(len(record))) - record @ reconstruction)
    assert float(reconstruction_loss(encoder, noisy, noise).detach()) == pytest.approx(expected)


def test_the_gradient_is_that_of_the_objective_with_hidden_values_held_fixed(
    encoder: AffineEncoder, uniform: Uniform
) -> None:
    noisy, noise = uniform(5, *encoder.input_shape), uniform(*encoder.hidden_shape, seed=1)
    hidden = (stock_forward(encoder, noisy) + noise).detach()
    # <1/2 - x̄, θ h̄> = <θᵀ(1/2 - x̄), h̄>, differentiated through the stock operator.
    (oracle,) = torch.autograd.grad((stock_forward(encoder, 0.5 - noisy) * hidden).sum(), encoder.weight)
    found = reconstruction_gradient(encoder, noisy, hidden)
    assert torch.allclose(found, oracle, rtol=0, atol=1e-11)
    (through_decoder,) = torch.autograd.grad(((0.5 - noisy) * encoder.decode(hidden)).sum(), encoder.weight)
    assert torch.allclose(found, through_decoder, rtol=0, atol=1e-11)


def test_it_is_not_the_full_gradient(encoder: AffineEncoder, uniform: Uniform) -> None:
    """The published one leaves out that h̄ itself depends on θ."""
    noisy, noise = uniform(5, *encoder.input_shape), uniform(*encoder.hidden_shape, seed=1)
    (full,) = torch.autograd.grad(reconstruction_loss(encoder, noisy, noise), encoder.weight)
    found = reconstruction_gradient(encoder, noisy, (encoder(noisy) + noise).detach())
    assert not torch.allclose(found, full, atol=1e-3)


def test_fast_encoder_gradients_are_those_of_the_stock_operator(encoder: AffineEncoder, uniform: Uniform) -> None:
    inputs = uniform(3, *encoder.input_shape).requires_grad_()
    weights = uniform(3, *encoder.hidden_shape, seed=2)
    assert torch.allclose(encoder(inputs), stock_forward(encoder, inputs), rtol=0, atol=1e-13)
    targets = [inputs, encoder.weight]
    fast = torch.autograd.grad((encoder(inputs).tanh() * weights).sum(), targets)
    stock = torch.autograd.grad((stock_forward(encoder, inputs).tanh() * weights).sum(), targets)
    for found, expected in zip(fast, stock, strict=True):
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)


def test_the_objective_has_no_minimum(uniform: Uniform) -> None:
    """Along a ray it falls with the square of θ: inputs in [-1, 1] make it no cross-entropy."""
    encoder = DenseEncoder((5,), 4).double()
    noisy, noise = uniform(20, 5), torch.zeros(4, dtype=torch.float64)
    direction = uniform(4, 5, seed=1)
    losses = []
    for size in (1.0, 10.0, 100.0):
        encoder.weight.data.copy_(size * direction)
        losses.append(float(reconstruction_loss(encoder, noisy, noise).detach()))
    assert losses[1] == pytest.approx(100 * losses[0])
    assert losses[2] < losses[1] < losses[0] < 0
