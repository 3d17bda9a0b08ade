"""Checkpoints of older versions, with a file per process, are continued; today the leader alone writes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stobatch.errors import RunError
from stobatch.models.layered import build_layered
from stobatch.training.checkpoint import FOLDER, LIST, TENSORS, TrainingState
from stobatch.training.engines import InProcessEngine


class Follower(InProcessEngine):
    """A process that does not lead."""

    rank, processes = 1, 2


def state(seed: int) -> TrainingState:
    """A state in the middle of a training, with an optimiser that remembers."""
    network = build_layered("linear 5, relu, linear", (1, 2, 2), 3, torch.Generator().manual_seed(seed))
    optimiser = torch.optim.Adam(network.parameters(), lr=0.1)
    network(torch.ones(2, 1, 2, 2)).sum().backward()
    optimiser.step()
    return TrainingState(network, [optimiser], {"average": torch.full((4,), float(seed))}, 6, [(3.0, 0.5, 1.0)])


def split(folder: Path) -> list[Path]:
    """Write a checkpoint's tensors as two processes once did: every other one each."""
    tensors, document = load_file(folder / TENSORS), json.loads((folder / LIST).read_text())
    identity = {"step": document["step"], "config_hash": document["config_hash"]}
    (folder / TENSORS).unlink()
    files = [folder / f"part-{rank}-of-2.safetensors" for rank in (1, 2)]
    for rank, file in enumerate(files):
        save_file({name: tensors[name] for name in sorted(tensors)[rank::2]}, file, identity)
    document["parts"] = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    (folder / LIST).write_text(json.dumps(document))
    return files


def test_a_checkpoint_of_two_files_is_continued_to_the_bit(tmp_path: Path) -> None:
    before, after = state(1), state(2)
    before.save(tmp_path, "hash", InProcessEngine())
    (folder,) = (tmp_path / FOLDER).iterdir()
    split(folder)
    assert after.digest != before.digest
    assert after.restore(tmp_path, "hash", 10)
    assert (after.digest, after.step, after.history) == (before.digest, before.step, before.history)


def test_a_checkpoint_of_two_files_that_lacks_one_is_refused(tmp_path: Path) -> None:
    before = state(1)
    before.save(tmp_path, "hash", InProcessEngine())
    (folder,) = (tmp_path / FOLDER).iterdir()
    split(folder)[1].unlink()
    with pytest.raises(RunError, match=r"every checkpoint in .* is damaged"):
        before.restore(tmp_path, "hash", 10)


def test_only_the_process_that_leads_writes(tmp_path: Path) -> None:
    state(1).save(tmp_path, "hash", Follower())
    assert not list(tmp_path.iterdir())
