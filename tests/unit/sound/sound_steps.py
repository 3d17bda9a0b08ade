"""Single steps of the sound method on a few small pictures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import stobatch
from stobatch.config import DataConfig, MachineConfig, ModelConfig, RunConfig, TrainingConfig
from stobatch.data import Dataset
from stobatch.models import build
from stobatch.seeds import Seeds
from stobatch.sound import step as sound_module
from stobatch.sound.method import Sound
from stobatch.sound.settings import SoundConfig
from stobatch.sound.step import DpSgdTrainable

CLASSES, COUNT, BATCH = 3, 24, 8
LAYERS = "squash 2 0 0.4, conv 3 3/2, relu, linear"
Gradients = dict[str, Tensor]


def pictures(side: int = 6, count: int = COUNT, seed: int = 0) -> Dataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.rand(count + 6, 1, side, side, generator=generator) * 2 - 1
    labels = torch.randint(CLASSES, (count + 6,), generator=generator)
    parts = (inputs[:count], labels[:count], inputs[count:], labels[count:])
    return stobatch.from_tensors(*parts, num_classes=CLASSES)


def settings(architecture: str = LAYERS, **changes: Any) -> RunConfig:
    method = SoundConfig(
        epsilon=3.0, delta=1e-3, batch_size=BATCH, warm_up=0.0, ramp=0.5, attack_steps=2, clip_norm=0.5
    )
    return RunConfig(
        method=method,
        data=DataConfig(name="tensors"),
        model=ModelConfig(architecture=architecture, last_hidden_size=5, normalisation="none"),
        training=TrainingConfig(steps=8, learning_rate=0.5, optimiser="sgd", monitor_every=4),
        machine=MachineConfig(threads=1, checkpoint_every=3),
        seed=4,
    ).override_all(changes)


def prepared(config: RunConfig, data: Dataset | None = None, seed: int = 4) -> DpSgdTrainable:
    data = data or pictures()
    network = build(config.model, data.info.input_shape, CLASSES, torch.Generator().manual_seed(2))
    return Sound().prepare(config, stobatch.plan(config, dataset=data), network, data.train, Seeds.reproducible(seed))


def step_of(trainable: DpSgdTrainable, step: int) -> Gradients:
    (task,) = trainable.tasks(step)
    return dict(trainable.gradients(task, step))


def flat(gradients: Gradients) -> Tensor:
    return torch.cat([value.flatten() for value in gradients.values()]).double()


def sampling(monkeypatch: pytest.MonkeyPatch, *rows: int) -> None:
    """Make every sample consist of these examples."""
    monkeypatch.setattr(sound_module, "poisson_sample", lambda *_: torch.tensor(rows, dtype=torch.long))
