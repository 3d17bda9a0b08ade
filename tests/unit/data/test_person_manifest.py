"""Persons of image folders: a table beside the pictures, `data check`, shards; broken tables are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import stobatch
from stobatch.config import DataConfig
from stobatch.data import ShardedExamples, describe, load, stream, write_shards
from stobatch.data.shards import Manifest
from stobatch.data_check import check_folder
from stobatch.errors import DataError
from stobatch.seeds import Seeds

Fails = Callable[..., str]
CLASSES = ("cat", "dog")
PEOPLE = 8


def person_of(part: str, name: str, number: int) -> str:
    """The number of a picture's person goes by its own number; nobody has both training and test pictures."""
    return f"{'p' if part == 'train' else 't'}{number % PEOPLE}"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """20 training and 3 test pictures of each class, and a table that says whose they are."""
    lines, generator = ["image,label,person"], np.random.default_rng(0)
    for part, count in (("train", 20), ("test", 3)):
        for name in CLASSES:
            folder = tmp_path / "photos" / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(0, 256, (4, 4), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number:02d}.png")
                lines.append(f"{part}/{name}/{number:02d}.png,{name},{person_of(part, name, number)}")
    (tmp_path / "photos" / "who.csv").write_text("\n".join(lines) + "\n")
    return tmp_path / "photos"


SETTINGS = DataConfig(name="image_folder", manifest="who.csv")


def test_a_table_says_whose_the_pictures_are(photos: Path) -> None:
    data = load(SETTINGS, root=photos)
    assert describe(SETTINGS, photos).num_persons == data.info.num_persons == PEOPLE
    persons = data.train.persons
    assert persons is not None
    # Pictures of the two classes stand in turn: 0 and 1 are the first cat and the first dog, of one person.
    assert persons.rows(torch.tensor([0]))[0].tolist() == [0, 1, 16, 17, 32, 33]
    assert "who.csv" not in str(data.info.to_dict())
    assert load(DataConfig(name="image_folder"), root=photos).train.persons is None


def test_a_limit_counts_the_persons_that_are_left(photos: Path) -> None:
    few = DataConfig(name="image_folder", manifest="who.csv", train_limit=6)
    assert describe(few, photos).num_persons == 3
    persons = load(few, root=photos).train.persons
    assert persons is not None
    assert len(persons) == 3


def changed(photos: Path, change: Callable[[str], str]) -> Path:
    table = photos / "who.csv"
    table.write_text(change(table.read_text()))
    return photos


FAULTS: dict[str, tuple[Callable[[str], str], str]] = {
    "another head": (lambda text: text.replace("person\n", "owner\n", 1), "has not the columns image, label, person"),
    "nothing": (lambda text: "", "has not the columns"),
    "a picture without a line": (
        lambda text: text.replace("train/cat/03.png,cat,p3\n", ""),
        "has no line for train/cat/03.png",
    ),
    "a picture without a person": (
        lambda text: text.replace("03.png,cat,p3", "03.png,cat, "),
        "line 5 of .* has no person",
    ),
    "a picture twice": (lambda text: text + "train/cat/03.png,cat,p4\n", r"names train/cat/03\.png again"),
    "another class": (lambda text: text.replace("03.png,cat,p3", "03.png,dog,p3"), "says dog of train/cat/03.png"),
}


@pytest.mark.parametrize(("change", "said"), FAULTS.values(), ids=FAULTS)
def test_a_table_with_a_fault_is_refused(photos: Path, change: Callable[[str], str], said: str, fails: Fails) -> None:
    import re

    changed(photos, change)
    assert re.search(said, fails(describe, SETTINGS, photos))
    found = check_folder(photos, SETTINGS, quiet=True)
    assert not found.can_be_trained_on


def test_a_table_that_is_not_there_or_not_for_these_data(photos: Path, fails: Fails) -> None:
    assert "cannot read" in fails(describe, DataConfig(name="image_folder", manifest="nobody.csv"), photos)
    assert "data.manifest is not for mnist" in fails(describe, DataConfig(name="mnist", manifest="who.csv"), photos)


def test_lines_in_any_order_with_other_columns_and_windows_ends(photos: Path) -> None:
    plain = load(SETTINGS, root=photos).train.fingerprint()

    def other(text: str) -> str:
        _, *lines = text.strip().splitlines()
        turned = [",".join(["x", *reversed(line.split(","))]) for line in reversed(lines)]
        return "\ufeff" + "\r\n".join(["more,person,label,image", *turned, ""])

    assert load(SETTINGS, root=changed(photos, other)).train.fingerprint() == plain


def test_data_check_counts_persons(photos: Path) -> None:
    found = check_folder(photos, SETTINGS, quiet=True)
    assert found.persons is not None
    assert (found.persons.num, found.persons.largest) == (PEOPLE, 6)
    assert "8 persons own the training images; the largest owns 6, 15.0% of them" in found.lines()
    assert found.can_be_trained_on
    assert not any("persons" in fault.what for fault in found.faults)
    assert check_folder(photos, DataConfig(name="image_folder"), quiet=True).persons is None


def test_data_check_tells_persons_of_both_parts_and_one_who_owns_most(photos: Path) -> None:
    both = check_folder(changed(photos, lambda text: text.replace(",t1", ",p1")), SETTINGS, quiet=True)
    (fault,) = (fault for fault in both.faults if "persons" in fault.what)
    assert fault.what == "1 persons have both training and test pictures"
    assert not fault.stops_training
    for number in range(1, PEOPLE):
        changed(photos, lambda text, number=number: text.replace(f"cat,p{number}", "cat,unknown"))
    most = check_folder(changed(photos, lambda text: text.replace("cat,p0", "cat,unknown")), SETTINGS, quiet=True)
    assert not any("owns" in fault.what for fault in most.faults), "half of the pictures is not most of them"
    most = check_folder(changed(photos, lambda text: text.replace("dog,p0", "dog,unknown")), SETTINGS, quiet=True)
    assert [fault.what for fault in most.faults if "owns" in fault.what] == [
        "one person owns 23 of 40 training pictures"
    ]
    assert not most.can_be_trained_on


def private(photos: Path, **changes: Any) -> stobatch.RunConfig:
    return stobatch.RunConfig.from_dict(
        {
            "method": {"name": "dpsgd", "epsilon": 3.0, "delta": 1e-3, "batch_size": 4, "records_per_person": 2},
            "data": {"name": "image_folder", "manifest": "who.csv"},
            "model": {"architecture": "linear"},
            "training": {"steps": 3, "optimiser": "sgd", "learning_rate": 0.1},
            "machine": {"data_root": str(photos)},
            "seed": 3,
        }
    ).override_all(changes)


def test_a_folder_with_persons_is_trained_on_and_says_so(photos: Path, tmp_path: Path) -> None:
    model = stobatch.train(private(photos), tmp_path / "run", quiet=True)
    assert model.guarantee.unit == "person"
    assert stobatch.load(tmp_path / "run").guarantee.unit == "person"
    for path in (tmp_path / "run").glob("*.json"):
        assert "p3" not in path.read_text(), "no person's name is written"


def test_shards_keep_persons_together(photos: Path, tmp_path: Path) -> None:
    whole = load(SETTINGS, root=photos)
    source = stream(SETTINGS, root=photos)
    assert source.groups is not None
    manifest = write_shards(source, tmp_path / "shards", 3, Seeds.reproducible(0))
    again = write_shards(whole, tmp_path / "again", 3, Seeds.reproducible(0))
    assert manifest.digest == again.digest
    kept = ShardedExamples(Manifest.read(tmp_path / "shards"))
    persons, before = kept.persons, whole.train.persons
    assert persons is not None
    assert before is not None
    assert len(persons) == PEOPLE
    assert [len(own) for own in persons.shards] == [3, 3, 2]
    assert persons.largest == before.largest

    def owned(examples: Any, of: Any) -> set[frozenset[bytes]]:
        return {
            frozenset(image.numpy().tobytes() for image in examples.fetch(of.rows(torch.tensor([person]))[0])[0])
            for person in range(len(of))
        }

    assert owned(kept, persons) == owned(whole.train, before)
    memory = kept.in_memory()
    assert memory.persons is not None
    assert owned(memory, memory.persons) == owned(whole.train, before)


def test_training_from_shards_is_about_persons(photos: Path, tmp_path: Path) -> None:
    write_shards(stream(SETTINGS, root=photos), tmp_path / "shards", 2, Seeds.reproducible(0))
    config = private(tmp_path / "shards", **{"data.name": "shards", "data.manifest": None})
    assert stobatch.train(config, tmp_path / "run", quiet=True).guarantee.unit == "person"
    by_two = config.override_all({"trainers.num": 2, "trainers.per_step": 2})
    model = stobatch.train(by_two, tmp_path / "two", quiet=True)
    assert model.guarantee.unit == "person of any one trainer"


def test_shards_whose_persons_were_changed_are_refused(photos: Path, tmp_path: Path) -> None:
    write_shards(stream(SETTINGS, root=photos), tmp_path / "shards", 2, Seeds.reproducible(0))
    path = tmp_path / "shards" / "train-00000.persons.npy"
    codes = np.load(path)
    np.save(path, np.zeros_like(codes))
    persons = ShardedExamples(Manifest.read(tmp_path / "shards")).persons
    assert persons is not None
    with pytest.raises(DataError, match="is not the file that was written"):
        persons.rows(torch.tensor([0]))
