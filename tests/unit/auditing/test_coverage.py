"""Which claims were tested: an attack that had nothing to attack, or could never refute, is no test."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attempts import CHEAP

from stobatch.auditing.falsifier import COLUMNS, finding_of
from stobatch.auditing.membership import membership_finding, targets_needed
from stobatch.dp.guarantee import PrivacyGuarantee
from stobatch.results import Finding, Kind, judge_claims, overall_verdict, recheck, untested
from stobatch.types import PAPER_RANGE, Neighbours, Norm, Radius, Status, Verdict
from stobatch.verifier import CertificateKind

PASS = CertificateKind(
    "bounds", Status.PROVED, "nowhere", Radius(1.0, Norm.LINF, PAPER_RANGE), 0.0, function="single_pass"
)
VOTE = replace(PASS, name="votes", failure_probability=0.05, function="vote")
CLAIM = PrivacyGuarantee(0.5, 1e-5, Neighbours.REPLACE_ONE, "training tuple", Status.PROVED, "a proof")
KINDS = [
    Kind(name="bounds", function="single_pass", status="proved", source="", norm="linf", input_range="[-1, 1]",
         failure_probability=0.0)
]  # fmt: skip


def columns(attacked: int, broken: int = 0) -> dict[str, Any]:
    values: dict[str, Any] = dict.fromkeys(COLUMNS, 0.5) | {"attack": "madry", "broken_float64": None}
    values |= {"retests": 0, "overclaims": 0}
    rows = {name: [value] * attacked for name, value in values.items()}
    return rows | {"broken": [row < broken for row in range(attacked)]}


def told(kind: CertificateKind, attacked: int, broken: int = 0, **settings: Any) -> Any:
    return finding_of(kind, columns(attacked, broken), CHEAP.replace(**settings), certified=attacked, num_kinds=1)


@pytest.mark.parametrize("kind", [PASS, VOTE], ids=lambda kind: kind.name)
def test_no_ball_is_no_test(kind: CertificateKind) -> None:
    assert told(kind, 0).verdict is Verdict.NOT_TESTED
    assert told(kind, 3).verdict is Verdict.CONSISTENT


def test_a_break_refutes_and_says_nothing_of_power() -> None:
    finding = told(PASS, 3, 1)
    assert finding.verdict is Verdict.REFUTED
    assert finding.details.could_not_refute is None


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"judging_draws": 9}, "9 draws can never show"), ({"retests": 1}, "1 certificates made anew can never show")],
)
def test_tests_that_can_never_reach_their_level_are_no_tests(settings: dict[str, Any], reason: str) -> None:
    finding = told(VOTE, 3, **settings)
    assert finding.verdict is Verdict.NOT_TESTED
    assert finding.details.could_not_refute.startswith(reason)
    # A single pass is broken by one point: neither draws nor repetitions are needed.
    assert told(PASS, 3, **settings).verdict is Verdict.CONSISTENT


@pytest.mark.parametrize("claim", [CLAIM, PrivacyGuarantee.none("no proof")], ids=["a claim", "no claim"])
def test_membership_with_too_few_models_or_no_claim_is_no_test(claim: PrivacyGuarantee) -> None:
    generator = np.random.default_rng(0)

    def finding_with(models: int) -> Any:
        member = np.stack([generator.permutation(40) < 20 for _ in range(models)])
        return membership_finding(member, generator.normal(0, 1, member.shape), claim, 0.95)

    few, enough = finding_with(40), finding_with(4 * targets_needed(0.5, delta=1e-5, confidence=0.95))
    assert few.verdict is Verdict.NOT_TESTED
    assert few.details.could_not_refute
    assert enough.verdict is (Verdict.NOT_TESTED if claim.status is Status.NONE else Verdict.CONSISTENT)


BUDGET = {"claimed_epsilon": 1.0, "claimed_delta": 0.0, "neighbours": "replace-one", "bounds": ()}
RATES = {"auroc": 0.5, "auroc_interval": (0.4, 0.6), "tpr_at": {}, "fpr_at": {}, "variance": "pooled",
         "confidence": 0.95, "num_shadows": 5, "num_targets": 5, "num_examples": 9,
         "roc": {"false_positive_rate": (), "true_positive_rate": ()}}  # fmt: skip
BALLS = {"certified": 9, "attacked": 9, "broken": 0, "broken_by": {}}


def of(instrument: str, about: str, verdict: str, **details: Any) -> Finding:
    whole = BALLS if instrument == "certificates" else BUDGET | (RATES if instrument == "membership" else {})
    return Finding.model_validate(
        {"instrument": instrument, "about": about, "claim": "", "claim_status": "proved", "verdict": verdict,
         "statement": "seen", "threat_model": "", "attack": "", "confidence": 0.95, "details": whole | details}
    )  # fmt: skip


CASES = {
    "nothing was tried": ([], "not tested", ["not tested", "not tested"]),
    "everything was": (
        [of("one_run", "privacy", "consistent"), of("certificates", "bounds", "consistent", attacked=4)],
        *("consistent", ["consistent", "consistent"]),
    ),
    "privacy alone": ([of("one_run", "privacy", "consistent")], "partly tested", ["consistent", "not tested"]),
    "one refuted": ([of("one_run", "privacy", "refuted")], "refuted", ["refuted", "not tested"]),
    "a claim that is gone": ([of("certificates", "old", "refuted", attacked=1)], "refuted", ["not tested"] * 2),
    "refuted by one of two": (
        [of("one_run", "privacy", "consistent"), of("release", "privacy", "refuted")],
        *("refuted", ["refuted", "not tested"]),
    ),
}


@pytest.mark.parametrize(("findings", "overall", "each"), CASES.values(), ids=CASES)
def test_every_claim_has_a_verdict(findings: list[Finding], overall: str, each: list[str]) -> None:
    claims = judge_claims("proved", KINDS, findings)
    assert [claim.verdict for claim in claims] == each
    assert overall_verdict(claims, findings) == overall
    assert len(untested(claims)) == each.count("not tested")


def test_without_any_claim_nothing_is_consistent() -> None:
    findings = [of("membership", "privacy", "not tested", could_not_refute="nothing is claimed")]
    assert judge_claims("none", [], findings) == []
    assert overall_verdict([], findings) is Verdict.NOT_TESTED


EMPTY = {
    "an empty table": (of("certificates", "bounds", "consistent", attacked=0), "no input has a certified ball"),
    "too few models": (
        of("membership", "privacy", "consistent", num_targets=5, targets_needed=9, claimed_epsilon=1.0),
        "fewer than 9 attacked models can never refute it",
    ),
    "no claim": (of("membership", "privacy", "consistent", claimed_epsilon=None), "nothing is claimed"),
}


@pytest.mark.parametrize(("finding", "reason"), EMPTY.values(), ids=EMPTY)
def test_the_broken_twin_that_says_consistent_of_nothing_is_caught(finding: Finding, reason: str) -> None:
    (read,) = recheck([finding])
    assert read.verdict == Verdict.NOT_TESTED
    assert read.details.could_not_refute == reason
    claims = judge_claims("proved", KINDS, [read])
    assert overall_verdict(claims, [read]) is Verdict.NOT_TESTED
    assert any(reason in line for line in untested(claims))
    # What does say something is left as it is.
    for kept in (of("certificates", "bounds", "consistent", attacked=1), finding.replace(verdict=Verdict.REFUTED)):
        assert recheck([kept]) == (kept,)
