"""Small trainings of the sound method and of its controls, and single steps of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import stobatch
from stobatch.config import DataConfig, MachineConfig, ModelConfig, RunConfig, TrainingConfig
from stobatch.data import Dataset
from stobatch.methods import method_of
from stobatch.models import build
from stobatch.seeds import Seeds
from stobatch.sound import step as sound_module
from stobatch.sound.settings import SoundConfig
from stobatch.sound.step import DpSgdTrainable
from stobatch.training.engines import InProcessEngine

FALSE_ALARM = 1e-9
CLASSES, COUNT, BATCH, CLIP = 3, 24, 8, 0.5
LAYERS = "conv 3 3/2, relu, linear"
WIDE = "linear 500, linear"
"""20 000 weights: enough of a sample for one step's noise."""

Gradients = dict[str, Tensor]


def pictures(count: int = COUNT, seed: int = 0, groups: Any = None) -> Dataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.rand(count + 6, 1, 6, 6, generator=generator) * 2 - 1
    labels = torch.randint(CLASSES, (count + 6,), generator=generator)
    parts = (inputs[:count], labels[:count], inputs[count:], labels[count:])
    return stobatch.from_tensors(*parts, num_classes=CLASSES, groups=groups)


def settings(architecture: str = LAYERS, *, like: type[SoundConfig] = SoundConfig, **changes: Any) -> RunConfig:
    method = like(epsilon=3.0, delta=1e-3, batch_size=BATCH, warm_up=0.0, attack_steps=2, clip_norm=CLIP)
    return RunConfig(
        method=method,
        data=DataConfig(name="tensors"),
        model=ModelConfig(architecture=architecture),
        training=TrainingConfig(steps=8, learning_rate=0.5, optimiser="sgd", monitor_every=4),
        machine=MachineConfig(threads=1, checkpoint_every=3),
        seed=4,
    ).override_all(changes)


def prepared(config: RunConfig, data: Dataset | None = None, seed: int = 4) -> DpSgdTrainable:
    data = data or pictures()
    network = build(config.model, data.info.input_shape, CLASSES, torch.Generator().manual_seed(2))
    network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    plan = stobatch.plan(config, dataset=data)
    trainable = method_of(config).prepare(config, plan, network, data.train, Seeds.reproducible(seed))
    assert isinstance(trainable, DpSgdTrainable)
    return trainable


def step_of(trainable: DpSgdTrainable, step: int) -> Gradients:
    return dict(trainable.release(step, InProcessEngine()).gradients)


def flat(gradients: Gradients) -> Tensor:
    """In the order of the axes, whatever the order in memory."""
    return torch.cat([value.reshape(-1) for value in gradients.values()]).double()


def sampling(monkeypatch: pytest.MonkeyPatch, *rows: int) -> None:
    """Make every sample consist of these records."""
    monkeypatch.setattr(sound_module, "poisson_sample", lambda *_: torch.tensor(rows, dtype=torch.long))
