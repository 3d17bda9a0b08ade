"""Stronger lower bounds on leads: slopes chosen row by row, and branches on the signs of ReLUs.

A linear bound holds for every slope in [0, 1] below an open ReLU, so slopes are what a search may climb on. And a ReLU
whose sign is open has z >= 0 or z <= 0: what holds under either assumption holds. Under one it is exact, and a
multiplier brings the assumption in: lead >= lead - βz for β >= 0 and z >= 0 (Wang et al., 2021).

Nothing that is searched for has to be trusted. Slopes and multipliers are cut to what is allowed where they are used
(`linear.Rectifier`), and every bound that is looked at is one of `bounds.linear`, its allowance for rounding included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from stobatch.bounds.linear import LOWER_SLOPES, Box, Passed, Rectifier, cut_bounds
from stobatch.bounds.passes import Node, leads, other_classes, passes
from stobatch.errors import SettingError

_RATE, _DECAY = 0.4, 0.9
"""Of the climb: its first step, where slopes range over [0, 1], and what the next one is of the one before."""
_STEPS_OF_BRANCH = 4
"""Few: a branch starts where the one that it was cut from ended."""
_COPIES = 24
"""Tensors of the size of a layer that are alive at once, roughly."""
_CPU_BRANCHES = 64
"""Branches at once on a CPU."""
_PRICE_OF_A_REPEAT = 16
"""In branches: of climbing once more where no sign is open and the bound is still negative."""
_LITTLE = 1e-3


@dataclass(frozen=True)
class Effort:
    """What may be spent on leads that plain bounds leave open; by default nothing."""

    slope_steps: int = 0
    """Steps on the slopes of one lead."""
    branches: int = 0
    """Branches of one input's leads, at most."""

    def __post_init__(self) -> None:
        if min(self.slope_steps, self.branches) < 0:
            raise SettingError(f"{self} is less than nothing.", remedy="Give 0 or more steps and branches.")


PLAIN = Effort()


class Branch(NamedTuple):
    """A row under assumptions on signs.

    `state` has, by place of the ReLU, the sign assumed for each value (1, -1, or 0 for none), how far its slope is from
    the chord's, and its multiplier: where the climb starts.
    """

    row: int
    state: dict[int, Tensor]

    def cut(self, losses: dict[int, Tensor]) -> list[Branch]:
        """Return the two halves at the value that costs most; itself where no sign is open."""
        place = max(losses, key=lambda place: float(losses[place].max()), default=None)
        if place is None or not float(losses[place].max()) > 0:
            return [self]
        halves = []
        for sign in (1.0, -1.0):
            state = self.state[place].clone()
            state[0].view(-1)[losses[place].argmax()] = sign
            halves.append(Branch(self.row, self.state | {place: state}))
        return halves


@dataclass(frozen=True)
class Leads:
    """The leads of a predicted class over each other one, in balls around examples, in rows."""

    steps: list[Node]
    ball: Box
    owner: Tensor
    named: Tensor
    others: Tensor
    known: dict[int, Box]
    """Boxes of hidden values, by place of the operation, for each ball."""

    @classmethod
    def of(cls, steps: list[Node], ball: Box, predictions: Tensor, classes: int, known: dict[int, Box]) -> Leads:
        owner, others = other_classes(predictions, classes)
        return cls(steps, ball, owner, predictions[owner], others, known)

    def improved(self, margins: Tensor, effort: Effort, *, until_positive: bool, memory_mb: int) -> Tensor:
        """Return lower bounds of all rows that are at least these; `until_positive`: positive ones are good enough.

        Rows are cut into branches until all of them are positive. An input that has used its branches up is left with
        what was proved without.
        """
        start, at_once = self._start(memory_mb)
        if not start:
            return margins
        rows = [row for row, margin in enumerate(margins.tolist()) if not (until_positive and margin > 0)]
        owner, spent, gave_up = self.owner.tolist(), [0] * len(self.ball.low), set[int]()
        margins, lowest = margins.clone(), torch.full_like(margins, torch.inf)
        # Rows as wholes, then their branches, the last ones first: how a row fares must not hang on its company.
        whole, cut = [Branch(row, start) for row in rows], list[Branch]()
        while whole or cut:
            is_cut = not whole
            todo, steps = (cut, _STEPS_OF_BRANCH) if is_cut else (whole, effort.slope_steps)
            several = todo[-at_once:]
            del todo[-at_once:]
            found = self._climbed(several, steps, is_cut=is_cut, until_positive=until_positive)
            for branch, bound, halves in found:
                row, example = branch.row, owner[branch.row]
                if not is_cut:
                    margins[row] = max(float(margins[row]), bound)
                if bound > 0:
                    lowest[row] = min(float(lowest[row]), bound)
                else:
                    spent[example] += len(halves) if len(halves) > 1 else _PRICE_OF_A_REPEAT
                    cut += halves
                if spent[example] > effort.branches:
                    gave_up.add(example)
            cut = [branch for branch in cut if owner[branch.row] not in gave_up]
        proved = [row for row in rows if owner[row] not in gave_up]
        margins[proved] = torch.maximum(margins[proved], lowest[proved])
        return margins

    def _start(self, memory_mb: int) -> tuple[dict[int, Tensor], int]:
        """Return the state of a branch that is not cut, and how many branches may be climbed in at once."""
        *hidden, _ = passes(self.steps, self.ball.of(slice(1)))
        shapes = {place: passed.before.low.shape[1:] for place, passed in _relus(hidden)}
        state = {place: self.ball.low.new_zeros(3, *shape) for place, shape in shapes.items()}
        largest = max([passed.after.low.numel() for passed in hidden], default=1)
        most = max(1, memory_mb * 2**20 // (8 * _COPIES * largest))
        return state, min(most, _CPU_BRANCHES) if self.owner.is_cpu else most

    @torch.enable_grad()
    def _climbed(
        self, several: Sequence[Branch], steps: int, *, is_cut: bool, until_positive: bool
    ) -> Iterator[tuple[Branch, float, list[Branch]]]:
        """Go through the branches, each with the best bound that a climb found for it, and what it is cut into."""
        rows = torch.tensor([branch.row for branch in several], device=self.owner.device)
        state = {place: torch.stack([branch.state[place] for branch in several]) for place in several[0].state}
        examples = self.owner[rows]
        ball, known = self.ball.of(examples), {place: box.of(examples) for place, box in self.known.items()}
        *hidden, head = passes(self.steps, ball, {place: found[:, 0] for place, found in state.items()}, known)
        lead = leads(head, torch.arange(len(rows), device=rows.device), self.named[rows], self.others[rows])
        # In units of the row's own coefficients, so that one rate fits all.
        scale = lead.coefficients.abs().flatten(1).amax(1)
        choices = {place: _Choice(passed, state[place], scale, is_cut=is_cut) for place, passed in _relus(hidden)}
        climb = torch.optim.Adam([choice.made for choice in choices.values()], lr=_RATE, maximize=True)
        best, arrived = torch.full_like(scale, -torch.inf), dict[int, Tensor]()
        for step in range(steps + 1):
            for place, choice in choices.items():
                hidden[place] = choice.applied()
            *cuts, bound = cut_bounds(lead, hidden, LOWER_SLOPES["chord"], arrived)
            best = reduce(torch.maximum, (found.detach() for found in (*cuts, bound)), best)
            # Behind a tanh or squash there may be no ReLU to choose anything at.
            if step == steps or not bound.requires_grad or (until_positive and bool((best > 0).all())):
                break
            climb.zero_grad()
            bound.sum().backward()  # type: ignore[no-untyped-call]
            climb.step()
            for choice in choices.values():
                choice.project()
            climb.param_groups[0]["lr"] *= _DECAY
        for index, branch in enumerate(several):
            after = Branch(branch.row, {place: choice.state(index) for place, choice in choices.items()})
            reached = choices.keys() & arrived.keys()
            losses = {place: choices[place].losses(arrived[place][index], index) for place in sorted(reached)}
            yield branch, float(best[index]), after.cut(losses)


class _Choice:
    """What a climb may choose at one ReLU: how far slopes are from the chord's, and multipliers."""

    def __init__(self, passed: Passed, state: Tensor, scale: Tensor, *, is_cut: bool) -> None:
        box = passed.before
        self.passed, self.signs = passed, state[:, 0]
        # Where nothing is assumed there is nothing to multiply.
        self.made = state[:, 1 : 3 if is_cut else 2].clone().requires_grad_()
        self.chord, self.lift = Rectifier.above(box)
        self.scale = scale.view(-1, *(1,) * (box.low.dim() - 1))
        self.least = torch.stack([-self.chord, torch.where(box.high <= 0, -torch.inf, 0.0)], 1)
        self.most = torch.stack([1 - self.chord, torch.where(box.low >= 0, torch.inf, 0.0)], 1)

    def applied(self) -> Passed:
        offset, *multipliers = self.made.unbind(1)
        multiplier = multipliers[0] * self.scale if multipliers else None
        return replace(self.passed, slope=self.chord + offset, multiplier=multiplier)

    @torch.no_grad()
    def project(self) -> None:
        kinds = self.made.shape[1]
        self.made.copy_(self.made.clamp(self.least[:, :kinds], self.most[:, :kinds]))

    @torch.no_grad()
    def state(self, index: int) -> Tensor:
        sign, made = self.signs[index], self.made[index]
        return torch.stack([sign, *made, *[torch.zeros_like(sign)] * (2 - len(made))])

    @torch.no_grad()
    def losses(self, coefficients: Tensor, index: int) -> Tensor:
        """Return what each open ReLU may cost the bound: its line above, at 0. A line below hardly costs anything once
        its slope is the best one.
        """
        return self.lift[index] * torch.where(coefficients < 0, -coefficients, _LITTLE * coefficients)


def _relus(trace: Sequence[Passed]) -> Iterator[tuple[int, Passed]]:
    return ((place, passed) for place, passed in enumerate(trace) if isinstance(passed.step, Rectifier))
