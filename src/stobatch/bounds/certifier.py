"""Deterministic l∞ certificates: no noise, no votes, no chance of error.

A box of inputs is pushed through the network, and a class is certified when it leads by more than all that the box
and the rounding of float32 can change. Loose for deep networks, good for shallow ones that were trained for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stobatch.bounds import graph, linear
from stobatch.bounds.arithmetic import require_plain_float32
from stobatch.bounds.linear import (
    LOWER_SLOPES,
    AdaptivePool,
    AveragePool,
    Box,
    ChannelScaling,
    Clamp,
    Convolution,
    Dense,
    Flatten,
    HyperbolicTangent,
    Join,
    LargestPool,
    Passed,
    Rectifier,
    Rows,
    Step,
    lower_bounds,
)
from stobatch.errors import DataError, ModelError, UnitError
from stobatch.models.handed_over import HandedOver
from stobatch.models.layered import Layered, Squash
from stobatch.models.replacements import FrozenAffine
from stobatch.types import PAPER_RANGE, InputRange, Norm, Radius, Status
from stobatch.verifier import Certificate, CertificateKind, Flags, Labels, Search, require_stack, require_unaltered

FLOAT32_DISTANCE = 2.0**-22
"""Boxes are this much wider than asked, so that a distance may be measured, or a ball cut out, in float32."""

_COPIES = 10
"""Tensors of the size of one layer's coefficients that are alive at once, roughly."""

_CPU_EXAMPLES = 32
"""Examples at once on a CPU: enough to fill the cores, few enough to stay near the cache."""


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
    memory_mb: int = 512,
) -> BoundCertificates:
    """Prove, input by input, that no perturbation up to a radius changes the label that a network gives.

    `module` is made of Linear, Conv2d, ReLU, Tanh, AvgPool2d, AdaptiveAvgPool2d, MaxPool2d, Flatten, Identity, Squash
    and `stobatch.models.FrozenAffine`, ends in Linear, and is in float32: layers in a row (nn.Sequential, or a
    `stobatch.models.Layered`), or a forward of its own that torch.fx can follow, with sums of values, as in residual
    networks, and concatenations. Numbers are l-infinity radii on inputs in [-1, 1]; a `Radius` may have another norm,
    and another range inside [-1, 1] that the inputs lie in. Of several radii, which share their unit, the largest that
    is proved counts. `labels` are the true ones, to count right answers with.

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
    if isinstance(module, Layered | HandedOver):
        certifier = BoxCertifier(_inside(module), method, memory_mb, deployed=module)
    else:
        certifier = BoxCertifier(module, method, memory_mb)
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
    tanh, or to the input, and keeps the better bound: slower, never worse.

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

    def __post_init__(self) -> None:
        self._steps()

    @classmethod
    def of(cls, network: nn.Module, memory_mb: int) -> Self:
        """For the calls of a network; raises unless they compute what its layers say."""
        return cls(_inside(network), memory_mb=memory_mb, deployed=network)

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
            raise ModelError("the network returned scores that are not numbers.", remedy="Train it again.")
        for part, found in parts:
            _require_within_bounds(steps, part, found)
        return scores.argmax(1)

    @torch.no_grad()
    def margins(self, inputs: Tensor, radius: float | Tensor) -> Tensor:
        """Lower bounds on the lead of the predicted class over the ball: certified where positive."""
        inputs = self._checked(inputs)
        return self._margins(inputs, self.predict(inputs), _checked_radii(radius, inputs), until_positive=False)

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
            alive = alive[self._margins(inputs[alive], predictions[alive], radius, until_positive=True) > 0]
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
        return _steps(self.layers)

    def _margins(self, inputs: Tensor, predictions: Tensor, radii: Tensor, *, until_positive: bool) -> Tensor:
        steps = self._steps()
        if not len(inputs):
            return radii
        size = self._examples_in_memory(inputs, steps)
        parts = zip(*(torch.split(whole, size) for whole in (inputs, predictions, radii)), strict=True)
        found = torch.cat([self._part_margins(steps, *part, until_positive=until_positive) for part in parts])
        return found.nan_to_num(nan=-torch.inf)

    def _part_margins(
        self, steps: list[Node], inputs: Tensor, predictions: Tensor, radii: Tensor, *, until_positive: bool
    ) -> Tensor:
        trace = list(_passes(steps, _ball(inputs, radii)))
        *hidden, head = trace
        rows = _leads(head, predictions)
        margins = rows.lowest(head.before)
        if self.method == "linear" and hidden:
            for lower_slope in LOWER_SLOPES.values():
                todo = (~(until_positive & (margins > 0))).nonzero().squeeze(1)
                part = Rows(rows.coefficients[todo], rows.constant[todo], rows.owner[todo])
                margins[todo] = torch.maximum(margins[todo], lower_bounds(part, hidden, lower_slope))
        return margins.view(len(inputs), -1).amin(1)

    def _examples_in_memory(self, inputs: Tensor, steps: list[Node]) -> int:
        *hidden, head = _passes(steps, _ball(inputs[:1], inputs.new_zeros(1).double()))
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


class RadiusSearch(Search):
    """Bisection for the largest multiple of `tolerance` up to `largest` that is certified, row by row.

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
        self.failed = torch.full_like(self.proved, int(largest / tolerance + 1e-9) + 1)

    @torch.no_grad()
    def step(self) -> bool:
        """Find the predictions, then try one radius for each row that is open; return whether any row is."""
        if self.predictions is None:
            self.predictions = self.certifier.predict(self.inputs)
            return bool(len(self.inputs))
        todo = (self.failed - self.proved > 1).nonzero().squeeze(1)
        if not len(todo):
            return False
        middle = (self.proved[todo] + self.failed[todo]) // 2
        radius = _checked_radii(middle.double() * self.tolerance, self.inputs[todo])
        holds = self.certifier._margins(self.inputs[todo], self.predictions[todo], radius, until_positive=True) > 0
        self.proved[todo] = torch.where(holds, middle, self.proved[todo])
        self.failed[todo] = torch.where(holds, self.failed[todo], middle)
        return bool((self.failed - self.proved > 1).any())

    def drop(self, rows: slice) -> None:
        self.failed[rows] = self.proved[rows] + 1

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


class Node(NamedTuple):
    """An operation as a map of bounds, and where its values come from."""

    step: Step | Join
    inputs: tuple[int, ...]


_OF_MAPS = (Convolution, AveragePool, AdaptivePool, LargestPool)


def _passes(steps: list[Node], box: Box) -> Iterator[Passed]:
    boxes = {graph.INPUT: box}
    for place, (step, inputs) in enumerate(steps):
        box, *others = parts = [boxes[source] for source in inputs]
        if isinstance(step, Dense) and box.low.dim() != 2:
            shape = "x".join(map(str, box.low.shape[1:]))
            raise ModelError(f"a linear layer is given {shape} values.", remedy="Put nn.Flatten() before it.")
        if isinstance(step, _OF_MAPS) and box.low.dim() != 4:
            shape = "x".join(map(str, box.low.shape[1:]))
            raise ModelError(
                f"a layer of pictures is given {shape} values.",
                why="Of three axes it takes the first for channels, and examples would reach each other.",
                remedy="Give inputs of channels x height x width.",
            )
        if isinstance(step, Join):
            _require_same_shape(step, parts)
            passed = Passed(step, box, *step.join(parts), inputs, tuple(parts))
        else:
            assert not others
            passed = replace(step.forward(box), inputs=inputs)
        yield passed
        boxes[place] = passed.after


def _require_same_shape(step: Join, parts: list[Box]) -> None:
    shapes = {tuple(part.low.shape) for part in parts}
    if isinstance(step, linear.Sum) and len(shapes) > 1:
        raise ModelError(
            f"a sum of values of shapes {sorted(shape[1:] for shape in shapes)} has no bounds.",
            remedy="Bring them to one shape before.",
        )


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
    *_, last = _passes(steps, _ball(inputs, inputs.new_zeros(len(inputs)).double()))
    box = last.after
    # Bounds that are NaN, where sums may overflow, hold for nothing and certify nothing.
    if scores.shape != box.low.shape or bool(((scores < box.low) | (scores > box.high)).any()):
        raise ModelError(
            "the network's scores are not those that its layers give in float32.",
            why="It computes another function, or by other arithmetic, than what is certified.",
            remedy="Remove whatever changes its passes: patched functions, reduced precision, another back-end.",
        )


def _leads(head: Passed, predictions: Tensor) -> Rows:
    """Return the predicted score less each other one, example by example, in terms of the last hidden layer."""
    assert isinstance(head.step, Dense)
    assert head.rounding is not None
    examples, classes = head.rounding.shape
    others = torch.arange(classes - 1, device=predictions.device).expand(examples, -1)
    others = (others + (others >= predictions[:, None])).flatten()
    owner = torch.arange(examples, device=predictions.device).repeat_interleave(classes - 1)
    named = predictions[owner]
    weight, bias = head.step.weight, head.step.bias
    constant = -head.rounding[owner, named] - head.rounding[owner, others]
    if bias is not None:
        constant = constant + (bias[named] - bias[others])
    return Rows(weight[named] - weight[others], constant, owner)


_MAKERS: dict[type[nn.Module], Callable[..., Step | Join]] = {
    Squash: lambda layer, device: Clamp(layer.slope, layer.thresholds),
    nn.Linear: lambda layer, device: Dense(layer),
    nn.Conv2d: lambda layer, device: Convolution(layer),
    nn.AvgPool2d: lambda layer, device: AveragePool(_pair(layer.kernel_size), _pair(layer.stride), device),
    nn.AdaptiveAvgPool2d: lambda layer, device: AdaptivePool(partial(graph.window_of, layer), device),
    nn.MaxPool2d: lambda layer, device: LargestPool(
        _pair(layer.kernel_size), _pair(layer.stride), _pair(layer.padding)
    ),
    FrozenAffine: lambda layer, device: ChannelScaling(layer.scale, layer.shift),
    nn.Flatten: lambda layer, device: Flatten(),
    nn.ReLU: lambda layer, device: Rectifier(),
    nn.Tanh: lambda layer, device: HyperbolicTangent(),
    graph.Sum: lambda layer, device: linear.Sum(),
    graph.Concatenation: lambda layer, device: linear.Concatenation(),
}
"""Of these classes themselves: a subclass may compute anything."""

_REQUIRED: dict[type[nn.Module], dict[str, object]] = {
    nn.Conv2d: {"groups": 1, "dilation": (1, 1), "padding_mode": "zeros"},
    nn.AvgPool2d: {"padding": (0, 0), "ceil_mode": False, "divisor_override": None},
    nn.MaxPool2d: {"ceil_mode": False, "dilation": (1, 1), "return_indices": False},
    nn.Flatten: {"start_dim": 1, "end_dim": -1},
}


def _steps(layers: nn.Module) -> list[Node]:
    """Return the operations as maps of bounds, or why there are none."""
    require_unaltered("the stack of layers" if graph.is_plain_stack(layers) else "the network", layers)
    operations = graph.operations_of(layers)
    last = operations[-1].layer if operations else None
    if type(last) is not nn.Linear or last.out_features < 2:
        raise ModelError(
            "the last layer has to be linear, with two classes or more.", remedy="End the network with nn.Linear."
        )
    for operation in operations:
        _refuse_unknown(operation.name, operation.layer)
    for name, layer in layers.named_modules():
        require_unaltered(f"layer '{name}'", layer)
    steps: list[Node] = []
    places = {graph.INPUT: graph.INPUT}
    for place, operation in enumerate(operations):
        inputs = tuple(places[source] for source in operation.inputs)
        if isinstance(operation.layer, nn.Identity):
            places[place] = inputs[0]
        else:
            places[place] = len(steps)
            steps.append(Node(_MAKERS[type(operation.layer)](operation.layer, last.weight.device), inputs))
    return steps


def _refuse_unknown(name: str, layer: nn.Module) -> None:
    kind = type(layer)
    if kind is not nn.Identity and kind not in _MAKERS:
        known = ", ".join(
            known.__name__ for known in _MAKERS if known.__module__.startswith("torch.") or known is Squash
        )
        raise ModelError(f"layer '{name}' is {kind.__name__}: no bounds are known for it.", remedy=f"Use only {known}.")
    for setting, required in _REQUIRED.get(kind, {}).items():
        given = getattr(layer, setting)
        if given != required and not (isinstance(required, tuple) and (given, given) == required):
            raise ModelError(
                f"layer '{name}' is {kind.__name__} with {setting}={given}: no bounds are known for it.",
                remedy=f"Use {setting}={required}.",
            )
    if isinstance(layer, nn.Conv2d) and isinstance(layer.padding, str):
        raise ModelError(f"layer '{name}' has padding='{layer.padding}'.", remedy="Give the padding as a number.")
    if isinstance(layer, Squash) and not (0 < layer.slope < 1e30 and max(map(abs, layer.thresholds)) <= 2):
        raise ModelError(
            f"layer '{name}' has the slope {layer.slope:g} and thresholds {layer.thresholds}.",
            remedy="Give a positive slope and thresholds inside the range of inputs.",
        )
    held = dict(layer.named_parameters()) | dict(layer.named_buffers())
    for parameter, value in held.items():
        plain = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided
        if not plain or value.dtype != torch.float32 or not bool(value.isfinite().all()):
            raise ModelError(
                f"the {parameter} of layer '{name}' is {value.dtype} in a {type(value).__name__}, or not finite.",
                why="The certificate is about passes in float32.",
                remedy="Call .float(), or train the network again.",
            )


def _pair(setting: int | tuple[int, int]) -> tuple[int, int]:
    return setting if isinstance(setting, tuple) else (setting, setting)
