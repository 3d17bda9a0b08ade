"""The operations of a network in the order of their computation, as bounds follow them.

A plain stack is its layers. Any other module is traced by torch.fx: its `forward` is called with a proxy for the
inputs, which records every layer and function applied to it. A forward that branches on values, or uses an operation
that has no rule here, is refused with the name of what stopped the trace.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F  # noqa: N812

from stobatch.errors import ModelError
from stobatch.models.layered import Squash
from stobatch.models.low_rank import Adapted
from stobatch.models.replacements import FrozenAffine

INPUT = -1
"""The position of the network's input among the operations."""
MAX_OPERATIONS = 128
"""The rounding allowance of `bounds.linear` covers this many operations."""
MAX_READERS = 16
"""And this many operations that read the same value."""


class Sum(nn.Module):
    """The sum of two values, as in residual networks."""

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return one + other


class Concatenation(nn.Module):
    """Several values concatenated along their channels."""

    def forward(self, *values: Tensor) -> Tensor:
        return torch.cat(values, 1)


class Operation(NamedTuple):
    """A layer, or a function as the layer that computes it, and the positions of the values that it reads."""

    layer: nn.Module
    inputs: tuple[int, ...]
    name: str
    """The name of the layer in its network, or of the function in the traced graph."""


def is_plain_stack(module: nn.Module) -> bool:
    """Return whether a module is an nn.Sequential of layers without children."""
    return type(module) is nn.Sequential and not any(list(layer.children()) for layer in module)


def operations_of(module: nn.Module) -> list[Operation]:
    """Return the operations of a call of the module, in order of computation; the last returns the scores."""
    if is_plain_stack(module):
        return [Operation(layer, (index - 1,), name) for index, (name, layer) in enumerate(module.named_children())]
    if not list(module.children()) and module.__module__.startswith("torch.nn"):
        return [Operation(module, (INPUT,), type(module).__name__)]
    return _TracedNetwork(module).operations


class _Proxy(fx.Proxy):
    """Record `x += y` as in-place: fx alone takes it for `x = x + y`, but it overwrites all aliases of x."""


def _in_place(function: Callable[..., Any]) -> Callable[[_Proxy, Any], fx.Proxy]:
    return lambda self, other: self.tracer.create_proxy("call_function", function, (self, other), {})


for _operator in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"):
    setattr(_Proxy, f"__i{_operator}__", _in_place(getattr(operator, f"i{_operator}")))


class _Tracer(fx.Tracer):
    """Record layers without children as leaves, and trace into user-defined modules."""

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        has_rule = type(m) in (Squash, FrozenAffine) or isinstance(m, Adapted)
        return has_rule or (super().is_leaf_module(m, module_qualified_name) and not list(m.children()))


def _trace(module: nn.Module) -> fx.Graph:
    before = set(vars(module))
    try:
        return _Tracer().trace(module)
    except Exception as error:  # a user's forward may raise anything
        reason = " ".join(str(error).split())[:160].rstrip(".") or type(error).__name__
        raise _unknown(module, f"its forward cannot be traced: {reason}") from None
    finally:
        # fx stores constants as attributes of the user's module: remove them.
        for name in set(vars(module)) - before:
            delattr(module, name)


def _unknown(module: nn.Module, what: str) -> ModelError:
    return ModelError(
        f"there are no bounds for a {type(module).__name__}: {what}.",
        why="Bounds have a rule for each layer, residual sum and pooling, and for nothing else.",
        remedy="Write it with those alone, or certify it by vote: method.smoothing_stddev, stobatch.votes.certify.",
    )


class _TracedNetwork:
    """The operations of a traced graph."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.operations = module, list[Operation]()
        self.positions: dict[fx.Node, int] = {}
        graph = _trace(module)
        for node in graph.nodes:
            if node.op == "placeholder":
                self._add_input(node)
            elif not node.users and node.op != "output":
                raise self._error(f"it computes '{node.name}' and does not use it")
            elif node.op == "output":
                self._require_last(node)
            elif node.op == "call_module":
                self._add_layer(node)
            elif node.op in ("call_function", "call_method") and not _is_size(node):
                self._add_function(node)
            elif node.op == "get_attr":
                raise self._error(f"it uses '{node.target}' outside of a layer")
        self._require_small(graph)

    def _error(self, what: str) -> ModelError:
        return _unknown(self.module, what)

    def _add_input(self, node: fx.Node) -> None:
        if node.users and INPUT in self.positions.values():
            raise self._error("its forward has more than one input")
        if node.users:
            self.positions[node] = INPUT

    def _require_last(self, node: fx.Node) -> None:
        (result,) = node.args
        if self.positions.get(result) != len(self.operations) - 1 or not self.operations:  # type: ignore[arg-type]
            raise self._error("it does not return the scores of its last operation alone")

    def _require_small(self, graph: fx.Graph) -> None:
        readers = max((len(node.users) for node in graph.nodes if node in self.positions), default=0)
        if len(self.operations) > MAX_OPERATIONS or readers > MAX_READERS:
            raise self._error(
                f"it has {len(self.operations)} operations, and a value that {readers} of them read; the rounding "
                f"allowance covers {MAX_OPERATIONS} and {MAX_READERS}"
            )

    def _add_layer(self, node: fx.Node) -> None:
        layer = self.module.get_submodule(str(node.target))
        if len(node.args) != 1 or node.kwargs:
            raise self._error(f"layer '{node.target}' is given more than one value")
        if getattr(layer, "inplace", False):
            self._require_sole_reader(node, str(node.target))
        self._add(node, [layer], node.args, str(node.target))

    def _add_function(self, node: fx.Node) -> None:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
        make = _FUNCTIONS.get(node.target) if node.op == "call_function" else _METHODS.get(str(node.target))
        match = make(node) if make is not None else None
        if match is None:
            given = ", ".join([str(one) for one in node.args[1:]] + [f"{k}={v}" for k, v in node.kwargs.items()])
            raise self._error(f"'{name}' with ({given}) in its forward is not known")
        layers, values = match
        if str(name) in _IN_PLACE or node.kwargs.get("inplace"):
            self._require_sole_reader(node, str(name))
        self._add(node, layers, values, str(node.name))

    def _add(self, node: fx.Node, layers: Sequence[nn.Module], values: Sequence[Any], name: str) -> None:
        if not all(isinstance(value, fx.Node) and value in self.positions for value in values):
            raise self._error(f"'{name}' is given something other than results of earlier operations")
        inputs = tuple(self.positions[value] for value in values)
        for layer in layers:
            self.operations.append(Operation(layer, inputs, name))
            inputs = (len(self.operations) - 1,)
        self.positions[node] = len(self.operations) - 1

    def _require_sole_reader(self, node: fx.Node, name: str) -> None:
        """Raise unless a value that is overwritten, and every alias of its memory, has this one reader."""
        value = node.args[0]
        while isinstance(value, fx.Node):
            if len(value.users) > 1 or self.positions.get(value) == INPUT:
                raise self._error(
                    f"'{name}' overwrites a value that is read elsewhere; stobatch.models.fix mends layers"
                )
            if not self._shares_memory(value):
                return
            value = value.args[0]

    def _shares_memory(self, node: fx.Node) -> bool:
        layer = self.operations[self.positions[node]].layer
        return isinstance(layer, nn.Flatten | nn.Identity) or bool(getattr(layer, "inplace", False))


def _is_size(node: fx.Node) -> bool:
    """Return whether a node is a shape; shapes are checked where they are used, in `view` and `reshape`."""
    if node.op == "call_method":
        return node.target == "size"
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and _is_size(node.args[0])
    return node.target is getattr and node.args[1] == "shape"


def _is_batch_size(value: object) -> bool:
    """Return whether a value is x.size(0), x.size()[0] or x.shape[0]."""
    if not isinstance(value, fx.Node) or not _is_size(value):
        return False
    if value.op == "call_method":
        return value.args[1:] == (0,) and not value.kwargs
    return value.target is operator.getitem and value.args[1:] == (0,) and _whole_size(value.args[0])


def _whole_size(value: object) -> bool:
    assert isinstance(value, fx.Node)
    return value.target is getattr or (value.target == "size" and len(value.args) == 1 and not value.kwargs)


Match = tuple[list[nn.Module], Sequence[Any]] | None
"""The layers that compute a function, and its operands; None for arguments that have no rule."""


def _unary(layer: Callable[[], nn.Module], options: frozenset[str] = frozenset()) -> Callable[[fx.Node], Match]:
    def make(node: fx.Node) -> Match:
        known = len(node.args) == 1 and node.kwargs.keys() <= options
        return ([layer()], node.args) if known else None

    return make


def _sum(node: fx.Node) -> Match:
    return ([Sum()], node.args) if len(node.args) == 2 and not node.kwargs else None


def _concatenation(node: fx.Node) -> Match:
    values, *rest = node.args
    along = rest[0] if rest else node.kwargs.get("dim", 0)
    known = isinstance(values, list | tuple) and along == 1 and node.kwargs.keys() <= {"dim"}
    return ([Concatenation()], values) if known else None  # type: ignore[return-value]


def _flatten(node: fx.Node) -> Match:
    given = dict(zip(("start_dim", "end_dim"), node.args[1:], strict=False)) | node.kwargs
    known = {"start_dim": 0, "end_dim": -1} | given == {"start_dim": 1, "end_dim": -1}
    return ([nn.Flatten()], node.args[:1]) if known else None


def _reshape(node: fx.Node) -> Match:
    value, *shape = node.args
    if len(shape) == 1 and isinstance(shape[0], list | tuple):
        shape = list(shape[0])
    known = len(shape) == 2 and _is_batch_size(shape[0]) and shape[1] == -1 and not node.kwargs
    return ([nn.Flatten()], (value,)) if known else None


def _pooling(kind: Callable[..., nn.Module], names: tuple[str, ...]) -> Callable[[fx.Node], Match]:
    def make(node: fx.Node) -> Match:
        given = dict(zip(names, node.args[1:], strict=False)) | node.kwargs
        plain = not any(isinstance(value, fx.Node) for value in given.values())
        return ([kind(**given)], node.args[:1]) if plain and given.keys() <= set(names) else None

    return make


def _mean(node: fx.Node) -> Match:
    given = dict(zip(("dim", "keepdim"), node.args[1:], strict=False)) | node.kwargs
    axes = given.get("dim")
    known = isinstance(axes, list | tuple) and sorted(axes) in ([2, 3], [-2, -1]) and given.keys() <= {"dim", "keepdim"}
    if not known:
        return None
    return [nn.AdaptiveAvgPool2d(1), *([] if given.get("keepdim") else [nn.Flatten()])], node.args[:1]


_POOL = ("kernel_size", "stride", "padding")
_RELU, _TANH = _unary(nn.ReLU, frozenset({"inplace"})), _unary(nn.Tanh)
_AVERAGE = _pooling(nn.AvgPool2d, (*_POOL, "ceil_mode", "count_include_pad", "divisor_override"))
_LARGEST = _pooling(nn.MaxPool2d, (*_POOL, "dilation", "ceil_mode", "return_indices"))
_ADAPTIVE = _pooling(nn.AdaptiveAvgPool2d, ("output_size",))
_IN_PLACE = frozenset({"iadd", "relu_", "add_", "tanh_"})
_FUNCTIONS: dict[Any, Callable[[fx.Node], Match]] = {
    operator.add: _sum,
    operator.iadd: _sum,
    torch.add: _sum,
    torch.cat: _concatenation,
    torch.concat: _concatenation,
    torch.relu: _RELU,
    F.relu: _RELU,
    torch.tanh: _TANH,
    F.tanh: _TANH,
    torch.flatten: _flatten,
    torch.mean: _mean,
    F.avg_pool2d: _AVERAGE,
    F.max_pool2d: _LARGEST,
    torch.max_pool2d: _LARGEST,
    F.adaptive_avg_pool2d: _ADAPTIVE,
}
_METHODS: dict[str, Callable[[fx.Node], Match]] = {
    "add": _sum,
    "add_": _sum,
    "relu": _RELU,
    "relu_": _RELU,
    "tanh": _TANH,
    "flatten": _flatten,
    "view": _reshape,
    "reshape": _reshape,
    "mean": _mean,
}


def window_of(layer: nn.AdaptiveAvgPool2d, sides: Sequence[int]) -> tuple[int, int]:
    """Return the window of an adaptive mean for an input of these sides; raise unless all windows are equal."""
    size = layer.output_size
    sizes = tuple(size) if isinstance(size, list | tuple) else (size, size)
    outputs = [side if output is None else int(output) for side, output in zip(sides, sizes, strict=True)]
    if any(side % output for side, output in zip(sides, outputs, strict=True)):
        raise _unknown(layer, f"its windows of {'x'.join(map(str, sides))} values have different sizes")
    height, width = (side // output for side, output in zip(sides, outputs, strict=True))
    return height, width
