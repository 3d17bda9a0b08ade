"""`make same` sees every kind of change: each is made once in a copy of a small folder of results, and named."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import same

WEIGHTS = {"weight": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4), "bias": np.zeros(3, np.float32)}
TRAINING = {"history": [{"step": 10, "loss": 0.25}], "seconds": 1.5, "data": {"training_commitment": "ab"}}
KIND = {"kind": "model"}
JSON, TABLE = "work/run/training.json", "work/run/rows.parquet"
ROWS = {"radius": [0.1, float("nan")], "label": [3, 4]}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """What one command left: its exit code and streams, and a run."""
    folder = tmp_path / "base"
    run = folder / "work" / "run"
    (run / "private").mkdir(parents=True)
    (folder / "said").mkdir()
    (folder / "said" / "00.code").write_text("2\n")
    (folder / "said" / "00.out").write_text(json.dumps({"run": "run", "training": TRAINING}))
    (folder / "said" / "00.err").write_text("stobatch: there is no recipe 'dmeo'. Nearest: demo.\n")
    save_file(WEIGHTS, run / "model.safetensors", metadata=KIND)
    save_file({"noise": np.ones(4, np.float64)}, run / "private" / "noise.safetensors")
    pyarrow.parquet.write_table(pyarrow.table(ROWS), run / "rows.parquet")
    (run / "training.json").write_text(json.dumps(TRAINING))
    (run / "report.html").write_text(f"<p>Made 2026-01-02T03:04:05Z in {run}</p>\n<p>ε = 1</p>\n")
    (run / "private" / "ledger.json").write_text("{}")
    (run / "private" / "ledger.json").chmod(0o600)
    return _placed(folder)


def _placed(folder: Path) -> Path:
    (folder / "place.json").write_text(json.dumps({"WORK": str(folder / "work"), "TREE": "/somewhere/base"}))
    return folder


@pytest.fixture
def new(base: Path, tmp_path: Path) -> Path:
    """The same from another tree, in another place."""
    folder = _placed(Path(shutil.copytree(base, tmp_path / "new")))
    write("work/run/report.html", str(base), str(folder))(folder)
    return folder


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def write(file: str, old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = (folder / file).read_text()
        assert old in text
        (folder / file).write_text(text.replace(old, new))

    return change


def tables(rows: dict[str, list[float]]) -> Callable[[Path], None]:
    return lambda new: pyarrow.parquet.write_table(pyarrow.table(rows), new / TABLE)


MODEL, NOISE, LEDGER = "run/model.safetensors", "run/private/noise.safetensors", "run/private/ledger.json"
TURNED = WEIGHTS | {"weight": WEIGHTS["weight"].T.copy()}
CHANGES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "one bit of a weight": (lambda new: flip(new / "work" / MODEL, -1), f"work/{MODEL}", "weight"),
    "one bit of noise": (lambda new: flip(new / "work" / NOISE, -8), f"work/{NOISE}", "noise"),
    "a shape": (lambda new: save_file(TURNED, new / "work" / MODEL, metadata=KIND), f"work/{MODEL}", "weight"),
    "metadata of tensors": (lambda new: save_file(WEIGHTS, new / "work" / MODEL), f"work/{MODEL}", "metadata/kind"),
    "a number in JSON": (write(JSON, "0.25", "0.2500000001"), JSON, "history/0/loss"),
    "a type in JSON": (write(JSON, "10", "10.0"), JSON, "history/0/step"),
    "a lost key": (write(JSON, ', "loss": 0.25', ""), JSON, "history/0/loss"),
    "a lost key whose value varies": (write(JSON, '"seconds": 1.5, ', ""), JSON, "seconds"),
    "a new key": (write(JSON, '"loss"', '"more": 1, "loss"'), JSON, "history/0/more"),
    "a cell of a table": (tables(ROWS | {"radius": [0.1, 0.2]}), TABLE, "radius/1"),
    "a type of a table": (tables(ROWS | {"label": [3.0, 4.0]}), TABLE, "label/type"),
    "a row less": (tables({name: values[:1] for name, values in ROWS.items()}), TABLE, "label/1"),
    "a word of a page": (write("work/run/report.html", "ε = 1", "ε = 2"), "work/run/report.html", "line 2"),
    "an exit code": (write("said/00.code", "2", "1"), "said/00.code", ""),
    "what was printed": (write("said/00.out", "0.25", "0.5"), "said/00.out", "training/history/0/loss"),
    "a message": (write("said/00.err", "Nearest", "Near"), "said/00.err", "line 1"),
    "a mode": (lambda new: (new / "work" / LEDGER).chmod(0o644), f"work/{LEDGER}", "mode"),
    "a missing file": (lambda new: (new / "work" / LEDGER).unlink(), f"work/{LEDGER}", ""),
    "a file too many": (lambda new: (new / "work" / "extra").write_text(""), "work/extra", ""),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_found_and_named(base: Path, new: Path, name: str) -> None:
    change, file, key = CHANGES[name]
    change(new)
    found = list(same.compare(base, new, "chain"))
    assert (f"chain/{file}", key) in [(difference.file, difference.key) for difference in found], found
    assert {difference.file for difference in found} == {f"chain/{file}"}


def test_nothing_changed_is_the_same(base: Path, new: Path) -> None:
    assert list(same.compare(base, new, "chain")) == []


def test_dates_seconds_commitments_and_folders_may_vary(base: Path, new: Path) -> None:
    write(JSON, "1.5", "72.25")(new)
    write(JSON, '"ab"', '"cd"')(new)
    write("work/run/report.html", "2026-01-02T03:04:05Z", "2027-12-11T10:09:08Z")(new)
    assert list(same.compare(base, new, "chain")) == []


def test_an_intended_difference_is_one_file_and_key() -> None:
    listed = [("chain/work/*/training.json", "history/*/loss", "a reason")]
    assert same.is_listed("chain/work/run/training.json", "history/0/loss", listed)
    assert not same.is_listed("chain/work/run/training.json", "history/0/step", listed)
    assert not same.is_listed("chain/work/run/config.json", "history/0/loss", listed)


def test_a_command_that_fails_in_both_trees_is_no_agreement(base: Path) -> None:
    assert list(same.surprises(base, ["train --recipe dmeo # exit 2"], "chain")) == []
    (found,) = same.surprises(base, ["train --recipe dmeo"], "chain")
    assert found.file == "chain/said/00.code"
    assert "no recipe 'dmeo'" in found.text


def test_every_command_that_draws_at_random_has_a_public_seed() -> None:
    drawing = ("train", "certify", "attack", "evaluate", "audit", "federate", "demo", "verify")
    for lines in same.CHAINS.values():
        for line in lines:
            if line.startswith(drawing) and "# exit 2" not in line and "--help" not in line:
                assert "--seed" in line or "--resume" in line, line
    assert "--seeds 1,2" in same.CHAINS["comparison"][0]
