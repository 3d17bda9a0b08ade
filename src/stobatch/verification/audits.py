"""Audits against their evidence: verdicts and bounds follow from what was counted, claims are those of the run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import numpy as np

from stobatch.auditing.one_run_bounds import bounds_of_guesses
from stobatch.auditing.tradeoff_curves import AnyMechanism, Family, PoissonGaussianFamily
from stobatch.config import INSTRUMENTS
from stobatch.results import (
    OF_OTHER_CERTIFICATES,
    PRIVACY,
    WITH_SECRET_SEEDS,
    Audit,
    CertificateDetails,
    CertificateSummary,
    Check,
    EpsilonBound,
    Evidence,
    Finding,
    Manifest,
    PrivacyDetails,
    judge_claims,
    overall_verdict,
)
from stobatch.types import Status, Verdict
from stobatch.verification.checks import agrees, compare, differs, not_checked
from stobatch.verification.subject import Subject, other_run
from stobatch.votes.confidence import clopper_pearson

T = TypeVar("T")


def known(value: T | None) -> T:
    """Return a count that a bound of its kind always has."""
    if value is None:
        raise ValueError("a bound lacks one of its counts")
    return value


def audit_checks(subject: Subject) -> Iterator[Check]:
    """Check that `audit.json` repeats the findings of the evidence files, and that each follows from its numbers."""
    document, gathered = Audit.read(subject.run), list[Finding]()
    for name in INSTRUMENTS:
        evidence = Evidence.read_of(subject.run, name)
        if evidence is not None:
            yield _evidence(subject, f"evidence/{name}.json", name, evidence)
            gathered += evidence.findings
    order = {name: place for place, name in enumerate(INSTRUMENTS)}
    recorded = sorted(document.findings, key=lambda finding: order.get(finding.instrument, -1))
    certified = CertificateSummary.read_if_there(subject.run)
    kinds, made_by = (certified.kinds, certified.config_hash) if certified else ((), None)
    says_which = "certificates" in document.model_fields_set
    others = document.certificates != made_by if says_which else _certified_since(subject)
    claims = judge_claims(subject.claim.status, kinds, gathered, made_by)
    stated = list(document.claims)
    if others:
        # What was said of certificates that are gone cannot be judged again.
        claims = [claim for claim in claims if claim.about == PRIVACY]
        claims += [claim for claim in stated if claim.about != PRIVACY]
    pairs = [
        ("findings", [one.to_dict() for one in recorded], [one.to_dict() for one in gathered]),
        ("claims", [claim.to_dict() for claim in stated], [claim.to_dict() for claim in claims]),
        ("verdict", str(document.verdict), str(overall_verdict(claims, gathered))),
        ("training_hash", document.training_hash, subject.config.training_hash),
        ("weights_sha256", document.weights_sha256, subject.model.weights_sha256),
    ]
    yield compare("audit", "audit.json", pairs, f"{len(gathered)} findings are those of the evidence")
    if others:
        yield not_checked("audited certificates", OF_OTHER_CERTIFICATES, "audit.json")


def _certified_since(subject: Subject) -> bool:
    """Return whether the run was certified after its audit; older audits do not name the certificates attacked."""
    made = Manifest.read(subject.run).made if subject.run.has(Manifest.kind) else {}
    certified, audited = (made.get(verb) for verb in ("certify", "audit"))
    return certified is not None and audited is not None and certified.date > audited.date


def _evidence(subject: Subject, file: str, name: str, evidence: Evidence) -> Check:
    if wrong := other_run(subject, evidence.training_hash, evidence.weights_sha256):
        return differs("evidence", wrong, file)
    for finding in evidence.findings:
        if (finding.instrument, finding.evidence) != (name, file):
            return differs("evidence", f"a finding is of {finding.instrument} in {finding.evidence}", file)
        for wrong in _certificates(subject, finding) if name == "certificates" else _privacy(subject, finding):
            return differs("evidence", wrong, file)
    if any(_is_of_others(subject, finding) for finding in evidence.findings):
        return not_checked("evidence", OF_OTHER_CERTIFICATES, file)
    return agrees("evidence", f"{len(evidence.findings)} findings follow from what was counted", file)


def _privacy(subject: Subject, finding: Finding) -> Iterator[str]:
    """Yield what is wrong with a finding about privacy; nothing where all of it follows."""
    claim, details = subject.claim, finding.details
    if isinstance(details, CertificateDetails):
        yield "it is about certificates, and its instrument is not"
        return
    public = subject.model.plan.public_seeds and claim.status is not Status.NONE
    words = f"{WITH_SECRET_SEEDS}: {claim}" if public else str(claim)
    if finding.claim != words or finding.claim_status is not claim.status:
        yield f"it is held against '{finding.claim[:60]}', the run's claim is '{words[:60]}'"
    for bound in details.bounds:
        if bound.confidence != finding.confidence:
            yield f"a bound has confidence {bound.confidence}, its finding {finding.confidence}"
        yield from _bound(subject, bound)
    held = details.claimed_epsilon
    if isinstance(details, PrivacyDetails) and (held, details.claimed_delta) != (claim.epsilon, claim.delta):
        yield f"ε = {held} was held against, the run's is {claim.epsilon}"
    best = max(details.bounds, key=lambda bound: bound.epsilon)
    refuted = held is not None and best.epsilon > held
    if (finding.verdict is Verdict.REFUTED) != refuted:
        yield f"its verdict is {finding.verdict}, where ε >= {best.epsilon:.4g} was found and {held} is claimed"
    if str(best) not in finding.statement:
        yield f"its statement is not about what was found, {best}"


def _bound(subject: Subject, bound: EpsilonBound) -> Iterator[str]:
    """Yield what is wrong with a bound whose counts are there."""
    counts, family, computed = bound.details, _family(subject, bound), None
    if counts.correct_guesses_of_each is not None:
        again = bounds_of_guesses(
            known(counts.guesses_tried), counts.correct_guesses_of_each, canaries=known(counts.canaries),
            included=known(counts.included), delta=bound.delta, confidence=bound.confidence,
            family=PoissonGaussianFamily(*_curve(subject)) if subject.model.plan.curve is not None else None,
        )  # fmt: skip
        same = next((one for one in again if one.name == bound.name), None)
        if same is None or same.details != counts:
            yield f"the counts of bound {bound.name} are not those of its guesses"
        computed = same.epsilon if same else None
    elif counts.false_positives is not None and family is not None:
        trials_with = known(counts.trials_with)
        missed = trials_with - known(counts.true_positives)
        errors = ((counts.false_positives, known(counts.trials_without)), (missed, trials_with))
        failure = known(counts.failure_of_each_rate)
        rates = [float(clopper_pearson(np.array([float(e)]), n, failure)[1][0]) for e, n in errors]
        computed = family.epsilon(rates[0], rates[1], bound.delta)
    if computed is not None and not np.isclose(computed, bound.epsilon, rtol=1e-6, atol=1e-9):
        yield f"bound {bound.name} says ε >= {bound.epsilon:.6g}, its counts give {computed:.6g}"


def _family(subject: Subject, bound: EpsilonBound) -> Family | None:
    if bound.name == AnyMechanism.name:
        return AnyMechanism()
    return PoissonGaussianFamily(*_curve(subject)) if bound.name == PoissonGaussianFamily.name else None


def _curve(subject: Subject) -> tuple[float, int]:
    curve = subject.model.plan.curve
    assert curve is not None
    return curve.sampling_rate, curve.steps


def _is_of_others(subject: Subject, finding: Finding) -> bool:
    """Return whether a finding is about other certificates than those that are there."""
    details = finding.details
    if not isinstance(details, CertificateDetails):
        return False
    if details.certificates is None:
        return _certified_since(subject)
    certified = CertificateSummary.read_if_there(subject.run)
    return certified is None or details.certificates != certified.config_hash


def _certificates(subject: Subject, finding: Finding) -> Iterator[str]:
    """Yield what is wrong with a finding about certificates; of those that are not there, what contradicts itself."""
    details = finding.details
    assert isinstance(details, CertificateDetails)  # by its instrument
    if not _is_of_others(subject, finding):
        yield from _certified(subject, finding, details)
    certified = details.certified
    if not 0 <= details.broken <= details.attacked <= certified:
        yield f"{details.broken} of {details.attacked} balls are said to be broken, of {certified}"
    by_attack = sum(details.broken_by.values())
    over = details.overclaims > details.allowed_overclaims if details.failure_probability else details.broken > 0
    if (finding.verdict is Verdict.REFUTED) != over or by_attack != details.broken:
        yield f"its verdict is {finding.verdict}, where {details.broken} balls are counted as broken"
    counts = f"{details.attacked} of {certified} certified balls"
    if details.attacked and counts not in finding.statement:
        yield f"its statement does not say {counts}"


def _certified(subject: Subject, finding: Finding, details: CertificateDetails) -> Iterator[str]:
    """Yield what is wrong with a finding about the certificates that are there."""
    document = CertificateSummary.read(subject.run)
    verifier, _ = subject.as_certified(document)
    kind = next((kind for kind in verifier.kinds if kind.name == finding.about), None)
    if kind is None:
        yield f"it is about '{finding.about}', which this run does not certify"
        return
    columns = subject.certified_rows(document, verifier)
    quiet = np.asarray(columns["abstain"], dtype=bool) & (kind.status is Status.PROVED)
    certified = int((~quiet & (np.asarray(columns[kind.column]) > 0)).sum())
    if details.certified != certified:
        yield f"{details.certified} certified balls are counted, the rows hold {certified}"
    if (finding.claim_status, details.failure_probability) != (kind.status, kind.failure_probability):
        yield f"its claim is {finding.claim_status}, and it is {kind.status}"
