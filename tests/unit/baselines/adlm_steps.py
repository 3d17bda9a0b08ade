"""Single steps and plans of AdLM on a few small pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import stobatch
from stobatch.baselines.adlm import AdLm, AdLmTrainable
from stobatch.baselines.adlm_plan import AdLmConfig, AdLmPlan
from stobatch.config import DataConfig, MachineConfig, ModelConfig, RunConfig, TrainingConfig
from stobatch.data import Dataset
from stobatch.loading import make_network
from stobatch.models import Network
from stobatch.seeds import Seeds

CLASSES, COUNT, SIDE, HIDDEN, CLIP = 3, 40, 6, 5, 0.5
RELEVANCE_STEPS, STEPS, BATCH, RELEVANCE_BATCH = 3, 9, 20, 16
ADLM = RELEVANCE_STEPS + 1
"""The first step after the relevances are released."""
Gradients = dict[str, Tensor]


def pictures(count: int = COUNT) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(count + 6, 1, SIDE, SIDE, generator=generator) * 2 - 1
    labels = torch.randint(CLASSES, (count + 6,), generator=generator)
    parts = (inputs[:count], labels[:count], inputs[count:], labels[count:])
    return stobatch.from_tensors(*parts, num_classes=CLASSES)


def settings(**changes: Any) -> RunConfig:
    method = AdLmConfig(
        epsilon=16.0,
        delta=1e-3,
        batch_size=BATCH,
        relevance_steps=RELEVANCE_STEPS,
        relevance_batch_size=RELEVANCE_BATCH,
        relevance_clip_norm=CLIP,
    )
    return RunConfig(
        method=method,
        data=DataConfig(name="tensors"),
        model=ModelConfig(architecture="small_cnn", last_hidden_size=HIDDEN),
        training=TrainingConfig(steps=STEPS, learning_rate=0.01, optimiser="adam", monitor_every=4),
        machine=MachineConfig(threads=1, checkpoint_every=3),
        seed=4,
    ).override_all(changes)


def prepared(
    config: RunConfig | None = None, data: Dataset | None = None, network: Network | None = None
) -> AdLmTrainable:
    config, data, seeds = config or settings(), data or pictures(), Seeds.reproducible(4)
    plan = stobatch.plan(config, dataset=data, network=network)
    fresh = make_network(config, data.info, seeds, network)
    return AdLm().prepare(config, plan, fresh, data.train, seeds)


def plan_of(**changes: Any) -> AdLmPlan:
    plan = stobatch.plan(settings(**changes), dataset=pictures())
    assert isinstance(plan, AdLmPlan)
    return plan


def released(trainable: AdLmTrainable, step: int) -> Gradients:
    """What all processes hear in a step, before anything moves."""
    (task,) = trainable.tasks(step)
    return dict(trainable.gradients(task, step))


def same(one: Gradients, other: Gradients) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def train(config: RunConfig, out: Path, *, resume: bool = False) -> stobatch.TrainedModel:
    return stobatch.train(config, out, dataset=pictures(), resume=resume, quiet=True)
