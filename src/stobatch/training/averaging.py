"""Descent with momentum that also keeps a moving average of the parameters.

The average is computed from released parameters alone, so it costs no privacy; under noise it is the better model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


class AveragedSGD(torch.optim.Optimizer):
    """θ ← θ - lr·m, m ← momentum·m + g; average ← decay·average + (1 - decay)·θ, with a quicker decay at first."""

    def __init__(self, params: Iterable[nn.Parameter], *, lr: float, momentum: float, decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state: dict[str, Any] = self.state[parameter]
                if not state:
                    state["count"] = torch.zeros(())
                    state["moving"] = torch.zeros_like(parameter)
                    state["average"] = parameter.detach().clone()
                state["moving"].mul_(group["momentum"]).add_(parameter.grad)
                parameter.add_(state["moving"], alpha=-group["lr"])
                count = float(state["count"])
                # The first steps start far off; without this the average would remember them for 1/(1 - decay) steps.
                decay = min(group["decay"], (1 + count) / (10 + count))
                state["average"].mul_(decay).add_(parameter, alpha=1 - decay)
                state["count"] += 1

    @torch.no_grad()
    def adopt_average(self) -> None:
        """Make the average the parameters. Doing so twice changes nothing."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if self.state[parameter]:
                    parameter.copy_(self.state[parameter]["average"])
