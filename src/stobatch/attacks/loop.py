"""One gradient loop for every attack that follows gradients; an attack is only how it starts and how it steps.

The ball owns range and projection, the goal owns loss and success, the victim owns its randomness. Training runs
several attacks as one fused batch, each on its own slice, and takes the last points; evaluation runs one attack, keeps
the best point seen, and lets go of examples whose goal is reached.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from stobatch.attacks.ball import Ball, Size
from stobatch.attacks.goals import Goal
from stobatch.errors import DataError, ModelError, SettingError, UnitError
from stobatch.later import Later
from stobatch.models.validators import keeps_nothing

Scores = Callable[[Tensor], Tensor]
Memory = dict[str, Tensor]
"""What an attack remembers from step to step: tensors with one row for each example."""

_LET_GO_EVERY = 5
"""Steps between two looks at which examples still resist; a look costs a synchronisation on a GPU."""
_FEWEST_ROWS = 100
"""Rows below which a thread of its own does not pay for a piece: the work between two operations begins to count."""


class Victim(Protocol):
    """What is attacked. A randomised one draws anew for every step."""

    @property
    def passes(self) -> int:
        """Passes through the network that one evaluation of one point costs."""

    @property
    def deterministic(self) -> bool:
        """Whether one look at a point settles what the function says there."""

    def draw(self, generator: torch.Generator) -> Scores:
        """Return the function from points to logits that holds for one step."""

    def draw_to_judge(self, generator: torch.Generator) -> Scores:
        """Return the same with as many draws as it takes to compare points."""


@dataclass(frozen=True)
class Plain:
    """A deterministic function from points to logits."""

    scores: Scores
    passes: int = 1
    deterministic: bool = True

    def draw(self, generator: torch.Generator) -> Scores:
        return self.scores

    def draw_to_judge(self, generator: torch.Generator) -> Scores:
        return self.scores


@dataclass(frozen=True)
class StepInfo:
    """What an attack sees at its present points."""

    gradient: Tensor
    objective: Tensor
    step: int


class Attack(ABC):
    """A way to find bad points in a ball. Frozen, so that an attack is a value."""

    @torch.no_grad()
    def run(self, victim: Victim, ball: Ball, goal: Goal, generator: torch.Generator, *, chunk: int = 357) -> Tensor:
        """Return the worst point found for each example; `chunk` is how many rows pass through the network at once.

        **Guarantee.** Every returned point is inside the ball and the input range, checked in float64; every gradient
        was finite. What the victim says at the last point is for the caller to ask.
        """
        require_sound(victim, ball, goal, generator)
        return ball.settle(self.search(victim, ball, goal, generator, max(1, chunk // victim.passes)))

    @abstractmethod
    def search(self, victim: Victim, ball: Ball, goal: Goal, generator: torch.Generator, chunk: int) -> Tensor:
        """Return points of the ball; `run` checks what goes in and what comes out."""


@dataclass(frozen=True)
class GradientAttack(Attack, ABC):
    """An attack that walks along gradients."""

    steps: int = 10
    relative_step: float = 1.0
    loss: str = "cross_entropy"

    def step_size(self, ball: Ball) -> Size:
        """Return a share of the way that the norm needs; a single step goes straight."""
        path = ball.geometry.path if self.steps > 1 else 1.0
        return self.relative_step * path * ball.size_for(ball.centre) / self.steps

    def offsets(self, ball: Ball, count: int, generator: torch.Generator) -> Tensor | None:
        """Return where `count` examples start, relative to centres and radii; None starts them at their centres."""
        return None

    @abstractmethod
    def move(self, ball: Ball, points: Tensor, sight: StepInfo, memory: Memory) -> Tensor:
        """Return the next points, inside the ball; may change what it remembers."""

    def kept(self, memory: Memory) -> tuple[Tensor, Tensor] | None:
        """Return points that may be better than the last ones, and their objectives, if the attack keeps such."""
        return None

    def search(self, victim: Victim, ball: Ball, goal: Goal, generator: torch.Generator, chunk: int) -> Tensor:
        goal, points = replace(goal, loss=self.loss), ball.at(self.offsets(ball, len(ball.centre), generator))
        if not victim.deterministic:
            # A lucky draw proves nothing: no point is kept for it and no example let go.
            return _walk(victim, ball, [(self, slice(None))], points, goal, generator, chunk, None)

        def search(piece: slice) -> Tensor:
            return self._search_piece(victim, ball, points, goal, generator, piece)

        return piece_by_piece(search, points, chunk, concurrent=_concurrent(victim))

    def _search_piece(
        self, victim: Victim, ball: Ball, points: Tensor, goal: Goal, generator: torch.Generator, piece: slice
    ) -> Tensor:
        """Return the best points for rows that pass through the network at once, all steps one after the other."""
        ball, points, goal = ball.part(piece), points[piece], goal.part(piece)
        best = Best(ball.centre)
        if not torch.equal(points, ball.centre):
            # An example that is lost already must not be called robust because the attack started elsewhere.
            best.see(best.resisting(), ball.centre, *outcome(victim.draw(generator), ball.centre, goal, len(points)))
        _walk(victim, ball, [(self, slice(None))], points, goal, generator, len(points), best)
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
    """Adversarial points for training, an equal slice of the batch for each attack, all in the same passes.

    A gradient that is not a number is an error: at once, or on a GPU when the owner of `later` looks.
    Without labels the model's own prediction at the present point is used, so that no true label leaks (Eq. 8).
    The ball may hold only a `piece` of a batch of `batch_size`: draws are made for the whole batch, so pieces that are
    crafted apart are those of the whole. `concurrent` says that several threads may ask for scores at once; of a module
    that is known to keep nothing it need not be said.
    """
    piece = slice(0, len(ball.centre)) if piece is None else piece
    if len({attack.steps for attack in attacks}) > 1:
        raise SettingError("attacks of one fused batch take different numbers of steps.", remedy="Give all the same.")
    shares, points = [], []
    for attack, whole in zip(attacks, ensemble_slices(batch_size or piece.stop, len(attacks)), strict=True):
        offsets = attack.offsets(ball, whole.stop - whole.start, generator)
        first, last = max(whole.start, piece.start), min(whole.stop, piece.stop)
        if first < last:
            here = slice(first - piece.start, last - piece.start)
            own = None if offsets is None else offsets[first - whole.start : last - whole.start]
            shares.append((attack, here))
            points.append(ball.part(here).at(own))
    starts, goal, victim = torch.cat(points), Goal(labels), Plain(scores)

    def walk(rows: slice) -> Tensor:
        own = _within(shares, rows)
        return _walk(victim, ball.part(rows), own, starts[rows], goal.part(rows), generator, chunk, None, later)

    return piece_by_piece(walk, starts, chunk, concurrent=concurrent or _concurrent(victim))


def _concurrent(victim: Victim) -> bool:
    """Return whether several threads may ask it at once."""
    return isinstance(victim, Plain) and keeps_nothing(victim.scores)


def piece_by_piece(work: Callable[[slice], Tensor], points: Tensor, chunk: int, *, concurrent: bool) -> Tensor:
    """Return what the work makes of pieces of the rows, of which at most `chunk` are under way at a time.

    Each piece takes all its steps before the next one begins, so that points, gradients and momenta stay in the cache.
    On a CPU several pieces go at once, each in a thread of its own: threads that share one operation wait for each
    other at the end of every one. An example's bits do not depend on the rows beside it.
    """
    cores, count = torch.get_num_threads(), len(points)
    # Mixed precision and whatever watches operations are settings of the calling thread: there it stays at one.
    single = not (concurrent and points.is_cpu) or torch.is_autocast_enabled("cpu")
    workers = 1 if single else max(1, min(cores, chunk // _FEWEST_ROWS, count // _FEWEST_ROWS))
    if workers == 1:
        return _join([work(piece) for piece in _pieces(count, chunk)])
    # Pieces of equal size, equally many for every thread, so that none waits at the end.
    rounds = -(-count // (chunk // workers * workers))
    pieces = _pieces(count, -(-count // (rounds * workers)))
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(cores // workers,)) as pool:
            return _join(list(pool.map(torch.no_grad()(work), pieces)))
    finally:
        # What a thread sets for itself is also what threads that begin later start from.
        torch.set_num_threads(cores)


def _pieces(count: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, count)) for start in range(0, count, chunk)]


def _within(shares: Sequence[tuple[GradientAttack, slice]], rows: slice) -> list[tuple[GradientAttack, slice]]:
    """Return the attacks that own some of these rows, and which, counted from the first of them."""
    cut = [(attack, max(own.start, rows.start), min(own.stop, rows.stop)) for attack, own in shares]
    return [(attack, slice(a - rows.start, b - rows.start)) for attack, a, b in cut if a < b]


class Best:
    """The best point seen for each example: one that reaches the goal, else the one with the largest objective."""

    def __init__(self, points: Tensor) -> None:
        self.points = points.clone()
        self.objective = torch.full((len(points),), -torch.inf, dtype=points.dtype, device=points.device)
        self.reached = torch.zeros(len(points), dtype=torch.bool, device=points.device)

    def see(self, rows: Tensor, points: Tensor, objective: Tensor, reached: Tensor) -> None:
        """Take the points of these rows where they are better."""
        before = self.reached[rows]
        better = (reached & ~before) | ((reached == before) & (objective > self.objective[rows]))
        which = rows[better]
        self.points[which], self.objective[which] = points[better], objective[better]
        self.reached[which] = reached[better]

    def note(self, rows: Tensor, points: Tensor, reached: Tensor) -> None:
        """Take the points of these rows that reach the goal for the first time; cheaper than `see`."""
        fresh = reached & ~self.reached[rows]
        which = rows[fresh]
        self.points[which], self.reached[which] = points[fresh], True

    def resisting(self) -> Tensor:
        """Return the rows whose goal is not reached."""
        return (~self.reached).nonzero()[:, 0]


def _walk(
    victim: Victim,
    ball: Ball,
    shares: Sequence[tuple[GradientAttack, slice]],
    points: Tensor,
    goal: Goal,
    generator: torch.Generator,
    chunk: int,
    best: Best | None,
    later: Later | None = None,
) -> Tensor:
    """Return the loop. With `best` every visited point is judged, and examples that are done are let go."""
    steps = shares[0][0].steps
    memories: list[Memory] = [{} for _ in shares]
    rows = torch.arange(len(points), device=points.device)
    health = torch.zeros((), dtype=points.dtype, device=points.device)
    for step in range(steps):
        gradient, objective, reached = _look(victim.draw(generator), points, goal, chunk, success=best is not None)
        health += gradient.sum()
        if best is not None:
            best.note(rows, points, reached)
        parts = []
        for (attack, where), memory in zip(shares, memories, strict=True):
            sight = StepInfo(gradient[where], objective[where], step)
            parts.append(attack.move(ball.part(where), points[where], sight, memory))
        points = parts[0] if len(parts) == 1 else torch.cat(parts)
        if best is not None and step % _LET_GO_EVERY == _LET_GO_EVERY - 1:
            resist = ~best.reached[rows]
            if not bool(resist.all()):
                rows, points, ball, goal = rows[resist], points[resist], ball.part(resist), goal.part(resist)
                memories = [{name: value[resist] for name, value in memory.items()} for memory in memories]
            if not len(rows):
                break
    # sign(NaN) is 0: without this check a broken gradient would look like a robust model. One look, after the loop.
    if later is None:
        _require_finite([bool(torch.isfinite(health))])
    else:
        later.ask(torch.isfinite(health)[None], _require_finite)
    if best is not None and len(rows):
        kept = [attack.kept(memory) for (attack, _), memory in zip(shares, memories, strict=True)]
        # Where no other point was reached or has a value, the last one is taken whatever its value: no pass is spent.
        rivals = best.reached[rows] | (best.objective[rows] > -torch.inf) | any(other is not None for other in kept)
        best.points[rows[~rivals]] = points[~rivals]
        if bool(rivals.any()):
            last = points[rivals]
            best.see(rows[rivals], last, *outcome(victim.draw(generator), last, goal.part(rivals), chunk))
        for (_, where), other in zip(shares, kept, strict=True):
            if other is not None:
                best.see(rows[where], *other, torch.zeros_like(rows[where], dtype=torch.bool))
    return points


def _require_finite(sound: list[bool]) -> None:
    if not all(sound):
        raise ModelError(
            "an attack met a gradient that is not a number.", remedy="Lower the learning rate or check the inputs."
        )


def _look(scores: Scores, points: Tensor, goal: Goal, chunk: int, *, success: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient and value of the objective, and whether the goal is reached, chunk by chunk.

    Gradients are taken for the inputs only; the model's own `.grad` is never touched.
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
                why="A threshold, rounding or detach() in it cuts the way back.",
                remedy="Attack with square, which needs no gradients.",
            )
        gradients.append(torch.autograd.grad(total, leaf)[0])
        objectives.append(objective.detach().to(points.dtype))
        if success:
            reached.append(goal.part(which).reached(logits.detach()))
    return _join(gradients), _join(objectives), _join(reached) if success else objectives[0]


@torch.no_grad()
def outcome(
    scores: Scores, points: Tensor, goal: Goal, chunk: int, *, concurrent: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the value of the objective and whether the goal is reached, without gradients."""
    logits = piece_by_piece(lambda piece: scores(points[piece]), points, chunk, concurrent=concurrent)
    objective = goal.objective(logits, slice(None)).to(points.dtype)
    require_numbers(objective)
    return objective, goal.reached(logits)


def require_numbers(scores: Tensor) -> None:
    """Raise at scores that are no numbers: the largest of them is no prediction, and would count as a success."""
    if bool(scores.isnan().any()):
        raise ModelError("an attack met scores that are not numbers.", remedy="Check the model inside of the ball.")


def appraise(
    victim: Victim, points: Tensor, goal: Goal, generator: torch.Generator, chunk: int
) -> tuple[Tensor, Tensor]:
    """`outcome` for comparing points. Of a randomised victim no point is ever called a success by a few draws."""
    scores = victim.draw_to_judge(generator)
    objective, reached = outcome(scores, points, goal, chunk, concurrent=_concurrent(victim))
    return objective, reached & victim.deterministic


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@torch.no_grad()
def require_sound(victim: Victim, ball: Ball, goal: Goal, generator: torch.Generator) -> None:
    """Refuse what would end in a quietly wrong accuracy: other units, NaNs, labels out of range, probabilities."""
    centre, limits = ball.centre, ball.radius.range
    if not bool(centre.isfinite().all()):
        raise DataError("inputs to attack are not numbers.", remedy="Remove NaNs and infinities.")
    if not len(centre):
        raise DataError("there are no inputs to attack.", remedy="Give at least one.")
    if not bool(((centre >= ball.lower) & (centre <= ball.upper)).all()):
        raise UnitError(
            f"inputs run from {float(centre.min()):g} to {float(centre.max()):g}, the radius is over {limits}.",
            remedy=f"Scale the inputs to {limits}, or give the radius over their own range.",
        )
    # A copy of the state, so that looking does not change what the attack draws.
    probe = torch.Generator()
    probe.set_state(generator.get_state())
    logits = victim.draw(probe)(centre[:64])
    if logits.ndim != 2 or len(logits) != len(centre[:64]):
        raise ModelError(
            f"the model returns {tuple(logits.shape)} for {len(centre[:64])} inputs.",
            remedy="Return one row of logits for each input.",
        )
    if not bool(logits.isfinite().all()):
        raise ModelError("the model returns scores that are not numbers.", remedy="Train it again.")
    sums = logits.sum(1)
    if bool((logits >= 0).all()) and bool((sums - 1).abs().max() < 1e-3):
        raise ModelError(
            "the model returns probabilities where logits are meant.",
            why="Their gradients vanish where the model is sure, so every attack would look weak.",
            remedy="Return the scores before the softmax, or torch.log of the probabilities.",
        )
    goal.require(len(centre), logits.shape[1])


def ensemble_slices(batch_size: int, num_attacks: int) -> list[slice]:
    """m/|A| consecutive examples for each attack (Algorithm 1, line 10)."""
    if batch_size % num_attacks:
        below = batch_size - batch_size % num_attacks
        raise SettingError(
            f"batch_size={batch_size} is not a multiple of the {num_attacks} attacks.",
            why="Algorithm 1 gives each attack an equal share.",
            remedy=f"Use {below} or {below + num_attacks}." if below else f"Use {num_attacks}.",
        )
    share = batch_size // num_attacks
    return [slice(i * share, (i + 1) * share) for i in range(num_attacks)]
