"""`plan` and `train`. Everything that can be checked is checked before anything is written."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from stobatch import data
from stobatch.auditing.one_run import replacing
from stobatch.config import RunConfig
from stobatch.data import Dataset, DatasetInfo
from stobatch.errors import RunError
from stobatch.files import PRIVATE, write_tensors
from stobatch.loading import TrainedModel, load, make_network, make_plan, seeds_of, use_device
from stobatch.methods import method_of
from stobatch.models import Classifier
from stobatch.privacy.plan import Plan
from stobatch.runs import Run
from stobatch.seeds import Seeds
from stobatch.settings import content_hash
from stobatch.training import Trainable
from stobatch.training import train as run_training
from stobatch.training.engines import InProcessEngine
from stobatch.types import Neighbours
from stobatch.verbs.planting import CANARY_SCORES, planted_in
from stobatch.verbs.tables import data_root, fingerprint, read_data


def plan(config: RunConfig, *, dataset: Dataset | None = None, network: Classifier | None = None) -> Plan:
    """Every number that privacy depends on, before any data is read."""
    info = dataset.info if dataset else data.describe(config.data, data_root(config))
    return make_plan(config, info, network)


def train(
    config: RunConfig,
    out: str | Path,
    *,
    dataset: Dataset | None = None,
    network: Classifier | None = None,
    resume: bool = False,
    quiet: bool = False,
) -> TrainedModel:
    """Train a model into a run directory, or continue one that was interrupted."""
    run = Run(Path(out))
    run.require_new(config.training_hash, resume=resume)
    the_plan = plan(config, dataset=dataset, network=network)
    device = use_device(config)
    seeds = seeds_of(config, run)
    dataset = dataset or read_data(config, seeds, quiet)
    net = make_network(config, dataset.info, seeds, network).to(device)
    trainable = _with_canaries(config, the_plan, dataset, net, seeds)
    trained_on = fingerprint(dataset.train)
    if run.has("data", private=True) and run.read("data", private=True)["sha256"] != trained_on:
        raise RunError(f"{run.path} was started with other training data.", remedy="Hand over the same data to resume.")
    # Nothing is written before everything above has passed.
    write_start(run, config, dataset.info, the_plan, seeds)
    run.write("data", {"sha256": trained_on}, private=True)
    trainable.save_private(run.path, config.training_hash)
    if not run.is_trained:
        started = time.monotonic()
        state = run_training(trainable, config, InProcessEngine(), run.path, dataset.test, resume=resume, quiet=quiet)
        kept = trainable.finish(run.path)
        if carried := trainable.carried():
            path = run.path / PRIVATE / CANARY_SCORES
            write_tensors(path, carried, {"config_hash": config.training_hash}, private=True)
        run.write(
            "training",
            {
                **kept,
                "steps": state.step,
                "seconds_since_last_start": round(time.monotonic() - started, 1),
                "device": str(device),
                "torch": torch.__version__,
                "history": [
                    {"step": int(step), "test_accuracy": accuracy, trainable.monitored: monitored}
                    for step, accuracy, monitored in state.history
                ],
            },
        )
        write_tensors(run.model_file, net.state_dict(), {"config_hash": config.training_hash}, private=False)
    return load(run.path, network=network, device=str(device), threads=config.machine.threads)


def write_start(run: Run, config: RunConfig, info: DatasetInfo, the_plan: Plan, seeds: Seeds) -> None:
    """The files that make a directory a run: its settings, its plan, and for the owner only its secret seeds."""
    content = {"config": config.to_dict(), "dataset": info.to_dict()}
    run.write("config", {"training_hash": config.training_hash, "content_hash": content_hash(content), **content})
    run.write("plan", the_plan.to_dict())
    if not seeds.public:
        run.write("seeds", {"root": str(seeds.root)}, private=True)


def _with_canaries(config: RunConfig, the_plan: Plan, dataset: Dataset, network: Classifier, seeds: Seeds) -> Trainable:
    """The method bound to its data; canaries stand beside them, or in their place where neighbours have one size."""
    method, train = method_of(config), dataset.train
    if not config.canaries.num:
        return method.prepare(config, the_plan, network, train, seeds)
    canaries = planted_in(config, dataset.info, network, seeds)
    if config.canaries.kind == "input" and the_plan.guarantee.neighbours is Neighbours.REPLACE_ONE:
        return method.prepare(config, the_plan, network, replacing(train, canaries), seeds)
    trainable = method.prepare(config, the_plan, network, train, seeds)
    trainable.plant(canaries)
    return trainable
