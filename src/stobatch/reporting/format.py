"""Numbers with their units and statuses with their words, the same ones in every part of the report."""

from __future__ import annotations

from collections.abc import Iterable

from stobatch.results import Difference, Rate, Scores, Share, TTest

Measured = Share | Difference | Rate
"""A number with its interval."""

STATUS_WORDS = {
    "claimed": "claimed, not proved",
    "proved": "proved",
    "refuted": "refuted",
    "none": "no privacy guarantee",
    "void": "void: public seed",
}
STATUS_STYLES = {
    "none": "red",
    "claimed": "yellow",
    "proved": "green",
    "refuted": "red",
    "void": "yellow",
    "consistent": "",
    "not tested": "yellow",
    "partly tested": "yellow",
}
"""In a terminal, of statuses and verdicts; no colour for what proves nothing."""
_ABOUT_NOISE = ", in expectation over its fresh noise"
"""What the adaptive protocol says of itself, and means nothing of a network without noise."""
_NORMS = {"linf": "l∞", "l2": "l2", "l1": "l1"}


def status_words(status: str) -> str:
    """Return a status or a verdict in words; the same ones on every page and in every terminal."""
    return STATUS_WORDS.get(status, status)


def percent(share: Measured) -> str:
    return f"{100 * share.value:.1f}%"


def interval(share: Measured | TTest) -> str:
    return f"[{100 * share.low:.1f}, {100 * share.high:.1f}]"


def points(difference: float) -> str:
    return f"{100 * difference:.1f} points"


def unit(norm: str, input_range: str) -> str:
    return f"{_NORMS.get(norm, norm)} over {input_range}"


def title_of(function: str) -> str:
    return function.replace("_", " ")


def protocol_meanings(scores: Scores) -> dict[str, str]:
    """Return what each protocol does; nothing about noise where there is none."""
    gone = _ABOUT_NOISE if scores.has_noise is False else ""
    return {under.protocol.name: under.protocol.meaning.replace(gone, "") for under in scores.under_attack}


def privacy_words(statuses: Iterable[str]) -> str:
    """Return who vouches for the privacy of a method; more than one status where audits told its seeds apart."""
    return " / ".join(dict.fromkeys("no privacy" if s == "none" else STATUS_WORDS[s] for s in statuses))


def number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) or float(value).is_integer() else f"{value:.5g}"
