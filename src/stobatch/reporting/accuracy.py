"""Accuracy under attack and certified accuracy: the curves, and tables with the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stobatch.config import CertificationConfig
from stobatch.reporting.figures import Chart, accuracy_curves, attack_curves
from stobatch.reporting.format import percent, spoken, status_words
from stobatch.reporting.summary import Facts
from stobatch.reporting.table import Cell, Table
from stobatch.reporting.tables import (
    attack_table,
    attacked_function,
    certified_tables,
    prior_notes,
    prior_table,
    same_images_table,
    vouching_table,
)
from stobatch.results import ProtocolTable


@dataclass(frozen=True)
class FoldedTable:
    """A table that most readers do not need, under the line that names it."""

    title: Cell
    table: Table


@dataclass(frozen=True)
class FunctionTables:
    """What was measured of one deployed function."""

    name: str
    overview: Table
    by_attack: tuple[FoldedTable, ...]
    at_attacked: tuple[FoldedTable, ...]


@dataclass(frozen=True)
class Certificates:
    """Who vouches for the certificates of a run; `deployed` is empty where it has none."""

    deployed: str
    tables: tuple[Table, ...]
    stale: str
    """How to evaluate again, where certificates are newer than scores."""


@dataclass(frozen=True)
class Accuracy:
    """Curves against radius, and the same numbers as tables."""

    charts: tuple[Chart, ...]
    functions: tuple[FunctionTables, ...]
    certificates: Certificates
    prior: Table | None
    """The run's prior by itself."""
    prior_notes: tuple[str, ...]


def measured_accuracy(facts: Facts, name: str) -> Accuracy:
    functions = tuple(_function(facts, function) for function in facts.functions)
    own = prior_table(facts.scores.prior, facts.certificates.prior if facts.certificates else None)
    notes = tuple(prior_notes(facts.guarantee, own))
    return Accuracy(tuple(_charts(facts, name)), functions, _certificates(facts), own, notes)


def _charts(facts: Facts, name: str) -> Iterator[Chart]:
    yield accuracy_curves(facts, f"{name}-accuracy").captioned(
        "Accuracy against radius, with 95% bands over test images. Attacked accuracy is an upper bound: a better "
        "attack can only lower it. Certified accuracy is a lower bound, and only where its rule is proved."
    )
    attacks = attack_curves(facts, f"{name}-attacks")
    if attacks:
        yield attacks.captioned("Each attack of the adaptive protocol on its own. Intervals are in the tables.")


def _function(facts: Facts, function: str) -> FunctionTables:
    entries = [entry for protocol in facts.protocols if (entry := facts.entry(protocol, function))]
    kinds = {kind.name: str(kind.status) for kind in facts.kinds(function)}
    by_attack = (
        FoldedTable(
            Cell(f"{attacked_function(entry)}, attack by attack"),
            attack_table(entry, entry.accuracy, f"Accuracy under attack on the {attacked_function(entry)}"),
        )
        for entry in entries
    )
    return FunctionTables(
        spoken(function),
        same_images_table(facts.same_images(function), kinds, facts.unit),
        tuple(by_attack),
        tuple(folded for entry in entries for folded in _at_attacked(facts, entry)),
    )


def _at_attacked(facts: Facts, entry: ProtocolTable) -> Iterator[FoldedTable]:
    """Yield where an attack has moved the input already; the clean input may be certified or not."""
    statuses = {kind.name: str(kind.status) for kind in facts.all_kinds}
    for rule, rows in entry.certified_at_attacked.items():
        status = statuses.get(rule, "status not recorded")
        what = f"Certified at the attacked input, {rule} rule"
        table = attack_table(entry, rows, f"{what} {status_words(status)}, {attacked_function(entry)}")
        yield FoldedTable(Cell(f"{what}, {attacked_function(entry)}", status=status), table)


def _certificates(facts: Facts) -> Certificates:
    stale = facts.evaluate_command if facts.certificates_are_stale else ""
    summary = facts.certificates
    if summary is None:
        return Certificates("", (), stale)
    votes = any(kind.function == "vote" for kind in summary.kinds)
    draws = CertificationConfig.from_dict(summary.settings).noise_draws
    verified = summary.verified_accuracy
    deployed = (
        f"{f'Verified inference with {draws} draws' if votes else 'The network itself'} on {summary.rows} clean test "
        f"images: {percent(verified.correct_without_abstaining)} right, {percent(verified.abstained)} abstained."
    )
    # Certified accuracies that stand beside no attacks: other units, other images, or a function not attacked.
    apart = [kind for kind in facts.all_kinds if not facts.certified(kind)]
    tables = (vouching_table(summary, facts.all_kinds), *certified_tables(summary, apart))
    return Certificates(deployed, tables, stale)
