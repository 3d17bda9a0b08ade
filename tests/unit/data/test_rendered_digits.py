"""Digits drawn from fonts and strokes: framed as MNIST's are, repeatable, and near enough to learn MNIST from."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from stobatch.config import DataConfig
from stobatch.data import load
from stobatch.data.rendered_digits import FOLDER, Distortion, Glyphs, RenderedDigits, list_fonts, read_font_glyphs
from stobatch.data.stroke_digits import make_stroke_glyphs, read_ways, smooth


def strokes(seed: int = 0) -> Glyphs:
    return make_stroke_glyphs(20, torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module", params=["fonts", "strokes"])
def digits(request: pytest.FixtureRequest) -> RenderedDigits:
    return RenderedDigits(read_font_glyphs() if request.param == "fonts" else strokes())


def drawn(digits: RenderedDigits, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    return digits.draw(count, torch.Generator().manual_seed(seed))


def test_strokes_repeat_and_are_of_every_digit_in_every_way() -> None:
    first, again, other = strokes(1), strokes(1), strokes(2)
    assert torch.equal(first.distances, again.distances)
    assert not torch.equal(first.distances, other.distances)
    assert first.labels.bincount().tolist() == [20] * 10
    stiff = make_stroke_glyphs(12, torch.Generator(), looseness=0.0)
    assert [len(stiff.distances[stiff.labels == digit].unique(dim=0)) for digit in range(10)] == [
        *map(len, read_ways())
    ]


def test_a_stroke_passes_through_its_points() -> None:
    points = torch.rand(5, 2)
    curve = smooth(points)
    assert torch.allclose(curve[:: (len(curve) - 1) // 4], points, atol=1e-6)


def test_joined_glyphs_keep_their_labels() -> None:
    both = Glyphs.join([read_font_glyphs(), strokes()])
    assert len(both) == 10 * len(list_fonts()) + 200
    assert torch.equal(both.labels[-200:], strokes().labels)


def test_every_font_has_its_notice_and_the_licence_is_there() -> None:
    rows = [line.split("\t") for line in (FOLDER / "FONTS.tsv").read_text("utf-8").splitlines()]
    assert len({name for name, _, _ in rows}) == len(rows) > 100
    assert all("copyright" in notice.lower() or "©" in notice for _, _, notice in rows)
    assert "SIL OPEN FONT LICENSE Version 1.1" in (FOLDER / "OFL.txt").read_text("utf-8")


def test_the_generator_decides_everything(digits: RenderedDigits) -> None:
    (first, labels), (again, same), (other, _) = (drawn(digits, 20, seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert torch.equal(labels, same)
    assert not torch.equal(first, other)


def test_digits_are_framed_as_mnist_frames_them(digits: RenderedDigits) -> None:
    inputs, labels = drawn(digits, 500)
    assert inputs.shape == (500, 1, 28, 28)
    assert labels.unique().tolist() == list(range(10))
    ink = (inputs[:, 0] + 1) / 2
    assert 0 <= float(ink.min()) <= float(ink.max()) <= 1
    line = torch.arange(28) - 13.5
    for axis in (1, 2):
        off = (ink.sum(axis) * line).sum(1) / ink.sum((1, 2))
        assert float(off.abs().quantile(0.95)) < 1
    sides = [(ink.amax(axis) > 0.5).sum(1) for axis in (1, 2)]
    longest = torch.maximum(*sides).float()
    assert 18.5 < float(longest.median()) < 21.5
    mnist = (load(DataConfig(name="mnist", train_limit=1)).test.inputs + 1) / 2
    assert abs(float(ink.mean()) - float(mnist.mean())) < 0.02


def test_a_wider_pen_leaves_more_ink(digits: RenderedDigits) -> None:
    means = []
    for pen in (0.8, 1.2, 1.6):
        digits.hand = replace(Distortion(), pen=(pen, pen))
        means.append(float(drawn(digits, 200)[0].mean()))
    digits.hand = Distortion()
    assert means == sorted(means)
    assert means[0] < means[-1] - 0.1


def test_what_a_linear_classifier_learns_from_them_holds_for_mnist(digits: RenderedDigits) -> None:
    weights, bias = torch.zeros(10, 784, requires_grad=True), torch.zeros(10, requires_grad=True)
    optimiser = torch.optim.Adam([weights, bias], lr=3e-3)
    for step in range(120):
        inputs, labels = drawn(digits, 128, seed=step)
        loss = F.cross_entropy(F.linear(inputs.flatten(1), weights, bias), labels)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    test = load(DataConfig(name="mnist", train_limit=1, test_limit=2000)).test
    with torch.no_grad():
        right = F.linear(test.inputs.flatten(1), weights, bias).argmax(1) == test.labels
    assert float(right.float().mean()) > 0.65
