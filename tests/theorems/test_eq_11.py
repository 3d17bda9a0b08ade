"""Eq. 11: the product of the scores of separately randomised passes."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from stobatch.published.radius import product_score


@given(st.integers(1, 4), st.integers(2, 10), st.integers(0, 2**31))
def test_the_product_stays_in_0_to_1_and_sums_to_at_most_1(passes: int, classes: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = [torch.randn(7, classes, generator=generator, dtype=torch.float64).softmax(1) for _ in range(passes)]
    product = product_score(*scores)
    assert bool(((product >= 0) & (product <= 1)).all())
    assert bool((product.sum(1) <= 1 + 1e-12).all())
    assert torch.allclose(product.log(), sum(score.log() for score in scores), atol=1e-9)


def test_one_pass_is_its_own_product_and_inputs_are_left_alone() -> None:
    score = torch.tensor([[0.25, 0.75]])
    assert torch.equal(product_score(score), score)
    product_score(score, score)
    assert torch.equal(score, torch.tensor([[0.25, 0.75]]))
