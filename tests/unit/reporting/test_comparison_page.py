"""The page and the figure of a comparison: true to the document, and a claim never looks like a proof."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from compared_document import document
from made_runs import guarantee
from pages import Page
from rich.console import Console

from stobatch.reporting.comparison import comparison_tables, write_comparison
from stobatch.reporting.page import LIGHT
from stobatch.results import Comparison


def written(folder: Path, found: dict[str, Any] | None = None) -> Page:
    paths = write_comparison(Comparison.from_dict(found or document()), folder)
    assert [path.name for path in paths] == ["comparison.html", "comparison.svg"]
    return Page(paths[0].read_text())


def printed(found: dict[str, Any], width: int = 250) -> str:
    out = io.StringIO()
    Console(width=width, highlight=False, file=out).print(comparison_tables(Comparison.from_dict(found)))
    return out.getvalue()


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    found = written(tmp_path)
    assert "http:" not in found.text
    assert "https:" not in found.text
    for tag, attributes in found.elements:
        assert tag not in ("script", "link", "iframe", "object", "embed", "base")
        assert all(attributes.get(key, "#").startswith("#") for key in ("src", "href", "xlink:href"))
    ids = [attributes["id"] for _, attributes in found.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert found.open_tags == []


def test_the_same_document_gives_the_same_bytes(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        written(tmp_path / folder)
    for name in ("comparison.html", "comparison.svg"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize("radius", [0.2, 0.05])
def test_every_row_stands_in_the_table_of_every_radius_in_the_order_given(tmp_path: Path, radius: float) -> None:
    headings, *rows = written(tmp_path).table(f"Accuracy at radius {radius:g} (l∞ over [-1, 1])")
    assert headings[1:6] == ["privacy", "clean", "published protocol", "adaptive protocol", "certified"]
    assert [row[0] for row in rows] == [
        "open single pass, 200 test images",
        "paper ε=1.25 single pass, 200 test images",
        "paper ε=1.25 vote, 200 test images",
        "sound ε=1.25 single pass, 200 test images",
    ]
    claimed = "CLAIMED, NOT PROVED: ε = 1.25"
    assert [row[1] for row in rows] == ["NO PRIVACY GUARANTEE", claimed, claimed, "proved: ε = 1.25"]
    tops = [0.985, 0.931, 0.872, 0.913]
    assert [row[2] for row in rows] == [f"{100 * top:.1f} ± 1.4%" for top in tops]
    assert [row[3] for row in rows] == [f"{100 * (top - radius):.1f} ± 1.4%" for top in tops]
    assert [row[4] for row in rows] == [f"{100 * (top - radius - 0.1):.1f} ± 1.4%" for top in tops]
    values = [f"{100 * (top - radius):.1f} ± 1.4%" for top in (0.71, 0.64, 0.82)]
    assert [row[5] for row in rows] == [
        "no certificate",
        "no certificate",
        f"{values[0]} published rule claimed, not proved {values[1]} corrected rule proved",
        f"{values[2]} bounds rule proved",
    ]
    assert rows[0][6:] == ["12.5 ± 0.0 s", "512.0 ± 0.0 MiB (process)"]


def test_what_each_method_promises_stands_with_what_speaks_against_it(tmp_path: Path) -> None:
    found = written(tmp_path)
    assert {"card none", "card claimed", "card proved"} <= found.classes()
    assert "one draw of noise is shared" in found.prose
    assert "NO PRIVACY GUARANTEE" in found.prose
    assert found.prose.count("it must not be relied on as a guarantee") == 1
    assert "1 without any; 1 claimed, not proved; 1 proved" in found.prose
    assert "where published comes from" in found.prose
    assert "zero gradients" in found.prose


def test_a_budget_is_never_given_without_its_status(tmp_path: Path) -> None:
    texts = [*written(tmp_path).words, *printed(document()).splitlines()]
    svg = ET.parse(tmp_path / "comparison.svg")
    texts += [element.text or "" for element in svg.iter() if element.tag.endswith("text")]
    budgets = [text for text in texts if re.search(r"ε ?= ?1\.25", text) and "paper" in text]
    names = {"paper ε=1.25"}  # the first column; the second says the status
    for text in budgets:
        assert text in names or re.search("claimed", text, re.IGNORECASE), text
    assert not [text for text in texts if re.search(r"paper.*\(proved", text)]
    assert any("paper ε=1.25 (claimed, not proved), vote" in text for text in texts)


def test_the_figure_marks_claims_and_proofs_apart(tmp_path: Path) -> None:
    written(tmp_path)
    text = (tmp_path / "comparison.svg").read_text()
    words = [element.text for element in ET.fromstring(text).iter() if element.tag.endswith("text")]
    assert "certified (proved)" in words
    assert "certified (claimed, not proved)" in words
    assert "open (no privacy), single pass" in words
    claimed = LIGHT["claimed"]
    hollow = re.search(f"(fill: none|fill-opacity: 0); stroke: {claimed}", text)
    assert hollow, "what is claimed is hollow"
    assert not re.search(f'style="fill: {claimed}[^"]*stroke', text)


def test_t_tests_say_how_many_would_be_chance(tmp_path: Path) -> None:
    over_three = document()
    for test in over_three["t_tests"]:
        test["t_test"] = {**test["t_test"], "num_seeds": [3, 3]}
    found = written(tmp_path, over_three)
    assert "2 two-tailed t-tests over seeds: 2 have p < 0.05, where 0.1 would by chance" in found.prose
    rows = found.table("First minus second")
    assert rows[1] == [
        "open (no privacy), single pass", "paper ε=1.25 (claimed, not proved), single pass", "clean",
        "5.4 points [1.0, 9.8]", "0.032", "paired", "3 and 3",
    ]  # fmt: skip
    assert rows[2][2] == "adaptive protocol at radius 0.2"
    assert "0.1 would by chance" in printed(over_three)


def test_t_tests_over_two_seeds_are_withheld_and_it_is_said_why(tmp_path: Path) -> None:
    found, text = written(tmp_path), " ".join(printed(document()).split())
    assert not [table for table in found.tables if "First minus second" in table["caption"]]
    for words in (found.prose, text):
        assert "2 two-tailed t-tests over two seeds are withheld: two seeds leave one degree of freedom" in words
        assert "0.032" not in words
    some = document()
    some["t_tests"][0]["t_test"] = {**some["t_tests"][0]["t_test"], "num_seeds": [3, 4]}
    seen = written(tmp_path, some)
    assert [row[6] for row in seen.table("First minus second")[1:]] == ["3 and 4"]
    assert "1 two-tailed t-tests over seeds: 1 have p < 0.05" in seen.prose
    assert "1 two-tailed t-tests over two seeds are withheld" in seen.prose


def test_one_seed_has_no_spread_and_no_t_test(tmp_path: Path) -> None:
    found = document()
    found |= {"seeds": [1], "t_tests": [], "t_tests_below_0.05": 0, "t_tests_below_0.05_by_chance": 0.0}
    for row in found["rows"]:
        for entry in (
            row["clean"],
            *row["attacked"],
            *row["certified"],
            row["training_seconds"],
            row["peak_memory_mb"],
        ):
            entry["stddev"] = None
    page = written(tmp_path, found)
    assert "±" not in page.prose
    assert "No t-tests: they need two seeds of each method or more." in page.prose
    assert "±" not in printed(found)


def test_an_audit_that_refutes_one_seed_is_told_apart(tmp_path: Path) -> None:
    found = document()
    for row in found["rows"][1:3]:
        row["guarantees"] = [
            {"seeds": [1], **guarantee("claimed")},
            {"seeds": [2], **guarantee("refuted")},
        ]
    rows = written(tmp_path, found).table("Accuracy at radius 0.2")
    assert "CLAIMED, NOT PROVED: ε = 1.25 (seed 1)" in rows[2][1]
    assert "REFUTED: ε = 1.25 (seed 2)" in rows[2][1]
    text = printed(found)
    assert "REFUTED: ε = 1.25 (seed 2)" in text


def test_what_was_not_measured_is_a_dash(tmp_path: Path) -> None:
    found = document()
    found["rows"][0] |= {"peak_memory_mb": None, "peak_memory_of": []}
    found["rows"][0]["attacked"] = [e for e in found["rows"][0]["attacked"] if e["protocol"] == "adaptive"]
    row = written(tmp_path, found).table("Accuracy at radius 0.2")[1]
    assert row[3] == "–"
    assert row[7] == "– (not told)"
