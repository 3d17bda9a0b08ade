"""audit.json and evidence files: what instruments found about each claim of a run, and how sure they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field, ValidationInfo, field_validator

from stobatch.results.certificates import Kind
from stobatch.results.document import Count, Document, NotNull, Number, Part, Settings, Size, Text, Whole
from stobatch.runs import Run
from stobatch.types import Neighbours, Status, Verdict

WITH_SECRET_SEEDS = "with secret seeds"
"""Of a claim that a training with a public seed does not keep, and its method does: that one is tested."""
PRIVACY = "privacy"
CERTIFICATES = "certificates"
"""The instrument that tests certificates; all others test privacy."""
MEMBERSHIP = "membership"
OF_OTHER_CERTIFICATES = "of other certificates, audit again"
"""Why an audit says nothing of certificates that were made since with other settings."""


class BoundCounts(Part):
    """Counts and rates behind a bound on ε; no score and no threshold. Each way to bound it has its own."""

    trainings_without: Count | None = None
    trainings_with: Count | None = None
    trials_without: Count | None = None
    trials_with: Count | None = None
    false_positives: Count | None = None
    true_positives: Count | None = None
    false_positive_rate: Number | None = None
    false_positive_rate_at_most: Number | None = None
    false_negative_rate: Number | None = None
    false_negative_rate_at_most: Number | None = None
    failure_of_each_rate: Number | None = None
    chosen_on: Text | None = None
    direction: Text | None = None
    canaries: Count | None = None
    included: Count | None = None
    guesses: Count | None = None
    correct_guesses: Count | None = None
    guesses_tried: tuple[Count, ...] | None = None
    correct_guesses_of_each: tuple[Count, ...] | None = None
    failure_of_each_test: Number | None = None
    targets: Count | None = None
    guesses_of: Text | None = None
    guessed_rightly: Number | None = None
    guessed_wrongly: Number | None = None
    most_that_could_show: Number | None = None
    failure_of_each_direction: Number | None = None


class EpsilonBound(Part):
    """The mechanism is not (ε', δ)-differentially private for any ε' below `epsilon`; files call it `epsilon_at_least`.

    **Guarantee.** All bounds that one call of an audit returns hold at once with probability at least `confidence`,
    over the trainings and over the audit's own coins, for any mechanism that is as `assumes` says.
    """

    epsilon: Number = Field(validation_alias="epsilon_at_least", serialization_alias="epsilon_at_least")
    """0 where nothing was found."""
    delta: Number = Field(validation_alias="at_delta", serialization_alias="at_delta")
    confidence: Number
    name: Text
    """clopper_pearson, poisson_family, one_run, one_run_poisson or membership"""
    assumes: Text
    """What must be true of the mechanism; empty where nothing is assumed."""
    details: BoundCounts

    def __str__(self) -> str:
        """Return the bound in words, never without δ, confidence and what it assumes."""
        assuming = f", assuming {self.assumes}" if self.assumes else ""
        return f"ε ≥ {self.epsilon:.3g} at δ = {self.delta:g} with {100 * self.confidence:.3g}% confidence{assuming}"


class Histogram(Part):
    """How many models of either kind had a score between two edges."""

    edges: tuple[Number, ...]
    without: tuple[Count, ...]
    with_: tuple[Count, ...] = Field(validation_alias="with", serialization_alias="with")


class Rate(Part):
    """A rate with its interval over targets."""

    value: Number
    low: Number
    high: Number


class Roc(Part):
    """True- against false-positive rates, for a figure."""

    false_positive_rate: tuple[Number, ...]
    true_positive_rate: tuple[Number, ...]


class PrivacyDetails(Part):
    """Of many_runs, one_run and release: the claim that was held against, what was tried, and bounds on ε."""

    claimed_epsilon: Number
    claimed_delta: Number
    neighbours: Neighbours
    release: Text | None = None
    source: Text | None = None
    trials: Count | None = None
    right: Count | None = None
    records: Count | None = None
    trainings: Count | None = None
    canaries: Count | None = None
    kind: Text | None = None
    histogram: Histogram | None = None
    bounds: tuple[EpsilonBound, ...]
    could_not_refute: Text | None = None


class MembershipRates(Part):
    """How well membership was inferred, over targets drawn like these and attacked with these shadows.

    **Guarantee.** The bound on ε holds as `auditing.membership.infer` proves. The intervals are Student's over the
    targets: exact where a target's rate is normal, as a mean over many examples nearly is. Each holds at `confidence`
    alone, not all at once. An area whose interval has no width was the same for every target.
    """

    auroc: Number
    """The mean over targets of the probability that a member scores above a non-member."""
    auroc_interval: tuple[Number, Number]
    tpr_at: dict[Text, Rate]
    """True-positive rate at the threshold with which the shadows have this false-positive rate, or less."""
    fpr_at: dict[Text, Rate]
    """What the false-positive rate at that threshold is on the targets."""
    variance: Text
    """`per_example`, or `pooled` over the examples where shadows are too few for that"""
    confidence: Number
    num_shadows: Count
    num_targets: Count
    num_examples: Count
    roc: Roc
    """Of all targets' pairs together, with false-positive rates on a log grid."""
    bounds: tuple[EpsilonBound, ...]


class MembershipDetails(MembershipRates):
    """Of membership inference: how well members were told from others, held against a claim."""

    claimed_epsilon: Number | None
    """None where nothing is claimed."""
    claimed_delta: Number
    targets_needed: Whole | None = None
    could_not_refute: Text | None = None
    neighbours: Neighbours


class CertificateDetails(Part):
    """Of attacks inside certified balls: how many were attacked and broken, and whether chance explains it."""

    certified: Count
    attacked: Count
    broken: Count
    broken_float64: Count | None = None
    broken_by: dict[Text, Count]
    smallest_margin: Number | None = None
    smallest_radius: Size | None = None
    largest_radius: Size | None = None
    failure_probability: Number | None = None
    retests: Count = 0
    overclaims: Count = 0
    allowed_overclaims: Count = 0
    could_not_refute: Text | None = None
    certificates: Annotated[Text | None, NotNull] = None
    """Which certificates were attacked, by the `config_hash` of their rows; older versions did not say it."""


FindingDetails = PrivacyDetails | MembershipDetails | CertificateDetails


class Finding(Part):
    """One instrument's word on one claim.

    **Guarantee.** Where the claim holds, `verdict` is refuted with probability at most 1 - confidence over the audit's
    own randomness. A claim that is proved by a trade-off curve is the curve: a bound that assumes it may refute too.
    It is consistent only if an attack that always wins would have refuted the claim; otherwise it is not tested, and
    `details.could_not_refute` says why.
    """

    instrument: Text
    """many_runs, one_run, membership, release or certificates"""
    about: Text
    """The claim: `privacy`, or the name of a kind of certificate."""
    claim: Text
    """The claim in words, with its status."""
    claim_status: Status
    """Who vouched for it before the audit."""
    verdict: Verdict
    statement: Text
    """What was found, in one sentence that a person can check."""
    threat_model: Text
    """What the attacker sees and knows."""
    attack: Text
    confidence: Number
    details: FindingDetails
    """Numbers behind the statement, for tables and figures; nothing private."""
    evidence: Text = ""
    """The file that holds them all, relative to the run."""

    @field_validator("details", mode="before")
    @classmethod
    def _choose_details(cls, value: Any, info: ValidationInfo) -> Any:
        """Read details by their instrument, so that an error names the field that is wrong."""
        if not isinstance(value, Mapping):
            return value
        kinds: dict[Any, type[Part]] = {CERTIFICATES: CertificateDetails, MEMBERSHIP: MembershipDetails}
        return kinds.get(info.data.get("instrument"), PrivacyDetails).model_validate(value)

    @property
    def bounds(self) -> tuple[EpsilonBound, ...]:
        """Return the lower bounds on ε; none for a finding about certificates."""
        return () if isinstance(self.details, CertificateDetails) else self.details.bounds

    @property
    def claimed_budget(self) -> tuple[float, float] | None:
        """Return the ε and δ that the bounds are held against; None where nothing is claimed about them."""
        details = self.details
        if isinstance(details, CertificateDetails) or details.claimed_epsilon is None:
            return None
        return details.claimed_epsilon, details.claimed_delta


class Claim(Part):
    """One claim of a run with its verdict."""

    about: Text
    status: Status
    verdict: Verdict
    reason: Text = ""
    """Why it was not tested."""


class Evidence(Document):
    """What one instrument found in one call, with the settings it was used with."""

    kind: ClassVar[str] = "evidence"

    training_hash: Text
    weights_sha256: Text | None = None
    settings: Settings
    seed: Whole | None
    findings: tuple[Finding, ...]

    @classmethod
    def read_of(cls, run: Run, instrument: str) -> Evidence | None:
        """Return what an instrument left in a run; None where it was not used."""
        name = f"evidence/{instrument}"
        return cls.from_dict(run.read(name), run.path / f"{name}.json") if run.has(name) else None

    @classmethod
    def _schema_name(cls) -> dict[str, str]:
        return {"pattern": "^stobatch\\.evidence/"}

    def write_of(self, run: Run, instrument: str) -> None:
        run.write(f"evidence/{instrument}", self.to_dict())


class Audit(Document):
    """What `audit` found: every claim of a run, tested or not, and all findings about them."""

    kind: ClassVar[str] = "audit"

    training_hash: Text
    weights_sha256: Text | None = None
    verdict: Verdict
    claims: tuple[Claim, ...] = ()
    findings: tuple[Finding, ...]
    certificates: Text | None = None
    """Which certificates the claims are about, by the `config_hash` of their rows; null where there were none."""

    def lines(self) -> list[str]:
        lines = [str(self.verdict)]
        lines += [f"{name_of(claim)} ({claim.status}): {claim.verdict}" for claim in self.claims]
        return lines + [f"{finding.instrument}: {finding.statement}" for finding in self.findings]


def judge_claims(
    privacy: str, kinds: Iterable[Kind], findings: Sequence[Finding], certificates: str | None = None
) -> list[Claim]:
    """Return every claim of a run with its verdict: of its privacy, by its status, and of each kind of certificate.

    `certificates` is the `config_hash` of those that the run has. Attacks on others test none of them, but what they
    refuted stays refuted.

    >>> [claim.to_dict() for claim in judge_claims("proved", [], [])]
    [{'about': 'privacy', 'status': 'proved', 'verdict': 'not tested', 'reason': 'no instrument was used on it'}]
    """
    balls = [_as_said_of(finding, certificates) for finding in findings if finding.instrument == CERTIFICATES]
    others = [finding for finding in findings if finding.instrument != CERTIFICATES and finding.about == PRIVACY]
    claims = [] if privacy == Status.NONE else [_judge(PRIVACY, Status(privacy), others)]
    return claims + [_judge(kind.name, kind.status, [f for f in balls if f.about == kind.name]) for kind in kinds]


def _as_said_of(finding: Finding, certificates: str | None) -> Finding:
    """Return a finding as it speaks of these certificates: an attack on others tested none of them."""
    details = finding.details
    if not isinstance(details, CertificateDetails) or details.certificates in (None, certificates):
        return finding
    if finding.verdict is Verdict.REFUTED:
        return finding
    return finding.replace(verdict=Verdict.NOT_TESTED, details=details.replace(could_not_refute=OF_OTHER_CERTIFICATES))


def recheck(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings as their own numbers have them: one that says consistent of nothing is not tested.

    For files that were written before this was checked, or by a program that does not.
    """
    return tuple(_recheck(finding) for finding in findings)


def _recheck(finding: Finding) -> Finding:
    details, reason = finding.details, ""
    if isinstance(details, CertificateDetails) and not details.attacked:
        reason = "no input has a certified ball"
    elif isinstance(details, MembershipDetails):
        needed = details.targets_needed
        if details.claimed_epsilon is None:
            reason = "nothing is claimed"
        elif needed is not None and details.num_targets < needed:
            reason = f"fewer than {needed} attacked models can never refute it"
    if not reason or finding.verdict is not Verdict.CONSISTENT:
        return finding
    return finding.replace(verdict=Verdict.NOT_TESTED, details=details.replace(could_not_refute=reason))


def overall_verdict(claims: Sequence[Claim], findings: Sequence[Finding]) -> Verdict:
    """Return what all findings say of all claims: consistent only if every one of them was tested.

    A finding that refutes counts even if its claim is gone, as when the run was certified in another way since.
    """
    if any(finding.verdict is Verdict.REFUTED for finding in findings):
        return Verdict.REFUTED
    tested = [claim.verdict is not Verdict.NOT_TESTED for claim in claims]
    if not any(tested):
        return Verdict.NOT_TESTED
    return Verdict.CONSISTENT if all(tested) else Verdict.PARTLY_TESTED


def untested(claims: Iterable[Claim]) -> list[str]:
    """Name each claim that was not tested, with the reason."""
    return [f"{name_of(claim)} ({claim.reason})" for claim in claims if claim.verdict is Verdict.NOT_TESTED]


def name_of(claim: Claim | Finding) -> str:
    return claim.about if claim.about == PRIVACY else f"certificates by the {claim.about} rule"


def _judge(about: str, status: Status, findings: list[Finding]) -> Claim:
    verdicts = {finding.verdict for finding in findings}
    verdict = next((v for v in (Verdict.REFUTED, Verdict.CONSISTENT) if v in verdicts), Verdict.NOT_TESTED)
    if verdict is not Verdict.NOT_TESTED:
        return Claim(about=about, status=status, verdict=verdict)
    reasons = [finding.details.could_not_refute or finding.statement for finding in findings]
    reason = "; ".join(reasons) or "no instrument was used on it"
    return Claim(about=about, status=status, verdict=verdict, reason=reason)
