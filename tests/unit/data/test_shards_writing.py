"""Writing shards: dealt by a rule, the same twice, in little memory, and safe from a kill."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from stobatch.config import DataConfig
from stobatch.data import Dataset, Manifest, ShardedExamples, Stream, from_tensors, load, stream, write_shards
from stobatch.data.dataset import Chunk
from stobatch.data.pixels import scale
from stobatch.data.shard_writing import deal, to_bytes
from stobatch.seeds import Seeds


def in_chunks(data: Dataset, size: int) -> Stream:
    def chunks(inputs: torch.Tensor, labels: torch.Tensor) -> Iterator[Chunk]:
        yield from zip(inputs.split(size), labels.split(size), strict=True)

    train = data.train.in_memory()
    return Stream(data.info, chunks(train.inputs, train.labels), chunks(data.test.inputs, data.test.labels))


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("size", [1, 7, 100])
def test_the_same_source_and_seed_give_the_same_files_whatever_the_chunks(
    tmp_path: Path, folder: Path, floats: Dataset, seeds: Seeds, size: int
) -> None:
    manifest = write_shards(in_chunks(floats, size), tmp_path / "again", 4, seeds)
    assert manifest.digest == Manifest.read(folder).digest
    assert contents(tmp_path / "again") == contents(folder)
    assert write_shards(floats, tmp_path / "other", 4, Seeds.reproducible(6)).digest != manifest.digest


def test_content_does_not_decide_the_shard_and_copies_stay_together(seeds: Seeds) -> None:
    shards = deal(31, 3, 4, seeds)
    assert len(shards) == 31
    assert all(len(set(shards[start : start + 3])) == 1 for start in range(0, 31, 3))
    sizes = np.bincount(shards[::3])
    assert sizes.max() - sizes.min() <= 1


def test_dealing_is_a_permutation_that_depends_on_the_seed(seeds: Seeds) -> None:
    one, other = (deal(8000, 1, 8, each) for each in (seeds, Seeds.reproducible(6)))
    assert np.array_equal(np.bincount(one), np.full(8, 1000))
    # Independent dealings agree on one record in eight: 1,000 of 8,000, and within 6 standard deviations of 30.
    assert abs(int((one == other).sum()) - 1000) < 180


def test_every_byte_survives_and_its_neighbours_do_not() -> None:
    pixels = torch.arange(256, dtype=torch.uint8)
    inputs = scale(pixels)
    back = to_bytes(inputs)
    assert back is not None
    assert torch.equal(back, pixels)
    for one in range(256):
        toward = torch.tensor(-1.0 if one else 1.0)
        assert to_bytes(torch.nextafter(inputs[one], toward).view(1)) is None


@pytest.mark.parametrize("at", [0, 30, 59, "test"])
def test_one_input_that_is_no_byte_turns_all_into_floats(tmp_path: Path, seeds: Seeds, at: int | str) -> None:
    pixels = torch.randint(256, (60, 1, 4, 4), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
    train, test, labels = scale(pixels), scale(pixels[:5]), torch.arange(60) % 2
    data = from_tensors(train, labels, test, labels[:5])
    (test[0] if at == "test" else train[int(at)])[0, 0, 0] = 0.1
    manifest = write_shards(in_chunks(data, 9), tmp_path / "wide", 3, seeds)
    assert manifest.encoding == "float32"
    assert sorted(ShardedExamples(manifest).in_memory().inputs.flatten(1).tolist()) == sorted(train.flatten(1).tolist())
    assert torch.equal(load(DataConfig(name="shards"), root=tmp_path / "wide").test.inputs, test)
    assert not list((tmp_path / "wide").glob("*.wide"))


def test_shards_can_be_dealt_anew(tmp_path: Path, folder: Path, seeds: Seeds) -> None:
    """From shards, without holding them."""
    again = write_shards(load(DataConfig(name="shards"), root=folder), tmp_path / "again", 2, seeds)
    back, old = ShardedExamples(again).in_memory(), ShardedExamples(Manifest.read(folder)).in_memory()
    assert sorted(back.inputs.flatten(1).tolist()) == sorted(old.inputs.flatten(1).tolist())


def test_an_image_folder_is_streamed_as_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("train", "test"):
        for name, level in (("a", 0), ("b", 100)):
            (tmp_path / part / name).mkdir(parents=True)
            for number in range(3):
                Image.new("L", (4, 4), level + number).save(tmp_path / part / name / f"{number}.png")
    monkeypatch.setattr("stobatch.data.image_folder.rows_at_once", lambda shape: 4)
    config = DataConfig(name="image_folder", train_limit=5)
    came = list(stream(config, root=tmp_path).train)
    assert [len(labels) for _, labels in came] == [4, 1]
    whole = load(config, root=tmp_path).train.in_memory()
    assert torch.equal(torch.cat([inputs for inputs, _ in came]), whole.inputs)
    assert torch.equal(torch.cat([labels for _, labels in came]), whole.labels)


def test_what_cannot_be_written_is_refused_and_leaves_nothing(
    tmp_path: Path, floats: Dataset, seeds: Seeds, fails
) -> None:
    out = tmp_path / "out"
    assert "Use from 1 to 60 shards." in fails(write_shards, floats, out, 61, seeds)
    assert "one shard or more" in fails(write_shards, floats, out, 0, seeds)
    few, many = (replace(in_chunks(floats, 7), info=replace(floats.info, num_train=n)) for n in (70, 50))
    assert "was to have 70 training examples and has 60" in fails(write_shards, few, out, 4, seeds)
    assert "was to have 50 training examples and has 56" in fails(write_shards, many, out, 4, seeds)
    no_test = replace(in_chunks(floats, 7), info=replace(floats.info, num_test=0), test=())
    assert "no test examples" in fails(write_shards, no_test, out, 4, seeds)
    fewer = replace(in_chunks(floats, 7), test=())
    assert "was to have 7 test examples and has 0" in fails(write_shards, fewer, out, 4, seeds)
    nan = floats.train.in_memory().inputs.clone()
    nan[40, 0, 0, 0] = float("nan")
    chunks = zip(nan.split(7), floats.train.in_memory().labels.split(7), strict=True)
    assert "training example 40 of floats" in fails(
        write_shards, replace(in_chunks(floats, 7), train=chunks), out, 4, seeds
    )
    shaped = replace(in_chunks(floats, 7), info=replace(floats.info, input_shape=(2, 5, 3)))
    assert "is (2, 3, 5), not (2, 5, 3)" in fails(write_shards, shaped, out, 4, seeds)
    assert not out.exists()


def test_what_is_there_is_not_overwritten(tmp_path: Path, folder: Path, floats: Dataset, seeds: Seeds, fails) -> None:
    before = contents(folder)
    assert "already holds shards" in fails(write_shards, floats, folder, 4, seeds)
    assert contents(folder) == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    assert "other files ('thesis.tex')" in fails(write_shards, floats, tmp_path / "mine", 4, seeds)
    assert "Not a directory" in fails(write_shards, floats, tmp_path / "mine" / "thesis.tex", 4, seeds)
    assert contents(tmp_path / "mine") == {"thesis.tex": b"x"}


def test_a_full_disk_is_one_clear_line(
    tmp_path: Path, floats: Dataset, seeds: Seeds, monkeypatch: pytest.MonkeyPatch, fails
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        message = fails(write_shards, floats, tmp_path / "out", 4, seeds)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert message.startswith(f"cannot write {tmp_path / 'out'}: ")
    assert "Free some space" in message
    assert not (tmp_path / "out").exists()
