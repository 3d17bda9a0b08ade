"""Layers and functions in which one example reaches another's output: found by type, and by experiment.

Every guarantee of this library is about one example: a sensitivity, a clipped gradient, a certified radius. What mixes
examples voids them all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from stobatch.errors import ModelError

FEW_ROWS = 4
SAME_SCORES = 1e-5
"""Of the largest score: what may differ without anything being mixed."""
_MIXING = (nn.modules.batchnorm._BatchNorm,)


def mixing_layers(module: nn.Module) -> list[str]:
    """Return names of layers whose outputs depend on the whole batch."""
    return [
        name
        for name, layer in module.named_modules()
        if isinstance(layer, _MIXING)
        and (not isinstance(layer, nn.modules.instancenorm._InstanceNorm) or layer.track_running_stats)
    ]


def require_no_mixing_layers(module: nn.Module, remedy: str) -> None:
    """Raise if a layer is of a kind that mixes examples, in whatever mode it is."""
    for name in mixing_layers(module):
        layer = type(module.get_submodule(name)).__name__
        raise ModelError(
            f"layer '{name}' is {layer}: each output depends on the whole batch, so no per-example bound exists.",
            remedy=remedy,
        )


def mixing_experiment(
    scores: Callable[[Tensor], Tensor], probe: Tensor, fills: Sequence[float], generator: torch.Generator
) -> str:
    """Return whether rows of a batch reach each other's scores: what was done when they did, or nothing.

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
