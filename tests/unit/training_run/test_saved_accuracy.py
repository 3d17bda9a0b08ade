"""The accuracy that a training records is that of the model it saves, averaged where the method averages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import stobatch
from stobatch.config import RunConfig
from stobatch.data import Dataset
from stobatch.reporting.terminal import trained_line
from stobatch.results import HistoryRow, Training
from stobatch_recipes import recipe


def records() -> Dataset:
    """Two classes that are easy to tell apart, so that every step of a short training changes the accuracy."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(2, (700,), generator=generator)
    inputs = 0.6 * torch.randn(700, 1, 4, 4, generator=generator)
    inputs[:, :, :, 2:] += (labels * 0.5)[:, None, None, None]
    inputs = inputs.clamp(-1, 1)
    return stobatch.from_tensors(inputs[:300], labels[:300], inputs[300:], labels[300:], num_classes=2)


def settings(**changes: object) -> RunConfig:
    plain = {
        "data.name": "tensors",
        "method.epsilon": 8.0,
        "method.delta": 1e-4,
        "method.expected_batch_size": 30,
        "method.average_decay": 0.99,
        "model.architecture": "linear 8, relu, linear",
        "training.steps": 6,
        "training.learning_rate": 4.0,
        "training.monitor_every": 1,
        "training.monitor_examples": 350,
        "machine.threads": 1,
        "seed": 3,
    }
    return recipe("sound.mnist").override_all(plain | {key.replace("__", "."): value for key, value in changes.items()})


def test_train_records_the_accuracy_of_the_model_it_saves(tmp_path: Path) -> None:
    data = records()
    model = stobatch.train(settings(), tmp_path / "run", dataset=data, quiet=True)
    training = model.run.read("training")
    test = data.test.limit(350)
    with torch.no_grad():
        right = int((model.network(test.inputs).argmax(1) == test.labels).sum())
    assert (training["test_accuracy"], training["test_examples"]) == (right / 350, 350)
    assert training["history"][-1]["test_accuracy"] != training["test_accuracy"], "else this test could not fail"
    assert training["history_of"] == "the parameters of that step, before averaging"
    said = trained_line(tmp_path / "run", "abc", Training.read(model.run))
    assert said.endswith(f"the saved model is right on {right / 350:.1%} of 350 held-out test images")


def test_a_training_of_an_older_version_is_not_given_the_accuracy_of_its_last_step() -> None:
    row = HistoryRow(step=6, test_accuracy=0.5)
    old = Training(steps=6, seconds_since_last_start=1.0, device="cpu", torch="2.4", history=(row,))
    assert "50" not in trained_line(Path("run"), "abc", old)
    assert "stobatch evaluate run" in trained_line(Path("run"), "abc", old)


@pytest.mark.parametrize("examples", [1, 999_999])
def test_all_images_are_counted(tmp_path: Path, examples: int) -> None:
    config = settings(training__monitor_examples=examples, training__steps=1)
    training = stobatch.train(config, tmp_path / "run", dataset=records(), quiet=True).run.read("training")
    assert training["test_examples"] == min(examples, 400)
