"""A noise multiplier as the knob: ε is what the accountant finds for it, and never what was asked for."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import stobatch
from stobatch.baselines.controls import HalfNoiseConfig
from stobatch.config import (
    CertificationConfig,
    DataConfig,
    EvaluationConfig,
    MachineConfig,
    ModelConfig,
    RunConfig,
    TrainingConfig,
)
from stobatch.data import Dataset, DatasetInfo
from stobatch.dp.accounting import LEAST_NOISE, MOST_NOISE, PoissonGaussian, noise_for
from stobatch.dp.guarantee import PrivacyGuarantee
from stobatch.dp.plan import DpSgdPlan, TrainersPlan
from stobatch.errors import SettingError
from stobatch.federated import FederatedPlan
from stobatch.loading import make_network, make_plan
from stobatch.methods import method_of
from stobatch.registry import METHODS
from stobatch.seeds import Seeds
from stobatch.settings import declared
from stobatch.sound.settings import DpSgdSettings, SoundConfig
from stobatch.sound.step import DpSgdTrainable
from stobatch.types import Status
from stobatch.verification.second_accountant import bracket

SIZES: dict[str, Any] = {
    "num_examples": 6_000,
    "expected_batch_size": 300,
    "steps": 60,
    "clip_norm": 0.5,
    "delta": 1e-5,
    "tuned_on_private_data": False,
}
TRAINERS = {"num_trainers": 5, "per_step": 2}
KINDS: dict[str, tuple[type[DpSgdPlan], dict[str, Any]]] = {
    "one owner": (DpSgdPlan, {}),
    "spare steps": (DpSgdPlan, {"spare_steps": 20}),
    "trainers": (TrainersPlan, TRAINERS),
    "trainers with shares and spare steps": (TrainersPlan, {**TRAINERS, "noise_shares": True, "spare_steps": 4}),
}
RELEASES = {
    "one owner": (0.05, 60),
    "spare steps": (0.05, 80),
    "trainers": (0.125, 30),  # everybody has a turn in two steps
    "trainers with shares and spare steps": (0.125, 34),
}


def plan(kind: str = "one owner", *, target: float = 50.0, given: float | None = None, **changes: Any) -> DpSgdPlan:
    make, own = KINDS[kind]
    return make(**{**SIZES, **own, "target_epsilon": target, "given_noise_multiplier": given, **changes})


@pytest.mark.parametrize("kind", KINDS)
def test_from_epsilon_to_noise_and_back(kind: str) -> None:
    """The noise that a budget gets, given as a number, is the same plan: the same ε, within the budget."""
    budget = plan(kind, target=2.0)
    given = plan(kind, target=2.0, given=budget.noise_multiplier)
    assert given.noise_stddev == budget.noise_stddev
    assert given.curve == budget.curve
    assert given.guarantee == budget.guarantee
    assert given.guarantee.epsilon <= 2.0
    for counted in (SIZES["steps"], SIZES["steps"] + 3, SIZES["steps"] + 30):
        assert given.after(counted) == budget.after(counted)


@pytest.mark.parametrize("noise", [0.7, 1.3, 6.0])
@pytest.mark.parametrize("kind", KINDS)
def test_from_noise_to_epsilon(kind: str, noise: float) -> None:
    """The oracle knows the accountant and the sizes; the noise found for that ε is the one given, to a thousandth."""
    rate, releases = RELEASES[kind]
    made = plan(kind, given=noise)
    assert made.noise_multiplier == noise
    assert made.guarantee.epsilon == PoissonGaussian(rate, noise, releases).epsilon(1e-5)
    assert noise_for(made.guarantee.epsilon, 1e-5, rate, releases) == pytest.approx(noise, rel=2e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_both_numbers_are_in_the_plan_whichever_was_given(kind: str) -> None:
    for made, formula in ((plan(kind, target=2.0), "smallest within the target"), (plan(kind, given=1.3), "given")):
        rows = {row.name: row for row in made.rows()}
        assert (rows["noise multiplier"].value, rows["noise multiplier"].formula) == (made.noise_multiplier, formula)
        assert rows["accounted epsilon"].value == made.guarantee.epsilon
        assert rows["target epsilon"].value == made.target_epsilon
    assert "given_noise_multiplier" not in plan(kind, target=2.0).sizes(), "as plans from before there was one"
    assert plan(kind, given=1.3).sizes()["given_noise_multiplier"] == 1.3


class FromTheKnob(DpSgdPlan):
    """The broken twin says the ε that was asked for."""

    @property
    def claim(self) -> PrivacyGuarantee:
        return replace(super().claim, epsilon=self.target_epsilon)


def is_confirmed(made: DpSgdPlan) -> bool:
    """Whether the second accountant finds the ε of the claim, from the noise that is really added."""
    curve = made.curve
    found = bracket(curve.sampling_rate, made.noise_stddev / made.clip_norm, curve.steps, made.delta)
    assert found is not None
    return found.low <= made.claim.epsilon <= found.high * 1.002


def test_the_second_accountant_finds_the_epsilon_that_is_spent() -> None:
    for kind in ("one owner", "spare steps", "trainers"):
        assert is_confirmed(plan(kind, given=1.3))
    for target in (1.4, 50.0):
        twin = FromTheKnob(**SIZES, target_epsilon=target * plan(given=1.3).claim.epsilon, given_noise_multiplier=1.3)
        assert not is_confirmed(twin)


def test_what_is_promised_does_not_depend_on_the_bound() -> None:
    assert plan(target=3.0, given=1.3).guarantee == plan(target=90.0, given=1.3).guarantee


@pytest.mark.parametrize("kind", KINDS)
def test_more_than_the_budget_is_refused_with_what_it_would_be(kind: str) -> None:
    spent = plan(kind, given=0.9).guarantee.epsilon
    with pytest.raises(SettingError, match=r"noise_multiplier=0.9 spends ε = .*, more than epsilon=1") as error:
        plan(kind, target=1.0, given=0.9)
    wanted = re.search(r"Set method.epsilon=([\d.]+), or raise", error.value.remedy)
    assert wanted is not None
    assert spent <= float(wanted[1]) <= spent + 1e-3
    # Following the remedy is enough, and a budget of just what is spent is, too.
    assert plan(kind, target=float(wanted[1]), given=0.9).guarantee.epsilon == spent
    assert plan(kind, target=spent, given=0.9).guarantee.epsilon == spent


def test_an_epsilon_that_promises_nothing_is_no_remedy() -> None:
    with pytest.raises(SettingError, match="spends ε = ") as error:
        plan(given=LEAST_NOISE, expected_batch_size=6000)
    assert error.value.remedy.startswith("Raise method.noise_multiplier")


@pytest.mark.parametrize("noise", [0.0, -1.0, 0.099, 1.1e4, float("nan"), float("inf")])
def test_noise_that_is_none_is_refused(noise: float) -> None:
    with pytest.raises(SettingError, match=r"noise_multiplier=.* is not allowed"):
        plan(given=noise)


# Settings, and whole runs.


FAMILY = [name for name, method in METHODS.items() if issubclass(method.config_class, DpSgdSettings)]


def test_the_family_is_complete() -> None:
    assert set(FAMILY) >= {
        "sound",
        "dpsgd",
        "dp_adversarial",
        "dp_smoothing",
        "securesgd",
        "securesgd_agm",
        "federated",
    }
    assert sum(name.startswith("control_") for name in FAMILY) == 5
    limits = declared(DpSgdSettings)["noise_multiplier"].limits
    assert limits == {"at least": LEAST_NOISE, "at most": MOST_NOISE}


@pytest.mark.parametrize("name", FAMILY)
def test_settings_from_before_keep_their_hash(name: str) -> None:
    kind = METHODS[name].config_class
    assert "noise_multiplier" not in kind().to_dict()
    assert kind.from_dict(kind().to_dict() | {"noise_multiplier": 2.5}).to_dict()["noise_multiplier"] == 2.5


def pictures(groups: Any = None) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.rand(100, 1, 8, 8, generator=generator) * 2 - 1, torch.arange(100) % 3
    return stobatch.from_tensors(inputs[:90], labels[:90], inputs[90:], labels[90:], num_classes=3, groups=groups)


def settings(name: str = "sound", **changes: Any) -> RunConfig:
    noisy_layer = name.startswith("securesgd")
    method = METHODS[name].config_class(epsilon=30.0, delta=1e-3, batch_size=20, clip_norm=0.5, noise_multiplier=1.5)
    return RunConfig(
        method=method,
        data=DataConfig(name="tensors"),
        model=ModelConfig(architecture="small_cnn" if noisy_layer else "conv 3 3/2, relu, linear", last_hidden_size=8),
        training=TrainingConfig(steps=6, learning_rate=0.5, optimiser="sgd", monitor_every=3),
        certification=CertificationConfig(certificate="bounds"),
        evaluation=EvaluationConfig(
            radii=(0.1,), protocols=("adaptive",), functions=("single_pass",), adaptive_attacks=("fgsm",), num_images=0
        ),
        machine=MachineConfig(threads=1, checkpoint_every=3),
    ).override_all(changes)


@pytest.mark.parametrize("name", [name for name in FAMILY if name != "federated"])
def test_every_member_of_the_family_adds_the_noise_that_was_given(name: str) -> None:
    about_persons = name in ("control_split_persons", "control_record_clipping")
    config, data = settings(name), pictures(range(90) if about_persons else None)
    made = stobatch.plan(config, dataset=data)
    assert isinstance(made, DpSgdPlan)
    expected = PoissonGaussian(20 / 90, 1.5, 6)
    assert made.curve == expected
    assert made.claim.epsilon == expected.epsilon(1e-3)
    network = make_network(config, data.info, Seeds.reproducible(1), None)
    trainable = method_of(config).prepare(config, made, network, data.train, Seeds.reproducible(1))
    assert isinstance(trainable, DpSgdTrainable)
    halved = isinstance(config.method, HalfNoiseConfig)
    assert trainable.noise_stddev == 1.5 * 0.5 / (2 if halved else 1)


def test_parties_share_the_noise_multiplier_and_spend_each_its_own() -> None:
    parties = {"north": (40, 12, 6), "east": (30, 8, 6), "south": (20, 6, 4)}
    listed = [":".join(map(str, (name, *sizes))) for name, sizes in parties.items()]
    made = stobatch.plan(settings("federated", **{"method.parties": listed}), dataset=pictures())
    assert isinstance(made, FederatedPlan)
    expected = {
        name: PoissonGaussian(batch / records, 1.5, rounds).epsilon(1e-3)
        for name, (records, batch, rounds) in parties.items()
    }
    assert {account.name: account.epsilon for account in made.accounts} == expected
    assert {account.plan.noise_multiplier for account in made.accounts} == {1.5}
    assert made.claim.epsilon == max(expected.values())
    # One that would spend too much is enough for a refusal: north, which samples most.
    second, most = sorted(expected.values())[-2:]
    with pytest.raises(SettingError, match=r"noise_multiplier=1\.5 spends"):
        stobatch.plan(
            settings("federated", **{"method.parties": listed, "method.epsilon": (second + most) / 2}),
            dataset=pictures(),
        )


def test_trainers_are_planned_for_what_each_of_them_spends() -> None:
    """An owner of all the data would spend less: sampling hides more there."""
    trainers = {"trainers.num": 3, "trainers.per_step": 1}
    alone, together = (stobatch.plan(settings(**changes), dataset=pictures()) for changes in ({}, trainers))
    assert isinstance(together, TrainersPlan)
    assert alone.claim.epsilon < together.claim.epsilon == PoissonGaussian(60 / 90, 1.5, 2).epsilon(1e-3)
    between = (alone.claim.epsilon + together.claim.epsilon) / 2
    with pytest.raises(SettingError, match=r"noise_multiplier=1\.5 spends"):
        stobatch.plan(settings(**trainers, **{"method.epsilon": between}), dataset=pictures())


def test_it_is_refused_before_any_data_is_read(tmp_path: Path) -> None:
    missing = {"data.name": "mnist", "machine.data_root": str(tmp_path / "nowhere")}
    sizes = {"method.batch_size": 6000, "method.delta": 1e-6, "method.epsilon": 0.1}
    with pytest.raises(SettingError, match=r"noise_multiplier=1\.5 spends"):
        stobatch.train(settings(**missing, **sizes), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_run_says_what_it_spent_and_is_verified(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = stobatch.train(settings(), tmp_path / "run", dataset=pictures(), quiet=True)
    spent = PoissonGaussian(20 / 90, 1.5, 6).epsilon(1e-3)
    assert (model.guarantee.status, model.guarantee.epsilon) == (Status.PROVED, spent)
    assert model.run.read("training")["history"][-1]["epsilon_spent"] == spent
    stobatch.evaluate(tmp_path / "run", dataset=pictures(), quiet=True)
    checks = {check.name: check for check in stobatch.verify(tmp_path / "run", dataset=pictures(), sample=0).checks}
    assert checks["second accountant"].outcome == "agrees", checks["second accountant"]
    assert f"ε = {spent:.6g} is recorded" in checks["second accountant"].detail
    page = Path(stobatch.report([tmp_path / "run"]).report).read_text()
    assert f"ε = {spent:g}" in page


def test_info_of_the_plan_is_enough() -> None:
    """The plan is made of public sizes alone, whichever number decides."""
    config = settings()
    info = DatasetInfo("anything", (1, 8, 8), 3, 90, 10, ("a", "b", "c"))
    assert isinstance(config.method, SoundConfig)
    assert make_plan(config, info, None) == stobatch.plan(config, dataset=pictures())
