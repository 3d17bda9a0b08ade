"""The plan of DP-SGD says all that its privacy depends on, keeps its budget, and refuses what its proof leaves out."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from stobatch.dp.accounting import PoissonGaussian
from stobatch.dp.plan import DpSgdPlan
from stobatch.errors import SettingError
from stobatch.registry import METHODS
from stobatch.types import Neighbours, Status

MNIST: dict[str, Any] = {
    "num_examples": 60_000,
    "expected_batch_size": 2_499,
    "steps": 240,
    "clip_norm": 0.5,
    "target_epsilon": 1.0,
    "delta": 1e-5,
    "tuned_on_private_data": False,
}


def plan(**changes: Any) -> DpSgdPlan:
    return DpSgdPlan(**{**MNIST, **changes})


def test_the_numbers_follow_from_the_sizes() -> None:
    made = plan()
    assert made.sampling_rate == 2_499 / 60_000
    assert made.epochs == pytest.approx(240 * 2_499 / 60_000)
    assert made.noise_stddev == made.noise_multiplier * 0.5
    assert made.sizes() == {**MNIST, "records_per_person": 1}


@pytest.mark.parametrize("target", [0.2, 1.0, 8.0])
def test_the_budget_is_kept_and_used(target: float) -> None:
    """The noise is the smallest to a thousandth, so no more than one per cent of ε lies idle."""
    assert 0.99 * target <= plan(target_epsilon=target).guarantee.epsilon <= target


def test_the_clipping_norm_scales_the_noise_and_nothing_else() -> None:
    assert plan(clip_norm=5.0).noise_stddev == pytest.approx(10 * plan().noise_stddev)
    assert plan(clip_norm=5.0).guarantee.epsilon == plan().guarantee.epsilon


def test_what_is_spent_grows_from_nothing_to_the_guarantee() -> None:
    made = plan()
    spent = [made.spent(steps) for steps in (0, 1, 24, 120, 240)]
    assert (spent[0], spent[-1]) == (0.0, made.guarantee.epsilon)
    assert spent == sorted(spent)
    assert made.spent(24) == PoissonGaussian(made.sampling_rate, made.noise_multiplier, 24).epsilon(made.delta)


@pytest.mark.parametrize("steps", [-1, 241])
def test_steps_outside_the_plan_are_refused(steps: int) -> None:
    with pytest.raises(SettingError, match="Stop after 240 steps"):
        plan().spent(steps)


def test_the_guarantee_names_its_neighbours_its_status_and_what_it_assumes() -> None:
    guarantee = plan().guarantee
    assert (guarantee.neighbours, guarantee.status) == (Neighbours.ADD_REMOVE, Status.PROVED)
    assert (guarantee.unit, guarantee.delta, guarantee.objections) == ("training example", 1e-5, ())
    assumed = " ".join(guarantee.assumptions)
    for word in (
        "Poisson",
        "clipped to norm 0.5",
        "240 steps",
        "constant 2499",
        "60000, is public",
        "no other example",
    ):
        assert word in assumed
    for word in ("ideal", "secret", "one record", "without the private data", f"{plan().noise_stddev:.6g} on the sum"):
        assert word in assumed


def test_tuning_on_private_data_is_objected_to_and_is_no_assumption() -> None:
    guarantee = plan(tuned_on_private_data=True).guarantee
    assert "the search is not covered" in guarantee.objections[0]
    assert "hyper-parameters" not in " ".join(guarantee.assumptions)
    assert "without the private data" in plan(tuned_on_private_data=False).guarantee.assumptions[-1]


def test_the_printed_plan_has_every_number_and_can_be_stored() -> None:
    made = plan()
    rows = {row.name: row.value for row in made.rows()}
    assert rows["noise multiplier"] == made.noise_multiplier
    assert rows["noise on the mean, standard deviation"] == made.noise_stddev / 2_499
    assert rows["accounted epsilon"] == made.guarantee.epsilon < rows["cross-check epsilon"]
    assert all(math.isfinite(value) for value in rows.values())
    assert json.loads(json.dumps(made.to_dict()))["guarantee"]["proved_epsilon"] == made.guarantee.epsilon


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"expected_batch_size": 60_001}, "from 1 to 60000"),
        ({"expected_batch_size": 0}, "from 1 to 60000"),
        ({"delta": 1 / 60_000}, "Use 2e-06 or less"),
        ({"delta": 0.0}, "delta=0"),
        ({"delta": math.nan}, "delta=nan"),
        ({"target_epsilon": 0.0}, "target_epsilon=0"),
        ({"target_epsilon": 101.0}, "promises nothing"),
        ({"target_epsilon": math.nan}, "target_epsilon=nan"),
        ({"clip_norm": 0.0}, "clip_norm=0"),
        ({"clip_norm": math.inf}, "clip_norm=inf"),
        ({"steps": 0}, "steps=0"),
        ({"records_per_person": 4}, "Augment inside the example's contribution"),
    ],
)
def test_what_the_proof_leaves_out_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        plan(**change)


def test_whether_hyper_parameters_saw_private_data_has_to_be_said() -> None:
    unsaid = {key: value for key, value in MNIST.items() if key != "tuned_on_private_data"}
    with pytest.raises(TypeError, match="tuned_on_private_data"):
        DpSgdPlan(**unsaid)


def test_spare_steps_are_planned_for_and_cost_what_is_used() -> None:
    bare, spare = plan(), plan(spare_steps=60)
    assert spare.noise_multiplier == plan(steps=bare.steps + 60).noise_multiplier > bare.noise_multiplier
    assert spare.guarantee.epsilon == spare.after(bare.steps + 60).epsilon <= spare.target_epsilon
    used = [spare.after(bare.steps + steps).epsilon for steps in (0, 30, 60, 61)]
    assert used == sorted(set(used)), "each step that was made again costs something"
    assert used[-1] > spare.guarantee.epsilon, "and beyond the spare ones the budget is exceeded, and says so"
    assert "60 of them planned as spare" in spare.after(bare.steps + 61).assumptions[-1]
    assert not any("beyond" in said for said in spare.after(bare.steps).assumptions)
    assert {row.name for row in spare.rows()} - {row.name for row in bare.rows()} == {"spare steps"}


@pytest.mark.parametrize("method", ["sound", "dpsgd", "federated"])
def test_settings_from_before_spare_steps_keep_their_hash(method: str) -> None:
    """A setting that has no effect is no part of what identifies a run."""
    kind = METHODS[method].config_class
    assert "spare_steps" not in kind().to_dict()
    assert kind.from_dict(kind().to_dict() | {"spare_steps": 3}).to_dict()["spare_steps"] == 3
