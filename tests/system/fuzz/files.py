"""What a run directory holds: documents, tensors, checkpoints, tables, folders of shards."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch

from stobatch.data import DatasetInfo, from_tensors
from stobatch.data.shard_writing import write_shards
from stobatch.data.shards import Manifest
from stobatch.files import Records, as_written, read_json, read_tensors, write_json, write_tensors
from stobatch.loading import read_config, seeds_of
from stobatch.models.layered import Layered, build_layered
from stobatch.runs import Run
from stobatch.seeds import Seeds
from stobatch.settings import content_hash
from stobatch.training.checkpoint import TrainingState
from stobatch.training.engines import InProcessEngine
from stobatch.training.ledger import Ledger
from stobatch_recipes import recipe

from .mutate import as_json, mutated, mutated_bytes


@cache
def _documents() -> dict[str, tuple[dict[str, Any], Callable[[Run], Any]]]:
    """Kinds of documents, with a content as the program writes it and who reads it."""
    config = recipe("sound.mnist").override("seed", None)
    info = DatasetInfo("mnist", (1, 28, 28), 10, 60000, 10000, tuple("0123456789"))
    content = {"config": config.to_dict(), "dataset": info.to_dict()}
    whole = {"training_hash": config.training_hash, "content_hash": content_hash(content), **content}
    return {
        "config": (whole, lambda run: (read_config(run), _info(run))),
        "ledger": ({"done": 50, "open": 0}, lambda run: Ledger.of(run.path)),
        "seeds": ({"root": "123456789"}, lambda run: seeds_of(config, run)),
        "data": ({"sha256": "ab" * 32}, lambda run: run.read("data", private=True)),
    }


def _info(run: Run) -> DatasetInfo:
    with as_written(run.path / "config.json"):
        return DatasetInfo.from_dict(run.read("config")["dataset"])


_PRIVATE = ("ledger", "seeds", "data")


def documents(rng: Random, folder: Path) -> None:
    """JSON of a run, with its structure or its bytes changed, through whoever indexes it."""
    kind = rng.choice(list(_documents()))
    content, reader = _documents()[kind]
    run = Run(folder / "run")
    path = run.path / "private" / f"{kind}.json" if kind in _PRIVATE else run.path / f"{kind}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"schema": f"stobatch.{kind}", "version": 1, **content}
    changed = mutated(rng, document, rng.randrange(1, 3)) if rng.random() < 0.6 else document
    raw = as_json(changed).encode("utf-8", "surrogatepass")
    if changed is document or rng.random() < 0.3:
        raw = mutated_bytes(rng, raw, rng.randrange(3))
    path.write_bytes(raw)
    try:
        found = read_json(path, kind)
        # What was accepted says what the file says, to the last key.
        said = json.loads(raw)
        assert {"schema": f"stobatch.{kind}", "version": 1, **found} == said
        reader(run)
    finally:
        path.unlink()


@cache
def _written_shards(folder: Path) -> Manifest:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randint(0, 256, (12, 1, 2, 2), generator=generator).float() / 127.5 - 1
    labels = torch.arange(12) % 3
    return write_shards(from_tensors(inputs, labels, inputs[:4], labels[:4]), folder, 2, Seeds.reproducible(1))


def manifests(rng: Random, folder: Path) -> None:
    """A folder of shards: its manifest has a digest of all the rest, so a changed one is never another folder."""
    original = _written_shards(folder / "shards")
    place = folder / "changed"
    place.mkdir(exist_ok=True)
    raw = (original.folder / "manifest.json").read_bytes()
    if rng.random() < 0.6:
        changed = mutated(rng, json.loads(raw), rng.randrange(1, 3))
        raw = as_json(changed).encode("utf-8", "surrogatepass")
    else:
        raw = mutated_bytes(rng, raw, rng.randrange(1, 3))
    (place / "manifest.json").write_bytes(raw)
    assert Manifest.read(place).digest == original.digest, "another content was accepted as a folder of shards"


@cache
def _tensor_bytes(folder: Path) -> bytes:
    path = folder / "original.safetensors"
    tensors = {"layers.0.weight": torch.randn(3, 4), "layers.0.bias": torch.zeros(3), "half": torch.ones(2).half()}
    write_tensors(path, tensors, {"config_hash": "abc"}, private=False)
    return path.read_bytes()


def tensors(rng: Random, folder: Path) -> None:
    """Safetensors with header, lengths or values changed."""
    raw = _tensor_bytes(folder)
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    kind = rng.randrange(3)
    if kind == 0:
        raw = mutated_bytes(rng, raw, rng.randrange(1, 4))
    else:
        text = as_json(mutated(rng, header, kind)).encode("utf-8", "surrogatepass")
        length = rng.choice((len(text), len(text), len(text) + 1, 2**63, 2**64 - 1, 0))
        raw = length.to_bytes(8, "little") + text + raw[8 + size :]
    path = folder / "changed.safetensors"
    path.write_bytes(raw)
    found, metadata = read_tensors(path)
    assert all(isinstance(value, torch.Tensor) for value in found.values())
    assert all(isinstance(value, str) for value in metadata.values())


@cache
def _state() -> tuple[TrainingState, Layered]:
    network = build_layered("linear 3, linear", (1, 2, 2), 2, torch.Generator().manual_seed(3))
    return TrainingState(network, [torch.optim.SGD(network.parameters(), lr=0.1)], step=7), network


def checkpoints(rng: Random, folder: Path) -> None:
    """A checkpoint with one file damaged: the one before counts, or none does; never other weights."""
    state, network = _state()
    weights = copy.deepcopy(network.state_dict())
    run = folder / "trained"
    if not run.exists():
        state.save(run, "abc", InProcessEngine())
    whole = run / "private" / "checkpoints" / "step-00000007"
    place = folder / "damaged"
    shutil.rmtree(place, ignore_errors=True)
    target = place / "private" / "checkpoints" / "step-00000007"
    shutil.copytree(whole, target)
    victim = rng.choice(sorted(target.iterdir()))
    victim.write_bytes(mutated_bytes(rng, victim.read_bytes(), rng.randrange(3)))
    again = TrainingState(network, state.optimisers)
    try:
        if again.restore(place, "abc", 7):
            assert again.step == 7
            assert all(torch.equal(value, weights[name]) for name, value in network.state_dict().items())
    finally:
        network.load_state_dict(weights)


_COLUMNS = {"index": [0, 1, 2, 3], "label": [1, 0, 2, 1], "radius": [0.0, 0.25, 0.5, 1.0], "name": ["a", "b", "c", "d"]}


def _table(folder: Path) -> Records:
    return Records(folder, config_hash="abc", expected_rows=4, resume_command="stobatch certify RUN --resume")


@cache
def _part(folder: Path) -> bytes:
    _table(folder).write(0, _COLUMNS)
    return (folder / "rows-00000000.parquet").read_bytes()


def tables(rng: Random, folder: Path) -> None:
    """A part of a table with its bytes changed: refused, or the very rows that were written."""
    raw = _part(folder / "table")
    place = folder / "damaged-table"
    place.mkdir(exist_ok=True)
    (place / "rows-00000000.parquet").write_bytes(mutated_bytes(rng, raw, rng.randrange(1, 4)))
    table = _table(place)
    table.has(0)
    assert table.read() == _COLUMNS, "damaged rows were accepted"


def written_documents(rng: Random, folder: Path) -> None:
    """What is written is read back, whatever the text in it."""
    content = {
        "text": rng.choice(("ε", "\u2028", "\U0001f600", "\x00", "\x1b", '"', "\\u0000")),
        "number": rng.random(),
    }
    path = folder / "written.json"
    write_json(path, "plan", content)
    assert read_json(path, "plan") == content
