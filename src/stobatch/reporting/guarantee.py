"""A guarantee in words: how much, who says so, and what that is worth."""

from __future__ import annotations

from dataclasses import dataclass

from stobatch.dp.guarantee import PUBLIC_SEED, PrivacyGuarantee
from stobatch.types import Status

PUBLIC_SEED_MEANS = (
    "The seed is written in config.json: whoever has it can rebuild the noise and take it off. This is an experiment; "
    "for a release, train without --seed."
)
STATUS_MEANINGS = {
    "claimed": "Its source says so. Nobody has proved it here, and it must not be relied on as a guarantee.",
    "proved": "A proof stands behind this, under the assumptions listed.",
    "refuted": "An audit or a counterexample shows that this does not hold.",
    "void": PUBLIC_SEED_MEANS,
    "none": "This method promises nothing about its training data.",
}


@dataclass(frozen=True)
class Note:
    """A line beside the matter, and the command that does something about it."""

    text: str
    command: str = ""


@dataclass(frozen=True)
class GuaranteeCard:
    """A guarantee as a page shows it; never without its status."""

    eyebrow: str
    status: str
    line: str
    meaning: str
    about: str
    lists: tuple[tuple[str, tuple[str, ...]], ...]
    notes: tuple[Note, ...]


def card_of(guarantee: PrivacyGuarantee, eyebrow: str, *notes: Note) -> GuaranteeCard:
    lists = {"Audits": guarantee.audits, "Against it": guarantee.objections, "It assumes": guarantee.assumptions}
    about = f"{guarantee.neighbours} neighbours, per {guarantee.unit}; source: {guarantee.source}."
    return GuaranteeCard(
        eyebrow,
        guarantee.status,
        guarantee_line(guarantee),
        STATUS_MEANINGS[guarantee.status],
        f"Source: {guarantee.source}." if guarantee.status is Status.NONE else about,
        tuple((title, lines) for title, lines in lists.items() if lines),
        notes,
    )


def guarantee_line(guarantee: PrivacyGuarantee) -> str:
    """The budget with its status in front, so that neither can be read without the other."""
    if guarantee.status is Status.NONE:
        return "NO PRIVACY GUARANTEE"
    budget = f"ε = {guarantee.epsilon:g}" + (f", δ = {guarantee.delta:g}" if guarantee.delta else "")
    if guarantee.status is Status.VOID:
        return f"VOID: {PUBLIC_SEED} ({budget} would be {guarantee.secret_seed_status} with secret seeds)"
    words = {Status.CLAIMED: "CLAIMED, NOT PROVED", Status.PROVED: "proved", Status.REFUTED: "REFUTED"}
    return f"{words[guarantee.status]}: {budget}"
