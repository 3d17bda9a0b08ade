"""`compare`: several methods trained, certified and attacked by the same library, in one table."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from stobatch.comparison.plan import TEST_DATA, Compared, plan_comparison
from stobatch.config import RunConfig
from stobatch.data import Dataset
from stobatch.evaluation.attack import evaluate
from stobatch.evaluation.certify import certify
from stobatch.files import as_written, write_json
from stobatch.progress import say, spoken_time
from stobatch.reporting.comparison_document import build_comparison
from stobatch.reporting.summary import Facts
from stobatch.results import CertificateSummary, Comparison, Scores, Training
from stobatch.training_run import train

_SECTIONS = ("certification", "evaluation", "machine")
"""What a trained run takes from the configuration it is compared with, in place of its own."""


def compare(
    configs: Mapping[str, RunConfig],
    out: str | Path,
    *,
    seeds: Sequence[int] | None = None,
    repeats: int = 1,
    dataset: Dataset | None = None,
    networks: Mapping[str, nn.Module] | None = None,
    priors: Mapping[str, str | Path] | None = None,
    quiet: bool = False,
    device: str | None = None,
) -> Comparison:
    """Train, certify and evaluate every configuration, and put them side by side.

    Each is trained `repeats` times with secret seeds of its own; or, as an experiment whose privacy guarantees are
    void, once with each of the public `seeds`. `configs` maps the name of a row to a complete configuration, whose own
    seed does not matter; `networks` and `priors`, what a training starts from, go by the names of rows, too. Each
    training has its directory, `out/ROW/secret-1` or `out/ROW/seed-SEED`. What is there already is reused if it is the
    same training, measured the same way; so a call that was interrupted continues, and a second one only reads. Another
    training in a directory is refused.

    Writes `comparison.json` (which is returned), `comparison.html` and `comparison.svg`. The first radius of the
    configurations is the one that the figure shows.
    """
    from stobatch.reporting.comparison import write_comparison

    where = Path(out)
    compared = plan_comparison(configs, where, seeds, repeats, dataset, networks or {}, priors or {}, device)
    if dataset is not None and not (where / f"{TEST_DATA}.json").exists():
        write_json(where / f"{TEST_DATA}.json", TEST_DATA, {"sha256": dataset.test.fingerprint()})
    started = time.monotonic()
    for place, one in enumerate(compared):
        seconds = (time.monotonic() - started) / max(1, place) * (len(compared) - place)
        left = f", about {spoken_time(seconds)} left" if place else ""
        say(f"{place + 1} of {len(compared)}: {one}{left}", quiet=quiet)
        make(one, dataset, quiet=quiet)
    with as_written(where):
        document = build_comparison(_by_name(compared), compared[0].config.evaluation.radii, where)
    write_json(where / "comparison.json", document.kind, document.to_dict())
    write_comparison(document, where)
    return document


def _by_name(compared: Sequence[Compared]) -> dict[str, dict[int, Facts]]:
    runs: dict[str, dict[int, Facts]] = {}
    for one in compared:
        runs.setdefault(one.name, {})[one.number] = Facts.read(one.run)
    return runs


def make(one: Compared, dataset: Dataset | None = None, *, certificates: bool = True, quiet: bool = False) -> None:
    """Make what is missing of a training and of its measurements, with or without certificates."""
    if not one.run.is_trained:
        train(one.config, one.run.path, dataset=dataset, network=one.network, prior=one.prior, resume=True, quiet=quiet)
    asked = one.config.to_dict()
    common: dict[str, Any] = {
        "overrides": {f"{section}.{key}": value for section in _SECTIONS for key, value in asked[section].items()},
        "dataset": dataset,
        "network": one.network,
        "resume": True,
        "quiet": quiet,
    }
    with as_written(one.run.path):
        certified = not (certificates and one.certifies) or _is_certified(one)
    if not certified:
        certify(one.run.path, **common)
    with as_written(one.run.path):
        evaluated = _is_evaluated(one)
    if not evaluated:
        evaluate(one.run.path, **common)


def _is_certified(one: Compared) -> bool:
    """Return whether there are certificates of this model, made with these settings, for these radii."""
    summary, asked = CertificateSummary.read_if_there(one.run), one.config.evaluation
    if summary is None or not _has_same_weights(one, summary):
        return False
    radii = {tuple(row.radius for row in rows) for rows in summary.certified_accuracy.values()}
    return (
        summary.training_hash == one.config.training_hash
        and summary.settings == one.config.certification.to_dict()
        and {kind.norm for kind in summary.kinds} == {asked.norm}
        and radii == {asked.radii}
    )


def _has_same_weights(one: Compared, document: CertificateSummary | Scores) -> bool:
    """Return whether a document is of this run's weights; neither has a digest where an older version made both."""
    return document.weights_sha256 == Training.read(one.run).weights_sha256


def _is_evaluated(one: Compared) -> bool:
    """Return whether there are scores of this model, made with these settings and certificates."""
    content = one.run.read("scores") if one.run.has("scores") else {}
    if "same_images" not in content:
        # None, or those of an older version, which lack more than that.
        return False
    scores = Scores.from_dict(content, one.run.path / "scores.json")
    if not _has_same_weights(one, scores):
        return False
    certificates = CertificateSummary.read_if_there(one.run)
    made_with = (scores.training_hash, scores.settings, scores.certificates)
    return made_with == (one.config.training_hash, one.config.evaluation.to_dict(), certificates)
