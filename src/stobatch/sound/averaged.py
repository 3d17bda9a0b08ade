"""Optimisers for released gradients: SGD with momentum, or Adam, with the moving average of weights for the model.

All of it is post-processing of the released, noisy gradients.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from stobatch.config import TrainingConfig
from stobatch.optimisers import without_compiler
from stobatch.sound.settings import DpSgdSettings


class Averaged(without_compiler(torch.optim.Optimizer)):  # type: ignore[misc]
    """An optimiser with average ← decay·average + (1 - decay)·θ after each step, with a smaller decay at first."""

    @abstractmethod
    def _move(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Update one parameter in place. `state` is its own: count, moving (momentum) and average."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
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
                self._move(parameter, parameter.grad, state, group)
                count = float(state["count"])
                # Otherwise the average would contain the first, bad weights for about 1/(1 - decay) steps.
                decay = min(group["decay"], (1 + count) / (10 + count))
                state["average"].mul_(decay).add_(parameter, alpha=1 - decay)
                state["count"] += 1

    @torch.no_grad()
    def use_average(self) -> None:
        """Replace the parameters by the average; idempotent."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if self.state[parameter]:
                    parameter.copy_(self.state[parameter]["average"])


class AveragedSGD(Averaged):
    """SGD with momentum: m ← momentum·m + g, θ ← θ - lr·m."""

    def __init__(self, params: Iterable[nn.Parameter], *, lr: float, momentum: float, decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    def _move(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["moving"].mul_(group["momentum"]).add_(gradient)
        parameter.add_(state["moving"], alpha=-group["lr"])


class AveragedAdam(Averaged):
    """Adam: θ ← θ - lr·m̂/(√v̂ + 1e-8), with m̂ and v̂ bias-corrected moving averages of g and g²."""

    FIRST, SECOND, FLOOR = 0.9, 0.999, 1e-8

    def __init__(self, params: Iterable[nn.Parameter], *, lr: float, decay: float) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})

    def _move(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        squares: Tensor = state.setdefault("squares", torch.zeros_like(parameter))
        state["moving"].mul_(self.FIRST).add_(gradient, alpha=1 - self.FIRST)
        squares.mul_(self.SECOND).addcmul_(gradient, gradient, value=1 - self.SECOND)
        step = float(state["count"]) + 1
        scale = squares.sqrt().div_(sqrt(1 - self.SECOND**step)).add_(self.FLOOR)
        parameter.addcdiv_(state["moving"], scale, value=-group["lr"] / (1 - self.FIRST**step))


def make_descent(parameters: Iterable[nn.Parameter], training: TrainingConfig, method: DpSgdSettings) -> Averaged:
    """Return the optimiser that the settings name."""
    if training.optimiser == "adam":
        return AveragedAdam(parameters, lr=training.learning_rate, decay=method.average_decay)
    return AveragedSGD(parameters, lr=training.learning_rate, momentum=method.momentum, decay=method.average_decay)
