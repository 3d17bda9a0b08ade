"""What decides bits is in the fingerprint, and equal ones mean equal bits only where that is documented."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stobatch.config import MachineConfig
from stobatch.training import loop as module
from stobatch.training.engines import Averaged, Engine, InProcessEngine
from stobatch.training.loop import Fingerprint, fingerprint

CPU = torch.device("cpu")


class Group(Engine):
    """Two processes, of which the other says what it is told to."""

    processes = 2

    def __init__(self, other: str | None = None) -> None:
        self.other = other

    def average(self, *_: Any, **__: Any) -> Averaged:
        raise NotImplementedError

    def exchange(self, topic: str, text: str) -> list[str]:
        return [text, self.other or text]


def of(**changes: Any) -> Fingerprint:
    return fingerprint(MachineConfig(**changes), CPU, InProcessEngine())


@pytest.mark.parametrize("change", [{"pieces": 3}, {"memory_mb": 100}, {"precision": "float64"}])
def test_settings_that_decide_bits_are_in_it(change: dict[str, Any]) -> None:
    assert of(**change) != of() == of()


@pytest.mark.parametrize("change", [{"timeout_s": 5.0}, {"checkpoint_every": 7}, {"data_root": "elsewhere"}])
def test_settings_that_decide_nothing_are_not(change: dict[str, Any]) -> None:
    assert of(**change) == of()


def test_threads_processors_and_code_are_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {of().digest}
    for name, answer in (("processor", "another CPU"), ("code_digest", "another version")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, lambda answer=answer: answer)
            found.add(of().digest)
    for owner, name, answer in (
        (torch, "get_num_threads", 17),
        (torch.backends.cpu, "get_cpu_capability", "another"),
        (torch, "get_float32_matmul_precision", "medium"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, lambda answer=answer: answer)
            found.add(of().digest)
    assert len(found) == 6


def test_equal_bits_are_promised_on_cpus_of_one_kind_with_exact_sums_alone() -> None:
    machine = MachineConfig()
    assert of().repeatable
    assert of() == fingerprint(machine, CPU, Group()), "for any number of processes"
    assert not fingerprint(machine, CPU, Group("another kind")).repeatable
    assert not fingerprint(MachineConfig(exact_sums=False), CPU, Group()).repeatable
    assert fingerprint(MachineConfig(exact_sums=False), CPU, InProcessEngine()).repeatable
    assert not fingerprint(machine, torch.device("cuda"), InProcessEngine()).repeatable
