"""What several processes say: one of them shows progress, each keeps a log for the owner, and no secret is in any."""

from __future__ import annotations

import json
import stat
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.groups import Group, Server, arguments

PROCESSES = 3


@dataclass(frozen=True)
class Secret:
    """A training without a public seed, in a run directory that everybody may list."""

    run: Path
    ended: Group

    @property
    def root(self) -> str:
        return str(json.loads((self.run / "private" / "seeds.json").read_text())["root"])


@pytest.fixture(scope="module")
def secret(group: Server, tmp_path_factory: pytest.TempPathFactory) -> Secret:
    out = tmp_path_factory.mktemp("secret") / "run"
    ended = group(PROCESSES, "train", "--out", out, *arguments(seed=None))
    assert ended.codes == [0] * PROCESSES, ended.err
    return Secret(out, ended)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_every_process_has_a_log_that_only_the_owner_reads(secret: Secret) -> None:
    folder = secret.run / "private" / "logs"
    assert sorted(file.name for file in folder.iterdir()) == [f"process-{rank:05d}.log" for rank in range(PROCESSES)]
    assert mode(folder) == mode(folder.parent) == 0o700
    for rank, file in enumerate(sorted(folder.iterdir())):
        assert mode(file) == 0o600
        first, *rest = file.read_text().splitlines()
        assert f"process {rank} of {PROCESSES}" in first
        assert [line.split(" ", 1)[1].rpartition(" (")[0] for line in rest] == [
            *(f"steps {step} to {step + 2} begin" for step in (0, 2, 4)),
            "done",
        ]


def test_one_process_shows_progress_and_tells_the_result(secret: Secret) -> None:
    leader, *others = secret.ended.processes
    assert "train" in leader.err
    assert "6 of 6" in leader.err
    assert "trained" in leader.out
    assert [process.out for process in others] == [""] * len(others)
    assert [process.err for process in others] == [""] * len(others)


def test_no_secret_is_told_or_lies_outside_of_the_private_folder(secret: Secret) -> None:
    assert len(secret.root) > 30
    said = "".join(process.out + process.err for process in secret.ended.processes)
    logs = "".join(file.read_text() for file in (secret.run / "private" / "logs").iterdir())
    assert secret.root not in said + logs
    for file in secret.run.rglob("*"):
        if file.is_file() and file.name != "seeds.json":
            assert secret.root.encode() not in file.read_bytes(), file
        private = "private" in file.relative_to(secret.run).parts
        assert not private or mode(file) in (0o600, 0o700), file


def test_a_secret_run_is_resumed_with_its_own_seeds_by_another_number_of_processes(
    group: Server, tmp_path: Path
) -> None:
    """The root of the leader is everybody's: the parameters of all agree at every checkpoint, or the run ends."""
    out = tmp_path / "run"
    stop = {0: {"signal_at_step": [15, 2]}}
    assert group(2, "train", "--out", out, *arguments(seed=None), accidents=stop).codes == [130, 130]
    root = (out / "private" / "seeds.json").read_bytes()
    ended = group(3, "train", "--out", out, "--resume", "--json")
    assert ended.codes == [0, 0, 0], ended.err
    assert (out / "private" / "seeds.json").read_bytes() == root
    assert ended.err == "", "with --json nobody shows progress"
    assert json.loads(ended.processes[0].out)["training"]["processes"] == 3


def test_a_process_that_drifts_is_named(group: Server, tmp_path: Path) -> None:
    """Parameters are compared at every checkpoint: one flipped bit in one process ends the training there."""
    out = tmp_path / "run"
    ended = group(2, "train", "--out", out, *arguments(), accidents={1: {"drift_at_step": 2}})
    assert ended.codes == [2, 2], ended.err
    (line,) = ended.said
    assert "processes 0 and 1 differ in their parameters" in line
    assert len(list(out.glob("private/checkpoints/step-*/complete.json"))) == 1, "the drifted one is no checkpoint"
