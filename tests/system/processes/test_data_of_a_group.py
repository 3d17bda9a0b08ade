"""Data in shards: a process opens its own and no other, and what is wrong with one of them is told once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from support.groups import Group, Server, arguments, differences, written

from stobatch.config import DataConfig
from stobatch.data import load
from stobatch.data.shard_writing import write_shards
from stobatch.seeds import Seeds
from stobatch.training.ledger import Ledger

SHARDS: dict[str, Any] = {"data__name": "shards", "data__train_limit": None, "machine__timeout_s": 5}
TRAINERS = {"trainers__num": 2, "trainers__per_step": 2}
# A trainer's devices take its shards by turns. Of two trainers each owns two consecutive shards; which process works
# for which trainer changes from step to step, so a process needs its part of every trainer's shards.
OWN = [(0, 2), (1, 3)]
LAYOUTS: dict[str, dict[str, Any]] = {
    "one trainer": {},
    "two trainers of two devices each": TRAINERS | {"machine__devices_per_trainer": 2},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "shards"
    write_shards(load(DataConfig(train_limit=2000, test_limit=100)), folder, 4, Seeds.reproducible(1))
    return folder


@pytest.fixture(scope="module")
def alone(group: Server, whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "run"
    ended = group(0, "train", "--out", out, *arguments(**SHARDS, machine__data_root=str(whole)))
    assert ended.codes == [0], ended.err
    return out


def nodes(whole: Path, folder: Path, own: list[tuple[int, ...]]) -> list[Path]:
    """A copy for each process, with the manifest, the test examples and its own shards alone."""
    made = [folder / f"node-{rank}" for rank in range(len(own))]
    for node, kept in zip(made, own, strict=True):
        others = [f"train-{number:05d}.*" for number in range(4) if number not in kept]
        shutil.copytree(whole, node, ignore=shutil.ignore_patterns(*others))
    return made


def trained(group: Server, out: Path, places: list[Path], *more: object, **named: Any) -> Group:
    accidents = named.pop("accidents", {})
    each = {rank: ["--set", f"machine.data_root={place}"] for rank, place in enumerate(places)}
    command = ["train", "--out", out, *arguments(**{**SHARDS, **named}), *more]
    return group(len(places), *command, each=each, accidents=accidents)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_process_needs_no_shards_but_its_own(
    group: Server, whole: Path, alone: Path, tmp_path: Path, name: str
) -> None:
    changes, out, reference = LAYOUTS[name], tmp_path / "run", alone
    ended = trained(group, out, nodes(whole, tmp_path, OWN), **changes)
    assert ended.codes == [0, 0], ended.err
    if changes:
        reference, place = tmp_path / "alone", {"machine__data_root": str(whole)}
        assert group(0, "train", "--out", reference, *arguments(**SHARDS, **changes, **place)).codes == [0]
    assert not differences(reference, out)


def test_shards_of_others_would_be_missed(group: Server, whole: Path, tmp_path: Path) -> None:
    """The check above can fail: with each other's shards nobody can train."""
    ended = trained(group, tmp_path / "run", nodes(whole, tmp_path, OWN[::-1]))
    refused(ended, tmp_path / "run", "cannot be read: No such file")


def refused(ended: Group, out: Path, *words: str) -> None:
    assert ended.codes == [2, 2], ended.err
    (line,) = ended.said
    assert "Traceback" not in ended.err
    assert all(word in line for word in words), line
    assert not written(out)


def damage(file: Path, how: str) -> None:
    content = file.read_bytes()
    if how == "missing":
        file.unlink()
    elif how == "truncated":
        file.write_bytes(content[:-10])
    else:
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("how", "word"),
    [("missing", "No such file"), ("truncated", "bytes instead of"), ("altered", "is not the file that was written")],
)
def test_a_damaged_shard_of_one_process_is_told_once(
    group: Server, whole: Path, tmp_path: Path, how: str, word: str, rank: int
) -> None:
    places, shard = nodes(whole, tmp_path, OWN), OWN[rank][-1]
    damage(places[rank] / f"train-{shard:05d}.labels.npy", how)
    refused(trained(group, tmp_path / "run", places), tmp_path / "run", f"shard {shard} is damaged", word)


def test_manifests_that_differ_are_told_once(group: Server, whole: Path, tmp_path: Path) -> None:
    """The same records, dealt to shards by another seed."""
    other = tmp_path / "other"
    write_shards(load(DataConfig(train_limit=2000, test_limit=100)), other, 4, Seeds.reproducible(2))
    refused(trained(group, tmp_path / "run", [whole, other]), tmp_path / "run", "differ in their training data")


def test_a_shard_that_is_altered_on_the_way_ends_the_training_and_its_return_continues_it(
    group: Server, whole: Path, alone: Path, tmp_path: Path
) -> None:
    places, out = nodes(whole, tmp_path, OWN), tmp_path / "run"
    file = places[1] / "train-00003.inputs.npy"
    accidents = {1: {"alter_at_step": [str(file), 3]}}
    ended = trained(group, out, places, accidents=accidents)
    assert ended.codes == [2, 2], ended.err
    (line,) = ended.said
    assert "shard 3 is damaged" in line
    assert Ledger.of(out) == Ledger(2, 2)
    shutil.copy(whole / file.name, file)
    ended = trained(group, out, places, "--resume")
    assert ended.codes == [0, 0], ended.err
    assert not differences(alone, out)


def test_too_few_shards_for_the_devices_of_a_trainer_are_told_once(group: Server, whole: Path, tmp_path: Path) -> None:
    places = [whole] * 4
    ended = trained(group, tmp_path / "run", places, **TRAINERS, machine__devices_per_trainer=4)
    assert ended.codes == [2] * 4, ended.err
    (line,) = ended.said
    assert "2 shards are too few for its 4 devices" in line
    assert not written(tmp_path / "run")
