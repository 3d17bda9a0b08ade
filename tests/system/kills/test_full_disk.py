"""A disk that is full: exit code 2, what was there is unchanged, no stray files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import stobatch
from stobatch.errors import RunError
from stobatch.files import read_json, read_tensors, write_json, write_tensors

LATER = ("certify", "evaluate")


def stray(folder: Path) -> list[str]:
    return [file.name for file in folder.rglob(".*")]


def refused(ended, file: str) -> None:
    assert ended.code == 2, ended.err
    last = ended.err.strip().splitlines()[-1]
    assert last.startswith("stobatch: cannot write ")
    assert file in last
    assert "unchanged" in last
    assert "--resume" in last
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("limit", "file"), [(1000, "config.json"), (6000, "noise.safetensors"), (100_000, "part-1-of-1.safetensors")]
)
def test_training_on_a_full_disk(stobatch_process, undisturbed, same_training, tiny, tmp_path, limit, file):
    out = tmp_path / "run"
    refused(stobatch_process("train", "--out", out, *tiny, "--json", largest_file=limit), file)
    assert not stray(tmp_path)
    assert not (out / "model.safetensors").exists()
    for written in out.rglob("*.json"):
        assert read_json(written, written.stem)
    # There is room again.
    freed = stobatch_process("train", "--out", out, *tiny, "--json", "--resume")
    assert freed.code == 0, freed.err
    same_training(out, undisturbed)


@pytest.mark.parametrize("verb", LATER)
@pytest.mark.parametrize("limit", [600, 3000])
def test_tables_on_a_full_disk(stobatch_process, run, files, verb, limit):
    before = files(run)
    refused(stobatch_process(verb, run, "--json", largest_file=limit), "rows-00000000.parquet")
    assert files(run) == before
    assert not stray(run)


@pytest.mark.parametrize("verb", LATER)
def test_a_full_disk_error_names_its_reason(stobatch_process, run, verb):
    ended = stobatch_process(verb, run, "--json", largest_file=1000)
    assert "None" not in ended.err
    assert "File too large" in ended.err


# Each file is flushed twice: those of the configuration, the noise, the first checkpoint's part and list, the second's,
# and the training. The odd ones are of the folder, once the file has taken its place.
@pytest.mark.parametrize("point", [0, 6, 8, 9, 10, 11, 12, 14, 24])
def test_no_space_at_any_flush_of_a_training(stobatch_process, undisturbed, same_training, tiny, tmp_path, point):
    out = tmp_path / "run"
    ended = stobatch_process("train", "--out", out, *tiny, "--json", full_at_fsync=point)
    assert ended.code == 2
    assert "No space left on device" in ended.err
    assert not stray(tmp_path)
    assert stobatch_process("train", "--out", out, *tiny, "--json", "--resume").code == 0
    same_training(out, undisturbed)


class TestWriting:
    """The same in this process, file by file."""

    @pytest.fixture
    def no_space(self, monkeypatch):
        def full(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)

    def test_json_keeps_the_old_file(self, tmp_path, request):
        file = tmp_path / "plan.json"
        write_json(file, "plan", {"value": 1})
        request.getfixturevalue("no_space")
        with pytest.raises(RunError, match=r"No space left on device.*unchanged.*--resume"):
            write_json(file, "plan", {"value": 2})
        assert read_json(file, "plan") == {"value": 1}
        assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]

    def test_tensors_keep_the_old_file(self, tmp_path, request):
        import torch

        file = tmp_path / "private" / "noise.safetensors"
        write_tensors(file, {"a": torch.ones(3)}, {"who": "me"}, private=True)
        request.getfixturevalue("no_space")
        with pytest.raises(RunError, match="No space left on device"):
            write_tensors(file, {"a": torch.zeros(3)}, {"who": "me"}, private=True)
        tensors, metadata = read_tensors(file)
        assert torch.equal(tensors["a"], torch.ones(3))
        assert metadata == {"who": "me"}
        assert [entry.name for entry in file.parent.iterdir()] == ["noise.safetensors"]

    def test_an_error_of_the_writer_itself_leaves_nothing(self, tmp_path):
        from stobatch.files import write_atomically

        def half(out) -> None:
            out.write(b"half of it")
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            write_atomically(tmp_path / "x", half)
        assert not list(tmp_path.iterdir())

    def test_a_device_that_is_always_full(self, tmp_path):
        """/dev/full itself fails a write the way a full disk does."""
        from stobatch.files import write_atomically

        def write(out) -> None:
            with Path("/dev/full").open("wb", buffering=0) as full:
                full.write(b"x")

        with pytest.raises(RunError, match="No space left on device"):
            write_atomically(tmp_path / "x", write)
        assert not list(tmp_path.iterdir())


def test_the_place_of_a_run_may_be_forbidden(tmp_path, config):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="is a file"):
        stobatch.train(config, tmp_path / "file" / "run", quiet=True)
    assert (tmp_path / "file").read_text() == ""
