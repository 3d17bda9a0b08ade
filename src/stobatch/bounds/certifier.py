"""Deterministic l∞ certificates: no noise, no votes, no failure probability.

Bounds are propagated from a box of inputs to the margins of the predicted class over all others. Where all are
positive, rounding of float32 included, the class is certified. Loose for deep networks, tight for shallow ones that
were trained for it.
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
from stobatch.bounds.branching import PLAIN, Effort, MarginSearch
from stobatch.bounds.linear import LOWER_SLOPES, Box, Join, LinearBounds, lower_bounds
from stobatch.bounds.propagation import Node, hidden_boxes, margin_pairs, margin_rows, nodes_of, propagate
from stobatch.errors import DataError, ModelError, StobatchError, UnitError
from stobatch.models.handed_over import HandedOver
from stobatch.models.layered import Layered
from stobatch.types import PAPER_RANGE, InputRange, Norm, Radius, Status
from stobatch.verifier import Certificate, CertificateKind, Flags, Labels, Search, require_stack, require_unaltered

FLOAT32_DISTANCE = 2.0**-22
"""Boxes are wider than the radius by this much, so that distances may be measured, and balls computed, in float32."""

_COPIES = 20
"""Tensors of the size of one layer's coefficients that are alive at once, roughly."""

_CPU_EXAMPLES = 32
"""Examples at once on a CPU: enough to fill the cores, few enough to stay near the cache."""

_ATTACK = IFGSM(steps=20, relative_step=2.5, loss="margin")
"""Tried on an input before more effort is spent on it."""


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
    """Return what a radius by bounds means, in this unit; `followed`: the network's own forward was traced."""
    source = "interval and linear bounds, docs/guarantees.md, section 5"
    inside = "" if unit.norm is Norm.LINF else "; the ball lies inside the l-infinity ball of the same radius"
    assumptions = (*_ASSUMPTIONS, _FOLLOWED) if followed else _ASSUMPTIONS
    return CertificateKind("bounds", Status.PROVED, source + inside, unit, 0.0, assumptions, function="single_pass")


@dataclass(frozen=True, repr=False)
class BoundCertificates:
    """Certificates of a batch by bounds: the network's labels, and the largest of the given radii that is proved.

    A radius of 0 means that nothing was proved.
    """

    label: Labels
    radius: NDArray[np.float64]
    kind: CertificateKind
    """The unit of the radii, their status and assumptions."""
    correct: Flags | None = None
    """Where the label is the true one, if true labels were given."""

    @property
    def abstain(self) -> Flags:
        return np.zeros(len(self.label), dtype=bool)

    def columns(self) -> dict[str, NDArray[Any]]:
        return {"label": self.label, "abstain": self.abstain, "radius": self.radius}

    def certified(self, radius: Radius | float) -> Flags:
        """Return whether the label is proved to hold throughout a ball of this radius."""
        unit = self.kind.unit
        radius = Radius.of(radius, unit.norm, unit.range).to(unit.range)
        if radius.norm is not unit.norm:
            raise UnitError(
                f"the radii are {unit.norm}; you ask about {radius.norm}.", remedy="Certify in the norm you ask about."
            )
        flags: Flags = (self.radius > 0) & (self.radius >= radius.size)
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
    """Prove, input by input, that no perturbation up to a radius changes the label of a network.

    `module` is made of Linear, Conv2d, ReLU, Tanh, AvgPool2d, AdaptiveAvgPool2d, MaxPool2d, Flatten, Identity, Squash
    and `stobatch.models.FrozenAffine`, ends in Linear, and is in float32: layers in a row (nn.Sequential, or a
    `stobatch.models.Layered`), or a forward of its own that torch.fx can trace, with residual sums and concatenations.
    Numbers are l-infinity radii on inputs in [-1, 1]; a `Radius` may have another norm, and another range inside
    [-1, 1] that the inputs lie in. Of several radii, which share their unit, the largest that is proved counts.
    `labels` are the true ones, to count correct predictions.

    Where plain bounds fail and a short attack fails too, each margin gets `slope_steps` steps of slope optimisation,
    and then an input gets up to `branches` branches on the signs of ReLUs.

    **Guarantee.** No float32 input of the range within `radius` of the given one gets another label from the module,
    called as it is now: deterministic, with the rounding of the module's own pass and of these bounds included. The
    assumptions on arithmetic are in `bounds.linear`, and in the result.

    >>> model = nn.Sequential(nn.Linear(1, 2))
    >>> _ = model[0].load_state_dict({"weight": torch.tensor([[1.0], [-1.0]]), "bias": torch.zeros(2)})
    >>> certificates = certify(model, torch.tensor([[0.5], [-0.3]]), [0.1, 0.2, 0.4])
    >>> print(certificates[0])
    class 0 within linf 0.4 over [-1, 1] (proved)
    >>> certificates.radius.tolist(), certificates.certified(0.4).tolist()
    ([0.4, 0.2], [True, False])
    """
    given = [radii] if isinstance(radii, Radius | float | int) else list(radii)
    checked = [Radius.of(radius) for radius in given]
    if not checked or len({(radius.norm, radius.range) for radius in checked}) > 1:
        raise UnitError(
            "the radii to certify are none, or of different units.", remedy="Give one or more of one norm and range."
        )
    effort = Effort(slope_steps, branches)
    if isinstance(module, Layered | HandedOver):
        certifier = BoxCertifier(_certified_module(module), method, memory_mb, module, effort)
    else:
        certifier = BoxCertifier(module, method, memory_mb, effort=effort)
    unit = replace(checked[0], size=1.0)
    certificates = certifier.certificates(inputs, [radius.size for radius in checked], unit)
    if labels is None:
        return certificates
    if labels.shape != inputs.shape[:1]:
        raise DataError(
            f"{len(inputs)} inputs come with labels of shape {tuple(labels.shape)}.",
            remedy="Give one label for each input.",
        )
    return replace(certificates, correct=certificates.label == labels.cpu().numpy())


class BoundRadii(NamedTuple):
    """Predictions, and the certified l∞ radius of each."""

    prediction: Tensor
    radius: Tensor


@dataclass(frozen=True)
class BoxCertifier:
    """Proves that no input within an l∞ radius changes the prediction of a network of known operations.

    `interval` propagates boxes. `linear` also propagates linear lower bounds of every margin back to the last squash or
    tanh, or to the input, and takes the larger bound: slower, never worse. With `effort`, boxes inside deep networks
    are tightened the same way (`propagation.hidden_boxes`), slopes are optimised and margins split into branches
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
    """The budget for inputs that the plain bounds do not certify; for `linear` only."""

    def __post_init__(self) -> None:
        self._nodes()

    @classmethod
    def of(cls, network: nn.Module, memory_mb: int, effort: Effort = PLAIN) -> Self:
        """For the calls of a network; raises unless they compute what its layers say."""
        return cls(_certified_module(network), memory_mb=memory_mb, deployed=network, effort=effort)

    @torch.no_grad()
    def predict(self, inputs: Tensor) -> Tensor:
        """Return the deployed predictions, which certificates are about.

        The scores of the call have to lie in the bounds of a ball of radius 0, as those of every certified pass do.
        """
        inputs, nodes = self._check_inputs(inputs), self._nodes()
        if not len(inputs):
            return inputs.new_zeros(0, dtype=torch.long)
        call = self.deployed or self.layers
        parts = [(part, call(part.clone())) for part in torch.split(inputs, _CPU_EXAMPLES)]
        scores = torch.cat([scores for _, scores in parts])
        if not bool(scores.isfinite().all()):
            raise ModelError("the network returned scores that are NaN or infinite.", remedy="Train it again.")
        for part, part_scores in parts:
            _require_within_bounds(nodes, part, part_scores)
        return scores.argmax(1)

    @torch.no_grad()
    def margins(self, inputs: Tensor, radius: float | Tensor) -> Tensor:
        """Return lower bounds on the least margin of the predicted class over the ball: certified where positive."""
        inputs = self._check_inputs(inputs)
        radii = _check_radii(radius, inputs)
        return self._margins(inputs, self.predict(inputs), radii, until_positive=False, effort=self.effort)

    @torch.no_grad()
    def certified_at(self, inputs: Tensor, radii: Sequence[float]) -> Tensor:
        """Return whether each example (row) is certified at each radius (column).

        From small to large; what fails at one radius is not tried, and not claimed, at a larger one.
        """
        inputs = self._check_inputs(inputs)
        predictions, rows = self.predict(inputs), torch.arange(len(inputs), device=inputs.device)
        certified = torch.zeros(len(inputs), len(radii), dtype=torch.bool, device=inputs.device)
        for column in sorted(range(len(radii)), key=lambda i: radii[i]):
            radius = _check_radii(radii[column], inputs[rows])
            part = inputs[rows], predictions[rows], radius
            rows = rows[self._margins(*part, until_positive=True, effort=self.effort) > 0]
            certified[rows, column] = True
        return certified

    def certificates(self, inputs: Tensor, sizes: Sequence[float], unit: Radius) -> BoundCertificates:
        """Return the deployed labels, and the largest of the sizes that is proved; `unit` gives their norm and range.

        Bounds are for l-infinity balls; an l1 or l2 ball lies in the l-infinity ball of the same radius. And they are
        for inputs in [-1, 1], so they hold for every range inside it.
        """
        if unit.range != PAPER_RANGE:
            _require_within(unit.range, inputs)
        holds, label = self.certified_at(inputs, sizes), self.predict(inputs)
        proved = torch.tensor((0.0, *sorted(sizes)), dtype=torch.float64)[holds.sum(1).cpu()]
        return BoundCertificates(label.cpu().numpy(), proved.numpy(), self.kind(unit))

    def kind(self, unit: Radius) -> CertificateKind:
        """Return what the radii mean, in this unit."""
        return bound_kind(unit, followed=not graph.is_plain_stack(self.layers))

    @torch.no_grad()
    def certified_radius(self, inputs: Tensor, *, largest: float, tolerance: float) -> BoundRadii:
        """Return the largest multiple of `tolerance` up to `largest` that bisection certifies; 0 where none is.

        Sound even if bounds are not monotone in the radius: each radius returned was itself checked.
        """
        search = RadiusSearch(self, inputs, Radius(1.0), largest=largest, tolerance=tolerance)
        while search.step():
            pass
        return search.radii()

    def _nodes(self) -> list[Node]:
        """Return the rules of the layers as they are now: weights and hooks may have changed since the last call."""
        if self.deployed is not None and _certified_module(self.deployed) is not self.layers:
            raise ModelError("the network has other layers than those certified.", remedy="Make the certifier again.")
        return nodes_of(self.layers)

    def _margins(
        self, inputs: Tensor, predictions: Tensor, radii: Tensor, *, until_positive: bool, effort: Effort
    ) -> Tensor:
        nodes = self._nodes()
        if not len(inputs):
            return radii
        size = self._examples_in_memory(inputs, nodes)
        parts = zip(*(torch.split(whole, size) for whole in (inputs, predictions, radii)), strict=True)
        margins = [self._part_margins(nodes, *part, until_positive=until_positive, effort=effort) for part in parts]
        return torch.cat(margins).nan_to_num(nan=-torch.inf)

    def _part_margins(
        self,
        nodes: list[Node],
        inputs: Tensor,
        predictions: Tensor,
        radii: Tensor,
        *,
        until_positive: bool,
        effort: Effort,
    ) -> Tensor:
        """Return the least margin of each example: plain bounds, then hidden boxes, then slopes and branches."""
        ball = _ball(inputs, radii)
        margins = self._plain_margins(nodes, ball, predictions, {}, until_positive=until_positive)
        if self.method == "interval" or effort == PLAIN:
            return margins.amin(1)
        todo = torch.arange(len(inputs), device=inputs.device)
        if until_positive:
            todo = _undecided(margins, todo)
            if len(todo):
                todo = todo[~self._attack_succeeds(inputs[todo], predictions[todo], radii[todo])]
        known = hidden_boxes(nodes, ball.select(todo), self.memory_mb) if len(todo) else {}
        if known:
            better = self._plain_margins(
                nodes, ball.select(todo), predictions[todo], known, until_positive=until_positive
            )
            margins[todo] = torch.maximum(margins[todo], better)
            if until_positive:
                still = _undecided(margins[todo], torch.arange(len(todo), device=todo.device))
                todo, known = todo[still], {place: box.select(still) for place, box in known.items()}
        if len(todo):
            search = MarginSearch.of(nodes, ball.select(todo), predictions[todo], margins.shape[1] + 1, known)
            better = search.improve(
                margins[todo].flatten(), effort, until_positive=until_positive, memory_mb=self.memory_mb
            )
            margins[todo] = better.view(len(todo), -1)
        return margins.amin(1)

    def _plain_margins(
        self, nodes: list[Node], ball: Box, predictions: Tensor, known: dict[int, Box], *, until_positive: bool
    ) -> Tensor:
        """Return lower bounds on the margins over all other classes, as examples x others, without any effort."""
        *hidden, head = propagate(nodes, ball, known=known)
        owner, others = margin_pairs(predictions, head.after.low.shape[1])
        rows = margin_rows(head, owner, predictions[owner], others)
        margins = rows.concretise(head.before)
        if self.method == "linear" and hidden:
            for lower_slope in LOWER_SLOPES.values():
                todo = (~(until_positive & (margins > 0))).nonzero().squeeze(1)
                part = LinearBounds(rows.coefficients[todo], rows.constant[todo], rows.owner[todo])
                margins[todo] = torch.maximum(margins[todo], lower_bounds(part, hidden, lower_slope))
        return margins.view(len(predictions), -1)

    def _attack_succeeds(self, inputs: Tensor, predictions: Tensor, radii: Tensor) -> Tensor:
        """Return where a short attack finds another class, so that nothing can be proved; this only saves time."""
        call, goal = self.deployed or self.layers, Goal(predictions)
        try:
            ball = Ball.around_each(inputs, radii, Radius(1.0))
            points = _ATTACK.run(Plain(call), ball, goal, torch.Generator(), chunk=_CPU_EXAMPLES)
        except StobatchError:
            # The attack refuses such scores; then nothing is skipped.
            return torch.zeros_like(predictions, dtype=torch.bool)
        return goal.reached(call(points))

    def _examples_in_memory(self, inputs: Tensor, nodes: list[Node]) -> int:
        *hidden, head = propagate(nodes, _ball(inputs[:1], inputs.new_zeros(1).double()))
        largest = max(passed.before.low.numel() for passed in (*hidden, head))
        # Behind a join, coefficients of several values are alive at once.
        largest *= 1 + any(isinstance(passed.rule, Join) for passed in hidden)
        rows = head.after.low.numel() - 1
        examples = max(1, self.memory_mb * 2**20 // (8 * _COPIES * rows * largest))
        return min(examples, _CPU_EXAMPLES) if inputs.is_cpu else examples

    def _check_inputs(self, inputs: Tensor) -> Tensor:
        """Return the inputs on the network's device; raise unless certificates cover them."""
        if inputs.dtype != torch.float32:
            raise DataError(f"inputs are {inputs.dtype}, the deployed pass is float32.", remedy="Call inputs.float().")
        if not bool((inputs.abs() <= 1).all()):
            raise DataError(
                "inputs leave [-1, 1] or are NaN.",
                why="The certificate is about inputs in that range.",
                remedy="Scale them as stobatch.data does.",
            )
        device = next(self.layers.parameters()).device
        require_plain_float32(self.layers.modules(), device)
        return inputs.to(device)


def _undecided(margins: Tensor, examples: Tensor) -> Tensor:
    """Return the examples with a margin that is not proved."""
    return examples[~(margins > 0).all(1)]


class RadiusSearch(Search):
    """Bisection for the largest multiple of `tolerance` up to `largest` that is certified, row by row.

    By plain bounds first, which are fast; then from there with the certifier's whole effort.

    **Guarantee.** At any time each radius is one that was checked, or 0.
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
        self.inputs = certifier._check_inputs(inputs)
        self.predictions: Tensor | None = None
        self.proved = torch.zeros(len(inputs), dtype=torch.long, device=self.inputs.device)
        self.too_large = int(largest / tolerance + 1e-9) + 1
        self.failed = torch.full_like(self.proved, self.too_large)
        self.dropped = torch.zeros_like(self.proved, dtype=torch.bool)
        self.efforts = [PLAIN] if certifier.effort == PLAIN else [PLAIN, certifier.effort]

    @torch.no_grad()
    def step(self) -> bool:
        """Compute the predictions, then check one radius for each unfinished row; return whether any is left."""
        if self.predictions is None:
            self.predictions = self.certifier.predict(self.inputs)
            return bool(len(self.inputs))
        todo = (self.failed - self.proved > 1).nonzero().squeeze(1)
        if len(todo):
            middle = (self.proved[todo] + self.failed[todo]) // 2
            radius = _check_radii(middle.double() * self.tolerance, self.inputs[todo])
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


def _check_radii(radius: float | Tensor, inputs: Tensor) -> Tensor:
    radii = torch.as_tensor(radius, dtype=torch.float64, device=inputs.device).expand(len(inputs))
    if not bool(((radii >= 0) & radii.isfinite()).all()):
        raise UnitError(f"{radius} is not a radius.", remedy="Give a number that is at least 0.")
    return radii


def _ball(inputs: Tensor, radii: Tensor) -> Box:
    """Return a box that contains every point of [-1, 1] within the radius."""
    wide = radii.view(-1, *(1,) * (inputs.dim() - 1)) * (1 + FLOAT32_DISTANCE) + FLOAT32_DISTANCE
    centre = inputs.double()
    return Box((centre - wide).clamp(-1, 1), (centre + wide).clamp(-1, 1))


def _certified_module(network: nn.Module) -> nn.Module:
    """Return the module that a call of the network evaluates, and nothing else: its layers, or a user's module."""
    if type(network) is not HandedOver:
        return require_stack(network)
    require_unaltered("the network", network)
    return network.module


def why_unbounded(network: nn.Module) -> str:
    """Return why there are no bounds for a network, or an empty string if there are."""
    try:
        BoxCertifier.of(network, memory_mb=1)
    except ModelError as error:
        return error.what
    return ""


def _require_within_bounds(nodes: list[Node], inputs: Tensor, scores: Tensor) -> None:
    """Raise unless the scores lie in the bounds of a ball of radius 0 around their inputs."""
    *_, output = propagate(nodes, _ball(inputs, inputs.new_zeros(len(inputs)).double()))
    box = output.after
    # NaN bounds, where sums may overflow, compare as false: they accept all scores and certify nothing.
    if scores.shape != box.low.shape or bool(((scores < box.low) | (scores > box.high)).any()):
        raise ModelError(
            "the network's scores are not those that its layers give in float32.",
            why="It computes another function than what is certified, or in other arithmetic.",
            remedy="Remove whatever changes its passes: patched functions, reduced precision, another back-end.",
        )
