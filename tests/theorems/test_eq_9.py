"""Eq. 9: benign and adversarial losses in one mean, weighted 1 : ξ."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stobatch.data import Examples
from stobatch.published.losses import example_weights, label_noise_term, taylor_loss
from stobatch.published.training import PublishedTrainable
from stobatch.training.engines import TrainerTask


@given(st.integers(1, 50), st.floats(0, 10))
def test_weights_are_those_of_the_formula_and_sum_to_1(m: int, xi: float) -> None:
    weights = example_weights(m, m, xi)
    assert float(weights[0]) == pytest.approx(1 / (m * (1 + xi)), rel=1e-5)
    assert float(weights[-1]) == pytest.approx(xi / (m * (1 + xi)), rel=1e-5)
    assert float(weights.sum()) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("xi", [0.0, 1.0, 1.5])
@pytest.mark.parametrize("taylor", ["corrected", "published"])
def test_head_gradients_are_those_of_the_objective_written_out(
    xi: float, taylor: str, make_training: Callable[..., PublishedTrainable], make_examples: Callable[..., Examples]
) -> None:
    """(1/(m(1+ξ))) (Σ L + ξ Σ Υ) - Σ_k (χ3/m) W_k, by autograd over the whole batch at once."""
    examples = make_examples()
    training = make_training(examples, adversarial_weight=xi, taylor=taylor)
    task = TrainerTask(0, 0, 1)
    found = training.gradients(task, 5)
    benign, source = training.batches[0], training.batches[1]
    crafted = training.craft(training.noisy(source)[0], training.seeds.generator("step", 5, "trainer", 0))
    network = training.network

    def total(noisy: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return taylor_loss(network.scores_of_noisy(noisy), labels, taylor).sum()

    first = total(training.noisy(benign)[0], examples.labels[benign])
    second = total(crafted, examples.labels[source])
    objective = (first + xi * second) / (len(benign) * (1 + xi))
    objective = objective - label_noise_term(network.head.output.weight, training.label_noise)
    named = dict(network.head.named_parameters())
    expected = torch.autograd.grad(objective, list(named.values()))
    for name, gradient in zip(named, expected, strict=True):
        assert torch.allclose(found[f"head.{name}"], gradient, rtol=1e-6, atol=1e-8)


def test_a_small_chunk_changes_no_gradient(make_training: Callable[..., PublishedTrainable]) -> None:
    whole, parts = make_training(), make_training()
    parts.chunk = 5
    task = TrainerTask(0, 2, 3)
    expected = whole.gradients(task, 0)
    for name, gradient in parts.gradients(task, 0).items():
        assert torch.allclose(gradient, expected[name], rtol=0, atol=1e-10)
