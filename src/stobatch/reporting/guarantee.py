"""A guarantee in words: how much, who says so, and what that is worth."""

from __future__ import annotations

from dataclasses import dataclass

from stobatch.dp.guarantee import PUBLIC_SEED, PrivacyGuarantee
from stobatch.reporting.page import Note
from stobatch.types import Status, Verdict

PUBLIC_SEED_MEANS = (
    "The seed is written in config.json: whoever has it can rebuild the noise and take it off. This is an experiment; "
    "for a release, train without --seed."
)
STATUS_MEANINGS = {
    "claimed": "Its source says so. Nobody has proved it here, and it must not be relied on as a guarantee.",
    "proved": "A proof stands behind this, under its assumptions.",
    "refuted": "An audit or a counterexample shows that this does not hold.",
    "void": PUBLIC_SEED_MEANS,
    "none": "This method promises nothing about its training data.",
}


@dataclass(frozen=True)
class GuaranteeCard:
    """A guarantee as a page shows it: two lines, what speaks against it, and the rest under a fold."""

    eyebrow: str
    status: str
    line: str
    meaning: str
    against: tuple[str, ...]
    in_full: str
    """The line of the fold: how much there is to read."""
    about: str
    lists: tuple[tuple[str, tuple[str, ...]], ...]
    notes: tuple[Note, ...]


def card_of(guarantee: PrivacyGuarantee, eyebrow: str, *notes: Note) -> GuaranteeCard:
    lists = {
        "Audits": guarantee.audits,
        "Against it": guarantee.objections,
        "It starts from": start_lines(guarantee),
        "It assumes": guarantee.assumptions,
    }
    return GuaranteeCard(
        eyebrow,
        guarantee.status,
        guarantee_line(guarantee),
        STATUS_MEANINGS[guarantee.status],
        against(guarantee),
        f"In full: {extent(guarantee)}",
        about(guarantee),
        tuple((title, lines) for title, lines in lists.items() if lines),
        notes,
    )


def against(guarantee: PrivacyGuarantee) -> tuple[str, ...]:
    """Return what speaks against it, in short: the first objection, and the first audit that refuted it."""
    refuting = [line for line in guarantee.audits if line.startswith(Verdict.REFUTED)]
    return tuple(
        f"{word}{lines[0]}{f' (and {len(lines) - 1} more)' if len(lines) > 1 else ''}"
        for word, lines in (("against it: ", guarantee.objections), ("audit, ", refuting))
        if lines
    )


def extent(guarantee: PrivacyGuarantee) -> str:
    """Return how much a guarantee assumes, and how much was said about it.

    >>> extent(PrivacyGuarantee.none("plain training"))
    '0 assumptions, 0 objections, 0 audits'
    """
    counts = {
        "assumption": guarantee.assumptions,
        "objection": guarantee.objections,
        "audit": guarantee.audits,
    }
    return ", ".join(f"{len(lines)} {word}{'' if len(lines) == 1 else 's'}" for word, lines in counts.items())


def prior_lines(guarantee: PrivacyGuarantee) -> tuple[str, ...]:
    """Return what training started from: what was read to make it, what may be in it, and what it promises."""
    prior = guarantee.prior
    if prior is None:
        return ()
    seen = ", ".join(prior.may_contain) or "none that its card names"
    return (
        f"prior: {prior.name}, weights {prior.weights_sha256}",
        *(f"prior, made from {line}" for line in prior.read),
        f"prior, data sets whose records it may have seen: {seen}",
        *([f"prior, MAY CONTAIN THE PRIVATE RECORDS: {prior.conflict}"] if prior.conflict else []),
        *([f"prior, TUNED ON THE PRIVATE DATA: {prior.tuned}"] if prior.tuned else []),
        *([f"prior, towards the records that it was trained on: {prior.promise}"] if prior.promise else []),
        *(["prior, last layer: not taken, drawn afresh"] if prior.new_head else []),
    )


def start_lines(guarantee: PrivacyGuarantee) -> tuple[str, ...]:
    """Return the lines of `prior_lines` without the word that a heading says already."""
    return tuple(line.removeprefix("prior").lstrip(":, ") for line in prior_lines(guarantee))


def about(guarantee: PrivacyGuarantee) -> str:
    """Return whom it is for, and who says so."""
    if guarantee.status is Status.NONE:
        return f"Source: {guarantee.source}."
    return f"{guarantee.neighbours} neighbours, per {guarantee.unit}; source: {guarantee.source}."


def guarantee_line(guarantee: PrivacyGuarantee) -> str:
    """Return the budget with its status in front, so that neither can be read without the other."""
    if guarantee.status is Status.NONE:
        return "NO PRIVACY GUARANTEE"
    budget = f"ε = {guarantee.epsilon:g}" + (f", δ = {guarantee.delta:g}" if guarantee.delta else "")
    if guarantee.status is Status.VOID:
        return f"VOID: {PUBLIC_SEED} ({budget} would be {guarantee.secret_seed_status} with secret seeds)"
    words = {Status.CLAIMED: "CLAIMED, NOT PROVED", Status.PROVED: "proved", Status.REFUTED: "REFUTED"}
    return f"{words[guarantee.status]}: {budget}"
