"""Lemma 4 (Eq. 23): Δ_L2 <= 2|h_π|. Holds, and is tight, where h_π is bounded and each class has its own noise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stobatch.models import Network
from stobatch.published.lemmas import label_sensitivity
from stobatch.published.losses import taylor_loss


def coefficients(last_hidden: Tensor, label: int, num_classes: int) -> Tensor:
    """h_π y_k of one example, read off the loss: what the label adds to ∇W at W = 0."""
    weight = torch.zeros(num_classes, len(last_hidden), dtype=torch.float64, requires_grad=True)
    loss = taylor_loss((last_hidden @ weight.t())[None], torch.tensor([label]), "corrected")
    (gradient,) = torch.autograd.grad(loss.sum(), weight)
    return last_hidden / 2 - gradient


def draw(size: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    both = torch.rand(2, size, generator=generator, dtype=torch.float64) * 2 - 1
    return both[0], both[1]


@given(st.integers(1, 20), st.integers(2, 6), st.integers(0, 2**31), st.booleans(), st.data())
def test_no_pair_of_tuples_exceeds_the_bound(
    size: int, classes: int, seed: int, corner: bool, data: st.DataObject
) -> None:
    here, there = draw(size, seed)
    if corner:
        here, there = here.sign(), there.sign()
    labels = data.draw(st.tuples(st.integers(0, classes - 1), st.integers(0, classes - 1)))
    change = coefficients(here, labels[0], classes) - coefficients(there, labels[1], classes)
    assert float(change.abs().sum()) <= label_sensitivity(size) + 1e-9


@given(st.integers(1, 50))
def test_the_bound_is_reached_by_a_changed_label(size: int) -> None:
    ones = torch.ones(size, dtype=torch.float64)
    assert float((coefficients(ones, 0, 3) - coefficients(ones, 1, 3)).abs().sum()) == label_sensitivity(size)


def test_an_unbounded_last_layer_violates_it() -> None:
    twos = torch.full((4,), 2.0, dtype=torch.float64)
    assert float((coefficients(twos, 0, 3) - coefficients(twos, 1, 3)).abs().sum()) > label_sensitivity(4)


@pytest.mark.parametrize("size", [1.0, 1e3, 1e12])
def test_the_network_bounds_its_last_hidden_layer_whatever_comes_in(
    size: float, make_network: Callable[..., Network]
) -> None:
    network, seen = make_network(), []
    network.head.output.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    network(size * torch.randn(50, 1, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    assert float(seen[0].detach().abs().max()) <= 1


def test_one_noise_shared_by_the_classes_cancels_in_the_difference_of_two_columns() -> None:
    """So the Laplace mechanism that the lemma would calibrate is not the one in use: a flipped label moves 2h, bare."""
    here, _ = draw(5, 0)
    noise = 100 * torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    released = [coefficients(here, label, 3) + noise for label in (0, 1)]
    seen = [columns[0] - columns[1] for columns in released]
    assert torch.allclose(seen[0], here, atol=1e-12)
    assert torch.allclose(seen[1], -here, atol=1e-12)
