"""Files that were cut, edited or exchanged are refused with a remedy, never believed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import checkpoints

import stobatch
from stobatch.errors import ModelError, RunError, StobatchError
from stobatch.files import Records, read_json, write_json
from stobatch.published.training import PublishedTrainable
from stobatch.runs import Run


def refusal(call: Callable[[], object], kind: type[StobatchError] = RunError) -> str:
    with pytest.raises(kind) as caught:
        call()
    assert caught.value.remedy
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))


def cut(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def garble(file: Path) -> None:
    file.write_bytes(b"\x00\xff not what it was" * 50)


VERBS: dict[str, Callable[[Path], object]] = {
    "load": stobatch.load,
    "certify": lambda run: stobatch.certify(run, quiet=True),
    "evaluate": lambda run: stobatch.evaluate(run, quiet=True),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("damage", [cut, empty, garble])
@pytest.mark.parametrize("name", ["model.safetensors", "private/noise.safetensors", "config.json"])
def test_a_damaged_file_is_refused_and_nothing_else_changes(run, files, name, damage, verb):
    damage(run / name)
    before = files(run)
    message = refusal(lambda: VERBS[verb](run))
    assert str(run / name) in message
    assert files(run) == before


def part_of(folder: Path) -> Path:
    (part,) = checkpoints.parts(folder)
    return part


def list_of(folder: Path) -> Path:
    return folder / checkpoints.LIST


DAMAGES = [(which, damage) for which in (part_of, list_of) for damage in (cut, empty, garble, Path.unlink)]


class TestCheckpoints:
    """The run has those of its last two steps, the third and the fourth."""

    @pytest.fixture
    def cut_off(self, run):
        """A run that ended after its last checkpoint and before it was done."""
        (run / "model.safetensors").unlink()
        return run

    @pytest.fixture
    def from_step(self, monkeypatch):
        """The steps that are made from now on."""
        real, made = PublishedTrainable.release, list[int]()

        def release(self, step, *rest, **named):
            made.append(step)
            return real(self, step, *rest, **named)

        monkeypatch.setattr(PublishedTrainable, "release", release)
        return made

    def test_the_last_two_are_kept(self, undisturbed):
        assert [folder.name for folder in checkpoints.folders(undisturbed)] == ["step-00000003", "step-00000004"]
        for step, folder in enumerate(checkpoints.folders(undisturbed), 3):
            assert {file.name for file in folder.iterdir()} == {"part-1-of-1.safetensors", "complete.json"}
            assert json.loads(list_of(folder).read_text())["step"] == str(step)

    @pytest.mark.parametrize(("which", "damage"), DAMAGES)
    def test_a_damaged_one_is_passed_over_for_the_one_before(
        self, cut_off, undisturbed, config, same_training, from_step, which, damage
    ):
        damage(which(checkpoints.folders(cut_off)[-1]))
        stobatch.train(config, cut_off, resume=True, quiet=True)
        assert from_step == [3]
        same_training(cut_off, undisturbed)
        assert checkpoints.tensors(cut_off).keys() == checkpoints.tensors(undisturbed).keys()
        for name, value in checkpoints.tensors(undisturbed).items():
            assert torch.equal(checkpoints.tensors(cut_off)[name], value), name
        assert len(checkpoints.folders(cut_off)) == 2

    @pytest.mark.parametrize(("which", "damage"), DAMAGES)
    def test_a_damaged_older_one_does_not_matter(
        self, cut_off, undisturbed, config, same_training, from_step, which, damage
    ):
        """As a kill while the checkpoint that nobody needs any more is removed leaves it."""
        damage(which(checkpoints.folders(cut_off)[0]))
        stobatch.train(config, cut_off, resume=True, quiet=True)
        assert from_step == []
        same_training(cut_off, undisturbed)

    @pytest.mark.parametrize(("which", "damage"), [case for case in DAMAGES if case != (list_of, Path.unlink)])
    def test_a_run_without_a_whole_one_is_refused(self, cut_off, config, files, which, damage):
        for folder in checkpoints.folders(cut_off):
            damage(which(folder))
        before = files(cut_off / "private" / "checkpoints")
        message = refusal(lambda: stobatch.train(config, cut_off, resume=True, quiet=True))
        assert f"every checkpoint in {cut_off / 'private' / 'checkpoints'} is damaged" in message
        assert "new --out" in message
        assert files(cut_off / "private" / "checkpoints") == before
        assert not (cut_off / "model.safetensors").exists()

    def test_what_has_no_list_is_no_checkpoint(self, cut_off, undisturbed, config, same_training, from_step):
        """A kill before the first list was there leaves parts, and a training that begins at its beginning."""
        for folder in checkpoints.folders(cut_off):
            list_of(folder).unlink()
        stobatch.train(config, cut_off, resume=True, quiet=True)
        assert from_step == [0, 1, 2, 3]
        same_training(cut_off, undisturbed)

    def test_exchanged_parts_are_noticed(self, cut_off, undisturbed, config, same_training, from_step):
        """A whole file, readable, of the very run, but not the one that the list names."""
        older, newer = checkpoints.folders(cut_off)
        shutil.copy(part_of(older), part_of(newer))
        stobatch.train(config, cut_off, resume=True, quiet=True)
        assert from_step == [3]
        same_training(cut_off, undisturbed)

    @pytest.mark.parametrize(
        "change",
        [
            lambda d: d.update(step="1"),
            lambda d: d.update(step="many"),
            lambda d: d.pop("step"),
            lambda d: d.pop("parts"),
            lambda d: d.update(parts={}),
            lambda d: d.update(parts=["part-1-of-1.safetensors"]),
            lambda d: d.pop("config_hash"),
        ],
        ids=["another step", "no number", "no step", "no parts", "empty parts", "parts without sums", "no hash"],
    )
    def test_an_edited_list_is_not_believed(self, cut_off, undisturbed, config, same_training, from_step, change):
        """Weights of one step under the number of another would train on, and end elsewhere."""
        edit(list_of(checkpoints.folders(cut_off)[-1]), change)
        stobatch.train(config, cut_off, resume=True, quiet=True)
        assert from_step == [3]
        same_training(cut_off, undisturbed)

    def test_without_checksums_a_changed_part_would_be_believed(self, cut_off, undisturbed, config, from_step):
        """The broken twin: the same change with the checksum to it goes into the model."""
        folder = checkpoints.folders(cut_off)[-1]
        checkpoints.forge(folder, lambda tensors: tensors["network.head.output.weight"].add_(1))
        stobatch.train(config, cut_off, resume=True, quiet=True)
        assert from_step == []
        ours, theirs = (load_file(run / "model.safetensors")["head.output.weight"] for run in (cut_off, undisturbed))
        assert torch.allclose(ours, theirs + 1)


@pytest.mark.parametrize("name", ["private/noise.safetensors", "config.json"])
def test_a_missing_file_is_named(run, name):
    (run / name).unlink()
    assert "Train first" in refusal(lambda: stobatch.load(run)) or name in refusal(lambda: stobatch.load(run))


def test_a_checkpoint_of_another_configuration_is_refused(run, config, tmp_path):
    other = config.override("training.learning_rate", 0.5)
    stobatch.train(other, tmp_path / "other", quiet=True)
    (run / "model.safetensors").unlink()
    shutil.rmtree(run / "private" / "checkpoints")
    shutil.copytree(tmp_path / "other" / "private" / "checkpoints", run / "private" / "checkpoints")
    message = refusal(lambda: stobatch.train(config, run, resume=True, quiet=True))
    assert other.training_hash in message
    assert config.training_hash in message


def test_another_configuration_cannot_resume_a_run(run, config, files):
    before = files(run)
    for key, value in (("training.steps", 9), ("method.total_epsilon", 3.0), ("seed", 8), ("data.test_limit", 50)):
        other = config.override(key, value)
        message = refusal(lambda other=other: stobatch.train(other, run, resume=True, quiet=True))
        assert f"There {key.replace('total_', '')} is " in message or f"There {key} is " in message
        assert f"here it is {value}." in message
    assert files(run) == before


def test_another_machine_may_resume_a_run(run, config):
    other = config.override_all({"machine.checkpoint_every": 3, "machine.memory_mb": 64})
    assert stobatch.train(other, run, resume=True, quiet=True).config.machine.memory_mb == 64


def test_weights_of_another_run_are_refused(run, config, tmp_path):
    stobatch.train(config.override("seed", 99), tmp_path / "other", quiet=True)
    shutil.copy(tmp_path / "other" / "model.safetensors", run)
    assert "belongs to another run" in refusal(lambda: stobatch.load(run))


def test_noise_of_another_run_is_refused(run, config, tmp_path):
    """The deployed function with somebody else's noise is another function; the file says whose it is."""
    stobatch.train(config.override("seed", 99), tmp_path / "other", quiet=True)
    shutil.copy(tmp_path / "other" / "private" / "noise.safetensors", run / "private")
    refusal(lambda: stobatch.load(run))


def test_a_file_of_another_kind_or_version_is_refused(run):
    shutil.copy(run / "plan.json", run / "config.json")
    assert "is not a stobatch config" in refusal(lambda: stobatch.load(run))
    edit(run / "config.json", lambda d: d.update(schema="stobatch.config", version=2))
    assert "schema version 2; this program reads 1" in refusal(lambda: stobatch.load(run))
    (run / "config.json").write_text("[1, 2]")
    assert "is not a stobatch config" in refusal(lambda: stobatch.load(run))


EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a smaller epsilon": lambda d: d["config"]["method"].update(total_epsilon=0.01, label_epsilon=0.001),
    "more examples": lambda d: d["dataset"].update(num_train=60000),
    "another batch size": lambda d: d["config"]["method"].update(batch_size=60),
    "no hash": lambda d: d.pop("training_hash"),
    "no data set": lambda d: d.pop("dataset"),
    "no configuration": lambda d: d.pop("config"),
    "no method": lambda d: d["config"].pop("method"),
    "shape as text": lambda d: d["dataset"].update(input_shape="28x28"),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_configuration_is_noticed(run, name):
    """What the run promises is read from this file; its own hash says whether it was changed."""
    edit(run / "config.json", EDITS[name])
    refusal(lambda: stobatch.load(run))


def test_an_edited_setting_that_is_not_allowed_is_refused(run):
    edit(run / "config.json", lambda d: d["config"]["training"].update(steps=-3))
    assert "was changed" in refusal(lambda: stobatch.load(run))


def test_an_edited_hash_is_noticed(run, config):
    edit(run / "config.json", lambda d: d.update(training_hash="0" * 12))
    refusal(lambda: stobatch.load(run))
    assert "0" * 12 in refusal(lambda: stobatch.train(config, run, resume=True, quiet=True))


@pytest.mark.parametrize("name", ["training.json", "certificates.json", "scores.json"])
def test_a_damaged_report_is_refused_by_who_reads_it(run, name):
    cut(run / name)
    assert name in refusal(lambda: stobatch.report([run]))
    if name == "certificates.json":
        assert name in refusal(lambda: stobatch.evaluate(run, quiet=True))


def test_a_resume_of_a_finished_run_with_a_cut_model_does_not_pretend(run, config):
    cut(run / "model.safetensors")
    assert "model.safetensors is damaged" in refusal(lambda: stobatch.train(config, run, resume=True, quiet=True))


def records(folder: Path, *, config_hash: str = "abc", rows: int = 4) -> Records:
    return Records(
        folder, config_hash=config_hash, expected_rows=rows, resume_command=f"stobatch certify {folder} --resume"
    )


def test_a_short_table_is_refused_with_the_command_that_completes_it(tmp_path):
    table = records(tmp_path)
    assert f"`stobatch certify {tmp_path} --resume`" in refusal(table.read)
    table.write(0, {"index": [0, 1]})
    message = refusal(table.read)
    assert "2 of 4 rows" in message
    assert f"`stobatch certify {tmp_path} --resume`" in message
    table.write(2, {"index": [2, 3]})
    assert table.read() == {"index": [0, 1, 2, 3]}


def test_a_foreign_table_is_refused_with_the_command_that_completes_it(tmp_path):
    records(tmp_path, config_hash="other").write(0, {"index": [0, 1, 2, 3]})
    mine = records(tmp_path)
    assert not mine.has(0)
    message = refusal(mine.read)
    assert "rows-00000000.parquet is of another table: its config_hash is other, not abc" in message
    assert "--resume" in message
    longer = records(tmp_path, config_hash="other", rows=5)
    assert not longer.has(0), "a table of another length is another table"


def test_a_table_with_too_many_rows_is_refused(tmp_path):
    table = records(tmp_path)
    table.write(0, {"index": [0, 1, 2]})
    table.write(1, {"index": [1, 2, 3]})
    assert "rows-00000001.parquet does not hold the rows from 3 on" in refusal(table.read)


def test_a_foreign_part_in_a_run_is_refused_and_made_again_once_it_is_removed(run, rows):
    (part,) = run.glob("records/certify-*/rows-*.parquet")
    want = rows(run, "certify")
    records(part.parent, config_hash="other", rows=60).write(0, {"index": list(range(60)), "label": [0] * 60})
    message = refusal(lambda: stobatch.certify(run, resume=True, quiet=True))
    assert str(part) in message
    assert "remove it and run `stobatch certify" in message
    part.unlink()
    stobatch.certify(run, resume=True, quiet=True)
    assert rows(run, "certify") == want


@pytest.mark.parametrize("damage", [cut, empty, garble])
def test_a_damaged_part_is_refused_or_made_again(run, rows, damage):
    (part,) = run.glob("records/certify-*/rows-*.parquet")
    want = rows(run, "certify")
    damage(part)
    refused = ""
    try:
        stobatch.certify(run, resume=True, quiet=True)
    except RunError as error:
        refused = str(error)
    assert str(part) in refused or rows(run, "certify") == want


def test_json_never_holds_what_json_cannot_say(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "x.json", "plan", {"value": float("nan")})
    assert not list(tmp_path.iterdir())
    write_json(tmp_path / "x.json", "plan", {"value": 1.5})
    assert read_json(tmp_path / "x.json", "plan") == {"value": 1.5}


def test_weights_that_do_not_fit_are_explained(run):
    from safetensors.torch import save_file

    tensors = load_file(run / "model.safetensors")
    tensors["head.output.weight"] = torch.zeros(3, 3)
    save_file(tensors, run / "model.safetensors", {"config_hash": Run(run).read("config")["training_hash"]})
    assert "head.output.weight" in refusal(lambda: stobatch.load(run), ModelError)
