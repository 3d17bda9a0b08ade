"""What `certify` left, attacked inside every ball that is near a border."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from stobatch.auditing.falsifier import COLUMNS, Certificates, FalsifierSettings, falsify, finding_of, nearest
from stobatch.auditing.finding import Finding
from stobatch.certification import CertificateKind, Verifier
from stobatch.config import CertificationConfig, RunConfig
from stobatch.data import Examples
from stobatch.errors import DataError, RunError
from stobatch.files import as_written, write_tensors
from stobatch.verbs.instruments.audited import Audited
from stobatch.verbs.tables import Columns, Tick, test_examples

_BALLS_AT_ONCE = 50
_NOTHING: Columns = {name: [] for name in (*COLUMNS, "row", "point")}


def of_certificates(audited: Audited) -> list[Finding]:
    """Every kind of certificate that `certify` left, attacked inside the balls nearest to a border."""
    trained, run = audited.trained(), audited.run
    if not run.has("certificates"):
        raise RunError(f"{run.path} is not certified.", remedy=f"Certify it first: `{run.command('certify')}`.")
    document = run.read("certificates")
    with as_written(run.path / "certificates.json"):
        model = replace(trained, config=_as_certified(audited.config, document))
        made_by, chosen = document["config_hash"], document["kinds"][0]["name"]
        records = run.records("certify", config_hash=made_by, expected_rows=document["rows"]).read()
    test = test_examples(model, audited.dataset, document["rows"], audited.quiet)
    if test.labels.tolist() != records["label"]:
        raise DataError(
            f"the certificates in {run.path} are for other test data.", remedy="Certify the same data first."
        )
    ways = {way.kinds[0].name: way for way in model.verifiers()}
    if chosen not in ways:
        raise RunError(f"{run.path / 'certificates.json'} names no certificate of this model.", remedy="Certify again.")
    verifier = ways[chosen]
    return [_Falsified(audited, verifier, kind, test, records, made_by).finding() for kind in verifier.kinds]


def _as_certified(config: RunConfig, document: dict[str, Any]) -> RunConfig:
    """The settings that the certificates were made with, whatever the run's own are."""
    kind = document["kinds"][0]
    radii = tuple(row["radius"] for row in document["certified_accuracy"][kind["name"]])
    return config.replace(
        certification=CertificationConfig.from_dict(document["settings"]),
        evaluation=config.evaluation.replace(norm=kind["norm"], radii=radii),
    )


@dataclass(frozen=True)
class _Falsified:
    """One kind of certificate under attack."""

    audited: Audited
    verifier: Verifier
    kind: CertificateKind
    test: Examples
    records: Columns
    certified_by: str

    @property
    def settings(self) -> FalsifierSettings:
        given = self.audited.settings
        return FalsifierSettings(
            num_inputs=given.num_inputs,
            steps=given.attack_steps,
            restarts=given.restarts,
            judging_draws=given.judging_draws,
            confidence=self.audited.confidence,
        )

    def finding(self) -> Finding:
        audited, settings = self.audited, self.settings
        memory_mb = audited.config.machine.memory_mb
        whole = Certificates.of(self.kind, self.test.inputs, self.records["prediction"], self.records)
        stream = audited.root.generator("certificates", self.kind.name)
        chosen = whole.part(nearest(self.verifier, whole, settings, stream, memory_mb=memory_mb))
        tests = len(chosen.index) * len(self.verifier.kinds)

        def rows_of(start: int, count: int, tick: Tick) -> Columns:
            part = chosen.part(np.arange(start, start + count))
            own = audited.root.generator("certificates", self.kind.name, start)
            attempt = falsify(self.verifier, part, settings, own, tests=tests, memory_mb=memory_mb, tick=tick)
            points: list[list[float] | None] = [None] * count
            for row, point in zip(np.flatnonzero(attempt.columns["broken"]), attempt.points, strict=True):
                points[row] = point.flatten().tolist()
            rest = {name: column for name, column in attempt.columns.items() if name != "index"}
            return {**rest, "row": attempt.columns["index"], "point": points}

        identity = [self.certified_by, settings.to_dict(), self.test.fingerprint()]
        name = f"certificates-{self.kind.name}"
        table = audited.table(name, identity, len(chosen.index), _BALLS_AT_ONCE, rows_of) if tests else _NOTHING
        self._keep_broken(table)
        return finding_of(
            self.kind, table, settings, certified=len(whole.certified()), num_kinds=len(self.verifier.kinds)
        )

    def _keep_broken(self, table: Columns) -> None:
        """The inputs whose certificate broke, and the points that broke it, for whoever wants to see it again."""
        broken = [row for row, point in enumerate(table["point"]) if point is not None]
        path = self.audited.run.path / "evidence" / f"certificates-{self.kind.name}.safetensors"
        path.unlink(missing_ok=True)
        if broken:
            which = torch.tensor([table["row"][row] for row in broken])
            shape = self.test.inputs.shape[1:]
            tensors = {
                "index": which,
                "input": self.test.inputs[which],
                "point": torch.tensor([table["point"][row] for row in broken]).reshape(-1, *shape),
                "radius": torch.tensor([table["radius"][row] for row in broken], dtype=torch.float64),
                "certified_label": torch.tensor([table["label"][row] for row in broken]),
            }
            write_tensors(path, tensors, {"config_hash": self.audited.config.training_hash}, private=False)
