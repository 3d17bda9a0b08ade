"""The budget book: what all trainings on the same records have spent together, and a limit that the owner sets.

A book is a folder for the owner alone. Its pages, `entries.jsonl`, are appended to and never changed: each line carries
a code under the book's key that also covers the line before it, so that a line that was changed, moved or taken out is
noticed (of lines cut off at the end, those that entered records alone). A training is entered before its first step,
with what its plan costs, and settled when it has ended; one that was killed stays as it was planned. Records lie under
another name until their line is written, so that a writer who is killed leaves no records without one. Records are
known by digests under the book's key, one for each: so runs on a part of the data, or on data that share some records,
are composed exactly where they overlap. What a record has spent is the composition of the trainings that read it. Where
a training is about persons, all records of a person are one unit of the book, and it is persons that spend
(docs/budget.md).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from math import inf, isinf
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from stobatch.config import RunConfig
from stobatch.data import sources
from stobatch.data.dataset import TrainingExamples, chunks
from stobatch.dp.accounting import check_delta
from stobatch.dp.composition import Cost, Unbounded, compose_groups, cost_from_dict, cost_to_dict
from stobatch.dp.plan import Plan
from stobatch.errors import BudgetError, RunError, SettingError
from stobatch.files import make_folder, open_private, read_json, write_atomically, write_json
from stobatch.results import epsilon_words
from stobatch.runs import Run, mark
from stobatch.settings import content_hash
from stobatch.types import Status

VARIABLE = "STOBATCH_BOOK"
"""The environment variable that names the book where `machine.book` does not."""
_KEY, _PAGES, _RECORDS, _LOCK = "book", "entries.jsonl", "records", ".lock"
_ENTERED, _PENDING = ".bin", ".pending"
"""How files of records end whose line is written, and those whose line is about to be."""
_LIMIT_LINE = b'{"kind": "limit"'
"""How a line begins that says what each record may spend."""
_KINDS = {False: "run", True: "run about persons"}
"""Lines that enter a training, by whether it is about persons."""

Digests = NDArray[np.uint64]
Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Reading:
    """The records that a training reads, and whose they are where it is about persons."""

    digests: Digests
    """Under a book's key, sorted; each once, unless persons have them."""
    persons: Counts | None = None
    """The person of each, numbered in the order of the digests."""

    @classmethod
    def of(cls, digests: Digests, persons: Counts | None) -> Reading:
        if persons is None:
            return cls(np.unique(digests))
        order = np.lexsort((persons, digests))
        _, first, codes = np.unique(persons[order], return_index=True, return_inverse=True)
        return cls(digests[order], np.argsort(np.argsort(first))[codes])

    def to_bytes(self) -> bytes:
        codes = b"" if self.persons is None else self.persons.astype("<u8").tobytes()
        return self.digests.astype("<u8").tobytes() + codes

    @classmethod
    def from_bytes(cls, content: bytes, *, about_persons: bool) -> Reading:
        words = np.frombuffer(content, dtype="<u8").astype(np.uint64, copy=False)
        if not about_persons:
            return cls(words)
        digests, codes = np.split(words, 2)
        return cls(digests, codes.astype(np.int64))


def count_in_units(readings: Sequence[Reading]) -> Counts:
    """Return how much of each reading, records or persons, every unit of a book has: a row for a unit.

    A unit is a record without a person, or a person with all records. Where readings divide records among persons in
    different ways, persons with a record in common are one unit, and the records of a unit are counted once for each.

    >>> once = np.array([1, 2, 3], np.uint64)
    >>> count_in_units([Reading(once), Reading(once, np.array([0, 0, 1]))]).tolist()
    [[2, 1], [1, 1]]
    """
    known = np.unique(np.concatenate([one.digests for one in readings]))
    divided = {one.to_bytes(): one for one in readings if one.persons is not None}
    rest = np.setdiff1d(known, np.concatenate([known[:0], *(one.digests for one in divided.values())]))
    divisions = [*divided.values(), Reading(rest, np.arange(len(rest)))]
    starts = np.cumsum([0, *(_num_persons(one) for one in divisions)])
    record = np.searchsorted(known, np.concatenate([one.digests for one in divisions]))
    owner = np.concatenate([start + _persons(one) for start, one in zip(starts, divisions, strict=False)])
    unit = np.arange(starts[-1])
    if len(divided) > 1:
        size = starts[-1] + len(known)
        shared = coo_array((np.ones(len(owner)), (owner, starts[-1] + record)), (size, size))
        unit = np.unique(connected_components(shared, directed=False)[1][: starts[-1]], return_inverse=True)[1]
    columns = []
    for one in readings:
        if one.persons is None:
            own = unit[owner[np.isin(known[record], one.digests)]]
        else:
            start = starts[list(divided).index(one.to_bytes())]
            own = unit[start : start + _num_persons(one)]
        columns.append(np.bincount(own, minlength=int(unit.max(initial=-1)) + 1))
    return np.stack(columns, axis=1)


def _persons(reading: Reading) -> Counts:
    assert reading.persons is not None
    return reading.persons


def _weakness(delta: float, count: int, word: str) -> str:
    return f"δ = {delta:g} is not below 1 / {count} = {1 / count:.3g}, and a training read {count} {word}"


def _num_persons(reading: Reading) -> int:
    return int(_persons(reading).max(initial=-1)) + 1


def cost_of(plan: Plan, accounted_steps: int | None = None) -> Cost:
    """Return what a plan costs those whose records are trained on; more steps than planned cost more.

    With a public seed anyone can take the noise off, so it counts as if there were none.
    """
    if plan.public_seeds:
        return Unbounded("its seed is public: what it released is as if it were not private")
    mechanism = plan.mechanism_of(accounted_steps)
    claim = plan.in_context(plan.claim)
    if mechanism is None or claim.status is not Status.PROVED:
        reason = plan.prior.conflict if plan.prior and plan.prior.conflict else claim.source
        return Unbounded(f"nothing is proved of it ({reason})")
    return mechanism


def _text_of(epsilon: float) -> str:
    return epsilon_words(None if isinf(epsilon) else epsilon)


@dataclass(frozen=True)
class PendingTraining:
    """A training, or a search, that asks to be entered."""

    mark: str
    """A name that only this very run has."""
    run: str
    method: str
    data: str
    described: str
    """A digest of the settings that name the data, known before they are read."""
    cost: Cost


@dataclass(frozen=True, kw_only=True)
class Entry(PendingTraining):
    """One training, or one search, in a book."""

    number: int
    date: str
    records: str
    """The name of the set of its records."""
    settled: bool = False
    about_persons: bool = False


@dataclass(frozen=True)
class Share:
    """Units, records or persons, that the same trainings have read, and what they have spent."""

    count: int
    entries: tuple[Entry, ...]
    records: tuple[int, ...]
    """The most records of a unit that each of the trainings took for records of different owners, at least 1."""
    epsilon: float
    newcomers: int = 1
    """The same of a training that is not entered yet."""

    @property
    def word(self) -> str:
        return "persons" if any(entry.about_persons for entry in self.entries) else "records"


@dataclass(frozen=True)
class Limit:
    """What the owner allows each record to spend."""

    epsilon: float | None
    delta: float


@dataclass
class Book:
    """An open book. To check and then enter, hold its lock (`locked`)."""

    path: Path
    key: bytes = field(repr=False)
    entries: dict[str, Entry] = field(default_factory=dict)
    """By mark, in their order."""
    limit: Limit | None = None
    torn: bytes = b""
    """What there is of a last line that has no end."""
    _last: str = ""
    _lines: int = 0

    @classmethod
    def open(cls, path: str | Path, *, make: bool = False) -> Book:
        """Read a book; with `make`, begin one where there is none."""
        folder = _folder(path)
        if not is_book(folder):
            if not make:
                raise BudgetError(
                    f"there is no book at {folder}.", remedy="Train with --set machine.book=FOLDER first."
                )
            _create_folder(folder)
        book = cls(folder, _key(folder))
        book._read()
        return book

    @contextmanager
    def locked(self, *, sets_limit: bool = False) -> Iterator[None]:
        """Wait until no one else writes, read what was written meanwhile, and clear up after a writer who was killed.

        Only to write: who only looks changes nothing, not even a line without an end.
        """
        with _lock_folder(self.path):
            self._read()
            if not sets_limit:
                self.require_limit_known()
            self._finish_entering()
            self._cut_torn_line()
            yield

    @property
    def torn_line(self) -> str:
        """Return what to say of a last line without an end; nothing where there is none."""
        if not self.torn:
            return ""
        limit = ". It set a limit: set it again" if self.torn.startswith(_LIMIT_LINE) else ""
        return (
            f"line {self._lines + 1} of {self.path / _PAGES} has no end and does not count: its writer was killed, "
            f"or the file was cut off{limit}"
        )

    def require_limit_known(self) -> None:
        """Raise where the line without an end set a limit: which one is not known."""
        if self.torn.startswith(_LIMIT_LINE):
            raise BudgetError(
                f"line {self._lines + 1} of {self.path / _PAGES} has no end.",
                why="It set a limit, which cannot be read.",
                remedy=f"Set it again: `stobatch budget --book {shlex.quote(str(self.path))} --limit EPSILON`, or "
                "restore the book from a copy.",
            )

    def _cut_torn_line(self) -> None:
        """Remove the beginning of a line whose writer was killed: what it was about had not begun."""
        pages = self.path / _PAGES
        if self.torn:
            print(f"stobatch: {self.torn_line}. It was removed.", file=sys.stderr)
            whole = pages.read_bytes().removesuffix(self.torn)
            write_atomically(pages, lambda out: out.write(whole), private=True)
            self._read()

    def _finish_entering(self) -> None:
        """Give records their name where a writer was killed after their line, and remove those that have none."""
        names = {entry.records for entry in self.entries.values()}
        for path in (self.path / _RECORDS).glob(f"*{_PENDING}"):
            if path.stem in names:
                path.replace(path.with_suffix(_ENTERED))
            else:
                path.unlink()

    def _read(self) -> None:
        # Before the lines: whoever writes meanwhile writes the line first.
        entered = sorted(path.stem for path in (self.path / _RECORDS).glob(f"*{_ENTERED}"))
        self._read_lines()
        lost = sorted(set(entered) - {entry.records for entry in self.entries.values()})
        if lost:
            place = self.path / _RECORDS / f"{lost[0]}{_ENTERED}"
            more = f", nor have {len(lost) - 1} others like it" if len(lost) > 1 else ""
            raise BudgetError(
                f"no line of {self.path / _PAGES} is about {place}{more}.",
                why="Trainings that read these records were entered, and their lines were cut off: what was spent, and "
                "a limit, may be lost.",
                remedy="Restore the book from a copy. (An older version that was killed as it entered its training may "
                f"have left such a file, too: if that is what it is, remove {place.name}.)",
            )

    def _read_lines(self) -> None:
        self.entries, self.limit, self.torn, self._last, self._lines = {}, None, b"", "", 0
        pages = self.path / _PAGES
        lines = pages.read_bytes().splitlines(keepends=True) if pages.exists() else []
        for number, line in enumerate(lines):
            if number == len(lines) - 1 and not line.endswith(b"\n"):
                self.torn = line
                break
            try:
                self._apply_line(json.loads(line))
            except (ValueError, KeyError, TypeError, SettingError) as error:
                raise BudgetError(
                    f"line {number + 1} of {pages} is not as it was written: {error}.",
                    why="What was spent is read from it.",
                    remedy="Restore the book from a copy.",
                ) from None

    def _apply_line(self, line: dict[str, Any]) -> None:
        code = line.pop("code")
        if line["previous"] != self._last or not hmac.compare_digest(str(code), self._code(line)):
            raise ValueError("it does not fit the line before it, or was changed")
        kind = line["kind"]
        if kind == "limit":
            self.limit = Limit(line["epsilon"], line["delta"])
        elif kind in _KINDS.values():
            named = {name: line[name] for name in ("date", "mark", "run", "method", "data", "described", "records")}
            self.entries[line["mark"]] = Entry(
                **named,
                number=len(self.entries) + 1,
                cost=cost_from_dict(line["cost"]),
                about_persons=kind == _KINDS[True],
            )
        elif kind == "cost":
            known, cost = self.entries[line["mark"]], cost_from_dict(line["cost"])
            self.entries[line["mark"]] = replace(known, cost=cost, settled=bool(line["settled"]))
        else:
            raise ValueError(f"{kind!r} is no kind of line")
        self._last, self._lines = code, self._lines + 1

    def _code(self, line: Mapping[str, Any]) -> str:
        text = json.dumps(line, sort_keys=True, allow_nan=False)
        return hmac.new(self.key, text.encode(), hashlib.sha256).hexdigest()

    def _append(self, kind: str, **content: Any) -> None:
        """Write a line and see it on disk; only while locked."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        line = {"kind": kind, "date": now, **content, "previous": self._last}
        text = json.dumps({**line, "code": self._code(line)}, allow_nan=False) + "\n"
        try:
            descriptor = open_private(self.path / _PAGES, os.O_WRONLY | os.O_APPEND)
            try:
                os.write(descriptor, text.encode())
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise BudgetError(
                f"cannot write {self.path / _PAGES}: {error.strerror}.", remedy="Look at its place and permissions."
            ) from None
        self._read()

    @property
    def delta(self) -> float:
        """Return the δ at which ε is composed: the owner's, else 1e-5."""
        return self.limit.delta if self.limit else 1e-5

    def weak_delta(self, delta: float) -> str:
        """Return of which training's records a δ promises nothing; nothing where it is below 1 / N for all of them."""
        most = max(self._sizes(), default=(0, ""))
        return _weakness(delta, *most) if most[0] * delta >= 1 else ""

    def require_delta(self, delta: float) -> None:
        """Raise at a δ that promises nothing of any training's records, not even of the fewest."""
        check_delta(delta)
        sizes = self._sizes()
        if sizes and delta * min(sizes)[0] >= 1:
            raise SettingError(
                f"delta={delta:g} is not allowed: {_weakness(delta, *min(sizes))}.",
                why="A mechanism that publishes one of them picked at random would keep that promise.",
                remedy=f"Give --delta {0.1 / max(sizes)[0]:.1g} or less.",
            )

    def _sizes(self) -> list[tuple[int, str]]:
        """Return how many units each training read, and what they are."""
        readings = [self._load(entry) for entry in {e.records: e for e in self.entries.values()}.values()]
        return [
            (len(one.digests), "records") if one.persons is None else (_num_persons(one), "persons")
            for one in readings
            if len(one.digests)
        ]

    def set_limit(self, epsilon: float | None, delta: float) -> None:
        """Say what each record may spend; unset, nothing is refused."""
        self.require_delta(delta)
        if epsilon is not None and not 0 < epsilon < inf:
            raise SettingError(
                f"a limit of ε = {epsilon:g} is not a limit.", remedy="Give a number above 0, such as 4."
            )
        with self.locked(sets_limit=True):
            self._append("limit", epsilon=epsilon, delta=delta)

    def reading(self, records: TrainingExamples) -> Reading:
        """Return a keyed digest of each record's inputs, and whose it is; -0.0 counts as 0.0."""
        key, digests_of_rows = hashlib.sha256(self.key + b"records").digest(), []
        for inputs, _ in chunks(records):
            rows = (inputs + 0.0).flatten(1).contiguous().numpy()
            digests_of_rows += [hashlib.blake2b(row.data, digest_size=8, key=key).digest() for row in rows]
        digests = np.frombuffer(b"".join(digests_of_rows), dtype="<u8").astype(np.uint64, copy=False)
        return Reading.of(digests, None if records.persons is None else records.persons.codes().numpy())

    def _name_of(self, reading: Reading) -> str:
        return hmac.new(self.key, reading.to_bytes(), hashlib.sha256).hexdigest()[:32]

    def _load(self, entry: Entry) -> Reading:
        path = self.path / _RECORDS / f"{entry.records}{_ENTERED}"
        if not path.exists() and path.with_suffix(_PENDING).exists():
            path = path.with_suffix(_PENDING)  # its writer was killed after the line
        try:
            reading = Reading.from_bytes(path.read_bytes(), about_persons=entry.about_persons)
        except OSError as error:
            raise BudgetError(f"cannot read {path}: {error.strerror}.", remedy="Restore the book.") from None
        if self._name_of(reading) != entry.records:
            raise BudgetError(f"{path} is not as it was written.", remedy="Restore the book from a copy.")
        return reading

    def known_records(self, described: str) -> Reading | None:
        """Return the records that the latest training with the same settings of data read; None if there is none."""
        same = [entry for entry in self.entries.values() if entry.described == described]
        return self._load(same[-1]) if same else None

    def everything(self) -> Reading:
        """Return all records that trainings have read, each as its own."""
        known = [self._load(entry).digests for entry in self.entries.values()]
        return Reading(np.unique(np.concatenate([*known, np.zeros(0, np.uint64)])))

    def shares(
        self, records: Reading | None = None, extra: Cost | None = None, delta: float | None = None
    ) -> list[Share]:
        """Return groups of units by the trainings that read them, with what each has spent; the dearest first.

        With `records`, only units that have some of them; with `extra`, as if a training of that cost had read them,
        too, or one record of each unit.
        """
        entries = list(self.entries.values())
        readings = {entry.records: self._load(entry) for entry in {e.records: e for e in entries}.values()}
        if not readings and records is None:
            return []
        counts = count_in_units([*readings.values(), *([] if records is None else [records])])
        if records is None:
            counts = np.column_stack([counts, np.ones(len(counts), np.int64)])
        # Sizes of groups are rounded up to powers of two, so that there are few of them.
        sizes = 2 ** np.ceil(np.log2(np.maximum(counts, 1))).astype(np.int64) * (counts > 0)
        patterns, numbers = np.unique(sizes[counts[:, -1] > 0], axis=0, return_counts=True)
        shares = []
        for (*pattern, new), number in zip(patterns.tolist(), numbers.tolist(), strict=True):
            times = dict(zip(readings, pattern, strict=True))
            own = tuple(entry for entry in entries if times[entry.records])
            sizes_of_own = tuple(times[entry.records] for entry in own)
            costs = [(entry.cost, times[entry.records]) for entry in own] + ([] if extra is None else [(extra, new)])
            epsilon = compose_groups(costs, self.delta if delta is None else delta)
            shares.append(Share(number, own, sizes_of_own, epsilon, new))
        return sorted(shares, key=lambda share: -share.epsilon)

    def require_within(self, newcomer: PendingTraining, records: Reading | None) -> None:
        """Raise where a training would exceed the owner's limit; without records, those known by its settings count."""
        known = self.entries.get(newcomer.mark) if newcomer.mark else None
        if self.limit is None or self.limit.epsilon is None or (known and known.cost == newcomer.cost):
            return
        presumed = records is None
        meant = self.known_records(newcomer.described) if records is None else records
        if meant is None:
            meant = Reading(np.array([0], dtype=np.uint64))  # nothing is known of them: the run by itself
        kept = {mark: entry for mark, entry in self.entries.items() if mark != newcomer.mark}
        after = replace(self, entries=kept).shares(meant, newcomer.cost)[0]
        if after.epsilon <= self.limit.epsilon:
            return
        sizes = (*after.records, after.newcomers)
        costs = [entry.cost for entry in after.entries]
        before = compose_groups(list(zip(costs, after.records, strict=True)), self.delta)
        spent = (
            f"{len(after.entries)} earlier trainings, {_text_of(before)}" if after.entries else "no earlier training"
        )
        word = after.word if meant.persons is None else "persons"
        same = " (as far as the settings of the data tell)" if presumed and after.entries else ""
        reason = f" It is not bounded: {newcomer.cost.why}." if isinstance(newcomer.cost, Unbounded) else ""
        if max(sizes) > 1:
            reason += f" A training took up to {max(sizes)} of a person's records for records of different persons."
        raise BudgetError(
            f"this training would spend more than the limit of ε = {self.limit.epsilon:g} in {self.path}.",
            why=f"With it, {word}{same} have {_text_of(after.epsilon)} at δ = {self.delta:g}; "
            f"on them: {spent}.{reason}",
            remedy="Lower method.epsilon, train on other records, or raise the limit: `stobatch budget --limit`.",
        )

    def enter(self, newcomer: PendingTraining, records: Reading) -> None:
        """Enter a training before its first step, or the present cost of one entered before; raise beyond the limit."""
        with self.locked():
            self.require_within(newcomer, records)
            known = self.entries.get(newcomer.mark)
            if known is None:
                name = self._name_of(records)
                path = self.path / _RECORDS / f"{name}{_ENTERED}"
                pending = None if path.exists() else path.with_suffix(_PENDING)
                if pending is not None:
                    write_atomically(pending, lambda out: out.write(records.to_bytes()), private=True)
                named = {key: value for key, value in vars(newcomer).items() if key != "cost"}
                kind = _KINDS[records.persons is not None]
                self._append(kind, **named, records=name, cost=cost_to_dict(newcomer.cost))
                if pending is not None:
                    pending.replace(path)
            elif known.cost != newcomer.cost:
                self._append("cost", mark=newcomer.mark, cost=cost_to_dict(newcomer.cost), settled=False)

    def settle(self, mark: str, cost: Cost) -> None:
        """Record that a training has ended, and what it cost."""
        with self.locked():
            known = self.entries.get(mark)
            if known is not None and not known.settled:
                self._append("cost", mark=mark, cost=cost_to_dict(cost), settled=True)


@dataclass
class Booking:
    """A training and the book that its owner keeps; the book is made when there is something to enter."""

    path: Path
    newcomer: PendingTraining
    _reading: Reading | None = field(default=None, repr=False)

    @classmethod
    def of(cls, config: RunConfig, plan: Plan, run: Run, method: str | None = None) -> Booking | None:
        """Return the booking that the settings or the environment ask for; None where none is asked for."""
        named = config.machine.book or os.environ.get(VARIABLE)
        if not named:
            return None
        root = str(sources.data_root(Path(config.machine.data_root) if config.machine.data_root else None).resolve())
        # What is held out is read, too, by a score.
        described = content_hash({"data": config.data.replace(held_out=0).to_dict(), "root": root})
        newcomer = PendingTraining(
            mark(run),
            str(run.path.resolve()),
            method or config.method.title,
            config.data.name,
            described,
            cost_of(plan),
        )
        return cls(_folder(named), newcomer)

    def require_allowed(self, records: TrainingExamples | None = None) -> None:
        """Raise where the limit would be exceeded; before data are read, as far as their settings tell."""
        if is_book(self.path):
            book = Book.open(self.path)
            book.require_limit_known()
            self._reading = None if records is None else book.reading(records)
            book.require_within(self.newcomer, self._reading)

    def enter(self, run: Run, records: TrainingExamples) -> None:
        """Enter the training, which has a mark by now; or what it costs, where it is there already."""
        book = Book.open(self.path, make=True)
        if self._reading is None:
            self._reading = book.reading(records)
        self.newcomer = replace(self.newcomer, mark=mark(run))
        book.enter(self.newcomer, self._reading)
        if book.limit and book.limit.epsilon is not None and (weakness := book.weak_delta(book.delta)):
            print(f"stobatch: the limit in {book.path} promises nothing: {weakness}.", file=sys.stderr)

    def amend(self, cost: Cost) -> None:
        """Enter that more steps are made than were planned, before they are."""
        assert self._reading is not None
        self.newcomer = replace(self.newcomer, cost=cost)
        Book.open(self.path).enter(self.newcomer, self._reading)

    def settle(self, cost: Cost) -> None:
        """Enter what the training cost, now that it has ended."""
        Book.open(self.path).settle(self.newcomer.mark, cost)


def _folder(path: str | Path) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise BudgetError(f"{path} names no folder.", remedy="Give the book's folder without ~.") from None


def _create_folder(folder: Path) -> None:
    """Make a book; of several that try at once, one does."""
    # Hidden files are its lock, or a key that somebody else is writing.
    strange = folder.exists() and not (folder.is_dir() and all(one.name.startswith(".") for one in folder.iterdir()))
    if strange and not is_book(folder):
        raise BudgetError(f"{folder} exists and is not a book.", remedy="Choose another folder for machine.book.")
    try:
        make_folder(folder, private=True)
        folder.chmod(0o700)
        with _lock_folder(folder):
            if not is_book(folder):
                write_json(folder / f"{_KEY}.json", _KEY, {"key": secrets.token_hex(32)}, private=True)
    except OSError as error:
        raise BudgetError(f"cannot make {folder}: {error.strerror}.", remedy="Choose another folder.") from None


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Wait until no one else writes in a book's folder."""
    descriptor = open_private(folder / _LOCK, os.O_RDWR)
    try:
        try:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except ImportError:  # no such locks on this system
            pass
        yield
    finally:
        os.close(descriptor)


def is_book(folder: Path) -> bool:
    return (folder / f"{_KEY}.json").exists()


def _key(folder: Path) -> bytes:
    path = folder / f"{_KEY}.json"
    try:
        return bytes.fromhex(read_json(path, _KEY)["key"])
    except (KeyError, TypeError, ValueError, RunError):
        raise BudgetError(f"{path} is not the key of a book.", remedy="Restore the book from a copy.") from None
