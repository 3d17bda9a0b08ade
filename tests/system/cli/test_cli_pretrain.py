"""`stobatch pretrain` from the command line to a private training that starts from what it wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stobatch import Status, load
from stobatch.pretraining.images import Rendered
from stobatch.results import PriorCard

FEW = [
    "--recipe",
    "sound.mnist",
    "--set",
    "data.name=small_digits",
    "--set",
    "model.architecture=conv 4 3/2, relu, linear",
]
SHORT = ["--steps", "3", "--batch-size", "16"]
PRIVATE = {"data.train_limit": 120, "data.test_limit": 20, "method.batch_size": 30, "method.delta": 1e-3}
QUICK = [f"{key}={value}" for key, value in (PRIVATE | {"training.steps": 3, "method.epsilon": 3}).items()]


def as_set(pairs: list[str]) -> list[str]:
    return [word for pair in pairs for word in ("--set", pair)]


def test_one_document_and_nothing_else(cli: Any, tmp_path: Path) -> None:
    result = cli("pretrain", "--from-data", "fonts", "--out", tmp_path / "fonts", *FEW, *SHORT, "--seed", "3", "--json")
    assert result.code == 0
    assert result.err == ""
    card = PriorCard.from_dict(result.json())
    assert (card.name, card.settings["steps"], card.settings["seed"]) == ("fonts", 3, 3)
    again = cli("pretrain", "--from-data", "fonts", "--out", tmp_path / "fonts", *FEW, *SHORT)
    assert again.code == 2
    assert "there already" in again.err


def test_a_stop_keeps_nothing_and_says_so(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, drawn = Rendered.draw, []

    def stopped(self: Rendered, count: int, generator: Any) -> Any:
        drawn.append(count)
        if len(drawn) == 2:
            raise KeyboardInterrupt
        return draw(self, count, generator)

    monkeypatch.setattr(Rendered, "draw", stopped)
    result = cli("pretrain", "--from-data", "fonts", "--out", tmp_path / "new" / "fonts", *FEW, *SHORT)
    assert result.code == 130
    assert "of this one nothing is" in result.err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("source", "status"), [("fonts", Status.PROVED), ("dead-leaves", Status.PROVED)])
def test_a_private_training_starts_from_it(cli: Any, tmp_path: Path, source: str, status: Status) -> None:
    made = cli("pretrain", "--from-data", source, "--out", tmp_path / "prior", *FEW, *SHORT)
    assert made.code == 0
    trained = cli("train", "--from", tmp_path / "prior", "--out", tmp_path / "run", *FEW, *as_set(QUICK))
    assert trained.code == 0, trained.err
    guarantee = load(tmp_path / "run").guarantee
    assert guarantee.status is status
    assert guarantee.prior is not None
    assert any("chosen by looking at training images of MNIST" in line for line in guarantee.assumptions) == (
        source == "fonts"
    )


def test_a_prior_of_a_folder_that_nobody_vouches_for_proves_nothing(cli: Any, tmp_path: Path) -> None:
    from PIL import Image

    for label in ("a", "b"):
        (tmp_path / "pictures" / label).mkdir(parents=True)
        Image.new("L", (8, 8), 90 if label == "a" else 200).save(tmp_path / "pictures" / label / "0.png")
    for name, word in (("open", []), ("vouched", ["--may-contain", "none"])):
        made = cli("pretrain", "--from-data", tmp_path / "pictures", "--out", tmp_path / name, *FEW, *SHORT, *word)
        assert made.code == 0, made.err
        run = tmp_path / f"run-{name}"
        assert cli("train", "--from", tmp_path / name, "--out", run, *FEW, *as_set(QUICK)).code == 0
        assert (load(run).guarantee.status is Status.PROVED) == bool(word)
