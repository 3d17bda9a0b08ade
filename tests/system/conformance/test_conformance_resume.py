"""The same bits whatever happens on the way, the same seed gives the same training, and no seed gives a secret one."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from bench import Finished, data_of
from odd_engines import same
from safetensors.torch import load_file
from support import checkpoints
from torch import Tensor

import stobatch
from stobatch import RunConfig
from stobatch.methods import Method
from stobatch.models import Classifier
from stobatch.training import Trainable
from stobatch.training.checkpoint import TrainingState


class Stopped(Exception):  # noqa: N818
    """The training was cut off here."""


def weights(run: Path) -> dict[str, Tensor]:
    return load_file(run / "model.safetensors")


def history(run: Path) -> Any:
    return json.loads((run / "training.json").read_text())["history"]


def kept_apart(run: Path) -> dict[str, dict[str, Tensor]]:
    """What a run keeps for its owner beside checkpoints: noise, and what a training carries to its end."""
    return {file.name: load_file(file) for file in sorted((run / "private").glob("*.safetensors"))}


def train(config: RunConfig, out: Path, *, resume: bool = False) -> stobatch.TrainedModel:
    return stobatch.train(config, out, dataset=data_of(config), resume=resume, quiet=True)


def require_same(one: Path, other: Path) -> None:
    """Weights, history, the whole last state (descent rules and what is carried), and what is kept apart."""
    assert same(weights(one), weights(other))
    assert history(one) == history(other)
    assert same(checkpoints.tensors(one), checkpoints.tensors(other))
    ours, theirs = kept_apart(one), kept_apart(other)
    assert ours.keys() == theirs.keys()
    assert all(same(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("when", ["after the first checkpoint", "before the second one"])
def test_a_training_that_was_stopped_ends_with_the_same_bits(
    config: RunConfig, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    original, calls = TrainingState.save, list[int]()

    def stopping(state: TrainingState, *arguments: Any) -> None:
        calls.append(state.step)
        if len(calls) == 1 or when == "after the first checkpoint":
            original(state, *arguments)
        if len(calls) == (1 if when == "after the first checkpoint" else 2):
            raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(TrainingState, "save", stopping)
        with pytest.raises(Stopped):
            train(config, tmp_path / "run")
    assert not (tmp_path / "run" / "model.safetensors").exists()
    assert checkpoints.last_step(tmp_path / "run") == config.machine.checkpoint_every < config.training.steps
    resumed = train(config, tmp_path / "run", resume=True)
    require_same(tmp_path / "run", undisturbed)
    whole = stobatch.load(undisturbed)
    # What was cut off is repeated bit by bit, which releases nothing new.
    assert resumed.accounted_steps == whole.accounted_steps
    assert resumed.guarantee == whole.guarantee


@dataclass(frozen=True)
class Again:
    """A second training with the same seed: the very network that was trained, and what `train` returned."""

    run: Path
    network: Classifier
    returned: stobatch.TrainedModel


@pytest.fixture(scope="session")
def again(method: Method, config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Again:
    """Read only."""
    prepare, made = type(method).prepare, list[Trainable]()
    out = tmp_path_factory.mktemp("again") / "run"

    def noting(self: Method, *arguments: Any) -> Trainable:
        made.append(prepare(self, *arguments))
        return made[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(method), "prepare", noting)
        returned = train(config, out)
    (trainable,) = made
    return Again(out, trainable.network, returned)


def test_what_is_loaded_is_what_was_trained(config: RunConfig, undisturbed: Path, again: Again) -> None:
    inputs, network = data_of(config).test.inputs, copy.deepcopy(again.network)
    network.calibrate()
    logits = network(inputs).detach()
    assert logits.isfinite().all()
    assert logits.std(0).max() > 0, "every input has the same scores"
    for model in (again.returned, stobatch.load(again.run), stobatch.load(undisturbed)):
        assert model.network(inputs).equal(logits)


def test_what_a_training_adopts_is_the_model(config: RunConfig, again: Again) -> None:
    """Without any help: audits look at networks that were never saved."""
    inputs = data_of(config).test.inputs
    assert again.returned.network(inputs).equal(again.network(inputs))


def test_the_same_seed_gives_the_same_training(undisturbed: Path, again: Again) -> None:
    require_same(again.run, undisturbed)


def test_another_seed_gives_another_training(config: RunConfig, undisturbed: Path, tmp_path: Path) -> None:
    assert config.seed is not None
    train(config.override("seed", config.seed + 1), tmp_path / "run")
    require_different(tmp_path / "run", undisturbed)


def test_without_a_seed_trainings_differ_and_the_seed_is_kept(
    config: RunConfig, finished: Finished, tmp_path: Path
) -> None:
    secret = config.override("seed", None)
    train(secret, tmp_path / "run")
    require_different(tmp_path / "run", finished.path)
    roots = [
        json.loads((run / "private" / "seeds.json").read_text())["root"] for run in (tmp_path / "run", finished.path)
    ]
    assert len(set(roots)) == 2
    assert all(int(root).bit_length() > 64 for root in roots)
    repeated = Path(shutil.copytree(tmp_path / "run", tmp_path / "repeated"))
    (repeated / "model.safetensors").unlink()
    shutil.rmtree(repeated / "private" / "checkpoints")
    train(secret, repeated, resume=True)
    require_same(repeated, tmp_path / "run")


def require_different(one: Path, other: Path) -> None:
    """In every matrix of weights, and in everything that is kept apart."""
    ours, theirs = (dict(stobatch.load(run).network.named_parameters()) for run in (one, other))
    assert ours.keys() == theirs.keys()
    assert not any(ours[name].equal(theirs[name]) for name in ours if ours[name].ndim > 1)
    for name, kept in kept_apart(one).items():
        assert not any(value.equal(kept_apart(other)[name][key]) for key, value in kept.items()), name
