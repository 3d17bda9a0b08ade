"""What the sound method's proof leaves out is refused, and what was done more often than planned is paid for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sound_steps import CLASSES, COUNT, pictures, settings
from torch import nn

import stobatch
from stobatch.dp.plan import DpSgdPlan, OpenPlan
from stobatch.errors import ModelError, RunError, SettingError, StobatchError
from stobatch.models import Layered, build
from stobatch.seeds import Seeds
from stobatch.sound.method import Sound


def with_dropout() -> Layered:
    torch.manual_seed(0)
    return Layered([nn.Flatten(), nn.Dropout(0.5), nn.Linear(36, CLASSES)], (1, 6, 6))


def with_batch_norm() -> Layered:
    torch.manual_seed(0)
    return Layered([nn.Flatten(), nn.BatchNorm1d(36), nn.Linear(36, CLASSES)], (1, 6, 6))


REFUSALS: dict[str, tuple[dict[str, Any], str, str]] = {
    "batch norm": ({"model.architecture": "mnist_cnn", "model.normalisation": "batch"}, "BatchNorm", "reference"),
    "adam with momentum": (
        {"training.optimiser": "adam", "method.momentum": 0.5},
        "not for training.optimiser=adam",
        "momentum=0",
    ),
    "weights of other classes": ({"method.class_weights": [1.0, 2.0]}, "2 weights for 3 classes", "one for each class"),
    "unreachable": ({"method.epsilon": 1e-9, "method.delta": 1e-12}, "out of reach", "fewer steps"),
    "loose": ({"method.delta": 1 / COUNT}, "not below 1 / num_examples", "or less"),
    "large batch": ({"method.expected_batch_size": COUNT + 1}, "does not fit", "from 1 to 24"),
    "certified": ({"model.architecture": "mnist_cnn"}, "plain stack of layers", "certified_weight=0"),
    "reconstruction": ({"method.reconstruction_weight": 1.0}, "with an encoder", "reconstruction_weight=0"),
    "no loss": ({"method.natural_weight": 0.0, "method.certified_weight": 0.0}, "no loss", "natural_weight=1"),
    "views": ({"method.views_weight": 1.0}, "no noise", "smoothing_stddev"),
    "no box": ({"method.box_loss": "sabr", "method.certified_weight": 0.0}, "no weight", "certified_weight"),
    "first weights": ({"model.architecture": "mnist_cnn", "model.first_weights": "box"}, "list of layers", "unset"),
    "no bounds": ({"model.architecture": "conv 2 3, groupnorm 1, linear"}, "GroupNorm", "without the certified loss"),
}


@pytest.mark.parametrize(("changes", "message", "remedy"), REFUSALS.values(), ids=REFUSALS)
def test_what_the_proof_leaves_out_is_refused_before_anything_is_written(
    changes: dict[str, Any], message: str, remedy: str, tmp_path: Any
) -> None:
    data = pictures(12 if changes.get("model.architecture") == "mnist_cnn" else 6)
    with pytest.raises(StobatchError, match=message) as caught:
        stobatch.train(settings().override_all(changes), tmp_path / "run", dataset=data, quiet=True)
    assert remedy in caught.value.remedy
    assert not (tmp_path / "run").exists()


def test_first_weights_for_boxes_change_what_is_trained_and_the_run_is_read_again(tmp_path: Any) -> None:
    runs = [
        stobatch.train(settings(**{"model.first_weights": first}), tmp_path / first, dataset=pictures(), quiet=True)
        for first in ("fan_in", "box")
    ]
    usual, box = (torch.cat([p.flatten() for p in run.network.parameters()]) for run in runs)
    assert not torch.allclose(usual, box, atol=1e-3)


@pytest.mark.parametrize(
    ("network", "message"), [(with_dropout, "mixes examples or draws"), (with_batch_norm, "Batch")]
)
def test_layers_that_mix_or_draw_are_refused(network: Callable[[], Layered], message: str, tmp_path: Any) -> None:
    config = settings("custom")
    with pytest.raises(ModelError, match=message):
        stobatch.train(config, tmp_path / "run", dataset=pictures(), network=network(), quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_plan_for_other_data_is_refused() -> None:
    config = settings()
    plan = stobatch.plan(config, dataset=pictures(count=COUNT + 1))
    network = build(config.model, (1, 6, 6), CLASSES, torch.Generator())
    with pytest.raises(SettingError, match=r"plan is for 25 training examples, the data have 24"):
        Sound().prepare(config, plan, network, pictures().train, Seeds.reproducible(1))


def test_augmented_copies_are_refused() -> None:
    data = pictures()
    info = type(data.info)(**{**vars(data.info), "copies": 4})
    with pytest.raises(SettingError, match="records_per_person=4"):
        Sound().plan(settings(), info, None)


@pytest.mark.parametrize("change", [{"method.epsilon": 2.0}, {"method.clip_norm": 0.7}, {"training.steps": 9}])
def test_a_run_is_not_resumed_under_another_plan(change: dict[str, float], tmp_path: Any) -> None:
    stobatch.train(settings(), tmp_path / "run", dataset=pictures(), quiet=True)
    with pytest.raises(RunError, match="was started with other settings"):
        stobatch.train(settings(**change), tmp_path / "run", dataset=pictures(), resume=True, quiet=True)


def test_a_run_is_not_resumed_with_other_data(tmp_path: Any) -> None:
    stobatch.train(settings(), tmp_path / "run", dataset=pictures(), quiet=True)
    with pytest.raises(RunError, match="other training data"):
        stobatch.train(settings(), tmp_path / "run", dataset=pictures(seed=1), resume=True, quiet=True)


# What is promised after more steps than planned.


def test_steps_that_were_repeated_are_paid_for() -> None:
    plan = stobatch.plan(settings(), dataset=pictures())
    assert isinstance(plan, DpSgdPlan)
    for counted in (0, 5, 8):
        assert plan.after(counted) == plan.claim
    more = plan.after(11)
    assert more.epsilon == plan.mechanism(11).epsilon(plan.delta) > plan.claim.epsilon
    assert more.assumptions[:-1] == plan.claim.assumptions
    assert "3 steps beyond the 8 planned are counted" in more.assumptions[-1]
    assert plan.after(12).epsilon > more.epsilon


def test_a_plan_without_steps_to_count_stays_as_it_is() -> None:
    plan = OpenPlan(100, 10, "vanilla")
    assert plan.after(1000) == plan.guarantee
