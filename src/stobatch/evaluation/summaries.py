"""What `certify`, `attack` and `evaluate` publish, computed from rows alone: the verbs write it, `verify` compares it.

A summary is a function of tables of records, so whoever has the rows can compute every number again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from stobatch.evaluation.accuracy import WORST, AttackedTable, certified_accuracy, gaps, verified_accuracy
from stobatch.evaluation.protocols import PROTOCOLS
from stobatch.evaluation.sanity import Certified, Evidence, Probe, flags
from stobatch.evaluation.statistics import Proportion, proportion
from stobatch.files import Columns
from stobatch.types import Radius
from stobatch.verifier import CertificateKind

PROBES = ("one_step", "usual_steps", "more_steps", "widest")
"""Columns of the sanity flags' own attacks."""

Summary = dict[str, Any]


def certificate_summary(columns: Columns, kinds: Sequence[CertificateKind], radii: Sequence[float]) -> Summary:
    """Accuracy of verified inference, and certified accuracy at each radius by each kind of certificate."""
    return {
        "kinds": [kind.to_dict() for kind in kinds],
        "verified_accuracy": {name: share.to_dict() for name, share in verified_accuracy(columns).items()},
        "certified_accuracy": {
            kind: [{"radius": radius, **share.to_dict()} for radius, share in shares.items()]
            for kind, shares in certified_accuracy(columns, kinds, radii).items()
        },
        "largest_radius": {kind.name: max(columns[kind.column]) for kind in kinds},
    }


def attack_summary(table: AttackedTable) -> Summary:
    """Accuracy for each attack and radius, and for votes the paper's certified accuracy, too."""
    return {
        "protocol": {"name": table.protocol, "meaning": PROTOCOLS[table.protocol].meaning},
        "function": table.function,
        "records": table.identity,
        "attacks": list(table.attacks),
        "rows": len(table.label),
        "clean_accuracy": proportion(table.clean()).to_dict(),
        "accuracy": [score.to_dict() for score in table.conventional()],
        "certified_at_attacked": {
            rule: [score.to_dict() for score in table.certified_at_attacked(rule)] for rule in table.rules
        },
    }


def score_summary(evidence: Evidence, lowest_input: float) -> Summary:
    """Every table of an evaluation, the gaps between protocols, accuracy class by class, and the sanity flags."""
    first = evidence.tables[0]
    functions = dict.fromkeys(table.function for table in evidence.tables)
    unit = first.radii[0]
    return {
        "norm": str(unit.norm),
        "input_range": str(unit.range),
        "clean_accuracy": proportion(first.clean()).to_dict(),
        "accuracy_by_class": _by_class(first),
        "under_attack": [attack_summary(table) for table in evidence.tables],
        "gaps": {name: _gaps(evidence.tables, name) for name in functions},
        "same_images": same_images(evidence.tables, evidence.certified),
        "flags": [flag.to_dict() for flag in flags(evidence, lowest_input=lowest_input)],
    }


def _by_class(table: AttackedTable) -> list[Summary]:
    """On clean inputs, a row for each class that occurs."""
    right, label = table.clean(), table.label
    return [{"class": int(one), **proportion(right[label == one]).to_dict()} for one in np.unique(label)]


def _gaps(tables: Sequence[AttackedTable], function: str) -> list[Summary]:
    of_function = {table.protocol: table for table in tables if table.function == function}
    if not {"published", "adaptive"} <= of_function.keys():
        return []
    return [gap.to_dict() for gap in gaps(of_function["published"], of_function["adaptive"])]


def probed(tables: Sequence[AttackedTable]) -> AttackedTable | None:
    """The table that the sanity flags' own attacks are held against."""
    return next((t for t in tables if (t.protocol, t.function) == ("adaptive", "single_pass")), None)


def probe_radius(adaptive: AttackedTable) -> Radius:
    """The radius that breaks about half of the inputs: there a stronger attack shows best."""
    return min(adaptive.radii, key=lambda r: abs(float(adaptive.survives(WORST, r).mean()) - 0.5))


def probe_of(records: Columns, radius: Radius, num_classes: int) -> Probe:
    columns = {name: np.asarray(records[name]) for name in ("label", *PROBES)}
    return Probe(**columns, radius=radius, num_classes=num_classes)


def same_images(tables: Sequence[AttackedTable], certified: Sequence[Certified]) -> list[Summary]:
    """For each deployed function, all accuracies of the images that every table and certificate of it covers."""
    names = dict.fromkeys(table.function for table in tables)
    return [_of_function([t for t in tables if t.function == name], certified) for name in names]


def _of_function(tables: Sequence[AttackedTable], certified: Sequence[Certified]) -> Summary:
    function, unit = tables[0].function, tables[0].radii[0]
    certified = [one for one in certified if one.function == function and one.comparable(unit)]
    count = min(len(one) for one in (*(t.label for t in tables), *(c.prediction for c in certified)))
    tables = [table.limit(count) for table in tables]
    first = tables[0]
    return {
        "function": function,
        "rows": count,
        "clean_accuracy": proportion(first.clean()).to_dict(),
        "attacked": {
            table.protocol: _rows((radius, proportion(table.survives(WORST, radius))) for radius in table.radii)
            for table in tables
        },
        "gaps": _gaps(tables, function),
        "certified": {
            one.kind: _rows((radius, proportion(one.holds(first, radius))) for radius in first.radii)
            for one in certified
        },
    }


def _rows(shares: Iterable[tuple[Radius, Proportion]]) -> list[Summary]:
    return [{"radius": radius.size, **share.to_dict()} for radius, share in shares]
