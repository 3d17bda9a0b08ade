"""`budget`: what a book says was spent, and what a planned training would add."""

from __future__ import annotations

from collections.abc import Iterator
from math import isinf
from pathlib import Path

from stobatch.book import Book, Booking, Reading, Share
from stobatch.config import RunConfig
from stobatch.data import Dataset
from stobatch.dp.accounting import check_delta
from stobatch.dp.composition import Unbounded, compose_epsilon
from stobatch.dp.plan import DpSgdPlan
from stobatch.results import BookedRun, Budget, PlannedSpending, SpentShare
from stobatch.runs import Run
from stobatch.training_run import plan


def budget(
    book: str | Path, config: RunConfig | None = None, *, dataset: Dataset | None = None, delta: float | None = None
) -> Budget:
    """Say what the trainings in a book have spent together, and what the training of `config` would add.

    No data are read: a planned training is taken to read the records of the latest one with the same settings of data,
    or those of `dataset` where it is handed over; and nothing is written. `delta` is the book's own unless given.
    """
    opened = Book.open(book)
    at = opened.delta if delta is None else delta
    if delta is None:
        check_delta(at)
    else:
        opened.require_delta(at)
    shares = opened.shares(delta=at)
    planned = _plan_spending(opened, config, dataset, at) if config is not None else None
    runs = tuple(
        BookedRun(
            number=entry.number,
            date=entry.date,
            run=entry.run,
            method=entry.method,
            data=entry.data,
            settled=entry.settled,
            proved_epsilon=_finite_or_none(compose_epsilon([entry.cost], at)),
            unbounded=entry.cost.why if isinstance(entry.cost, Unbounded) else None,
        )
        for entry in opened.entries.values()
    )
    warnings = tuple(_warnings(opened, at))
    return Budget(
        book=str(opened.path),
        delta=at,
        limit=opened.limit.epsilon if opened.limit else None,
        limit_delta=opened.limit.delta if opened.limit else None,
        proved_epsilon=_finite_or_none(shares[0].epsilon if shares else 0.0),
        runs=runs,
        spent=tuple(_describe_share(share) for share in shares),
        planned=planned,
        **({"warnings": warnings} if warnings else {}),
    )


def _warnings(book: Book, delta: float) -> Iterator[str]:
    """Yield what is wrong with a book, or with what is asked of it."""
    if book.torn:
        yield f"{book.torn_line}."
    if weakness := book.weak_delta(delta):
        yield f"An ε at this δ promises nothing of some records: {weakness}. Give --delta, with --limit to keep it."
    elif book.limit and book.limit.epsilon is not None and (weakness := book.weak_delta(book.delta)):
        yield f"The limit promises nothing of some records: {weakness}. Set it again: --limit with --delta."


def _plan_spending(book: Book, config: RunConfig, dataset: Dataset | None, delta: float) -> PlannedSpending:
    the_plan = plan(config, dataset=dataset)
    machine = config.machine.replace(book=str(book.path))
    booking = Booking.of(config.replace(machine=machine), the_plan, Run(Path("planned")))
    assert booking is not None
    newcomer = booking.newcomer
    records: Reading | None
    if dataset is not None:
        records, basis = book.reading(dataset.train), "the records handed over"
    else:
        records = book.known_records(newcomer.described)
        basis = "the records of the latest training with the same settings of data"
        if records is None:
            basis = "all records in the book, the worst case: no training with these settings of data is in it"
            if not (isinstance(the_plan, DpSgdPlan) and the_plan.num_persons):
                records = book.everything()
    after = book.shares(records, newcomer.cost, delta)
    most = after[0].epsilon if after else compose_epsilon([newcomer.cost], delta)
    limit = book.limit.epsilon if book.limit else None
    return PlannedSpending(
        method=newcomer.method,
        proved_epsilon=_finite_or_none(compose_epsilon([newcomer.cost], delta)),
        proved_epsilon_after=_finite_or_none(most),
        within_limit=limit is None or most <= limit,
        basis=basis,
    )


def _describe_share(share: Share) -> SpentShare:
    numbers = tuple(entry.number for entry in share.entries)
    return SpentShare(
        count=share.count,
        word=share.word,
        runs=numbers,
        records=share.records,
        proved_epsilon=_finite_or_none(share.epsilon),
    )


def _finite_or_none(epsilon: float) -> float | None:
    return None if isinf(epsilon) else epsilon
