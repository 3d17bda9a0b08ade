"""What every page has around its content: a file that needs nothing else and runs nothing."""

from __future__ import annotations

from stobatch.reporting.markup import Html, join, tag, void
from stobatch.reporting.style import CSS

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""The page's own word to the browser that nothing is fetched and no script runs."""


def whole_page(title: str, eyebrow: str, *content: object, footer: str) -> Html:
    """A page with its heading; the footer says what it was made from."""
    head = tag(
        "head",
        void("meta", charset="utf-8"),
        void("meta", name="viewport", content="width=device-width, initial-scale=1"),
        void("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("title", f"{title}, {eyebrow}"),
        tag("style", Html(CSS)),
    )
    header = tag("header", tag("p", eyebrow, class_="eyebrow"), tag("h1", title))
    foot = tag("footer", f"Made by stobatch {footer}; nothing about training data was read.")
    body = tag("body", tag("main", header, *content, foot))
    return join([Html("<!doctype html>\n"), tag("html", head, body, lang="en")])
