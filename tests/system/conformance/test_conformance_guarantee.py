"""A guarantee is true to its kind: a proof shows what it rests on, a claim what speaks against it."""

from __future__ import annotations

from math import isfinite

import pytest
from bench import Finished

import stobatch
from stobatch import Neighbours, RunConfig, Status
from stobatch.dp.guarantee import PrivacyGuarantee
from stobatch.dp.plan import Plan


def amiss(guarantee: PrivacyGuarantee) -> list[str]:
    """What a guarantee of its status lacks."""
    finite = 0 < guarantee.epsilon < float("inf")
    wanted = {
        Status.PROVED: {
            "an ε": finite,
            "a δ": 0 < guarantee.delta < 1,
            "neighbours": isinstance(guarantee.neighbours, Neighbours),
            "a unit": bool(guarantee.unit),
            "assumptions": bool(guarantee.assumptions) and all(guarantee.assumptions),
            "a source": bool(guarantee.source),
        },
        Status.CLAIMED: {
            "an ε": finite,
            "who claims it": bool(guarantee.source),
            "objections": bool(guarantee.objections) and all(guarantee.objections),
        },
        Status.NONE: {
            "a reason": bool(guarantee.source),
            "no ε": not isfinite(guarantee.epsilon),
            "no assumptions": not guarantee.assumptions,
        },
    }
    if guarantee.status not in wanted:
        return [f"a method does not begin as {guarantee.status}"]
    return [what for what, there in wanted[guarantee.status].items() if not there]


def test_it_has_what_its_status_asks_for(plan: Plan) -> None:
    assert not amiss(plan.guarantee)


def test_its_status_is_in_every_sentence(plan: Plan) -> None:
    said = str(plan.guarantee)
    word = "no privacy guarantee" if plan.guarantee.status is Status.NONE else str(plan.guarantee.status)
    assert said.startswith(word)
    assert plan.guarantee.source in said
    if plan.guarantee.status is Status.CLAIMED:
        assert "NOT a proven guarantee" in said
    if plan.guarantee.status is Status.NONE:
        assert "ε" not in said


def test_it_reads_back_as_it_was_written(plan: Plan) -> None:
    assert PrivacyGuarantee.from_dict(plan.guarantee.to_dict()) == plan.guarantee


def test_more_steps_never_cost_less(plan: Plan, config: RunConfig) -> None:
    """Steps that a crash made necessary again are counted; those that were not made give nothing back."""
    steps = config.training.steps
    after = [plan.after(count) for count in (0, 1, steps, steps + 1, 2 * steps, 10 * steps)]
    assert after[0] == after[2] == plan.claim
    spent = [guarantee.epsilon for guarantee in after]
    assert spent == sorted(spent)
    assert {(g.status, g.delta, g.neighbours, g.unit) for g in after} == {
        (g.status, g.delta, g.neighbours, g.unit) for g in (plan.guarantee,)
    }
    if plan.guarantee.status is Status.PROVED:
        assert spent[3] > spent[2], "a repeated step looks at the data again"
        assert all(not amiss(guarantee) for guarantee in after)


def test_a_finished_run_says_what_its_plan_said(plan: Plan, finished: Finished) -> None:
    """Undisturbed and not audited, there is nothing to add."""
    assert stobatch.load(finished.path).guarantee == plan.guarantee


@pytest.mark.parametrize(
    ("guarantee", "lacking"),
    [
        (PrivacyGuarantee(1.0, 0.0, Neighbours.ADD_REMOVE, "example", Status.PROVED, "us"), ["a δ", "assumptions"]),
        (PrivacyGuarantee(1.0, 0.0, Neighbours.REPLACE_ONE, "tuple", Status.CLAIMED, "them"), ["objections"]),
        (PrivacyGuarantee(1.0, 0.0, Neighbours.REPLACE_ONE, "tuple", Status.NONE, "nobody"), ["no ε"]),
    ],
    ids=str,
)
def test_guarantees_that_say_too_little_or_too_much_are_caught(guarantee: PrivacyGuarantee, lacking: list[str]) -> None:
    assert amiss(guarantee) == lacking
