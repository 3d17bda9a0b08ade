"""What `budget` says of a book: trainings, what records or persons have spent, and what a planned one would add."""

from __future__ import annotations

from stobatch.results.document import Count, Document, Flag, Part, Size, Text


class BookedRun(Part):
    """One training, or one search, as a book has it."""

    number: Count
    date: Text
    run: Text
    method: Text
    data: Text
    settled: Flag
    """Whether it has ended; one that has not, or was killed, counts as planned."""
    proved_epsilon: Size | None
    """By itself, at the δ of the book; None where nothing is proved."""
    unbounded: Text | None
    """Why nothing is proved."""


class SpentShare(Part):
    """Records, or persons with all of theirs, that the same trainings have read."""

    count: Count
    word: Text
    """What is counted: records or persons."""
    runs: tuple[Count, ...]
    records: tuple[Count, ...]
    """For each of the runs: how many records of one it took for records of different owners, at most."""
    proved_epsilon: Size | None


class PlannedSpending(Part):
    """What a training would spend that has not begun."""

    method: Text
    proved_epsilon: Size | None
    proved_epsilon_after: Size | None
    """Of the records that would have spent most."""
    within_limit: Flag
    basis: Text
    """Which records are meant."""


class Budget(Document):
    """What a book says; for the owner of the records alone."""

    book: Text
    delta: Size
    limit: Size | None
    limit_delta: Size | None = None
    """The δ that was set, at which the limit holds; null where none was."""
    proved_epsilon: Size | None
    """Of the records that have spent most."""
    runs: tuple[BookedRun, ...]
    spent: tuple[SpentShare, ...]
    planned: PlannedSpending | None = None
    warnings: tuple[Text, ...] = ()
    """What is wrong with the book; left out where nothing is."""

    def lines(self) -> list[str]:
        lines = [f"{len(self.runs)} trainings at δ = {self.delta:g}, {epsilon_words(self.proved_epsilon)} in all"]
        lines += [f"{share.count} {share.word}: {epsilon_words(share.proved_epsilon)}" for share in self.spent]
        if self.planned is not None:
            lines.append(f"with the planned one: {epsilon_words(self.planned.proved_epsilon_after)}")
        return [*lines, *self.warnings]


def epsilon_words(epsilon: float | None) -> str:
    """Return a composed ε with its status.

    >>> epsilon_words(1.23456), epsilon_words(None)
    ('proved ε = 1.2346', 'no proved ε')
    """
    return "no proved ε" if epsilon is None else f"proved ε = {epsilon:.5g}"
