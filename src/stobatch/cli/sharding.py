"""`stobatch shard`: training data as shards on disk, written or looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from stobatch.cli.app import Config, Json, Recipe, Set, _config, _print, app
from stobatch.errors import SettingError


@app.command()
def shard(
    out: Annotated[Path | None, typer.Option(help="The folder to write; new or empty.")] = None,
    recipe: Recipe = None,
    config: Config = None,
    set_: Set = None,
    num_shards: Annotated[int, typer.Option(min=1, help="How many; a process of a training reads whole ones.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Deals the records to the shards; it keeps no secret.")] = 0,
    check: Annotated[Path | None, typer.Option(help="Check this folder instead: files, values, repetitions.")] = None,
    as_json: Json = False,
) -> None:
    """Write a data set as disjoint shards with checksums, for --set data.name=shards; or --check such a folder."""
    from stobatch import verbs

    if (out is None) == (check is None):
        raise SettingError(
            "no folder, or two, are given.", remedy="Write one with `--out DIR`, or look at one with `--check DIR`."
        )
    if check is not None:
        if recipe or config or set_:
            raise SettingError("--check takes no settings.", remedy="Write `stobatch shard --check DIR`.")
        document = verbs.check_shards(check, quiet=as_json)
        _print(
            document, as_json, f"checked {_line(document)}", *_warnings(document["repeated_records"]), _copies(document)
        )
    elif out is not None:
        # Only where the data are and how they are read: nothing is trained.
        settings = _config(recipe or (None if config else "demo"), config, set_, None, None)
        document = verbs.shard(settings, out, num_shards=num_shards, seed=seed, quiet=as_json)
        use = f"train on it with --set data.name=shards --set machine.data_root={out}"
        _print(document, as_json, f"wrote {_line(document)}", _copies(document), use)


def _line(document: dict[str, Any]) -> str:
    info, smallest, largest = document["dataset"], document["smallest_shard"], document["largest_shard"]
    size = f"{smallest:,}" if smallest == largest else f"{smallest:,} to {largest:,}"
    return (
        f"{document['folder']}: {info['name']}, {info['num_train']:,} training examples in {document['num_shards']} "
        f"shards of {size}, {info['num_test']:,} test examples, {document['bytes'] / 1e6:,.1f} MB as "
        f"{document['encoding']}, dealt by {document['dealt']['rule'].removeprefix('by ')}"
    )


def _copies(document: dict[str, Any]) -> str:
    copies, tests = document["test_copies"], document["dataset"]["num_test"]
    return f"{'warning: ' if copies else ''}{copies:,} of {tests:,} test examples are training examples"


def _warnings(repeated: dict[str, Any]) -> list[str]:
    if not repeated["count"]:
        return ["no record occurs twice"]
    positions = "; ".join(", ".join(map(str, group)) for group in repeated["first_positions"])
    return [
        f"warning: {repeated['count']:,} records occur more than once, {repeated['in_more_than_one_shard']:,} of them "
        f"in more than one shard (positions {positions}). Two persons may look alike; one person twice is protected "
        "less than the guarantee says: remove the repetition and write the shards again."
    ]
