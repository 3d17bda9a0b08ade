"""The report: one HTML file that needs nothing else, for a person who has to defend the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stobatch.errors import RunError
from stobatch.files import write_atomically
from stobatch.reporting.accuracy import curves_section, tables_section
from stobatch.reporting.audits import audits_section
from stobatch.reporting.comparison import comparison_section, t_tests
from stobatch.reporting.facts import Facts
from stobatch.reporting.flags import flags_section
from stobatch.reporting.markup import Html, folded, join, tag, void
from stobatch.reporting.measuring import measuring_section
from stobatch.reporting.opening import one_line, opening
from stobatch.reporting.pictures import pictures_section
from stobatch.reporting.style import CSS
from stobatch.runs import Run

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""The page's own word to the browser that nothing is fetched and no script runs."""


def write_report(
    runs: Sequence[Run], out: Path, *, comparisons: Sequence[dict[str, Any]] = (), images: bool = True
) -> Path:
    """Write one self-contained HTML file about one run or several; the same files give the same bytes."""
    if not runs:
        raise RunError("there is no run to report on.", remedy="Give at least one run directory.")
    facts = [Facts.read(run) for run in runs]
    page = _page(facts, comparisons, images).encode()
    write_atomically(out, lambda file: file.write(page))
    return out


def _page(runs: Sequence[Facts], comparisons: Sequence[dict[str, Any]], images: bool) -> Html:
    several = len(runs) > 1
    title = f"{len(runs)} runs compared" if several else runs[0].name
    body = _several(runs, comparisons, images) if several else _one(runs[0], "run-1", images)
    tests = Html("") if several else t_tests(comparisons)
    head = tag(
        "head",
        void("meta", charset="utf-8"),
        void("meta", name="viewport", content="width=device-width, initial-scale=1"),
        void("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("title", f"{title}, stobatch report"),
        tag("style", Html(CSS)),
    )
    header = tag("header", tag("p", "stobatch report", class_="eyebrow"), tag("h1", title))
    footer = tag("footer", "Made by stobatch from the run's own files; nothing private was read.")
    return join(
        [Html("<!doctype html>\n"), tag("html", head, tag("body", tag("main", header, body, tests, footer)), lang="en")]
    )


def _one(facts: Facts, name: str, images: bool) -> Html:
    return join(
        [
            opening(facts),
            flags_section(facts),
            audits_section(facts, name),
            curves_section(facts, name),
            tables_section(facts),
            pictures_section(facts, images=images),
            measuring_section(facts, name),
        ]
    )


def _several(runs: Sequence[Facts], comparisons: Sequence[dict[str, Any]], images: bool) -> Html:
    folds = [
        folded(one_line(facts), _one(facts, f"run-{place}", images), class_="run", id=f"run-{place}")
        for place, facts in enumerate(runs, 1)
    ]
    return join([comparison_section(runs, comparisons), tag("h2", "Run by run"), *folds])
