"""Tighter lower bounds on margins: slopes optimised row by row, and branching on the signs of ReLUs.

A linear bound holds for every slope in [0, 1] of the lower line of an unstable ReLU, so slopes may be optimised
(α-CROWN, Xu et al., 2021). And the input z of an unstable ReLU has z >= 0 or z <= 0: a bound that holds under both
assumptions holds. Under one of them ReLU is linear, and a Lagrange multiplier brings the assumption in:
margin >= margin - βz for β >= 0 and z >= 0 (β-CROWN, Wang et al., 2021).

The optimiser need not be trusted. Slopes and multipliers are clamped to what is allowed where they are used
(`linear.ReLU`), and every bound that counts comes from `bounds.linear`, its allowance for rounding included. The proof
is in docs/guarantees/bounds.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from stobatch.bounds.linear import LOWER_SLOPES, Box, LayerBounds, ReLU, backward_bounds
from stobatch.bounds.propagation import Node, margin_pairs, margin_rows, propagate
from stobatch.errors import SettingError
from stobatch.optimisers import OPTIMISERS

_RATE, _DECAY = 0.4, 0.9
"""Learning rate of the first optimiser step, for slopes in [0, 1], and its factor from step to step."""
_STEPS_OF_BRANCH = 4
"""Optimiser steps of a branch: few, since it starts from the values that its parent ended with."""
_COPIES = 24
"""Tensors of the size of a layer that are alive at once, roughly."""
_CPU_BRANCHES = 64
"""Branches at once on a CPU."""
_COST_OF_RETRY = 16
"""Cost, in branches, of optimising again where no ReLU is unstable and the bound is still negative."""
_LOWER_LINE_SCORE = 1e-3
"""Weight of the lower line in a branching score, relative to the upper one."""


@dataclass(frozen=True)
class Effort:
    """The budget for margins that plain bounds do not prove; nothing by default."""

    slope_steps: int = 0
    """Optimiser steps on the slopes of one margin."""
    branches: int = 0
    """Branches of one input's margins, at most."""

    def __post_init__(self) -> None:
        if min(self.slope_steps, self.branches) < 0:
            raise SettingError(f"{self} is negative.", remedy="Give 0 or more steps and branches.")


PLAIN = Effort()


class Branch(NamedTuple):
    """A row under assumptions on the signs of ReLU inputs.

    `state` holds, by position of the ReLU, a tensor of 3 x layer: the sign assumed for each input (1, -1, or 0 for
    none), the offset of its slope from the chord's, and its multiplier. The optimiser starts from the last two.
    """

    row: int
    state: dict[int, Tensor]

    def split(self, scores: dict[int, Tensor]) -> list[Branch]:
        """Return both halves at the ReLU with the largest score; itself if no ReLU is unstable."""
        position = max(scores, key=lambda position: float(scores[position].max()), default=None)
        if position is None or not float(scores[position].max()) > 0:
            return [self]
        halves = []
        for sign in (1.0, -1.0):
            state = self.state[position].clone()
            state[0].view(-1)[scores[position].argmax()] = sign
            halves.append(Branch(self.row, self.state | {position: state}))
        return halves


@dataclass(frozen=True)
class MarginSearch:
    """The margins of predicted classes over all others, in balls around examples: one row for each pair."""

    nodes: list[Node]
    ball: Box
    owner: Tensor
    predicted: Tensor
    others: Tensor
    known: dict[int, Box]
    """Boxes of hidden values for each ball, by position of the operation."""

    @classmethod
    def of(cls, nodes: list[Node], ball: Box, predictions: Tensor, classes: int, known: dict[int, Box]) -> MarginSearch:
        """Return the search over all margins of these predictions."""
        owner, others = margin_pairs(predictions, classes)
        return cls(nodes, ball, owner, predictions[owner], others, known)

    def improve(self, margins: Tensor, effort: Effort, *, until_positive: bool, memory_mb: int) -> Tensor:
        """Return lower bounds of all rows, at least the given ones; with `until_positive` stop at positive ones.

        Rows are split until all leaves of an input are positive; the least of a row's leaves is then its bound. An
        input that exceeds its branches keeps the bounds proved without branching.
        """
        root_state, at_once = self._start(memory_mb)
        if not root_state:
            return margins
        rows = [row for row, margin in enumerate(margins.tolist()) if not (until_positive and margin > 0)]
        owner, spent, exhausted = self.owner.tolist(), [0] * len(self.ball.low), set[int]()
        margins, least_leaf = margins.clone(), torch.full_like(margins, torch.inf)
        # All roots first, then branches depth first, so that the result of a row does not depend on other rows.
        roots, branches = [Branch(row, root_state) for row in rows], list[Branch]()
        while roots or branches:
            is_split = not roots
            queue, steps = (branches, _STEPS_OF_BRANCH) if is_split else (roots, effort.slope_steps)
            batch = queue[-at_once:]
            del queue[-at_once:]
            results = self._optimise(batch, steps, is_split=is_split, until_positive=until_positive)
            for branch, bound, halves in results:
                row, example = branch.row, owner[branch.row]
                if not is_split:
                    margins[row] = max(float(margins[row]), bound)
                if bound > 0:
                    least_leaf[row] = min(float(least_leaf[row]), bound)
                else:
                    spent[example] += len(halves) if len(halves) > 1 else _COST_OF_RETRY
                    branches += halves
                if spent[example] > effort.branches:
                    exhausted.add(example)
            branches = [branch for branch in branches if owner[branch.row] not in exhausted]
        proved = [row for row in rows if owner[row] not in exhausted]
        margins[proved] = torch.maximum(margins[proved], least_leaf[proved])
        return margins

    def _start(self, memory_mb: int) -> tuple[dict[int, Tensor], int]:
        """Return the state of a root, and how many branches fit into memory at once."""
        *hidden, _ = propagate(self.nodes, self.ball.select(slice(1)))
        shapes = {position: passed.before.low.shape[1:] for position, passed in _relu_layers(hidden)}
        state = {position: self.ball.low.new_zeros(3, *shape) for position, shape in shapes.items()}
        largest = max([passed.after.low.numel() for passed in hidden], default=1)
        most = max(1, memory_mb * 2**20 // (8 * _COPIES * largest))
        return state, min(most, _CPU_BRANCHES) if self.owner.is_cpu else most

    @torch.enable_grad()
    def _optimise(
        self, batch: Sequence[Branch], steps: int, *, is_split: bool, until_positive: bool
    ) -> Iterator[tuple[Branch, float, list[Branch]]]:
        """Optimise slopes and multipliers; yield each branch with its best bound and the branches it splits into."""
        rows = torch.tensor([branch.row for branch in batch], device=self.owner.device)
        state = {position: torch.stack([branch.state[position] for branch in batch]) for position in batch[0].state}
        examples = self.owner[rows]
        ball, known = self.ball.select(examples), {i: box.select(examples) for i, box in self.known.items()}
        *hidden, head = propagate(self.nodes, ball, {i: values[:, 0] for i, values in state.items()}, known)
        margins = margin_rows(
            head, torch.arange(len(rows), device=rows.device), self.predicted[rows], self.others[rows]
        )
        # Multipliers are in units of the row's own coefficients, so that one learning rate fits all rows.
        scale = margins.coefficients.abs().flatten(1).amax(1)
        variables = {
            i: _ReluVariables(passed, state[i], scale, is_split=is_split) for i, passed in _relu_layers(hidden)
        }
        slopes = [each.values for each in variables.values()]
        optimiser = OPTIMISERS["adam"](slopes, lr=_RATE, maximize=True)  # type: ignore[call-arg]
        best, coefficients_at = torch.full_like(scale, -torch.inf), dict[int, Tensor]()
        for step in range(steps + 1):
            for position, each in variables.items():
                hidden[position] = each.apply()
            *earlier, bound = backward_bounds(margins, hidden, LOWER_SLOPES["chord"], coefficients_at)
            best = reduce(torch.maximum, (value.detach() for value in (*earlier, bound)), best)
            # Behind the last tanh or squash there may be no ReLU, hence nothing to optimise.
            if step == steps or not bound.requires_grad or (until_positive and bool((best > 0).all())):
                break
            optimiser.zero_grad()
            bound.sum().backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            for each in variables.values():
                each.project()
            optimiser.param_groups[0]["lr"] *= _DECAY
        for index, branch in enumerate(batch):
            after = Branch(branch.row, {position: each.state(index) for position, each in variables.items()})
            reached = variables.keys() & coefficients_at.keys()
            scores = {i: variables[i].branching_scores(coefficients_at[i][index], index) for i in sorted(reached)}
            yield branch, float(best[index]), after.split(scores)


class _ReluVariables:
    """What is optimised at one ReLU layer: offsets of the lower slopes from the chord's, and multipliers."""

    def __init__(self, passed: LayerBounds, state: Tensor, scale: Tensor, *, is_split: bool) -> None:
        box = passed.before
        self.passed, self.signs = passed, state[:, 0]
        # Without assumptions there are no multipliers.
        self.values = state[:, 1 : 3 if is_split else 2].clone().requires_grad_()
        self.chord, self.intercept = ReLU.upper_line(box)
        self.scale = scale.view(-1, *(1,) * (box.low.dim() - 1))
        self.lower = torch.stack([-self.chord, torch.where(box.high <= 0, -torch.inf, 0.0)], 1)
        self.upper = torch.stack([1 - self.chord, torch.where(box.low >= 0, torch.inf, 0.0)], 1)

    def apply(self) -> LayerBounds:
        """Return the layer's bounds with the current slopes and multipliers."""
        offset, *multipliers = self.values.unbind(1)
        multiplier = multipliers[0] * self.scale if multipliers else None
        return replace(self.passed, slope=self.chord + offset, multiplier=multiplier)

    @torch.no_grad()
    def project(self) -> None:
        """Clamp the variables to what is allowed."""
        kinds = self.values.shape[1]
        self.values.copy_(self.values.clamp(self.lower[:, :kinds], self.upper[:, :kinds]))

    @torch.no_grad()
    def state(self, index: int) -> Tensor:
        """Return the state of one branch: signs, offsets, multipliers."""
        sign, values = self.signs[index], self.values[index]
        return torch.stack([sign, *values, *[torch.zeros_like(sign)] * (2 - len(values))])

    @torch.no_grad()
    def branching_scores(self, coefficients: Tensor, index: int) -> Tensor:
        """Return what each unstable ReLU costs the bound, roughly: the intercept of its upper line.

        A lower line costs little once its slope is optimised.
        """
        return self.intercept[index] * torch.where(coefficients < 0, -coefficients, _LOWER_LINE_SCORE * coefficients)


def _relu_layers(trace: Sequence[LayerBounds]) -> Iterator[tuple[int, LayerBounds]]:
    return ((position, passed) for position, passed in enumerate(trace) if isinstance(passed.rule, ReLU))
