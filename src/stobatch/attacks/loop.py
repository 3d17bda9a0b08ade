"""One gradient loop for every attack that follows gradients; an attack is only how it starts and how it steps.

The ball owns range and projection, the goal owns loss and success, the victim owns its randomness. Training runs
several attacks as one fused batch, each on its own slice, and takes the last points; evaluation runs one attack, keeps
the best point seen, and drops examples whose goal is reached.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from stobatch.attacks.ball import Ball, Size
from stobatch.attacks.goals import Goal
from stobatch.errors import DataError, ModelError, SettingError, UnitError
from stobatch.later import Later
from stobatch.models.folded import fold
from stobatch.models.validators import keeps_nothing
from stobatch.threads import count_workers, share_cores, single_thread

Scores = Callable[[Tensor], Tensor]
Memory = dict[str, Tensor]
"""The state of an attack between steps: tensors with one row for each example."""

_DROP_EVERY = 5
"""Steps between two drops of examples whose goal is reached: each drop synchronises with the GPU."""

_CHECKED = 16
"""Inputs whose scores are checked before an attack."""


class Victim(Protocol):
    """The model under attack. A randomised one takes fresh draws for every step."""

    @property
    def passes(self) -> int:
        """Network passes for one evaluation of one point."""

    @property
    def deterministic(self) -> bool:
        """Whether the function gives the same logits at a point every time."""

    def draw(self, generator: torch.Generator) -> Scores:
        """Return the function from points to logits that one step uses."""

    def draw_to_compare(self, generator: torch.Generator) -> Scores:
        """Return the same function with enough draws to compare points."""


@dataclass(frozen=True)
class Plain:
    """A deterministic function from points to logits."""

    scores: Scores
    passes: int = 1
    deterministic: bool = True

    def draw(self, generator: torch.Generator) -> Scores:
        return self.scores

    def draw_to_compare(self, generator: torch.Generator) -> Scores:
        return self.scores


@dataclass(frozen=True)
class StepInfo:
    """What an attack knows at its current points: n x input gradients, n objectives, the step's number from 0."""

    gradient: Tensor
    objective: Tensor
    step: int


class Attack(ABC):
    """A search for adversarial points in a ball. Frozen, so that an attack is a value."""

    @torch.no_grad()
    def run(self, victim: Victim, ball: Ball, goal: Goal, generator: torch.Generator, *, chunk: int = 357) -> Tensor:
        """Return the worst point found for each example; `chunk` is how many rows pass through the network at once.

        **Guarantee.** Every returned point is inside the ball and the input range, checked in float64; every gradient
        was finite. The caller evaluates the victim at the returned points.
        """
        with single_thread(wanted=_thread_safe(victim)):
            check_attack_inputs(victim, ball, goal, generator)
            followed = _folded(victim)
        rows = max(1, chunk // victim.passes)
        points = self.search(followed, ball, goal, generator, rows)

        def make_feasible(piece: slice) -> Tensor:
            return ball.part(piece).make_feasible(points[piece])

        return map_points(make_feasible, points, rows if points.is_cpu else len(points), concurrent=True)

    @abstractmethod
    def search(self, victim: Victim, ball: Ball, goal: Goal, generator: torch.Generator, chunk: int) -> Tensor:
        """Return points of the ball; `run` checks inputs and results."""


@dataclass(frozen=True)
class GradientAttack(Attack):
    """An attack that steps along gradients."""

    steps: int = 10
    relative_step: float = 1.0
    loss: str = "cross_entropy"

    def step_size(self, ball: Ball) -> Size:
        """Return relative_step · (path length of the norm) · radius / steps; a single step needs one radius only."""
        path_length = ball.geometry.path_length if self.steps > 1 else 1.0
        return self.relative_step * path_length * ball.size_for(ball.centre) / self.steps

    def offsets(self, ball: Ball, count: int, generator: torch.Generator) -> Tensor | None:
        """Return the starts of `count` examples in units of the radius; None starts them at their centres."""
        return None

    def move(self, ball: Ball, points: Tensor, info: StepInfo, memory: Memory) -> Tensor:
        """Return the next points, inside the ball, and update `memory` in place; by default one steepest step."""
        return ball.ascend(points, info.gradient, self.step_size(ball))

    def best_seen(self, memory: Memory) -> tuple[Tensor, Tensor] | None:
        """Return the best visited points and their objectives, where the attack stores them."""
        return None

    def search(self, victim: Victim, ball: Ball, goal: Goal, generator: torch.Generator, chunk: int) -> Tensor:
        goal, offsets = replace(goal, loss=self.loss), self.offsets(ball, len(ball.centre), generator)
        if not victim.deterministic:
            # One lucky draw is no success: no point is kept for it and no example dropped.
            assignments = [(self, slice(None))]
            return _run_steps(victim, ball, assignments, ball.at(offsets), goal, generator, chunk, None)

        def search(piece: slice) -> Tensor:
            starts = None if offsets is None else offsets[piece]
            return self._search_piece(victim, ball.part(piece), starts, goal.part(piece), generator)

        return map_points(search, ball.centre, chunk, concurrent=_thread_safe(victim))

    def _search_piece(
        self, victim: Victim, ball: Ball, offsets: Tensor | None, goal: Goal, generator: torch.Generator
    ) -> Tensor:
        """Return the best points of a chunk of rows, after all steps."""
        points, best = ball.at(offsets), Best(ball.centre)
        if offsets is not None:
            # An example that is misclassified at its centre counts as broken wherever the attack starts.
            at_centre = evaluate_scores(victim.draw(generator), ball.centre, goal, len(points))
            best.update(best.unreached(), ball.centre, *at_centre)
        _run_steps(victim, ball, [(self, slice(None))], points, goal, generator, len(points), best)
        return best.points


@torch.no_grad()
def craft(
    scores: Scores,
    ball: Ball,
    attacks: Sequence[GradientAttack],
    generator: torch.Generator,
    *,
    labels: Tensor | None = None,
    chunk: int = 833,
    piece: slice | None = None,
    batch_size: int | None = None,
    concurrent: bool = False,
    later: Later | None = None,
) -> Tensor:
    """Return adversarial points for training, an equal slice of the batch for each attack, all in the same passes.

    A NaN or infinite gradient is an error: at once, or with `later` when its owner reads it, so that no step waits for
    the GPU. Without labels, the model's own prediction at the current point is used: no true label leaks (Eq. 8).
    The ball may hold only a `piece` of a batch of `batch_size`: random starts are drawn for the whole batch, so a batch
    crafted in pieces has the same bits as one crafted at once. `concurrent` allows several threads to call `scores` at
    the same time; a module without state is recognised, and needs no flag.
    """
    piece = slice(0, len(ball.centre)) if piece is None else piece
    if len({attack.steps for attack in attacks}) > 1:
        raise SettingError(
            "attacks of one fused batch take different numbers of steps.", remedy="Give all the same number of steps."
        )
    assignments, points = [], []
    for attack, whole in zip(attacks, ensemble_slices(batch_size or piece.stop, len(attacks)), strict=True):
        offsets = attack.offsets(ball, whole.stop - whole.start, generator)
        first, last = max(whole.start, piece.start), min(whole.stop, piece.stop)
        if first < last:
            in_piece = slice(first - piece.start, last - piece.start)
            piece_offsets = None if offsets is None else offsets[first - whole.start : last - whole.start]
            assignments.append((attack, in_piece))
            points.append(ball.part(in_piece).at(piece_offsets))
    starts, goal, victim = torch.cat(points), Goal(labels), _folded(Plain(scores))

    def run_rows(rows: slice) -> Tensor:
        attacks_here = _restrict(assignments, rows)
        goal_here = goal.part(rows)
        return _run_steps(victim, ball.part(rows), attacks_here, starts[rows], goal_here, generator, chunk, None, later)

    return map_points(run_rows, starts, chunk, concurrent=concurrent or _thread_safe(victim))


def _folded(victim: Victim) -> Victim:
    """Return the same victim, faster where its network can be folded."""
    folded = fold(victim.scores) if isinstance(victim, Plain) else None
    return victim if folded is None else Plain(folded)


def _thread_safe(victim: Victim) -> bool:
    """Return whether several threads may call the victim at once."""
    return isinstance(victim, Plain) and keeps_nothing(victim.scores)


def map_chunks(work: Callable[[slice], Tensor], points: Tensor, chunk: int, *, concurrent: bool) -> Tensor:
    """Apply `work` to slices of the rows, at most `chunk` rows under way at a time, and join the results in order.

    Each slice takes all its steps before the next one begins, so that points, gradients and momenta stay in the cache.
    On a CPU several slices run at once, each in a thread of its own: threads that share one operation wait for each
    other at the end of every operation. An example's bits do not depend on the other rows of its slice, but for the
    few kernels that differ for less than 16 rows.
    """
    return _join(_run_pieces(work, *_cut(points, chunk, concurrent=concurrent)))


def map_points(work: Callable[[slice], Tensor], points: Tensor, chunk: int, *, concurrent: bool) -> Tensor:
    """Do the same where `work` returns points: each thread writes its own to their place, instead of one all."""
    workers, pieces = _cut(points, chunk, concurrent=concurrent)
    if len(pieces) == 1:
        return work(pieces[0])
    results = torch.empty_like(points)
    _run_pieces(lambda piece: results[piece].copy_(work(piece)), workers, pieces)
    return results


def _cut(points: Tensor, chunk: int, *, concurrent: bool) -> tuple[int, list[slice]]:
    """Return how many threads to use, and slices of the rows of almost equal size, so that no thread waits."""
    count = len(points)
    workers = count_workers(points.device, min(chunk, count)) if concurrent else 1
    rounds = max(1, -(-count // (chunk // workers * workers)))
    size = max(1, -(-count // (rounds * workers)))
    return workers, [slice(start, min(start + size, count)) for start in range(0, max(count, 1), size)]


def _run_pieces(work: Callable[[slice], Tensor], workers: int, pieces: list[slice]) -> list[Tensor]:
    with share_cores(workers) as run_all:
        return run_all(work, pieces)


def _restrict(assignments: Sequence[tuple[GradientAttack, slice]], rows: slice) -> list[tuple[GradientAttack, slice]]:
    """Return the attacks with a share in these rows, and each share as a slice of these rows."""
    overlaps = [(attack, max(own.start, rows.start), min(own.stop, rows.stop)) for attack, own in assignments]
    return [(attack, slice(a - rows.start, b - rows.start)) for attack, a, b in overlaps if a < b]


class Best:
    """The best point seen for each example: one that reaches the goal, else the one with the largest objective."""

    def __init__(self, points: Tensor) -> None:
        self.points = points.clone()
        self.objective = torch.full((len(points),), -torch.inf, dtype=points.dtype, device=points.device)
        self.reached = torch.zeros(len(points), dtype=torch.bool, device=points.device)

    def update(self, rows: Tensor, points: Tensor, objective: Tensor, reached: Tensor) -> None:
        """Replace the points of these rows where the new ones are better."""
        before = self.reached[rows]
        better = (reached & ~before) | ((reached == before) & (objective > self.objective[rows]))
        which = rows[better]
        self.points[which], self.objective[which] = points[better], objective[better]
        self.reached[which] = reached[better]

    def update_reached(self, rows: Tensor, points: Tensor, reached: Tensor) -> None:
        """Replace the points of rows that reach the goal for the first time; cheaper than `update`."""
        first_time = reached & ~self.reached[rows]
        which = rows[first_time]
        self.points[which], self.reached[which] = points[first_time], True

    def replace(self, rows: Tensor, points: Tensor) -> None:
        """Replace the points of these rows."""
        if len(rows) == len(self.points):
            self.points = points
        else:
            self.points[rows] = points

    def unreached(self) -> Tensor:
        """Return the rows whose goal is not reached."""
        return (~self.reached).nonzero()[:, 0]


def _run_steps(
    victim: Victim,
    ball: Ball,
    assignments: Sequence[tuple[GradientAttack, slice]],
    points: Tensor,
    goal: Goal,
    generator: torch.Generator,
    chunk: int,
    best: Best | None,
    later: Later | None = None,
) -> Tensor:
    """Take all steps and return the last points; with `best`, record every visited point and drop reached examples.

    `assignments` gives each attack its rows. All attacks take the same number of steps.
    """
    steps = assignments[0][0].steps
    memories: list[Memory] = [{} for _ in assignments]
    rows = torch.arange(len(points), device=points.device)
    gradient_sum = torch.zeros((), dtype=points.dtype, device=points.device)
    for step in range(steps):
        gradient, objective, reached = _objective_gradient(
            victim.draw(generator), points, goal, chunk, success=best is not None
        )
        gradient_sum += gradient.sum()
        if best is not None:
            best.update_reached(rows, points, reached)
        parts = []
        for (attack, where), memory in zip(assignments, memories, strict=True):
            info = StepInfo(gradient[where], objective[where], step)
            parts.append(attack.move(ball.part(where), points[where], info, memory))
        points = _join(parts)
        if best is not None and step % _DROP_EVERY == _DROP_EVERY - 1:
            left = ~best.reached[rows]
            if not bool(left.all()):
                rows, points, ball, goal = rows[left], points[left], ball.part(left), goal.part(left)
                memories = [{name: value[left] for name, value in memory.items()} for memory in memories]
            if not len(rows):
                break
    # sign(NaN) is 0: without this check a broken gradient would look like a robust model. A NaN or an infinity in any
    # gradient of any step makes this one sum NaN or infinite, so one test after the loop covers them all.
    if later is None:
        _require_finite([bool(torch.isfinite(gradient_sum))])
    else:
        later.ask(torch.isfinite(gradient_sum)[None], _require_finite)
    if best is not None and len(rows):
        stored = [attack.best_seen(memory) for (attack, _), memory in zip(assignments, memories, strict=True)]
        competes = any(pair is not None for pair in stored)
        _compare_last(victim.draw(generator), best, rows, points, goal, chunk, all_compete=competes)
        for (_, where), pair in zip(assignments, stored, strict=True):
            if pair is not None:
                best.update(rows[where], *pair, torch.zeros_like(rows[where], dtype=torch.bool))
    return points


def _compare_last(
    scores: Scores, best: Best, rows: Tensor, points: Tensor, goal: Goal, chunk: int, *, all_compete: bool
) -> None:
    """Record the last points. They are evaluated, one more pass, only where they compete; else they are the best."""
    competes = best.reached[rows] | (best.objective[rows] > -torch.inf) | all_compete
    if not bool(competes.any()):
        best.replace(rows, points)
        return
    best.points[rows[~competes]] = points[~competes]
    last = points[competes]
    best.update(rows[competes], last, *evaluate_scores(scores, last, goal.part(competes), chunk))


def _require_finite(finite: list[bool]) -> None:
    if not all(finite):
        raise ModelError(
            "an attack met a gradient that is NaN or infinite.", remedy="Lower the learning rate or check the inputs."
        )


def _objective_gradient(
    scores: Scores, points: Tensor, goal: Goal, chunk: int, *, success: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradient and value of the objective, and with `success` whether the goal is reached, chunk by chunk.

    Gradients are taken with respect to the inputs only; the model's own `.grad` is never touched.
    """
    gradients, objectives, reached = [], [], []
    for start in range(0, len(points), chunk):
        which = slice(start, start + chunk)
        leaf = points[which].detach().requires_grad_()
        with torch.enable_grad():
            logits = scores(leaf)
            objective = goal.objective(logits, which)
            total = objective.sum()
        if not total.requires_grad:
            raise ModelError(
                "the model's scores have no gradient with respect to its inputs.",
                why="A threshold, rounding or detach() in it stops the backward pass.",
                remedy="Attack with square, which needs no gradients.",
            )
        gradients.append(torch.autograd.grad(total, leaf)[0])
        objectives.append(objective.detach().to(points.dtype))
        if success:
            reached.append(goal.part(which).reached(logits.detach()))
    return _join(gradients), _join(objectives), _join(reached) if success else objectives[0]


@torch.no_grad()
def evaluate_scores(
    scores: Scores, points: Tensor, goal: Goal, chunk: int, *, concurrent: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the value of the objective and whether the goal is reached, without gradients."""
    logits = map_chunks(lambda piece: scores(points[piece]), points, chunk, concurrent=concurrent)
    objective = goal.objective(logits, slice(None)).to(points.dtype)
    require_no_nan(objective)
    return objective, goal.reached(logits)


def require_no_nan(scores: Tensor) -> None:
    """Raise at NaN scores: their argmax is no prediction, and would count as a success."""
    if bool(scores.isnan().any()):
        raise ModelError("an attack met scores that are NaN.", remedy="Check the model's outputs inside the ball.")


def evaluate_victim(
    victim: Victim, points: Tensor, goal: Goal, generator: torch.Generator, chunk: int
) -> tuple[Tensor, Tensor]:
    """Return `evaluate_scores` with enough draws to compare points; no point of a randomised victim is a success."""
    scores = victim.draw_to_compare(generator)
    objective, reached = evaluate_scores(scores, points, goal, chunk, concurrent=_thread_safe(victim))
    return objective, reached & victim.deterministic


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@torch.no_grad()
def check_attack_inputs(victim: Victim, ball: Ball, goal: Goal, generator: torch.Generator) -> None:
    """Raise where an accuracy would be silently wrong: other units, NaNs, labels out of range, probabilities."""
    centre, limits = ball.centre, ball.radius.range
    if not len(centre):
        raise DataError("there are no inputs to attack.", remedy="Give at least one.")
    # Not equal where a value is NaN.
    if not torch.equal(torch.clamp(centre, ball.lower, ball.upper), centre):
        if not bool(centre.isfinite().all()):
            raise DataError("inputs to attack are NaN or infinite.", remedy="Remove NaNs and infinities.")
        raise UnitError(
            f"inputs run from {float(centre.min()):g} to {float(centre.max()):g}, the radius is over {limits}.",
            remedy=f"Scale the inputs to {limits}, or give the radius over their own range.",
        )
    # A copy of the generator's state, so that this check does not change what the attack draws.
    probe = torch.Generator()
    probe.set_state(generator.get_state())
    few = centre[:_CHECKED]
    logits = victim.draw(probe)(few)
    if logits.ndim != 2 or len(logits) != len(few):
        raise ModelError(
            f"the model returns {tuple(logits.shape)} for {len(few)} inputs.",
            remedy="Return one row of logits for each input.",
        )
    if not bool(logits.isfinite().all()):
        raise ModelError("the model returns scores that are NaN or infinite.", remedy="Train it again.")
    sums = logits.sum(1)
    if bool((logits >= 0).all()) and bool((sums - 1).abs().max() < 1e-3):
        raise ModelError(
            "the model returns probabilities, not logits.",
            why="Their gradients vanish where the model is sure, so every attack would look weak.",
            remedy="Return the scores before the softmax, or torch.log of the probabilities.",
        )
    goal.check_labels(len(centre), logits.shape[1])


def ensemble_slices(batch_size: int, num_attacks: int) -> list[slice]:
    """Return a slice of m/|A| consecutive examples for each attack (Algorithm 1, line 10)."""
    if batch_size % num_attacks:
        below = batch_size - batch_size % num_attacks
        raise SettingError(
            f"batch_size={batch_size} is not a multiple of the {num_attacks} attacks.",
            why="Algorithm 1 gives each attack an equal share.",
            remedy=f"Use {below} or {below + num_attacks}." if below else f"Use {num_attacks}.",
        )
    share = batch_size // num_attacks
    return [slice(i * share, (i + 1) * share) for i in range(num_attacks)]
