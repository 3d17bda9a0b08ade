"""What will become of a network handed over: tried out on public points, and said before any data is read."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from stobatch.bounds.certifier import why_unbounded
from stobatch.config import RunConfig
from stobatch.dp.clipping import Batch, clipped_sum_partly_formed, clipper_for, formed_at_once, unrecorded
from stobatch.dp.mixing import FEW_ROWS
from stobatch.errors import ModelError
from stobatch.methods import method_of
from stobatch.models import HandedOver, budget_mb, rows_in_memory
from stobatch.models.experiments import require_function
from stobatch.models.handed_over import public_points
from stobatch.models.low_rank import as_deployed
from stobatch.sound.settings import DpSgdSettings

_MOST_ROWS = 512
"""Of the largest public batch; methods repeat the experiments at the size that they pass, where they pass it."""


def describe_prospects(config: RunConfig, network: HandedOver) -> tuple[str, ...]:
    """Return how a network will be clipped and certified; raises at what no method can train.

    Whatever it raises it raises before any data is read, and nothing is written.
    """
    batch = getattr(config.method, "batch_size", _MOST_ROWS)
    require_function(network, min(batch, rows_in_memory(network, budget_mb(config.machine) // 8, most=_MOST_ROWS)))
    trained = sum(p.numel() for p in network.parameters() if p.requires_grad)
    held = sum(p.numel() for p in network.parameters()) - trained
    sizes = f"network: {network.name}, {trained:,} values to train" + (f", {held:,} held fixed" if held else "")
    clipped = (_clipping(network),) if isinstance(config.method, DpSgdSettings) else ()
    return sizes, *clipped, _certificates(config, network)


def _clipping(network: HandedOver) -> str:
    probe = public_points(network, FEW_ROWS), torch.arange(FEW_ROWS, device=network.device) % network.num_classes
    try:
        way = clipper_for(network, _cross_entropy, probe)
    except (RuntimeError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())[:160].rstrip(".")
        raise ModelError(
            f"no example's gradient can be formed in your {network.name}: {reason}.",
            why="DP-SGD clips every example's gradient, and torch.func forms it where one pass does not.",
            remedy="Let its forward not branch on values, and change no tensor in place.",
        ) from None
    if not (formed := formed_at_once(network, way)):
        return "clipping: in one backward pass, no example's gradient is formed"
    left_over = [f"'{name.removeprefix('module.')}'" for name in unrecorded(network)]
    named = ", ".join(left_over[:4]) + (", ..." if len(left_over) > 4 else "")
    cost = f"{formed:,} bytes for each example that passes at once"
    if way is clipped_sum_partly_formed:
        return f"clipping: in one backward pass, and in a second that forms gradients of {named}, {cost}"
    why = f"no layer that one pass can clip holds {named}" if left_over else "a weight is used outside of its layer"
    return f"clipping: every example's gradient is formed, {cost}: {why}"


def _cross_entropy(network: nn.Module, batch: Batch) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(network(inputs), labels, reduction="none")


def _certificates(config: RunConfig, network: HandedOver) -> str:
    ways = method_of(config).certificates
    if "bounds" not in ways:
        return f"certificates: method {config.method.title} has none for a network of your own"
    unbounded = why_unbounded(as_deployed(network)).rstrip(".")
    noise = config.method.noise if isinstance(config.method, DpSgdSettings) else None
    votes = f"votes under {noise}" if noise is not None else ""
    if not unbounded:
        return f"certificates: bounds, of forward as torch.fx follows it{f'; or {votes}' if votes else ''}"
    without = "votes need method.smoothing_stddev, which is 0"
    return f"certificates: {votes or 'none, ' + without}; {unbounded}"
