"""Every failure of the system names its file; what a killed writer left is removed; modes follow the umask."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

import stobatch
from stobatch.errors import RunError
from stobatch.files import open_private, read_json, remove_temporaries, write_json, write_tensors
from stobatch.runs import Run


def test_a_folder_in_the_place_of_a_document_is_named(tmp_path: Path) -> None:
    (tmp_path / "plan.json").mkdir()
    with pytest.raises(RunError, match=r"cannot read .*plan\.json: Is a directory"):
        read_json(tmp_path / "plan.json", "plan")


def test_an_error_of_the_system_is_not_blamed_on_the_output(monkeypatch: pytest.MonkeyPatch, capsys, tmp_path) -> None:
    from stobatch.cli import app

    def broken(*given: object, **named: object) -> None:
        raise PermissionError(13, "Permission denied", "/data/secret.bin")

    monkeypatch.setattr("stobatch.plan", broken)
    monkeypatch.setattr("sys.argv", ["stobatch", "plan", "--recipe", "demo", "--seed", "1"])
    with pytest.raises(SystemExit) as left:
        app.main()
    assert left.value.code == 2
    assert capsys.readouterr().err.startswith("stobatch: cannot use /data/secret.bin: Permission denied.")


def test_a_lock_in_a_place_that_is_none_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"cannot use .*file/run"), Run(tmp_path / "file" / "run").held():
        pass


def test_a_checkpoint_that_cannot_be_removed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stobatch.training import checkpoint

    def refuse(folder: Path) -> None:
        raise PermissionError(13, "Permission denied", str(folder / "part"))

    monkeypatch.setattr("shutil.rmtree", refuse)
    with pytest.raises(RunError, match=r"cannot remove .*part: Permission denied"):
        checkpoint._remove(tmp_path / "step-00000001")


@pytest.mark.parametrize(
    "place", [".", "private", "private/checkpoints/step-00000001", "records/certify-abc", "evidence"]
)
def test_the_next_lock_removes_what_a_killed_writer_left(tmp_path: Path, place: str) -> None:
    run = Run(tmp_path / "run")
    folder = run.path / place
    folder.mkdir(parents=True)
    left = folder / ".config.json.0123456789abcdef.tmp"
    foreign = [
        folder / name for name in (".config.json.swp", ".gitignore.template", "x.0123456789abcdef.tmp", ".a.tmp")
    ]
    for file in (left, *foreign):
        file.write_text("")
    with run.held():
        assert not left.exists()
    assert all(file.exists() for file in foreign)


def test_a_lock_under_which_nothing_was_written_leaves_nothing(tmp_path: Path) -> None:
    with Run(tmp_path / "new" / "run").held():
        assert (tmp_path / "new" / "run").is_dir()
    assert not list(tmp_path.iterdir())


def test_temporaries_of_runs_below_are_theirs(tmp_path: Path) -> None:
    """A comparison's folder holds runs, which others may be writing."""
    below = tmp_path / "sound" / "seed-1" / ".config.json.0123456789abcdef.tmp"
    below.parent.mkdir(parents=True)
    below.write_text("")
    remove_temporaries(tmp_path)
    assert below.exists()


@pytest.mark.parametrize("verb", ["certify", "attack", "evaluate", "report"])
def test_every_verb_that_writes_waits_for_nobody(run: Path, files, verb: str) -> None:
    before = files(run)
    call = {
        "certify": lambda: stobatch.certify(run, quiet=True),
        "attack": lambda: stobatch.attack(run, quiet=True),
        "evaluate": lambda: stobatch.evaluate(run, quiet=True),
        "report": lambda: stobatch.report([run]),
    }[verb]
    with Run(run).held(), pytest.raises(RunError, match="another command works on"):
        call()
    assert files(run) == before


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077, 0o002])
def test_modes_follow_the_umask_and_private_things_do_not(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        run = Run(tmp_path / "run")
        run.write("plan", {"a": 1})
        run.write("seeds", {"root": "1"}, private=True)
        write_json(run.path / "evidence" / "x.json", "x", {})
        write_tensors(run.path / "private" / "deep" / "t.safetensors", {}, {}, private=True)
        with Run(tmp_path / "other" / "held").held():
            Run(tmp_path / "other" / "held").write("plan", {"a": 1})
        os.close(open_private(run.path / "flower.log", os.O_WRONLY))
    finally:
        os.umask(before)

    def mode(path: Path) -> int:
        return stat.S_IMODE(path.stat().st_mode)

    assert mode(run.path / "plan.json") == mode(run.path / "evidence" / "x.json") == 0o666 & ~umask
    assert mode(run.path) == mode(run.path / "evidence") == mode(tmp_path / "other" / "held") == 0o777 & ~umask
    assert mode(run.path / "private") == mode(run.path / "private" / "deep") == 0o700 & ~umask
    assert mode(run.path / "private" / "seeds.json") == 0o600
    assert mode(run.path / "private" / "deep" / "t.safetensors") == 0o600
    assert mode(run.path / "flower.log") == 0o600
