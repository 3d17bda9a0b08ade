"""Clean, attacked and certified accuracy of the same test images, so that they may stand side by side.

Attacks and certificates may each have been limited to the first so many test images. Of what was measured of both,
the first images are common; accuracies of different images are not comparable, and a certified one could then exceed
an attacked one without anything being wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from stobatch.evaluation.accuracy import WORST, AttackedTable, gaps
from stobatch.evaluation.sanity import Certified
from stobatch.evaluation.statistics import Proportion, proportion
from stobatch.types import Radius

Document = dict[str, Any]


def same_images(tables: Sequence[AttackedTable], certified: Sequence[Certified]) -> list[Document]:
    """For each deployed function, all accuracies of the images that every table and certificate of it covers."""
    names = dict.fromkeys(table.function for table in tables)
    return [_of_function([t for t in tables if t.function == name], certified) for name in names]


def _of_function(tables: Sequence[AttackedTable], certified: Sequence[Certified]) -> Document:
    function, unit = tables[0].function, tables[0].radii[0]
    certified = [one for one in certified if one.function == function and one.comparable(unit)]
    count = min(len(one) for one in (*(t.label for t in tables), *(c.prediction for c in certified)))
    tables = [table.limit(count) for table in tables]
    first, by_protocol = tables[0], {table.protocol: table for table in tables}
    published, adaptive = by_protocol.get("published"), by_protocol.get("adaptive")
    return {
        "function": function,
        "rows": count,
        "clean_accuracy": proportion(first.clean()).to_dict(),
        "attacked": {
            table.protocol: _rows((radius, proportion(table.survives(WORST, radius))) for radius in table.radii)
            for table in tables
        },
        "gaps": [gap.to_dict() for gap in gaps(published, adaptive)] if published and adaptive else [],
        "certified": {
            one.kind: _rows((radius, proportion(one.holds(first, radius))) for radius in first.radii)
            for one in certified
        },
    }


def _rows(shares: Iterable[tuple[Radius, Proportion]]) -> list[Document]:
    return [{"radius": radius.size, **share.to_dict()} for radius, share in shares]
