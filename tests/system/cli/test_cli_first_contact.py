"""What a new user gets wrong first: each answer says what to do instead, and nothing is read or written before it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import stobatch
from stobatch import data
from stobatch.errors import ModelError
from stobatch.registry import ATTACKS, METHODS
from stobatch.runs import Run
from stobatch_recipes import recipe


@pytest.fixture
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading data fails the test."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("data were read before the mistake was found")

    monkeypatch.setattr(data, "load", refuse)


@pytest.mark.usefixtures("no_data")
def test_a_place_that_cannot_be_written_is_named_with_its_cause(cli, tiny) -> None:
    # /proc takes no folder from anybody, root included.
    message = cli("train", *tiny, "--out", "/proc/stobatch/run", "--json").refusal()
    assert "cannot write /proc/stobatch/run: " in message
    assert "Choose another --out" in message


def test_a_resumed_training_names_the_first_setting_that_differs(cli, tiny, finished_run: Path) -> None:
    other = [*tiny, "--set", "training.learning_rate=0.5", "--set", "training.steps=9"]
    message = cli("train", *other, "--out", finished_run, "--resume", "--json").refusal()
    assert "There training.steps is 4, here it is 9." in message
    before = {file: file.read_bytes() for file in finished_run.rglob("*") if file.is_file()}
    machine = [*tiny, "--set", "machine.memory_mb=64"]
    assert cli("train", *machine, "--out", finished_run, "--resume", "--json").code == 0
    assert before == {file: file.read_bytes() for file in finished_run.rglob("*") if file.is_file()}, "it was sealed"


@pytest.mark.usefixtures("no_data")
def test_a_training_needs_a_recipe(cli, tmp_path: Path) -> None:
    assert "Name a recipe" in cli("train", "--out", tmp_path / "run").refusal()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan", "--recipe", "demo", "--epsilon", "2"], "--set method.epsilon=2"),
        (["plan", "--recipe", "demo", "--learning-rate", "0.1"], "--set training.learning_rate=0.1"),
        (["plan", "--recipe", "demo", "--nothing-like-it", "2"], "`stobatch plan --help`"),
        (["nothing"], "`stobatch --help`"),
        (["train", "--recipe", "demo"], "'--out'"),
    ],
)
def test_what_the_parser_refuses_is_one_line_with_a_remedy(cli, arguments: list[str], said: str) -> None:
    assert said in cli(*arguments).refusal()


def test_pgd_is_madry() -> None:
    config = recipe("demo").override("evaluation.adaptive_attacks", ["pgd", "fgsm"])
    assert config.evaluation.adaptive_attacks == ("madry", "fgsm")
    assert config == recipe("demo").override("evaluation.adaptive_attacks", ["madry", "fgsm"])
    assert "pgd" not in list(ATTACKS)
    assert ATTACKS["pgd"] is ATTACKS["madry"]


def test_nearest_names_are_near(cli) -> None:
    assert METHODS.nearest("qqqq") == []
    message = cli("plan", "--recipe", "qqqq").refusal()
    assert "Nearest" not in message
    assert "There are demo" in message


def test_a_plain_module_of_another_shape_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    inputs, labels = torch.rand(40, 1, 8, 8) * 2 - 1, torch.arange(40) % 2
    dataset = stobatch.from_tensors(inputs[:30], labels[:30], inputs[30:], labels[30:], num_classes=2)
    network = nn.Sequential(nn.Flatten(), nn.Linear(49, 2))
    config = recipe("demo").override_all({"method.batch_size": 10, "training.steps": 2, "canaries.num": 0})
    with pytest.raises(ModelError, match=r"\(1, 8, 8\)"):
        stobatch.train(config, tmp_path / "run", dataset=dataset, network=network, quiet=True)
    assert not Run(tmp_path / "run").exists


def test_flower_is_looked_for_before_anything_is_written(cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))  # a place without Flower's programs
    assert "stobatch[flower]" in cli("federate", "--out", tmp_path / "run", "--through", "loopback").refusal()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("rate", "warned"), [(1e9, True), (1.0, False)])
def test_a_diverged_training_warns(cli, tmp_path: Path, rate: float, warned: bool) -> None:
    small = ["data.train_limit=200", "data.test_limit=50", "method.batch_size=50", "training.steps=6"]
    settings = [part for one in (*small, f"training.learning_rate={rate}") for part in ("--set", one)]
    done = cli("train", "--recipe", "demo", "--out", tmp_path / "run", "--json", *settings)
    assert done.code == 0
    assert ("diverged" in done.err) is warned


def test_a_certificate_is_not_its_own_remedy(cli, tmp_path: Path) -> None:
    small = ["data.train_limit=200", "data.test_limit=50", "method.batch_size=50", "training.steps=2"]
    settings = [part for one in small for part in ("--set", one)]
    assert cli("train", "--recipe", "baselines.dpsgd", "--out", tmp_path / "run", "--json", *settings).code == 0
    for kind in ("best", "votes"):
        message = cli("certify", tmp_path / "run", "--set", f"certification.certificate={kind}").refusal()
        assert f"certificate={kind}." not in message


def test_inputs_in_another_layout_are_named() -> None:
    images, labels = torch.zeros(4, 8, 8, 3), torch.tensor([0, 1, 0, 1])
    with pytest.raises(stobatch.StobatchError, match=r"\[N, H, W, C\].*permute\(0, 3, 1, 2\)"):
        stobatch.from_tensors(images, labels, images, labels)


def test_class_names_are_taken_and_half_the_range_is_said(caplog: pytest.LogCaptureFixture) -> None:
    images, labels = torch.rand(4, 1, 8, 8), torch.tensor([0, 1, 0, 1])
    found = stobatch.from_tensors(images, labels, images, labels, class_names=["cat", "dog"])
    assert found.info.class_names == ("cat", "dog")
    assert "seem to be over [0, 1]" in caplog.text
    caplog.clear()
    stobatch.from_tensors(images * 2 - 1, labels, images * 2 - 1, labels, class_names=["cat", "dog"])
    assert not caplog.text
    for names in (["cat"], ["cat", "cat"], ["a", "b", "c"]):
        with pytest.raises(stobatch.StobatchError, match="class names"):
            stobatch.from_tensors(images, labels, images, labels, class_names=names, num_classes=2)
