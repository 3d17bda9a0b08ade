"""Experiments on mixing and clipping are made with as many rows as training and votes pass, in their precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.private_steps import CLASSES, pictures, settings
from torch import Tensor, nn

import stobatch
from stobatch.baselines.dpsgd import DpSgdConfig
from stobatch.config import RunConfig
from stobatch.dp.clipping import clipped_sum_by_example, clipped_sum_in_one_pass
from stobatch.errors import ModelError
from stobatch.methods import method_of
from stobatch.models import Layered
from stobatch.seeds import Seeds
from stobatch.sound.step import DpSgdTrainable
from stobatch.votes.counting import SmoothedClassifier, VoteSettings
from stobatch.votes.noise import GaussianNoise

BATCH = 40


def config(**changes: Any) -> RunConfig:
    method = DpSgdConfig(epsilon=3.0, delta=1e-3, batch_size=BATCH)
    return settings().replace(method=method).override_all(changes)


def prepared(layer: nn.Module, settings_: RunConfig) -> DpSgdTrainable:
    torch.manual_seed(0)
    network = Layered([nn.Flatten(), nn.Linear(36, 8), layer, nn.Linear(8, CLASSES)], (1, 6, 6))
    data = pictures(120)
    plan = stobatch.plan(settings_, dataset=data, network=network)
    trainable = method_of(settings_).prepare(settings_, plan, network, data.train, Seeds.reproducible(4))
    assert isinstance(trainable, DpSgdTrainable)
    return trainable


class LargeBatches(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values - values.mean(0) if len(values) > 8 else values


class UnderAutocast(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values - values.mean(0) if torch.is_autocast_enabled("cpu") else values


def test_a_network_that_mixes_large_batches_only_is_not_trained() -> None:
    with pytest.raises(ModelError, match=f"in batches of {BATCH}"):
        prepared(LargeBatches(), config())


def test_a_network_that_mixes_in_mixed_precision_only_is_not_trained_in_it() -> None:
    prepared(UnderAutocast(), config())
    with pytest.raises(ModelError, match="mixes examples"):
        prepared(UnderAutocast(), config(**{"machine.precision": "bfloat16"}))
    assert prepared(nn.Tanh(), config(**{"machine.precision": "bfloat16"})).clip is clipped_sum_in_one_pass


class _MixedBackwards(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient + gradient.mean(0) if len(gradient) > 8 else gradient


class MixedBackwards(nn.Module):
    """Scores depend on one example each; gradients, in large batches, on all."""

    def forward(self, values: Tensor) -> Tensor:
        mixed: Tensor = _MixedBackwards.apply(values)  # type: ignore[no-untyped-call]
        return mixed


def test_fast_clipping_that_is_wrong_in_large_batches_is_not_used() -> None:
    assert prepared(nn.Tanh(), config()).clip is clipped_sum_in_one_pass
    assert prepared(MixedBackwards(), config()).clip is clipped_sum_by_example
    few = config(**{"method.expected_batch_size": 8})
    assert prepared(MixedBackwards(), few).clip is clipped_sum_in_one_pass, (
        "eight rows do not show it: the size matters"
    )


def test_votes_of_a_network_that_mixes_large_batches_only_are_refused() -> None:
    scores = nn.Sequential(nn.Linear(4, 8), LargeBatches(), nn.Linear(8, 3)).requires_grad_(False)
    for rows, refused in ((2_000, True), (8, False)):
        classifier = SmoothedClassifier(scores, GaussianNoise(0.5), 3, VoteSettings(draws=20, rows_at_once=rows))
        if refused:
            with pytest.raises(ModelError, match="two batches of"):
                classifier.certify(torch.zeros(3, 4), torch.Generator().manual_seed(0))
        else:
            classifier.certify(torch.zeros(3, 4), torch.Generator().manual_seed(0))
