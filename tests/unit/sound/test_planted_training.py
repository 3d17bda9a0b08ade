"""A training with canaries: they are sampled and clipped like examples, and nothing else changes.

Statistical tests alarm falsely with probability 1e-9 each, and each has a broken twin that it catches.
"""

from __future__ import annotations

import json
import shutil
import stat
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from scipy.stats import binom
from support.private_steps import (
    BATCH,
    CLASSES,
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
from stobatch.baselines.vanilla import VanillaConfig
from stobatch.config import CanaryConfig, RunConfig
from stobatch.data import Examples
from stobatch.dp.canaries import LENGTH, Canaries, GradientCanaries, draw_canaries, replace_by_canaries
from stobatch.errors import ModelError, SettingError, StobatchError
from stobatch.methods import method_of
from stobatch.models import build
from stobatch.published.settings import PublishedConfig
from stobatch.published.training import PublishedTrainable
from stobatch.seeds import Seeds
from stobatch.sound import step as sound_module
from stobatch.sound.step import DpSgdTrainable
from stobatch.training.descent import Descent
from stobatch.types import Status
from stobatch_recipes import recipe

UNIT = 1 / BATCH
PLACES = torch.tensor([5, 0, 41, 17])
"""Coordinates of four canaries in the small network's 69 parameters."""


def with_canaries(*included: bool, config: RunConfig | None = None) -> DpSgdTrainable:
    trainable = prepared(config or settings())
    trainable.add_canaries(Canaries(torch.tensor(included), GradientCanaries(PLACES[: len(included)])))
    return trainable


# What a canary adds.


@pytest.mark.parametrize("step", [0, 1])
def test_a_canary_adds_one_clipped_contribution_at_its_coordinate(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradient is many times C long before it is clipped, and what is released of it is C/(C·B)."""
    assert LENGTH >= 10
    trainable = with_canaries(True, False, True, True)
    sampling(monkeypatch, 3, 7)
    nothing = flat(step_of(trainable, step))
    # The canaries that are in stand after the data: the second of them is the third that was drawn.
    sampling(monkeypatch, 3, 7, COUNT + 1)
    added = flat(step_of(trainable, step)) - nothing
    expected = torch.zeros_like(added)
    expected[PLACES[2]] = UNIT * (1 if step % 2 == 0 else -1)
    assert torch.allclose(added, expected, atol=1e-7)
    assert torch.equal(added.nonzero(), expected.nonzero())


def test_a_canary_that_is_not_clipped_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    trainable = with_canaries(True)
    trainable.clip_norm = float("inf")
    sampling(monkeypatch)
    nothing = flat(step_of(trainable, 0))
    sampling(monkeypatch, COUNT)
    assert float((flat(step_of(trainable, 0)) - nothing).norm()) == pytest.approx(LENGTH * UNIT, rel=1e-5)


def test_canaries_of_one_step_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    trainable = with_canaries(True, True, True, True)
    sampling(monkeypatch)
    nothing = flat(step_of(trainable, 0))
    sampling(monkeypatch, *range(COUNT, COUNT + 4))
    added = flat(step_of(trainable, 0)) - nothing
    assert torch.allclose(added[PLACES], torch.full((4,), UNIT, dtype=torch.float64), atol=1e-7)
    assert float(added.abs().sum()) == pytest.approx(4 * UNIT, rel=1e-5)


# Samples.


def wrong_rate(taken: Tensor, rate: float) -> list[str]:
    """What is wrong with samples [steps, canaries] that should be Poisson: their rate, pairs, or consecutive steps."""
    found = []
    for name, hits, chance in (
        ("rate", taken, rate),
        ("pairs", taken[:, ::2] & taken[:, 1::2], rate**2),
        ("steps", taken[::2] & taken[1::2], rate**2),
    ):
        low, high = (quantile(FALSE_ALARM / 6, hits.numel(), chance) for quantile in (binom.ppf, binom.isf))
        found += [] if low <= int(hits.sum()) <= high else [name]
    return found


def taken_in(trainable: DpSgdTrainable, included: Tensor, steps: int) -> Tensor:
    """Which canaries each step took, read off what it released without noise and without examples."""
    trainable.noise_stddev = 0.0
    trainable.examples = trainable.examples.in_memory().limit(0)
    trainable._read_data()
    assert trainable.canaries is not None
    released = torch.stack([trainable.canaries.read(step_of(trainable, step), step) for step in range(steps)])
    assert not released[:, ~included].any(), "a canary that is out took part"
    # What rounding may put between two sums is taken off the clipping norm beforehand.
    assert torch.minimum(released.abs(), (released - UNIT).abs()).max() < 1e-5 * UNIT
    return released[:, included] > UNIT / 2


def test_canaries_are_sampled_like_examples() -> None:
    """By the plan's rate, each on its own, and afresh in each step."""
    canaries = draw_canaries(CanaryConfig(num=2000), pictures().info, 20_003, Seeds.reproducible(6))
    trainable = prepared(settings(WIDE))
    trainable.add_canaries(canaries)
    taken = taken_in(trainable, canaries.included, 24)
    taken = taken[:, : taken.shape[1] // 2 * 2]
    assert wrong_rate(taken, trainable.plan.sampling_rate) == []
    # Broken twins: always in; the next canary's draw; the same draw twice.
    assert "rate" in wrong_rate(torch.ones_like(taken), BATCH / COUNT)
    assert "pairs" in wrong_rate(taken[:, ::2].repeat_interleave(2, 1), BATCH / COUNT)
    assert "steps" in wrong_rate(taken[::2].repeat_interleave(2, 0), BATCH / COUNT)


def test_examples_are_drawn_as_they_would_be_without_canaries(monkeypatch: pytest.MonkeyPatch) -> None:
    """And at the plan's rate, whose denominator counts the data alone."""
    asked: list[tuple[int, float]] = []
    real = sound_module.poisson_sample

    def noted(count: int, rate: float, generator: Any) -> Tensor:
        asked.append((count, rate))
        return real(count, rate, generator)

    monkeypatch.setattr(sound_module, "poisson_sample", noted)
    plain, full = prepared(settings()), with_canaries(True, False, True, True)
    elsewhere = torch.ones(len(flat(step_of(plain, 0))), dtype=torch.bool)
    elsewhere[PLACES] = False
    for step in range(12):
        one, other = flat(step_of(plain, step)), flat(step_of(full, step))
        # Noise and examples are the same bits; only the canaries' own coordinates move, by a unit at most.
        assert torch.equal(one[elsewhere], other[elsewhere])
        moved = (other - one)[PLACES] / UNIT * GradientCanaries.sign(step)
        assert torch.allclose(moved, moved.round(), atol=1e-5)
        assert set(moved.round().tolist()) <= {0.0, 1.0}
        assert not moved[1]
    assert set(asked) == {(COUNT, BATCH / COUNT), (COUNT + 3, BATCH / COUNT)}


# Nothing changes where none is in.


@pytest.mark.parametrize("kind", ["gradient", "input"])
def test_canaries_that_are_all_out_change_no_bit(kind: str) -> None:
    plain, planted_none = prepared(settings()), prepared(settings())
    nobody = torch.zeros(9, dtype=torch.bool)
    if kind == "gradient":
        planted_none.add_canaries(Canaries(nobody, GradientCanaries(torch.arange(9))))
    else:
        labels = torch.arange(9) % CLASSES
        planted_none.add_canaries(Canaries(nobody, inputs=torch.ones(9, 1, 6, 6), labels=labels))
    for step in range(8):
        one, other = step_of(plain, step), step_of(planted_none, step)
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_without_canaries_nothing_is_carried_and_the_hash_is_the_old_one() -> None:
    assert prepared(settings()).extra_state() == {}
    assert settings().training_hash == settings(**{"canaries.kind": "input"}).training_hash
    assert settings().training_hash != settings(**{"canaries.num": 1}).training_hash


# Images.


def test_images_that_are_in_are_examples() -> None:
    """Bit for bit what a training with them at the end of its data does, at the same rate and with the same noise."""
    generator = torch.Generator().manual_seed(9)
    images = torch.rand(5, 1, 6, 6, generator=generator).round() * 2 - 1
    labels = torch.randint(CLASSES, (5,), generator=generator)
    included = torch.tensor([True, False, True, True, False])
    planted_images, reference = prepared(settings()), prepared(settings())
    planted_images.add_canaries(Canaries(included, inputs=images, labels=labels))
    train = pictures().train.in_memory()
    together = torch.cat([train.inputs, images[included]]), torch.cat([train.labels, labels[included]])
    reference.examples = Examples(*together, CLASSES)
    reference._read_data()
    plain = prepared(settings())
    differ = 0
    for step in range(8):
        one, other = (flat(step_of(trainable, step)) for trainable in (planted_images, reference))
        assert torch.equal(one, other)
        differ += not torch.equal(one, flat(step_of(plain, step)))
    assert differ, "no step took a canary"
    assert planted_images.extra_state() == {}


# What is kept.


def test_sums_are_what_the_steps_showed() -> None:
    trainable = with_canaries(True, False, True, True)
    expected = torch.zeros(4, dtype=torch.float64)
    for step in range(7):
        expected += flat(step_of(trainable, step))[PLACES] * (1 if step % 2 == 0 else -1)
    assert torch.equal(trainable.extra_state()["canary_sums"], expected)


PLANTED = {"canaries.num": 40, "method.epsilon": 1.0, "seed": None}


@pytest.fixture(scope="module")
def secret_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training with secret seeds and gradient canaries, audited."""
    out = tmp_path_factory.mktemp("planted") / "run"
    stobatch.train(settings(**PLANTED), out, dataset=pictures(), quiet=True)
    stobatch.audit(out, overrides={"audit.instruments": ["one_run"], "audit.confidence": 0.6}, quiet=True)
    return out


def test_a_guarantee_is_not_changed_by_canaries(secret_run: Path) -> None:
    plain = {**PLANTED, "canaries.num": 0}
    plan, planted_plan = (stobatch.plan(settings(**changes), dataset=pictures()) for changes in (plain, PLANTED))
    assert plan.to_dict() == planted_plan.to_dict()
    model = stobatch.load(secret_run)
    assert model.claim == plan.guarantee
    assert model.claim.status is Status.PROVED
    one, other = prepared(settings(**plain)), with_canaries(True, config=settings(**plain))
    assert one.noise_stddev == other.noise_stddev == CLIP * plan.curve.noise_multiplier


def test_sums_that_were_saved_are_those_of_the_steps(secret_run: Path) -> None:
    config = RunConfig.from_dict(json.loads((secret_run / "config.json").read_text())["config"])
    root = int(json.loads((secret_run / "private" / "seeds.json").read_text())["root"])
    seeds, data = Seeds(root, public=False), pictures()
    canaries = draw_canaries(config.canaries, data.info, 69, seeds)
    network = build(config.model, (1, 6, 6), CLASSES, seeds.generator("initial weights"))
    plan = stobatch.plan(config, dataset=data)
    trainable = method_of(config).prepare(config, plan, network, data.train, seeds)
    trainable.add_canaries(canaries)
    assert canaries.gradients is not None
    descent = Descent(config.training, dict(network.named_parameters()), trainable.optimisers(config))
    expected = torch.zeros(40, dtype=torch.float64)
    for step in range(8):
        released = trainable.gradients(trainable.tasks(step)[0], step)
        expected += canaries.gradients.read(released, step)
        descent.step(step, released)
    saved = load_file(secret_run / "private" / "canary_scores.safetensors")
    assert saved.keys() == {"canary_sums"}
    assert torch.allclose(saved["canary_sums"], expected, atol=1e-6)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_canaries_showed_is_for_the_owner(secret_run: Path) -> None:
    private = secret_run / "private"
    files = {file.name: mode(file) for file in private.rglob("*") if file.is_file()}
    assert {"seeds.json", "canary_scores.safetensors", "part-1-of-1.safetensors", "complete.json"} <= files.keys()
    assert set(files.values()) == {0o600}
    assert {mode(folder) for folder in (private, *private.rglob("*")) if folder.is_dir()} == {0o700}


def spellings(values: list[Any], formats: str) -> list[bytes]:
    """Ways in which values in a row might stand in a file: as text, or as numbers of these formats."""
    words = [json.dumps(value) for value in values]
    text = [between.join(words).encode() for between in (", ", ",", ",\n")]
    return text + [struct.pack(f"<{len(values)}{letter}", *values) for letter in formats]


def secrets_of(run: Path) -> dict[str, list[bytes]]:
    """Coins, places and sums of the first canaries, as files might spell them; of sums each alone."""
    root = int(json.loads((run / "private" / "seeds.json").read_text())["root"])
    canaries = draw_canaries(CanaryConfig(num=40), pictures().info, 69, Seeds(root, public=False))
    assert canaries.gradients is not None
    sums = load_file(run / "private" / "canary_scores.safetensors")["canary_sums"].tolist()
    coins, places = canaries.included.tolist(), canaries.gradients.coordinates.tolist()
    return {
        "coins": [*spellings(coins[:12], "?"), *spellings([int(coin) for coin in coins[:12]], "bifd")],
        "places": spellings(places[:4], "iqfd"),
        "sums": [way for value in sums for way in spellings([value], "d")],
    }


def leaks(run: Path) -> list[tuple[str, str]]:
    found = []
    for file in (file for file in run.rglob("*") if file.is_file() and "private" not in file.relative_to(run).parts):
        content = file.read_bytes()
        packed = b"\n".join(line.strip() for line in content.splitlines())
        for kind, ways in secrets_of(run).items():
            found += [(kind, file.name) for way in ways if way in content or way in packed]
    return sorted(set(found))


def test_no_public_file_tells_coins_places_or_sums(secret_run: Path) -> None:
    assert {"config.json", "audit.json", "one_run.json", "model.safetensors"} <= {f.name for f in secret_run.rglob("*")}
    assert leaks(secret_run) == []


@pytest.mark.parametrize("kind", ["coins", "places", "sums"])
def test_the_search_finds_what_is_hidden_in_a_file(kind: str, secret_run: Path, tmp_path: Path) -> None:
    """The broken twin: a finding that tells how each canary fared."""
    run = Path(shutil.copytree(secret_run, tmp_path / "run"))
    root = int(json.loads((run / "private" / "seeds.json").read_text())["root"])
    canaries = draw_canaries(CanaryConfig(num=40), pictures().info, 69, Seeds(root, public=False))
    assert canaries.gradients is not None
    told = {
        "coins": canaries.included.tolist(),
        "places": canaries.gradients.coordinates.tolist(),
        "sums": load_file(run / "private" / "canary_scores.safetensors")["canary_sums"].tolist(),
    }
    (run / "told.json").write_text(json.dumps({"told": told[kind]}, indent=2))
    assert leaks(run) == [(kind, "told.json")]


# The published mechanism, whose neighbours have one size.


def small_digits(count: int = 40) -> Examples:
    generator = torch.Generator().manual_seed(1)
    return Examples(torch.rand(count, 1, 8, 8, generator=generator) * 2 - 1, torch.arange(count) % 10, 10)


def test_images_take_the_place_of_the_last_records() -> None:
    records = small_digits()
    canaries = draw_canaries(CanaryConfig(num=12, kind="input"), pictures().info, 0, Seeds.reproducible(2))
    canaries = Canaries(canaries.included, inputs=torch.ones(12, 1, 8, 8), labels=torch.arange(12) % 10)
    found = replace_by_canaries(records, canaries)
    assert len(found) == 40
    assert canaries.labels is not None
    assert torch.equal(found.inputs[:28], records.inputs[:28])
    assert torch.equal(found.labels[:28], records.labels[:28])
    assert bool((found.inputs[28:] == 1).all())
    # In the other data set the same image is there with the next label.
    other = (canaries.labels + 1) % 10
    assert torch.equal(found.labels[28:], torch.where(canaries.included, canaries.labels, other))


@pytest.mark.parametrize("num", [40, 41, 90])
def test_images_that_leave_no_record_are_refused(num: int) -> None:
    labels = torch.arange(num) % 10
    canaries = Canaries(torch.ones(num, dtype=torch.bool), inputs=torch.ones(num, 1, 8, 8), labels=labels)
    with pytest.raises(SettingError, match=f"{num} input canaries leave none of 40 records"):
        replace_by_canaries(small_digits(), canaries)


PUBLISHED = {"training.steps": 2, "training.monitor_every": 1, "data.test_limit": 10}


def test_the_published_mechanism_trains_on_the_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    real = PublishedTrainable.__init__

    def noted(self: PublishedTrainable, config: Any, network: Any, train: Examples, *rest: Any, **named: Any) -> None:
        seen.append(train.inputs)
        real(self, config, network, train, *rest, **named)

    monkeypatch.setattr(PublishedTrainable, "__init__", noted)
    config = recipe("audit.published").override_all({**PUBLISHED, "canaries.num": 8, "canaries.kind": "input"})
    stobatch.train(config, tmp_path / "run", quiet=True)
    (inputs,) = seen
    assert inputs.shape == (40, 1, 8, 8)
    assert inputs[32:].abs().eq(1).all()
    assert not inputs[:32].abs().eq(1).flatten(1).all(1).any()
    assert not (tmp_path / "run" / "private" / "canary_scores.safetensors").exists()


@pytest.mark.parametrize("method", [PublishedConfig, VanillaConfig])
def test_gradient_canaries_need_a_method_that_clips(method: type[Any], tmp_path: Path) -> None:
    given = recipe("audit.published")
    config = given.replace(method=given.method if method is PublishedConfig else VanillaConfig(batch_size=3))
    config = config.override_all({**PUBLISHED, "canaries.num": 8})
    with pytest.raises(ModelError, match="no room for canaries beside its data") as caught:
        stobatch.train(config, tmp_path / "run", quiet=True)
    assert "canaries.kind=input" in caught.value.remedy
    assert not (tmp_path / "run").exists()


REFUSED = {
    "gradient canaries": ({"canaries.num": 651}, "651 gradient canaries do not fit 650 parameters"),
    "input canaries": ({"canaries.num": 41, "canaries.kind": "input"}, "41 input canaries leave none of 40 records"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_too_many_canaries_are_refused_before_anything_is_written(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    name = "audit.published" if "canaries.kind" in changes else "audit.sound"
    config = recipe(name).override_all({**changes, "training.steps": 2, "data.test_limit": 10})
    with pytest.raises(StobatchError, match=message):
        stobatch.train(config, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
