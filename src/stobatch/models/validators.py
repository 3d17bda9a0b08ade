"""Refuse networks in which one example can reach another's output or is left behind.

What mixes is found by type and by experiment (`dp.mixing`). A module that writes down something of the examples that
pass is found by comparing it, bit by bit, with what it was before a pass (`unchanged`) or a training (`SavedState`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from stobatch.dp.mixing import FEW_ROWS, mixing_experiment, require_no_mixing_layers
from stobatch.errors import ModelError
from stobatch.later import Later
from stobatch.models.classifier import Classifier


def require_per_example(network: Classifier, rows: int = FEW_ROWS) -> None:
    """Raise unless every output depends on its own input alone, and passes leave nothing behind.

    Tried out on public points, in batches of a few rows and of `rows`, as many as will pass at once, and in the mode,
    precision and gradient mode that the caller is in: a layer may behave otherwise in another.
    """
    require_no_mixing_layers(
        network,
        remedy="Set model.normalisation to reference or group, or use stobatch.models.fix(module).",
    )
    generator = torch.Generator().manual_seed(1)
    with unchanged(network):
        for count in sorted({FEW_ROWS, rows} - {1}):
            # Small inputs, so that a replacement at the edge of the range becomes the batch's extreme.
            probe = torch.rand(count, *network.input_shape, generator=generator) - 0.5
            probe = probe.to(network.device, network.dtype) / 10
            if reached := mixing_experiment(network, probe, (-1.0, 0.0, 1.0), generator):
                raise ModelError(
                    f"changing one example of a batch changes another example's output, in batches of {count}.",
                    why=f"Some layer mixes examples or draws random numbers, found with {reached}, so no per-example "
                    "bound exists.",
                    remedy="Remove that layer (dropout, batch statistics, mixing) or make it work on single examples.",
                )


_INTERNAL = frozenset(vars(nn.Module()))
_DEEPEST = 4
"""How far into lists and dictionaries of a module's attributes is looked."""


def keeps_nothing(function: object) -> bool:
    """Return whether passes through it may run in several threads at once.

    True of modules made of PyTorch's layers and this library's alone, without hooks and with no statistics to update:
    they write nothing down as they run. Of somebody's own code nobody knows.
    """
    return isinstance(function, nn.Module) and all(
        type(module).__module__.startswith(("torch.nn.", "stobatch."))
        and not (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)
        and not (module.training and isinstance(module, nn.modules.batchnorm._NormBase))
        for module in function.modules()
    )


@contextmanager
def unchanged(network: nn.Module, later: Later | None = None) -> Iterator[None]:
    """Raise if what happens in the block changes a bit of the network's state.

    What a GPU says of it is read at once, or with `later` when its owner looks.
    """
    before = _State(network)
    yield
    before.require_same(later)


class _State:
    """A copy of everything that a network holds."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.tensors = {name: value.detach().clone() for name, value in _tensors(network).items()}
        self.rest = _attributes(network)

    def require_same(self, later: Later | None) -> None:
        now, rest = _tensors(self.network), _attributes(self.network)
        changed, on_gpu = _differing_here(now, self.tensors)
        changed += [name for name in rest.keys() | self.rest.keys() if rest.get(name) != self.rest.get(name)]
        if later is None:
            changed += _differing_at_one_look(on_gpu)
        elif on_gpu:
            names = tuple(on_gpu)
            later.ask(_differ(on_gpu), lambda seen: _require_none(_named(names, seen)))
        _require_none(changed)


def _require_none(changed: list[str]) -> None:
    if changed:
        raise ModelError(
            f"passing examples through the network changes its '{min(changed)}'.",
            why="What a module writes down while examples pass is a statement about them, without noise, and lets "
            "one example reach another.",
            remedy="Use modules that keep nothing: no running statistics, counters or caches.",
        )


def _differing(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> list[str]:
    """Return the names whose tensors have not the same bits."""
    found, on_gpu = _differing_here(some, others)
    return found + _differing_at_one_look(on_gpu)


Pairs = dict[str, tuple[Tensor, Tensor]]


def _differing_here(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> tuple[list[str], Pairs]:
    """Return the names whose tensors have not the same bits, and what only a GPU can compare."""
    found: list[str] = []
    pairs: Pairs = {}
    for name in some.keys() | others.keys():
        one, other = some.get(name), others.get(name)
        if one is None or other is None or not _comparable(one, other):
            found.append(name)
        elif one.is_cuda:
            pairs[name] = one, other
        elif not torch.equal(_bits(one), _bits(other)):
            found.append(name)
    return found, pairs


def _differing_at_one_look(pairs: Pairs) -> list[str]:
    """Return the names of the pairs that have not the same bits. A look waits for the GPU, so there is one for all."""
    return _named(tuple(pairs), _differ(pairs).tolist()) if pairs else []


def _differ(pairs: Pairs) -> Tensor:
    """Return a flag for each pair."""
    flags = [(_bits(one) != _bits(other)).any() for one, other in pairs.values()]
    return torch.stack([flag.to(flags[0].device) for flag in flags])


def _named(names: Sequence[str], seen: Sequence[bool]) -> list[str]:
    return [name for name, differs in zip(names, seen, strict=True) if differs]


def _comparable(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def _bits(tensor: Tensor) -> Tensor:
    """As whole numbers, of which none is NaN; wide ones, which are compared faster."""
    return tensor.detach().contiguous().flatten().view(_WORDS.get(tensor.element_size(), torch.int64))


def _tensors(network: nn.Module) -> dict[str, Tensor]:
    """Parameters, trained or not, and buffers, saved or not."""
    return dict(network.named_parameters(remove_duplicate=False)) | dict(network.named_buffers(remove_duplicate=False))


def _attributes(network: nn.Module) -> dict[str, object]:
    """Return what modules keep beside parameters and buffers: numbers, tensors, and lists of them."""
    found: dict[str, object] = {}
    for prefix, module in network.named_modules():
        kept = {key: value for key, value in vars(module).items() if key not in _INTERNAL}
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            kept["extra state"] = module.get_extra_state()
        found |= {f"{prefix}.{key}".removeprefix("."): _frozen(value, _DEEPEST) for key, value in kept.items()}
    return found


def _frozen(value: object, depth: int) -> object:
    """Return a copy that can be compared; of what is not plain only the kind."""
    if isinstance(value, Tensor):
        return tuple(value.shape), str(value.dtype), _bits(value).cpu().numpy().tobytes()
    if isinstance(value, np.ndarray):
        return value.shape, str(value.dtype), value.tobytes()
    if isinstance(value, int | float | complex | str | bytes | bool | None):
        return repr(value)
    if depth and isinstance(value, Mapping):
        return tuple((repr(key), _frozen(entry, depth - 1)) for key, entry in value.items())
    if depth and isinstance(value, list | tuple | set | frozenset):
        return tuple(_frozen(entry, depth - 1) for entry in value)
    return type(value).__qualname__


def untrained(network: nn.Module) -> dict[str, Tensor]:
    """Return what `state_dict` holds beside trained parameters; raises at what is no tensor: no model file holds it."""
    trained = {id(p) for p in network.parameters() if p.requires_grad}
    found = {name: value for name, value in network.state_dict(keep_vars=True).items() if id(value) not in trained}
    for name, value in found.items():
        if not isinstance(value, Tensor):
            raise ModelError(
                f"the network's state has the entry '{name}', a {type(value).__name__}.",
                why="A model file holds tensors alone.",
                remedy="Return a tensor from get_extra_state, or do without it.",
            )
    return found


class SavedState:
    """What will be saved beside trained parameters, as it is before the first example passes."""

    def __init__(self, network: nn.Module, released: frozenset[str] = frozenset()) -> None:
        self.network, self.released = network, released
        self.first = {name: value.detach().clone() for name, value in untrained(network).items()}

    def require_same(self) -> None:
        """Raise unless it still has the same bits, but for what the method has released with noise."""
        now = untrained(self.network)
        for name in sorted(_differing(now, self.first)):
            if name not in self.released:
                raise ModelError(
                    f"the state '{name}' is not trained, and is not what it was before training.",
                    why="Saved with the model it would publish what it holds of the training data, without noise.",
                    remedy="Use modules that write nothing down; the run keeps its last checkpoint, nothing was saved.",
                )
