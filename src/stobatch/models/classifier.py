"""What the rest of the library asks of a network: its sizes, its place, and that it maps inputs to class scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from stobatch.config import MachineConfig


class Classifier(nn.Module, ABC):
    """A function from inputs in [-1, 1] to one score per class, each example for itself."""

    input_shape: tuple[int, ...]

    @property
    @abstractmethod
    def num_classes(self) -> int: ...

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def calibrate(self) -> None:
        """Refresh what depends on the parameters alone; most networks have nothing of the kind."""


@contextmanager
def in_mode(network: nn.Module, *, training: bool) -> Iterator[None]:
    """Put all modules into training or evaluation for the block; afterwards each has the mode that it had."""
    before = {module: module.training for module in network.modules()}
    network.train(training)
    try:
        yield
    finally:
        for module, mode in before.items():
            module.training = mode


_CPU_MB = 512
"""Activations beyond that fall out of a CPU's cache, and gain nothing."""
_TRAININGS_ON_A_GPU = 8
"""That fit beside each other where nobody sets `machine.memory_mb`."""


def budget_mb(machine: MachineConfig) -> int:
    """Return `machine.memory_mb`, or what it is where nobody set it.

    >>> budget_mb(MachineConfig()), budget_mb(MachineConfig(memory_mb=64))
    (512, 64)
    """
    if machine.memory_mb is not None:
        return machine.memory_mb
    if not machine.device.startswith("cuda"):
        return _CPU_MB
    total: int = torch.cuda.get_device_properties(machine.device).total_memory
    return max(_CPU_MB, total // _TRAININGS_ON_A_GPU // 2**20)


@torch.no_grad()
def bytes_per_row(network: Classifier) -> int:
    """Return the size of everything that one example's pass produces, layer by layer."""
    sizes: list[int] = []

    def note(module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, Tensor):
            sizes.append(output.numel() * output.element_size())

    hooks = [module.register_forward_hook(note) for module in network.modules() if not list(module.children())]
    try:
        network(torch.zeros(2, *network.input_shape, device=network.device, dtype=network.dtype))
    finally:
        for hook in hooks:
            hook.remove()
    return sum(sizes) // 2


def rows_in_memory(network: Classifier, memory_mb: int, *, most: int) -> int:
    """Return rows that fit the budget with their gradients; on a CPU at most `most`, beyond which the cache suffers."""
    if network.device.type == "cuda":
        return rows_by_trial(network.device, memory_mb, lambda rows: _forward_and_back(network, rows))
    rows = max(1, memory_mb * 2**20 // (2 * bytes_per_row(network)))
    return min(rows, most) if network.device.type == "cpu" else rows


_FEW, _MANY = 8, 4096
"""Rows of the first trial, and of any other at most."""
_ENOUGH = 1 / 16
"""Share of the budget that the last trial has to take: of few rows, workspaces of convolutions hide what they take."""
_KEPT = 0.8
"""Share of the budget that rows may take by the trials: workspaces do not grow evenly."""


def rows_by_trial(device: torch.device, memory_mb: int, trial: Callable[[int], object]) -> int:
    """Return rows that keep to the budget on a GPU, by what trials with more and more of them take.

    Counting layers misses what lies between them and what gradients need beside them: sums and copies, patches, inner
    products of rows, gradients that are formed.
    """
    budget = memory_mb * 2**20
    before, rows = _taken(device, trial, _FEW), 3 * _FEW
    taken = _taken(device, trial, rows)
    last = _FEW
    while taken < _ENOUGH * budget and rows < _MANY:
        before, last, rows = taken, rows, 4 * rows
        taken = _taken(device, trial, rows)
    each = max(1.0, (taken - before) / (rows - last))
    fixed = max(0.0, taken - rows * each)
    # A large workspace of the smaller trial would make rows look cheap: half of the mean is the least they may seem.
    most = _KEPT * budget / max(1.0, taken / rows / 2)
    rows = max(1, int(min((_KEPT * budget - fixed) / each, most)))
    # Another number of rows may be passed by another algorithm, with another workspace; of very many it is small.
    while 1 < rows <= _MANY and (taken := _taken(device, trial, rows)) > budget:
        rows = max(1, int(_KEPT * rows * budget / taken))
    return rows


def _taken(device: torch.device, trial: Callable[[int], object], rows: int) -> int:
    """Return the bytes of tensors that a trial takes at its peak."""
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    trial(rows)
    return torch.cuda.max_memory_allocated(device) - before


def _forward_and_back(network: Classifier, rows: int) -> None:
    inputs = torch.zeros(rows, *network.input_shape, device=network.device, dtype=network.dtype, requires_grad=True)
    with torch.enable_grad():
        scores = network(inputs)
        wanted = [inputs, *(parameter for parameter in network.parameters() if parameter.requires_grad)]
        if scores.requires_grad:
            torch.autograd.grad(scores.sum(), wanted, allow_unused=True)
