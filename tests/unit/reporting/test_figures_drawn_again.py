"""The same curves give the same bytes, and other curves other ones: that is why tests draw them once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stobatch.reporting.figures import LIGHT, Curve, Panel, Point
from stobatch.results import HistoryRow
from stobatch.results.audit import Histogram


def panels(value: float) -> list[Panel]:
    rows = [Point(radius, value - radius, value - radius - 0.1, value - radius + 0.1) for radius in (0.0, 0.1, 0.2)]
    return [Panel("single pass", "radius", [Curve("madry", rows, {"color": LIGHT["published"]})])]


def history(value: float) -> list[HistoryRow]:
    return [HistoryRow(step=step, test_accuracy=value * step / 4) for step in (2, 4)]


def histogram(value: float) -> Histogram:
    return Histogram(edges=(0.0, 1.0, 1.0 + value), without=(3, 1), with_=(1, 3))


CASES = {"draw": panels, "learning_curve": history, "score_histograms": histogram}


@pytest.mark.parametrize("name", CASES)
def test_drawing_again_gives_the_same_bytes(draw_once: dict[str, Callable[..., Any]], name: str) -> None:
    draw, made = draw_once[name], CASES[name]
    assert draw(made(0.7), "curves") == draw(made(0.7), "curves")
    assert draw(made(0.7), "curves") != draw(made(0.8), "curves")
