"""Whose picture is whose: a table in CSV with the columns image, label and person, beside the folders of classes."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from stobatch.data.persons import person_codes
from stobatch.errors import DataError

COLUMNS = ("image", "label", "person")
_FORM = "image,label,person in its first line, then as train/cat/1.png,cat,p17"


@dataclass(frozen=True)
class PictureOwner:
    """What one line of the table says of a picture."""

    label: str
    person: str


def read_owners(table: Path) -> dict[str, PictureOwner]:
    """Return what the table says of each picture, by its path under the data root, with forward slashes."""
    try:
        with table.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise DataError(f"cannot read {table}: {reason}.", remedy=f"Give a CSV file in UTF-8 with {_FORM}.") from None
    head = [name.strip() for name in rows[0]] if rows else []
    if sorted(set(COLUMNS) & set(head)) != sorted(COLUMNS) or len(set(head)) < len(head):
        raise DataError(f"{table} has not the columns {', '.join(COLUMNS)}.", remedy=f"Write {_FORM}.")
    places = [head.index(name) for name in COLUMNS]
    found: dict[str, PictureOwner] = {}
    for number, row in enumerate(rows[1:], 2):
        if not any(cell.strip() for cell in row):
            continue
        values = [row[place].strip() if place < len(row) else "" for place in places]
        image, label, person = values
        if not all(values):
            empty = COLUMNS[values.index("")]
            raise DataError(
                f"line {number} of {table} has no {empty}.",
                why="Pictures without a name would be taken for one person's." if empty == "person" else "",
                remedy="Fill it in; a picture that is nobody else's gets a person of its own.",
            )
        key = image.replace("\\", "/").removeprefix("./")
        if key in found:
            raise DataError(f"line {number} of {table} names {key} again.", remedy="Keep one line for each picture.")
        found[key] = PictureOwner(label, person)
    return found


def codes_of_pictures(root: Path, table: Path, files: Iterable[tuple[Path, int]], names: tuple[str, ...]) -> Tensor:
    """Return the number of each training picture's person; every one has to be in the table, with its class."""
    owners, persons = read_owners(table), []
    for path, label in files:
        key = path.relative_to(root).as_posix()
        owner = owners.get(key)
        if owner is None:
            raise DataError(
                f"{table} has no line for {key}.",
                why="A picture that is nobody's would be protected for itself alone.",
                remedy=f"Add it, as {key},{names[label]},PERSON; `stobatch data check` lists all that are missing.",
            )
        if owner.label != names[label]:
            raise DataError(
                f"{table} says {owner.label} of {key}, which lies in {names[label]}.",
                remedy="Move the picture, or mend the line.",
            )
        persons.append(owner.person)
    return person_codes(persons, len(persons))
