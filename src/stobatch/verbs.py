"""The verbs: plan, train, load, certify, evaluate. The command line calls these and nothing else.

Each verb checks everything it can before it writes anything, so bad input leaves no half-written run.
"""

from __future__ import annotations

import copy
import hashlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stobatch import data
from stobatch.certification import Verdicts, VerifiedInference
from stobatch.config import RunConfig
from stobatch.data import Dataset, DatasetInfo, Examples
from stobatch.errors import DataError, ModelError, RunError, SettingError
from stobatch.evaluation.accuracy import certified_accuracy, conventional_accuracy, verified_accuracy
from stobatch.evaluation.protocols import DEPLOYED, attack_records
from stobatch.evaluation.statistics import proportion
from stobatch.files import read_tensors, write_tensors
from stobatch.interrupts import finish_first
from stobatch.methods import method_of
from stobatch.models import Network, build, build_encoder
from stobatch.privacy.guarantee import PrivacyGuarantee
from stobatch.privacy.plan import Plan
from stobatch.progress import progress
from stobatch.runs import Run
from stobatch.seeds import Seeds
from stobatch.settings import content_hash
from stobatch.training import train as run_training
from stobatch.training.engines import InProcessEngine

_TILE = 200
"""Test examples of one part of a table: small enough that a killed verb repeats little."""


@dataclass(frozen=True)
class TrainedModel:
    """A trained network with everything that is known about it.

    `network` is a plain torch module from inputs in [-1, 1] to logits: the function that is deployed, its fixed noise
    included. Hand it to any attack library as it is.
    """

    network: Network
    config: RunConfig
    plan: Plan
    run: Run

    @property
    def guarantee(self) -> PrivacyGuarantee:
        return self.plan.guarantee

    def verifier(self, config: RunConfig | None = None) -> VerifiedInference:
        return method_of(self.config).verifier(config or self.config, self.plan, self.network)

    def predict_verified(self, inputs: torch.Tensor, *, seeds: Seeds | None = None) -> Verdicts:
        """Algorithm 3 on a batch of inputs in [-1, 1]."""
        return self.verifier().verify(inputs, (seeds or Seeds.secret()).generator("verify"))


def _root(config: RunConfig) -> Path | None:
    return Path(config.machine.data_root) if config.machine.data_root else None


def _device(config: RunConfig) -> torch.device:
    try:
        device = torch.device(config.machine.device)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split("\n", maxsplit=1)[0].rstrip(".")
        raise SettingError(
            f"device '{config.machine.device}' cannot be used: {reason}.", remedy="Use --device cpu."
        ) from None
    # TF32 keeps ten bits: next to noise a hundred times larger than the signal that is nothing.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    if config.machine.threads:
        torch.set_num_threads(config.machine.threads)
    return device


def plan(config: RunConfig, *, dataset: Dataset | None = None, network: Network | None = None) -> Plan:
    """Every number that privacy depends on, before any data is read."""
    info = dataset.info if dataset else data.describe(config.data, _root(config))
    return _plan(config, info, network)


def _plan(config: RunConfig, info: DatasetInfo, network: Network | None) -> Plan:
    if network is not None and network.last_hidden_size != config.model.last_hidden_size:
        raise ModelError(
            f"your network's last hidden layer has {network.last_hidden_size} neurons, "
            f"model.last_hidden_size is {config.model.last_hidden_size}.",
            remedy=f"Set model.last_hidden_size={network.last_hidden_size}.",
        )
    encoder = network.encoder if network is not None else build_encoder(config.model, info.input_shape)
    return method_of(config).plan(config, info, encoder)


def _network(config: RunConfig, info: DatasetInfo, seeds: Seeds, given: Network | None) -> Network:
    if given is None:
        return build(config.model, info.input_shape, info.num_classes, seeds.generator("initial weights"))
    if given.num_classes != info.num_classes or given.encoder.input_shape != info.input_shape:
        raise ModelError(
            f"your network maps {given.encoder.input_shape} to {given.num_classes} classes, the data are "
            f"{info.input_shape} with {info.num_classes}.",
            remedy="Give from_layers the shape of one input, and the output layer one unit per class.",
        )
    return copy.deepcopy(given)


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
    device = _device(config)
    seeds = _seeds(config, run)
    dataset = dataset or _read(config, seeds, quiet)
    net = _network(config, dataset.info, seeds, network).to(device)
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
    """Tells whether a resumed run sees the same data. Private: whoever has it can confirm a guess of the data."""
    digest = hashlib.sha256()
    for tensor in (examples.inputs, examples.labels):
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()


def _seeds(config: RunConfig, run: Run) -> Seeds:
    if config.seed is not None:
        return Seeds.reproducible(config.seed)
    if run.has("seeds", private=True):
        return Seeds(int(run.read("seeds", private=True)["root"]), public=False)
    return Seeds.secret()


def load(
    run: str | Path, *, network: Network | None = None, device: str | None = None, threads: int | None = None
) -> TrainedModel:
    """Load a trained model. A network of your own has to be handed over again, in the same shape."""
    directory = Run(Path(run))
    directory.require_trained()
    document = directory.read("config")
    content = {name: document.get(name) for name in ("config", "dataset")}
    if content_hash(content) != document.get("content_hash"):
        raise RunError(
            f"{directory.path / 'config.json'} was changed after the run was started.",
            remedy="Restore it: what the run promises is read from it.",
        )
    config = RunConfig.from_dict(document["config"])
    machine = config.machine.replace(device=device or config.machine.device, threads=threads or config.machine.threads)
    config = config.replace(machine=machine)
    tensors, metadata = read_tensors(directory.model_file)
    if not metadata.get("config_hash") == document.get("training_hash") == config.training_hash:
        raise RunError(f"{directory.model_file} belongs to another run.", remedy="Restore it or train again.")
    info = DatasetInfo.from_dict(document["dataset"])
    network = _network(config, info, Seeds.reproducible(0), network)
    the_plan = _plan(config, info, network)
    try:
        network.load_state_dict(tensors)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise ModelError(
            f"the weights do not fit the network: {reason}", remedy="Hand over the same network."
        ) from None
    method_of(config).restore(network, directory.path, config.training_hash)
    network.to(_device(config)).eval().requires_grad_(False)
    network.calibrate()
    return TrainedModel(network, config, the_plan, directory)


def _read(config: RunConfig, seeds: Seeds, quiet: bool) -> Dataset:
    with progress("read data", 1, quiet=quiet) as advance:
        dataset = data.load(config.data, root=_root(config), seeds=seeds)
        advance(1)
    return dataset


def _test_examples(model: TrainedModel, dataset: Dataset | None, limit: int | None, quiet: bool) -> Examples:
    """Test examples only; the training data is not needed any more, but data sets are read as one."""
    whole = dataset or _read(model.config, _seeds(model.config, model.run), quiet)
    encoder = model.network.encoder
    if whole.info.input_shape != encoder.input_shape or whole.info.num_classes != model.network.num_classes:
        raise DataError(
            f"the data are {whole.info.input_shape} with {whole.info.num_classes} classes, the model takes "
            f"{encoder.input_shape} with {model.network.num_classes}.",
            remedy="Hand over the data set that the run was trained for.",
        )
    return whole.test.limit(limit)


def _with(config: RunConfig, overrides: dict[str, Any] | None) -> RunConfig:
    """Apply overrides that leave the trained model what it is."""
    for key in overrides or {}:
        if not key.startswith(("certification.", "evaluation.", "machine.")):
            raise SettingError(
                f"'{key}' belongs to the training of this run.",
                why="It was fixed when the run was started.",
                remedy="Change certification., evaluation. or machine. settings, or train another run.",
            )
    return config.override_all(overrides or {})


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
    model = load(run, network=network, device=device)
    config = _with(model.config, overrides)
    settings = config.certification
    verifier = method_of(config).verifier(config, model.plan, model.network)
    test = _test_examples(model, dataset, settings.limit, quiet)
    seeds = _seeds(config, model.run) if seed is None else Seeds.reproducible(seed)
    identity = content_hash([config.training_hash, "certify", settings.to_dict(), len(test), seed])
    records = model.run.records("certify", config_hash=identity, expected_rows=len(test))
    started = time.monotonic()
    with finish_first() as stop, progress("certify", len(test), quiet=quiet) as advance:
        for start in range(0, len(test), _TILE):
            stop.raise_if_asked()
            part = test.take(slice(start, start + _TILE))
            if not (resume and records.has(start)):
                verdicts = verifier.verify(part.inputs, seeds.generator("certify", start)).columns()
                rows = {"index": list(range(start, start + len(part))), "label": part.labels.tolist()}
                prediction = {"prediction": verdicts.pop("label").tolist()}
                records.write(start, rows | prediction | {name: column.tolist() for name, column in verdicts.items()})
            advance(len(part))
    columns = records.read()
    certified = certified_accuracy(columns, config.evaluation.radii)
    summary = {
        "config_hash": identity,
        "training_hash": config.training_hash,
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
    model = load(run, network=network, device=device)
    config = _with(model.config, overrides)
    settings = config.evaluation
    test = _test_examples(model, dataset, settings.limit, quiet)
    seeds = _seeds(config, model.run) if seed is None else Seeds.reproducible(seed)
    weight = model.network.encoder.weight
    identity = content_hash([config.training_hash, "evaluate", settings.to_dict(), len(test), seed])
    records = model.run.records("evaluate", config_hash=identity, expected_rows=len(test))
    with finish_first() as stop, progress("evaluate", len(test), quiet=quiet) as advance:
        for start in range(0, len(test), _TILE):
            stop.raise_if_asked()
            part = test.take(slice(start, start + _TILE))
            if not (resume and records.has(start)):
                generator = seeds.generator("evaluate", start)
                inputs, labels = part.inputs.to(weight), part.labels.to(weight.device)
                columns = attack_records(model.network, inputs, labels, settings, generator)
                records.write(start, {"index": list(range(start, start + len(part))), **columns})
            advance(len(part))
    rows = records.read()
    clean = proportion([a == b for a, b in zip(rows["prediction"], rows["label"], strict=True)])
    attacked = conventional_accuracy(rows, settings.attacks, settings.radii)
    scores = {
        "config_hash": identity,
        "training_hash": config.training_hash,
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
