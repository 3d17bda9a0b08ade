"""The page as a browser sees it, for tests to read."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

from stobatch.reporting.report import write_report
from stobatch.runs import Run


class Page(HTMLParser):
    """The page as a browser sees it: its elements, its words, and its tables as rows of cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.elements, self.open_tags = text, [], []
        self.words, self.tables, self.cell = [], [], None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "br"):
            self.open_tags.append(tag)
        if tag == "table":
            self.tables.append({"caption": "", "rows": []})
        if tag == "tr":
            self.tables[-1]["rows"].append([])
        if tag in ("th", "td"):
            self.tables[-1]["rows"][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        if "style" in self.open_tags:
            return
        self.words.append(data)
        if "caption" in self.open_tags:
            self.tables[-1]["caption"] += data
        elif {"th", "td"} & set(self.open_tags):
            self.tables[-1]["rows"][-1][-1] += data

    @property
    def prose(self) -> str:
        return " ".join(" ".join(self.words).split())

    def table(self, caption: str) -> list[list[str]]:
        found = [table["rows"] for table in self.tables if caption in table["caption"]]
        assert len(found) == 1, (caption, [table["caption"] for table in self.tables])
        return found[0]

    def classes(self) -> set[str]:
        return {attributes["class"] for _, attributes in self.elements if attributes.get("class")}


def page(*runs: Run, **options: Any) -> Page:
    out = runs[0].path.parent / "report.html"
    return Page(write_report(runs, out, **options).read_text())


def shown(row: dict[str, Any]) -> str:
    return f"{100 * row['value']:.1f}% [{100 * row['low']:.1f}, {100 * row['high']:.1f}]"
