"""AdLM's plan: shares, scales, what is proved of it and what is only claimed, and what is refused."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from adlm_steps import CLASSES, COUNT, RELEVANCE_STEPS, SIDE, STEPS, pictures, plan_of, prepared, settings
from scipy.stats import norm

import stobatch
from stobatch.baselines.adlm import AdLm
from stobatch.baselines.adlm_plan import AdLmConfig, AdLmPlan, input_sensitivity, loss_sensitivity
from stobatch.config import ModelConfig, RunConfig
from stobatch.errors import ModelError, SettingError
from stobatch.models import build
from stobatch.registry import METHODS
from stobatch.seeds import Seeds
from stobatch.types import Neighbours, Status


def mnist_plan(**changes: Any) -> AdLmPlan:
    config = RunConfig(method=AdLmConfig(), model=ModelConfig(last_hidden_size=25)).override_all(changes)
    plan = stobatch.plan(config)
    assert isinstance(plan, AdLmPlan)
    return plan


def test_it_is_registered_with_the_published_settings() -> None:
    assert isinstance(METHODS["adlm"], AdLm)
    config = AdLmConfig()
    assert (config.batch_size, config.input_bound, config.relevance_share, config.input_share) == (
        1800,
        10.0,
        0.25,
        0.25,
    )
    plan = mnist_plan()
    assert plan.input_sensitivity == 2 * 196 * 25 == input_sensitivity(196, 25)
    assert plan.loss_sensitivity == 10 * (25 + 25**2 / 4) == loss_sensitivity(10, 25)


def test_shares_sum_to_the_total_and_give_the_scales() -> None:
    plan = mnist_plan(**{"method.total_epsilon": 2.0, "method.relevance_share": 0.3, "method.input_share": 0.2})
    assert plan.epsilons == pytest.approx((0.6, 0.4, 1.0))
    assert sum(plan.epsilons) == pytest.approx(plan.guarantee.epsilon, rel=1e-15)
    assert plan.input_noise_scale == pytest.approx(9800 / (0.4 * 1800))
    assert plan.loss_noise_scale == pytest.approx(1812.5 / (1.0 * 1800))
    rows = {row.name: row.value for row in plan.rows()}
    assert rows["claimed in total"] == 2.0
    assert rows["steps counted one by one"] == pytest.approx(0.6 + (4002 - 61) * 1.4)
    assert len(rows) == len(plan.rows()), "every row has a name of its own"
    json.dumps(plan.to_dict())


def test_replacing_is_removing_and_adding() -> None:
    plan = mnist_plan()
    part = plan.relevance
    assert part.target_epsilon == plan.epsilons[0] / 2
    assert part.delta * (1 + math.exp(part.target_epsilon)) == pytest.approx(plan.delta, rel=1e-12)
    assert (part.steps, part.expected_batch_size, part.num_examples) == (61, 2048, 60_000)
    assert part.guarantee.status is Status.PROVED
    assert part.guarantee.neighbours is Neighbours.ADD_REMOVE
    assert part.guarantee.epsilon <= part.target_epsilon


@pytest.mark.parametrize("sigma", [0.7, 2.0, 9.0])
def test_the_conversion_covers_a_gaussian_release_exactly(sigma: float) -> None:
    """Without sampling both sides are known: a replacement moves the sum twice as far as a removal."""

    def delta(epsilon: float, mu: float) -> float:
        return float(norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu))

    for epsilon in (0.1, 0.5, 1.0, 2.0):
        one = delta(epsilon, 1 / sigma)
        assert delta(2 * epsilon, 2 / sigma) <= one * (1 + math.exp(epsilon))
        assert delta(2 * epsilon, 2 / sigma) > one, "δ has to grow"


def test_it_claims_and_says_what_is_proved_and_what_speaks_against_it() -> None:
    guarantee = plan_of().claim
    assert guarantee.status is Status.CLAIMED
    assert guarantee.neighbours is Neighbours.REPLACE_ONE
    assert (guarantee.epsilon, guarantee.delta, guarantee.unit) == (16.0, 1e-3, "training tuple")
    assert guarantee.source == "AdLM (Phan et al., 2017), with its relevance estimation counted"
    assert "proved to cost ε1 = 4 and all of δ" in guarantee.assumptions[0]
    said = " ".join(guarantee.objections)
    for reason in (
        "shared by all examples",
        "drawn anew in each of 5 steps",
        "labels reach",
        "Δ_h0",
        "tuned",
        "chosen",
    ):
        assert reason in said or reason == "tuned"
    untuned = plan_of(**{"method.tuned_on_private_data": False}).claim
    assert len(untuned.objections) == len(guarantee.objections) - 1


def test_repeated_steps_cost_what_the_estimation_would() -> None:
    plan = plan_of()
    assert plan.after(0) == plan.after(STEPS) == plan.claim
    more = [plan.after(STEPS + again) for again in (1, 3, 9)]
    spent = [plan.claim.epsilon, *(guarantee.epsilon for guarantee in more)]
    assert spent == sorted(set(spent))
    assert all((g.delta, g.status) == (plan.delta, Status.CLAIMED) for g in more)
    assert "3 steps beyond the 9 planned" in more[1].assumptions[-1]
    for again, guarantee in zip((1, 3, 9), more, strict=True):
        half = (guarantee.epsilon - sum(plan.epsilons[1:])) / 2
        mechanism = plan.relevance.mechanism(plan.relevance.steps + again)
        assert mechanism.epsilon(plan.delta / (1 + math.exp(half))) <= half * (1 + 1e-12)
        assert mechanism.epsilon(plan.delta / (1 + math.exp(0.98 * half))) > 0.98 * half, "and not much less would do"


def test_a_budget_that_has_run_away_is_none() -> None:
    assert plan_of(**{"method.total_epsilon": 400.0}).after(20_000).epsilon == math.inf


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"training.steps": RELEVANCE_STEPS + 1}, SettingError, "no more than the 4 that estimate"),
        ({"method.relevance_share": 0.6, "method.input_share": 0.4}, SettingError, "leave nothing"),
        ({"method.relevance_batch_size": COUNT + 1}, SettingError, "relevance_batch_size=41"),
        ({"method.delta": 1 / COUNT}, SettingError, "not below 1 / num_examples"),
        ({"method.total_epsilon": 1e4}, SettingError, "leaves ε1 = 2500"),
        ({"method.batch_size": COUNT + 1}, SettingError, "do not fit"),
        ({"model.architecture": "conv 3 3/2, relu, linear"}, ModelError, "a list of layers"),
        ({"model.architecture": "custom"}, ModelError, "handed over"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_plans_that_make_no_sense_are_refused(changes: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said) as caught:
        plan_of(**changes)
    assert getattr(caught.value, "remedy", "")


def test_copies_of_a_record_are_refused() -> None:
    with pytest.raises(SettingError, match="records_per_person"):
        AdLmPlan(**{**plan_of().sizes(), "records_per_person": 2})


def test_one_step_more_than_the_estimation_is_enough() -> None:
    assert plan_of(**{"training.steps": RELEVANCE_STEPS + 2}).private_steps == 1


def test_networks_that_do_not_fit_are_refused() -> None:
    layers = ModelConfig(architecture="conv 3 3/2, relu, linear")
    layered = build(layers, (1, SIDE, SIDE), CLASSES, torch.Generator())
    with pytest.raises(ModelError, match="AdLM cannot train a Layered"):
        AdLm().register_buffers(layered)
    with pytest.raises(ModelError, match="BatchNorm"):
        prepared(settings(**{"model.normalisation": "batch"}))
    config, network = settings(), prepared().network
    with pytest.raises(SettingError, match="the plan is for 40"):
        AdLm().prepare(config, plan_of(), network, pictures(50).train, Seeds.reproducible(4))


def test_there_is_no_certificate() -> None:
    config = settings()
    assert not AdLm().certifies(config)
    with pytest.raises(ModelError, match="no certificate"):
        AdLm().verifiers(config, plan_of(), prepared().network)
