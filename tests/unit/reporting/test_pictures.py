"""Pictures in the report: the recorded pixels, from this run only, small enough to be mailed."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
import torch
from made_runs import HASH, config, make, scores
from pages import page
from PIL import Image

from stobatch.errors import RunError
from stobatch.files import write_tensors


def decoded(address: str) -> bytes:
    return base64.b64decode(address.removeprefix("data:image/png;base64,"))


def test_pictures_are_the_pixels_with_right_and_wrong_answers(path):
    found = page(make(path))
    pictures = [attributes for tag, attributes in found.elements if tag == "img"]
    assert [p["alt"] for p in pictures] == [
        "test image 0, clean, label cat: answer cat",
        "test image 0, radius 0.2: answer cat",
        "test image 1, clean, label dog: answer dog",
        "test image 1, radius 0.2: answer cat",
    ]
    assert np.asarray(Image.open(io.BytesIO(decoded(pictures[0]["src"])))).flatten().tolist() == list(range(64))
    assert found.text.count('<span class="right">') == 3
    assert found.text.count('<span class="wrong">cat ✗') == 1
    assert "test images" in found.prose


def test_pictures_can_be_left_out_and_the_page_says_so(path):
    run = make(path)
    (path / "images.safetensors").unlink()
    found = page(run, images=False)
    assert "<img" not in found.text
    assert "left out of this report on request" in found.prose
    with pytest.raises(RunError, match=r"images\.safetensors is not there.*report without images"):
        page(run, images=True)
    assert "This copy of the run holds no pictures" in page(run).prose


def test_pictures_of_another_run_or_from_elsewhere_are_refused(path):
    found = scores()
    found["training_hash"] = "f" * 12
    run = make(path, found, {**config(), "training_hash": "f" * 12})
    with pytest.raises(RunError, match="not of this run"):
        page(run)
    found = scores()
    found["images"]["file"] = "../elsewhere/images.safetensors"
    run = make(path.with_name("sly"), found)
    (path.parent / "elsewhere").mkdir()
    (run.path / "images.safetensors").rename(path.parent / "elsewhere" / "images.safetensors")
    with pytest.raises(RunError, match=r"sly/images\.safetensors is not there"):
        page(run, images=True)


def test_large_pictures_are_shrunk_and_the_page_says_so(path):
    run = make(path)
    pixels = torch.randint(0, 256, (2, 3, 224, 224), dtype=torch.uint8)
    tensors = {"clean": pixels, "0.2": 255 - pixels}
    write_tensors(path / "images.safetensors", tensors, {"config_hash": HASH}, private=False)
    found = page(run)
    assert "shrunk to 96 pixels" in found.prose
    sizes = [Image.open(io.BytesIO(decoded(a["src"]))).size for tag, a in found.elements if tag == "img"]
    assert sizes == [(96, 96)] * 4
