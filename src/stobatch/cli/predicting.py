"""`predict`: labels for pictures, with how far no change can alter them."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from stobatch.cli.app import app
from stobatch.cli.options import Device, Json, NormName, show
from stobatch.errors import SettingError
from stobatch.progress import progress

if TYPE_CHECKING:
    from stobatch.results import Kind, Prediction

_COLUMNS = ("name", "label", "class_name", "abstains", "radius", "radius_of_255", "is_safe", "error")
_VOUCHING = ("kind", "status", "norm", "input_range", "failure_probability")
_PARQUET_ROWS = 1000
Vouching = dict[str, str | None]


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
    from stobatch.prediction import name_pictures
    from stobatch.results import Predictions

    if fit not in (None, "resize", "crop"):
        raise SettingError(f"--fit {fit} is not known.", remedy="Use resize or crop.")
    rule = None if fit is None else PictureRule(True, fit == "crop", True)
    warnings.filterwarnings("ignore", module="PIL")  # what is wrong with a file is its answer
    model = stobatch.load(run, device=device)
    given = _names(pictures)
    number = sum(1 for _ in name_pictures(given, model.network.input_shape))
    kind, answers = model.answers(given, radius=radius, norm=norm, rule=rule)
    kept: list[Prediction] = []
    failed, certified = 0, False
    # Lines that are printed are progress enough.
    with (
        _writer(out, kind, model.weights_sha256) as write,
        progress("predict", number, quiet=out is None or as_json) as advance,
    ):
        for row in answers:
            advance()
            failed += row.error is not None
            certified = certified or bool(row.radius)
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
    # What radii mean is said where there is one.
    meaning = [document.meaning()] if certified or kind is None else []
    show(document, as_json, *meaning, f"model {model.weights_sha256[:12]}", *written)
    if failed:
        raise SystemExit(1)


def _names(pictures: list[Path]) -> list[Path]:
    if pictures != [Path("-")]:
        return pictures
    named = [Path(line) for line in sys.stdin.read().splitlines() if line]
    if not named:
        raise SettingError("standard input names no file.", remedy="Write a name of a file on each line of it.")
    return named


@contextmanager
def _writer(out: Path | None, kind: Kind | None, digest: str) -> Iterator[Any]:
    """What takes answers one by one; a file appears under its name only once it is whole."""
    if out is None:
        yield lambda row: None
        return
    if out.suffix not in (".csv", ".parquet"):
        raise SettingError(f"{out} is neither .csv nor .parquet.", remedy="Give --out one of these endings.")
    vouching: Vouching = dict.fromkeys(_VOUCHING)
    if kind is not None:
        said = (kind.name, kind.status, kind.norm, kind.input_range, kind.failure_probability)
        vouching = dict(zip(_VOUCHING, map(str, said), strict=True))
    waiting = out.with_name(f".{out.name}.partial")
    try:
        with waiting.open("wb") as file:
            if out.suffix == ".csv":
                yield from _csv(file, vouching, digest)
            else:
                yield from _parquet(file, vouching, digest, json.dumps(kind.to_dict()) if kind else "none")
        waiting.replace(out)
    finally:
        waiting.unlink(missing_ok=True)


def _cells(row: Prediction, vouching: Vouching, digest: str) -> dict[str, Any]:
    """Return a row of the table; who vouches for its radius, if it has one, stands beside it."""
    said = vouching if row.error is None else dict.fromkeys(_VOUCHING)
    return {name: getattr(row, name) for name in _COLUMNS} | said | {"weights_sha256": digest, "scores": row.scores}


def _csv(file: IO[bytes], vouching: Vouching, digest: str) -> Iterable[Any]:
    import csv
    import io

    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    writer = csv.DictWriter(text, [*_COLUMNS, *_VOUCHING, "weights_sha256", "scores"])
    writer.writeheader()

    def write(row: Prediction) -> None:
        writer.writerow({**_cells(row, vouching, digest), "scores": json.dumps(row.scores)})

    yield write
    text.flush()
    text.detach()


def _parquet(file: IO[bytes], vouching: Vouching, digest: str, certificate: str) -> Iterable[Any]:
    import pyarrow
    import pyarrow.parquet

    kinds = {"label": "int64", "abstains": "bool", "radius": "float64", "radius_of_255": "float64", "is_safe": "bool"}
    names = (*_COLUMNS, *_VOUCHING, "weights_sha256")
    fields = [pyarrow.field(name, pyarrow.type_for_alias(kinds.get(name, "string"))) for name in names]
    scores = pyarrow.field("scores", pyarrow.list_(pyarrow.float64()))
    metadata = {"certificate": certificate, "weights_sha256": digest}
    schema = pyarrow.schema([*fields, scores], metadata=metadata)
    waiting: list[dict[str, Any]] = []
    with pyarrow.parquet.ParquetWriter(file, schema) as writer:

        def flush() -> None:
            writer.write_table(pyarrow.Table.from_pylist(waiting, schema))
            waiting.clear()

        def write(row: Prediction) -> None:
            waiting.append(_cells(row, vouching, digest))
            if len(waiting) >= _PARQUET_ROWS:
                flush()

        yield write
        flush()
