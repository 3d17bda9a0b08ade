"""What the report knows of a run: the documents that its verbs left, and simple questions to them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from stobatch.dp.guarantee import PrivacyGuarantee
from stobatch.errors import RunError
from stobatch.registry import METHODS
from stobatch.reporting.format import unit
from stobatch.reporting.tables import kind_unit
from stobatch.results import (
    CERTIFICATES,
    WORST,
    AttackedShare,
    Audit,
    CertificateSummary,
    Claim,
    Finding,
    Gap,
    Kind,
    Manifest,
    PlanDocument,
    ProtocolTable,
    SameImages,
    Scores,
    Share,
    ShareAt,
    StartedRun,
    Training,
    Verification,
    at_radius,
    judge_claims,
    recheck,
)
from stobatch.runs import Run
from stobatch.types import Status, Verdict

NOT_LOOKED_FOR = "test records are not training records; nobody looked for copies"
"""Of scores that were written before anyone did."""


@dataclass(frozen=True)
class Facts:
    """A run's public files, read once. Under `private/` only pictures are ever opened, where they may be shown."""

    run: Run
    started: StartedRun
    scores: Scores
    training: Training | None
    plan: PlanDocument | None
    audit: Audit | None
    certificates_are_stale: bool
    manifest: Manifest | None = None
    provenance: Verification | None = None
    """What `verify` said of the run; None where it was not asked."""
    is_old: bool = False
    """Whether an older version made the run, so that it could not be verified."""

    @classmethod
    def read(cls, run: Run) -> Facts:
        scores, started = _scores(run), StartedRun.read(run)
        if scores.training_hash != started.training_hash:
            raise RunError(
                f"{run.path / 'scores.json'} is of configuration {scores.training_hash}, the run is "
                f"{started.training_hash}.",
                remedy=f"Evaluate again: `{_command('evaluate', run)}`.",
            )
        audit = Audit.read_if_there(run)
        if audit is not None and audit.training_hash != started.training_hash:
            raise RunError(
                f"{run.path / 'audit.json'} is of configuration {audit.training_hash}, the run is "
                f"{started.training_hash}.",
                remedy=f"Remove it and audit again: `{_command('audit', run)}`.",
            )
        latest = CertificateSummary.read_if_there(run)
        stale = latest is not None and latest != scores.certificates
        training, plan = Training.read_if_there(run), PlanDocument.read_if_there(run)
        return cls(run, started, scores, training, plan, audit, stale, Manifest.read_if_there(run))

    @property
    def name(self) -> str:
        return self.run.path.resolve().name

    @property
    def evaluate_command(self) -> str:
        return _command("evaluate", self.run)

    @property
    def method(self) -> str:
        """Return the method's name as people read it."""
        return METHODS.shown(self.started.method)

    @property
    def seed(self) -> int | None:
        return self.started.seed

    @property
    def setting(self) -> str:
        """Return what was trained, without the seed, the machine and how it was measured."""
        parts = ("method", "data", "model", "training")
        return json.dumps({part: self.started.config.get(part) for part in parts}, sort_keys=True)

    @property
    def findings(self) -> tuple[Finding, ...]:
        return recheck(self.audit.findings) if self.audit else ()

    @property
    def claims(self) -> list[Claim]:
        """Return every claim of the run as it is now, with what audits say of it."""
        kinds, made_by = (self.certificates.kinds, self.certificates.config_hash) if self.certificates else ((), None)
        return judge_claims(self.scores.guarantee.status, kinds, self.findings, made_by)

    @property
    def guarantee(self) -> PrivacyGuarantee:
        """Return what the evaluation recorded, void where the seed is public, in the light of all audits so far."""
        held = self.scores.guarantee
        held = held if self.seed is None else held.with_public_seed()
        return held if self.audit is None else held.audited(self.findings)

    @property
    def status(self) -> Status:
        return self.guarantee.status

    @property
    def epsilon(self) -> float | None:
        """Return the budget, to be shown with its status only; None where nothing is promised."""
        return None if self.status is Status.NONE else self.guarantee.epsilon

    @property
    def unit(self) -> str:
        return unit(self.scores.norm, self.scores.input_range)

    @property
    def test_records(self) -> str:
        """Return what accuracies assume of the test data."""
        return self.scores.test_records or NOT_LOOKED_FOR

    @property
    def certificates(self) -> CertificateSummary | None:
        return self.scores.certificates

    @property
    def functions(self) -> list[str]:
        return list(dict.fromkeys(entry.function for entry in self.scores.under_attack))

    @property
    def protocols(self) -> list[str]:
        return list(dict.fromkeys(entry.protocol.name for entry in self.scores.under_attack))

    @property
    def main_function(self) -> str:
        return "single_pass" if "single_pass" in self.functions else self.functions[0]

    @property
    def radii(self) -> list[float]:
        return sorted({row.radius for entry in self.scores.under_attack for row in entry.accuracy})

    @property
    def main_radius(self) -> float:
        """Return the smallest measured radius not below the one trained for; the middle one where there is none."""
        aim = self.started.trained_radius if self.unit == unit("linf", "[-1, 1]") else None
        if aim is None:
            return middle(self.radii)
        return next((radius for radius in self.radii if radius >= aim), self.radii[-1])

    def entry(self, protocol: str, function: str) -> ProtocolTable | None:
        wanted = (protocol, function)
        return next((e for e in self.scores.under_attack if (e.protocol.name, e.function) == wanted), None)

    def same_images(self, function: str) -> SameImages:
        """Return accuracies of a function that may stand side by side, since all are of the same test images."""
        recorded = (block for block in self.scores.same_images if block.function == function)
        return next(recorded, None) or self._same_numbers(function)

    def _same_numbers(self, function: str) -> SameImages:
        """Return the same numbers from scores of an older version: certificates of other image counts are left out."""
        entries = [entry for entry in self.scores.under_attack if entry.function == function]
        rows = entries[0].rows
        kinds = self.kinds(function) if self.certificates and self.certificates.rows == rows else []
        return SameImages(
            function=function,
            rows=rows,
            clean_accuracy=entries[0].clean_accuracy,
            attacked={e.protocol.name: tuple(map(_share_at, e.of_attack(WORST))) for e in entries},
            gaps=self.scores.gaps.get(function, ()),
            certified={kind.name: self.all_certified(kind) for kind in kinds},
        )

    def clean(self, function: str) -> Share:
        return self.same_images(function).clean_accuracy

    def worst(self, protocol: str, function: str) -> list[ShareAt]:
        """Return accuracy under the worst attack for each example, smallest radius first; empty if not measured."""
        rows = self.same_images(function).attacked.get(protocol, ())
        return sorted(rows, key=lambda row: row.radius)

    def gap(self, function: str, radius: float) -> Gap | None:
        return at_radius(self.same_images(function).gaps, radius)

    def kinds(self, function: str) -> list[Kind]:
        """Return the kinds of certificate that speak about this function, in the units of the attacks."""
        return [k for k in self.all_kinds if k.function == function and kind_unit(k) == self.unit]

    @property
    def all_kinds(self) -> list[Kind]:
        """Return every kind of certificate, refuted where an audit broke it."""
        refuted = {
            finding.about
            for finding in self.findings
            if finding.instrument == CERTIFICATES and finding.verdict is Verdict.REFUTED
        }
        kinds = self.certificates.kinds if self.certificates else ()
        return [kind.replace(status=Status.REFUTED) if kind.name in refuted else kind for kind in kinds]

    def proved(self, function: str, radius: float) -> ShareAt | None:
        """Return certified accuracy at a radius by a kind of certificate that is proved; None if there is none."""
        kinds = [kind for kind in self.kinds(function) if kind.status is Status.PROVED]
        return at_radius(self.certified(kinds[0]), radius) if kinds else None

    def certified(self, kind: Kind) -> tuple[ShareAt, ...]:
        """Return certified accuracy of the images whose attacked accuracy is shown with it; empty if there are none."""
        if kind.function not in self.functions:
            return ()
        return self.same_images(kind.function).certified.get(kind.name, ())

    def all_certified(self, kind: Kind) -> tuple[ShareAt, ...]:
        """Return certified accuracy of all images that were certified."""
        assert self.certificates is not None
        return self.certificates.certified_accuracy[kind.name]


def _share_at(row: AttackedShare) -> ShareAt:
    return ShareAt(radius=row.radius, value=row.value, count=row.count, total=row.total, low=row.low, high=row.high)


def middle(radii: Sequence[float]) -> float:
    return radii[(len(radii) - 1) // 2]


def common_function(runs: Sequence[Facts]) -> str:
    """Return a function that all runs were attacked on; empty where there is none."""
    functions = [f for f in runs[0].functions if all(f in other.functions for other in runs)]
    return runs[0].main_function if runs[0].main_function in functions else (functions or [""])[0]


def common_radii(runs: Sequence[Facts]) -> list[float]:
    """Return the radii that all runs were attacked at, the main one first; none where functions or units differ."""
    radii = sorted(set.intersection(*(set(facts.radii) for facts in runs)))
    if not radii or not common_function(runs) or len({facts.unit for facts in runs}) > 1:
        return []
    main = min(radii, key=lambda radius: abs(radius - runs[0].main_radius))
    return [main, *(radius for radius in radii if radius != main)]


def _command(verb: str, run: Run) -> str:
    return f"stobatch {verb} {shlex.quote(str(run.path))}"


def _scores(run: Run) -> Scores:
    if not run.exists:
        raise RunError(f"{run.path} is not a run.", remedy="Train first: `stobatch train --recipe demo --out RUN`.")
    if not run.has("scores"):
        raise RunError(f"{run.path} has no scores yet.", remedy=f"Evaluate it first: `{_command('evaluate', run)}`.")
    scores = run.read("scores")
    if "under_attack" not in scores:
        raise RunError(
            f"{run.path / 'scores.json'} was written by another version of stobatch.",
            remedy=f"Evaluate again: `{_command('evaluate', run)}`.",
        )
    return Scores.from_dict(scores, run.path / "scores.json")
