"""Detect layers and functions that mix examples, by type and by experiment.

Every guarantee of this library is about one example: a sensitivity, a clipped gradient, a certified radius. A network
in which one example influences another's output voids them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from stobatch.errors import ModelError

FEW_ROWS = 4
SAME_SCORES = 1e-5
"""Differences up to this share of the largest score are rounding, not mixing."""
_MIXING = (nn.modules.batchnorm._BatchNorm,)


def mixing_layers(module: nn.Module) -> list[str]:
    """Return the names of layers whose outputs depend on the whole batch."""
    return [
        name
        for name, layer in module.named_modules()
        if isinstance(layer, _MIXING)
        and (not isinstance(layer, nn.modules.instancenorm._InstanceNorm) or layer.track_running_stats)
    ]


def require_no_mixing_layers(module: nn.Module, remedy: str) -> None:
    """Raise if a layer is of a kind that mixes examples, in training or evaluation mode."""
    for name in mixing_layers(module):
        layer = type(module.get_submodule(name)).__name__
        raise ModelError(
            f"layer '{name}' is {layer}: each output depends on the whole batch, so no per-example bound exists.",
            remedy=remedy,
        )


def mixing_experiment(
    scores: Callable[[Tensor], Tensor], probe: Tensor, fills: Sequence[float], generator: torch.Generator
) -> str:
    """Return the change of some rows that changed the scores of others, in words; an empty string if none did.

    A random half of the rows, the first among them, is replaced, and the scores of the other half are compared. The
    batches have the same size, so every row should be computed by the same instructions and have the same bits. But
    some libraries choose kernels by a tensor's address, so scores may differ by a hundred-thousandth of the largest,
    which is far less than a mixing layer makes of inputs at the ends of the range.
    """
    expected = scores(probe.clone()).detach().nan_to_num()
    filled = {f"a half at {fill:g}": torch.full_like(probe, fill) for fill in fills}
    for what, replacement in {"a half turned round": -probe, **filled}.items():
        replaced = torch.rand(len(probe), generator=generator) < 0.5
        replaced[0], replaced[-1] = True, False
        other = torch.where(replaced.view(-1, *(1,) * (probe.dim() - 1)).to(probe.device), replacement, probe)
        difference = (scores(other).detach().nan_to_num() - expected)[~replaced.to(probe.device)].abs().max()
        if not bool(difference <= SAME_SCORES * expected.abs().max()):
            return what
    return ""
