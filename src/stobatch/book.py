"""The budget book: what all trainings on the same records have spent together, and a limit that the owner sets.

A book is a folder for the owner alone. Its pages, `entries.jsonl`, are appended to and never changed: each line carries
a code under the book's key that also covers the line before it, so that a line that was changed, moved or taken out is
noticed (lines cut off at the end are not). A training is entered before its first step, with what its plan costs, and
settled when it has ended; one that was killed stays as it was planned. Records are known by digests under the book's
key, one for each: so runs on a part of the data, or on data that share some records, are composed exactly where they
overlap. What a record has spent is the composition of the trainings that read it (docs/budget.md).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from math import inf, isinf
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stobatch.config import RunConfig
from stobatch.data import sources
from stobatch.data.dataset import TrainingExamples, chunks
from stobatch.dp.accounting import check_delta
from stobatch.dp.composition import Cost, Unbounded, compose_epsilon, cost_from_dict, cost_to_dict
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

Digests = NDArray[np.uint64]
"""Of records under a book's key, sorted, each once."""


def cost_of(plan: Plan, accounted_steps: int | None = None) -> Cost:
    """Return what a plan costs those whose records are trained on; more steps than planned cost more.

    With a public seed everybody can take the noise off, so it counts as if there were none.
    """
    if plan.public_seeds:
        return Unbounded("its seed is public: what it released is as if it were not private")
    mechanism = plan.mechanism_of(accounted_steps)
    claim = plan.claim.started_from(plan.prior)
    if mechanism is None or claim.status is not Status.PROVED:
        reason = plan.prior.conflict if plan.prior and plan.prior.conflict else claim.source
        return Unbounded(f"nothing is proved of it ({reason})")
    if "person" in claim.unit:
        return Unbounded(f"its ε is per {claim.unit}, and the book counts records")
    return mechanism


def _words(epsilon: float) -> str:
    return epsilon_words(None if isinf(epsilon) else epsilon)


@dataclass(frozen=True)
class Entry:
    """One training, or one search, in a book."""

    number: int
    date: str
    mark: str
    """A name that only this very run has."""
    run: str
    method: str
    data: str
    described: str
    """A digest of the settings that name the data, known before they are read."""
    records: str
    """The name of the set of its records."""
    cost: Cost
    settled: bool = False


@dataclass(frozen=True)
class Share:
    """Records that the same trainings have read, and what they have spent."""

    count: int
    entries: tuple[Entry, ...]
    epsilon: float


@dataclass(frozen=True)
class Limit:
    """What the owner allows each record to spend."""

    epsilon: float | None
    delta: float


@dataclass(frozen=True)
class Newcomer:
    """A training that asks to be entered."""

    mark: str
    run: str
    method: str
    data: str
    described: str
    cost: Cost


@dataclass
class Book:
    """An open book. Whoever checks and then enters holds its lock (`locked`)."""

    path: Path
    key: bytes = field(repr=False)
    entries: dict[str, Entry] = field(default_factory=dict)
    """By mark, in their order."""
    limit: Limit | None = None
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
            _begin(folder)
        book = cls(folder, _key(folder))
        book._read()
        return book

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Wait until nobody else writes, and read what was written meanwhile."""
        with _alone_in(self.path):
            self._cut_torn_line()
            self._read()
            yield

    def _cut_torn_line(self) -> None:
        """Remove the beginning of a line whose writer was killed: what it was about had not begun."""
        pages = self.path / _PAGES
        if pages.exists() and (text := pages.read_bytes()) and not text.endswith(b"\n"):
            whole = text[: text.rfind(b"\n") + 1]
            write_atomically(pages, lambda out: out.write(whole), private=True)

    def _read(self) -> None:
        self.entries, self.limit, self._last, self._lines = {}, None, "", 0
        pages = self.path / _PAGES
        lines = pages.read_bytes().splitlines(keepends=True) if pages.exists() else []
        for number, line in enumerate(lines):
            if number == len(lines) - 1 and not line.endswith(b"\n"):
                break
            try:
                self._take(json.loads(line))
            except (ValueError, KeyError, TypeError, SettingError) as error:
                raise BudgetError(
                    f"line {number + 1} of {pages} is not as it was written: {error}.",
                    why="What was spent is read from it.",
                    remedy="Restore the book from a copy.",
                ) from None

    def _take(self, line: dict[str, Any]) -> None:
        code = line.pop("code")
        if line["previous"] != self._last or not hmac.compare_digest(str(code), self._code(line)):
            raise ValueError("it does not fit the line before it, or was changed")
        kind = line["kind"]
        if kind == "limit":
            self.limit = Limit(line["epsilon"], line["delta"])
        elif kind == "run":
            named = {name: line[name] for name in ("date", "mark", "run", "method", "data", "described", "records")}
            self.entries[line["mark"]] = Entry(len(self.entries) + 1, **named, cost=cost_from_dict(line["cost"]))
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
        """At which ε is composed: as the owner said, else 1e-5."""
        return self.limit.delta if self.limit else 1e-5

    def set_limit(self, epsilon: float | None, delta: float) -> None:
        """Say what each record may spend; unset, nothing is refused."""
        check_delta(delta)
        if epsilon is not None and not 0 < epsilon < inf:
            raise SettingError(f"a limit of ε = {epsilon:g} is no limit.", remedy="Give a number above 0, such as 4.")
        with self.locked():
            self._append("limit", epsilon=epsilon, delta=delta)

    def digests(self, records: TrainingExamples) -> Digests:
        """Return a digest of each record's inputs under the book's key; -0.0 is no other value than 0.0."""
        key, found = hashlib.sha256(self.key + b"records").digest(), []
        for inputs, _ in chunks(records):
            rows = (inputs + 0.0).flatten(1).contiguous().numpy()
            found += [hashlib.blake2b(row.data, digest_size=8, key=key).digest() for row in rows]
        return np.unique(np.frombuffer(b"".join(found), dtype="<u8").astype(np.uint64, copy=False))

    def _name_of(self, digests: Digests) -> str:
        return hmac.new(self.key, digests.astype("<u8").tobytes(), hashlib.sha256).hexdigest()[:32]

    def _load(self, name: str) -> Digests:
        path = self.path / _RECORDS / f"{name}.bin"
        try:
            found = np.frombuffer(path.read_bytes(), dtype="<u8").astype(np.uint64, copy=False)
        except OSError as error:
            raise BudgetError(f"cannot read {path}: {error.strerror}.", remedy="Restore the book.") from None
        if self._name_of(found) != name:
            raise BudgetError(f"{path} is not as it was written.", remedy="Restore the book from a copy.")
        return found

    def known_records(self, described: str) -> Digests | None:
        """Return the records that the latest training with the same settings of data read; None if there is none."""
        same = [entry for entry in self.entries.values() if entry.described == described]
        return self._load(same[-1].records) if same else None

    def shares(
        self, records: Digests | None = None, extra: Cost | None = None, delta: float | None = None
    ) -> list[Share]:
        """Return groups of records by the trainings that read them, with what each has spent; the dearest first.

        With `records`, only those; with `extra`, as if a training of that cost had read all of them, too.
        """
        entries, names = list(self.entries.values()), list(dict.fromkeys(e.records for e in self.entries.values()))
        sets = [self._load(name) for name in names]
        everything = (
            records if records is not None else np.unique(np.concatenate(sets)) if sets else np.array([], "<u8")
        )
        reads = np.stack([np.isin(everything, one) for one in sets], axis=1) if sets else np.zeros((len(everything), 0))
        patterns, counts = np.unique(reads, axis=0, return_counts=True)
        found = []
        for pattern, count in zip(patterns.tolist(), counts.tolist(), strict=True):
            readers = {name for name, read in zip(names, pattern, strict=True) if read}
            own = tuple(entry for entry in entries if entry.records in readers)
            costs = [entry.cost for entry in own] + ([extra] if extra is not None else [])
            found.append(Share(count, own, compose_epsilon(costs, self.delta if delta is None else delta)))
        return sorted(found, key=lambda share: -share.epsilon)

    def require_within(self, newcomer: Newcomer, records: Digests | None) -> None:
        """Raise where a training would spend more than the owner's limit; without records, those known by their
        settings are meant.
        """
        known = self.entries.get(newcomer.mark) if newcomer.mark else None
        if self.limit is None or self.limit.epsilon is None or (known and known.cost == newcomer.cost):
            return
        presumed = records is None
        meant = self.known_records(newcomer.described) if records is None else records
        if meant is None:
            meant = np.array([0], dtype=np.uint64)  # nothing is known of them: the run by itself
        kept = {mark: entry for mark, entry in self.entries.items() if mark != newcomer.mark}
        after = replace(self, entries=kept).shares(meant, newcomer.cost)[0]
        if after.epsilon <= self.limit.epsilon:
            return
        before = compose_epsilon([entry.cost for entry in after.entries], self.delta)
        spent = f"{len(after.entries)} earlier trainings, {_words(before)}" if after.entries else "no earlier training"
        same = " (as far as the settings of the data tell)" if presumed and after.entries else ""
        reason = f" It is not bounded: {newcomer.cost.why}." if isinstance(newcomer.cost, Unbounded) else ""
        raise BudgetError(
            f"this training would spend more than the limit of ε = {self.limit.epsilon:g} in {self.path}.",
            why=f"With it, records{same} have {_words(after.epsilon)} at δ = {self.delta:g}; on them: {spent}.{reason}",
            remedy="Lower method.epsilon, train on other records, or raise the limit: `stobatch budget --limit`.",
        )

    def enter(self, newcomer: Newcomer, records: Digests) -> None:
        """Enter a training before its first step, or what it costs now where it is there already; raises beyond the
        limit.
        """
        with self.locked():
            self.require_within(newcomer, records)
            known = self.entries.get(newcomer.mark)
            if known is None:
                name = self._name_of(records)
                path = self.path / _RECORDS / f"{name}.bin"
                if not path.exists():
                    write_atomically(path, lambda out: out.write(records.astype("<u8").tobytes()), private=True)
                named = {key: value for key, value in vars(newcomer).items() if key != "cost"}
                self._append("run", **named, records=name, cost=cost_to_dict(newcomer.cost))
            elif known.cost != newcomer.cost:
                self._append("cost", mark=newcomer.mark, cost=cost_to_dict(newcomer.cost), settled=False)

    def settle(self, mark: str, cost: Cost) -> None:
        """A training has ended, and this is what it cost."""
        with self.locked():
            known = self.entries.get(mark)
            if known is not None and not known.settled:
                self._append("cost", mark=mark, cost=cost_to_dict(cost), settled=True)


@dataclass
class Booking:
    """A training and the book that its owner keeps; the book is made when there is something to enter."""

    path: Path
    newcomer: Newcomer
    _digests: Digests | None = field(default=None, repr=False)

    @classmethod
    def of(cls, config: RunConfig, plan: Plan, run: Run, method: str | None = None) -> Booking | None:
        """Return the booking that the settings or the environment ask for; None where nobody asked."""
        named = config.machine.book or os.environ.get(VARIABLE)
        if not named:
            return None
        root = str(sources.data_root(Path(config.machine.data_root) if config.machine.data_root else None).resolve())
        # What is held out is read, too, by a score.
        described = content_hash({"data": config.data.replace(held_out=0).to_dict(), "root": root})
        newcomer = Newcomer(
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
            self._digests = None if records is None else book.digests(records)
            book.require_within(self.newcomer, self._digests)

    def enter(self, run: Run, records: TrainingExamples) -> None:
        """Enter the training, which has a mark by now; or what it costs, where it is there already."""
        book = Book.open(self.path, make=True)
        if self._digests is None:
            self._digests = book.digests(records)
        self.newcomer = replace(self.newcomer, mark=mark(run))
        book.enter(self.newcomer, self._digests)

    def amend(self, cost: Cost) -> None:
        """Enter that more steps are made than were planned, before they are."""
        assert self._digests is not None
        self.newcomer = replace(self.newcomer, cost=cost)
        Book.open(self.path).enter(self.newcomer, self._digests)

    def settle(self, cost: Cost) -> None:
        """Enter what the training cost, now that it has ended."""
        Book.open(self.path).settle(self.newcomer.mark, cost)


def _folder(path: str | Path) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise BudgetError(f"{path} names no folder.", remedy="Give the book's folder without ~.") from None


def _begin(folder: Path) -> None:
    """Make a book; of several that try at once, one does."""
    # Hidden files are its lock, or a key that somebody else is writing.
    strange = folder.exists() and not (folder.is_dir() and all(one.name.startswith(".") for one in folder.iterdir()))
    if strange and not is_book(folder):
        raise BudgetError(f"{folder} exists and is no book.", remedy="Choose another folder for machine.book.")
    try:
        make_folder(folder, private=True)
        folder.chmod(0o700)
        with _alone_in(folder):
            if not is_book(folder):
                write_json(folder / f"{_KEY}.json", _KEY, {"key": secrets.token_hex(32)}, private=True)
    except OSError as error:
        raise BudgetError(f"cannot make {folder}: {error.strerror}.", remedy="Choose another folder.") from None


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Wait until nobody else writes in a book's folder."""
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
        raise BudgetError(f"{path} is no key of a book.", remedy="Restore the book from a copy.") from None
