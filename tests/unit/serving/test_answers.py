"""Answers: those of `predict`, whoever else is asking; a deadline returns what is proved by then."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from queue import Queue
from time import monotonic
from typing import Any

import numpy as np
import pytest
import torch

from stobatch.loading import TrainedModel
from stobatch.seeds import Seeds
from stobatch.serving import batching
from stobatch.serving.batching import Answer, Batcher, Question, QueueFullError, ServedModel
from stobatch.votes.confidence import lower_sequence


def answers(
    served: ServedModel, asked: list[tuple[torch.Tensor, Question]], **options: Any
) -> tuple[list[Answer], list[int]]:
    """Ask everything before the first answer is worked on; also the sizes of batches."""
    sizes: list[int] = []
    batcher, found = Batcher(10_000, on_batch=lambda name, rows: sizes.append(rows)), list[Queue[Any]]()
    with batcher._wake:
        for inputs, question in asked:
            found.append(Queue())
            batcher.submit(served, inputs, question, found[-1].put)
    told = [queue.get(timeout=120) for queue in found]
    batcher.stop()
    for one in told:
        if isinstance(one, Exception):
            raise one
    return told, sizes


def compare_with_predict(model: TrainedModel, inputs: torch.Tensor, radius: float | None) -> None:
    parts = [part for part in (inputs[:1], inputs[1:4], inputs[4:], inputs[2:5]) if len(part)]
    told, sizes = answers(ServedModel("x", model), [(part, Question(radius)) for part in parts])
    assert len(sizes) < len(parts), "pictures of several clients pass together"
    for part, answer in zip(parts, told, strict=True):
        rows = model.predict(part, radius=radius).rows
        assert answer.label.tolist() == [row.label for row in rows]
        assert answer.radii["bounds"].tolist() == [row.radius for row in rows]
        # Another order of float32 sums, as in every other size of a batch.
        assert np.allclose(answer.scores, [row.scores for row in rows], rtol=0, atol=1e-4)
        assert answer.finished.all()


@pytest.mark.parametrize("radius", [None, 0.05])
def test_a_batch_across_clients_changes_no_answer(
    model: TrainedModel, inputs: torch.Tensor, radius: float | None
) -> None:
    compare_with_predict(model, inputs, radius)


@pytest.mark.parametrize(("radius", "rows"), [(None, 2), (0.05, 40)])
def test_nor_where_slopes_are_climbed_on(
    climbing: TrainedModel, inputs: torch.Tensor, radius: float | None, rows: int
) -> None:
    compare_with_predict(climbing, inputs[:rows], radius)


def test_answers_that_go_to_another_client_are_noticed(
    model: TrainedModel, inputs: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    right: Callable[..., Answer] = batching._rows_of
    monkeypatch.setattr(batching, "_rows_of", lambda answer, rows: right(answer, slice(0, rows.stop - rows.start)))
    with pytest.raises(AssertionError):
        compare_with_predict(model, inputs, None)


def test_votes_are_those_of_predict_with_the_same_noise(
    voting: TrainedModel, inputs: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Seeds, "secret", classmethod(lambda cls: cls(7, public=False)))
    (answer,), _ = answers(ServedModel("x", voting), [(inputs[:3], Question())])
    rows = voting.predict(inputs[:3], seeds=Seeds(7, public=False)).rows
    assert answer.label.tolist() == [row.label for row in rows]
    assert answer.radii["votes"].tolist() == [row.radius for row in rows]


def test_every_question_has_noise_of_its_own(
    voting: TrainedModel, inputs: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    secret = Seeds.secret
    monkeypatch.setattr(Seeds, "secret", classmethod(lambda cls: seen.append((one := secret()).root) or one))
    _, sizes = answers(ServedModel("x", voting), [(inputs[:1], Question(draws=100))] * 3)
    assert len(set(seen)) == 3
    assert sizes == [1, 1, 1]


def test_a_deadline_returns_what_is_proved(voting: TrainedModel, inputs: torch.Tensor) -> None:
    served = ServedModel("x", voting)
    (late,), _ = answers(served, [(inputs[:2], Question(deadline=monotonic()))])
    assert not late.finished.any()
    assert late.draws.tolist() == [0, 0]
    assert late.abstains.all()
    (whole,), _ = answers(served, [(inputs[:2], Question(deadline=monotonic() + 300))])
    assert whole.finished.all()
    assert whole.draws.tolist() == [400, 400]


def test_bounds_cut_short_prove_less_and_nothing_false(model: TrainedModel, inputs: torch.Tensor) -> None:
    verifier = model.verifier_for()
    assert verifier is not None
    generator = torch.Generator()
    largest = verifier.verify_farthest(inputs, generator).columns()["radius"]
    search, seen = verifier.search(inputs, generator, farthest=True, anytime=True), []
    while search.step():
        seen.append(search.read().columns()["radius"])
    assert all((one <= largest).all() for one in seen)
    assert all((one <= later).all() for one, later in pairwise(seen))
    assert (search.read().columns()["radius"] == largest).all()


def test_a_vote_that_may_be_stopped_uses_bounds_that_allow_it(voting: TrainedModel, inputs: torch.Tensor) -> None:
    """And one with a fixed number of draws, whose bounds do not, cannot be read before the last."""
    verifier = voting.verifier_for()
    assert verifier is not None
    search = verifier.search(inputs[:2], torch.Generator().manual_seed(1), farthest=True, anytime=True)
    search.step()
    search.step()
    found = search.read().columns()
    hits = search._test.successes  # type: ignore[attr-defined]
    failure = voting.config.certification.failure_probability
    assert found["draws"].tolist() == [100, 100]
    assert found["top_lower"].tolist() == lower_sequence(hits, 100, failure).tolist()
    fixed = verifier.search(inputs[:2], torch.Generator().manual_seed(1), farthest=True, anytime=False)
    fixed.step()
    fixed.step()
    with pytest.raises(Exception, match="100 of 400 draws"):
        fixed.read()


def test_a_full_queue_takes_nothing_on(model: TrainedModel, inputs: torch.Tensor) -> None:
    batcher, served = Batcher(3), ServedModel("x", model)
    with batcher._wake:
        batcher.submit(served, inputs[:2], Question(), lambda answer: None)
        with pytest.raises(QueueFullError):
            batcher.submit(served, inputs[:2], Question(), lambda answer: None)
    batcher.stop()


def test_who_asks_about_one_picture_does_not_wait_for_hundreds(model: TrainedModel, inputs: torch.Tensor) -> None:
    order: list[str] = []
    batcher, served, done = Batcher(10_000), ServedModel("x", model), threading.Semaphore(0)

    def tell(name: str) -> Callable[[Answer | Exception], None]:
        return lambda answer: (order.append(name), done.release())  # type: ignore[return-value, func-returns-value]

    with batcher._wake:
        batcher.submit(served, inputs.repeat(8, 1, 1, 1), Question(0.05), tell("many"))
        batcher.submit(served, inputs[:1], Question(0.05), tell("one"))
    for _ in range(2):
        assert done.acquire(timeout=120)
    batcher.stop()
    assert order == ["one", "many"]


def test_a_batch_that_fails_is_not_the_end(model: TrainedModel, inputs: torch.Tensor) -> None:
    batcher, served, queue = Batcher(100), ServedModel("x", model), Queue[Any]()
    batcher.submit(served, inputs[:1] * 9, Question(), queue.put)
    assert isinstance(queue.get(timeout=60), Exception)
    batcher.submit(served, inputs[:1], Question(), queue.put)
    assert isinstance(queue.get(timeout=60), Answer)
    batcher.stop()


def test_many_clients_over_http_get_what_predict_says(client: Any, model: TrainedModel, inputs: torch.Tensor) -> None:
    rows = model.predict(inputs, radius=0.05).rows
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda place: client.infer(inputs[place : place + 1], radius=0.05), range(40)))
    for (code, answer, _), row in zip(found, rows, strict=True):
        assert code == 200
        told = {one["name"]: one["data"] for one in answer["outputs"]}
        assert (told["label"], told["radius"], told["is_safe"]) == ([row.label], [row.radius], [row.is_safe])


def test_floats_that_json_writes_without_a_point_are_floats(client: Any, model: TrainedModel) -> None:
    shape = [1, 1, 28, 28]
    tensor = {"name": "pictures", "datatype": "FP32", "shape": shape, "data": [0] * 784}
    _, answer, _ = client.ask("POST", "/v2/models/digits/infer", {"inputs": [tensor]})
    told = next(one["data"] for one in answer["outputs"] if one["name"] == "scores")
    assert np.allclose(told, model.predict(torch.zeros(shape)).rows[0].scores, atol=1e-4)


def test_an_attack_finds_nothing_inside_what_is_proved_and_something_outside(
    client: Any, model: TrainedModel, inputs: torch.Tensor
) -> None:
    rows = model.predict(inputs[:6]).rows
    changed = {"inside": 0, "outside": 0}
    for place, row in enumerate(rows):
        picture = inputs[place : place + 1]
        for where, radius in (("inside", row.radius), ("outside", 1.5)):
            if radius:
                code, answer, _ = client.infer(picture, verb="attack", radius=radius)
                told = {one["name"]: one["data"] for one in answer["outputs"]}
                assert code == 200
                assert (torch.tensor(told["changed_picture"]) - picture.flatten()).abs().max() <= radius + 1e-6
                changed[where] += told["label"] != [row.label]
    assert changed["inside"] == 0
    assert changed["outside"] > 0
