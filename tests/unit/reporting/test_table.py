"""One table, three renderings: none of them loses a status, and none lets text pass for markup."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from compared_document import document
from jinja2 import UndefinedError
from made_runs import audit_of_everything, make
from markupsafe import Markup
from pages import Page
from rich.console import Console

from stobatch.reporting.comparison import write_comparison
from stobatch.reporting.format import STATUS_WORDS
from stobatch.reporting.page import render, templates
from stobatch.reporting.report import write_report
from stobatch.reporting.table import Cell, Column, Table
from stobatch.results import Comparison
from stobatch.types import Status, Verdict


def printed(table: Table) -> str:
    out = io.StringIO()
    Console(width=200, highlight=False, file=out).print(table.to_rich())
    return out.getvalue()


def as_html(table: Table) -> str:
    return str(templates().get_template("macros.html").module.table(table))


RENDERINGS: dict[str, Callable[[Table], str]] = {
    "rich": printed,
    "html": as_html,
    "markdown": Table.to_markdown,
}


def table_with(status: str) -> Table:
    """The status at a heading, at a value, and in the second line of a place."""
    lines = (Cell("first line"), Cell("60.1%", "[55.0, 65.0]", status))
    columns = ["radius", Column("certified", status=status, is_number=True), "several"]
    return Table.of("A caption", columns, [["0.2", Cell("71.0%", "[65.0, 76.2]", status), lines]])


@pytest.mark.parametrize("status", [*Status, *Verdict])
@pytest.mark.parametrize("name", RENDERINGS)
def test_no_rendering_loses_a_status(name: str, status: str) -> None:
    text = RENDERINGS[name](table_with(status))
    assert text.count(STATUS_WORDS.get(status, status)) >= 3
    for words in ("A caption", "radius", "0.2", "71.0%", "[65.0, 76.2]", "first line", "60.1%"):
        assert words in text


@pytest.mark.parametrize("name", RENDERINGS)
def test_a_status_stands_only_where_it_was_given(name: str) -> None:
    table = Table.of("", ["a", "b"], [["x", "proven elsewhere"], ["y", Cell("1", status="refuted")]])
    text = RENDERINGS[name](table)
    assert "proved" not in text
    assert "refuted" in text


@pytest.mark.parametrize("name", RENDERINGS)
def test_a_text_that_denies_its_status_does_not_swallow_it(name: str) -> None:
    """Only words in front say a status: `not proved` has the word proved in it."""
    text = RENDERINGS[name](Table.of("", ["a"], [[Cell("not yet proved by us", status="proved")]]))
    assert text.count("proved") >= 2


def test_markup_in_a_cell_is_only_words() -> None:
    hostile = "<script>alert(1)</script>"
    cell = Cell(hostile, hostile, href='"><script>')
    table = Table.of(hostile, [Column(hostile)], [[(cell, Cell(hostile, hostile))]])
    found = Page(as_html(table))
    assert "<script" not in found.text
    assert found.open_tags == []
    assert found.table(hostile)[1][0].count(hostile) == 4


def test_terminal_markup_and_table_bars_are_only_words() -> None:
    table = Table.of("[red]c", ["[bold]h"], [["[link=x]a|b\nc"]])
    assert "[link=x]a|b" in printed(table)
    assert "[bold]h" in printed(table)
    assert table.to_markdown() == "[red]c\n\n| [bold]h |\n| --- |\n| [link=x]a\\|b<br>c |\n"


def test_markdown_is_a_table_with_numbers_to_the_right() -> None:
    lines = table_with("proved").to_markdown().splitlines()
    assert lines == [
        "A caption", "",
        "| radius | certified (proved) | several |",
        "| --- | ---: | --- |",
        "| 0.2 | 71.0% [65.0, 76.2] (proved) | first line<br>60.1% [55.0, 65.0] (proved) |",
    ]  # fmt: skip


def test_a_column_without_anything_is_left_out_and_one_with_something_is_not() -> None:
    rows = [["1", "–", "–", Cell("–", status="none")], ["2", "–", "x", "–"]]
    table = Table.of("", ["a", "b", "c", "d"], rows)
    assert [column.text for column in table.columns] == ["a", "c", "d"]
    assert [len(row) for row in table.rows] == [3, 3]


HOSTILE = "</text></style></title>{{ 7 * 7 }}<script>alert(1)</script><img src=x onerror=alert(2)>\"'"


@pytest.mark.parametrize("template", ["report.html", "comparison.html"])
def test_every_string_that_a_template_is_given_is_escaped(template: str, path: Path, tmp_path: Path) -> None:
    """Every text of the view says something hostile; none of it reaches the page as markup or as code."""
    views: dict[str, dict[str, Any]] = {}

    def keep(name: str, **view: Any) -> bytes:
        views[name] = view
        return b""

    with pytest.MonkeyPatch.context() as patch:
        for module in ("stobatch.reporting.report", "stobatch.reporting.comparison"):
            patch.setattr(f"{module}.render", keep)
        run = make(path)
        run.write("audit", audit_of_everything())
        write_report([run, make(path.with_name("other"))], tmp_path / "report.html")
        write_comparison(Comparison.from_dict(document()), tmp_path)
    text = render(template, **{key: spoilt(value) for key, value in views[template].items()}).decode()
    assert text.count("&lt;script&gt;alert(1)") > 100
    assert "{{ 7 * 7 }}" in text
    assert "<script" not in text
    assert "<img src=x" not in text
    assert Page(text).open_tags == []


def spoilt(value: Any) -> Any:
    """The same view with something hostile before every text; drawings are markup already."""
    if isinstance(value, Markup):
        return value
    if isinstance(value, str):
        return HOSTILE + value
    if isinstance(value, (list, tuple)):
        return type(value)(map(spoilt, value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{one.name: spoilt(getattr(value, one.name)) for one in fields(value)})
    return value


def test_a_name_that_no_view_has_is_an_error() -> None:
    with pytest.raises(UndefinedError):
        render("comparison.html", title="a page without content")
