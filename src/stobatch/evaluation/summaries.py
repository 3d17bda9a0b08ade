"""What `certify`, `attack` and `evaluate` publish, computed from rows alone: the verbs write it, `verify` compares it.

A summary is a function of tables of records, so that every number can be computed again from the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from stobatch.evaluation.accuracy import AttackedTable, certified_accuracy, gaps, verified_accuracy
from stobatch.evaluation.protocols import PROTOCOLS
from stobatch.evaluation.sanity import Certified, Evidence, Probe, flags
from stobatch.evaluation.statistics import share_of
from stobatch.files import Columns
from stobatch.prediction import describe_kind
from stobatch.results import (
    WORST,
    CertifiedAccuracies,
    ClassShare,
    Gap,
    Protocol,
    ProtocolTable,
    SameImages,
    ScoreSummary,
    Share,
    ShareAt,
)
from stobatch.types import Radius
from stobatch.verifier import CertificateKind

PROBES = ("one_step", "usual_steps", "more_steps", "widest")
"""Columns of the sanity flags' own attacks."""


def certificate_summary(
    columns: Columns, kinds: Sequence[CertificateKind], radii: Sequence[float]
) -> CertifiedAccuracies:
    """Return accuracy of verified inference, and certified accuracy at each radius by each kind of certificate."""
    return CertifiedAccuracies(
        kinds=tuple(map(describe_kind, kinds)),
        verified_accuracy=verified_accuracy(columns),
        certified_accuracy={
            kind: _rows(shares.items()) for kind, shares in certified_accuracy(columns, kinds, radii).items()
        },
        largest_radius={kind.name: max(columns[kind.column]) for kind in kinds},
    )


def attack_summary(table: AttackedTable) -> ProtocolTable:
    """Return accuracy for each attack and radius, and for votes the paper's certified accuracy, too."""
    return ProtocolTable(
        protocol=Protocol(name=table.protocol, meaning=PROTOCOLS[table.protocol].meaning),
        function=table.function,
        records=table.identity,
        attacks=table.attacks,
        rows=len(table.label),
        clean_accuracy=share_of(table.clean()),
        accuracy=tuple(table.conventional()),
        certified_at_attacked={rule: tuple(table.certified_at_attacked(rule)) for rule in table.rules},
    )


def score_summary(evidence: Evidence, lowest_input: float) -> ScoreSummary:
    """Return every table of an evaluation, gaps between protocols, accuracy by class, and the sanity flags."""
    first = evidence.tables[0]
    functions = dict.fromkeys(table.function for table in evidence.tables)
    unit = first.radii[0]
    return ScoreSummary(
        norm=unit.norm,
        input_range=str(unit.range),
        clean_accuracy=share_of(first.clean()),
        accuracy_by_class=_class_shares(first),
        under_attack=tuple(attack_summary(table) for table in evidence.tables),
        gaps={name: _gaps(evidence.tables, name) for name in functions},
        same_images=same_images(evidence.tables, evidence.certified),
        flags=tuple(flags(evidence, lowest_input=lowest_input)),
    )


def _class_shares(table: AttackedTable) -> tuple[ClassShare, ...]:
    """Return clean accuracy, a row for each class that occurs."""
    right, label = table.clean(), table.label
    return tuple(ClassShare(label=int(one), **dict(share_of(right[label == one]))) for one in np.unique(label))


def _gaps(tables: Sequence[AttackedTable], function: str) -> tuple[Gap, ...]:
    of_function = {table.protocol: table for table in tables if table.function == function}
    if not {"published", "adaptive"} <= of_function.keys():
        return ()
    return tuple(gaps(of_function["published"], of_function["adaptive"]))


def probed(tables: Sequence[AttackedTable]) -> AttackedTable | None:
    """Return the table that the sanity flags' own attacks are held against."""
    return next((t for t in tables if (t.protocol, t.function) == ("adaptive", "single_pass")), None)


def probe_radius(adaptive: AttackedTable) -> Radius:
    """Return the radius that breaks about half of the inputs: there a stronger attack shows best."""
    return min(adaptive.radii, key=lambda r: abs(float(adaptive.survives(WORST, r).mean()) - 0.5))


def probe_of(records: Columns, radius: Radius, num_classes: int) -> Probe:
    columns = {name: np.asarray(records[name]) for name in ("label", *PROBES)}
    return Probe(**columns, radius=radius, num_classes=num_classes)


def same_images(tables: Sequence[AttackedTable], certified: Sequence[Certified]) -> tuple[SameImages, ...]:
    """Return, by deployed function, all accuracies of the images that every table and certificate of it covers."""
    names = dict.fromkeys(table.function for table in tables)
    return tuple(_function_shares([t for t in tables if t.function == name], certified) for name in names)


def _function_shares(tables: Sequence[AttackedTable], certified: Sequence[Certified]) -> SameImages:
    function, unit = tables[0].function, tables[0].radii[0]
    certified = [one for one in certified if one.function == function and one.comparable(unit)]
    count = min(len(one) for one in (*(t.label for t in tables), *(c.prediction for c in certified)))
    tables = [table.limit(count) for table in tables]
    first = tables[0]
    return SameImages(
        function=function,
        rows=count,
        clean_accuracy=share_of(first.clean()),
        attacked={
            table.protocol: _rows((radius.size, share_of(table.survives(WORST, radius))) for radius in table.radii)
            for table in tables
        },
        gaps=_gaps(tables, function),
        certified={
            one.kind: _rows((radius.size, share_of(one.holds(first, radius))) for radius in first.radii)
            for one in certified
        },
    )


def _rows(shares: Iterable[tuple[float, Share]]) -> tuple[ShareAt, ...]:
    return tuple(ShareAt(radius=radius, **dict(share)) for radius, share in shares)
