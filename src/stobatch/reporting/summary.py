"""What the report knows of a run: the files that its verbs left, and simple questions to them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from stobatch.dp.guarantee import PrivacyGuarantee
from stobatch.errors import RunError
from stobatch.registry import METHODS
from stobatch.reporting.format import unit
from stobatch.results import judge_claims, recheck
from stobatch.runs import Run
from stobatch.types import Status, Verdict

Row = dict[str, Any]


@dataclass(frozen=True)
class Facts:
    """A run's public files, read once. Under `private/` only pictures are ever opened, where they may be shown."""

    run: Run
    config: dict[str, Any]
    scores: dict[str, Any]
    training: dict[str, Any] | None
    plan: dict[str, Any] | None
    audit: dict[str, Any] | None
    certificates_are_stale: bool
    manifest: dict[str, Any] | None = None
    provenance: dict[str, Any] | None = None
    """What `verify` said of the run; None where it was not asked."""

    @classmethod
    def read(cls, run: Run) -> Facts:
        scores, config = _scores(run), run.read("config")
        if scores["training_hash"] != config["training_hash"]:
            raise RunError(
                f"{run.path / 'scores.json'} is of configuration {scores['training_hash']}, the run is "
                f"{config['training_hash']}.",
                remedy=f"Evaluate again: `{_command('evaluate', run)}`.",
            )
        audit = _if_there(run, "audit")
        if audit is not None and audit["training_hash"] != config["training_hash"]:
            raise RunError(
                f"{run.path / 'audit.json'} is of configuration {audit['training_hash']}, the run is "
                f"{config['training_hash']}.",
                remedy=f"Remove it and audit again: `{_command('audit', run)}`.",
            )
        latest = _if_there(run, "certificates")
        stale = latest is not None and latest != scores["certificates"]
        training, plan, manifest = (_if_there(run, kind) for kind in ("training", "plan", "manifest"))
        return cls(run, config, scores, training, plan, audit, stale, manifest)

    @property
    def name(self) -> str:
        return self.run.path.resolve().name

    @property
    def evaluate_command(self) -> str:
        return _command("evaluate", self.run)

    @property
    def method(self) -> str:
        """The method's name as people read it."""
        return METHODS.shown(str(self.config["config"]["method"]["name"]))

    @property
    def seed(self) -> int | None:
        seed: int | None = self.config["config"]["seed"]
        return seed

    @property
    def setting(self) -> str:
        """What was trained, whatever the seed, the machine and the way it was measured."""
        parts = ("method", "data", "model", "training")
        return json.dumps({part: self.config["config"].get(part) for part in parts}, sort_keys=True)

    @property
    def findings(self) -> list[dict[str, Any]]:
        return recheck(self.audit["findings"]) if self.audit else []

    @property
    def claims(self) -> list[dict[str, Any]]:
        """Every claim of the run as it is now, with what audits say of it."""
        kinds = self.certificates["kinds"] if self.certificates else []
        return judge_claims(self.scores["guarantee"]["status"], kinds, self.findings)

    @property
    def guarantee(self) -> dict[str, Any]:
        """What the evaluation recorded, void where the seed is public, in the light of audits before it or since."""
        held = PrivacyGuarantee.from_dict(self.scores["guarantee"])
        held = held if self.seed is None else held.with_public_seed()
        return (held if self.audit is None else held.audited(self.findings)).to_dict()

    @property
    def status(self) -> str:
        return str(self.guarantee["status"])

    @property
    def epsilon(self) -> float | None:
        """The budget, to be shown with its status only."""
        epsilon: float | None = self.guarantee.get(f"{self.status}_epsilon")
        return epsilon

    @property
    def unit(self) -> str:
        return unit(self.scores["norm"], self.scores["input_range"])

    @property
    def certificates(self) -> dict[str, Any] | None:
        found: dict[str, Any] | None = self.scores["certificates"]
        return found

    @property
    def functions(self) -> list[str]:
        return list(dict.fromkeys(entry["function"] for entry in self.scores["under_attack"]))

    @property
    def protocols(self) -> list[str]:
        return list(dict.fromkeys(entry["protocol"]["name"] for entry in self.scores["under_attack"]))

    @property
    def main_function(self) -> str:
        return "single_pass" if "single_pass" in self.functions else self.functions[0]

    @property
    def radii(self) -> list[float]:
        return sorted({row["radius"] for entry in self.scores["under_attack"] for row in entry["accuracy"]})

    def entry(self, protocol: str, function: str) -> dict[str, Any] | None:
        wanted = (protocol, function)
        return next((e for e in self.scores["under_attack"] if (e["protocol"]["name"], e["function"]) == wanted), None)

    def same_images(self, function: str) -> Row:
        """Accuracies of a function that may stand side by side, since all are of the same test images."""
        recorded = (block for block in self.scores.get("same_images", ()) if block["function"] == function)
        return next(recorded, None) or self._same_numbers(function)

    def _same_numbers(self, function: str) -> Row:
        """The same from scores of an older version: certificates for another number of images are left out."""
        entries = [entry for entry in self.scores["under_attack"] if entry["function"] == function]
        rows = entries[0]["rows"]
        kinds = self.kinds(function) if self.certificates and self.certificates["rows"] == rows else []
        return {
            "rows": rows,
            "clean_accuracy": entries[0]["clean_accuracy"],
            "attacked": {e["protocol"]["name"]: of_attack(e["accuracy"], "worst") for e in entries},
            "gaps": self.scores["gaps"].get(function, []),
            "certified": {kind["name"]: self.all_certified(kind) for kind in kinds},
        }

    def clean(self, function: str) -> Row:
        share: Row = self.same_images(function)["clean_accuracy"]
        return share

    def worst(self, protocol: str, function: str) -> list[Row]:
        """Accuracy under the worst attack for each example, smallest radius first; empty if it was not measured."""
        found: list[Row] = self.same_images(function)["attacked"].get(protocol, [])
        return sorted(found, key=lambda row: float(row["radius"]))

    def gap(self, function: str, radius: float) -> Row | None:
        return at_radius(self.same_images(function)["gaps"], radius)

    def kinds(self, function: str) -> list[dict[str, Any]]:
        """The kinds of certificate that speak about this function, in the units of the attacks."""
        return [k for k in self.all_kinds if k["function"] == function and kind_unit(k) == self.unit]

    @property
    def all_kinds(self) -> list[dict[str, Any]]:
        """Every kind of certificate, refuted where an audit broke it."""
        refuted = {
            finding["about"]
            for finding in self.findings
            if finding["instrument"] == "certificates" and finding["verdict"] == Verdict.REFUTED
        }
        kinds = self.certificates["kinds"] if self.certificates else []
        return [kind | {"status": str(Status.REFUTED)} if kind["name"] in refuted else kind for kind in kinds]

    def proved(self, function: str, radius: float) -> Row | None:
        """Certified accuracy at a radius by a kind of certificate that is proved; None if there is none."""
        kinds = [kind for kind in self.kinds(function) if kind["status"] == "proved"]
        return at_radius(self.certified(kinds[0]), radius) if kinds else None

    def certified(self, kind: dict[str, Any]) -> list[Row]:
        """Certified accuracy of the images whose attacked accuracy stands beside it; empty where there are none."""
        if kind["function"] not in self.functions:
            return []
        rows: list[Row] = self.same_images(kind["function"])["certified"].get(kind["name"], [])
        return rows

    def all_certified(self, kind: dict[str, Any]) -> list[Row]:
        """Certified accuracy of all images that were certified."""
        assert self.certificates is not None
        rows: list[Row] = self.certificates["certified_accuracy"][kind["name"]]
        return rows


def kind_unit(kind: dict[str, Any]) -> str:
    return unit(kind["norm"], kind["input_range"])


def of_attack(rows: Iterable[Row], attack: str) -> list[Row]:
    return sorted((row for row in rows if row["attack"] == attack), key=lambda row: row["radius"])


def at_radius(rows: Iterable[Row], radius: float) -> Row | None:
    return next((row for row in rows if row["radius"] == radius), None)


def middle(radii: list[float]) -> float:
    return radii[(len(radii) - 1) // 2]


def _command(verb: str, run: Run) -> str:
    return f"stobatch {verb} {shlex.quote(str(run.path))}"


def _if_there(run: Run, kind: str) -> dict[str, Any] | None:
    return run.read(kind) if run.has(kind) else None


def _scores(run: Run) -> dict[str, Any]:
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
    return scores
