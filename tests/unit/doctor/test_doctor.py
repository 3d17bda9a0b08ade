"""Doctor's checks in this process: each says ok here, and each has a broken twin that it must call broken."""

from __future__ import annotations

import re
import socket
import threading
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from stobatch.data import cifar10, mnist
from stobatch.doctor import Examination, Health, Outcome, checks, examinations, examine
from stobatch.dp.accounting import PoissonGaussian
from stobatch.dp.clipping import ClippedSum, clipped_sum_in_one_pass
from stobatch.errors import DataError
from stobatch.files import write_atomically
from stobatch.seeds import Seeds

ROOT = Path(__file__).parents[3]


def found(attempt: Callable[[], Outcome]) -> Outcome:
    """As the user gets it: through the isolation, with a remedy where something is broken."""
    check = examine(Examination("it", attempt, "Mend it."))
    assert check.said
    assert bool(check.remedy) == (check.status in (Health.BROKEN, Health.WARNING, Health.MISSING))
    return Outcome(check.status, check.said, check.remedy)


HERE = {
    "packages": checks.packages,
    "cores": partial(checks.cores_and_threads, {}, lambda: 4, lambda: 4),
    "memory": checks.memory,
    "torch": checks.torch_works,
    "determinism": checks.determinism,
    "accountant": checks.accountant,
    "clipping": checks.clipping,
    "noise": checks.noise,
    "mnist": checks.embedded_mnist,
}


@pytest.mark.parametrize("name", HERE)
def test_it_works_here(name):
    assert found(HERE[name]).status is Health.OK


def test_the_disk_works_here_and_nothing_is_left(tmp_path):
    assert found(lambda: checks.disk(tmp_path / "not" / "made" / "yet")).status is Health.OK
    assert not list(tmp_path.iterdir())


def test_every_dependency_has_a_module_that_loads():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {re.match(r"[\w-]+", line)[0]: "0" for line in project["dependencies"]}
    assert checks.packages(named).status is Health.OK
    assert "torch" in checks.requirements().keys() & named.keys()


def scaled(factor: float) -> Callable[[PoissonGaussian, float], float]:
    return lambda steps, delta: factor * steps.epsilon(delta)


def half_clipped(network, losses, batch, clip_norm):
    return clipped_sum_in_one_pass(network, losses, batch, 2 * clip_norm)


def one_left_out(network, losses, batch, clip_norm):
    done = clipped_sum_in_one_pass(network, losses, tuple(entry[1:] for entry in batch), clip_norm)
    return ClippedSum(done.gradients, torch.cat([done.norms[:1], done.norms]))


def normal(name: str) -> np.ndarray:
    return Seeds.reproducible(0).philox("doctor", name).standard_normal(checks.DRAWS)


BROKEN = {
    "a product that is a little off": lambda: checks.torch_works(lambda a, b: 1.0001 * (a @ b)),
    "a product that is NaN": lambda: checks.torch_works(lambda a, b: float("nan") * (a @ b)),
    "gradients that differ": lambda: checks.determinism(lambda: [torch.rand(3)]),
    "an accountant that undercounts": lambda: checks.accountant(scaled(0.998)),
    "an accountant that overcounts": lambda: checks.accountant(scaled(1.002)),
    "an accountant that says NaN": lambda: checks.accountant(scaled(float("nan"))),
    "clipping at twice the norm": lambda: checks.clipping(half_clipped),
    "an example left out": lambda: checks.clipping(one_left_out),
    "half the noise": lambda: checks.noise(lambda name: normal(name) / 2),
    "noise of another law": lambda: checks.noise(lambda name: np.tanh(normal(name)) / 0.628),
    "one stream for every name": lambda: checks.noise(lambda name: normal("a")),
    "two streams for one name": lambda: checks.noise(
        lambda name: np.random.default_rng().standard_normal(checks.DRAWS)
    ),
    "no package": lambda: checks.packages({"torch": "2", "nonesuch": "1"}),
    "an old package": lambda: checks.packages({"torch": "1000"}),
    "no memory": lambda: checks.memory(lambda: 2**29),
    "a place that is not writable": lambda: checks.disk(Path("/proc")),
    "a disk that loses data": lambda: checks.disk(Path(), lambda path, write: path.write_bytes(b"short")),
    "a disk with little left": lambda: checks.disk(Path(), free=lambda place: 2**20),
    "a data folder that is not there": lambda: checks.data_folder("/nowhere"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_twin_is_caught(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert found(BROKEN[name]).status is Health.BROKEN
    assert not list(tmp_path.iterdir())


def test_the_remedy_names_what_to_install():
    assert found(BROKEN["no package"]).remedy.endswith(" nonesuch")
    assert "nonesuch does not load (ModuleNotFoundError)" in found(BROKEN["no package"]).said
    assert "is too old" in found(BROKEN["an old package"]).said


def test_damaged_mnist_is_caught(tmp_path):
    for file in mnist.FOLDER.glob("*.gz"):
        (tmp_path / file.name).write_bytes(file.read_bytes()[:2000])
    outcome = found(lambda: checks.embedded_mnist(tmp_path))
    assert outcome.status is Health.BROKEN
    assert "train-images-idx3-ubyte.gz cannot be unpacked" in outcome.said
    assert str(tmp_path) not in outcome.said
    assert "--force-reinstall" in outcome.remedy


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path):
    def full(path, write):
        def no_room(out):
            with Path("/dev/full").open("wb", buffering=0) as device:
                device.write(b"x")

        write_atomically(path, no_room)

    outcome = found(lambda: checks.disk(tmp_path, full))
    assert (outcome.status, outcome.said) == (
        Health.BROKEN,
        "a file cannot be written where runs go: No space left on device",
    )
    assert not list(tmp_path.iterdir())


def test_a_file_where_the_runs_should_go_is_caught(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    for place in (tmp_path / "thesis.tex", tmp_path / "thesis.tex" / "run"):
        outcome = found(partial(checks.disk, place))
        assert outcome.status is Health.BROKEN
        assert "Not a directory" in outcome.said
    assert (tmp_path / "thesis.tex").read_text() == "precious"


def test_little_room_is_a_warning(tmp_path):
    assert found(lambda: checks.disk(tmp_path, free=lambda place: 2**30)).status is Health.WARNING


def test_the_data_folder(tmp_path):
    assert found(lambda: checks.data_folder(None)).status is Health.ABSENT
    (tmp_path / cifar10.FOLDER).mkdir()
    (tmp_path / "secret-study.csv").write_text("1,2")
    outcome = found(lambda: checks.data_folder(str(tmp_path)))
    assert outcome == Outcome(Health.OK, "STOBATCH_DATA has 2 entries; known data sets: CIFAR-10")


@pytest.mark.parametrize(
    ("environment", "cores", "threads", "remedy"),
    [
        ({}, 2, 2, ""),
        ({}, 2, 3, "Set OMP_NUM_THREADS=2 (or --set machine.threads=2)."),
        ({"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "8"}, 8, 8, "Set OMP_NUM_THREADS=4 (or --set machine.threads=4"),
        ({"LOCAL_WORLD_SIZE": "4"}, 2, 1, "Set OMP_NUM_THREADS=1 (or --set machine.threads=1), and start fewer"),
        ({"LOCAL_WORLD_SIZE": "many", "OMP_NUM_THREADS": "4,2"}, 2, 2, ""),
    ],
)
def test_more_threads_than_cores_are_a_warning(environment, cores, threads, remedy):
    outcome = checks.cores_and_threads(environment, lambda: cores, lambda: threads)
    assert outcome.status is (Health.WARNING if remedy else Health.OK)
    assert outcome.remedy.startswith(remedy)
    assert f"cores: {cores}; " in outcome.said


def test_the_container_limits_cores_and_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "CGROUP", tmp_path)
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert checks.available_cores() <= 2
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert checks.available_cores() == 1
    (tmp_path / "memory.max").write_text(f"{2**30}\n")
    (tmp_path / "memory.current").write_text(f"{2**29}\n")
    assert checks.free_memory() == 2**29
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {2**28}\n")
    assert checks.free_memory() == 2**29 + 2**28


def test_an_extra_that_is_not_installed_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(checks.EXTRAS, "flwr", ("no_such_module", "pip install flwr"))
    assert found(partial(checks.extra, "flwr")) == Outcome(Health.MISSING, "not installed", "pip install flwr")
    monkeypatch.setitem(checks.EXTRAS, "flwr", ("json", "pip install flwr"))
    assert found(partial(checks.extra, "flwr")).status is Health.OK


class TestIsolation:
    """Whatever a check does, the others have their turn."""

    @pytest.mark.parametrize(
        ("error", "said"),
        [
            (ValueError("bad\nvery bad"), "failed with ValueError: bad"),
            (KeyboardInterrupt(), "failed with KeyboardInterrupt"),
            (PermissionError(13, "Permission denied", "/home/ann/secret"), "the system refused: Permission denied"),
            (RuntimeError("see '/home/ann/my thesis/x.py'"), "failed with RuntimeError: see '.../x.py'"),
            (RuntimeError(f"{socket.gethostname()} refused"), "failed with RuntimeError: this-host refused"),
            (DataError("It is gone.", why="Eaten.", remedy="Feed the dog."), "It is gone. Eaten."),
        ],
    )
    def test_a_crash_is_one_line(self, error, said):
        def crash() -> Outcome:
            raise error

        check = examine(Examination("it", crash, "Mend it."))
        assert (check.status, check.said) == (Health.BROKEN, said)
        assert check.remedy == getattr(error, "remedy", "Mend it.")
        assert check.stops_training
        assert not examine(Examination("it", crash, "Mend it.", needed=False)).stops_training

    def test_a_hang_is_cut_off(self):
        released = threading.Event()

        def hang() -> Outcome:
            released.wait(30)
            return Outcome(Health.OK, "late")

        check = examine(Examination("it", hang, "Mend it.", seconds=0.2))
        released.set()
        assert (check.status, check.said) == (Health.BROKEN, "no answer within 0.2 s")
        assert 0.2 <= check.seconds < 30, "it waited for an answer to the end"


def test_every_examination_has_its_own_name_and_a_remedy():
    made = examinations(Path())
    assert len({one.name for one in made}) == len(made)
    assert all(one.remedy for one in made)
