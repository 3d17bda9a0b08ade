"""Where records have persons, every method whose privacy is proved holds what it says of them.

The same small data with 100 persons of one to six records: samples are of persons, a release reads at most K records of
those it drew and of nobody else, and a whole person moves it by one bounded contribution.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench import Trained, data_of, samples
from odd_engines import Noting, distance
from small import SMALL
from watched import Watched

import stobatch
from stobatch import Dataset, RunConfig, Status
from stobatch.baselines.controls import RecordClippingControl, SplitPersonsControl
from stobatch.data import Examples
from stobatch.loading import make_network
from stobatch.methods import Method
from stobatch.seeds import Seeds
from stobatch.training import train as run_training

PERSONS, MOST = 100, 2
ROUNDING = 1e-4


def with_persons(config: RunConfig) -> tuple[RunConfig, Dataset]:
    """The entry with a third as many persons in a step as it has examples, and its data with persons."""
    data, train = data_of(config), data_of(config).train.in_memory()
    places = torch.randperm(len(train), generator=torch.Generator().manual_seed(3))
    # The first 60 persons own one record each, the others six: 60 + 40 * 6 = 300.
    owners = torch.cat([torch.arange(60), torch.arange(60, 100).repeat_interleave(6)])
    groups = torch.empty_like(owners)
    groups[places] = owners
    owned = replace(data, info=replace(data.info, num_persons=PERSONS), train=replace(train, groups=groups))
    return config.override_all({"method.batch_size": 10, "method.records_per_person": MOST}), owned


@pytest.fixture
def proved(config: RunConfig) -> tuple[RunConfig, Dataset]:
    if stobatch.plan(config.override("seed", None), dataset=data_of(config)).guarantee.status is not Status.PROVED:
        pytest.skip("its privacy is not proved")
    return with_persons(config)


def trained(
    method: Method, config: RunConfig, data: Dataset, folder: Path, *, like: Trained | None = None, last: bool = True
) -> tuple[Trained, Watched]:
    """Train to the end; `like` is a training whose releases this one hears, `last` whether the last drawn stays."""
    assert config.seed is not None
    train = data.train.in_memory()
    watched = Watched(train)
    engine = Noting(watched, told=like.engine.releases if like else None)
    seeds = Seeds.reproducible(config.seed)
    network = make_network(config, data.info, seeds, None)
    trainable = method.prepare(config, method.plan(config, data.info, None), network, watched, seeds)
    with samples(lambda rows: rows if last else rows[:-1]) as drawn:
        run_training(trainable, config, engine, folder, data.test, resume=False, quiet=True)
    return Trained(trainable, engine, drawn), watched


def replaced(train: Examples, person: int) -> Examples:
    """All records of one person are others, far from them, with other labels; there are as many."""
    assert train.groups is not None
    own = train.groups == person
    inputs = torch.where(own.view(-1, 1, 1, 1), torch.where(train.inputs > 0, -1.0, 1.0), train.inputs)
    return replace(train, inputs=inputs, labels=torch.where(own, (train.labels + 1) % train.num_classes, train.labels))


def undue_influence(method: Method, config: RunConfig, data: Dataset, folder: Path) -> list[str]:
    """Where a person moves a release by more than one contribution, or one that did not draw them."""
    first, _ = trained(method, config, data, folder / "first")
    unit, found, train = first.trainable.per_example_bound, list[str](), data.train.in_memory()
    without, _ = trained(method, config, data, folder / "without", like=first, last=False)
    for release, pair in enumerate(zip(first.engine.releases, without.engine.releases, strict=True)):
        if distance(*pair) > unit * (1 + ROUNDING):
            found.append(f"removing a person moves release {release} by {distance(*pair):.3g}")
    often = max(range(60, PERSONS), key=lambda person: sum(person in sample for sample in first.drawn))
    changed = replace(data, train=replaced(train, often))
    other, _ = trained(method, config, changed, folder / "other", like=first)
    for release, pair in enumerate(zip(first.engine.releases, other.engine.releases, strict=True)):
        moved = distance(*pair)
        if moved > 2 * unit * (1 + ROUNDING):
            found.append(f"replacing a person moves release {release} by {moved:.3g}, more than {2 * unit:.3g}")
        if often not in first.drawn[release] and moved:
            found.append(f"a person moves release {release}, which did not draw them")
        if often in first.drawn[release] and not moved:
            found.append(f"a person does not move release {release}, which drew them: this check sees nothing")
    return found


def test_the_guarantee_is_per_person(proved: tuple[RunConfig, Dataset]) -> None:
    config, data = proved
    plan = stobatch.plan(config.override("seed", None), dataset=data)
    assert "per person" in str(plan.guarantee)
    assert plan.sizes()["num_persons"] == PERSONS
    assert any("public" in line and str(PERSONS) in line for line in plan.guarantee.assumptions)
    assert not any("a person has one record" in line for line in plan.guarantee.assumptions)


def test_a_release_reads_at_most_k_records_of_the_persons_it_drew(
    proved: tuple[RunConfig, Dataset], method: Method, tmp_path: Path
) -> None:
    config, data = proved
    done, watched = trained(method, config, data, tmp_path)
    groups = data.train.in_memory().groups
    assert groups is not None
    owned = torch.bincount(groups)
    assert len(done.drawn) == config.training.steps
    assert len({len(sample) for sample in done.drawn}) > 1
    for release, sample in enumerate(done.drawn):
        rows = torch.tensor([row for read in watched.reads if read.release == release for row in read.rows])
        assert len(rows.unique()) == len(rows)
        read = torch.bincount(groups[rows], minlength=PERSONS) if len(rows) else torch.zeros(PERSONS)
        assert read.tolist() == [min(MOST, int(owned[p])) if p in sample else 0 for p in range(PERSONS)]
    assert not [read for read in watched.reads if read.release is None]


def test_a_person_moves_the_releases_that_drew_them_within_bounds(
    proved: tuple[RunConfig, Dataset], method: Method, tmp_path: Path
) -> None:
    assert not undue_influence(method, *proved, tmp_path)


@pytest.mark.parametrize("control", [SplitPersonsControl(), RecordClippingControl()], ids=["split", "one by one"])
def test_broken_twins_are_caught(control: Method, tmp_path: Path) -> None:
    if "sound" not in SMALL:
        pytest.skip("they are broken versions of a method that is not in this table")
    given, data = with_persons(SMALL["sound"].override("method.clip_norm", 0.01))
    settings = control.config_class.from_dict({k: v for k, v in given.method.to_dict().items() if k != "name"})
    assert undue_influence(control, given.replace(method=settings), data, tmp_path)
