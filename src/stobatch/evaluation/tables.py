"""What the verbs have in common: reading data, opening a run, and filling a table of records part by part."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stobatch import data
from stobatch.config import RunConfig
from stobatch.data import Dataset, Examples, require_dataset
from stobatch.data.overlap import is_own, require_apart, statement
from stobatch.errors import DataError, SettingError
from stobatch.files import Columns, Records
from stobatch.loading import TrainedModel, load, seeds_of
from stobatch.progress import Progress, Tick, progress
from stobatch.results import Training
from stobatch.runs import MANIFEST, PAGE, Run, commit, has_key, require_unchanged, seal
from stobatch.seeds import Seeds
from stobatch.settings import content_hash
from stobatch.training.device import environment

CPU_TILE, GPU_TILE = 200, 2500
"""Test examples of one part of a table: small enough that a killed verb repeats little, enough to fill the device."""

RowsOf = Callable[[Examples, torch.Generator, Tick], Columns]
"""Makes the rows of some examples; may call `tick` with the share of its work that it has just done."""
PartOf = Callable[[int, int, Tick], Columns]
"""Makes a number of rows, from a first one on."""


def data_root(config: RunConfig) -> Path | None:
    return Path(config.machine.data_root) if config.machine.data_root else None


def read_data(config: RunConfig, seeds: Seeds, quiet: bool) -> Dataset:
    with progress("read data", 1, quiet=quiet) as advance:
        dataset = data.load(config.data, root=data_root(config), seeds=seeds)
        advance(1)
    return dataset


def test_examples(model: TrainedModel, dataset: Dataset | None, limit: int | None, quiet: bool) -> Examples:
    """Return the test examples only; the training data are not needed any more, but data sets are read as one."""
    require_dataset(dataset)
    whole = dataset or read_data(model.config, seeds_of(model.config, model.run), quiet)
    if whole.info.input_shape != model.network.input_shape or whole.info.num_classes != model.network.num_classes:
        raise DataError(
            f"the data are {whole.info.input_shape} with {whole.info.num_classes} classes, the model takes "
            f"{model.network.input_shape} with {model.network.num_classes}.",
            remedy="Hand over the data set that the run was trained for.",
        )
    _require_own_test(model, whole.test)
    if dataset is not None or is_own(model.config.data):
        require_apart(whole, model.config.data)
    return whole.test.limit(limit)


def _require_own_test(model: TrainedModel, test: Examples) -> None:
    """Raise where the test records are not those of the run: others may be what it was trained on.

    Without the owner's key a commitment cannot be opened, and `about_test_records` says so.
    """
    recorded = Training.read(model.run).data
    if recorded is None:
        return
    fingerprint = test.fingerprint()
    expected, found = (
        (recorded.test_sha256, fingerprint)
        if recorded.test_sha256 is not None
        else (recorded.test_commitment, commit(model.run, "test data", fingerprint))
    )
    if expected is not None and found is not None and expected != found:
        raise DataError(
            "these are not the test records that the run was trained beside.",
            why="Its documents are about those, and among others may be records that it was trained on.",
            remedy="Hand over the data set that the run was trained for, or point machine.data_root at it.",
        )


def about_test_records(model: TrainedModel, dataset: Dataset | None) -> str:
    """Return what accuracies assume of the test records, from public settings alone."""
    if model.config.method.name == "federated" and is_own(model.config.data):
        return "test records are no party's training records: each keeps its own, so copies cannot be looked for"
    recorded = Training.read(model.run).data
    sealed = recorded is not None and recorded.test_commitment is not None and not has_key(model.run)
    unknown = "; whether they are the run's own was not checked, since only its owner's key can tell" if sealed else ""
    return statement(model.config.data, own=dataset is not None or is_own(model.config.data)) + unknown


def about_prior(start: TrainedModel) -> dict[str, Any]:
    """Return what a document says of a run's prior that is measured by itself."""
    prior = start.plan.prior
    assert prior is not None
    why = {"conflict": prior.conflict, "tuned": prior.tuned}
    return {"name": prior.name, "weights_sha256": start.weights_sha256, **why}


def require_allowed(changes: dict[str, Any]) -> None:
    """Raise at a change of something that the run's training depended on."""
    for key in changes:
        if not key.startswith(("audit.", "certification.", "evaluation.", "machine.")):
            raise SettingError(
                f"'{key}' belongs to the training of this run.",
                why="It was fixed when the run was started.",
                remedy="Change certification., evaluation., audit. or machine. settings, or train another run.",
            )


def open_run(
    run: str | Path, overrides: dict[str, Any] | None, network: nn.Module | None, device: str | None
) -> TrainedModel:
    """Return a trained model with settings changed that leave it what it is."""
    changes = {**(overrides or {}), **({"machine.device": device} if device else {})}
    require_allowed(changes)
    model = load(run, network=network, device=changes.get("machine.device"), threads=changes.get("machine.threads"))
    return replace(model, config=model.config.override_all(changes))


def begin(model: TrainedModel, *rewritten: str) -> None:
    """Check that what a verb builds on is as the manifest says; `rewritten` are the documents it will replace.

    A training that was killed before its manifest was written has left everything else, and gets it now.
    """
    if not model.run.has(MANIFEST):
        seal(model.run, "train", environment(model.network.device))
    require_unchanged(model.run, rewritten)


def end(model: TrainedModel, verb: str, *, quiet: bool) -> None:
    """Enter what the verb wrote into the manifest, as its last act."""
    seal_and_tell(model.run, verb, str(model.network.device), quiet=quiet)


def seal_and_tell(run: Run, verb: str, device: str, *, quiet: bool) -> None:
    """Enter what the verb wrote, and say where a report was taken away that rests on what was there before."""
    if seal(run, verb, environment(device)) and not quiet:
        print(
            f"stobatch: {run.path / PAGE} was removed, since it said what the run said before `{verb}`. "
            f"Write it again: `{run.command('report')}`.",
            file=sys.stderr,
        )


class _Ticks:
    """Moves the bar within a part, so that a long attack shows its time left before its first part is done."""

    def __init__(self, advance: Progress, rows: int) -> None:
        self.advance, self.rows, self.done = advance, rows, 0.0

    def __call__(self, share: float) -> None:
        self.advance(share * self.rows)
        self.done += share * self.rows


def tabulate(
    verb: str,
    model: TrainedModel,
    settings: dict[str, Any],
    test: Examples,
    rows_of: RowsOf,
    *,
    seed: int | None,
    resume: bool,
    quiet: bool,
    title: str | None = None,
) -> tuple[str, Columns]:
    """Fill a verb's table part by part, and read it back whole. Returns the table's identity and its columns.

    A part depends on its examples, the settings and the seeds alone, so parts that are there already are kept.
    """
    seeds = seeds_of(model.config, model.run) if seed is None else Seeds.reproducible(seed)
    tile = CPU_TILE if model.network.device.type == "cpu" else GPU_TILE
    weights = model.weights_sha256
    identity = content_hash([model.config.training_hash, weights, verb, settings, test.fingerprint(), seed, tile])
    records = model.run.records(verb, config_hash=identity, expected_rows=len(test), weights_sha256=weights)

    def part_of(start: int, count: int, tick: Tick) -> Columns:
        return rows_of(test.take(slice(start, start + count)), seeds.generator(verb, start), tick)

    fill(records, len(test), tile, part_of, title=title or verb, resume=resume, quiet=quiet)
    return identity, records.read()


def fill(records: Records, total: int, tile: int, rows_of: PartOf, *, title: str, resume: bool, quiet: bool) -> None:
    """Make what is missing of a table, a part at a time, with the time left. A stop discards the part it comes in."""
    with progress(title, total, quiet=quiet) as advance:
        for start in range(0, total, tile):
            count = min(tile, total - start)
            if not (resume and records.has(start)):
                ticked = _Ticks(advance, count)
                records.write(start, {"index": list(range(start, start + count))} | rows_of(start, count, ticked))
                advance(count - ticked.done)
            else:
                advance(count)
