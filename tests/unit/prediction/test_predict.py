"""Predictions: the label that is deployed, a radius that holds, and an answer for every picture."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from support.command_line import call

import stobatch
from stobatch import data
from stobatch.config import DataConfig
from stobatch.data.pixels import PictureRule
from stobatch.errors import DataError, SettingError
from stobatch.loading import TrainedModel
from stobatch.results import Predictions
from stobatch.types import Status
from stobatch_recipes import recipe

SMALL = {"data.train_limit": 400, "data.test_limit": 60, "method.batch_size": 100, "training.steps": 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TrainedModel:
    """With plain bounds: slopes take a hundred times as long, and are the business of tests/unit/bounds."""
    plain = {"certification.slope_steps": 0}
    config = recipe("demo").override_all({**SMALL, **plain, "method.epsilon": 50.0})
    return stobatch.train(config, tmp_path_factory.mktemp("runs") / "sound", quiet=True)


@pytest.fixture(scope="module")
def voting(tmp_path_factory: pytest.TempPathFactory) -> TrainedModel:
    draws = {"certification.noise_draws": 200, "certification.selection_draws": 20}
    config = recipe("sound.mnist_l2").override_all({**SMALL, **draws, "training.steps": 3})
    return stobatch.train(config, tmp_path_factory.mktemp("runs") / "votes", quiet=True)


@pytest.fixture(scope="module")
def inputs() -> torch.Tensor:
    return data.load(DataConfig(name="mnist", train_limit=1, test_limit=20)).test.inputs


@pytest.fixture
def folder(tmp_path: Path, inputs: torch.Tensor) -> Path:
    for place, picture in enumerate(inputs):
        Image.fromarray(((picture[0] + 1) * 127.5).round().byte().numpy()).save(tmp_path / f"{place:02}.png")
    return tmp_path


def test_labels_are_those_of_the_deployed_network(model: TrainedModel, inputs: torch.Tensor) -> None:
    found = model.predict(inputs)
    with torch.no_grad():
        scores = model.network(inputs)
    assert [row.label for row in found.rows] == scores.argmax(1).tolist()
    assert torch.allclose(torch.tensor([row.scores for row in found.rows]), scores.double().float())
    assert found.weights_sha256 == model.weights_sha256
    assert found.certificate is not None
    assert found.certificate.status is Status.PROVED


def test_no_attack_breaks_a_label_inside_its_radius(model: TrainedModel, inputs: torch.Tensor) -> None:
    """And one of twice the radius does, for some: the radius is not idle."""
    found = model.predict(inputs)
    radii = torch.tensor([row.radius for row in found.rows])
    assert (radii > 0).float().mean() > 0.5
    labels = torch.tensor([row.label for row in found.rows])
    for share, may_break in ((1.0, False), (6.0, True)):
        broken = 0
        for picture, label, radius in zip(inputs, labels, radii, strict=True):
            if radius == 0:
                continue
            ball = stobatch.attacks.attack(model.network, picture[None], label[None], min(2.0, share * float(radius)))
            broken += int(ball.success.sum())
        assert (broken > 0) is may_break


def test_a_radius_asked_about_is_answered_as_the_largest_one_says(model: TrainedModel, inputs: torch.Tensor) -> None:
    largest = [row.radius or 0.0 for row in model.predict(inputs).rows]
    asked = float(np.median(largest))
    safe = [row.is_safe for row in model.predict(inputs, radius=asked).rows]
    # The search for the largest goes by steps of a tenth of a pixel value.
    assert all(one for one, radius in zip(safe, largest, strict=True) if radius >= asked + 0.001)
    assert not any(one for one, radius in zip(safe, largest, strict=True) if radius < asked - 0.001)
    assert {True, False} == set(safe)


def test_votes_answer_with_their_chance_of_failure(voting: TrainedModel, inputs: torch.Tensor) -> None:
    found = voting.predict(inputs[:4])
    assert found.certificate is not None
    assert found.certificate.name == "votes"
    assert found.certificate.failure_probability
    assert "wrong with probability at most" in found.meaning()
    assert all(row.radius == 0 for row in found.rows if row.abstains)


def test_files_bytes_and_tensors_are_the_same_pictures(model: TrainedModel, inputs: torch.Tensor, folder: Path) -> None:
    as_bytes = ((inputs + 1) * 127.5).round().to(torch.uint8)
    answers = [
        model.predict(given).rows for given in (inputs, as_bytes, as_bytes.numpy(), folder, sorted(folder.iterdir()))
    ]
    plain = [[row.replace(name="") for row in rows] for rows in answers]
    assert all(rows == plain[0] for rows in plain[1:])
    assert answers[3][0].name == str(folder / "00.png")
    assert model.predict(inputs[0]).rows[0].label == plain[0][0].label


def test_a_picture_that_cannot_be_read_stops_nobody(model: TrainedModel, folder: Path) -> None:
    (folder / "05.png").write_bytes(b"no picture")
    Image.new("RGB", (40, 30)).save(folder / "06.png")
    frames = [Image.new("L", (28, 28), grey) for grey in (0, 255)]
    (folder / ".apart").mkdir()
    frames[0].save(folder / ".apart" / "20.gif", save_all=True, append_images=frames[1:])
    rows = model.predict([folder, folder / ".apart" / "20.gif", folder / "21.png"], radius=0.05).rows
    assert [place for place, row in enumerate(rows) if row.error] == [5, 6, 20, 21]
    assert "animated" in str(rows[20].error)
    assert "not there" in str(rows[21].error)
    assert "not a whole image" in str(rows[5].error)
    assert "30x40" in str(rows[6].error)
    mended = model.predict(folder, radius=0.05, rule=PictureRule(True, False, True)).rows
    assert mended[6].error is None


@pytest.mark.parametrize(
    ("pictures", "said"),
    [
        (torch.zeros(2, 28, 28, 1), r"\[N, H, W, C\]"),
        (torch.zeros(2, 1, 8, 8), r"\(N, 1, 28, 28\)"),
        (torch.full((1, 1, 28, 28), 2.0), r"values span \[2, 2\].*a byte is divided by 127\.5"),
        (torch.full((1, 1, 28, 28), 254.0), r"values span .*Give bytes \(uint8\)"),
        (torch.full((1, 1, 28, 28), torch.nan), "784 of 784 values are NaN or infinite.*no scaling mends"),
        (torch.full((1, 1, 28, 28), torch.inf), "are NaN or infinite"),
        (torch.zeros(1, 1, 28, 28, dtype=torch.int64), "whole numbers of type int64, .*Give bytes as uint8"),
        (torch.ones(1, 1, 28, 28, dtype=torch.int16), "whole numbers of type int16"),
        (torch.zeros(1, 1, 28, 28, dtype=torch.bool), "whole numbers of type bool"),
        ([object()], "no pictures"),
    ],
)
def test_what_is_no_picture_is_refused(model: TrainedModel, pictures: object, said: str) -> None:
    with pytest.raises(DataError, match=said):
        model.predict(pictures)


@pytest.mark.parametrize("radius", [0.0, -1.0])
def test_a_radius_that_says_nothing(model: TrainedModel, inputs: torch.Tensor, radius: float) -> None:
    with pytest.raises(SettingError):
        model.predict(inputs, radius=radius)


@pytest.mark.parametrize("radius", ["a", [0.1], torch.tensor(0.1)], ids=repr)
def test_a_radius_that_is_no_number(model: TrainedModel, inputs: torch.Tensor, radius: object) -> None:
    with pytest.raises(SettingError, match="a radius is one number, and this is a"):
        model.predict(inputs, radius=radius)  # type: ignore[arg-type]


def test_the_verb_prints_a_line_for_each_and_writes_tables(model: TrainedModel, folder: Path) -> None:
    run, tables = model.run.path, folder / ".tables"
    tables.mkdir()
    done = call("predict", run, folder)
    assert done.code == 0, done.err
    assert done.out.count(".png: ") == 20
    assert "radii are proved" in done.out
    lines = [line for line in done.out.splitlines() if " within " in line and "no radius" not in line]
    assert lines
    assert all("(proved, linf;" in line for line in lines), "a radius without its status"
    document = Predictions.from_dict(call("predict", run, folder / "00.png", "--radius", "0.05", "--json").json())
    assert document.rows[0].is_safe is not None
    for name in ("found.csv", "found.parquet"):
        assert call("predict", run, folder, "--out", tables / name).code == 0
    with (tables / "found.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    table = pyarrow.parquet.read_table(tables / "found.parquet")
    assert [int(row["label"]) for row in rows] == table["label"].to_pylist()
    for name in ("kind", "status", "norm", "input_range", "weights_sha256"):
        assert [row[name] for row in rows] == table[name].to_pylist()
    assert (rows[0]["kind"], rows[0]["status"], rows[0]["norm"]) == ("bounds", "proved", "linf")
    assert json.loads(table.schema.metadata[b"certificate"])["status"] == "proved"
    assert "neither .csv nor .parquet" in call("predict", run, folder, "--out", tables / "x.txt").refusal()


def test_the_verb_ends_with_1_where_a_picture_failed(model: TrainedModel, folder: Path) -> None:
    (folder / "03.png").write_bytes(b"")
    done = call("predict", model.run.path, folder)
    assert done.code == 1
    assert done.out.count(".png: ") == 20


def test_a_model_without_certificates_labels_all_the_same(tmp_path: Path, inputs: torch.Tensor) -> None:
    config = recipe("baselines.dpsgd").override_all({**SMALL, "training.steps": 2})
    found = stobatch.train(config, tmp_path / "run", quiet=True).predict(inputs[:3])
    assert found.certificate is None
    assert [row.radius for row in found.rows] == [None] * 3
    assert "no certificate" in str(found)


def test_a_file_of_a_folder_that_is_not_read_is_a_row_with_the_reason(model: TrainedModel, folder: Path) -> None:
    Image.open(folder / "00.png").save(folder / "a.bmp")
    (folder / ".hidden").mkdir()
    for name in ("sub.txt", ".DS_Store", ".hidden/index"):
        (folder / name).write_text("x")
    rows = {Path(row.name).name: row.error for row in model.predict(folder).rows}
    assert len(rows) == 22
    assert {name for name, error in rows.items() if error is not None} == {"a.bmp", "sub.txt"}
    assert "is not .png, .jpg, .jpeg" in str(rows["a.bmp"])
    printed = call("predict", model.run.path, folder)
    assert printed.code == 1
    assert f"{folder / 'a.bmp'}: is not .png, .jpg, .jpeg" in printed.out
    assert model.predict(folder / "a.bmp").rows[0].error is None


def test_what_radii_mean_is_said_where_there_is_a_radius_and_no_name_is_refused(
    model: TrainedModel, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for names in ("", "\n"):
        monkeypatch.setattr("sys.stdin", io.StringIO(names))
        assert "standard input names no file" in call("predict", model.run.path, "-").refusal()
    monkeypatch.setattr("sys.stdin", io.StringIO(str(folder / "missing.png")))
    done = call("predict", model.run.path, "-")
    assert done.code == 1
    assert "radii are" not in done.out
    assert "radii are" not in str(model.predict(folder / "missing.png"))
    monkeypatch.setattr("sys.stdin", io.StringIO(str(folder / "00.png")))
    assert "radii are proved" in call("predict", model.run.path, "-").out
