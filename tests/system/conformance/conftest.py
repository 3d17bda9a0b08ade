"""Every test that asks for `config` runs once for each method of the table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from bench import Finished, data_of, dataset_with, train_of
from small import SMALL
from watched import Watched, searches_noted

import stobatch
from stobatch import RunConfig, Status
from stobatch.dp.plan import Plan
from stobatch.methods import Method, method_of


@pytest.fixture(scope="session", autouse=True)
def noted() -> Iterator[None]:
    with searches_noted():
        yield


@pytest.fixture(scope="session", params=SMALL)
def config(request: pytest.FixtureRequest) -> RunConfig:
    found: RunConfig = SMALL[request.param]
    return found


@pytest.fixture(scope="session")
def method(config: RunConfig) -> Method:
    return method_of(config)


@pytest.fixture(scope="session")
def plan(config: RunConfig) -> Plan:
    """As a release would have it: a public seed would void it."""
    return stobatch.plan(config.override("seed", None), dataset=data_of(config))


@pytest.fixture
def proved(plan: Plan) -> Plan:
    """The plan of a method that says its privacy is proved; others have nothing to show here."""
    if plan.guarantee.status is not Status.PROVED:
        pytest.skip(f"its privacy is not proved: {plan.guarantee.status}")
    return plan


@pytest.fixture(scope="session")
def undisturbed(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained with the entry's seed, in one go. Read only."""
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    stobatch.train(config, out, dataset=data_of(config), quiet=True)
    return out


@pytest.fixture(scope="session")
def finished(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    out = tmp_path_factory.mktemp("finished") / "run"
    watched = Watched(train_of(config))
    data = dataset_with(config, watched)
    model = stobatch.train(config.override("seed", None), out, dataset=data, quiet=True)
    reads = {"train": watched.reads}
    verbs = {"certify": stobatch.certify} if model.certifies else {}
    for name, verb in {**verbs, "attack": stobatch.attack, "evaluate": stobatch.evaluate}.items():
        reads[name] = watched.reads = []
        verb(out, dataset=data, quiet=True)
    return Finished(out, model.certifies, reads)
