"""Accuracy under attack and certified accuracy: curves, tables with the same numbers, and how they were measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from stobatch.config import CertificationConfig
from stobatch.reporting.figures import Chart, accuracy_curves, attack_curves, learning_curve
from stobatch.reporting.format import number, percent, protocol_meanings, status_words, title_of
from stobatch.reporting.summary import Facts
from stobatch.reporting.table import Cell, Table
from stobatch.reporting.tables import (
    attack_table,
    attacked_function,
    certified_tables,
    plan_table,
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
    yield accuracy_curves(facts, f"{name}-accuracy").with_caption(
        "Accuracy against radius, with 95% bands over test images. Attacked accuracy is an upper bound: a better "
        "attack can only lower it. Certified accuracy is a lower bound, and only where its rule is proved."
    )
    attacks = attack_curves(facts, f"{name}-attacks")
    if attacks:
        yield attacks.with_caption("Each attack of the adaptive protocol on its own. Intervals are in the tables.")


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
        title_of(function),
        same_images_table(facts.same_images(function), kinds, facts.unit),
        tuple(by_attack),
        tuple(folded for entry in entries for folded in _at_attacked(facts, entry)),
    )


def _at_attacked(facts: Facts, entry: ProtocolTable) -> Iterator[FoldedTable]:
    """Yield accuracies certified at inputs that an attack has moved; the clean input may be certified or not."""
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
    # Certified accuracies that have no attacks to stand next to: other units, other images, or a function not attacked.
    apart = [kind for kind in facts.all_kinds if not facts.certified(kind)]
    tables = (vouching_table(summary, facts.all_kinds), *certified_tables(summary, apart))
    return Certificates(deployed, tables, stale)


_VOTE = "the vote of verified inference (Algorithm 3) over fresh noise"
_SINGLE_PASS = {
    True: "one pass through the network with its fixed noise",
    False: "one pass through the network, which has no noise",
    None: "one pass through the network, with its fixed noise where it has any",
}
_SETTINGS = {
    "norm": "norm of all radii",
    "functions": "functions attacked",
    "attacks": "attacks, published protocol",
    "attack_steps": "gradient steps, published protocol",
    "adaptive_attacks": "attacks on the single pass, adaptive protocol",
    "adaptive_steps": "gradient steps, adaptive protocol",
    "restarts": "random starts of each adaptive attack",
    "num_aims": "classes that apgd_t walks towards",
    "queries": "queries of the square attack",
    "labels": "labels that adaptive attacks lead away from",
    "target": "class that adaptive attacks lead to",
    "vote_attacks": "attacks on the vote, adaptive protocol",
    "noise_draws": "noise draws per gradient step on the vote",
    "vote_draws": "draws of each vote on an attacked input",
    "vote_limit": "test examples for the vote, at most",
    "limit": "test examples, at most",
    "num_images": "pictures kept",
}
_OF_VOTES = ("vote_attacks", "noise_draws", "vote_draws", "vote_limit")
_UNSET = {"noise_draws": "as many as gradients need to agree", "limit": "all", "vote_limit": "all"}


Pairs = tuple[tuple[str, str], ...]
"""Terms with what they mean."""


@dataclass(frozen=True)
class Measuring:
    """Protocols, settings, training and plan; `training` is empty where the run has no record of it."""

    protocols: Pairs
    settings: Pairs
    training: Pairs
    curve: Chart | None
    plan: Table | None


def measuring(facts: Facts, name: str) -> Measuring:
    unused = _OF_VOTES if facts.scores.has_noise is False else ()
    settings = tuple(
        (_SETTINGS.get(key, key), _value(key, value))
        for key, value in facts.scores.settings.items()
        if key not in unused
    )
    plan = None if facts.plan is None else plan_table(facts.plan, facts.status)
    return Measuring(_protocols(facts), settings, _training(facts), _learning(facts, name), plan)


def _protocols(facts: Facts) -> Pairs:
    entries = facts.scores.under_attack
    meanings = {f"{name} protocol": meaning for name, meaning in protocol_meanings(facts.scores).items()}
    means = {"single_pass": _SINGLE_PASS[facts.scores.has_noise], "vote": _VOTE}
    functions = {title_of(f): means.get(f, f) for f in facts.functions}
    rows = {
        f"{e.protocol.name} on {title_of(e.function)}": f"{e.rows} test images, attacks {', '.join(e.attacks)}"
        for e in entries
    }
    return (*meanings.items(), *functions.items(), *rows.items(), ("accuracies assume", facts.test_records))


def _value(key: str, value: Any) -> str:
    if value is None:
        return _UNSET.get(key, "not set")
    if isinstance(value, list):
        return ", ".join(f"{item:g}" if isinstance(item, float) else str(item) for item in value)
    return number(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)


def _training(facts: Facts) -> Pairs:
    training = facts.training
    if training is None:
        return ()
    seconds = training.seconds_since_last_start
    pairs = (
        ("training steps", number(training.steps)),
        ("device", training.device),
        *((("seconds since its last start", f"{seconds:,.1f} s"),) if seconds is not None else ()),
        ("PyTorch", training.torch),
    )
    if training.test_accuracy is None:
        return pairs
    right = f"{100 * training.test_accuracy:.1f}% of {number(training.test_examples or 0)} held-out test images"
    return (*pairs, ("the saved model is right on", right))


def _learning(facts: Facts, name: str) -> Chart | None:
    training = facts.training
    if training is None or not training.history:
        return None
    whose = training.history_of or "the parameters of that step, before any averaging"
    caption = f"Accuracy on held-out test images while training, of {whose}; no attack."
    return learning_curve(training.history, f"{name}-learning").with_caption(caption)
