"""Sanity flags: the signs that an evaluation may flatter its model, and which of them were looked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stobatch.reporting.summary import Facts
from stobatch.results import SanityFlag


def _probed(facts: Facts) -> bool:
    return facts.entry("adaptive", "single_pass") is not None


def _single_and_iterated(facts: Facts) -> bool:
    return any({"fgsm", "ifgsm"} <= set(entry.attacks) for entry in facts.scores.under_attack)


def _both_protocols(facts: Facts) -> bool:
    return any(facts.entry("published", f) and facts.entry("adaptive", f) for f in facts.functions)


def _adaptive(facts: Facts) -> bool:
    return "adaptive" in facts.protocols


def _certified(facts: Facts) -> bool:
    return any(facts.kinds(function) for function in facts.functions)


def _has_certificates(facts: Facts) -> bool:
    return bool(facts.all_kinds) and _adaptive(facts)


def _always(facts: Facts) -> bool:
    return True


CHECKS: dict[str, tuple[Callable[[Facts], bool], str]] = {
    "more steps do not help": (_probed, "the adaptive protocol on the single pass"),
    "attack has not converged": (_probed, "the adaptive protocol on the single pass"),
    "the widest ball does not reach chance": (_probed, "the adaptive protocol on the single pass"),
    "single-step beats iterative": (_single_and_iterated, "the attacks fgsm and ifgsm"),
    "transfer beats white-box": (_both_protocols, "both protocols on one function"),
    "zero gradients": (_adaptive, "the adaptive protocol"),
    "a certified input was broken inside its radius": (_certified, "certificates for an attacked function, same units"),
    "more is certified than survives": (_certified, "certificates for an attacked function, same units"),
    "units of radius differ": (_has_certificates, "certificates and the adaptive protocol"),
    "inputs look like [0, 1]": (_always, ""),
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
