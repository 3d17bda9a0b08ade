"""HTML that is safe by construction: whatever is not already `Html` is escaped when it enters a tag."""

from __future__ import annotations

import html
from collections.abc import Iterable


class Html(str):
    """Text that is markup already. Everything else is only words."""

    __slots__ = ()


def safe(content: object) -> Html:
    return content if isinstance(content, Html) else Html(html.escape(str(content), quote=True))


def join(parts: Iterable[object], separator: str = "") -> Html:
    return Html(safe(separator).join(safe(part) for part in parts))


def tag(name: str, /, *content: object, **attributes: object) -> Html:
    """An element; `class_` is written `class`, and `_` in other attributes `-`.

    >>> tag("p", "a < b", class_="note")
    '<p class="note">a &lt; b</p>'
    """
    written = "".join(f' {key.rstrip("_").replace("_", "-")}="{safe(value)}"' for key, value in attributes.items())
    return Html(f"<{name}{written}>{join(content)}</{name}>")


def void(name: str, /, **attributes: object) -> Html:
    """An element without content.

    >>> void("img", alt="a 7")
    '<img alt="a 7">'
    """
    return Html(tag(name, **attributes).removesuffix(f"</{name}>"))


def bullets(lines: Iterable[object], **attributes: object) -> Html:
    return tag("ul", *(tag("li", line) for line in lines), **attributes)


def table(caption: object, headings: Iterable[object], rows: Iterable[Iterable[object]]) -> Html:
    """A table whose first column names the row; wide ones scroll by themselves."""
    head = tag("thead", tag("tr", *(tag("th", heading, scope="col") for heading in headings)))
    return tag("div", tag("table", tag("caption", caption), head, tag("tbody", *map(_row, rows))), class_="scroll")


def _row(cells: Iterable[object]) -> Html:
    first, *rest = cells
    return tag("tr", tag("th", first, scope="row"), *(tag("td", cell) for cell in rest))


def folded(title: object, *content: object, **attributes: object) -> Html:
    return tag("details", tag("summary", title), *content, **attributes)
