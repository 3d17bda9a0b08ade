"""Passes in bfloat16 may be rough; a clipped contribution is never longer than C by more than float32 rounds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from stobatch.bounds.boxes import TrainingBox, worst_case_scores
from stobatch.dp import clipping as per_example
from stobatch.dp.clipping import Batch, ClippedSum, clipped_sum_by_example, clipped_sum_in_one_pass
from stobatch.models import build_layered
from stobatch.models.layered import Layered
from stobatch.training.trainable import working_precision

CLIP = 1.0
ALLOWED = 1 + 1e-5
WAYS = [clipped_sum_in_one_pass, clipped_sum_by_example]
Clipper = Callable[..., ClippedSum]


def network() -> Layered:
    return build_layered("conv 8 3/2, relu, linear 32, relu, linear", (1, 8, 8), 5, torch.Generator().manual_seed(3))


def examples(count: int = 48) -> Batch:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(count, 1, 8, 8, generator=generator) * 2 - 1, torch.arange(count) % 5


def losses(module: nn.Module, batch: Batch) -> Tensor:
    """Steep, so that everybody is clipped; plain and bounded passes together, as the sound method mixes them."""
    inputs, labels = batch
    assert isinstance(module, Layered)
    worst = worst_case_scores(module.layers, TrainingBox.around(inputs, 0.05), labels)
    plain = F.cross_entropy(module(inputs), labels, reduction="none")
    return 50 * (plain + F.cross_entropy(worst, labels, reduction="none"))


def longest(way: Clipper) -> float:
    """Of what single examples add, in passes of bfloat16."""
    inputs, labels = examples()
    model, found = network(), 0.0
    with working_precision("bfloat16", torch.device("cpu")):
        for row in range(len(labels)):
            one = way(model, losses, (inputs[row : row + 1], labels[row : row + 1]), CLIP)
            assert all(value.dtype == torch.float32 for value in one.gradients.values())
            found = max(found, float(torch.cat([v.flatten() for v in one.gradients.values()]).double().norm()))
    return found


@pytest.mark.parametrize("way", WAYS)
def test_a_contribution_in_bfloat16_is_at_most_c(way: Clipper) -> None:
    assert 0.99 < longest(way) <= ALLOWED


def test_norms_taken_in_bfloat16_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken twin: clipping does its sums in the precision of the passes."""

    def rough(norms: Tensor, clip_norm: float, dtype: torch.dtype) -> Tensor:
        return (clip_norm / norms.bfloat16()).clamp(max=1.0).to(dtype)

    monkeypatch.setattr(per_example, "clipping_weights", rough)
    assert longest(clipped_sum_in_one_pass) > ALLOWED


@pytest.mark.parametrize("way", WAYS)
def test_the_sum_of_a_batch_is_that_of_its_examples(way: Clipper) -> None:
    """Passes of one and of many round differently, in bfloat16 by half a percent."""
    inputs, labels = examples()
    model = network()
    with working_precision("bfloat16", torch.device("cpu")):
        together = way(model, losses, (inputs, labels), CLIP).gradients
        apart = [way(model, losses, (inputs[i : i + 1], labels[i : i + 1]), CLIP).gradients for i in range(len(labels))]
    rough = way(model, losses, (inputs, labels), CLIP).gradients
    for name, value in together.items():
        size = float(value.norm()) + 0.1
        assert float((value - sum(one[name] for one in apart)).norm()) < 0.02 * size
        assert float((value - rough[name]).norm()) < 0.1 * size


def test_passes_really_are_in_bfloat16() -> None:
    """Else the tests above would show nothing."""
    with working_precision("bfloat16", torch.device("cpu")):
        assert network()(examples()[0]).dtype == torch.bfloat16
    with working_precision("float32", torch.device("cpu")):
        assert network()(examples()[0]).dtype == torch.float32
