"""The budget book: what is entered, what records have spent, what is refused, and what a kill leaves."""

from __future__ import annotations

import json
import math
import stat
import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stobatch
from stobatch.book import Book, PendingTraining, Reading, count_in_units
from stobatch.data import Dataset, Examples, person_codes
from stobatch.dp.accounting import PoissonGaussian
from stobatch.dp.composition import Unbounded, compose_epsilon, compose_groups
from stobatch.errors import BudgetError, SettingError
from stobatch.training.ledger import Ledger, Stretch
from stobatch.training.observer import Look
from tests.support.command_line import call
from tests.support.small_records import small_config, small_records

DELTA = 1e-3
COST = PoissonGaussian(0.25, 2.0, 10)


@pytest.fixture
def book(tmp_path: Path) -> Book:
    return Book.open(tmp_path / "book", make=True)


def newcomer(mark: str, cost: Any = COST, described: str = "here") -> PendingTraining:
    return PendingTraining(mark, f"runs/{mark}", "sound", "tensors", described, cost)


def enter(book: Book, mark: str, first: int = 0, count: int = 64, cost: Any = COST) -> None:
    book.enter(newcomer(mark, cost), book.reading(small_records(first, count).train))


def test_records_pay_for_the_trainings_that_read_them(book: Book):
    enter(book, "a", 0, 64)
    enter(book, "b", 48, 64)
    enter(book, "c", 200, 10)
    found = {(tuple(entry.mark for entry in share.entries), share.count): share.epsilon for share in book.shares()}
    assert found.keys() == {(("a", "b"), 16), (("a",), 48), (("b",), 48), (("c",), 10)}
    once, twice = compose_epsilon([COST], book.delta), compose_epsilon([COST, COST], book.delta)
    assert found[("a", "b"), 16] == twice > once
    assert found[("c",), 10] == once


def test_the_same_records_in_another_order_and_with_other_labels_are_the_same(book: Book):
    data = small_records().train.in_memory()
    turned = Examples(data.inputs.flip(0), 1 - data.labels, 2)
    assert (book.reading(data).digests == book.reading(turned).digests).all()


def test_digests_of_two_books_have_nothing_in_common(book: Book, tmp_path: Path):
    other = Book.open(tmp_path / "other", make=True)
    data = small_records().train
    assert not set(book.reading(data).digests.tolist()) & set(other.reading(data).digests.tolist())


def test_only_the_owner_can_read_a_book(book: Book):
    enter(book, "a")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in book.path.rglob("*")}
    assert modes.pop("records") == 0o700
    assert set(modes.values()) == {0o600}
    assert stat.S_IMODE(book.path.stat().st_mode) == 0o700


def test_a_limit_refuses_what_would_exceed_it_and_counts_overlaps_alone(book: Book):
    once, twice = compose_epsilon([COST], DELTA), compose_epsilon([COST, COST], DELTA)
    book.set_limit((once + twice) / 2, DELTA)
    enter(book, "a")
    with pytest.raises(BudgetError, match="more than the limit"):
        enter(book, "b")
    with pytest.raises(BudgetError, match="more than the limit"):
        enter(book, "b", 63, 10)
    enter(book, "c", 64, 64)
    enter(book, "a")  # once more: it is there
    assert list(book.entries) == ["a", "c"]
    book.set_limit(twice * 1.01, DELTA)
    enter(book, "b")


def test_a_limit_that_is_no_number_is_refused(book: Book):
    with pytest.raises(SettingError, match="not a limit"):
        book.set_limit(-1.0, DELTA)


def test_of_two_that_come_at_once_one_is_entered(book: Book):
    book.set_limit(compose_epsilon([COST], DELTA) * 1.01, DELTA)
    refused, barrier = [], threading.Barrier(4)

    def try_to_enter(mark: str) -> None:
        own = Book.open(book.path)
        barrier.wait()
        try:
            enter(own, mark)
        except BudgetError:
            refused.append(mark)

    threads = [threading.Thread(target=try_to_enter, args=(mark,)) for mark in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 3
    assert len(Book.open(book.path).entries) == 1


def test_of_several_that_begin_a_book_at_once_one_does(tmp_path: Path):
    keys, barrier = [], threading.Barrier(6)

    def begin() -> None:
        barrier.wait()
        keys.append(Book.open(tmp_path / "book", make=True).key)

    threads = [threading.Thread(target=begin) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keys) == 6
    assert len(set(keys)) == 1


def test_void_and_unproved_trainings_have_no_end(book: Book):
    enter(book, "a")
    enter(book, "b", cost=Unbounded("its seed is public"))
    assert book.shares()[0].epsilon == math.inf
    book.set_limit(100.0, DELTA)
    with pytest.raises(BudgetError, match="no proved ε"):
        enter(book, "c")


@pytest.mark.parametrize("how", ["changed", "taken out", "moved"])
def test_pages_that_were_changed_are_refused(book: Book, how: str):
    for mark in "abc":
        enter(book, mark)
    pages = book.path / "entries.jsonl"
    lines = pages.read_text().splitlines(keepends=True)
    if how == "changed":
        lines[1] = lines[1].replace('"steps": 10', '"steps": 1')
    elif how == "taken out":
        del lines[1]
    else:
        lines[0], lines[1] = lines[1], lines[0]
    pages.write_text("".join(lines))
    with pytest.raises(BudgetError, match="not as it was written"):
        Book.open(book.path)


def test_a_line_that_was_cut_off_had_not_begun(book: Book):
    enter(book, "a")
    pages = book.path / "entries.jsonl"
    pages.write_text(pages.read_text() + '{"kind": "run", "da')
    again = Book.open(book.path)
    assert list(again.entries) == ["a"]
    enter(again, "b")
    assert list(Book.open(book.path).entries) == ["a", "b"]
    assert all(json.loads(line) for line in pages.read_text().splitlines())


def test_a_delta_that_promises_nothing_is_refused(book: Book):
    enter(book, "a", 0, 64)
    enter(book, "b", 100, 10)
    for ask in (lambda: book.set_limit(1.0, 0.1), lambda: stobatch.budget(book.path, delta=0.1)):
        with pytest.raises(SettingError, match=r"δ = 0\.1 is not below 1 / 10 = 0\.1, .*10 records.*--delta 0\.002 or"):
            ask()
    (warning,) = stobatch.budget(book.path, delta=0.05).warnings
    assert "not below 1 / 64 = 0.0156, and a training read 64 records" in warning
    assert stobatch.budget(book.path, delta=0.01).warnings == ()


def test_a_book_that_has_such_a_delta_says_so_and_every_training_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    Book.open(tmp_path / "book", make=True).set_limit(100.0, 0.5)
    config = small_config(machine__book=str(tmp_path / "book"))
    stobatch.train(config, tmp_path / "run", dataset=small_records(), quiet=True)
    said = "δ = 0.5 is not below 1 / 64 = 0.0156, and a training read 64 records"
    assert f"the limit in {tmp_path / 'book'} promises nothing: {said}." in capsys.readouterr().err
    assert said in stobatch.budget(tmp_path / "book").warnings[0]
    assert "The limit promises nothing" in stobatch.budget(tmp_path / "book", delta=1e-3).warnings[0]
    with pytest.raises(SettingError):
        Book.open(tmp_path / "book").set_limit(1.0, 0.5)


def test_the_line_of_all_names_its_delta(book: Book):
    enter(book, "a")
    book.set_limit(4.0, 1e-4)
    said = call("budget", "--book", book.path, "--delta", "1e-3").out
    assert "at δ = 0.001; limit: ε = 4 at δ = 0.0001" in said


def cut(book: Book, size: int) -> Path:
    pages = book.path / "entries.jsonl"
    pages.write_bytes(pages.read_bytes()[:size])
    return pages


def test_a_look_names_a_line_without_an_end_and_writes_nothing(book: Book):
    enter(book, "a")
    enter(book, "b")
    pages = cut(book, (book.path / "entries.jsonl").stat().st_size - 20)
    before = {path: path.read_bytes() for path in book.path.rglob("*") if path.is_file()}
    (warning,) = stobatch.budget(book.path).warnings
    assert f"line 2 of {pages} has no end and does not count" in warning
    assert {path: path.read_bytes() for path in book.path.rglob("*") if path.is_file()} == before


def test_records_whose_line_was_cut_off_refuse_every_training(book: Book, tmp_path: Path):
    enter(book, "a", 0)
    enter(book, "b", 100)
    book.set_limit(4.0, DELTA)
    pages = cut(book, 300)
    with pytest.raises(BudgetError, match=r"no line of .* is about .*nor have 1 others.*Restore the book from a copy"):
        stobatch.budget(book.path)
    config = small_config(machine__book=str(book.path))
    with pytest.raises(BudgetError, match="may be lost"):
        stobatch.train(config, tmp_path / "run", dataset=small_records(), quiet=True)
    assert not (tmp_path / "run").exists()
    assert pages.stat().st_size == 300


def test_whole_lines_that_were_cut_off_are_noticed_where_their_records_are_in_no_other(book: Book):
    enter(book, "a", 0)
    size = (book.path / "entries.jsonl").stat().st_size
    enter(book, "b", 100)
    cut(book, size)
    with pytest.raises(BudgetError, match="may be lost"):
        Book.open(book.path)
    (lost,) = set((book.path / "records").glob("*.bin")) - {book.path / "records" / f"{book.entries['a'].records}.bin"}
    lost.unlink()
    assert list(Book.open(book.path).entries) == ["a"]


def test_a_limit_whose_line_has_no_end_is_set_again_before_anything_is_trained(book: Book, tmp_path: Path):
    enter(book, "a")
    book.set_limit(4.0, DELTA)
    cut(book, (book.path / "entries.jsonl").stat().st_size - 20)
    config = small_config(machine__book=str(book.path))
    assert "It set a limit: set it again" in stobatch.budget(book.path).warnings[0]
    with pytest.raises(BudgetError, match=r"It set a limit.*budget --book .* --limit"):
        stobatch.train(config, tmp_path / "run", dataset=small_records(100), quiet=True)
    assert not (tmp_path / "run").exists()
    again = Book.open(book.path)
    again.set_limit(4.0, DELTA)
    enter(again, "b", 100)
    assert Book.open(book.path).limit == again.limit


class Kill(BaseException):
    pass


@pytest.mark.parametrize("moment", ["before the line", "in the line", "after the line"])
def test_a_writer_who_was_killed_as_it_entered_is_recovered_from(
    book: Book, moment: str, monkeypatch: pytest.MonkeyPatch
):
    """Records without a line are those of a book that was cut off, and never those of a kill."""
    enter(book, "a")
    write = Book._append

    def kill(self: Book, kind: str, **content: Any) -> None:
        if moment != "before the line":
            write(self, kind, **content)
        if moment == "in the line":
            cut(self, (self.path / "entries.jsonl").stat().st_size - 30)
        raise Kill

    with monkeypatch.context() as patch:
        patch.setattr(Book, "_append", kill)
        with pytest.raises(Kill):
            enter(book, "b", 100)
    known = ["a", "b"] if moment == "after the line" else ["a"]
    assert len(stobatch.budget(book.path).runs) == len(known)
    enter(Book.open(book.path), "b", 100)
    enter(Book.open(book.path), "c", 200)
    again = Book.open(book.path)
    assert list(again.entries) == ["a", "b", "c"]
    assert {path.suffix for path in (book.path / "records").iterdir()} == {".bin"}
    assert sum(share.count for share in again.shares()) == 192


def test_a_training_enters_and_settles(tmp_path: Path):
    config = small_config(machine__book=str(tmp_path / "book"))
    model = stobatch.train(config, tmp_path / "run", dataset=small_records(), quiet=True)
    (entry,) = Book.open(tmp_path / "book").entries.values()
    assert entry.settled
    assert entry.cost == model.plan.curve
    found = stobatch.budget(tmp_path / "book", config, dataset=small_records(), delta=DELTA)
    assert found.proved_epsilon == pytest.approx(model.guarantee.epsilon, rel=1e-6)
    assert found.planned is not None
    assert found.planned.proved_epsilon_after == compose_epsilon([entry.cost, entry.cost], DELTA)
    elsewhere = stobatch.budget(tmp_path / "book", config, dataset=small_records(100), delta=DELTA).planned
    assert elsewhere is not None
    assert elsewhere.proved_epsilon_after == elsewhere.proved_epsilon


def owned(data: Dataset, owners: Sequence[int]) -> Dataset:
    groups = person_codes(owners, len(data.train))
    info = replace(data.info, num_persons=int(groups.max()) + 1)
    return replace(data, info=info, train=replace(data.train.in_memory(), groups=groups))


def test_trainings_about_the_same_persons_compose_as_trainings_about_records_do(tmp_path: Path):
    data = owned(small_records(), [number // 2 for number in range(64)])
    config = small_config(machine__book=str(tmp_path / "book"))
    for name in ("a", "b"):
        model = stobatch.train(config, tmp_path / name, dataset=data, quiet=True)
    found = stobatch.budget(tmp_path / "book", config, dataset=data, delta=DELTA)
    curve = model.plan.curve
    assert curve is not None
    (share,) = found.spent
    assert (share.count, share.word, share.records) == (32, "persons", (1, 1))
    assert found.proved_epsilon == compose_epsilon([curve, curve], DELTA) > model.guarantee.epsilon
    assert found.planned is not None
    assert found.planned.proved_epsilon_after == compose_epsilon([curve] * 3, DELTA)
    Book.open(tmp_path / "book").set_limit(found.proved_epsilon * 1.01, DELTA)
    with pytest.raises(BudgetError, match="persons have proved"):
        stobatch.train(config, tmp_path / "c", dataset=data, quiet=True)


def test_a_training_about_records_counts_for_persons_by_how_many_they_have_there(book: Book):
    data = owned(small_records(), [number // 3 for number in range(64)])
    book.enter(newcomer("persons"), book.reading(data.train))
    enter(book, "records", 0, 32)
    assert Book.open(book.path).entries["persons"].about_persons
    found = {share.records: (share.count, share.epsilon) for share in book.shares(delta=DELTA)}
    # Ten persons with three records in both, counted as four; one with two; eleven that the second has not read.
    assert {sizes: count for sizes, (count, _) in found.items()} == {(1, 4): 10, (1, 2): 1, (1,): 11}
    for sizes, (_, epsilon) in found.items():
        assert epsilon == compose_groups([(COST, size) for size in sizes], DELTA)
    book.set_limit(found[1,][1] * 1.5, DELTA)
    with pytest.raises(BudgetError, match="up to 4 of a person's records"):
        enter(book, "more", 0, 4)


def slow_units(readings: Sequence[Reading]) -> list[tuple[int, ...]]:
    """What units have of each reading, by joining persons until no two share a record; sorted."""
    divided = {one.to_bytes(): pairs(one) for one in readings if one.persons is not None}
    somebodys = {record for rows in divided.values() for record, _ in rows}
    rest = {int(record) for one in readings for record in one.digests} - somebodys
    rows = [(record, (key, person)) for key, own in divided.items() for record, person in own]
    rows += [(record, (b"", record)) for record in rest]
    units = [({name}, {record for record, own in rows if own == name}) for name in {name for _, name in rows}]
    while len(divided) > 1 and (pair := next((p for p in combinations(units, 2) if p[0][1] & p[1][1]), None)):
        units = [one for one in units if one not in pair] + [(pair[0][0] | pair[1][0], pair[0][1] | pair[1][1])]

    def of(one: Reading, names: set[tuple[bytes, int]]) -> int:
        if one.persons is not None:
            return sum(key == one.to_bytes() for key, _ in names)
        return sum(record in one.digests for record, name in rows if name in names)

    return sorted(tuple(of(one, names) for one in readings) for names, _ in units)


def pairs(reading: Reading) -> list[tuple[int, int]]:
    assert reading.persons is not None
    return list(zip(reading.digests.tolist(), reading.persons.tolist(), strict=True))


def test_units_are_those_of_a_slow_count():
    random = np.random.default_rng(0)
    for _ in range(60):
        readings = []
        for _ in range(int(random.integers(1, 4))):
            digests = random.integers(0, 12, int(random.integers(1, 10))).astype(np.uint64)
            persons = random.integers(0, 5, len(digests)) if random.random() < 0.6 else None
            readings.append(Reading.of(digests, persons))
        assert sorted(map(tuple, count_in_units(readings).tolist())) == slow_units(readings)


def test_the_order_of_records_does_not_change_whose_they_are():
    digests, persons = np.array([5, 3, 9, 1], np.uint64), np.array([2, 0, 2, 1])
    one, other = Reading.of(digests, persons), Reading.of(digests[::-1], np.array([7, 1, 4, 1]))
    assert one.to_bytes() == other.to_bytes()
    assert Reading.from_bytes(one.to_bytes(), about_persons=True).to_bytes() == one.to_bytes()


def test_what_is_no_book_or_no_delta_is_refused(tmp_path: Path, book: Book):
    with pytest.raises(BudgetError, match="there is no book"):
        stobatch.budget(tmp_path / "nowhere")
    with pytest.raises(SettingError, match="delta=0 is not allowed"):
        stobatch.budget(book.path, delta=0.0)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(BudgetError, match="is not a book"):
        Book.open(tmp_path / "full", make=True)
    (book.path / "book.json").write_text("{}")
    with pytest.raises(BudgetError, match="not the key of a book"):
        Book.open(book.path)


def test_without_a_book_nothing_is_written_beside_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("STOBATCH_BOOK", raising=False)
    stobatch.train(small_config(), tmp_path / "run", dataset=small_records(), quiet=True)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_environment_names_a_book_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("STOBATCH_BOOK", str(tmp_path / "book"))
    stobatch.train(small_config(), tmp_path / "run", dataset=small_records(), quiet=True)
    assert len(Book.open(tmp_path / "book").entries) == 1


def test_a_killed_training_counts_as_planned_and_is_entered_once(tmp_path: Path):
    config = small_config(machine__book=str(tmp_path / "book"))

    def kill(look: Look) -> None:
        if look.step == 3:
            raise Kill

    with pytest.raises(Kill):
        stobatch.train(config, tmp_path / "run", dataset=small_records(), quiet=True, callback=kill)
    (killed,) = Book.open(tmp_path / "book").entries.values()
    assert not killed.settled
    assert killed.cost == stobatch.plan(config, dataset=small_records()).curve
    stobatch.train(config, tmp_path / "run", dataset=small_records(), quiet=True, resume=True)
    (ended,) = Book.open(tmp_path / "book").entries.values()
    assert ended.settled
    assert ended.cost == killed.cost


def test_a_public_seed_is_entered_as_what_it_is(tmp_path: Path):
    config = small_config(machine__book=str(tmp_path / "book"), seed=3)
    stobatch.train(config, tmp_path / "run", dataset=small_records(), quiet=True)
    found = stobatch.budget(tmp_path / "book")
    assert found.proved_epsilon is None
    assert "public" in (found.runs[0].unbounded or "")


def test_a_budget_that_is_spent_refuses_before_data_are_read_and_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = small_config(
        data__name="small_digits", data__train_limit=64, data__test_limit=10, machine__book=str(tmp_path / "book")
    )
    stobatch.train(config, tmp_path / "run", quiet=True)
    Book.open(tmp_path / "book").set_limit(1.1, DELTA)
    before = (tmp_path / "book" / "entries.jsonl").read_bytes()

    def refuse(*_: object) -> None:
        raise AssertionError("data were read")

    monkeypatch.setattr("stobatch.training_run.read_data", refuse)
    with pytest.raises(BudgetError, match="more than the limit"):
        stobatch.train(config, tmp_path / "again", quiet=True)
    assert not (tmp_path / "again").exists()
    assert (tmp_path / "book" / "entries.jsonl").read_bytes() == before


def test_handed_over_records_are_refused_by_what_they_are(tmp_path: Path):
    config = small_config(machine__book=str(tmp_path / "book"))
    stobatch.train(config, tmp_path / "run", dataset=small_records(), quiet=True)
    Book.open(tmp_path / "book").set_limit(1.1, DELTA)
    with pytest.raises(BudgetError, match="more than the limit"):
        stobatch.train(config, tmp_path / "again", dataset=small_records(63), quiet=True)
    assert not (tmp_path / "again").exists()
    stobatch.train(config, tmp_path / "again", dataset=small_records(64), quiet=True)


def test_steps_that_are_made_again_with_other_bits_are_entered_before_they_are_made(tmp_path: Path):
    config = small_config(machine__book=str(tmp_path / "book"))
    stops: list[int] = []

    def stop(look: Look) -> None:
        stops.append(look.step)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stobatch.train(config, tmp_path / "run", dataset=small_records(), quiet=True, callback=stop)
    # As on a GPU: what was begun cannot be repeated bit by bit.
    begun = Ledger.of(tmp_path / "run")
    elsewhere = Stretch(0, 2, "another state", "another machine", repeatable=False)
    Ledger(begun.done, begun.open, (elsewhere,)).save(tmp_path / "run")
    model = stobatch.train(config, tmp_path / "run", dataset=small_records(), quiet=True, resume=True)
    assert model.accounted_steps == 6
    (entry,) = Book.open(tmp_path / "book").entries.values()
    assert entry.cost == model.plan.mechanism(6)
    amended = [json.loads(line) for line in (tmp_path / "book" / "entries.jsonl").read_text().splitlines()]
    assert [(line["kind"], line.get("settled")) for line in amended] == [("run", None), ("cost", False), ("cost", True)]
