"""The budget book: what is entered, what records have spent, what is refused, and what a kill leaves."""

from __future__ import annotations

import json
import math
import stat
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import stobatch
from stobatch.book import Book, Newcomer
from stobatch.data import Examples, person_codes
from stobatch.dp.accounting import PoissonGaussian
from stobatch.dp.composition import Unbounded, compose_epsilon
from stobatch.errors import BudgetError, SettingError
from stobatch.training.ledger import Ledger, Stretch
from stobatch.training.observer import Look
from tests.support.small_records import small_config, small_records

DELTA = 1e-3
COST = PoissonGaussian(0.25, 2.0, 10)


@pytest.fixture
def book(tmp_path: Path) -> Book:
    return Book.open(tmp_path / "book", make=True)


def newcomer(mark: str, cost: Any = COST, described: str = "here") -> Newcomer:
    return Newcomer(mark, f"runs/{mark}", "sound", "tensors", described, cost)


def enter(book: Book, mark: str, first: int = 0, count: int = 64, cost: Any = COST) -> None:
    book.enter(newcomer(mark, cost), book.digests(small_records(first, count).train))


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
    assert (book.digests(data) == book.digests(turned)).all()


def test_digests_of_two_books_have_nothing_in_common(book: Book, tmp_path: Path):
    other = Book.open(tmp_path / "other", make=True)
    data = small_records().train
    assert not set(book.digests(data).tolist()) & set(other.digests(data).tolist())


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
    with pytest.raises(SettingError, match="no limit"):
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


def test_a_training_about_persons_has_no_bound_for_records(tmp_path: Path):
    plain = small_records()
    groups = person_codes([number // 2 for number in range(64)], 64)
    train = replace(plain.train.in_memory(), groups=groups)
    data = replace(plain, info=replace(plain.info, num_persons=32), train=train)
    config = small_config(machine__book=str(tmp_path / "book"))
    model = stobatch.train(config, tmp_path / "run", dataset=data, quiet=True)
    assert model.guarantee.unit == "person"
    (entry,) = Book.open(tmp_path / "book").entries.values()
    assert isinstance(entry.cost, Unbounded)
    assert "per person" in entry.cost.why
    Book.open(tmp_path / "book").set_limit(50.0, DELTA)
    with pytest.raises(BudgetError, match="the book counts records"):
        stobatch.train(config, tmp_path / "second", dataset=data, quiet=True)


def test_what_is_no_book_or_no_delta_is_refused(tmp_path: Path, book: Book):
    with pytest.raises(BudgetError, match="there is no book"):
        stobatch.budget(tmp_path / "nowhere")
    with pytest.raises(SettingError, match="delta=0 is not allowed"):
        stobatch.budget(book.path, delta=0.0)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(BudgetError, match="is no book"):
        Book.open(tmp_path / "full", make=True)
    (book.path / "book.json").write_text("{}")
    with pytest.raises(BudgetError, match="no key of a book"):
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

    class Kill(BaseException):
        pass

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
