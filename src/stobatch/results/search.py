"""What `tune` leaves for others: search.json, and for the owner alone the table of all candidates."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from stobatch.results.document import Count, Document, Flag, Guarantee, NotNull, Number, Part, Settings, Text


class Winner(Part):
    """The candidate that a search has chosen: all that it releases."""

    run: Text
    """The run directory, next to the file."""
    settings: Settings
    """What it drew of the settings that were searched."""
    noisy_score: Number
    """Held-out records that count for it, with noise."""
    held_out: Count
    test_accuracy: Number | None


class Search(Document):
    """search.json: the settings of a search, what it guarantees, and its winner once there is one."""

    kind: ClassVar[str] = "search"

    training_hash: Text
    config: Settings
    one_candidate: Annotated[Text | None, NotNull] = None
    """What `search.candidate_epsilon` of the settings is: a budget with its status, and not that of what is released.

    Left out by older versions.
    """
    guarantee_of: Annotated[Text | None, NotNull] = None
    """Whose numbers the assumptions of the guarantee name: the winner's, or a candidate's before there is a winner.

    Older versions left it out, and had a candidate's always.
    """
    guarantee: Guarantee
    finished: Flag
    winner: Winner | None
    """None before the end, and where no candidate was drawn or none was left."""

    def lines(self) -> list[str]:
        lines = [str(self.guarantee)]
        if self.winner is not None:
            drawn = ", ".join(f"{key}={value}" for key, value in self.winner.settings.items())
            unit = "persons" if self.guarantee.unit.startswith("person") else "records"
            score = f"{self.winner.noisy_score:.1f} of {self.winner.held_out} held-out {unit}, with noise"
            lines += [f"winner: {self.winner.run}", f"settings: {drawn}", f"score: {score}"]
        elif self.finished:
            lines.append("no winner: no candidate was drawn, or none was left")
        return lines


class CandidateRow(Part):
    """One candidate, for the owner alone."""

    number: Count
    settings: dict[Text, Any]
    noisy_score: Number | None
    failure: Text
    won: Flag


class Candidates(Document):
    """candidates.json in the private folder: every candidate of a search. To publish it costs more than ε says."""

    kind: ClassVar[str] = "candidates"

    held_out: Count
    rows: tuple[CandidateRow, ...]

    def lines(self) -> list[str]:
        return [f"{len(self.rows)} candidates; for the owner alone"]
