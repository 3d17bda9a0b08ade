"""Digits drawn from fonts: framed as MNIST's are, the same from the same generator, and near enough to learn MNIST."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from stobatch.config import DataConfig
from stobatch.data import load
from stobatch.data.font_digits import FOLDER, FontDigits, Hand


@pytest.fixture(scope="module")
def digits() -> FontDigits:
    return FontDigits()


def drawn(digits: FontDigits, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    return digits.draw(count, torch.Generator().manual_seed(seed))


def test_every_font_has_its_notice_and_the_licence_is_there() -> None:
    rows = [line.split("\t") for line in (FOLDER / "FONTS.tsv").read_text("utf-8").splitlines()]
    assert len({name for name, _, _ in rows}) == len(rows) > 100
    assert all("copyright" in notice.lower() or "©" in notice for _, _, notice in rows)
    assert "SIL OPEN FONT LICENSE Version 1.1" in (FOLDER / "OFL.txt").read_text("utf-8")


def test_the_generator_decides_everything(digits: FontDigits) -> None:
    (first, labels), (again, same), (other, _) = (drawn(digits, 20, seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert torch.equal(labels, same)
    assert not torch.equal(first, other)


def test_digits_are_framed_as_mnist_frames_them(digits: FontDigits) -> None:
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


def test_a_wider_pen_leaves_more_ink(digits: FontDigits) -> None:
    means = []
    for pen in (0.8, 1.2, 1.6):
        digits.hand = replace(Hand(), pen=(pen, pen))
        means.append(float(drawn(digits, 200)[0].mean()))
    digits.hand = Hand()
    assert means == sorted(means)
    assert means[0] < means[-1] - 0.1


def test_what_a_linear_classifier_learns_from_fonts_holds_for_mnist(digits: FontDigits) -> None:
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
