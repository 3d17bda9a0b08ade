"""Audits of a claim about persons: neighbours differ in a person of K records, whose contribution is one vector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.private_steps import pictures, settings

import stobatch
from stobatch.auditing.audit import open_subject
from stobatch.auditing.many_runs import Trials, many_runs_finding
from stobatch.auditing.neighbours import worst_case
from stobatch.errors import SettingError
from stobatch.runs import Run
from stobatch.types import Neighbours

OWNERS, MOST = [number // 3 for number in range(24)], 4
SIZES = {"method.batch_size": 8, "method.records_per_person": MOST, "method.certified_weight": 0.0, "training.steps": 2}


def config(**changes: Any) -> stobatch.RunConfig:
    return settings("linear", **SIZES | changes)


def test_neighbours_differ_in_a_person() -> None:
    records = pictures(groups=OWNERS).train.in_memory()
    pair = worst_case(records, Neighbours.ADD_REMOVE, MOST)
    persons, more = pair.first.persons, pair.pool.take(pair.with_).persons
    assert persons is not None
    assert more is not None
    assert (len(persons), len(more)) == (8, 9)
    assert (len(pair.pool), len(pair.first)) == (24 + MOST, 24)
    rows, _ = more.rows(torch.tensor([8]))
    assert torch.equal(pair.pool.inputs[rows], pair.canary[0])
    assert pair.canary[1].tolist() == [1] * MOST
    assert not bool((pair.first.labels == 1).any())


@pytest.mark.parametrize(("view", "canary"), [("final", "input"), ("steps", "input"), ("steps", "gradient")])
def test_many_trainings_differ_in_a_person(view: str, canary: str, tmp_path: Path) -> None:
    asked = {"audit.view": view, "audit.canary": canary}
    audited = open_subject(Run(tmp_path / "run"), config(**asked), dataset=pictures(groups=OWNERS), seed=0)
    assert audited.canary_records == MOST
    pair = worst_case(audited.data().train.in_memory(), Neighbours.ADD_REMOVE, audited.canary_records)
    plan = audited.plan_for(pair.size, 8)
    assert plan.claim.unit == "person"
    trials = Trials(audited, plan, pair)
    found = trials.rows(0, 4, lambda share: None)
    assert found["world"] == [0, 1, 0, 1]
    assert np.isfinite(found["score"]).all()
    without, with_ = trials._start_training(0, audited.root), trials._start_training(1, audited.root)
    along = trials._contribution(with_)(0, with_)
    length = sum(float(value.double().square().sum()) for value in along.values()) ** 0.5
    assert length <= without.per_example_bound * (1 + 1e-6)
    assert length > 0.5 * without.per_example_bound
    finding = many_runs_finding(
        np.zeros(200), np.ones(200), plan.claim, plan.curve,
        view=view, canary=canary, confidence=0.95, pair=pair,
    )  # fmt: skip
    assert "neighbours that differ in a person of 4 records" in finding.statement
    assert "per person" in finding.claim


def test_membership_is_about_records(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="membership is about single records"):
        stobatch.audit(
            tmp_path / "run", config=config(**{"audit.instruments": ["membership"]}),
            dataset=pictures(groups=OWNERS), quiet=True,
        )  # fmt: skip
