"""The page, in a real browser: a digit is drawn, answered and attacked, by pointer, finger and keyboard."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
import torch
from http_client import serving
from support.browser import CHROMIUM, Browser, open_browser
from support.pages import ROOT

import stobatch
from stobatch.loading import TrainedModel
from stobatch.reporting.page import PALETTE
from stobatch_recipes import recipe

SITE = ROOT / "src/stobatch/serving/site"
KEPT = ROOT / "build/serving-page"
"""Where screenshots are left to be looked at."""

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> TrainedModel:
    """A run with a claimed and a proved radius."""
    small = {"data.train_limit": 300, "data.test_limit": 6, "method.batch_size": 99, "training.steps": 1}
    config = recipe("published.demo").override_all({**small, "certification.noise_draws": 50})
    return stobatch.train(config, tmp_path_factory.mktemp("runs") / "published", quiet=True)


@pytest.fixture(scope="module")
def address(model: TrainedModel, published: TrainedModel) -> Iterator[str]:
    with serving({"digits": model, "published": published}, allow_void=True) as client:
        yield client.address


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    KEPT.mkdir(parents=True, exist_ok=True)
    with open_browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


def wait_for(browser: Browser, expression: str, seconds: float = 60) -> Any:
    deadline = monotonic() + seconds
    while not (found := browser.evaluate(expression)):
        assert monotonic() < deadline, (expression, browser.evaluate("document.body.innerText"), browser.messages)
        sleep(0.05)
    return found


def text(browser: Browser, element: str) -> str:
    return str(browser.evaluate(f"document.getElementById('{element}').textContent"))


def open_page(browser: Browser, address: str, width: int, scheme: str) -> None:
    browser.messages.clear()
    browser.show(address, width, scheme)
    wait_for(browser, "document.querySelectorAll('#model option').length == 2")


def board_point(browser: Browser, x: float, y: float) -> dict[str, float]:
    box = browser.evaluate("JSON.stringify(document.getElementById('draw').getBoundingClientRect())")
    found = json.loads(box)
    return {"x": found["left"] + x * found["width"], "y": found["top"] + y * found["height"]}


STROKE = [(0.5, 0.2 + 0.06 * step) for step in range(11)]


def draw_by_mouse(browser: Browser) -> None:
    for place, (x, y) in enumerate(STROKE):
        kind = "mousePressed" if place == 0 else "mouseMoved"
        point = board_point(browser, x, y)
        browser.ask("Input.dispatchMouseEvent", type=kind, button="left", buttons=1, clickCount=1, **point)
    browser.ask("Input.dispatchMouseEvent", type="mouseReleased", button="left", **board_point(browser, *STROKE[-1]))


def draw_by_touch(browser: Browser) -> None:
    for place, (x, y) in enumerate(STROKE):
        kind = "touchStart" if place == 0 else "touchMove"
        browser.ask("Input.dispatchTouchEvent", type=kind, touchPoints=[board_point(browser, x, y)])
    browser.ask("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])


def press(browser: Browser, key: str, times: int = 1) -> None:
    for _ in range(times):
        for kind in ("keyDown", "keyUp"):
            browser.ask("Input.dispatchKeyEvent", type=kind, key=key, code="Space" if key == " " else key)


def draw_by_keys(browser: Browser) -> None:
    browser.evaluate("document.getElementById('draw').focus()")
    press(browser, "ArrowUp", 8)
    press(browser, " ")
    press(browser, "ArrowDown", 16)
    press(browser, " ")


def set_slider(browser: Browser, value: float) -> None:
    browser.evaluate(
        f"(() => {{ const one = document.getElementById('radius'); one.value = {value};"
        "one.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )


@needs_chromium
@pytest.mark.parametrize(
    ("way", "width", "scheme"),
    [("mouse", 1200, "light"), ("touch", 390, "dark"), ("keys", 390, "light")],
)
def test_a_digit_is_drawn_answered_and_attacked(
    browser: Browser, address: str, model: TrainedModel, way: str, width: int, scheme: str
) -> None:
    open_page(browser, address, width, scheme)
    {"mouse": draw_by_mouse, "touch": draw_by_touch, "keys": draw_by_keys}[way](browser)
    wait_for(browser, "state.answer !== null")
    label, meaning = text(browser, "label"), text(browser, "meaning")
    values = browser.evaluate("Array.from(state.picture)")
    (row,) = model.predict(torch.tensor(values).view(1, 1, 28, 28)).rows
    assert max(values) > 0.5, "something is drawn"
    assert label == row.class_name
    assert f"{row.radius:.4g}"[:5] in meaning or not row.radius
    assert ("Proved: no change up to" in meaning) == bool(row.radius)
    # Inside what is proved nothing is looked for; far outside an attack succeeds, or says that it proves nothing.
    if row.radius and row.radius > 0.02:
        set_slider(browser, row.radius / 2)
        assert "No attack can" in text(browser, "attack")
    set_slider(browser, float(browser.evaluate("document.getElementById('radius').max")))
    said = wait_for(browser, "/Broken|proves nothing/.exec(document.getElementById('attack').textContent)?.[0]")
    assert said in ("Broken", "proves nothing")
    assert "proved" in text(browser, "card")
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing overflows"
    browser.screenshot(KEPT / f"{way}-{width}-{scheme}.png")
    assert not browser.messages


@needs_chromium
def test_published_and_proved_stand_side_by_side(browser: Browser, address: str) -> None:
    open_page(browser, address, 1200, "dark")
    browser.evaluate(
        "(() => { const one = document.getElementById('model'); one.value = 'published';"
        "one.dispatchEvent(new Event('change')); })()"
    )
    draw_by_mouse(browser)
    wait_for(browser, "state.answer !== null")
    listed = browser.evaluate("Array.from(document.querySelectorAll('#kinds li')).map((one) => one.textContent)")
    size = r"([\d.e+-]+ linf|no radius)"
    assert [
        bool(re.fullmatch(f"{name}: {size} {status}", line))
        for (name, status), line in zip((("published", "claimed"), ("corrected", "proved")), listed, strict=True)
    ] == [True, True], listed
    browser.screenshot(KEPT / "published-1200-dark.png")
    assert not browser.messages


@needs_chromium
def test_a_picture_from_a_file(browser: Browser, address: str) -> None:
    open_page(browser, address, 1200, "light")
    browser.evaluate(
        "(() => { const one = document.createElement('canvas'); one.width = one.height = 60;"
        "const pen = one.getContext('2d'); pen.fillStyle = '#fff'; pen.fillRect(26, 10, 8, 40);"
        "one.toBlob((blob) => take(blob)); })()"
    )
    wait_for(browser, "state.answer !== null")
    assert len(text(browser, "label")) == 1
    assert not browser.messages


@needs_chromium
def test_everything_can_be_reached_and_has_a_name(browser: Browser, address: str) -> None:
    open_page(browser, address, 1200, "light")
    nodes = browser.ask("Accessibility.getFullAXTree")["nodes"]
    roles = ("button", "combobox", "slider", "application", "image", "img", "textbox")
    found = [
        (node["role"]["value"], node["name"]["value"])
        for node in nodes
        if not node.get("ignored") and node["role"]["value"] in roles
    ]
    assert {"slider", "combobox", "button", "application"} <= {role for role, _ in found}
    assert all(name for _, name in found), found


@needs_chromium
def test_a_page_behind_a_token_asks_for_it(
    browser: Browser, model: TrainedModel, voting: TrainedModel, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("a-token-of-many-letters")
    with serving({"digits": model, "votes": voting}, token_file=tmp_path / "token") as client:
        browser.show(client.address, 390, "light")
        wait_for(browser, "!document.getElementById('token-form').hidden")
        browser.evaluate("document.getElementById('token').value = 'a-token-of-many-letters'")
        browser.evaluate("document.getElementById('token-form').requestSubmit()")
        wait_for(browser, "document.querySelectorAll('#model option').length == 2")
        assert browser.evaluate("document.getElementById('token-form').hidden")
        assert browser.evaluate("localStorage.length + sessionStorage.length + document.cookie.length") == 0


@pytest.mark.parametrize("file", sorted(SITE.iterdir()), ids=lambda file: file.name)
def test_nothing_comes_from_elsewhere(file: Path) -> None:
    content = file.read_text()
    assert not re.search(r"https?://|//[a-z]+\.[a-z]", content)
    if file.suffix == ".html":
        assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|\sstyle=", content), "the policy would forbid it"


def test_colours_are_those_of_the_reports() -> None:
    css = (SITE / "page.css").read_text()
    light, dark = (dict(re.findall(r"--(\w+):(#\w+)", block)) for block in css.splitlines()[:2])
    assert light.keys() == dark.keys()
    assert all(PALETTE[name] == (light[name], dark[name]) for name in light)
