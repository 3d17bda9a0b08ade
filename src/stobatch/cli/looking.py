"""`settings`, `recipes`, `where`, `doctor`, `data check`: what there is to set, the paper, the machine, your data."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer

from stobatch.cli.app import app, read_reference
from stobatch.cli.options import Json, Set, assignments, show
from stobatch.errors import SettingError


def _print_rows(title: str, headings: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold", no_wrap=heading in ("setting", "recipe"))
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, markup=False).print(table)


def _select_rows(rows: list[dict[str, Any]], key: str, asked: str, kind: str) -> list[dict[str, Any]]:
    """Return the row of this name, else rows of names that end with it, or of a section; or raise with names near."""
    names = list(dict.fromkeys(row[key] for row in rows))
    matching = [row for row in rows if row[key] == asked]
    matching = matching or [row for row in rows if row[key].rpartition(".")[2] == asked]
    matching = matching or [row for row in rows if row[key].startswith(f"{asked}.")]
    if matching:
        return matching
    near = get_close_matches(asked[:100], [*names, *(name.rpartition(".")[2] for name in names)], n=3, cutoff=0.6)
    remedy = f"Nearest: {', '.join(near)}." if near else f"Run `stobatch {kind}s` for all of them."
    raise SettingError(f"there is no {kind} '{asked}'.", remedy=remedy)


@app.command(rich_help_panel="Look up")
def settings(
    key: Annotated[str | None, typer.Argument(help="As training.steps, steps or training; all if left out.")] = None,
    as_json: Json = False,
) -> None:
    """List every setting with its type, allowed values, default and meaning."""
    rows = read_reference("settings")
    shown = rows if key is None else _select_rows(rows, "key", key, "setting")
    if as_json:
        show({"settings": shown}, as_json)
    elif key is None:
        cells = [(row["key"], row["default"] or "", row["doc"]) for row in shown]
        _print_rows("`stobatch settings KEY` says more of one", ("setting", "default", "meaning"), cells)
    else:
        full = []
        for row in shown:
            methods = f" Of the methods {', '.join(row['methods'])}." if row["methods"] else ""
            full.append((row["key"], row["type"], row["allowed"], row["default"] or "", f"{row['doc']}.{methods}"))
        _print_rows("", ("setting", "type", "allowed", "default", "meaning"), full)


@app.command(rich_help_panel="Look up")
def recipes(
    name: Annotated[str | None, typer.Argument(help="As sound.mnist, or sound; all if left out.")] = None,
    as_json: Json = False,
) -> None:
    """List every recipe with its purpose, privacy and minutes; of one, what it sets."""
    from stobatch_recipes import RECIPES

    rows = read_reference("recipes")
    known = {row["name"] for row in rows}
    # What other packages add is known by name alone until it is asked for.
    rows += [{"name": added, "purpose": "of another package"} for added in RECIPES if added not in known]
    shown = rows if name is None else _select_rows(rows, "name", RECIPES.shown(name), "recipe")
    if as_json:
        show({"recipes": shown}, as_json)
        return
    cells = [
        (
            row["name"],
            row["purpose"],
            row.get("privacy", ""),
            *(f"{row['minutes'][device]:.2g}" if device in row.get("minutes", {}) else "" for device in ("cpu", "gpu")),
        )
        for row in shown
    ]
    title = "`stobatch recipes NAME` prints what one sets; minutes are of training, on one CPU core and on an H200"
    _print_rows(title, ("recipe", "purpose", "privacy", "CPU", "GPU"), cells)
    if len(shown) == 1:
        for setting, value in shown[0].get("settings", {}).items():
            print(f"{setting} = {value}")


@app.command(rich_help_panel="Look up")
def where(
    item: Annotated[str | None, typer.Argument(help="As in 'Theorem 5'; all items if left out.")] = None,
    as_json: Json = False,
) -> None:
    """Find an item of the paper in the code, and learn whether it holds."""
    from stobatch import paper

    items = [paper.where(item)] if item else list(paper.items().values())
    rows = [{**vars(one), "file": paper.relative_file(one)} for one in items]
    lines = [
        f"{one.name}: src/{paper.relative_file(one)}:{one.line}  {one.summary}\n    {one.verdict}" for one in items
    ]
    show({"items": rows}, as_json, *lines)


@app.command(rich_help_panel="Look up")
def doctor(
    out: Annotated[Path, typer.Option(help="The folder in which runs will be written.")] = Path("runs"),
    only: Annotated[list[str] | None, typer.Option(help="Only this check; may be repeated.")] = None,
    as_json: Json = False,
) -> None:
    """Try everything that training on this machine rests on: arithmetic, disk, data, processes, GPUs."""
    from stobatch.doctor import doctor as examine_machine
    from stobatch.reporting.terminal import health_table

    document = examine_machine(out, only=only or (), quiet=as_json)
    show(document, as_json, health_table(document))
    if not document.ready:
        raise SystemExit(2)


data = typer.Typer(help="Look at data of your own.", no_args_is_help=True)
app.add_typer(data, name="data", rich_help_panel="Look up")


@data.callback()
def _data() -> None:
    """Look at data of your own."""


@data.command()
def check(
    folder: Annotated[Path, typer.Argument(help="With train/CLASS/* and test/CLASS/*.")],
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """List every fault of a folder of images, class counts and repetitions; exit code 2 where training would refuse."""
    from stobatch.config import DataConfig
    from stobatch.data_check import check_folder

    changes = assignments(set_)
    for key in changes:
        if not key.startswith("data."):
            raise SettingError(f"--set {key} is not about data.", remedy="Set data.size, data.fit or data.colour.")
    own = {key.removeprefix("data."): value for key, value in changes.items()}
    document = check_folder(folder, DataConfig(name="image_folder").override_all(own), quiet=as_json)
    show(document, as_json, *document.lines(), "For the data's owner alone: it speaks of single files.")
    if not document.can_be_trained_on:
        raise SystemExit(2)
