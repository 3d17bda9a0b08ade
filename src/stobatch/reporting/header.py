"""The top of a run's report: who it is, what is guaranteed, the number that matters most, and what looks too good."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stobatch.reporting.format import interval, percent, points, title_of
from stobatch.reporting.guarantee import GuaranteeCard, card_of, guarantee_line
from stobatch.reporting.page import Note
from stobatch.reporting.summary import Facts
from stobatch.results import Difference, SanityFlag, Share, at_radius


@dataclass(frozen=True)
class Lead:
    """One sentence, the news of it in bold."""

    start: str
    news: str
    end: str = ""


@dataclass(frozen=True)
class Tile:
    """A number that is large enough to be seen from afar."""

    kind: str
    title: str
    number: str
    note: str


@dataclass(frozen=True)
class Header:
    """What stands above everything else."""

    identity: str
    training_hash: str
    lead: Lead
    tiles: tuple[Tile, ...]
    guarantee: GuaranteeCard


def opening(facts: Facts) -> Header:
    seed = "secret" if facts.seed is None else facts.seed
    identity = f"method {facts.method} · data {facts.started.data} · seed {seed} · configuration"
    return Header(identity, facts.scores.training_hash, headline(facts), tuple(tiles(facts)), guarantee_card(facts))


def guarantee_card(facts: Facts) -> GuaranteeCard:
    """Return what is guaranteed about the training data, by whom, and what speaks against it, with its status."""
    notes = [] if facts.guarantee.audits else [_not_audited(facts)]
    notes.append(Note(f"Accuracies assume: {facts.test_records}."))
    return card_of(facts.guarantee, "Privacy towards the training data", *notes)


def _not_audited(facts: Facts) -> Note:
    """Return how to audit; RUN stands for the directory, which a page that is mailed should not name."""
    if facts.findings:
        instrument = "membership" if facts.status == "none" else "many_runs"
        note = "Only certificates were audited so far, not this. To do so:"
        return Note(note, f"stobatch audit RUN --instrument {instrument}")
    return Note("Nothing was audited yet. To do so:", "stobatch audit RUN")


def headline(facts: Facts) -> Lead:
    """Return one sentence: what the published protocol shows, what an adaptive attacker leaves, and the gap."""
    function, radius = facts.main_function, facts.main_radius
    shares = {p: at_radius(facts.worst(p, function), radius) for p in facts.protocols}
    setting = f"At radius {radius:g} ({facts.unit}) on the {title_of(function)}, "
    published, adaptive, gap = shares.get("published"), shares.get("adaptive"), facts.gap(function, radius)
    if published and adaptive and gap:
        measured = (
            f"the model is right on {percent(published)} of {published.total} test images when attacked as "
            f"published, and on {percent(adaptive)} when attacked the way an adversary would: "
        )
        return Lead(setting + measured, _gap_words(gap.gap))
    protocol, share = next((p, s) for p, s in shares.items() if s)
    proved = facts.proved(function, radius)
    if protocol == "adaptive" and proved:
        left = f"attacks leave the model right on {percent(share)} of {share.total} test images. "
        promise = f"On {percent(proved)} of {proved.total} it is right and proved to stay so, whatever the attack."
        return Lead(setting + left, promise)
    missing = "adaptive" if protocol == "published" else "published"
    only = f"the model is right on {percent(share)} of {share.total} test images under the {protocol} protocol. "
    return Lead(setting + only, f"The {missing} protocol was not run, so the gap between them is unknown.")


def _gap_words(gap: Difference) -> str:
    certain = f"(95% interval {100 * gap.low:.1f} to {100 * gap.high:.1f})"
    if gap.low > 0:
        return f"the published test flatters the model by {points(gap.value)} {certain}."
    if gap.high < 0:
        return (
            f"the published attacks do better by {points(-gap.value)} (95% interval {-100 * gap.high:.1f} to "
            f"{-100 * gap.low:.1f}), so the adaptive ones are too weak to rely on."
        )
    return f"a gap of {points(gap.value)} {certain}, which may be chance."


def tiles(facts: Facts) -> list[Tile]:
    function, radius = facts.main_function, facts.main_radius
    tiles = [_tile("clean", "clean accuracy", facts.clean(function), "test images")]
    for protocol in facts.protocols:
        share = at_radius(facts.worst(protocol, function), radius)
        if share:
            tiles.append(_tile(protocol, f"{protocol} protocol", share, f"test images, radius {radius:g}"))
    proved = facts.proved(function, radius)
    if proved:
        tiles.append(_tile("proved", "proved to stay right", proved, f"test images, radius {radius:g}"))
    gap = facts.gap(function, radius)
    if gap:
        note = f"95% interval {interval(gap.gap)}, radius {radius:g}"
        tiles.append(Tile("gap", "gap between them", points(gap.gap.value), note))
    return tiles


def _tile(kind: str, title: str, share: Share, of_what: str) -> Tile:
    return Tile(kind, title, percent(share), f"95% interval {interval(share)}, {share.total} {of_what}")


def one_line(facts: Facts) -> str:
    """Return a run in one line, to fold its section under."""
    function = facts.main_function
    gap = facts.gap(function, facts.main_radius)
    parts = [facts.name, guarantee_line(facts.guarantee), f"clean {percent(facts.clean(function))}"]
    parts += [f"gap {points(gap.gap.value)} at radius {gap.radius:g}"] if gap else []
    return " · ".join(parts)


Check = tuple[Callable[[Facts], bool], str]
_PROBED: Check = (
    lambda facts: facts.entry("adaptive", "single_pass") is not None,
    "the adaptive protocol on the single pass",
)
_CERTIFIED: Check = (
    lambda facts: any(map(facts.kinds, facts.functions)),
    "certificates for an attacked function, same units",
)
CHECKS: dict[str, Check] = {
    "more steps do not help": _PROBED,
    "attack has not converged": _PROBED,
    "the widest ball does not reach chance": _PROBED,
    "single-step beats iterative": (
        lambda facts: any({"fgsm", "ifgsm"} <= set(entry.attacks) for entry in facts.scores.under_attack),
        "the attacks fgsm and ifgsm",
    ),
    "transfer beats white-box": (
        lambda facts: any(facts.entry("published", f) and facts.entry("adaptive", f) for f in facts.functions),
        "both protocols on one function",
    ),
    "zero gradients": (lambda facts: "adaptive" in facts.protocols, "the adaptive protocol"),
    "a certified input was broken inside its radius": _CERTIFIED,
    "more is certified than survives": _CERTIFIED,
    "units of radius differ": (
        lambda facts: bool(facts.all_kinds) and "adaptive" in facts.protocols,
        "certificates and the adaptive protocol",
    ),
    "inputs look like [0, 1]": (lambda _: True, ""),
}
"""Each flag of stobatch.evaluation.sanity (which needs torch), whether a run could raise it, and what it takes."""


@dataclass(frozen=True)
class FlagCard:
    """A flag that was raised, with everything it says."""

    level: str
    title: str
    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Flags:
    """What was raised, what was looked for and not found, and what could not be looked for."""

    raised: tuple[FlagCard, ...]
    quiet: str
    left_out: str


def raised_flags(facts: Facts) -> Flags:
    flags = sorted(facts.scores.flags, key=lambda flag: flag.level != "error")
    names = {flag.name for flag in flags}
    quiet = [name for name, (possible, _) in CHECKS.items() if possible(facts) and name not in names]
    left_out = [
        f"{name} (needs {needs})"
        for name, (possible, needs) in CHECKS.items()
        if not possible(facts) and name not in names
    ]
    start = "Checked and not raised: " if flags else "No flag was raised. Checked: "
    return Flags(
        tuple(map(_card, flags)),
        f"{start}{'; '.join(quiet)}.",
        f"Not checked in this evaluation: {'; '.join(left_out)}." if left_out else "",
    )


def _card(flag: SanityFlag) -> FlagCard:
    pairs = (
        ("evidence", flag.evidence),
        ("raised if", flag.raised_if),
        ("what it means", flag.explanation),
        ("what to do", flag.remedy),
    )
    return FlagCard(flag.level, f"{flag.level}: {flag.name}", pairs)
