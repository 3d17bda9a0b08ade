"""All trainers in this process, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

from stobatch.training.engines.base import Engine, Gradients, TrainerTask


@final
class InProcessEngine(Engine):
    """The reference engine: every other engine must give the same parameters as this one."""

    def average(self, tasks: Sequence[TrainerTask], compute: Callable[[TrainerTask], Gradients]) -> Gradients:
        total = dict(compute(tasks[0]))
        for task in tasks[1:]:
            for name, gradient in compute(task).items():
                total[name] = total[name] + gradient
        return {name: gradient / len(tasks) for name, gradient in total.items()}
