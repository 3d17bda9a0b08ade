"""Accuracy under attack and certified accuracy: the curves, and tables with the same numbers."""

from __future__ import annotations

from collections.abc import Sequence

from stobatch.config import CertificationConfig
from stobatch.reporting.figures import accuracy_curves, attack_curves
from stobatch.reporting.format import chip, gap_cell, percent, share_cell, spoken
from stobatch.reporting.page import Html, folded, join, table, tag
from stobatch.reporting.summary import Facts, kind_unit
from stobatch.results import AttackedShare, CertificateSummary, Kind, ProtocolTable, at_radius, of_attack

_DIFFERENCE = (
    "Certified accuracy of the clean input counts test images that are right and stay right in the whole ball around "
    "them. The paper's certified accuracy, in the tables that follow, asks the same of the input an attack has already "
    "moved: it says that the attacked point cannot be moved further, not that the clean image is safe."
)


def curves_section(facts: Facts, name: str) -> Html:
    caption = (
        "Accuracy against radius, with 95% bands over test images. Attacked accuracy is an upper bound: a better "
        "attack can only lower it. Certified accuracy is a lower bound, and only where its rule is proved."
    )
    parts = [
        tag("h2", "Accuracy against radius"),
        tag("figure", accuracy_curves(facts, f"{name}-accuracy"), tag("figcaption", caption)),
    ]
    attacks = attack_curves(facts, f"{name}-attacks")
    if attacks:
        note = "Each attack of the adaptive protocol on its own. Intervals are in the tables."
        parts.append(tag("figure", attacks, tag("figcaption", note)))
    return join(parts)


def tables_section(facts: Facts) -> Html:
    parts = [tag("h2", "The same numbers"), *(_function(facts, function) for function in facts.functions)]
    return join([*parts, _certificates(facts)])


def _function(facts: Facts, function: str) -> Html:
    parts = [tag("h3", f"Function: {spoken(function)}"), _overview(facts, function)]
    entries = [entry for protocol in facts.protocols if (entry := facts.entry(protocol, function))]
    parts += [
        folded(
            f"{spoken(function)}, {entry.protocol.name} protocol, attack by attack",
            _by_attack(facts, entry, entry.accuracy, f"Accuracy under attack on the {_what(entry)}"),
        )
        for entry in entries
    ]
    if any(entry.certified_at_attacked for entry in entries):
        parts += [tag("p", _DIFFERENCE), *(_at_attacked(facts, entry) for entry in entries)]
    return join(parts)


def _what(entry: ProtocolTable) -> str:
    return f"{spoken(entry.function)}, {entry.protocol.name} protocol"


def _overview(facts: Facts, function: str) -> Html:
    """Both protocols' worst, the gap, and what is certified for the clean input, radius by radius."""
    protocols = [p for p in facts.protocols if facts.entry(p, function)]
    worst, kinds = {p: facts.worst(p, function) for p in protocols}, facts.kinds(function)
    headings: list[object] = ["radius", *(f"{p}, worst" for p in protocols)]
    headings += ["gap"] if len(protocols) == 2 else []
    headings += [join([f"certified, {k.name} rule ", chip(k.status)]) for k in kinds]
    rows = []
    for radius in facts.radii:
        gap = facts.gap(function, radius)
        cells: list[object] = [f"{radius:g}", *(share_cell(at_radius(worst[p], radius)) for p in protocols)]
        cells += [gap_cell(gap.gap if gap else None)] if len(protocols) == 2 else []
        rows.append(cells + [share_cell(at_radius(facts.certified(k), radius)) for k in kinds])
    caption = (
        f"All numbers are of the same {facts.same_images(function).rows} test images, clean accuracy "
        f"{percent(facts.clean(function))}. Worst over attacks for each example; certified: clean inputs. Accuracy in "
        f"%, gap in percentage points, 95% interval in brackets; radius {facts.unit}."
    )
    return table(caption, headings, rows)


def _by_attack(facts: Facts, entry: ProtocolTable, accuracy: Sequence[AttackedShare], what: object) -> Html:
    attacks = [*entry.attacks, "worst"]
    rows = [
        [f"{radius:g}", *(share_cell(at_radius(of_attack(accuracy, attack), radius)) for attack in attacks)]
        for radius in facts.radii
    ]
    units = f". In % of {entry.rows} test images, 95% interval in brackets; radius {facts.unit}."
    return table(join([what, units]), ["radius", *attacks], rows)


def _at_attacked(facts: Facts, entry: ProtocolTable) -> Html:
    statuses = {kind.name: kind.status for kind in facts.all_kinds}
    parts = []
    for rule, rows in entry.certified_at_attacked.items():
        status = chip(statuses[rule]) if rule in statuses else tag("span", "status not recorded", class_="chip none")
        what = join([f"Certified at the attacked input, {rule} rule ", status, f", {_what(entry)}"])
        parts.append(folded(what, _by_attack(facts, entry, rows, what)))
    return join(parts)


def _certificates(facts: Facts) -> Html:
    """Who vouches for each kind of certificate, what it assumes, and how far it reaches."""
    title = tag("h3", "Certificates")
    if facts.certificates is None:
        return join([title, tag("p", "This evaluation had no certificates to compare with."), _stale(facts)])
    summary = facts.certificates
    rows = [[join([f"{kind.name} ", chip(kind.status)]), *_kind_cells(summary, kind)] for kind in facts.all_kinds]
    headings = ["rule", "function", "source", "assumes", "each fails with probability at most", "largest radius"]
    verified = summary.verified_accuracy
    votes = any(kind.function == "vote" for kind in summary.kinds)
    deployed = (
        f"Verified inference with {CertificationConfig.from_dict(summary.settings).noise_draws} draws"
        if votes
        else "The network itself"
    )
    note = (
        f"{deployed} on {summary.rows} clean test images: "
        f"{percent(verified.correct_without_abstaining)} right, {percent(verified.abstained)} abstained."
    )
    caption = (
        "What vouches for each certified radius. The largest radius is over all test images, whatever their label."
    )
    return join([title, tag("p", note), table(caption, headings, rows), *_other_units(facts), _stale(facts)])


def _kind_cells(summary: CertificateSummary, kind: Kind) -> list[object]:
    failure = kind.failure_probability
    return [
        spoken(kind.function),
        kind.source,
        "; ".join(kind.assumptions) or "not stated",
        "not stated" if failure is None else f"{failure:g}",
        f"{summary.largest_radius[kind.name]:.4f} ({kind_unit(kind)})",
    ]


def _other_units(facts: Facts) -> list[Html]:
    """Certified accuracies that stand beside no attacks: other units, other images, or a function not attacked."""
    rows = facts.certificates.rows if facts.certificates else 0
    return [
        table(
            join(
                [
                    f"Certified accuracy of clean inputs, {k.name} rule ",
                    chip(k.status),
                    f", {rows} test images. Radius {kind_unit(k)}.",
                ]
            ),
            ["radius", "certified"],
            [[f"{row.radius:g}", share_cell(row)] for row in facts.all_certified(k)],
        )
        for k in facts.all_kinds
        if not facts.certified(k)
    ]


def _stale(facts: Facts) -> Html:
    if not facts.certificates_are_stale:
        return Html("")
    note = "The run has been certified since: these scores do not know its latest certificates. Evaluate again: "
    return tag("p", note, tag("code", facts.evaluate_command), ".", class_="card warning")
