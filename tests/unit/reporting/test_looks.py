"""Pages on a desk and on a phone, by day and by night: nothing overflows, text can be read, the console is silent."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from compared_document import document
from made_runs import audit_of_everything, guarantee, make, scores
from PIL import Image
from support.browser import CHROMIUM, Browser, open_browser

from stobatch.reporting.comparison import write_comparison
from stobatch.reporting.page import PALETTE
from stobatch.reporting.report import write_report
from stobatch.results import Comparison

STYLE = (Path(__file__).parents[3] / "src/stobatch/reporting/templates/style.css").read_text()
TEXT = ("ink", "muted", "published", "claimed", "proved", "void", "refuted", "consistent")
"""The colours that words have; the others are of lines and marks."""
GROUNDS = ("page", "card")
WIDTHS = (1200, 390)
AA = 4.5
"""What WCAG 2 asks of the contrast of text."""


def luminance(colour: str) -> float:
    """As WCAG 2 defines it."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_as_published() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.01)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("ground", GROUNDS)
@pytest.mark.parametrize("ink", TEXT)
def test_words_can_be_read(ink: str, ground: str, scheme: int) -> None:
    assert contrast(PALETTE[ink][scheme], PALETTE[ground][scheme]) >= AA


def test_words_have_no_other_colours() -> None:
    used = set(re.findall(r"(?<![-\w])color:var\(--([\w-]+)\)", STYLE))
    assert used
    assert used <= set(TEXT)
    assert not re.findall(r"(?<![-\w])color:(?!var)[^;}]+", STYLE)


def fixed_widths(style: str) -> list[str]:
    """Rules, but those of what scrolls, whose width is fixed above that of a phone."""
    rules = re.findall(r"([^{}]+)\{([^{}]*)\}", style)
    found = []
    for selector, body in rules:
        for number, unit in re.findall(r"(?<![-\w])(?:min-)?width:([\d.]+)(rem|px)", body):
            pixels = float(number) * (16 if unit == "rem" else 1)
            if pixels > 390 and not re.search(r"\.(scroll|chart)\b", selector):
                found.append(f"{selector.strip()}: {body}")
        for number in re.findall(r"minmax\(([\d.]+)rem", body):
            if 16 * float(number) > 390:
                found.append(f"{selector.strip()}: {body}")
    return found


def test_nothing_is_wider_than_a_phone_unless_it_scrolls() -> None:
    narrow = STYLE[STYLE.index("@media screen and (max-width:40rem)") :]
    wide = fixed_widths(STYLE)
    assert all(rule.startswith(".examples") for rule in wide), wide
    assert ".examples{grid-template-columns:1fr}" in narrow, "on a phone the pictures have one column"


def test_the_broken_twin_with_a_fixed_width_is_found() -> None:
    assert fixed_widths("table{min-width:40rem}")
    assert fixed_widths(".tile{width:500px}")
    assert not fixed_widths(".scroll table{min-width:40rem}p{max-width:50rem}")


def pages(folder: Path) -> dict[str, Path]:
    """A run with everything, one that is void, several runs, and a comparison."""
    run, void = (
        make(folder / "a-run-with-a-rather-long-name"),
        make(folder / "void", {**scores(), "guarantee": guarantee("void")}),
    )
    run.write("audit", audit_of_everything())
    written, _ = write_comparison(Comparison.from_dict(document()), folder)
    return {
        "run": write_report([run], folder / "run.html"),
        "void": write_report([void], folder / "void.html"),
        "several": write_report([run, void], folder / "several.html"),
        "comparison": written,
    }


needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium is installed (Debian: apt-get install chromium)"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    with open_browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return pages(tmp_path_factory.mktemp("shown"))


TOO_WIDE = """
[...document.querySelectorAll("main *")].filter(one => {
  const box = one.getBoundingClientRect(), limit = document.documentElement.clientWidth + 1;
  return box.width && box.right > limit && !one.closest(".scroll, .chart, svg, details:not([open])");
}).map(one => one.tagName + "." + one.className)
"""
HIDDEN_SCROLLING = """
[...document.querySelectorAll(".scroll, .chart")].filter(one => {
  const parent = one.closest("figure") || one, hint = parent.querySelector(".hint");
  return one.scrollWidth > one.clientWidth + 1 && !(hint && hint.offsetHeight);
}).map(one => one.className + ": " + one.innerText.slice(0, 60))
"""
CAPTIONS_CUT = """
[...document.querySelectorAll("caption, figcaption")].filter(one => {
  const box = one.getBoundingClientRect();
  return box.width && box.right > document.documentElement.clientWidth + 1;
}).map(one => one.innerText.slice(0, 60))
"""


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["run", "void", "several", "comparison"])
def test_a_page_fits_and_its_console_is_silent(
    browser: Browser, shown: dict[str, Path], tmp_path: Path, name: str, width: int, scheme: str
) -> None:
    browser.show(shown[name], width, scheme)
    browser.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(TOO_WIDE) == []
    assert browser.evaluate(CAPTIONS_CUT) == []
    if width < 600:
        assert browser.evaluate(HIDDEN_SCROLLING) == []
    assert browser.messages == []
    with Image.open(browser.screenshot(tmp_path / f"{name}-{width}-{scheme}.png")) as picture:
        assert picture.width == width
        assert picture.height > 1000
        ground = PALETTE["page"][scheme == "dark"]
        assert picture.convert("RGB").getpixel((1, 1)) == tuple(int(ground[p : p + 2], 16) for p in (1, 3, 5))


@needs_browser
def test_the_broken_twins_of_a_page_are_found(browser: Browser, shown: dict[str, Path], tmp_path: Path) -> None:
    """A fixed width, a script that the policy stops, and a table whose scrolling nothing says."""
    twin, text = tmp_path / "twin.html", shown["run"].read_text()
    twin.write_text(text.replace('<p class="lead">', '<p class="lead" style="width:900px;max-width:none">', 1))
    browser.show(twin, 390, "light")
    assert browser.evaluate(TOO_WIDE)
    twin.write_text(text.replace(".hint{display:block}", ""))
    browser.show(twin, 390, "light")
    assert browser.evaluate(HIDDEN_SCROLLING)
    assert browser.messages == []
    twin.write_text(text.replace("</main>", "<script>alert(1)</script></main>"))
    browser.show(twin, 390, "light")
    assert browser.messages
    browser.messages.clear()
