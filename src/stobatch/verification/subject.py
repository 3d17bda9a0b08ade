"""What is verified: a run directory, its documents, and its model where it can be loaded."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from stobatch.config import EvaluationConfig, RunConfig
from stobatch.data import DatasetInfo
from stobatch.dp.guarantee import PrivacyGuarantee
from stobatch.errors import RunError
from stobatch.evaluation.accuracy import AttackedTable
from stobatch.evaluation.functions import Deployed, SinglePass, Vote
from stobatch.evaluation.protocols import PROTOCOLS, radii_of
from stobatch.files import Columns, Limits
from stobatch.loading import TrainedModel, as_certified
from stobatch.results import (
    CertificateSummary,
    DataDigests,
    PriorCertificates,
    ProbeRecords,
    ProtocolTable,
    StartedRun,
    Training,
)
from stobatch.runs import Run
from stobatch.sound.verifiers import BoundsVerifier
from stobatch.verifier import Verifier

FUNCTIONS: dict[str, Any] = {"single_pass": SinglePass, "vote": Vote}


@dataclass(frozen=True)
class Subject:
    """A trained run, opened for checking; nothing in it is believed because a document says so."""

    run: Run
    model: TrainedModel
    handed_over: bool = False
    """Whether the network is one that the reader handed over."""

    @property
    def config(self) -> RunConfig:
        return self.model.config

    @cached_property
    def info(self) -> DatasetInfo:
        return DatasetInfo.from_dict(StartedRun.read(self.run).dataset.to_dict())

    @cached_property
    def training(self) -> Training:
        return Training.read(self.run)

    @property
    def data(self) -> DataDigests:
        """Return what training.json says of the data; raise where it says nothing, as no training with digests does."""
        if self.training.data is None:
            raise RunError(f"{self.run.path / 'training.json'} names no data.", remedy="Restore it, or train again.")
        return self.training.data

    @cached_property
    def claim(self) -> PrivacyGuarantee:
        """Return the claim from configuration and counts alone."""
        return self.model.claim

    @property
    def unaudited(self) -> PrivacyGuarantee:
        """Return the claim, void where the seed is public, before any audit."""
        return self.claim.with_public_seed() if self.model.plan.public_seeds else self.claim

    @property
    def guarantee(self) -> PrivacyGuarantee:
        return self.model.guarantee

    def as_certified(self, document: CertificateSummary) -> tuple[Verifier, RunConfig]:
        """Return the verifier that a document of certificates names, made by code from its settings."""
        config = as_certified(self.config, document)
        return next(way for way in self._verifiers(config) if way.kinds[0].name == document.kinds[0].name), config

    @cached_property
    def _verifiers_by_config(self) -> dict[RunConfig, tuple[Verifier, ...]]:
        return {}

    def _verifiers(self, config: RunConfig) -> tuple[Verifier, ...]:
        """Return the model's verifiers under these settings, which several documents have in common."""
        if config not in self._verifiers_by_config:
            model = TrainedModel(self.model.network, config, self.model.plan, self.run, self.model.accounted_steps)
            self._verifiers_by_config[config] = model.verifiers()
        return self._verifiers_by_config[config]

    def rows(self, verb: str, identity: str, count: int, weights: str | None, limits: Limits) -> Columns:
        records = self.run.records(verb, config_hash=identity, expected_rows=count, weights_sha256=weights)
        return records.read(limits)

    def certified_rows(self, document: CertificateSummary | PriorCertificates, verifier: Verifier) -> Columns:
        """Return the rows behind certificates, with radii that a verifier could have given."""
        # Bounds are asked about given radii and prove no others.
        largest = max(verifier.radii) if isinstance(verifier, BoundsVerifier) else float("inf")
        radii = {kind.column: largest for kind in verifier.kinds}

        def limits(column: str) -> tuple[float, float] | None:
            return (0.0, radii[column]) if column in radii else self._column_range(column)

        return self.rows("certify", document.config_hash, document.rows, document.weights_sha256, limits)

    def attacked_table(self, entry: ProtocolTable, settings: EvaluationConfig, weights: str | None) -> AttackedTable:
        """Return the table behind one protocol on one function; attacks and radii follow from the settings."""
        protocol, function = entry.protocol.name, entry.function
        columns = self.rows("attack", entry.records, entry.rows, weights, self._attack_column_range)
        kind: Deployed = FUNCTIONS[function]
        names = PROTOCOLS[protocol](settings).attack_names(kind)
        radii = tuple(radii_of(settings, prod(self.info.input_shape)))
        rules: tuple[str, ...] = ()
        if function == "vote":
            ways = self._verifiers(self.config.replace(evaluation=settings))
            voting = next(way for way in ways if way.function == "vote")
            rules = tuple(one.name for one in voting.kinds)
        return AttackedTable(protocol, function, names, radii, columns, rules, entry.records)

    def probe_rows(self, probe: ProbeRecords, weights: str | None) -> Columns:
        return self.rows("probe", probe.records, probe.rows, weights, lambda column: self._column_range(column, True))

    def _column_range(self, column: str, classes: bool = False) -> tuple[float, float] | None:
        if column in ("label", "prediction") or (classes and column != "index"):
            return 0, self.info.num_classes - 1
        return (0, 1) if column in ("abstain", "top_lower") else None

    def _attack_column_range(self, column: str) -> tuple[float, float] | None:
        """Return the range of an attack's column: `attack@radius` is a class, others are distances or votes."""
        name, _, part = column.partition("/")
        if "@" not in name:
            return self._column_range(column)
        if not part:
            return 0, self.info.num_classes - 1
        if part == "distance":
            # As measured in float64, where a float32 point may lie a little outside.
            return 0.0, float(name.rpartition("@")[2]) * (1 + 1e-5) + 1e-6
        return (0, 1) if part == "abstain" else (0.0, float("inf"))


def other_run(subject: Subject, training_hash: str, weights_sha256: str | None) -> str:
    """Return what shows that a document is about something else; nothing where it is about this run."""
    if training_hash != subject.config.training_hash:
        return f"its training_hash is {training_hash}, that of the run is {subject.config.training_hash}"
    if weights_sha256 != subject.model.weights_sha256:
        return f"its weights_sha256 is {weights_sha256}, that of the run is {subject.model.weights_sha256}"
    return ""
