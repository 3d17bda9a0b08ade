"""The report: one HTML file that needs nothing else, for a person who has to defend the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stobatch.errors import RunError
from stobatch.files import write_atomically
from stobatch.reporting.accuracy import curves_section, tables_section
from stobatch.reporting.audits import audits_section
from stobatch.reporting.comparison import comparison_section, t_tests
from stobatch.reporting.facts import Facts
from stobatch.reporting.flags import flags_section
from stobatch.reporting.markup import Html, folded, join, tag
from stobatch.reporting.measuring import measuring_section
from stobatch.reporting.opening import one_line, opening
from stobatch.reporting.pages import whole_page
from stobatch.reporting.pictures import pictures_section
from stobatch.reporting.provenance import provenance_line, provenance_section
from stobatch.runs import Run


def write_report(
    runs: Sequence[Run],
    out: Path,
    *,
    comparisons: Sequence[dict[str, Any]] = (),
    images: bool | None = None,
    provenance: Sequence[dict[str, Any]] = (),
) -> Path:
    """Write one self-contained HTML file about one run or several; the same files give the same bytes.

    `provenance` is what `verify` said of each run; without it the page says that nothing was checked. `images` left
    open shows pictures of public data sets only.
    """
    if not runs:
        raise RunError("there is no run to report on.", remedy="Give at least one run directory.")
    checked: list[dict[str, Any] | None] = [*provenance] if provenance else [None] * len(runs)
    facts = [replace(Facts.read(run), provenance=one) for run, one in zip(runs, checked, strict=True)]
    page = _page(facts, comparisons, images).encode()
    write_atomically(out, lambda file: file.write(page))
    return out


def _page(runs: Sequence[Facts], comparisons: Sequence[dict[str, Any]], images: bool | None) -> Html:
    several = len(runs) > 1
    title = f"{len(runs)} runs compared" if several else runs[0].name
    body = _several(runs, comparisons, images) if several else _one(runs[0], "run-1", images)
    tests = Html("") if several else t_tests(comparisons)
    return whole_page(title, "stobatch report", body, tests, footer="from the run's own files")


def _one(facts: Facts, name: str, images: bool | None) -> Html:
    return join(
        [
            opening(facts),
            provenance_line(facts),
            flags_section(facts),
            audits_section(facts, name),
            curves_section(facts, name),
            tables_section(facts),
            pictures_section(facts, images=images),
            measuring_section(facts, name),
            provenance_section(facts),
        ]
    )


def _several(runs: Sequence[Facts], comparisons: Sequence[dict[str, Any]], images: bool | None) -> Html:
    folds = [
        folded(one_line(facts), _one(facts, f"run-{place}", images), class_="run", id=f"run-{place}")
        for place, facts in enumerate(runs, 1)
    ]
    return join([comparison_section(runs, comparisons), tag("h2", "Run by run"), *folds])
