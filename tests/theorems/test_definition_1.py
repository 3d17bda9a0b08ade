"""Definition 1 (Eq. 1): (ε, δ)-DP, and what may be said about a guarantee that is only claimed."""

from __future__ import annotations

from dataclasses import replace
from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import laplace

from stobatch.dp.guarantee import PrivacyGuarantee
from stobatch.types import Neighbours, Status


@given(
    st.floats(0.01, 5),
    st.floats(-3, 3),
    st.floats(-1, 1),
    st.lists(st.floats(-20, 20), min_size=2, max_size=8, unique=True),
)
def test_laplace_release_of_a_sensitivity_1_value_meets_the_definition_on_every_union_of_intervals(
    epsilon: float, value: float, change: float, edges: list[float]
) -> None:
    edges = sorted(edges)[: len(edges) // 2 * 2]

    def probability(centre: float) -> float:
        law = laplace(centre, 1 / epsilon)
        return sum(law.cdf(high) - law.cdf(low) for low, high in zip(edges[::2], edges[1::2], strict=True))

    assert probability(value) <= exp(epsilon) * probability(value + change) + 1e-12


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.0])
def test_the_definition_is_tight_in_the_tail(epsilon: float) -> None:
    here, there = laplace(0, 1 / epsilon), laplace(1, 1 / epsilon)
    assert here.cdf(-2) == pytest.approx(exp(epsilon) * there.cdf(-2))


@pytest.mark.parametrize("epsilon", [0.1, 1.0])
def test_half_the_noise_violates_the_definition(epsilon: float) -> None:
    here, there = laplace(0, 0.5 / epsilon), laplace(1, 0.5 / epsilon)
    assert here.cdf(-2) > exp(epsilon) * there.cdf(-2)


@given(
    st.floats(0, 100),
    st.floats(0, 1),
    st.sampled_from([Status.CLAIMED, Status.PROVED, Status.REFUTED, Status.VOID]),
    st.sampled_from(Neighbours),
)
def test_an_epsilon_is_never_written_without_its_status(
    epsilon: float, delta: float, status: Status, neighbours: Neighbours
) -> None:
    guarantee = PrivacyGuarantee(epsilon, delta, neighbours, "training tuple", status, "somewhere")
    if status is Status.VOID:
        guarantee = replace(guarantee, status=Status.PROVED).with_public_seed()
    assert PrivacyGuarantee.from_dict(guarantee.to_dict()) == guarantee
    text, document = str(guarantee), guarantee.to_dict()
    assert text.casefold().startswith(str(status))
    assert str(neighbours) in text
    assert "epsilon" not in document
    assert document[f"{status}_epsilon"] == epsilon
    assert document[f"{status}_delta"] == delta
    assert ("NOT a proven guarantee" in text) == (status is Status.CLAIMED)


def test_a_method_that_promises_nothing_shows_no_epsilon() -> None:
    nothing = PrivacyGuarantee.none("somewhere")
    assert str(nothing).startswith("no privacy guarantee")
    assert not [key for key in nothing.to_dict() if "epsilon" in key]
