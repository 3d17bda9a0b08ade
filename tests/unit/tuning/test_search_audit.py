"""An audit of whole searches: settings drawn, candidates trained and scored, the best released, many times.

Two data sets differ in one record: it is there and easy, or its place is empty for every score (a label that no model
gives). The attacker sees what a search releases, and guesses by the winner's score whether the record is there.
A bound on ε from below that exceeds the claim refutes it. For a search that keeps its claim that happens with
probability 1e-6 at most: the confidence of the bound.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from stobatch.auditing.lower_bounds import two_sided_bounds
from stobatch.config import RunConfig
from stobatch.data import Dataset, from_tensors, hold_out
from stobatch.dp.plan import DpSgdPlan
from stobatch.loading import TrainedModel, make_network
from stobatch.methods import method_of
from stobatch.runs import Run
from stobatch.seeds import Seeds
from stobatch.training.loop import train_one
from stobatch.training_run import plan
from stobatch.tuning import candidate as scoring
from stobatch.tuning.candidate import Score
from stobatch.tuning.search import best_of, draw_candidates
from tests.support.small_records import small_config

pytestmark = pytest.mark.usefixtures("try_each_network_once")

CONFIDENCE = 1 - 1e-6
SEARCHES = 90
NOISE = 8.0


def records(*, there: bool) -> Dataset:
    """Twelve records of class 0, of which the first is the one that may be away."""
    inputs, labels = torch.full((12, 1, 2, 2), 0.5), torch.zeros(12, dtype=torch.int64)
    labels[0] = 0 if there else 1
    return from_tensors(inputs, labels, inputs[:2], labels[1:3], num_classes=3)


def search_config() -> RunConfig:
    return small_config(
        data__held_out=11,
        method__batch_size=1,
        method__delta=1e-2,
        method__epsilon=4.0,
        training__learning_rate=1e-6,
        training__steps=1,
        search__settings=["training.learning_rate=1e-6,2e-6"],
        search__law="negative_binomial",
        search__shape=1.0,
        search__mean=2.0,
        search__score_noise=NOISE,
        search__candidate_epsilon=0.2,
    )


def constant_network(config: RunConfig, data: Dataset, seeds: Seeds) -> torch.nn.Module:
    """The recipe's network, with first weights that say class 0: what is learned hardly matters, scores do."""
    network = make_network(config, data.info, seeds, None)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
        list(network.parameters())[-1][0] = 1.0
    return network


def released_score(data: Dataset, config: RunConfig, the_plan: DpSgdPlan, seeds: Seeds) -> float:
    """Return the winner's score of one search, or a number below all where it has none."""
    scores = []
    for one in draw_candidates(config, seeds, Path("nowhere")):
        kept, held = hold_out(data, one.config.data, one.seeds)
        assert held is not None
        network = constant_network(one.config, data, one.seeds)
        trainable = method_of(one.config).prepare(one.config, the_plan, network, kept.train, one.seeds)
        model = TrainedModel(train_one(trainable, one.config), one.config, the_plan, Run(one.run.path))
        right = scoring.count_right(model, held)
        scores.append(Score(scoring.noisy_count(right, one.config.search.score_noise, one.seeds)))
    best = best_of(scores)
    noisy = None if best is None else scores[best].noisy
    return -100.0 if noisy is None else noisy


def audited() -> tuple[float, float]:
    """Return the lower bound on ε that the audit finds, and the claim."""
    config = search_config()
    the_plan = plan(config, dataset=records(there=True))
    assert isinstance(the_plan, DpSgdPlan)
    found = []
    for there in (False, True):
        data, root = records(there=there), Seeds.secret()
        found.append([released_score(data, config, the_plan, root.child("search", n)) for n in range(SEARCHES)])
    (bound,) = two_sided_bounds(
        np.array(found[0]), np.array(found[1]), delta=the_plan.delta, confidence=CONFIDENCE, threshold=10.5
    )
    return bound.epsilon, the_plan.claim.epsilon


@pytest.mark.slow
def test_whole_searches_keep_their_claim():
    bound, claim = audited()
    assert bound <= claim


@pytest.mark.slow
def test_a_search_whose_scores_have_no_noise_is_refuted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scoring, "noisy_count", lambda count, stddev, seeds: float(count))
    bound, claim = audited()
    assert bound > claim
