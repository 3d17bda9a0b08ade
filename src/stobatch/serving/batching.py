"""One thread that answers everybody: what may pass together does, and nobody waits for one client's thousand pictures.

A question is cut into parts of a few pictures. Where nothing is drawn, parts of several clients pass in one batch: each
answer hangs on its own picture alone. Votes are not batched across clients: every question has noise of its own, fresh
and secret, that no other client's answer can tell anything about. Work goes in steps, in turns, and after each step
those whose deadline has come are answered with what is proved.
"""

from __future__ import annotations

import heapq
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from time import monotonic
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stobatch.attacks import Ball, Budget, Expectation, Goal, Plain, Victim, make_attack
from stobatch.attacks.loop import require_no_nan
from stobatch.errors import StobatchError
from stobatch.loading import TrainedModel
from stobatch.prediction import best_kind, describe_kind
from stobatch.results import Kind
from stobatch.seeds import Seeds
from stobatch.types import PAPER_RANGE, Norm, Radius, Status
from stobatch.verifier import Search, Verifier

ROWS = 32
"""Pictures of one part, and of one batch: as many as bounds look at together on a CPU."""
AT_ONCE = 4
"""Batches that are worked on in turns."""
STEP_ASIDE = 4
"""A question's next part stands behind this many later questions."""
ATTACKS = ("apgd_ce", "apgd_dlr", "square")
_BUDGET = Budget(steps=40, restarts=1, queries=200)
_SAMPLES = 16
"""Draws of noise at a step of an attack on a vote."""
_BUDGET_ON_VOTES = Budget(steps=20, restarts=1, queries=20)
"""Each look at a vote is as many passes as there are draws, and everybody waits while an attack runs."""


class QueueFullError(StobatchError):
    """More work waits than may."""

    def __init__(self) -> None:
        super().__init__("the server has more to do than it takes on.", remedy="Ask again in a moment.")


@dataclass(frozen=True)
class Question:
    """What is asked about a batch of pictures."""

    radius: float | None = None
    """Only whether labels hold at this one; else the largest is looked for."""
    draws: int | None = None
    """At most so many of a vote."""
    deadline: float | None = None
    """By `monotonic`: what is proved then is the answer."""
    attack: bool = False
    """Look for a change within the radius that alters the label, instead of a proof that there is none."""


@dataclass(frozen=True)
class Answer:
    """Columns with one entry for each picture."""

    label: NDArray[np.int64]
    abstains: NDArray[np.bool_]
    scores: NDArray[np.float64]
    radii: dict[str, NDArray[np.float64]]
    """By the name of the kind of certificate."""
    draws: NDArray[np.int64]
    finished: NDArray[np.bool_]
    """False where a deadline came first."""
    points: NDArray[np.float32] | None = None
    """Of an attack: the changed pictures."""

    @classmethod
    def joined(cls, parts: list[Answer]) -> Answer:
        if len(parts) == 1:
            return parts[0]
        names = ("label", "abstains", "scores", "draws", "finished")
        columns: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
        radii = {kind: np.concatenate([part.radii[kind] for part in parts]) for kind in parts[0].radii}
        return cls(**columns, radii=radii)


class ServedModel:
    """A model under a name, and what is said of it with every answer."""

    def __init__(self, name: str, model: TrainedModel) -> None:
        self.name, self.model, self.guarantee = name, model, model.guarantee
        self.verifier = lru_cache(maxsize=64)(model.verifier_for)
        refuted = model.refuted_kinds()
        own = self.verifier(None)
        self.kinds: tuple[Kind, ...] = tuple(describe_kind(kind, refuted) for kind in own.kinds) if own else ()
        self.kind: Kind | None = describe_kind(best_kind(own.kinds), refuted) if own else None
        self.draws_nothing = own is None or own.draws_nothing
        self.most_draws = 0 if self.draws_nothing else model.config.certification.noise_draws

    @property
    def warning(self) -> str | None:
        """Return what every answer has to say of this run, if anything speaks against it."""
        reasons = {Status.VOID: "the seed of this run is public", Status.REFUTED: "what this run claims was refuted"}
        status, warnings = self.guarantee.status, list[str]()
        if status in reasons:
            warnings.append(f"{reasons[status]}: its guarantee about training data is {status}")
        if self.kind is not None and self.kind.status is Status.REFUTED:
            warnings.append("an audit broke certificates of this kind: its radii are refuted")
        return "; ".join(warnings) or None

    def certifier(self, question: Question) -> Verifier | None:
        verifier = self.verifier(question.radius)
        if verifier is None or self.draws_nothing:
            return verifier
        return verifier.with_draws(min(question.draws or self.most_draws, self.most_draws))


@dataclass(eq=False)
class Ticket:
    """A question under way; `tell` hears of its answer, or of what went wrong, in the working thread."""

    model: ServedModel
    inputs: Tensor
    question: Question
    tell: Callable[[Answer | Exception], None]
    gone: bool = False
    """Whether nobody waits for the answer any more."""
    _answers: dict[int, Answer] = field(default_factory=dict)

    @property
    def parts(self) -> int:
        return -(-len(self.inputs) // ROWS)

    def size(self, part: int) -> int:
        return min(ROWS, len(self.inputs) - part * ROWS)

    def rows(self, part: int) -> Tensor:
        return self.inputs[part * ROWS : (part + 1) * ROWS]

    def give(self, part: int, answer: Answer) -> None:
        self._answers[part] = answer
        if len(self._answers) == self.parts and not self.gone:
            self.gone = True
            self.tell(Answer.joined([self._answers[place] for place in range(self.parts)]))

    def fail(self, error: Exception) -> None:
        if not self.gone:
            self.gone = True
            self.tell(error)

    def is_late(self, now: float) -> bool:
        return self.question.deadline is not None and now >= self.question.deadline


Part = tuple[Ticket, int]
Key = tuple[str, float | None] | int
"""What passes together: a model and a radius, or one question by itself."""


class Batcher:
    """The queue, and the thread that works it off."""

    def __init__(self, most_rows: int, *, on_batch: Callable[[str, int], None] = lambda name, rows: None) -> None:
        self.most_rows, self.waiting_rows, self._on_batch = most_rows, 0, on_batch
        self._waiting: dict[Key, list[tuple[float, int, Part]]] = {}
        self._order, self._wake, self._stopping = count(), threading.Condition(), False
        self._threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._work, name="stobatch-batches", daemon=True)
        self._thread.start()

    def submit(
        self, model: ServedModel, inputs: Tensor, question: Question, tell: Callable[[Answer | Exception], None]
    ) -> Ticket:
        """Take a question on, or raise `QueueFullError`."""
        ticket = Ticket(model, inputs, question, tell)
        shared = model.draws_nothing and not question.attack
        with self._wake:
            if self._stopping or self.waiting_rows + len(inputs) > self.most_rows:
                raise QueueFullError
            self.waiting_rows += len(inputs)
            place = next(self._order)
            # Bounds look at each row by itself, so rows may share a batch where the question is the same; `predict`
            # gives the same bits for them. Deadlines differ and do not matter: who is late leaves the batch. A vote or
            # an attack draws, and has a key, so a batch and a generator, of its own.
            key: Key = (model.name, question.radius) if shared else place
            queue = self._waiting.setdefault(key, [])
            # Part p stands where a question that came STEP_ASIDE * p places later would: large questions let small ones
            # pass, and still move up with every one that does.
            for part in range(ticket.parts):
                heapq.heappush(queue, (place + STEP_ASIDE * part, place, (ticket, part)))
            self._wake.notify()
        return ticket

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """Finish what was taken on, and take on nothing more."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    def _work(self) -> None:
        # How many threads an operation takes is a setting of the thread that calls it.
        torch.set_num_threads(self._threads)
        jobs: deque[_Job] = deque()
        active: dict[int, Key] = {}
        while True:
            with self._wake:
                while not jobs and not self._waiting:
                    if self._stopping:
                        return
                    self._wake.wait()
                while len(jobs) < AT_ONCE and (batch := self._take(set(active.values()))):
                    key, parts = batch
                    if parts:
                        jobs.append(_job(parts))
                        active[id(jobs[-1])] = key
                        self._on_batch(parts[0][0].model.name, jobs[-1].parts[-1][2].stop)
            if jobs:
                job = jobs.popleft()
                if job.step():
                    jobs.append(job)
                else:
                    del active[id(job)]

    def _take(self, active: set[Key]) -> tuple[Key, list[Part]] | None:
        """Take the parts of a batch off the queue, of those that have waited longest and are not worked on."""
        ready = [key for key in self._waiting if key not in active]
        if not ready:
            return None
        key = min(ready, key=lambda key: self._waiting[key][0])
        queue, parts, rows = self._waiting[key], list[Part](), 0
        while queue and rows + (size := queue[0][2][0].size(queue[0][2][1])) <= ROWS:
            ticket, part = heapq.heappop(queue)[2]
            self.waiting_rows -= size
            if not ticket.gone:
                parts.append((ticket, part))
                rows += size
        if not queue:
            del self._waiting[key]
        return key, parts


def _job(parts: list[Part]) -> _Job:
    placed, start = [], 0
    for ticket, part in parts:
        stop = start + ticket.size(part)
        placed.append((ticket, part, slice(start, stop)))
        start = stop
    return (_Attacking if parts[0][0].question.attack else _Certifying)(placed)


class _Job(ABC):
    """A batch that is worked on."""

    _begun = False

    def __init__(self, parts: list[tuple[Ticket, int, slice]]) -> None:
        self.parts, self.model, self.question = parts, parts[0][0].model, parts[0][0].question
        self.network = self.model.model.network

    def step(self) -> bool:
        """Do a little, answer whom it can; return whether there is more to do."""
        try:
            with torch.no_grad():
                if not self._begun:
                    self._begun = True
                    self._begin()
                return self._step()
        except Exception as error:  # one batch's failure is not the end of the others
            for ticket, _, _ in self.parts:
                ticket.fail(error)
            return False

    def _begin(self) -> None:
        inputs = torch.cat([ticket.rows(part) for ticket, part, _ in self.parts])
        self.inputs = inputs.to(self.network.device, self.network.dtype)
        self.generator = Seeds.secret().generator("predict")

    @abstractmethod
    def _step(self) -> bool: ...


class _Certifying(_Job):
    """Labels with certificates."""

    search: Search | None = None

    def _begin(self) -> None:
        super()._begin()
        self.scores = self.network(self.inputs).double().cpu()
        if (verifier := self.model.certifier(self.question)) is not None:
            farthest = self.question.radius is None
            # To read a vote when the clock says so is optional stopping: Clopper-Pearson's bound holds at a number of
            # draws that was fixed, a confidence sequence at all of them at once, at a price. So whether an answer may
            # be cut short is settled here, before the first draw, and not when a deadline comes.
            anytime = any(ticket.question.deadline is not None for ticket, _, _ in self.parts)
            self.search = verifier.search(self.inputs, self.generator, farthest=farthest, anytime=anytime)

    def _step(self) -> bool:
        return self._answer(more=self.search is not None and self.search.step())

    def _answer(self, *, more: bool) -> bool:
        """Answer those who are done or late."""
        now, left, found = monotonic(), [], None
        for ticket, part, rows in self.parts:
            if more and not ticket.gone and not ticket.is_late(now):
                left.append((ticket, part, rows))
                continue
            if not ticket.gone:
                found = found or self._read(finished=not more)
                ticket.give(part, _rows_of(found, rows))
            if more and self.search is not None:
                self.search.drop(rows)
        self.parts = left
        return more and bool(left)

    def _read(self, *, finished: bool) -> Answer:
        size, done = len(self.inputs), np.full(len(self.inputs), finished)
        if self.search is None:
            nothing = np.zeros(size, dtype=np.int64)
            return Answer(self.scores.argmax(1).numpy(), nothing > 0, self.scores.numpy(), {}, nothing, done)
        found = self.search.read()
        columns = found.columns()
        abstains = found.abstain
        # A claim that stands beside the answer stands there whether or not anything could be proved.
        beside = {kind.name for kind in self.model.kinds if kind.status is Status.CLAIMED and kind != self.model.kind}
        radii = {
            kind.name: np.where(abstains & (kind.name not in beside), 0.0, columns[kind.column]).astype(np.float64)
            for kind in self.model.kinds
        }
        draws = columns.get("draws", np.full(size, self._fixed_draws()))
        return Answer(found.label, abstains, self.scores.numpy(), radii, draws, done)

    def _fixed_draws(self) -> int:
        most = self.model.most_draws
        return min(self.question.draws or most, most)


class _Attacking(_Job):
    """The strongest change that several attacks find, one attack a step; an attack that fails proves nothing."""

    def _begin(self) -> None:
        super()._begin()
        self.names, self.points, self.labels = deque(ATTACKS), self.inputs.clone(), self._label(self.inputs)

    def _step(self) -> bool:
        if all(ticket.gone for ticket, _, _ in self.parts):
            return False
        assert self.question.radius is not None
        verifier = self.model.verifier(None)
        samples = verifier.samples() if verifier else {}
        victim: Victim = Expectation(samples["vote"], _SAMPLES) if samples else Plain(self.network)
        norm = Norm(self.model.kind.norm) if self.model.kind else Norm.LINF
        ball = Ball.around(self.inputs, Radius(self.question.radius, norm, PAPER_RANGE))
        attack = make_attack(self.names.popleft(), _BUDGET_ON_VOTES if samples else _BUDGET)
        resisting = (self._label(self.points) == self.labels).nonzero().squeeze(1)
        if len(resisting):
            goal = Goal(self.labels[resisting])
            self.points[resisting] = attack.run(victim, ball.part(resisting), goal, self.generator)
        late = any(ticket.is_late(monotonic()) for ticket, _, _ in self.parts)
        if len(resisting) and self.names and not late:
            return True
        answer = self._answer(finished=not late)
        for ticket, part, rows in self.parts:
            ticket.give(part, _rows_of(answer, rows))
        return False

    def _label(self, points: Tensor) -> Tensor:
        """Return what the deployed function says; of a vote what a few hundred draws say."""
        verifier = self.model.verifier(None)
        if verifier is None or verifier.draws_nothing:
            scores: Tensor = self.network(points)
            require_no_nan(scores)
            return scores.argmax(1)
        few = verifier.with_draws(min(200, self.model.most_draws))
        return torch.from_numpy(few.verify_farthest(points, self.generator).label).to(points.device)

    def _answer(self, *, finished: bool) -> Answer:
        size = len(self.inputs)
        return Answer(
            label=self._label(self.points).cpu().numpy(),
            abstains=np.zeros(size, dtype=bool),
            scores=self.network(self.points).double().cpu().numpy(),
            radii={},
            draws=np.zeros(size, dtype=np.int64),
            finished=np.full(size, finished),
            points=self.points.float().cpu().numpy(),
        )


def _rows_of(answer: Answer, rows: slice) -> Answer:
    return Answer(
        answer.label[rows],
        answer.abstains[rows],
        answer.scores[rows],
        {kind: sizes[rows] for kind, sizes in answer.radii.items()},
        answer.draws[rows],
        answer.finished[rows],
        None if answer.points is None else answer.points[rows],
    )
