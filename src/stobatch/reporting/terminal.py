"""What a person reads in a terminal. Every epsilon and every radius is printed with its status and its units."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table as RichTable
from rich.text import Text

from stobatch.config import CertificationConfig
from stobatch.dp.guarantee import PrivacyGuarantee
from stobatch.reporting.format import STATUS_STYLES, STATUS_WORDS, percent, protocol_meanings, unit
from stobatch.reporting.guarantee import STATUS_MEANINGS, about, against, extent, guarantee_line, prior_lines
from stobatch.reporting.summary import NOT_LOOKED_FOR
from stobatch.reporting.table import Cell, Column, Heading, Table
from stobatch.reporting.tables import (
    attack_table,
    attacked_function,
    certified_tables,
    kind_unit,
    plan_table,
    prior_notes,
    prior_table,
    same_images_table,
)
from stobatch.results import (
    Audit,
    CertificateSummary,
    FederatedTraining,
    FederationAccount,
    Health,
    HealthCheck,
    HealthReport,
    Kind,
    Outcome,
    PlanDocument,
    ProtocolTable,
    SanityFlag,
    Scores,
    Training,
    Verification,
    untested,
)
from stobatch.types import Status, Verdict


def trained_line(run: Path, training_hash: str, training: Training) -> str:
    """Return what was trained, and how often the saved model is right; runs of older versions did not record that."""
    done = f"trained {run} ({training_hash})"
    if training.test_accuracy is None:
        return f"{done}; how good it is says `stobatch evaluate {run}`"
    images = f"{training.test_examples:,} held-out test images"
    return f"{done}: the saved model is right on {training.test_accuracy:.1%} of {images}"


def guarantee_lines(guarantee: PrivacyGuarantee, run: Path) -> RenderableType:
    """Return what is guaranteed, what that is worth, and what speaks against it, in short."""
    style = STATUS_STYLES[guarantee.status]
    rest = f"{extent(guarantee)}: `stobatch guarantee {shlex.quote(str(run))}`"
    return Group(
        Text(guarantee_line(guarantee), style=f"bold {style}"),
        Text(f"{STATUS_MEANINGS[guarantee.status]} {rest}", style=style if guarantee.status is Status.VOID else ""),
        *(Text(line, style=style) for line in against(guarantee)),
    )


def guarantee_card(guarantee: PrivacyGuarantee) -> RenderableType:
    """Return a guarantee in full, with everything it assumes and everything that speaks against it."""
    style = STATUS_STYLES[guarantee.status]
    lines = [
        Text(guarantee_line(guarantee), style=f"bold {style}"),
        Text(STATUS_MEANINGS[guarantee.status], style=style),
        Text(about(guarantee)),
    ]
    lines += [Text(line) for line in prior_lines(guarantee)]
    lines += [Text(f"assumes: {line}") for line in guarantee.assumptions]
    lines += [Text(f"against it: {line}", style=style) for line in guarantee.objections]
    lines += [Text(f"audit, {line}") for line in guarantee.audits]
    return Panel(Group(*lines), title="privacy towards the training data", border_style=style)


def audit_tables(audit: Audit) -> list[RenderableType]:
    """Return a panel for each finding, then what was not tested; nothing that was survived is called proved."""
    panels: list[RenderableType] = []
    for finding in audit.findings:
        style = STATUS_STYLES[finding.verdict]
        lines = [
            Text(finding.verdict.upper(), style=f"bold {style}"),
            Text(finding.statement),
            Text(f"claim: {finding.claim}", style="dim"),
            Text(f"attacker: {finding.threat_model}", style="dim"),
            Text(f"attack: {finding.attack}", style="dim"),
            Text(
                f"false-alarm rate: at most {1 - finding.confidence:.3g}; evidence: {finding.evidence}",
                style="dim",
            ),
        ]
        title = f"{finding.instrument.replace('_', ' ')}: {finding.about}"
        panels.append(Panel(Group(*lines), title=title, border_style=style))
    refuted = sum(finding.verdict is Verdict.REFUTED for finding in audit.findings)
    closing = {
        "refuted": f"{refuted} of {len(audit.findings)} findings refute a claim.",
        "not tested": "NOT TESTED: no claim of this run was tested.",
    }.get(audit.verdict, "Nothing was refuted. That proves nothing: an attack that failed may have been too weak.")
    lines = [Text(closing, style="bold red" if refuted else "")]
    lines += [Text(f"not tested: {line}", style="bold yellow") for line in untested(audit.claims)]
    return [*panels, *lines]


def plan_parts(plan: PlanDocument) -> RenderableType:
    """Return the plan, and what it promises."""
    return Group(plan_table(plan, plan.guarantee.status).to_rich(), guarantee_card(plan.guarantee))


def certificate_parts(summary: CertificateSummary) -> RenderableType:
    """Return certified accuracy on clean test inputs by kind of certificate, and how far each reaches."""
    verified = summary.verified_accuracy
    votes = summary.kinds[0].function == "vote"
    draws = f" with {CertificationConfig.from_dict(summary.settings).noise_draws} draws" if votes else ""
    lines = [
        f"{'verified inference' if votes else 'the network itself'}{draws}: "
        f"{verified.correct_without_abstaining} correct, {verified.abstained} abstained; "
        f"{'; '.join(map(_reliability, summary.kinds))}"
    ]
    reached = [
        Cell(f"{kind.name} {summary.largest_radius[kind.name]:.4f}", kind_unit(kind), kind.status)
        for kind in summary.kinds
    ]
    lines.append(f"largest radius, any label: {', '.join(map(str, reached))}")
    if chosen := summary.chosen:
        means = ", ".join(f"{name} {mean:.4f}" for name, mean in chosen.mean_radius.items())
        lines.append(f"certificate: {chosen.certificate}, the larger mean radius on {chosen.compared_on} ({means})")
    tables = [*certified_tables(summary, summary.kinds), *filter(None, (prior_table(None, summary.prior),))]
    return Group(*(table.to_rich() for table in tables), *map(Text, lines))


def _reliability(kind: Kind) -> str:
    """Return how often a certificate of this kind may be wrong, in words."""
    if kind.failure_probability is None:
        return f"the {kind.name} rule states no probability of failure"
    if kind.failure_probability == 0:
        return f"a certificate by {kind.name} does not fail by chance"
    return f"each {kind.name} certificate fails with probability at most {kind.failure_probability:g}"


def attack_parts(under: ProtocolTable) -> RenderableType:
    """Return accuracy under each attack of one protocol on one function, and under the worst of them."""
    what = f"Accuracy under attack on the {attacked_function(under)}, clean {percent(under.clean_accuracy)}"
    return Group(
        attack_table(under, under.accuracy, what).to_rich(),
        Text(f"protocol: {under.protocol.meaning}; 95% intervals over test examples"),
    )


def score_parts(scores: Scores) -> RenderableType:
    """Return the worst case under every protocol next to what is certified, of the same images; and the flags."""
    statuses = {kind.name: str(kind.status) for kind in (scores.certificates.kinds if scores.certificates else ())}
    parts: list[RenderableType] = []
    for block in scores.same_images:
        kinds = {rule: statuses[rule] for rule in block.certified}
        parts.append(same_images_table(block, kinds, unit(scores.norm, scores.input_range)).to_rich())
    own = prior_table(scores.prior, scores.certificates.prior if scores.certificates else None)
    parts += [own.to_rich()] if own else map(Text, prior_notes(scores.guarantee, own))
    parts += [Text(f"{name}: {meaning}") for name, meaning in protocol_meanings(scores).items()]
    parts.append(Text(f"accuracies assume: {scores.test_records or NOT_LOOKED_FOR}"))
    return Group(*parts, flag_panel(scores.flags))


def flag_panel(flags: Sequence[SanityFlag]) -> RenderableType:
    """Return what makes these numbers doubtful, with what to do about it."""
    if not flags:
        return Text("sanity flags: none raised")
    lines = []
    for flag in flags:
        lines.append(Text(f"{flag.level.upper()}: {flag.name}. {flag.evidence}", style="bold red"))
        lines.append(Text(f"  raised if {flag.raised_if}. {flag.explanation} {flag.remedy}"))
    return Panel(Group(*lines), title="sanity flags", border_style="red")


def show(*parts: RenderableType) -> None:
    """Print to standard output, without colours where it is not a terminal."""
    console = Console(highlight=False)
    for part in parts:
        console.print(part)


_OUTCOME_STYLES = {"agrees": "green", "differs": "bold red", "not checked": "yellow"}


def verified_page(document: Verification) -> RenderableType:
    """Return a line for each check, then what no file can show, then the verdict."""
    width = max(len(outcome) for outcome in _OUTCOME_STYLES)
    lines = [Text(f"verify {document.run}", style="bold")]
    for check in document.checks:
        about = f"{check.name}, {check.file}" if check.file else check.name
        outcome = Text(check.outcome.ljust(width), style=_OUTCOME_STYLES[check.outcome])
        lines.append(Text.assemble("  ", outcome, f"  {about}: {check.detail}"))
    lines.append(Text("No file can show", style="bold"))
    lines += [Text(f"  {line}") for line in document.cannot_be_checked]
    if (guarantee := document.guarantee) is not None:
        lines.append(Text(guarantee_line(guarantee), style=f"bold {STATUS_STYLES[guarantee.status]}"))
    return Group(*lines, _verification_verdict(document))


def _verification_verdict(document: Verification) -> Text:
    """Return the outcome; green is for a run whose files agree and whose privacy is proved."""
    differing = len(document.differing)
    if differing:
        return Text(f"DIFFERS in {differing} of {len(document.checks)} checks: do not rely on it.", style="bold red")
    skipped = sum(check.outcome is Outcome.NOT_CHECKED for check in document.checks)
    agreed = f"Everything that was checked agrees; {skipped} checks were left out."
    if document.guarantee is None:
        return Text(f"{agreed} What the run guarantees was not computed.", style="bold yellow")
    status = document.guarantee.status
    return Text(f"{agreed} Privacy: {STATUS_WORDS[status]}.", style=f"bold {STATUS_STYLES[status]}")


_STATE_STYLES = {"ok": "green", "warning": "yellow", "missing": "dim", "not here": "dim", "broken": "bold red"}


def health_table(document: HealthReport) -> RenderableType:
    """Return a line for each check; below it a remedy for each one that has something to mend, broken ones last."""
    table = RichTable(title=f"this machine, in {document.seconds:.0f} s", title_justify="left")
    for heading, justify in (("check", "left"), ("state", "left"), ("tried and measured", "left"), ("s", "right")):
        table.add_column(heading, justify=justify, no_wrap=heading != "tried and measured")  # type: ignore[arg-type]
    for check in document.checks:
        state = Text(check.status, style=_STATE_STYLES[check.status])
        table.add_row(check.name, state, Text(check.said), f"{check.seconds:.1f}")
    return Group(table, *_remedies(document.checks), _health_verdict(document))


def _remedies(checks: Sequence[HealthCheck]) -> list[Text]:
    mendable = sorted((check for check in checks if check.remedy), key=lambda check: check.status is Health.BROKEN)
    return [Text(f"{check.name}: {check.remedy}", style=_STATE_STYLES[check.status]) for check in mendable]


def _health_verdict(document: HealthReport) -> Text:
    broken = [check.name for check in document.checks if check.stops_training]
    if document.ready:
        verdict = "Everything that training needs works." if document.complete else "What was checked works."
        return Text(verdict, style="bold green")
    return Text(f"Training needs what is broken: {', '.join(broken)}.", style="bold red")


_PARTY_HEADINGS = ("records", "sampling rate", "noise multiplier", "rounds", "at most", "ε", "δ")


def party_table(federation: FederationAccount | FederatedTraining, run: Path) -> RenderableType:
    """Return the table behind a federation's guarantee, and the guarantee."""
    guarantee = federation.guarantee
    rows = [
        (
            party.name,
            f"{party.records:,}",
            f"{party.sampling_rate:.4g}",
            f"{party.noise_multiplier:.4g}",
            f"{party.rounds:,}",
            f"{party.most_rounds:,}",
            f"{party.epsilon:g}",
            f"{party.delta:g}",
        )
        for party in federation.parties
    ]
    columns: list[Heading] = ["party", *(Column(heading, is_number=True) for heading in _PARTY_HEADINGS)]
    caption = f"parties; every ε is {STATUS_WORDS[guarantee.status]}, for that party's records"
    return Group(Table.of(caption, columns, rows).to_rich(), guarantee_lines(guarantee, run))
