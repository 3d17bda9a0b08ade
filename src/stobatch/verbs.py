"""The verbs: plan, train, load, certify, evaluate. The command line calls these and nothing else.

Each verb checks everything it can before it writes anything, so bad input leaves no half-written run.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from stobatch import data
from stobatch.config import RunConfig
from stobatch.data import Dataset, Examples
from stobatch.errors import DataError, RunError, SettingError
from stobatch.evaluation.accuracy import certified_accuracy, conventional_accuracy, verified_accuracy
from stobatch.evaluation.protocols import DEPLOYED, attack_records
from stobatch.evaluation.statistics import proportion
from stobatch.files import write_tensors
from stobatch.interrupts import finish_first
from stobatch.loading import TrainedModel, load, make_network, make_plan, seeds_of, use_device
from stobatch.methods import method_of
from stobatch.models import Network, rows_in_memory
from stobatch.privacy.plan import Plan
from stobatch.progress import progress
from stobatch.runs import Run
from stobatch.seeds import Seeds
from stobatch.settings import content_hash
from stobatch.training import train as run_training
from stobatch.training.engines import InProcessEngine

_TILE = 200
"""Test examples of one part of a table: small enough that a killed verb repeats little."""

Columns = dict[str, list[Any]]


def _root(config: RunConfig) -> Path | None:
    return Path(config.machine.data_root) if config.machine.data_root else None


def plan(config: RunConfig, *, dataset: Dataset | None = None, network: Network | None = None) -> Plan:
    """Every number that privacy depends on, before any data is read."""
    info = dataset.info if dataset else data.describe(config.data, _root(config))
    return make_plan(config, info, network)


def train(
    config: RunConfig,
    out: str | Path,
    *,
    dataset: Dataset | None = None,
    network: Network | None = None,
    resume: bool = False,
    quiet: bool = False,
) -> TrainedModel:
    """Train a model into a run directory, or continue one that was interrupted."""
    run, method = Run(Path(out)), method_of(config)
    run.require_new(config.training_hash, resume=resume)
    the_plan = plan(config, dataset=dataset, network=network)
    device = use_device(config)
    seeds = seeds_of(config, run)
    dataset = dataset or _read(config, seeds, quiet)
    net = make_network(config, dataset.info, seeds, network).to(device)
    trainable = method.prepare(config, the_plan, net, dataset.train, seeds)
    fingerprint = _fingerprint(dataset.train)
    if run.has("data", private=True) and run.read("data", private=True)["sha256"] != fingerprint:
        raise RunError(f"{run.path} was started with other training data.", remedy="Hand over the same data to resume.")
    # Nothing is written before everything above has passed.
    content = {"config": config.to_dict(), "dataset": dataset.info.to_dict()}
    run.write("config", {"training_hash": config.training_hash, "content_hash": content_hash(content), **content})
    run.write("plan", the_plan.to_dict())
    run.write("data", {"sha256": fingerprint}, private=True)
    if not seeds.public:
        run.write("seeds", {"root": str(seeds.root)}, private=True)
    trainable.save_private(run.path, config.training_hash)
    if not run.is_trained:
        started = time.monotonic()
        state = run_training(trainable, config, InProcessEngine(), run.path, dataset.test, resume=resume, quiet=quiet)
        run.write(
            "training",
            {
                "steps": state.step,
                "seconds_since_last_start": round(time.monotonic() - started, 1),
                "device": str(device),
                "torch": torch.__version__,
                "history": [
                    {"step": int(step), "test_accuracy": accuracy, "encoder_norm": norm}
                    for step, accuracy, norm in state.history
                ],
            },
        )
        write_tensors(run.model_file, net.state_dict(), {"config_hash": config.training_hash}, private=False)
    return load(run.path, network=network, device=str(device), threads=config.machine.threads)


def _fingerprint(examples: Examples) -> str:
    """Tells whether a resumed verb sees the same data. That of training data stays private: it confirms a guess."""
    digest = hashlib.sha256()
    for tensor in (examples.inputs, examples.labels):
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()


def _read(config: RunConfig, seeds: Seeds, quiet: bool) -> Dataset:
    with progress("read data", 1, quiet=quiet) as advance:
        dataset = data.load(config.data, root=_root(config), seeds=seeds)
        advance(1)
    return dataset


def _test_examples(model: TrainedModel, dataset: Dataset | None, limit: int | None, quiet: bool) -> Examples:
    """Test examples only; the training data is not needed any more, but data sets are read as one."""
    whole = dataset or _read(model.config, seeds_of(model.config, model.run), quiet)
    encoder = model.network.encoder
    if whole.info.input_shape != encoder.input_shape or whole.info.num_classes != model.network.num_classes:
        raise DataError(
            f"the data are {whole.info.input_shape} with {whole.info.num_classes} classes, the model takes "
            f"{encoder.input_shape} with {model.network.num_classes}.",
            remedy="Hand over the data set that the run was trained for.",
        )
    return whole.test.limit(limit)


def _open(
    run: str | Path, overrides: dict[str, Any] | None, network: Network | None, device: str | None
) -> TrainedModel:
    """A trained model with settings changed that leave it what it is."""
    changes = {**(overrides or {}), **({"machine.device": device} if device else {})}
    for key in changes:
        if not key.startswith(("certification.", "evaluation.", "machine.")):
            raise SettingError(
                f"'{key}' belongs to the training of this run.",
                why="It was fixed when the run was started.",
                remedy="Change certification., evaluation. or machine. settings, or train another run.",
            )
    model = load(run, network=network, device=changes.get("machine.device"), threads=changes.get("machine.threads"))
    return replace(model, config=model.config.override_all(changes))


def _tabulate(
    verb: str,
    model: TrainedModel,
    settings: dict[str, Any],
    test: Examples,
    rows_of: Callable[[Examples, torch.Generator], Columns],
    *,
    seed: int | None,
    resume: bool,
    quiet: bool,
) -> tuple[str, Columns]:
    """Fill a verb's table part by part, and read it back whole. Returns the table's identity and its columns.

    A part depends on its examples, the settings and the seeds alone, so parts that are there already are kept.
    """
    seeds = seeds_of(model.config, model.run) if seed is None else Seeds.reproducible(seed)
    identity = content_hash([model.config.training_hash, verb, settings, _fingerprint(test), seed])
    records = model.run.records(verb, config_hash=identity, expected_rows=len(test))
    with finish_first() as stop, progress(verb, len(test), quiet=quiet) as advance:
        for start in range(0, len(test), _TILE):
            stop.raise_if_asked()
            part = test.take(slice(start, start + _TILE))
            if not (resume and records.has(start)):
                index = {"index": list(range(start, start + len(part)))}
                records.write(start, index | rows_of(part, seeds.generator(verb, start)))
            advance(len(part))
    return identity, records.read()


def certify(
    run: str | Path,
    *,
    overrides: dict[str, Any] | None = None,
    dataset: Dataset | None = None,
    network: Network | None = None,
    seed: int | None = None,
    resume: bool = False,
    quiet: bool = False,
    device: str | None = None,
) -> dict[str, Any]:
    """Verified inference on the test set: one row per example, and a summary."""
    model = _open(run, overrides, network, device)
    settings, verifier = model.config.certification, model.verifier()
    test = _test_examples(model, dataset, settings.limit, quiet)

    def rows_of(part: Examples, generator: torch.Generator) -> Columns:
        verdicts = {name: column.tolist() for name, column in verifier.verify(part.inputs, generator).columns().items()}
        return {"label": part.labels.tolist(), "prediction": verdicts.pop("label"), **verdicts}

    started = time.monotonic()
    identity, columns = _tabulate(
        "certify", model, settings.to_dict(), test, rows_of, seed=seed, resume=resume, quiet=quiet
    )
    certified = certified_accuracy(columns, model.config.evaluation.radii)
    summary = {
        "config_hash": identity,
        "training_hash": model.config.training_hash,
        "settings": settings.to_dict(),
        "rows": len(test),
        "seconds": round(time.monotonic() - started, 1),
        "kinds": [kind.to_dict() for kind in verifier.kinds],
        "verified_accuracy": {name: share.to_dict() for name, share in verified_accuracy(columns).items()},
        "certified_accuracy": {
            kind: [{"radius": radius, **share.to_dict()} for radius, share in shares.items()]
            for kind, shares in certified.items()
        },
        "largest_radius": {
            "published": max(columns["published_largest_attack"]),
            "corrected": max(columns["corrected_radius"]),
        },
    }
    model.run.write("certificates", summary)
    return summary


def evaluate(
    run: str | Path,
    *,
    overrides: dict[str, Any] | None = None,
    dataset: Dataset | None = None,
    network: Network | None = None,
    seed: int | None = None,
    resume: bool = False,
    quiet: bool = False,
    device: str | None = None,
) -> dict[str, Any]:
    """Accuracy on clean and attacked test inputs, with the certified accuracy beside it where `certify` has run."""
    model = _open(run, overrides, network, device)
    settings, memory_mb = model.config.evaluation, model.config.machine.memory_mb
    test = _test_examples(model, dataset, settings.limit, quiet)
    weight, chunk = model.network.encoder.weight, rows_in_memory(model.network, memory_mb, most=_TILE)

    def rows_of(part: Examples, generator: torch.Generator) -> Columns:
        inputs, labels = part.inputs.to(weight), part.labels.to(weight.device)
        return attack_records(model.network, inputs, labels, settings, generator, chunk=chunk)

    identity, rows = _tabulate(
        "evaluate", model, settings.to_dict(), test, rows_of, seed=seed, resume=resume, quiet=quiet
    )
    clean = proportion([a == b for a, b in zip(rows["prediction"], rows["label"], strict=True)])
    attacked = conventional_accuracy(rows, settings.attacks, settings.radii)
    scores = {
        "config_hash": identity,
        "training_hash": model.config.training_hash,
        "settings": settings.to_dict(),
        "rows": len(test),
        "protocol": DEPLOYED.to_dict(),
        "guarantee": model.guarantee.to_dict(),
        "clean_accuracy": clean.to_dict(),
        "attacked_accuracy": [
            {"radius": radius, "norm": "linf", "input_range": "[-1, 1]"}
            | {name: share.to_dict() for name, share in shares.items()}
            for radius, shares in attacked.items()
        ],
        "certificates": model.run.read("certificates") if model.run.has("certificates") else None,
    }
    model.run.write("scores", scores)
    return scores
