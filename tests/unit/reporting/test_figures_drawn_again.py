"""The same curves give the same bytes, and other curves other ones: that is why tests draw them once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stobatch.reporting.figures import LIGHT, Curve, Panel, Point


def panels(value: float) -> list[Panel]:
    rows = [Point(radius, value - radius, value - radius - 0.1, value - radius + 0.1) for radius in (0.0, 0.1, 0.2)]
    return [Panel("single pass", "radius", [Curve("madry", rows, {"color": LIGHT["published"]})])]


def test_drawing_again_gives_the_same_bytes(draw_once: Callable[..., Any]) -> None:
    assert draw_once(panels(0.7), "curves") == draw_once(panels(0.7), "curves")
    assert draw_once(panels(0.7), "curves") != draw_once(panels(0.8), "curves")
