"""The tables that a terminal and a page both show, each built here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from stobatch.dp.guarantee import PrivacyGuarantee
from stobatch.reporting.format import interval, number, percent, points, status_words, title_of, unit
from stobatch.reporting.table import DASH, Cell, Column, Entry, Heading, Table
from stobatch.results import (
    WORST,
    AttackedShare,
    CertificateSummary,
    Difference,
    Kind,
    PlanDocument,
    PriorCertificates,
    PriorScores,
    ProtocolTable,
    SameImages,
    Share,
    at_radius,
    of_attack,
)

RADIUS = Column("radius", is_number=True)


def share_cell(share: Share | None) -> Cell:
    """Return a value with its 95% interval, or a dash where nothing was measured."""
    return Cell(DASH) if share is None else Cell(percent(share), interval(share))


def gap_cell(gap: Difference | None) -> Cell:
    return Cell(DASH) if gap is None else Cell(points(gap.value), interval(gap))


def plan_table(plan: PlanDocument, status: str) -> Table:
    """Return a number per line, its formula, and its place in the paper."""
    caption = f"Every number that was fixed before any data was read. Budgets (ε) in it: {status_words(status)}."
    headings: list[Heading] = ["quantity", "symbol", Column("value", is_number=True), "formula", "place in the paper"]
    rows = [[row.name, row.symbol, number(row.value), row.formula, row.paper] for row in plan.rows]
    return Table.of(caption, headings, rows)


def same_images_table(block: SameImages, kinds: Mapping[str, str], unit_name: str) -> Table:
    """Return both protocols' worst, the gap, and what is certified for the clean input, radius by radius.

    `kinds` has the status of each rule that certifies this function.
    """
    columns = [RADIUS, *(Column(f"{protocol} protocol", is_number=True) for protocol in block.attacked)]
    columns += [Column("gap", is_number=True)] if len(block.attacked) == 2 else []
    columns += [Column(f"certified, {rule} rule", status=status, is_number=True) for rule, status in kinds.items()]
    rows = []
    for radius in sorted({row.radius for rows in block.attacked.values() for row in rows}):
        gap = at_radius(block.gaps, radius)
        cells = [Cell(f"{radius:g}"), *(share_cell(at_radius(rows, radius)) for rows in block.attacked.values())]
        cells += [gap_cell(gap.gap if gap else None)] if len(block.attacked) == 2 else []
        cells += [share_cell(at_radius(block.certified.get(rule, ()), radius)) for rule in kinds]
        rows.append(cells)
    caption = (
        f"All numbers are of the same {block.rows} test images, {title_of(block.function)}, clean accuracy "
        f"{percent(block.clean_accuracy)}. Worst over attacks for each example; certified: clean inputs. Accuracy in "
        f"%, gap in percentage points, 95% interval in brackets; radius {unit_name}."
    )
    return Table.of(caption, columns, rows)


def attack_table(under: ProtocolTable, accuracy: Sequence[AttackedShare], what: str) -> Table:
    """Return accuracies under each attack of one protocol on one function, and under the worst of them."""
    attacks = [*under.attacks, WORST]
    radii = sorted({row.radius for row in accuracy})
    rows: list[list[Entry]] = [
        [f"{radius:g}", *(share_cell(at_radius(of_attack(accuracy, attack), radius)) for attack in attacks)]
        for radius in radii
    ]
    unit_name = unit(accuracy[0].norm, accuracy[0].input_range) if accuracy else "unknown"
    caption = f"{what}. In % of {under.rows} test images, 95% interval in brackets; radius {unit_name}."
    return Table.of(caption, [RADIUS, *(Column(attack, is_number=True) for attack in attacks)], rows)


def prior_table(scores: PriorScores | None, certificates: PriorCertificates | None) -> Table | None:
    """Return the row of a run's prior, by itself: public weights, which have read no private record."""
    known = scores or certificates
    if known is None:
        return None
    kinds = certificates.kinds if certificates else ()
    attacked = scores.of_attack(WORST) if scores else ()
    columns = [RADIUS]
    columns += [Column(f"{scores.protocol.name} protocol, prior alone", is_number=True)] if scores else []
    columns += [
        Column(f"certified, {kind.name} rule, prior alone", status=kind.status, is_number=True) for kind in kinds
    ]
    shares = [certificates.certified_accuracy[kind.name] for kind in kinds] if certificates else []
    radii = sorted({row.radius for row in attacked} | {row.radius for rows in shares for row in rows})
    rows: list[list[Entry]] = [
        [f"{radius:g}", *([share_cell(at_radius(attacked, radius))] if scores else []),
         *(share_cell(at_radius(column, radius)) for column in shares)]
        for radius in radii
    ]  # fmt: skip
    clean = scores.clean_accuracy if scores else certificates.verified_accuracy.correct if certificates else None
    counts = sorted({each.rows for each in (scores, certificates) if each is not None})
    where = unit(attacked[0].norm, attacked[0].input_range) if attacked else kind_unit(kinds[0])
    images, right = " and ".join(map(str, counts)), percent(clean) if clean else DASH
    caption = (
        f"The prior alone, {known.name}: the public weights that training started from; towards the private records "
        f"{known.budget}. Clean accuracy {right}, of {images} test images. In %, 95% interval in brackets; "
        f"radius {where}."
    )
    return Table.of(caption, columns, rows)


def prior_notes(guarantee: PrivacyGuarantee, shown: Table | None) -> list[str]:
    """Return why a run that started from a prior shows no row of it, where it has none."""
    prior = guarantee.prior
    if prior is None or shown is not None:
        return []
    if prior.new_head:
        return [f"the prior {prior.name} has no row of its own: its last layer was drawn afresh"]
    return [f"the prior {prior.name} was not measured by itself: certify and evaluate again"]


def attacked_function(under: ProtocolTable) -> str:
    return f"{title_of(under.function)}, {under.protocol.name} protocol"


def certified_tables(summary: CertificateSummary, kinds: Iterable[Kind]) -> list[Table]:
    """Return certified accuracy of clean inputs, radius by radius; a table for each unit of radius."""
    by_unit: dict[str, list[Kind]] = {}
    for kind in kinds:
        by_unit.setdefault(kind_unit(kind), []).append(kind)
    return [_certified_table(summary, unit_name, same) for unit_name, same in by_unit.items()]


def _certified_table(summary: CertificateSummary, unit_name: str, kinds: Sequence[Kind]) -> Table:
    shares = [summary.certified_accuracy[kind.name] for kind in kinds]
    radii = sorted({row.radius for rows in shares for row in rows})
    caption = f"Certified accuracy of clean inputs, {summary.rows} test images. Radius {unit_name}."
    columns = [RADIUS, *(Column(f"{kind.name} rule", kind.source, kind.status, is_number=True) for kind in kinds)]
    rows: list[list[Entry]] = [
        [f"{radius:g}", *(share_cell(at_radius(column, radius)) for column in shares)] for radius in radii
    ]
    return Table.of(caption, columns, rows)


def vouching_table(summary: CertificateSummary, kinds: Iterable[Kind]) -> Table:
    """Return who vouches for each kind of certificate, what it assumes, and how far it reaches."""
    caption = (
        "What vouches for each certified radius. The largest radius is over all test images, whatever their label."
    )
    headings = ["rule", "function", "source", "assumes", "each fails with probability at most", "largest radius"]
    rows: list[list[Entry]] = [
        [
            Cell(kind.name, status=kind.status),
            title_of(kind.function),
            kind.source,
            "; ".join(kind.assumptions) or "not stated",
            "not stated" if kind.failure_probability is None else f"{kind.failure_probability:g}",
            f"{summary.largest_radius[kind.name]:.4f} ({kind_unit(kind)})",
        ]
        for kind in kinds
    ]
    return Table.of(caption, headings, rows)


def kind_unit(kind: Kind) -> str:
    return unit(kind.norm, kind.input_range)
