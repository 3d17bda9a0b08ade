"""Steps that looked at the data are counted, whatever happened to them, and the promise follows the count."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import checkpoints
from support.noise_checks import dependent, normal_of

import stobatch
from stobatch.config import CertificationConfig, DataConfig, EvaluationConfig, MachineConfig, ModelConfig, RunConfig
from stobatch.config import TrainingConfig as Training
from stobatch.data import Dataset
from stobatch.dp.noise import add_noise
from stobatch.dp.plan import DpSgdPlan
from stobatch.interrupts import Interrupted
from stobatch.seeds import Seeds
from stobatch.sound.settings import SoundConfig
from stobatch.sound.step import DpSgdTrainable
from stobatch.training.checkpoint import TrainingState, tensors_digest
from stobatch.training.engines import InProcessEngine
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
        batch_size=10,
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


def releases_of(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str, str]]:
    """What is released from now on: the step, a digest of its noise, and one of the sum under it."""
    released, seen = DpSgdTrainable.released, list[tuple[int, str, str]]()
    drawn = [""]

    def drawing(*sums_and_noise: Any) -> Any:
        values = add_noise(*sums_and_noise)
        drawn[0] = tensors_digest(values)
        return values

    def releasing(self: DpSgdTrainable, step: int, gradients: Any) -> None:
        seen.append((step, drawn[0], tensors_digest(gradients)))
        released(self, step, gradients)

    monkeypatch.setattr("stobatch.sound.step.add_noise", drawing)
    monkeypatch.setattr(DpSgdTrainable, "released", releasing)
    return seen


def leaks(releases: list[tuple[int, str, str]]) -> bool:
    """Whether two different sums were released under one noise: their difference shows the data as they are."""
    sums: dict[str, set[str]] = {}
    for _, noise, total in releases:
        sums.setdefault(noise, set()).add(total)
    return any(len(of_one_noise) > 1 for of_one_noise in sums.values())


@pytest.mark.parametrize(("step", "begun"), [(0, 0), (1, 0), (3, 3), (5, 3), (6, 6), (7, 6)])
def test_a_repetition_with_the_same_bits_is_the_same_release(
    step: int, begun: int, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stretches are 0-2, 3-5 and 6-7; any of their steps may have been made, and each is released once."""
    out = tmp_path / "run"
    made, releases = accident_at(step, monkeypatch, crash), releases_of(monkeypatch)
    with pytest.raises(Crash):
        train(out)
    assert Ledger.of(out) == Ledger(begun, min(begun + EVERY, STEPS) - begun)
    model = train(out, resume=True)
    assert made == [*range(step + 1), *range(begun, STEPS)]
    assert_same_bits(out, undisturbed)
    assert len(set(releases)) == model.accounted_steps == STEPS
    assert model.guarantee == model.plan.guarantee


OTHER_BITS = {
    "threads": {"machine.threads": 2},
    "pieces": {"machine.pieces": 3},
    "memory": {"machine.memory_mb": 256},
}


@pytest.mark.parametrize("change", OTHER_BITS)
def test_a_repetition_with_other_bits_draws_its_own_noise_and_is_counted(
    change: str, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    releases = releases_of(monkeypatch)
    with monkeypatch.context() as patch:
        accident_at(5, patch, crash)
        with pytest.raises(Crash):
            train(out)
    before = list(releases)
    model = stobatch.train(
        settings().override_all(OTHER_BITS[change]), out, dataset=pictures(), resume=True, quiet=True
    )
    torch.set_num_threads(1)
    again = releases[len(before) :]
    assert [step for step, _, _ in before] == [0, 1, 2, 3, 4]
    assert [step for step, _, _ in again] == [3, 4, 5, 6, 7]
    assert not leaks(releases)
    assert len({noise for _, noise, _ in releases}) == len(releases), "no noise is drawn twice"
    assert model.accounted_steps == STEPS + EVERY
    plan = model.plan
    assert isinstance(plan, DpSgdPlan)
    assert model.guarantee.epsilon == plan.mechanism(STEPS + EVERY).epsilon(plan.delta) > plan.guarantee.epsilon
    assert f"{EVERY} steps beyond the {STEPS} planned" in model.guarantee.assumptions[-1]
    assert model.run.read("training")["history"][-1]["epsilon_spent"] == model.guarantee.epsilon


def test_noise_that_is_used_again_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken twin: the names of a step's draws do not say which attempt it is."""
    out = tmp_path / "run"
    monkeypatch.setattr(DpSgdTrainable, "_path", lambda self, step, trainer: ("step", step))
    releases = releases_of(monkeypatch)
    with monkeypatch.context() as patch:
        accident_at(5, patch, crash)
        with pytest.raises(Crash):
            train(out)
    other = settings().override_all({"machine.memory_mb": 256})
    # As another machine would: the same sums, rounded otherwise.
    with monkeypatch.context() as patch:
        clipped = DpSgdTrainable._clipped
        patch.setattr(
            DpSgdTrainable,
            "_clipped",
            lambda self, *rest: {name: value * (1 + 2**-20) for name, value in clipped(self, *rest).items()},
        )
        stobatch.train(other, out, dataset=pictures(), resume=True, quiet=True)
    assert leaks(releases)


def test_attempts_are_independent() -> None:
    """The signs of the noise of two attempts agree as often as those of two steps."""
    seeds, paths = Seeds.reproducible(4), [("step", 3), ("step", 3, "attempt", 1), ("step", 3, "attempt", 2)]
    streams = [normal_of(seeds.stream(*path, "noise"), 20_000) for path in paths]
    assert not dependent(streams)
    assert dependent([*streams, streams[1]])


def test_two_crashes_elsewhere_are_paid_for_twice_and_every_verb_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    releases = releases_of(monkeypatch)
    for memory in (512, 256, 128):
        config = settings().override_all({"machine.memory_mb": memory})
        with monkeypatch.context() as patch:
            accident_at(4 if memory > 128 else STEPS, patch, crash)
            with pytest.raises(Crash) if memory > 128 else nullcontext():
                stobatch.train(config, out, dataset=pictures(), resume=memory < 512, quiet=True)
    model = stobatch.load(out)
    assert model.accounted_steps == STEPS + 2 * EVERY
    assert not leaks(releases)
    for scores in (
        stobatch.attack(out, dataset=pictures(), quiet=True),
        stobatch.evaluate(out, dataset=pictures(), quiet=True),
    ):
        assert scores.guarantee.epsilon == model.guarantee.epsilon > model.plan.guarantee.epsilon


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


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "elsewhere"])
@pytest.mark.parametrize(("crashed_at", "repeated"), [(None, 2), (7, 5)])
def test_steps_behind_a_damaged_checkpoint_are_made_again(
    crashed_at: int | None,
    repeated: int,
    elsewhere: bool,
    undisturbed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One bit of the newest is flipped: the one before counts. Checkpoints are those of steps 3, 6 and 8."""
    out = tmp_path / "run"
    releases = releases_of(monkeypatch)
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
    config = settings().override_all({"machine.memory_mb": 256} if elsewhere else {})
    model = stobatch.train(config, out, dataset=pictures(), resume=True, quiet=True)
    assert made == list(range(6 if crashed_at is None else 3, STEPS))
    assert not leaks(releases)
    if not elsewhere:
        assert_same_bits(out, undisturbed)
        assert model.accounted_steps == STEPS == len(set(releases))
        return
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


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ({"accounted_steps": STEPS - 1}, "cannot be right: .*too few"),
        ({"accounted_steps": STEPS + 1}, "cannot be right: .*the ledger knows"),
        ({"accounted_steps": -1}, "cannot be right: .*is -1"),
        ({"accounted_steps": "8"}, "accounted_steps is wrong"),
        ({"accounted_steps": True}, "accounted_steps is wrong"),
        ({"steps": None}, "steps is wrong"),
    ],
)
def test_counts_that_cannot_be_right_are_refused(
    counts: dict[str, Any], words: str, undisturbed: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    shutil.copytree(undisturbed, out)
    document = json.loads((out / "training.json").read_text())
    (out / "training.json").write_text(json.dumps(document | counts))
    with pytest.raises(stobatch.errors.RunError, match=words):
        stobatch.load(out)


@pytest.mark.parametrize("lost", ["missing", "set back"])
def test_a_checkpoint_that_the_ledger_does_not_know_is_refused(
    lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Going on would count too few steps; nothing is computed, and nothing written."""
    out = tmp_path / "run"
    ledger, earlier = out / "private" / "ledger.json", list[str]()
    with monkeypatch.context() as patch:
        accident_at(4, patch, lambda: earlier.append(ledger.read_text()))
        made = accident_at(7, patch, crash)
        with pytest.raises(Crash):
            train(out)
    ledger.unlink()
    if lost == "set back":
        ledger.write_text(earlier[0].replace('"open": 3', '"open": 2').replace('"last": 6', '"last": 5'))
    made = accident_at(STEPS, monkeypatch, crash)
    with pytest.raises(stobatch.errors.RunError, match=r"knows of [05] steps, and a checkpoint is of step 6"):
        train(out, resume=True)
    assert made == []


@pytest.mark.parametrize(
    "change",
    [
        {"done": -3},
        {"done": 1.5},
        {"open": None},
        {"stretches": 7},
        {"stretches": [{"first": 0}]},
        {"stretches": [["first", 0]]},
        {"past_steps": 10**6},
        {"past_attempts": "many"},
    ],
)
def test_a_ledger_that_cannot_be_right_is_refused(change: dict[str, Any], undisturbed: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(undisturbed, out)
    (out / "model.safetensors").unlink()
    file = out / "private" / "ledger.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(stobatch.errors.RunError, match="cannot be right"):
        Ledger.of(out)


def test_a_checkpoint_of_a_step_that_is_not_planned_is_refused(undisturbed: Path, tmp_path: Path) -> None:
    """A folder, its list and its parts that agree on a step beyond the last one."""
    out = tmp_path / "run"
    shutil.copytree(undisturbed, out)
    (out / "model.safetensors").unlink()
    state = TrainingState(stobatch.load(undisturbed).network, [], {}, step=STEPS + 1)
    state.save(out, settings().training_hash, InProcessEngine())
    with pytest.raises(stobatch.errors.RunError, match=f"it is of step {STEPS + 1} of {STEPS}"):
        TrainingState(state.network, []).restore(out, settings().training_hash, STEPS)
