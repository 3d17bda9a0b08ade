"""Theorem 3: labels reach every parameter below the output layer without noise, and within it χ3 cancels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from stobatch.data import Examples
from stobatch.published.lemmas import head_budget
from stobatch.published.noise import PrivateNoise
from stobatch.published.training import PublishedTrainable
from stobatch.training.engines import Gradients, TrainerTask

MakeTraining = Callable[..., PublishedTrainable]
MakeExamples = Callable[..., Examples]
MakeNoise = Callable[..., PrivateNoise]
OUTPUT = "head.output.weight"


@pytest.fixture
def gradients(make_training: MakeTraining, make_noise: MakeNoise) -> Callable[..., Gradients]:
    def compute(label_seed: int, *, per_class: bool = False, examples: Examples | None = None) -> Gradients:
        noise = make_noise(per_class=per_class, label_seed=label_seed)
        form = "per_class" if per_class else "shared"
        return make_training(examples, noise, label_noise=form).gradients(TrainerTask(0, 0, 1), 0)

    return compute


def class_difference(gradient: Tensor) -> Tensor:
    return gradient[0] - gradient[1]


def test_shared_noise_cancels_in_the_difference_of_two_classes(gradients: Callable[..., Gradients]) -> None:
    first, second = gradients(1)[OUTPUT], gradients(2)[OUTPUT]
    assert not torch.allclose(first, second, atol=1e-3)
    assert torch.allclose(class_difference(first), class_difference(second), atol=1e-12)


def test_noise_of_its_own_for_every_class_does_not_cancel(gradients: Callable[..., Gradients]) -> None:
    first, second = (class_difference(gradients(seed, per_class=True)[OUTPUT]) for seed in (1, 2))
    assert not torch.allclose(first, second, atol=1e-3)


@pytest.mark.parametrize("per_class", [False, True])
def test_every_parameter_below_the_output_layer_is_free_of_label_noise(
    gradients: Callable[..., Gradients], per_class: bool
) -> None:
    first, second = (gradients(seed, per_class=per_class) for seed in (1, 2))
    below = [name for name in first if name != OUTPUT]
    assert below
    assert all(torch.equal(first[name], second[name]) for name in below)


@pytest.mark.parametrize("per_class", [False, True])
def test_a_flipped_label_shows_below_the_output_layer_whatever_the_noise(
    gradients: Callable[..., Gradients], make_examples: MakeExamples, make_training: MakeTraining, per_class: bool
) -> None:
    """Two neighbours, 5 draws each of χ3: the gradients below form two disjoint single points."""
    examples = make_examples()
    victim = int(make_training(examples).batches[0, 0])
    labels = examples.labels.clone()
    labels[victim] = (labels[victim] + 1) % 3
    neighbour = Examples(examples.inputs, labels, 3)
    name = "head.body.2.weight"
    seen = [
        [gradients(s, per_class=per_class, examples=data)[name] for s in range(5)] for data in (examples, neighbour)
    ]
    assert all(torch.equal(gradient, own[0]) for own in seen for gradient in own)
    assert float((seen[0][0] - seen[1][0]).abs().max()) > 1e-6


def test_the_claimed_budget_is_the_published_sum() -> None:
    assert head_budget(0.06, 4.0, 0.1) == pytest.approx(0.115)
