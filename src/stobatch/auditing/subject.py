"""An opened run, or a configuration without a model, and what all instruments do with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from torch import Tensor, nn

from stobatch.auditing.lower_bounds import require_enough_trainings
from stobatch.config import AuditConfig, RunConfig
from stobatch.data import Dataset, DatasetInfo, Examples
from stobatch.dp.guarantee import PrivacyGuarantee
from stobatch.dp.plan import DpSgdPlan, Plan
from stobatch.errors import RunError, SettingError
from stobatch.evaluation.tables import PartOf, fill, read_data
from stobatch.files import Columns
from stobatch.loading import TrainedModel, make_network, make_plan, read_start
from stobatch.methods import method_of
from stobatch.models import Classifier
from stobatch.runs import Run
from stobatch.seeds import Seeds
from stobatch.settings import content_hash
from stobatch.training import Trainable
from stobatch.training_run import write_start
from stobatch.types import Status
from stobatch.votes.confidence import Floats


@dataclass(frozen=True)
class Audited:
    """An opened run, or a configuration without a model: what every instrument works on."""

    run: Run
    config: RunConfig
    info: DatasetInfo
    plan: Plan
    claim: PrivacyGuarantee
    seeds: Seeds
    model: TrainedModel | None
    dataset: Dataset | None
    network: nn.Module | None
    seed: int | None
    resume: bool
    quiet: bool
    num_tests: int = 1
    """Claims that are tested in one call: together they raise a false alarm as rarely as one is allowed to."""

    @property
    def confidence(self) -> float:
        """Return the confidence of each test, so that all hold at once with the one asked for (Bonferroni)."""
        return 1 - (1 - self.settings.confidence) / self.num_tests

    @property
    def settings(self) -> AuditConfig:
        return self.config.audit

    @property
    def weights_sha256(self) -> str | None:
        """Return the digest of the audited model; None for settings that nothing was trained with."""
        return self.model.weights_sha256 if self.model else None

    @property
    def root(self) -> Seeds:
        """Return the source of the audit's own randomness, never that of the training itself."""
        return (self.seeds if self.seed is None else Seeds.reproducible(self.seed)).child("audit")

    def data(self) -> Dataset:
        return self.dataset or read_data(self.config, self.seeds, self.quiet)

    def trained(self) -> TrainedModel:
        if self.model is None:
            raise RunError(
                f"{self.run.path} is not trained.",
                remedy="Train it first, or audit its settings: audit.instruments=many_runs.",
            )
        return self.model

    def table(self, name: str, identity: object, total: int, tile: int, rows_of: PartOf) -> Columns:
        """Return a private table of the audit, made or completed: what single trainings leaked stays with the owner."""
        if self.model is None:
            # Here and no sooner: an instrument that refuses its settings leaves nothing behind.
            write_start(self.run, self.config, self.info, self.plan, self.seeds)
        weights = self.weights_sha256
        key = content_hash([self.config.training_hash, weights, name, identity, self.seed])
        records = self.run.records(
            f"audit-{name}", config_hash=key, expected_rows=total, private=True, weights_sha256=weights
        )
        fill(records, total, tile, rows_of, title=name.replace("_", " "), resume=self.resume, quiet=self.quiet)
        return records.read()

    def fresh(self, plan: Plan, train: Examples, seeds: Seeds) -> Trainable:
        """Return a new training with these records and secrets."""
        network = self.fresh_network(seeds).to(self.config.machine.device)
        return method_of(self.config).prepare(self.config, plan, network, train, seeds)

    def fresh_network(self, seeds: Seeds) -> Classifier:
        """Return a network as this training would start with, from the same prior if it has one."""
        return make_network(self.config, self.info, seeds, self.network, self.start)

    @cached_property
    def start(self) -> Mapping[str, Tensor] | None:
        """Return the weights of the run's prior."""
        return read_start(self.config, self.run)

    def plan_for(self, size: int, num_persons: int | None = None) -> Plan:
        info = replace(self.info, num_train=size, num_persons=num_persons)
        return make_plan(self.config, info, self.network)

    @property
    def canary_records(self) -> int:
        """Return the number of records of a canary: one, or the most that a step draws of a person."""
        if self.info.num_persons is None or not isinstance(self.plan, DpSgdPlan):
            return 1
        return self.plan.records_per_person


def require_claim(audited: Audited) -> None:
    if audited.claim.status is Status.NONE:
        raise SettingError(
            f"this method claims no privacy ({audited.claim.source}), so there is nothing to refute.",
            remedy="Audit with membership, which measures what leaks under any claim.",
        )


def require_enough(trials: int, audited: Audited) -> None:
    """Raise unless counting alone could refute the claim, or with a known curve anything at all."""
    known = audited.plan.curve is not None
    require_enough_trainings(
        trials // 2,
        0.0 if known else audited.claim.epsilon,
        delta=audited.claim.delta,
        confidence=audited.confidence,
        bounds=2 if known else 1,
    )


def scores_by_world(table: Columns) -> tuple[Floats, Floats]:
    world, score = np.asarray(table["world"]), np.asarray(table["score"], dtype=np.float64)
    return score[world == 0], score[world == 1]
