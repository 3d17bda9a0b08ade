"""Deterministic l∞ certificates: no noise, no votes, no chance of error.

A box of inputs is pushed through the network, and a class is certified when it leads by more than all that the box
and the rounding of float32 can change. Loose for deep networks, good for shallow ones that were trained for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stobatch.attacks import IFGSM, Ball, Goal, Plain
from stobatch.bounds import graph
from stobatch.bounds.arithmetic import require_plain_float32
from stobatch.bounds.branching import PLAIN, Effort, Leads
from stobatch.bounds.hidden_boxes import hidden_boxes
from stobatch.bounds.linear import LOWER_SLOPES, Box, Join, Rows, lower_bounds
from stobatch.bounds.passes import Node, leads, other_classes, passes, steps_of
from stobatch.errors import DataError, ModelError, StobatchError, UnitError
from stobatch.models.handed_over import HandedOver
from stobatch.models.layered import Layered
from stobatch.types import PAPER_RANGE, InputRange, Norm, Radius, Status
from stobatch.verifier import Certificate, CertificateKind, Flags, Labels, Search, require_stack, require_unaltered

FLOAT32_DISTANCE = 2.0**-22
"""Boxes are this much wider than asked, so that a distance may be measured, or a ball cut out, in float32."""

_COPIES = 10
"""Tensors of the size of one layer's coefficients that are alive at once, roughly."""

_CPU_EXAMPLES = 32
"""Examples at once on a CPU: enough to fill the cores, few enough to stay near the cache."""

_ATTACK = IFGSM(steps=20, relative_step=2.5, loss="margin")
"""What is tried on an input before more effort is spent on it."""


_ASSUMPTIONS = (
    "the deployed pass is a call of the saved network, without hooks, in float32: sums of products in any order, fused "
    "or not; no TF32, half precision, quantisation, Winograd (NNPACK, cuDNN) or FFT",
    "every output depends on its own input alone",
)


_FOLLOWED = (
    "forward does the same operations with every input: torch.fx followed it with a stand-in, and its scores were "
    "compared with those of the operations on every input certified"
)


def bound_kind(unit: Radius, *, followed: bool = False) -> CertificateKind:
    """Say what a radius by bounds means, in this unit, and what it rests on; `followed` is for a forward of its own."""
    source = "interval and linear bounds, docs/guarantees.md, section 5"
    inside = "" if unit.norm is Norm.LINF else "; the ball lies inside the l-infinity ball of the same radius"
    assumptions = (*_ASSUMPTIONS, _FOLLOWED) if followed else _ASSUMPTIONS
    return CertificateKind("bounds", Status.PROVED, source + inside, unit, 0.0, assumptions, function="single_pass")


@dataclass(frozen=True, repr=False)
class BoundCertificates:
    """What bounds say about a batch: the network's own labels, and the largest radius asked about that is proved.

    A radius of 0 is no statement: not even the input itself was proved to keep its label.
    """

    label: Labels
    radius: NDArray[np.float64]
    kind: CertificateKind
    """The unit of the radii, who vouches for them and on what assumptions."""
    correct: Flags | None = None
    """Where the label is the true one, if true labels were given."""

    @property
    def abstain(self) -> Flags:
        return np.zeros(len(self.label), dtype=bool)

    def columns(self) -> dict[str, NDArray[Any]]:
        return {"label": self.label, "abstain": self.abstain, "radius": self.radius}

    def certified(self, asked: Radius | float) -> Flags:
        """Return whether the label is proved to hold in the ball asked about, by a radius that was checked."""
        unit = self.kind.unit
        ball = Radius.of(asked, unit.norm, unit.range).to(unit.range)
        if ball.norm is not unit.norm:
            raise UnitError(
                f"the radii are {unit.norm}; you ask about {ball.norm}.", remedy="Certify in the norm you ask about."
            )
        flags: Flags = (self.radius > 0) & (self.radius >= ball.size)
        return flags

    def __len__(self) -> int:
        return len(self.label)

    def __getitem__(self, index: int) -> Certificate:
        unit = self.kind.unit
        radius = Radius(float(self.radius[index]), unit.norm, unit.range)
        return Certificate(int(self.label[index]), False, radius, self.kind.status, 0.0)

    def __repr__(self) -> str:
        unit, proved = self.kind.unit, self.radius > 0
        right = "" if self.correct is None else f", {int((proved & self.correct).sum())} of them with the right label"
        return (
            f"<{len(self)} inputs, {int(proved.sum())} certified{right}; {self.kind.status}, radii {unit.norm} over "
            f"{unit.range}, median {np.median(self.radius) if len(self) else 0:g}; {self.kind.source}>"
        )

    def _repr_html_(self) -> str:
        notes = "".join(f"<li>{escape(note)}</li>" for note in self.kind.assumptions)
        return f"<p>{escape(repr(self))}</p><ul>{notes}</ul>"


def certify(
    module: nn.Module,
    inputs: Tensor,
    radii: Radius | float | Sequence[Radius | float],
    labels: Tensor | None = None,
    *,
    method: Literal["interval", "linear"] = "linear",
    slope_steps: int = 20,
    branches: int = 0,
    memory_mb: int = 512,
) -> BoundCertificates:
    """Prove, input by input, that no perturbation up to a radius changes the label that a network gives.

    `module` is made of Linear, Conv2d, ReLU, Tanh, AvgPool2d, AdaptiveAvgPool2d, MaxPool2d, Flatten, Identity, Squash
    and `stobatch.models.FrozenAffine`, ends in Linear, and is in float32: layers in a row (nn.Sequential, or a
    `stobatch.models.Layered`), or a forward of its own that torch.fx can follow, with sums of values, as in residual
    networks, and concatenations. Numbers are l-infinity radii on inputs in [-1, 1]; a `Radius` may have another norm,
    and another range inside [-1, 1] that the inputs lie in. Of several radii, which share their unit, the largest that
    is proved counts. `labels` are the true ones, to count right answers with.

    Where plain bounds fail and a short attack does, too, `slope_steps` are spent on the slopes of each lead, and then
    up to `branches` on cutting an input's leads at the signs of ReLUs.

    **Guarantee.** No float32 input of the range within `radius` of the given one gets another label from the module,
    called as it is now: deterministic, with the rounding of the module's own pass and of these bounds included. The
    assumptions on arithmetic stand in `bounds.linear`, and in what is returned.

    >>> model = nn.Sequential(nn.Linear(1, 2))
    >>> _ = model[0].load_state_dict({"weight": torch.tensor([[1.0], [-1.0]]), "bias": torch.zeros(2)})
    >>> certificates = certify(model, torch.tensor([[0.5], [-0.3]]), [0.1, 0.2, 0.4])
    >>> print(certificates[0])
    class 0 within linf 0.4 over [-1, 1] (proved)
    >>> certificates.radius.tolist(), certificates.certified(0.4).tolist()
    ([0.4, 0.2], [True, False])
    """
    several = [radii] if isinstance(radii, Radius | float | int) else list(radii)
    asked = [Radius.of(radius) for radius in several]
    if not asked or len({(radius.norm, radius.range) for radius in asked}) > 1:
        raise UnitError(
            "the radii to certify are none, or of different units.", remedy="Give one or more of one norm and range."
        )
    effort = Effort(slope_steps, branches)
    if isinstance(module, Layered | HandedOver):
        certifier = BoxCertifier(_inside(module), method, memory_mb, module, effort)
    else:
        certifier = BoxCertifier(module, method, memory_mb, effort=effort)
    unit = replace(asked[0], size=1.0)
    found = certifier.certificates(inputs, [radius.size for radius in asked], unit)
    if labels is None:
        return found
    if labels.shape != inputs.shape[:1]:
        raise DataError(
            f"{len(inputs)} inputs come with labels of shape {tuple(labels.shape)}.",
            remedy="Give one label for each input.",
        )
    return replace(found, correct=found.label == labels.cpu().numpy())


class BoundRadii(NamedTuple):
    """What is predicted, and how far around the input no other prediction is possible."""

    prediction: Tensor
    radius: Tensor


@dataclass(frozen=True)
class BoxCertifier:
    """Proves that no input within an l∞ radius changes the class that a network of known operations names.

    `interval` propagates boxes. `linear` also follows linear lower bounds of every lead back to the last squash or
    tanh, or to the input, and keeps the better bound: slower, never worse. With `effort`, hidden values of deep
    networks are followed back too (`bounds.hidden_boxes`), slopes are climbed on and leads cut into branches
    (`bounds.branching`): slower, never worse.

    **Guarantee.** Where `margins` is positive, every float32 input in [-1, 1] within the radius of the given one gets
    the same prediction from the deployed float32 pass, on any device that keeps to the assumptions of
    `bounds.linear`: its rounding errors are part of the bounds, and so are those of the bounds themselves.

    >>> leads_by_one = nn.Linear(1, 2)
    >>> _ = leads_by_one.load_state_dict({"weight": torch.tensor([[1.0], [-1.0]]), "bias": torch.zeros(2)})
    >>> certifier = BoxCertifier(nn.Sequential(leads_by_one))
    >>> certifier.certified_radius(torch.tensor([[0.5], [-0.3]]), largest=1.0, tolerance=0.125)
    BoundRadii(prediction=tensor([0, 1]), radius=tensor([0.3750, 0.2500], dtype=torch.float64))
    """

    layers: nn.Module
    method: Literal["interval", "linear"] = "linear"
    memory_mb: int = 512
    deployed: nn.Module | None = None
    """The network that is called, if it is not `layers` itself."""
    effort: Effort = PLAIN
    """What is spent on inputs that the plain bounds leave open; of `linear` alone."""

    def __post_init__(self) -> None:
        self._steps()

    @classmethod
    def of(cls, network: nn.Module, memory_mb: int, effort: Effort = PLAIN) -> Self:
        """For the calls of a network; raises unless they compute what its layers say."""
        return cls(_inside(network), memory_mb=memory_mb, deployed=network, effort=effort)

    @torch.no_grad()
    def predict(self, inputs: Tensor) -> Tensor:
        """Return the deployed prediction, the class that certificates are about.

        Scores of the call itself; they have to lie in the bounds of a ball of radius 0, as those of every pass do that
        the certificate speaks of.
        """
        inputs, steps = self._checked(inputs), self._steps()
        if not len(inputs):
            return inputs.new_zeros(0, dtype=torch.long)
        call = self.deployed or self.layers
        parts = [(part, call(part.clone())) for part in torch.split(inputs, _CPU_EXAMPLES)]
        scores = torch.cat([scores for _, scores in parts])
        # The largest of scores that are no numbers is no prediction.
        if not bool(scores.isfinite().all()):
            raise ModelError("the network returned scores that are NaN or infinite.", remedy="Train it again.")
        for part, found in parts:
            _require_within_bounds(steps, part, found)
        return scores.argmax(1)

    @torch.no_grad()
    def margins(self, inputs: Tensor, radius: float | Tensor) -> Tensor:
        """Lower bounds on the lead of the predicted class over the ball: certified where positive."""
        inputs = self._checked(inputs)
        radii = _checked_radii(radius, inputs)
        return self._margins(inputs, self.predict(inputs), radii, until_positive=False, effort=self.effort)

    @torch.no_grad()
    def certified_at(self, inputs: Tensor, radii: Sequence[float]) -> Tensor:
        """Return whether each example (row) is certified at each radius (column).

        From small to large; what fails at one radius is not tried, and not claimed, at a larger one.
        """
        inputs = self._checked(inputs)
        predictions, alive = self.predict(inputs), torch.arange(len(inputs), device=inputs.device)
        found = torch.zeros(len(inputs), len(radii), dtype=torch.bool, device=inputs.device)
        for column in sorted(range(len(radii)), key=lambda i: radii[i]):
            radius = _checked_radii(radii[column], inputs[alive])
            part = inputs[alive], predictions[alive], radius
            alive = alive[self._margins(*part, until_positive=True, effort=self.effort) > 0]
            found[alive, column] = True
        return found

    def certificates(self, inputs: Tensor, sizes: Sequence[float], unit: Radius) -> BoundCertificates:
        """The deployed labels, and the largest of the sizes that is proved for each input; of `unit` norm and range.

        Bounds are for l-infinity balls; an l1 or l2 ball lies in the l-infinity ball of the same radius. And they are
        for [-1, 1]: a range inside of it leaves an attacker less.
        """
        if unit.range != PAPER_RANGE:
            _require_within(unit.range, inputs)
        holds, label = self.certified_at(inputs, sizes), self.predict(inputs)
        # From small to large, what fails at one radius is not claimed at a larger one.
        proved = torch.tensor((0.0, *sorted(sizes)), dtype=torch.float64)[holds.sum(1).cpu()]
        return BoundCertificates(label.cpu().numpy(), proved.numpy(), self.kind(unit))

    def kind(self, unit: Radius) -> CertificateKind:
        """Return what its radii mean, in this unit."""
        return bound_kind(unit, followed=not graph.is_plain_stack(self.layers))

    @torch.no_grad()
    def certified_radius(self, inputs: Tensor, *, largest: float, tolerance: float) -> BoundRadii:
        """Return the largest multiple of `tolerance` up to `largest` that bisection finds certified; 0 where none is.

        Sound whether or not bounds fall with the radius: each radius returned is one that was checked.
        """
        search = RadiusSearch(self, inputs, Radius(1.0), largest=largest, tolerance=tolerance)
        while search.step():
            pass
        return search.radii()

    def _steps(self) -> list[Node]:
        """Of the layers as they are now: weights and hooks may have changed since the last question."""
        if self.deployed is not None and _inside(self.deployed) is not self.layers:
            raise ModelError("the network has other layers than those certified.", remedy="Make the certifier again.")
        return steps_of(self.layers)

    def _margins(
        self, inputs: Tensor, predictions: Tensor, radii: Tensor, *, until_positive: bool, effort: Effort
    ) -> Tensor:
        steps = self._steps()
        if not len(inputs):
            return radii
        size = self._examples_in_memory(inputs, steps)
        parts = zip(*(torch.split(whole, size) for whole in (inputs, predictions, radii)), strict=True)
        found = [self._part_margins(steps, *part, until_positive=until_positive, effort=effort) for part in parts]
        return torch.cat(found).nan_to_num(nan=-torch.inf)

    def _part_margins(
        self,
        steps: list[Node],
        inputs: Tensor,
        predictions: Tensor,
        radii: Tensor,
        *,
        until_positive: bool,
        effort: Effort,
    ) -> Tensor:
        ball = _ball(inputs, radii)
        margins = self._leads(steps, ball, predictions, {}, until_positive=until_positive)
        if self.method == "interval" or effort == PLAIN:
            return margins.amin(1)
        todo = torch.arange(len(inputs), device=inputs.device)
        if until_positive:
            todo = _undecided(margins, todo)
            if len(todo):
                todo = todo[~self._broken(inputs[todo], predictions[todo], radii[todo])]
        known = hidden_boxes(steps, ball.of(todo), self.memory_mb) if len(todo) else {}
        if known:
            better = self._leads(steps, ball.of(todo), predictions[todo], known, until_positive=until_positive)
            margins[todo] = torch.maximum(margins[todo], better)
            if until_positive:
                still = _undecided(margins[todo], torch.arange(len(todo), device=todo.device))
                todo, known = todo[still], {place: box.of(still) for place, box in known.items()}
        if len(todo):
            several = Leads.of(steps, ball.of(todo), predictions[todo], margins.shape[1] + 1, known)
            found = several.improved(
                margins[todo].flatten(), effort, until_positive=until_positive, memory_mb=self.memory_mb
            )
            margins[todo] = found.view(len(todo), -1)
        return margins.amin(1)

    def _leads(
        self, steps: list[Node], ball: Box, predictions: Tensor, known: dict[int, Box], *, until_positive: bool
    ) -> Tensor:
        """Return lower bounds on the leads of each prediction over all other classes, as examples x others."""
        *hidden, head = passes(steps, ball, known=known)
        owner, others = other_classes(predictions, head.after.low.shape[1])
        rows = leads(head, owner, predictions[owner], others)
        margins = rows.lowest(head.before)
        if self.method == "linear" and hidden:
            for lower_slope in LOWER_SLOPES.values():
                todo = (~(until_positive & (margins > 0))).nonzero().squeeze(1)
                part = Rows(rows.coefficients[todo], rows.constant[todo], rows.owner[todo])
                margins[todo] = torch.maximum(margins[todo], lower_bounds(part, hidden, lower_slope))
        return margins.view(len(predictions), -1)

    def _broken(self, inputs: Tensor, predictions: Tensor, radii: Tensor) -> Tensor:
        """Return where a short attack finds another class, so that nothing can be proved; it only saves time."""
        call, goal = self.deployed or self.layers, Goal(predictions)
        try:
            ball = Ball.around_each(inputs, radii, Radius(1.0))
            points = _ATTACK.run(Plain(call), ball, goal, torch.Generator(), chunk=_CPU_EXAMPLES)
        except StobatchError:
            # Scores that an attack would not judge.
            return torch.zeros_like(predictions, dtype=torch.bool)
        return goal.reached(call(points))

    def _examples_in_memory(self, inputs: Tensor, steps: list[Node]) -> int:
        *hidden, head = passes(steps, _ball(inputs[:1], inputs.new_zeros(1).double()))
        largest = max(passed.before.low.numel() for passed in (*hidden, head))
        # Behind a join, coefficients of several values wait at once.
        largest *= 1 + any(isinstance(passed.step, Join) for passed in hidden)
        rows = head.after.low.numel() - 1
        examples = max(1, self.memory_mb * 2**20 // (8 * _COPIES * rows * largest))
        return min(examples, _CPU_EXAMPLES) if inputs.is_cpu else examples

    def _checked(self, inputs: Tensor) -> Tensor:
        """Return the inputs where the network is, if they are what certificates speak of."""
        if inputs.dtype != torch.float32:
            raise DataError(f"inputs are {inputs.dtype}, the deployed pass is float32.", remedy="Call inputs.float().")
        if not bool((inputs.abs() <= 1).all()):
            raise DataError(
                "inputs leave [-1, 1] or are not numbers.",
                why="The certificate is about inputs in that range.",
                remedy="Scale them as stobatch.data does.",
            )
        device = next(self.layers.parameters()).device
        require_plain_float32(self.layers.modules(), device)
        return inputs.to(device)


def _undecided(margins: Tensor, examples: Tensor) -> Tensor:
    """Return the examples with a lead that is not proved."""
    return examples[~(margins > 0).all(1)]


class RadiusSearch(Search):
    """Bisection for the largest multiple of `tolerance` up to `largest` that is certified, row by row.

    By plain bounds first, which are quick; then on from there with the certifier's whole effort.

    **Guarantee.** At every moment each radius is one that was checked, or 0.
    """

    def __init__(
        self, certifier: BoxCertifier, inputs: Tensor, unit: Radius, *, largest: float, tolerance: float
    ) -> None:
        if not 0 < tolerance <= largest:
            raise UnitError(
                f"tolerance={tolerance:g} with largest={largest:g} leaves no radius to check.",
                remedy="Give 0 < tolerance <= largest.",
            )
        self.certifier, self.unit, self.tolerance = certifier, unit, tolerance
        self.inputs = certifier._checked(inputs)
        self.predictions: Tensor | None = None
        self.proved = torch.zeros(len(inputs), dtype=torch.long, device=self.inputs.device)
        self.too_large = int(largest / tolerance + 1e-9) + 1
        self.failed = torch.full_like(self.proved, self.too_large)
        self.dropped = torch.zeros_like(self.proved, dtype=torch.bool)
        self.efforts = [PLAIN] if certifier.effort == PLAIN else [PLAIN, certifier.effort]

    @torch.no_grad()
    def step(self) -> bool:
        """Find the predictions, then try one radius for each row that is open; return whether any row is."""
        if self.predictions is None:
            self.predictions = self.certifier.predict(self.inputs)
            return bool(len(self.inputs))
        todo = (self.failed - self.proved > 1).nonzero().squeeze(1)
        if len(todo):
            middle = (self.proved[todo] + self.failed[todo]) // 2
            radius = _checked_radii(middle.double() * self.tolerance, self.inputs[todo])
            part = self.inputs[todo], self.predictions[todo], radius
            holds = self.certifier._margins(*part, until_positive=True, effort=self.efforts[0]) > 0
            self.proved[todo] = torch.where(holds, middle, self.proved[todo])
            self.failed[todo] = torch.where(holds, self.failed[todo], middle)
        if len(self.efforts) > 1 and not bool((self.failed - self.proved > 1).any()):
            del self.efforts[0]
            self.failed = torch.where(self.dropped, self.proved + 1, self.too_large)
        return bool((self.failed - self.proved > 1).any())

    def drop(self, rows: slice) -> None:
        self.dropped[rows], self.failed[rows] = True, self.proved[rows] + 1

    def radii(self) -> BoundRadii:
        assert self.predictions is not None
        return BoundRadii(self.predictions, self.proved.double() * self.tolerance)

    def read(self) -> BoundCertificates:
        label, radius = self.radii()
        return BoundCertificates(label.cpu().numpy(), radius.cpu().numpy(), self.certifier.kind(self.unit))


def _require_within(limits: InputRange, inputs: Tensor) -> None:
    if not (limits.low >= PAPER_RANGE.low and limits.high <= PAPER_RANGE.high):
        raise UnitError(
            f"the radii are over {limits}, which is not inside {PAPER_RANGE}.",
            why="Bounds allow for inputs of that size and no larger.",
            remedy="Put the scaling to the inputs' own range into the network, and give inputs in [-1, 1].",
        )
    if not bool(((inputs >= limits.low) & (inputs <= limits.high)).all()):
        raise DataError(f"inputs leave {limits}, which the radii are over.", remedy="Give radii over their own range.")


def _checked_radii(radius: float | Tensor, inputs: Tensor) -> Tensor:
    radii = torch.as_tensor(radius, dtype=torch.float64, device=inputs.device).expand(len(inputs))
    if not bool(((radii >= 0) & radii.isfinite()).all()):
        raise UnitError(f"a radius of {radius} is not a size.", remedy="Give a number that is at least 0.")
    return radii


def _ball(inputs: Tensor, radii: Tensor) -> Box:
    """Return everything in [-1, 1] within the radius, a hair more than all of it."""
    wide = radii.view(-1, *(1,) * (inputs.dim() - 1)) * (1 + FLOAT32_DISTANCE) + FLOAT32_DISTANCE
    centre = inputs.double()
    return Box((centre - wide).clamp(-1, 1), (centre + wide).clamp(-1, 1))


def _inside(network: nn.Module) -> nn.Module:
    """Return what a call of the network computes, and nothing else: its stack of layers, or the module handed over."""
    if type(network) is not HandedOver:
        return require_stack(network)
    require_unaltered("the network", network)
    return network.module


def why_unbounded(network: nn.Module) -> str:
    """Return why there are no bounds for a network, or nothing if there are."""
    try:
        BoxCertifier.of(network, memory_mb=1)
    except ModelError as error:
        return error.what
    return ""


def _require_within_bounds(steps: list[Node], inputs: Tensor, scores: Tensor) -> None:
    """Raise unless the scores lie in the bounds of a ball of radius 0 around the inputs that they were given for."""
    *_, last = passes(steps, _ball(inputs, inputs.new_zeros(len(inputs)).double()))
    box = last.after
    # Bounds that are NaN, where sums may overflow, hold for nothing and certify nothing.
    if scores.shape != box.low.shape or bool(((scores < box.low) | (scores > box.high)).any()):
        raise ModelError(
            "the network's scores are not those that its layers give in float32.",
            why="It computes another function, or by other arithmetic, than what is certified.",
            remedy="Remove whatever changes its passes: patched functions, reduced precision, another back-end.",
        )
