"""A federation that trains in a moment: 90 pictures of 6 x 6 pixels, three unequal parties, six steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import stobatch
from stobatch.config import CertificationConfig, DataConfig, EvaluationConfig, MachineConfig, ModelConfig, RunConfig
from stobatch.config import TrainingConfig as Training
from stobatch.data import Dataset
from stobatch.federated import FederatedConfig, Federation, Party
from stobatch.federated.rounds import found_parties, parties_of

STEPS = 6
LAYERS = "squash 2 0 0.4, conv 3 3/2, relu, linear"
WIDE = "linear 500, linear"
"""20 003 weights: enough of a sample for one answer's noise."""
PARTIES = ("north:40:12", "east:30:8", "south:20:6:4")


def pictures(groups: Any = None) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.rand(100, 1, 6, 6, generator=generator) * 2 - 1, torch.arange(100) % 3
    return stobatch.from_tensors(inputs[:90], labels[:90], inputs[90:], labels[90:], num_classes=3, groups=groups)


def terms(**changes: Any) -> RunConfig:
    return RunConfig(
        method=FederatedConfig(epsilon=3.0, delta=1e-3, clip_norm=0.5, momentum=0.5, parties=PARTIES),
        data=DataConfig(name="tensors"),
        model=ModelConfig(architecture=LAYERS),
        training=Training(steps=STEPS, learning_rate=0.5, optimiser="sgd", monitor_every=3),
        certification=CertificationConfig(certificate="bounds"),
        evaluation=EvaluationConfig(
            radii=(0.1,), protocols=("adaptive",), functions=("single_pass",), adaptive_attacks=("fgsm",), num_images=0
        ),
        machine=MachineConfig(threads=1),
        seed=4,
    ).override_all(changes)


def started(out: Path, agreed: RunConfig | None = None) -> tuple[Federation, dict[str, Path]]:
    """A federation before its first round, and where its parties are."""
    agreed, data = agreed or terms(), pictures()
    federation = Federation.found(out, agreed, data.info, data.test)
    return federation, found_parties(agreed, parties_of(out), data)


def opened(directories: dict[str, Path]) -> dict[str, Party]:
    return {name: Party.open(path) for name, path in directories.items()}


def ask(party: Party, federation: Federation, step: int = 0) -> dict[str, Tensor]:
    return party.answer(federation.parameters(), step, federation.agreed).gradients


def flat(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.flatten() for value in gradients.values()]).double()
