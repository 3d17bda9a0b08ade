"""`stobatch budget`: what trainings on the same records have spent together."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stobatch.cli.app import app
from stobatch.cli.options import Config, Json, Recipe, Set, read_settings, show
from stobatch.errors import SettingError

if TYPE_CHECKING:
    from stobatch.results import Budget, SpentShare


@app.command(rich_help_panel="Train")
def budget(
    book: Annotated[Path | None, typer.Option(help="The book's folder; STOBATCH_BOOK if left out.")] = None,
    recipe: Recipe = None,
    config: Config = None,
    set_: Set = None,
    limit: Annotated[float | None, typer.Option(help="Refuse trainings beyond this ε from now on; 0 for none.")] = None,
    delta: Annotated[float | None, typer.Option(help="The δ of ε, and of the limit; the book's own if unset.")] = None,
    as_json: Json = False,
) -> None:
    """Show what trainings have spent together of the owner's records; with a recipe, what that training would add."""
    from stobatch.book import VARIABLE, Book
    from stobatch.spending import budget as account

    named = book or (Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None)
    if named is None:
        raise SettingError("no book is named.", remedy=f"Give its folder: --book FOLDER, or set {VARIABLE}.")
    if limit is not None:
        opened = Book.open(named, make=True)
        opened.set_limit(limit or None, opened.delta if delta is None else delta)
    planned = read_settings(recipe, config, set_, None, None) if recipe or config else None
    document = account(named, planned, delta=delta)
    show(document, as_json, *_parts(document))
    if document.planned is not None and not document.planned.within_limit:
        raise SystemExit(1)


def _parts(document: Budget) -> list[Any]:
    from stobatch.reporting.table import Column, Table
    from stobatch.results import epsilon_words

    persons = any(share.word == "persons" for share in document.spent)
    unit = "one person with all records" if persons else "one record"
    at = f"at δ = {document.delta:g}, when {unit} is added or removed"
    runs = Table.of(
        f"Trainings in {document.book}; each by itself, at δ = {document.delta:g}",
        [Column("", is_number=True), "begun", "method", "data", "run", "state", "ε"],
        (
            [
                str(run.number),
                run.date,
                run.method,
                run.data,
                run.run,
                "ended" if run.settled else "counts as planned",
                f"not bounded: {run.unbounded}" if run.unbounded else epsilon_words(run.proved_epsilon),
            ]
            for run in document.runs
        ),
    )
    spent = Table.of(
        f"What was spent, composed {at}",
        [Column("", is_number=True), "", "read by", "ε"],
        (
            [f"{share.count:,}", share.word, _readers(share), epsilon_words(share.proved_epsilon)]
            for share in document.spent
        ),
    )
    at_delta = f"at δ = {document.delta:g}"
    limit = "none" if document.limit is None else f"ε = {document.limit:g} at δ = {document.limit_delta:g}"
    lines = [f"in all: {epsilon_words(document.proved_epsilon)} {at_delta}; limit: {limit}"]
    if document.planned is not None:
        one = document.planned
        lines.append(
            f"planned: {one.method}, {epsilon_words(one.proved_epsilon)} by itself, "
            f"{epsilon_words(one.proved_epsilon_after)} with what was spent, {at_delta}, for {one.basis}: "
            f"{'within' if one.within_limit else 'BEYOND'} the limit"
        )
    lines += document.warnings
    return [*(table.to_rich() for table in (runs, spent) if table.rows), *lines, "For the owner of the records alone."]


def _readers(share: SpentShare) -> str:
    sizes = zip(share.runs, share.records, strict=True)
    return ", ".join(f"{run} (up to {size} of each, one by one)" if size > 1 else str(run) for run, size in sizes)
