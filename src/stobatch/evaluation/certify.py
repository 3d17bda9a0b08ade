"""`certify`: labels with certified radii on the test set."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stobatch.data import Dataset, Examples
from stobatch.errors import UnitError
from stobatch.evaluation.summaries import certificate_summary
from stobatch.evaluation.tables import RowsOf, about_prior, begin, end, open_run, tabulate, test_examples
from stobatch.files import Columns
from stobatch.loading import TrainedModel, model_of_prior
from stobatch.progress import Tick
from stobatch.results import CertificateSummary, PriorCertificates
from stobatch.sound.verifiers import best_of
from stobatch.verifier import Verifier


def certify(
    run: str | Path,
    *,
    overrides: dict[str, Any] | None = None,
    dataset: Dataset | None = None,
    network: nn.Module | None = None,
    seed: int | None = None,
    resume: bool = False,
    quiet: bool = False,
    device: str | None = None,
) -> CertificateSummary:
    """Certify the test set by the best of the model's ways: one row per example, and a summary."""
    model = open_run(run, overrides, network, device)
    with model.run.held():
        return _certify(model, dataset, seed=seed, resume=resume, quiet=quiet)


def _certify(
    model: TrainedModel, dataset: Dataset | None, *, seed: int | None, resume: bool, quiet: bool
) -> CertificateSummary:
    settings, verifiers = model.config.certification, model.verifiers()
    norm = model.config.evaluation.norm
    if any(kind.unit.norm != norm for verifier in verifiers for kind in verifier.kinds):
        raise UnitError(
            f"this method certifies in {verifiers[0].kinds[0].unit.norm}, radii in {norm} are asked about.",
            remedy=f"Ask in its norm: evaluation.norm={verifiers[0].kinds[0].unit.norm}.",
        )
    begin(model, "certificates.json")
    test = test_examples(model, dataset, settings.limit, quiet)
    asked = {"norm": norm, "radii": list(model.config.evaluation.radii)}
    if len(verifiers) > 1 and not quiet:
        names = " and ".join(one.kinds[0].name for one in verifiers)
        print(f"comparing {names} on a few inputs ...", file=sys.stderr, flush=True)
    verifier, chosen = best_of(verifiers, test.inputs.to(model.network.device), model.config.evaluation.radii)

    started = time.monotonic()
    identity, columns = tabulate(
        *("certify", model, {**settings.to_dict(), **asked}, test, _rows_by(verifier)),
        seed=seed, resume=resume, quiet=quiet,
    )  # fmt: skip
    own = _prior(model, verifier, test, {**settings.to_dict(), **asked}, seed=seed, resume=resume, quiet=quiet)
    summary = CertificateSummary(
        config_hash=identity,
        training_hash=model.config.training_hash,
        weights_sha256=model.weights_sha256,
        settings=settings.to_dict(),
        rows=len(test),
        seconds=round(time.monotonic() - started, 1),
        **dict(certificate_summary(columns, verifier.kinds, model.config.evaluation.radii)),
        chosen=chosen,
    )
    if own is not None:
        summary = summary.replace(prior=own)
    summary.write(model.run)
    end(model, "certify", quiet=quiet)
    return summary


def _rows_by(verifier: Verifier) -> RowsOf:
    def rows_of(part: Examples, generator: torch.Generator, tick: Tick) -> Columns:
        verdicts = {name: column.tolist() for name, column in verifier.verify(part.inputs, generator).columns().items()}
        return {"label": part.labels.tolist(), "prediction": verdicts.pop("label"), **verdicts}

    return rows_of


def _prior(
    model: TrainedModel,
    chosen: Verifier,
    test: Examples,
    settings: dict[str, Any],
    *,
    seed: int | None,
    resume: bool,
    quiet: bool,
) -> PriorCertificates | None:
    """Return what the weights that a run started from are worth by themselves, certified in the same way."""
    start = model_of_prior(model)
    if start is None:
        return None
    verifier = next(way for way in start.verifiers() if way.kinds[0].name == chosen.kinds[0].name)
    identity, columns = tabulate(
        *("certify", start, settings, test, _rows_by(verifier)),
        title="certify the prior", seed=seed, resume=resume, quiet=quiet,
    )  # fmt: skip
    return PriorCertificates(
        **about_prior(start),
        config_hash=identity,
        rows=len(test),
        **dict(certificate_summary(columns, verifier.kinds, model.config.evaluation.radii)),
    )
