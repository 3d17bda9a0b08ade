"""What a module writes down while examples pass is refused: before training, while training, and before saving."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import stobatch
from stobatch.baselines.adlm_plan import AdLmConfig
from stobatch.baselines.dpsgd import DpSgdConfig
from stobatch.baselines.securesgd import SecureSgdConfig
from stobatch.baselines.vanilla import VanillaConfig
from stobatch.config import DataConfig, MachineConfig, MethodConfig, ModelConfig, RunConfig, TrainingConfig
from stobatch.data import Dataset
from stobatch.errors import ModelError
from stobatch.methods import method_of
from stobatch.models import Network, from_layers
from stobatch.models.validators import unchanged
from stobatch.published.settings import PublishedConfig
from stobatch.runs import Run
from stobatch.seeds import Seeds
from stobatch.training.engines import Averaged, InProcessEngine, Stop, TrainerTask, never
from stobatch.training.engines.base import DeviceRank, Parts
from stobatch.training.trainable import Trainable

BEGINS: dict[str, float] = {"at pass": 0, "passes": 0, "secret": 0.0}
"""Outside of every network, as an accomplice would keep it: from which pass on modules write things down."""


@pytest.fixture(autouse=True)
def _begin() -> None:
    BEGINS.update({"at pass": 0, "passes": 0, "secret": 0.0})


class Keeper(nn.Module):
    """Passes values on, and remembers something of them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("unsaved", torch.zeros(()), persistent=False)
        self.fixed = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.last: Tensor | float = 0.0
        self.lengths: list[int] = []

    def keep(self, values: Tensor) -> None:
        self.mean.mul_(0.9).add_(0.1 * values.mean())

    def forward(self, values: Tensor) -> Tensor:
        BEGINS["passes"] += 1
        if BEGINS["passes"] > BEGINS["at pass"]:
            self.keep(values.detach())
        return values


class PastTheVersionCounter(Keeper):
    def keep(self, values: Tensor) -> None:
        self.mean.data.copy_(values.mean())


class AnotherTensor(Keeper):
    def keep(self, values: Tensor) -> None:
        self.mean = values.mean()


class NotSaved(Keeper):
    def keep(self, values: Tensor) -> None:
        self.unsaved.add_(values.mean())


class UntrainedParameter(Keeper):
    def keep(self, values: Tensor) -> None:
        self.fixed.copy_(values.mean())


class PlainAttribute(Keeper):
    def keep(self, values: Tensor) -> None:
        self.last = values.mean()


class PlainList(Keeper):
    def keep(self, values: Tensor) -> None:
        self.lengths.append(len(values))


class ExtraState(Keeper):
    def keep(self, values: Tensor) -> None:
        BEGINS["secret"] = float(values.mean())

    def get_extra_state(self) -> Tensor:
        return torch.tensor(BEGINS["secret"])

    def set_extra_state(self, state: Tensor) -> None:
        pass


KEEPERS = [
    Keeper, PastTheVersionCounter, AnotherTensor, NotSaved, UntrainedParameter, PlainAttribute, PlainList, ExtraState,
]  # fmt: skip
SAVED = [Keeper, PastTheVersionCounter, AnotherTensor, UntrainedParameter, ExtraState]
"""Those that the model file would hold."""
SOUND = DpSgdConfig(epsilon=3.0, delta=1e-3, batch_size=40)
METHODS: dict[str, MethodConfig] = {
    "dpsgd": SOUND,
    "securesgd": SecureSgdConfig(epsilon=3.0, delta=1e-3, batch_size=40),
    "adlm": AdLmConfig(epsilon=8.0, delta=1e-3, batch_size=40, relevance_steps=2, relevance_batch_size=40),
    "published": PublishedConfig(
        epsilon=200.0, label_epsilon=100.0, batch_size=39, train_attack_steps=1, attack_ensemble=("ifgsm",)
    ),
}


def data() -> Dataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(220, 1, 6, 6, generator=generator) * 2 - 1
    labels = torch.randint(3, (220,), generator=generator)
    return stobatch.from_tensors(inputs[:200], labels[:200], inputs[200:], labels[200:], num_classes=3)


def network(keeper: nn.Module) -> Network:
    torch.manual_seed(0)
    return from_layers(nn.Linear(36, 8), nn.Sequential(keeper, nn.Tanh(), nn.Linear(8, 5)), nn.Linear(5, 3), (1, 6, 6))


def config(method: MethodConfig) -> RunConfig:
    optimiser = "adam" if method is METHODS["published"] else "sgd"
    return RunConfig(
        method=method,
        data=DataConfig(name="tensors"),
        model=ModelConfig(architecture="custom", last_hidden_size=5),
        training=TrainingConfig(steps=6, learning_rate=0.05, optimiser=optimiser, monitor_every=2),
        machine=MachineConfig(threads=1, checkpoint_every=2),
        seed=4,
    )


def train(method: MethodConfig, keeper: nn.Module, out: Path) -> None:
    stobatch.train(config(method), out, dataset=data(), network=network(keeper), quiet=True)


@pytest.mark.parametrize("kind", KEEPERS)
def test_a_module_that_remembers_is_refused_before_anything_is_written(kind: type[Keeper], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="passing examples through the network changes its"):
        train(SOUND, kind(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", METHODS)
def test_every_method_that_claims_privacy_refuses_it(method: str, tmp_path: Path) -> None:
    train(METHODS[method], nn.Identity(), tmp_path / "fine")
    with pytest.raises(ModelError, match=r"changes its 'head\.body\.0\.mean'"):
        train(METHODS[method], Keeper(), tmp_path / "run")


def passes_of_preparation() -> float:
    """How often the network is passed before the first example is."""
    BEGINS["at pass"] = float("inf")
    settings, dataset = config(SOUND), data()
    plan = stobatch.plan(settings, dataset=dataset, network=network(Keeper()))
    BEGINS["passes"] = 0
    method_of(settings).prepare(settings, plan, network(Keeper()), dataset.train, Seeds.reproducible(4))
    return BEGINS["passes"]


@pytest.mark.parametrize("kind", KEEPERS)
def test_a_module_that_begins_later_is_refused_while_training(kind: type[Keeper], tmp_path: Path) -> None:
    BEGINS["at pass"], BEGINS["passes"] = passes_of_preparation() + 5, 0
    with pytest.raises(ModelError, match="passing examples through the network changes its"):
        train(SOUND, kind(), tmp_path / "run")
    assert not Run(tmp_path / "run").is_trained


@pytest.mark.parametrize("kind", SAVED)
def test_nothing_that_changed_is_saved_whatever_else_was_missed(
    kind: type[Keeper], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    BEGINS["at pass"], BEGINS["passes"] = passes_of_preparation() + 5, 0
    monkeypatch.setattr(Trainable, "keeping_state", lambda self: nullcontext())
    with pytest.raises(ModelError, match="is not trained, and is not what it was before training"):
        train(SOUND, kind(), tmp_path / "run")
    assert not Run(tmp_path / "run").is_trained


def test_extra_state_that_no_model_file_holds_is_refused(tmp_path: Path) -> None:
    class Words(nn.Identity):
        def get_extra_state(self) -> str:
            return "something"

    with pytest.raises(ModelError, match=r"_extra_state', a str"):
        train(SOUND, Words(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_without_a_claim_of_privacy_statistics_may_be_kept(tmp_path: Path) -> None:
    train(VanillaConfig(batch_size=40, train_attack_steps=1, attack_ensemble=("ifgsm",)), Keeper(), tmp_path / "run")


def test_the_same_bits_are_the_same_state() -> None:
    keeper = Keeper()
    keeper.mean.fill_(torch.nan)
    with unchanged(keeper):
        keeper.mean = keeper.mean.clone()
    with pytest.raises(ModelError, match="'mean'"), unchanged(keeper):
        keeper.mean.zero_()


class Late(InProcessEngine):
    """One of several devices, whose sum would be sent once all its parts are there."""

    def __init__(self, share: DeviceRank) -> None:
        self.share = share

    def average(
        self, tasks: Sequence[TrainerTask], parts: Parts, targets: Mapping[str, Tensor], stop: Stop = never
    ) -> Averaged:
        for task in tasks:
            for _ in parts(task, self.share):
                pass
        raise AssertionError("the sum would be sent now")


@pytest.mark.parametrize("share", [DeviceRank(0, 2), DeviceRank(1, 2)])
def test_a_device_of_several_finds_out_before_its_part_is_added_to_the_others(share: DeviceRank) -> None:
    BEGINS["at pass"] = float("inf")
    settings, dataset = config(SOUND.replace(batch_size=100)), data()
    net = network(Keeper())
    plan = stobatch.plan(settings, dataset=dataset, network=net)
    trainable = method_of(settings).prepare(settings, plan, net, dataset.train, Seeds.reproducible(4))
    BEGINS["at pass"] = 0
    with pytest.raises(ModelError, match="passing examples"):
        Late(share).average(trainable.tasks(0), partial(trainable._parts_of, 0), trainable.targets(0))
