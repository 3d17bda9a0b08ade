"""What a person reads in a terminal. Every epsilon and every radius is printed with its status and its units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from stobatch.config import CertificationConfig
from stobatch.dp.guarantee import PUBLIC_SEED, PrivacyGuarantee
from stobatch.reporting.format import STATUS_STYLES, STATUS_WORDS
from stobatch.results import (
    WORST,
    AttackedShare,
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
    SameImages,
    SanityFlag,
    Scores,
    Training,
    Verification,
    untested,
)
from stobatch.types import Status, Verdict

NOT_LOOKED_FOR = "test records are not training records; nobody looked for copies"
"""Of scores that were written before anyone did."""
PUBLIC_SEED_MEANS = (
    "The seed is written in config.json: whoever has it can rebuild the noise and take it off. This is an experiment; "
    "for a release, train without --seed."
)


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) or float(value).is_integer() else f"{value:.5g}"


def guarantee_line(guarantee: PrivacyGuarantee) -> str:
    """The budget with its status in front, so that neither can be read without the other."""
    if guarantee.status is Status.NONE:
        return "NO PRIVACY GUARANTEE"
    budget = f"ε = {guarantee.epsilon:g}" + (f", δ = {guarantee.delta:g}" if guarantee.delta else "")
    if guarantee.status is Status.VOID:
        return f"VOID: {PUBLIC_SEED} ({budget} would be {guarantee.secret_seed_status} with secret seeds)"
    words = {Status.CLAIMED: "CLAIMED, NOT PROVED", Status.PROVED: "proved", Status.REFUTED: "REFUTED"}
    return f"{words[guarantee.status]}: {budget}"


def trained_line(run: Path, training_hash: str, training: Training) -> str:
    """What was trained, and how often the saved model is right; runs of older versions did not record that."""
    done = f"trained {run} ({training_hash})"
    if training.test_accuracy is None:
        return f"{done}; how good it is says `stobatch evaluate {run}`"
    images = f"{training.test_examples:,} held-out test images"
    return f"{done}: the saved model is right on {training.test_accuracy:.1%} of {images}"


def guarantee_card(guarantee: PrivacyGuarantee) -> RenderableType:
    """What is guaranteed, by whom, and what speaks against it."""
    style = STATUS_STYLES[guarantee.status]
    lines = [Text(guarantee_line(guarantee), style=f"bold {style}")]
    if guarantee.status is Status.VOID:
        lines.append(Text(PUBLIC_SEED_MEANS, style=style))
    lines.append(Text(f"{guarantee.neighbours} neighbours, per {guarantee.unit}, {guarantee.source}"))
    lines += [Text(f"assumes: {line}") for line in guarantee.assumptions]
    lines += [Text(f"against it: {line}", style=style) for line in guarantee.objections]
    lines += [Text(f"audit, {line}") for line in guarantee.audits]
    return Panel(Group(*lines), title="privacy towards the training data", border_style=style)


def audit_tables(audit: Audit) -> list[RenderableType]:
    """A panel for each finding, then what was not tested; nothing that was survived is called proved."""
    panels: list[RenderableType] = []
    for finding in audit.findings:
        style = {"refuted": "red", "consistent": "green"}.get(finding.verdict, "yellow")
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


def plan_table(plan: PlanDocument) -> RenderableType:
    """The plan: a number per line, its formula, and its place in the paper."""
    table = Table(title="plan, before any data is read", title_justify="left")
    for heading, justify in (("quantity", "left"), ("symbol", "left"), ("value", "right"), ("formula", "left")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    table.add_column("paper")
    for row in plan.rows:
        table.add_row(row.name, row.symbol, _number(row.value), row.formula, row.paper)
    return Group(table, guarantee_card(plan.guarantee))


def certificate_table(summary: CertificateSummary) -> RenderableType:
    """Certified accuracy on clean test inputs, a column for each kind of certificate."""
    unit = summary.kinds[0]
    draws = f"n = {CertificationConfig.from_dict(summary.settings).noise_draws}, " if unit.function == "vote" else ""
    table = Table(
        title=f"certified accuracy, clean inputs, {unit.norm} over {unit.input_range}, "
        f"{draws}{summary.rows} test examples",
        title_justify="left",
    )
    table.add_column("radius", justify="right")
    for kind in summary.kinds:
        table.add_column(f"{kind.name} radius\n{kind.status}: {kind.source}", justify="right")
    shares = [summary.certified_accuracy[kind.name] for kind in summary.kinds]
    for row in zip(*shares, strict=True):
        table.add_row(f"{row[0].radius:g}", *[str(share) for share in row])
    table.add_row("largest radius, any label", *[f"{summary.largest_radius[kind.name]:.4f}" for kind in summary.kinds])
    verified = summary.verified_accuracy
    deployed = "verified inference" if unit.function == "vote" else "the network itself"
    said = [
        f"{deployed}: {verified.correct_without_abstaining} correct, "
        f"{verified.abstained} abstained; {'; '.join(map(_reliability, summary.kinds))}"
    ]
    if chosen := summary.chosen:
        means = ", ".join(f"{name} {mean:.4f}" for name, mean in chosen.mean_radius.items())
        said.append(f"certificate: {chosen.certificate}, the larger mean radius on {chosen.compared_on} ({means})")
    return Group(table, *map(Text, said))


def _reliability(kind: Kind) -> str:
    """How often a certificate of this kind may be wrong, in words."""
    if kind.failure_probability is None:
        return f"the {kind.name} rule states no probability of failure"
    if kind.failure_probability == 0:
        return f"a certificate by {kind.name} does not fail by chance"
    return f"each {kind.name} certificate fails with probability at most {kind.failure_probability:g}"


def attack_table(under: ProtocolTable) -> RenderableType:
    """Accuracy under each attack of one protocol on one function, and under the worst of them."""
    first = under.accuracy[0]
    table = Table(
        title=f"accuracy under attack, {first.norm} over {first.input_range}, {under.protocol.name} "
        f"protocol, {_spoken(under.function)}, {under.rows} test examples",
        title_justify="left",
    )
    table.add_column("radius", justify="right")
    names = [*under.attacks, WORST]
    for name in names:
        table.add_column("worst of them" if name == WORST else name, justify="right")
    table.add_row("clean", *[str(under.clean_accuracy)] * len(names))
    for radius, scores in _by_radius(under.accuracy).items():
        table.add_row(f"{radius:g}", *[str(scores[name]) for name in names])
    return Group(table, Text(f"protocol: {under.protocol.meaning}; 95% intervals over test examples"))


def score_table(scores: Scores) -> RenderableType:
    """The worst case under every protocol and what is certified, of the same images side by side; and the flags."""
    statuses = {kind.name: kind.status for kind in (scores.certificates.kinds if scores.certificates else ())}
    parts: list[RenderableType] = [_function_table(scores, block, statuses) for block in scores.same_images]
    meanings = {under.protocol.name: under.protocol.meaning for under in scores.under_attack}
    parts += [Text(f"{name}: {meaning}") for name, meaning in meanings.items()]
    parts.append(Text(f"accuracies assume: {scores.test_records or NOT_LOOKED_FOR}"))
    return Group(*parts, flag_panel(scores.flags))


def _function_table(scores: Scores, block: SameImages, statuses: Mapping[str, Status]) -> Table:
    table = Table(
        title=f"accuracy under the worst attack, {scores.norm} over {scores.input_range}, "
        f"{_spoken(block.function)}, the same {block.rows} test examples in every column",
        title_justify="left",
    )
    table.add_column("radius", justify="right")
    for protocol in block.attacked:
        table.add_column(f"{protocol} protocol", justify="right")
    table.add_column("gap, points", justify="right")
    for kind in block.certified:
        table.add_column(f"certified by {kind}\n{statuses[kind]}", justify="right")
    clean = [str(block.clean_accuracy)] * len(block.attacked)
    table.add_row("clean", *clean, "", *[""] * len(block.certified))
    gaps = {gap.radius: gap.gap for gap in block.gaps}
    for rows in zip(*block.attacked.values(), *block.certified.values(), strict=True):
        shares, gap = [str(row) for row in rows], gaps.get(rows[0].radius)
        shown = f"{100 * gap.value:.1f} [{100 * gap.low:.1f}, {100 * gap.high:.1f}]" if gap else ""
        split = len(block.attacked)
        table.add_row(f"{rows[0].radius:g}", *shares[:split], shown, *shares[split:])
    return table


def flag_panel(flags: Sequence[SanityFlag]) -> RenderableType:
    """What makes these numbers doubtful, with what to do about it."""
    if not flags:
        return Text("sanity flags: none raised")
    lines = []
    for flag in flags:
        lines.append(Text(f"{flag.level.upper()}: {flag.name}. {flag.evidence}", style="bold red"))
        lines.append(Text(f"  raised if {flag.raised_if}. {flag.explanation} {flag.remedy}"))
    return Panel(Group(*lines), title="sanity flags", border_style="red")


def _by_radius(rows: Sequence[AttackedShare]) -> dict[float, dict[str, AttackedShare]]:
    found: dict[float, dict[str, AttackedShare]] = {}
    for row in rows:
        found.setdefault(row.radius, {})[row.attack] = row
    return found


def _spoken(function: str) -> str:
    return {"single_pass": "one pass", "vote": "the vote of verified inference"}[function]


def show(*parts: RenderableType) -> None:
    """Print to standard output, without colours where nobody looks."""
    console = Console(highlight=False)
    for part in parts:
        console.print(part)


_OUTCOME_STYLES = {"agrees": "green", "differs": "bold red", "not checked": "yellow"}


def verified_page(document: Verification) -> RenderableType:
    """A line for each check, then what no file can show, then the verdict."""
    width = max(len(outcome) for outcome in _OUTCOME_STYLES)
    lines = [Text(f"verify {document.run}", style="bold")]
    for check in document.checks:
        about = f"{check.name}, {check.file}" if check.file else check.name
        outcome = Text(check.outcome.ljust(width), style=_OUTCOME_STYLES[check.outcome])
        lines.append(Text.assemble("  ", outcome, f"  {about}: {check.detail}"))
    lines.append(Text("No file can show", style="bold"))
    lines += [Text(f"  {line}") for line in document.cannot_be_checked]
    return Group(*lines, _verification_verdict(document))


def _verification_verdict(document: Verification) -> Text:
    differing = len(document.differing)
    if differing:
        return Text(f"DIFFERS in {differing} of {len(document.checks)} checks: do not rely on it.", style="bold red")
    skipped = sum(check.outcome is Outcome.NOT_CHECKED for check in document.checks)
    return Text(f"Everything that was checked agrees; {skipped} things were not checked.", style="bold green")


_STATE_STYLES = {"ok": "green", "warning": "yellow", "missing": "dim", "not here": "dim", "broken": "bold red"}


def health_table(document: HealthReport) -> RenderableType:
    """A line for each check; below it a remedy for each one that has something to mend, broken ones last."""
    table = Table(title=f"this machine, in {document.seconds:.0f} s", title_justify="left")
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
        said = "Everything that training needs works." if document.complete else "What was checked works."
        return Text(said, style="bold green")
    return Text(f"Training needs what is broken: {', '.join(broken)}.", style="bold red")


_PARTY_HEADINGS = ("records", "sampling rate", "noise multiplier", "rounds", "at most", "ε", "δ")


def party_table(federation: FederationAccount | FederatedTraining) -> RenderableType:
    """The table behind a federation's guarantee, and the guarantee."""
    guarantee = federation.guarantee
    table = Table(
        title=f"parties; every ε is {STATUS_WORDS[guarantee.status]}, for that party's records", title_justify="left"
    )
    table.add_column("party")
    for heading in _PARTY_HEADINGS:
        table.add_column(heading, justify="right")
    for party in federation.parties:
        table.add_row(
            party.name,
            f"{party.records:,}",
            f"{party.sampling_rate:.4g}",
            f"{party.noise_multiplier:.4g}",
            f"{party.rounds:,}",
            f"{party.most_rounds:,}",
            f"{party.epsilon:g}",
            f"{party.delta:g}",
        )
    return Group(table, guarantee_card(guarantee))
