"""The campaigns of `benchmarks/reliability` see what they are to see, and do the same work with any number of jobs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "reliability"))

from common import added_up, differing, in_lanes

FILES = {
    "training.json": {"accounted_steps": 12, "seconds": 1.5, "data": {"training_commitment": "a"}},
    "private/ledger.json": {"done": 12, "open": 0},
    "manifest.json": {"made": "today"},
}


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("one", "other"):
        for file, content in FILES.items():
            path = tmp_path / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(content))
        (tmp_path / name / "model.safetensors").write_bytes(b"weights")
    return tmp_path / "one", tmp_path / "other"


def rewritten(run: Path, file: str, **changes: object) -> None:
    content = json.loads((run / file).read_text())
    (run / file).write_text(json.dumps(content | changes))


def test_times_and_what_is_drawn_anew_may_differ(runs: tuple[Path, Path]) -> None:
    rewritten(runs[1], "training.json", seconds=2.5, data={"training_commitment": "b"})
    rewritten(runs[1], "manifest.json", made="tomorrow")
    checkpoint = runs[1] / "private" / "checkpoints" / "step-00000003"
    checkpoint.mkdir(parents=True)
    (checkpoint / "complete.json").write_text("{}")
    assert differing(*runs) == []


@pytest.mark.parametrize(
    ("change", "file"),
    [
        (lambda run: rewritten(run, "private/ledger.json", done=9, open=3), "private/ledger.json"),
        (lambda run: rewritten(run, "training.json", accounted_steps=15), "training.json"),
        (lambda run: (run / "model.safetensors").write_bytes(b"Weights"), "model.safetensors"),
        (lambda run: (run / "model.safetensors").unlink(), "model.safetensors"),
        (lambda run: (run / "more.txt").write_text(""), "more.txt"),
    ],
)
def test_everything_else_is_noticed(runs: tuple[Path, Path], change: Callable[[Path], object], file: str) -> None:
    change(runs[1])
    assert differing(*runs) == [file]


@pytest.mark.parametrize("jobs", [1, 3, 8])
def test_lanes_share_the_items_out(tmp_path: Path, jobs: int) -> None:
    def lane(folder: Path, items: Sequence[int]) -> dict[str, int]:
        assert not list(folder.iterdir())
        return {"items": len(items), "sum": sum(items)}

    assert added_up(in_lanes(jobs, tmp_path, lane, range(7))) == {"items": 7, "sum": 21}
    assert len(list(tmp_path.iterdir())) == jobs
