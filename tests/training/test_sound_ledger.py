"""Steps that looked at the data are counted, whatever happened to them, and the promise follows the count."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from safetensors.torch import load_file

import stobatch
from stobatch.config import CertificationConfig, DataConfig, EvaluationConfig, MachineConfig, ModelConfig, RunConfig
from stobatch.config import TrainingConfig as Training
from stobatch.data import Dataset
from stobatch.interrupts import Interrupted
from stobatch.methods import SoundConfig
from stobatch.methods.dpsgd_trainable import DpSgdTrainable
from stobatch.privacy.dpsgd_plan import DpSgdPlan
from stobatch.training.ledger import Ledger

STEPS, EVERY = 8, 3


def pictures() -> Dataset:
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.rand(40, 1, 6, 6, generator=generator) * 2 - 1, torch.arange(40) % 3
    return stobatch.from_tensors(inputs[:30], labels[:30], inputs[30:], labels[30:], num_classes=3)


def settings() -> RunConfig:
    method = SoundConfig(
        epsilon=3.0,
        delta=1e-3,
        expected_batch_size=10,
        momentum=0.5,
        adversarial_weight=0.2,
        views_weight=0.3,
        smoothing_stddev=0.3,
    )
    return RunConfig(
        method=method,
        data=DataConfig(name="tensors"),
        model=ModelConfig(architecture="squash 2 0 0.4, conv 3 3/2, relu, linear"),
        training=Training(steps=STEPS, learning_rate=0.5, optimiser="sgd", monitor_every=4),
        certification=CertificationConfig(certificate="bounds"),
        evaluation=EvaluationConfig(
            radii=(0.1,), protocols=("adaptive",), functions=("single_pass",), adaptive_attacks=("fgsm",), num_images=0
        ),
        machine=MachineConfig(threads=1, checkpoint_every=EVERY),
        seed=4,
    )


class Crash(BaseException):
    """Ends a training as a dying process does: nothing of it is caught, nothing is tidied up."""


def accident_at(step: int, monkeypatch: pytest.MonkeyPatch, how: Any) -> list[int]:
    """Let something happen inside a step, once. Returns the list of steps made from then on."""
    real, made, open_ = DpSgdTrainable.parts, list[int](), [True]

    def parts(self: DpSgdTrainable, task: Any, at: int, share: Any) -> Iterator[Any]:
        made.append(at)
        if at == step and open_:
            open_.clear()
            how()
        yield from real(self, task, at, share)

    monkeypatch.setattr(DpSgdTrainable, "parts", parts)
    return made


def crash() -> None:
    raise Crash


def train(out: Path, *, resume: bool = False) -> stobatch.TrainedModel:
    return stobatch.train(settings(), out, dataset=pictures(), resume=resume, quiet=True)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    train(out)
    return out


def assert_same_bits(one: Path, other: Path) -> None:
    for read in (lambda run: load_file(run / "model.safetensors"), checkpoints.tensors):
        ours, theirs = (read(run) for run in (one, other))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    histories = [json.loads((run / "training.json").read_text())["history"] for run in (one, other)]
    assert histories[0] == histories[1]


def test_an_undisturbed_run_counts_its_steps_and_keeps_its_budget(undisturbed: Path) -> None:
    model = stobatch.load(undisturbed)
    assert Ledger.of(undisturbed) == Ledger(STEPS, 0)
    assert model.accounted_steps == model.run.read("training")["accounted_steps"] == STEPS
    assert model.guarantee == model.plan.guarantee
    assert model.guarantee.epsilon <= 3.0
    spent = [row["epsilon_spent"] for row in model.run.read("training")["history"]]
    assert spent[-1] == model.guarantee.epsilon > spent[0] > 0


def test_the_model_is_the_average_and_not_the_last_step(undisturbed: Path) -> None:
    model, checkpoint = load_file(undisturbed / "model.safetensors"), checkpoints.tensors(undisturbed)
    for index, name in enumerate(model):
        assert any(torch.equal(model[name], value) for key, value in checkpoint.items() if key.endswith(".average"))
        assert not torch.equal(model[name], checkpoint[f"network.{name}"]), (index, name)


@pytest.mark.parametrize(("step", "repeated"), [(0, 3), (1, 3), (3, 3), (5, 3), (6, 2), (7, 2)])
def test_a_crash_is_paid_for_by_its_whole_stretch(
    step: int, repeated: int, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stretches are 0-2, 3-5 and 6-7; any of their steps may have been made."""
    out = tmp_path / "run"
    made = accident_at(step, monkeypatch, crash)
    with pytest.raises(Crash):
        train(out)
    begun = step // EVERY * EVERY
    assert Ledger.of(out) == Ledger(begun, repeated)
    model = train(out, resume=True)
    assert made == [*range(step + 1), *range(begun, STEPS)]
    assert_same_bits(out, undisturbed)
    plan = model.plan
    assert isinstance(plan, DpSgdPlan)
    assert model.accounted_steps == STEPS + repeated >= len(made)
    assert model.guarantee.epsilon == plan.mechanism(STEPS + repeated).epsilon(plan.delta) > plan.guarantee.epsilon
    assert f"{repeated} steps beyond the {STEPS} planned" in model.guarantee.assumptions[-1]


def test_two_crashes_are_paid_for_twice_and_every_verb_says_so(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    for resume in (False, True):
        with monkeypatch.context() as patch:
            accident_at(4, patch, crash)
            with pytest.raises(Crash):
                train(out, resume=resume)
    model = train(out, resume=True)
    assert model.accounted_steps == STEPS + 2 * EVERY
    assert_same_bits(out, undisturbed)
    for scores in (
        stobatch.attack(out, dataset=pictures(), quiet=True),
        stobatch.evaluate(out, dataset=pictures(), quiet=True),
    ):
        assert scores["guarantee"]["void_epsilon"] == model.guarantee.epsilon > model.plan.guarantee.epsilon


def test_a_crash_between_checkpoint_and_ledger_counts_too_much_and_never_too_little(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(DpSgdTrainable, "saved", lambda *_: crash())
        with pytest.raises(Crash):
            train(out)
    assert Ledger.of(out) == Ledger(0, EVERY)
    assert train(out, resume=True).accounted_steps == STEPS
    assert_same_bits(out, undisturbed)


def damaged(part: Path) -> None:
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)


@pytest.mark.parametrize(("crashed_at", "repeated"), [(None, 2), (7, 5)])
def test_steps_behind_a_damaged_checkpoint_are_made_again_and_paid_for(
    crashed_at: int | None, repeated: int, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit of the newest is flipped: the one before counts. Checkpoints are those of steps 3, 6 and 8."""
    out = tmp_path / "run"
    made = accident_at(STEPS if crashed_at is None else crashed_at, monkeypatch, crash)
    if crashed_at is None:
        train(out)
        (out / "model.safetensors").unlink()
    else:
        with pytest.raises(Crash):
            train(out)
    older, newer = checkpoints.folders(out)
    assert [folder.name for folder in (older, newer)] == (
        ["step-00000006", "step-00000008"] if crashed_at is None else ["step-00000003", "step-00000006"]
    )
    (part,) = checkpoints.parts(newer)
    damaged(part)
    made.clear()
    model = train(out, resume=True)
    assert made == list(range(6 if crashed_at is None else 3, STEPS))
    assert_same_bits(out, undisturbed)
    # Of the crash the stretch of 6 and 7, of the damage that of 3 to 5; or of the damage that of 6 and 7 alone.
    assert model.accounted_steps == STEPS + repeated
    assert f"{repeated} steps beyond the {STEPS} planned" in model.guarantee.assumptions[-1]
    assert model.guarantee.epsilon > model.plan.guarantee.epsilon


def test_a_run_whose_checkpoints_are_all_damaged_is_refused_and_counts_nothing(tmp_path: Path) -> None:
    """From its beginning it would be another training on the same data: the owner has to ask for that."""
    out = tmp_path / "run"
    train(out)
    (out / "model.safetensors").unlink()
    for folder in checkpoints.folders(out):
        (part,) = checkpoints.parts(folder)
        damaged(part)
    with pytest.raises(stobatch.errors.RunError, match=r"every checkpoint in .* is damaged"):
        train(out, resume=True)
    assert Ledger.of(out) == Ledger(STEPS, 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("step", [0, 4, 6])
def test_a_polite_stop_settles_the_ledger(
    step: int, number: signal.Signals, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    made = accident_at(step, monkeypatch, lambda: os.kill(os.getpid(), number))
    with pytest.raises(Interrupted):
        train(out)
    assert Ledger.of(out) == Ledger(step + 1, 0)
    model = train(out, resume=True)
    assert made == list(range(STEPS))
    assert model.accounted_steps == STEPS
    assert model.guarantee == model.plan.guarantee
    assert_same_bits(out, undisturbed)


def test_training_to_the_end_again_counts_nothing(undisturbed: Path) -> None:
    before = (undisturbed / "model.safetensors").read_bytes()
    assert train(undisturbed, resume=True).accounted_steps == STEPS
    assert (undisturbed / "model.safetensors").read_bytes() == before


def test_a_run_whose_count_is_lost_is_refused(tmp_path: Path) -> None:
    """Without the count nobody can say what it promises."""
    train(tmp_path / "run")
    (tmp_path / "run" / "training.json").unlink()
    with pytest.raises(stobatch.errors.RunError, match=r"training\.json"):
        stobatch.load(tmp_path / "run")


def test_the_ledger_never_forgets() -> None:
    """Whatever the order of beginnings and settlements, what was begun and not settled stays counted."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        ledger, least = Ledger(), 0
        for _ in range(10):
            length = int(torch.randint(1, 9, (), generator=generator))
            made = int(torch.randint(0, length + 1, (), generator=generator))
            ledger = ledger.begun(length)
            least += made
            assert ledger.accounted >= least
            if torch.rand((), generator=generator) < 0.5:
                ledger = ledger.made(made)
            assert ledger.accounted >= least
