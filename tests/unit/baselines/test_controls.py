"""The controls are broken as they say, in nothing else, and never call themselves proved.

Statistical tests alarm falsely with probability 1e-9 each.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import kstwo, norm
from support.private_steps import (
    BATCH,
    CLIP,
    COUNT,
    FALSE_ALARM,
    WIDE,
    flat,
    pictures,
    prepared,
    sampling,
    settings,
    step_of,
)
from torch import Tensor

import stobatch
from stobatch.baselines.controls import Control, HalfNoiseConfig, NoClippingConfig, PersonControl, SharedNoiseConfig
from stobatch.dp.canaries import LENGTH, Canaries, GradientCanaries
from stobatch.registry import METHODS
from stobatch.sound.settings import SoundConfig
from stobatch.sound.step import DpSgdTrainable
from stobatch.types import Neighbours, Status
from stobatch_recipes import recipe

UNIT = 1 / BATCH
CONTROLS = tuple(METHODS[name] for name in METHODS if name.startswith("control_"))
ALL = pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.config_class.name)


def of(like: type[SoundConfig], architecture: str = WIDE, seed: int = 4) -> DpSgdTrainable:
    return prepared(
        settings(architecture, like=like, **{"method.certified_weight": 0.0, "method.natural_weight": 1.0}), seed=seed
    )


def noise_of(trainable: DpSgdTrainable, step: int, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """What a step releases where no example was drawn, on the scale of the sum."""
    sampling(monkeypatch)
    return flat(step_of(trainable, step)) * CLIP * BATCH


def not_gaussian(sample: Tensor, stddev: float) -> bool:
    """Kolmogorov-Smirnov, with the exact law of its distance."""
    ordered = norm.cdf(np.sort(sample.numpy()), 0, stddev)
    ranks = np.arange(len(ordered) + 1) / len(ordered)
    distance = max((ranks[1:] - ordered).max(), (ordered - ranks[:-1]).max())
    return bool(distance > kstwo.isf(FALSE_ALARM, len(ordered)))


def test_half_noise_is_gaussian_of_half_the_planned_deviation(monkeypatch: pytest.MonkeyPatch) -> None:
    sound, half = of(SoundConfig), of(HalfNoiseConfig)
    planned = sound.plan.noise_stddev
    assert half.plan.noise_stddev == planned, "the plan does not know"
    released, right = noise_of(half, 3, monkeypatch), noise_of(sound, 3, monkeypatch)
    assert not not_gaussian(released, planned / 2)
    assert not_gaussian(released, planned)
    assert not not_gaussian(right, planned)
    assert torch.allclose(released, right / 2, atol=1e-7)
    assert not torch.equal(noise_of(half, 4, monkeypatch), released)


def test_shared_noise_is_the_same_in_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    shared, sound = of(SharedNoiseConfig), of(SoundConfig)
    first = noise_of(shared, 0, monkeypatch)
    assert torch.equal(first, noise_of(sound, 0, monkeypatch))
    assert not not_gaussian(first, sound.plan.noise_stddev)
    for step in (1, 2, 7):
        assert torch.equal(noise_of(shared, step, monkeypatch), first)
        assert not torch.equal(noise_of(sound, step, monkeypatch), first)
    # One draw for each training, and not one for all.
    assert not torch.equal(noise_of(of(SharedNoiseConfig, seed=5), 0, monkeypatch), first)


def test_without_clipping_a_contribution_is_as_long_as_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    free, sound = of(NoClippingConfig), of(SoundConfig)
    lengths: dict[str, list[float]] = {}
    for name, trainable in (("free", free), ("sound", sound)):
        sampling(monkeypatch)
        nothing = flat(step_of(trainable, 0))
        for row in range(COUNT):
            sampling(monkeypatch, row)
            lengths.setdefault(name, []).append(float((flat(step_of(trainable, 0)) - nothing).norm()))
    assert max(lengths["sound"]) <= 1.001 * UNIT
    assert min(lengths["free"]) > 2 * UNIT
    # As long as the gradient of that example by itself.
    inputs, labels = free.reader.kept
    loss = torch.nn.functional.cross_entropy(free.network(inputs[:1]), labels[:1])
    gradients = torch.autograd.grad(loss, list(free.network.parameters()))
    raw = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    assert lengths["free"][0] == pytest.approx(float(raw) / (CLIP * BATCH), rel=1e-3)


def test_without_clipping_a_canary_is_many_times_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    trainable = of(NoClippingConfig)
    trainable.add_canaries(Canaries(torch.tensor([True]), GradientCanaries(torch.tensor([7]))))
    sampling(monkeypatch)
    nothing = flat(step_of(trainable, 0))
    sampling(monkeypatch, COUNT)
    added = flat(step_of(trainable, 0)) - nothing
    assert float(added[7]) == pytest.approx(LENGTH * UNIT, rel=1e-5)
    assert torch.equal(added.nonzero().flatten(), torch.tensor([7]))


@pytest.mark.parametrize("like", [HalfNoiseConfig, SharedNoiseConfig])
def test_apart_from_its_noise_a_control_is_the_sound_method(like: type[SoundConfig]) -> None:
    broken, sound = of(like), of(SoundConfig)
    broken.noise_stddev = sound.noise_stddev = 0.0
    for step in range(4):
        assert torch.equal(flat(step_of(broken, step)), flat(step_of(sound, step)))


def test_apart_from_clipping_a_control_is_the_sound_method(monkeypatch: pytest.MonkeyPatch) -> None:
    free, sound = of(NoClippingConfig), of(SoundConfig)
    assert torch.equal(noise_of(free, 2, monkeypatch), noise_of(sound, 2, monkeypatch))
    monkeypatch.undo()
    free.clip_norm = sound.clip_norm
    for step in range(4):
        assert torch.equal(flat(step_of(free, step)), flat(step_of(sound, step)))


@ALL
def test_a_control_is_never_called_proved_and_names_its_mistake(control: Control, tmp_path: Path) -> None:
    like = control.config_class
    assert issubclass(like, SoundConfig)
    assert METHODS[like.name] is control
    config, data = settings(like=like), pictures(groups=range(24) if isinstance(control, PersonControl) else None)
    right = stobatch.plan(settings(), dataset=data).claim
    plan = stobatch.plan(config, dataset=data)
    model = stobatch.train(config, tmp_path / "run", dataset=data, quiet=True)
    said = [plan.claim, plan.after(3), plan.after(11), model.claim, stobatch.load(tmp_path / "run").claim]
    for guarantee in said:
        assert guarantee.status is Status.CLAIMED
        assert guarantee.neighbours is Neighbours.ADD_REMOVE
        assert guarantee.source == "a control that is broken on purpose"
        assert guarantee.objections == (f"the mistake: {control.mistake}",)
        assert str(guarantee).startswith("claimed ε = ")
        assert str(guarantee).endswith("NOT a proven guarantee")
        assert not [key for key in guarantee.to_dict() if key.startswith("proved")]
    assert plan.guarantee.epsilon == right.epsilon, "it claims what the sound method proves"
    assert plan.after(11).epsilon > right.epsilon
    for name in ("plan", "config", "training"):
        assert "proved" not in (tmp_path / "run" / f"{name}.json").read_text()


def test_mistakes_have_names_of_their_own() -> None:
    mistakes = [control.mistake for control in CONTROLS]
    assert mistakes == [
        "half of the planned noise",
        "noise drawn once and shared by all steps",
        "gradients are not clipped",
        "a person's records are taken for two persons'",
        "the records of a person are clipped one by one",
    ]
    assert len({control.config_class.name for control in CONTROLS} - {"sound"}) == 5


@pytest.mark.parametrize("name", ["half_noise", "shared_noise", "no_clipping"])
def test_the_recipe_of_a_control_differs_in_the_method_alone(name: str) -> None:
    broken, sound = recipe(f"audit.{name}"), recipe("audit.sound")
    assert broken.method.name == f"control_{name}"
    assert broken.replace(method=sound.method) == sound
    for key in type(sound.method).model_fields:
        assert getattr(broken.method, key) == getattr(sound.method, key)
