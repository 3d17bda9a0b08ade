"""`predict`: labels for pictures, with how far no change can alter them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from stobatch.cli.app import app
from stobatch.cli.options import Device, Json, NormName, show
from stobatch.errors import SettingError

if TYPE_CHECKING:
    from stobatch.results import Kind, Prediction

_COLUMNS = ("name", "label", "class_name", "abstains", "radius", "radius_of_255", "is_safe", "error")
_PARQUET_ROWS = 1000


@app.command(rich_help_panel="Measure")
def predict(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    pictures: Annotated[list[Path], typer.Argument(help="Files or folders; - reads names of files, line by line.")],
    radius: Annotated[
        float | None,
        typer.Option(help="Ask whether labels hold at this radius, over [-1, 1]."),
    ] = None,
    norm: NormName = None,
    fit: Annotated[
        str | None, typer.Option(help="Bring other sizes and colours to the network's: resize, or crop the middle.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write a table to this file: .csv or .parquet.")] = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Label pictures, each with the radius within which no change can alter the label, and who vouches for that.

    Exits with 1 where a picture could not be read.
    """
    import stobatch
    from stobatch.data.pixels import PictureRule
    from stobatch.results import Predictions

    if fit not in (None, "resize", "crop"):
        raise SettingError(f"--fit {fit} is not known.", remedy="Use resize or crop.")
    rule = None if fit is None else PictureRule(True, fit == "crop", True)
    model = stobatch.load(run, device=device)
    kind, answers = model.answers(_names(pictures), radius=radius, norm=norm, rule=rule)
    kept: list[Prediction] = []
    failed = 0
    with _writer(out, kind, model.weights_sha256) as write:
        for row in answers:
            failed += row.error is not None
            write(row)
            if as_json:
                kept.append(row)
            elif out is None:
                print(row.line(kind), flush=True)
    document = Predictions(
        run=str(run), weights_sha256=model.weights_sha256, class_names=model.class_names, certificate=kind,
        asked_radius=radius, rows=tuple(kept),
    )  # fmt: skip
    written = [] if out is None else [f"written to {out}"]
    show(document, as_json, document.meaning(), f"model {model.weights_sha256[:12]}", *written)
    if failed:
        raise SystemExit(1)


def _names(pictures: list[Path]) -> list[Path]:
    if pictures != [Path("-")]:
        return pictures
    return [Path(line) for line in sys.stdin.read().splitlines() if line]


@contextmanager
def _writer(out: Path | None, kind: Kind | None, digest: str) -> Iterator[Any]:
    """What takes answers one by one; a file appears under its name only once it is whole."""
    if out is None:
        yield lambda row: None
        return
    if out.suffix not in (".csv", ".parquet"):
        raise SettingError(f"{out} is neither .csv nor .parquet.", remedy="Give --out one of these endings.")
    meaning = {"certificate": json.dumps(kind.to_dict()) if kind else "none", "weights_sha256": digest}
    waiting = out.with_name(f".{out.name}.partial")
    try:
        with waiting.open("wb") as file:
            yield from (_csv if out.suffix == ".csv" else _parquet)(file, meaning)
        waiting.replace(out)
    finally:
        waiting.unlink(missing_ok=True)


def _cells(row: Prediction, kind: dict[str, str]) -> dict[str, Any]:
    return {name: getattr(row, name) for name in _COLUMNS} | {"scores": list(row.scores)} | kind


def _csv(file: IO[bytes], meaning: dict[str, str]) -> Iterable[Any]:
    import csv
    import io

    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    writer = csv.DictWriter(text, [*_COLUMNS, "scores", *meaning])
    writer.writeheader()

    def write(row: Prediction) -> None:
        writer.writerow({**_cells(row, meaning), "scores": json.dumps(row.scores)})

    yield write
    text.flush()
    text.detach()


def _parquet(file: IO[bytes], meaning: dict[str, str]) -> Iterable[Any]:
    import pyarrow
    import pyarrow.parquet

    kinds = {"name": "string", "label": "int64", "class_name": "string", "abstains": "bool", "radius": "float64"}
    kinds |= {"radius_of_255": "float64", "is_safe": "bool", "error": "string"}
    fields = [pyarrow.field(name, pyarrow.type_for_alias(kind)) for name, kind in kinds.items()]
    schema = pyarrow.schema([*fields, pyarrow.field("scores", pyarrow.list_(pyarrow.float64()))], metadata=meaning)
    waiting: list[dict[str, Any]] = []
    with pyarrow.parquet.ParquetWriter(file, schema) as writer:

        def flush() -> None:
            writer.write_table(pyarrow.Table.from_pylist(waiting, schema))
            waiting.clear()

        def write(row: Prediction) -> None:
            waiting.append(_cells(row, {}))
            if len(waiting) >= _PARQUET_ROWS:
                flush()

        yield write
        flush()
