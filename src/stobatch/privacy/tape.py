"""Which values met which weights in a forward pass: all that is needed to know every example's gradient.

An affine layer's gradient is made of its inputs and of the gradient at its outputs. A tape keeps the pairs, so that one
backward pass tells the norm of each example's gradient before any gradient of a weight is formed.

Of outputs it keeps the place in autograd's graph, not the values: a later layer may overwrite those to save time, and
the gradient is still the one at what the layer returned. Inputs have to stay as they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from stobatch.errors import ModelError

RECORDED = (nn.Linear, nn.Conv2d, nn.GroupNorm)
"""PyTorch's layers whose gradients are known from their inputs and outputs; other layers `note` their uses."""


class Meets(Enum):
    """What of a layer's weight W the inputs were multiplied with."""

    WEIGHT = "W a + b"
    TRANSPOSE = "Wᵀ a, of a layer without bias"
    ABSOLUTE = "|W| a"
    DIFFERENCES = "|W_j - W_k| a for every pair of classes j < k"


@dataclass(frozen=True)
class Use:
    """One application of a layer. Rows belong to examples in order; an example may have several rows."""

    inputs: Tensor
    at: GradientEdge
    """Where in the graph its outputs were made."""
    meets: Meets = Meets.WEIGHT
    labels: Tensor | None = None
    """Of `DIFFERENCES`: each example's class, which every pair that matters to it contains."""


_ACTIVE: ContextVar[Tape | None] = ContextVar("tape", default=None)


@dataclass
class Tape:
    """Records the uses of every layer in `network` while it is open."""

    network: nn.Module
    uses: dict[nn.Module, list[Use]] = field(default_factory=dict)
    _versions: list[tuple[Tensor, int]] = field(default_factory=list)
    _hooks: list[Any] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._layers = set(self.network.modules())
        for layer in self._layers:
            if type(layer) in RECORDED:
                self._hooks.append(layer.register_forward_hook(self._record))
        self._token = _ACTIVE.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _ACTIVE.reset(self._token)
        for hook in self._hooks:
            hook.remove()

    def _record(self, layer: nn.Module, inputs: Sequence[Tensor], outputs: Tensor) -> None:
        self.add(layer, inputs[0], outputs)

    def add(
        self,
        layer: nn.Module,
        inputs: Tensor,
        outputs: Tensor,
        meets: Meets = Meets.WEIGHT,
        labels: Tensor | None = None,
    ) -> None:
        if not outputs.requires_grad or not any(p.requires_grad for p in layer.parameters(recurse=False)):
            return  # an attack's own passes, and layers that are not trained
        if layer not in self._layers:
            return  # another network's
        self.uses.setdefault(layer, []).append(Use(inputs.detach(), get_gradient_edge(outputs), meets, labels))
        # Overwriting a view changes the graph behind it: the place where it was made is no longer on the way.
        intact = (inputs, outputs) if outputs._is_view() else (inputs,)
        self._versions += [(tensor, tensor._version) for tensor in intact]

    def require_intact(self) -> None:
        """Raise if a later layer overwrote what has to stay: gradients would be taken at the wrong place."""
        if any(tensor._version != version for tensor, version in self._versions):
            raise ModelError(
                "a layer overwrites another layer's values.",
                why="Each example's gradient is told from the values that its layers saw.",
                remedy="Use layers with inplace=False.",
            )


def note(layer: nn.Module, inputs: Tensor, outputs: Tensor, meets: Meets, labels: Tensor | None = None) -> None:
    """Tell the open tape, if there is one, of a use that no forward hook sees."""
    tape = _ACTIVE.get()
    if tape is not None:
        tape.add(layer, inputs, outputs, meets, labels)
