"""Refuse networks in which one example can reach another's output, and mend what can be mended.

Every guarantee of this library is about one example: a sensitivity, a clipped gradient, a certified radius. A layer
that mixes examples voids them all at once, so it is looked for by type and by experiment.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from stobatch.errors import ModelError
from stobatch.models.classifier import Classifier
from stobatch.models.state import unchanged

FEW_ROWS = 4
SAME_SCORES = 1e-5
"""Of the largest score: what may differ without anything being mixed."""
_MIXING = (nn.modules.batchnorm._BatchNorm,)


def mixing_layers(module: nn.Module) -> list[str]:
    """Names of layers whose outputs depend on the whole batch."""
    return [
        name
        for name, layer in module.named_modules()
        if isinstance(layer, _MIXING)
        and (not isinstance(layer, nn.modules.instancenorm._InstanceNorm) or layer.track_running_stats)
    ]


def replace_batch_norm(module: nn.Module) -> nn.Module:
    """A copy with every batch normalisation replaced by a GroupNorm over the same channels."""
    return _replaced(copy.deepcopy(module), {})


def _replaced(module: nn.Module, done: dict[nn.Module, nn.Module]) -> nn.Module:
    if module not in done:
        done[module] = _group_norm(module) if mixing_layers(module) == [""] else module
        for name, child in list(module._modules.items()):
            if child is not None:
                setattr(module, name, _replaced(child, done))
    return done[module]


def _group_norm(layer: nn.Module) -> nn.GroupNorm:
    channels = layer.num_features
    assert isinstance(channels, int)
    # A group of one value normalises to zero, so vectors get one group of all.
    on_vectors = isinstance(layer, nn.BatchNorm1d)
    groups = 1 if on_vectors else next(g for g in (8, 4, 2, 1) if channels % g == 0)
    return nn.GroupNorm(groups, channels)


def require_per_example(network: Classifier, rows: int = FEW_ROWS) -> None:
    """Raise unless every output depends on its own input alone, and passes leave nothing behind.

    Tried out on public points, in batches of a few rows and of `rows`, as many as will pass at once, and in the mode,
    precision and gradient mode that the caller is in: a layer may behave otherwise in another.
    """
    for name in mixing_layers(network):
        layer = type(network.get_submodule(name)).__name__
        raise ModelError(
            f"layer '{name}' is {layer}: each output depends on the whole batch, so no per-example bound exists.",
            remedy="Set model.normalisation to reference or group, or use stobatch.models.replace_batch_norm(module).",
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


def mixing_experiment(
    scores: Callable[[Tensor], Tensor], probe: Tensor, fills: Sequence[float], generator: torch.Generator
) -> str:
    """Whether rows of a batch reach each other's scores: what was done when they did, or nothing.

    A random half of the rows, the first among them, is replaced, and the scores of the other half are compared with
    what they were. The batches have the same size, so every row is computed by the same instructions, and should have
    the same bits. Some libraries choose kernels by the address of a tensor, though; so scores may differ by a
    hundred-thousandth of the largest, which is far less than a layer that mixes makes of inputs at the edges.
    """
    expected = scores(probe.clone()).detach().nan_to_num()
    filled = {f"a half at {fill:g}": torch.full_like(probe, fill) for fill in fills}
    for what, replacement in {"a half turned round": -probe, **filled}.items():
        replaced = torch.rand(len(probe), generator=generator) < 0.5
        replaced[0], replaced[-1] = True, False
        other = torch.where(replaced.view(-1, *(1,) * (probe.dim() - 1)).to(probe.device), replacement, probe)
        found = scores(other).detach().nan_to_num()
        difference = (found - expected)[~replaced.to(probe.device)].abs().max()
        if not bool(difference <= SAME_SCORES * expected.abs().max()):
            return what
    return ""
