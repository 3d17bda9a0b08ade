"""One table for every place it is shown in: terminal, page and documentation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stobatch.reporting.format import STATUS_STYLES, status_words

if TYPE_CHECKING:
    from rich.table import Table as RichTable
    from rich.text import Text

DASH = "–"
"""What was not measured."""


@dataclass(frozen=True)
class Cell:
    """A value, with small print (its interval, say) and who vouches for it; every rendering shows all three."""

    text: str
    detail: str = ""
    status: str = ""
    """A `Status` or a `Verdict`; empty where there is nothing to vouch for."""
    href: str = ""
    """A place on the same page."""

    @property
    def badge(self) -> str:
        """Return the words of the status, unless the text begins with them.

        >>> Cell("71.0%", status="claimed").badge
        'claimed, not proved'
        >>> Cell("CLAIMED, NOT PROVED: ε = 1", status="claimed").badge
        ''
        """
        words = status_words(self.status) if self.status else ""
        return "" if self.text.casefold().startswith(words.casefold()) else words

    @property
    def is_empty(self) -> bool:
        return self.text in ("", DASH) and not self.detail and not self.status

    def __str__(self) -> str:
        badge = f"({self.badge})" if self.badge else ""
        return " ".join(part for part in (self.text, self.detail, badge) if part)


@dataclass(frozen=True)
class Column(Cell):
    """The heading of a column; one of numbers is aligned to the right where columns are narrow."""

    is_number: bool = False


Heading = str | Column
Entry = str | Cell | Sequence[Cell]
"""What a place of a table is made from."""
Lines = tuple[Cell, ...]
"""What stands in one place of a table, line by line."""


@dataclass(frozen=True)
class Table:
    """A caption, headings, and rows whose first place names the row."""

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Lines, ...], ...]

    @classmethod
    def of(cls, caption: str, columns: Iterable[Heading], rows: Iterable[Iterable[Entry]]) -> Table:
        """Make a table from texts where a cell has nothing else to say; a column in which no row has any is left out.

        >>> table = Table.of("A caption", ["radius"], [["0.2"], [Cell("0.6", "wide")]])
        >>> [str(cell) for row in table.rows for lines in row for cell in lines]
        ['0.2', '0.6 wide']
        """
        headings = [Column(heading) if isinstance(heading, str) else heading for heading in columns]
        filled = [list(map(_lines, row)) for row in rows]
        kept = [
            place
            for place in range(len(headings))
            if place == 0 or not filled or not all(cell.is_empty for row in filled for cell in row[place])
        ]
        cells = tuple(tuple(row[place] for place in kept) for row in filled)
        return cls(caption, tuple(headings[place] for place in kept), cells)

    def to_rich(self) -> RichTable:
        """Return the table for a terminal."""
        from rich.table import Table as RichTable
        from rich.text import Text

        several = any(len(lines) > 1 for row in self.rows for lines in row)
        table = RichTable(title=Text(self.caption) if self.caption else None, title_justify="left", show_lines=several)
        for column in self.columns:
            justify: Any = "right" if column.is_number else "left"
            table.add_column(_cell_text(column, "\n"), justify=justify, overflow="fold")
        for row in self.rows:
            table.add_row(*(Text("\n").join(_cell_text(cell) for cell in lines) for lines in row))
        return table

    def to_markdown(self) -> str:
        """Return Markdown: the caption as a paragraph, then the table."""
        heads = [_escape(str(column)) for column in self.columns]
        marks = ["---:" if column.is_number else "---" for column in self.columns]
        rows = [["<br>".join(_escape(str(cell)) for cell in lines) for lines in row] for row in self.rows]
        table = "\n".join(f"| {' | '.join(row)} |" for row in (heads, marks, *rows))
        return f"{_escape(self.caption)}\n\n{table}\n" if self.caption else f"{table}\n"


def _lines(entry: Entry) -> Lines:
    if isinstance(entry, str):
        return (Cell(entry),)
    return (entry,) if isinstance(entry, Cell) else tuple(entry)


def _cell_text(cell: Cell, between: str = " ") -> Text:
    """Return the cell coloured by its status, which it also names in words."""
    from rich.text import Text

    style = STATUS_STYLES.get(cell.status, "")
    badge = f"({cell.badge})" if cell.badge else ""
    parts = [Text(part, style=style) for part in (cell.text, cell.detail, badge) if part]
    return Text(between).join(parts)


def _escape(text: str) -> str:
    """Return text that Markdown takes for nothing else."""
    for mark in ("\\", "|", "*", "`"):
        text = text.replace(mark, f"\\{mark}")
    return text.replace("<", "&lt;").replace("\n", "<br>")
