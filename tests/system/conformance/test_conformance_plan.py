"""A plan is made before the data: from public sizes alone, and what is trained keeps to it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, NoReturn

import pytest
from bench import Finished, data_of, dataset_with, other_examples, train_of

import stobatch
from stobatch import RunConfig, Status
from stobatch.data import Examples, describe, sources
from stobatch.data.idx_files import IdxSet
from stobatch.dp.plan import Plan
from stobatch.methods import Method


def plain(plan: Plan) -> Any:
    """As it stands in a file."""
    return json.loads(json.dumps(plan.to_dict()))


def test_a_plan_is_made_without_data(
    method: Method, config: RunConfig, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("a plan read data")

    expected = plain(plan)
    closed = {
        name: dataclasses.replace(source, read=refuse, fetch=refuse, stream=refuse)
        for name, source in sources.DATA_SETS.items()
    }
    for name, source in closed.items():
        monkeypatch.setitem(sources.DATA_SETS, name, source)
    monkeypatch.setattr(IdxSet, "unpack", refuse)
    monkeypatch.setattr(Examples, "__post_init__", refuse)
    with pytest.raises(AssertionError, match="read data"):
        sources.load(config.data)
    own = dataclasses.replace(method.plan(config, describe(config.data), None), provider=plan.provider)
    assert plain(own) == expected
    assert plain(stobatch.plan(config.override("seed", None))) == expected


def test_a_public_seed_voids_the_guarantee_and_changes_no_number(config: RunConfig, plan: Plan) -> None:
    public = stobatch.plan(config, dataset=data_of(config))
    assert config.seed is not None
    assert public.claim == plan.claim
    assert plan.guarantee == plan.in_context(plan.claim)
    assert public.guarantee == plan.guarantee.with_public_seed()
    assert public.guarantee.status is (Status.NONE if plan.claim.status is Status.NONE else Status.VOID)
    assert plain(public) | {"guarantee": None} == plain(plan) | {"guarantee": None}


def test_a_plan_does_not_depend_on_what_the_data_hold(config: RunConfig) -> None:
    other = other_examples(train_of(config))
    assert other.fingerprint() != train_of(config).fingerprint()
    plans = [stobatch.plan(config, dataset=data) for data in (data_of(config), dataset_with(config, other))]
    assert plain(plans[0]) == plain(plans[1])


def test_the_plan_of_a_finished_run_is_the_one_made_before(plan: Plan, finished: Finished) -> None:
    kept = json.loads((finished.path / "plan.json").read_text())
    before = plain(plan)
    assert {name: kept[name] for name in before} == before
    assert kept.keys() - before.keys() == {"schema", "version"}


def test_a_plan_depends_on_the_sizes(method: Method, config: RunConfig) -> None:
    """A broken twin of the check above: plans that were all alike would pass it."""
    info = describe(config.data)
    more = dataclasses.replace(info, num_train=2 * info.num_train)
    assert plain(method.plan(config, info, None)) != plain(method.plan(config, more, None))
