"""Deterministic l∞ certificates: no noise, no votes, no chance of error.

A box of inputs is pushed through the network, and a class is certified when it leads by more than all that the box
and the rounding of float32 can change. Loose for deep networks, good for shallow ones that were trained for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from stobatch.bounds.arithmetic import require_plain_float32
from stobatch.bounds.linear import (
    LOWER_SLOPES,
    AveragePool,
    Box,
    Clamp,
    Convolution,
    Dense,
    Flatten,
    HyperbolicTangent,
    LargestPool,
    Passed,
    Rectifier,
    Rows,
    Step,
    lower_bounds,
)
from stobatch.errors import DataError, ModelError, UnitError
from stobatch.models.layered import Squash
from stobatch.verifier import require_stack, require_unaltered

FLOAT32_DISTANCE = 2.0**-22
"""Boxes are this much wider than asked, so that a distance may be measured, or a ball cut out, in float32."""

_COPIES = 10
"""Tensors of the size of one layer's coefficients that are alive at once, roughly."""

_CPU_EXAMPLES = 32
"""Examples at once on a CPU: enough to fill the cores, few enough to stay near the cache."""


class BoundRadii(NamedTuple):
    """What is predicted, and how far around the input no other prediction is possible."""

    prediction: Tensor
    radius: Tensor


@dataclass(frozen=True)
class BoxCertifier:
    """Proves that no input within an l∞ radius changes the class that a stack of layers names.

    `interval` propagates boxes. `linear` also follows linear lower bounds of every lead back to the last squash, tanh
    or max-pooling, or to the input, and keeps the better bound: slower, never worse.

    **Guarantee.** Where `margins` is positive, every float32 input in [-1, 1] within the radius of the given one gets
    the same prediction from the deployed float32 pass, on any device that keeps to the assumptions of
    `linear_bounds`: its rounding errors are part of the bounds, and so are those of the bounds themselves.

    >>> leads_by_one = nn.Linear(1, 2)
    >>> _ = leads_by_one.load_state_dict({"weight": torch.tensor([[1.0], [-1.0]]), "bias": torch.zeros(2)})
    >>> certifier = BoxCertifier(nn.Sequential(leads_by_one))
    >>> certifier.certified_radius(torch.tensor([[0.5], [-0.3]]), largest=1.0, tolerance=0.125)
    CertifiedRadii(prediction=tensor([0, 1]), radius=tensor([0.3750, 0.2500], dtype=torch.float64))
    """

    layers: nn.Sequential
    method: Literal["interval", "linear"] = "linear"
    memory_mb: int = 512
    deployed: nn.Module | None = None
    """The network that is called, if it is not the stack itself."""

    def __post_init__(self) -> None:
        self._steps()

    @classmethod
    def of(cls, network: nn.Module, memory_mb: int) -> Self:
        """For the calls of a network; raises unless they compute what its layers say."""
        return cls(require_stack(network), memory_mb=memory_mb, deployed=network)

    @torch.no_grad()
    def predict(self, inputs: Tensor) -> Tensor:
        """The deployed prediction, the class that certificates are about.

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
        """Whether each example (row) is certified at each radius (column).

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

    @torch.no_grad()
    def certified_radius(self, inputs: Tensor, *, largest: float, tolerance: float) -> BoundRadii:
        """The largest multiple of `tolerance` up to `largest` that bisection finds certified; 0 where none is.

        Sound whether or not bounds fall with the radius: each radius returned is one that was checked.
        """
        if not 0 < tolerance <= largest:
            raise UnitError(
                f"tolerance={tolerance:g} with largest={largest:g} leaves no radius to check.",
                remedy="Give 0 < tolerance <= largest.",
            )
        inputs = self._checked(inputs)
        predictions = self.predict(inputs)
        steps = int(largest / tolerance + 1e-9)
        proved = torch.zeros(len(inputs), dtype=torch.long, device=inputs.device)
        failed = torch.full_like(proved, steps + 1)
        while bool((failed - proved > 1).any()):
            todo = (failed - proved > 1).nonzero().squeeze(1)
            middle = (proved[todo] + failed[todo]) // 2
            radius = _checked_radii(middle.double() * tolerance, inputs[todo])
            holds = self._margins(inputs[todo], predictions[todo], radius, until_positive=True) > 0
            proved[todo] = torch.where(holds, middle, proved[todo])
            failed[todo] = torch.where(holds, failed[todo], middle)
        return BoundRadii(predictions, proved.double() * tolerance)

    def _steps(self) -> list[Step]:
        """Of the layers as they are now: weights and hooks may have changed since the last question."""
        if self.deployed is not None and require_stack(self.deployed) is not self.layers:
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
        self, steps: list[Step], inputs: Tensor, predictions: Tensor, radii: Tensor, *, until_positive: bool
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

    def _examples_in_memory(self, inputs: Tensor, steps: list[Step]) -> int:
        *hidden, head = _passes(steps, _ball(inputs[:1], inputs.new_zeros(1).double()))
        largest = max(passed.before.low.numel() for passed in (*hidden, head))
        rows = head.after.low.numel() - 1
        examples = max(1, self.memory_mb * 2**20 // (8 * _COPIES * rows * largest))
        return min(examples, _CPU_EXAMPLES) if inputs.is_cpu else examples

    def _checked(self, inputs: Tensor) -> Tensor:
        """The inputs where the network is, if they are what certificates speak of."""
        if inputs.dtype != torch.float32:
            raise DataError(f"inputs are {inputs.dtype}, the deployed pass is float32.", remedy="Call inputs.float().")
        if not bool((inputs.abs() <= 1).all()):
            raise DataError(
                "inputs leave [-1, 1] or are not numbers.",
                why="The certificate is about inputs in that range.",
                remedy="Scale them as stobatch.data does.",
            )
        device = next(self.layers.parameters()).device
        require_plain_float32(self.layers, device)
        return inputs.to(device)


def _checked_radii(radius: float | Tensor, inputs: Tensor) -> Tensor:
    radii = torch.as_tensor(radius, dtype=torch.float64, device=inputs.device).expand(len(inputs))
    if not bool(((radii >= 0) & radii.isfinite()).all()):
        raise UnitError(f"a radius of {radius} is not a size.", remedy="Give a number that is at least 0.")
    return radii


def _ball(inputs: Tensor, radii: Tensor) -> Box:
    """Everything in [-1, 1] within the radius, a hair more than all of it."""
    wide = radii.view(-1, *(1,) * (inputs.dim() - 1)) * (1 + FLOAT32_DISTANCE) + FLOAT32_DISTANCE
    centre = inputs.double()
    return Box((centre - wide).clamp(-1, 1), (centre + wide).clamp(-1, 1))


def _passes(steps: list[Step], box: Box) -> Iterator[Passed]:
    for step in steps:
        if isinstance(step, Dense) and box.low.dim() != 2:
            shape = "x".join(map(str, box.low.shape[1:]))
            raise ModelError(f"a linear layer is given {shape} values.", remedy="Put nn.Flatten() before it.")
        passed = step.forward(box)
        yield passed
        box = passed.after


def _require_within_bounds(steps: list[Step], inputs: Tensor, scores: Tensor) -> None:
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
    """The predicted score less each other one, example by example, in terms of the last hidden layer."""
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


_MAKERS: dict[type[nn.Module], Callable[..., Step]] = {
    Squash: lambda layer, device: Clamp(layer.slope, layer.thresholds),
    nn.Linear: lambda layer, device: Dense(layer),
    nn.Conv2d: lambda layer, device: Convolution(layer),
    nn.AvgPool2d: lambda layer, device: AveragePool(_pair(layer.kernel_size), _pair(layer.stride), device),
    nn.MaxPool2d: lambda layer, device: LargestPool(_pair(layer.kernel_size), _pair(layer.stride)),
    nn.Flatten: lambda layer, device: Flatten(),
    nn.ReLU: lambda layer, device: Rectifier(),
    nn.Tanh: lambda layer, device: HyperbolicTangent(),
}
"""Of these classes themselves: a subclass may compute anything."""

_NO_PADDING: dict[str, object] = {"padding": (0, 0), "ceil_mode": False}
_REQUIRED: dict[type[nn.Module], dict[str, object]] = {
    nn.Conv2d: {"groups": 1, "dilation": (1, 1), "padding_mode": "zeros"},
    nn.AvgPool2d: {**_NO_PADDING, "divisor_override": None},
    nn.MaxPool2d: {**_NO_PADDING, "dilation": (1, 1), "return_indices": False},
    nn.Flatten: {"start_dim": 1, "end_dim": -1},
}


def _steps(layers: nn.Sequential) -> list[Step]:
    """The layers as maps of bounds, or why there are none."""
    if not len(layers) or type(layers[-1]) is not nn.Linear or layers[-1].out_features < 2:
        raise ModelError(
            "the last layer has to be linear, with two classes or more.", remedy="End the network with nn.Linear."
        )
    if type(layers) is not nn.Sequential:
        raise ModelError(
            f"the layers are in a {type(layers).__name__}.",
            why="A subclass may compute anything.",
            remedy="Put them into an nn.Sequential.",
        )
    require_unaltered("the stack of layers", layers)
    for name, layer in layers.named_children():
        _refuse_unknown(name, layer)
        require_unaltered(f"layer '{name}'", layer)
    device = layers[-1].weight.device
    return [_MAKERS[type(layer)](layer, device) for layer in layers if not isinstance(layer, nn.Identity)]


def _refuse_unknown(name: str, layer: nn.Module) -> None:
    kind = type(layer)
    if kind is not nn.Identity and kind not in _MAKERS:
        known = ", ".join(known.__name__ for known in _MAKERS)
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
    for parameter, value in layer.named_parameters():
        plain = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided
        if not plain or value.dtype != torch.float32 or not bool(value.isfinite().all()):
            raise ModelError(
                f"the {parameter} of layer '{name}' is {value.dtype} in a {type(value).__name__}, or not finite.",
                why="The certificate is about passes in float32.",
                remedy="Call .float(), or train the network again.",
            )


def _pair(setting: int | tuple[int, int]) -> tuple[int, int]:
    return setting if isinstance(setting, tuple) else (setting, setting)
