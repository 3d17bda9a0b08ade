"""What a training reads and releases, held against what a proof by Poisson sampling says. Each check lists its finds.

The proof is of a sequence of releases. Each takes a Poisson sample, adds what its examples give, which is bounded, adds
noise, and reads nothing else; what follows is computed from releases alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from bench import Trained, dataset_with, prepared, replaced, samples, train_of, trained
from odd_engines import Noting, distance, same
from scipy.stats import binom
from support.noise_checks import FALSE_ALARM
from watched import Watched

import stobatch
from stobatch import RunConfig
from stobatch import training_run as training
from stobatch.dp.plan import Plan
from stobatch.methods import Method
from stobatch.registry import METHODS
from stobatch.training.engines import Engine

_ROUNDING = 1e-4
"""Sums are of 32 bits: bounds hold up to this share."""


def unaccounted_reads(method: Method, config: RunConfig, out: Path) -> list[str]:
    """Of a whole training by `stobatch.train`: reads outside of releases, and those that a release's sample lacks."""
    watched = Watched(train_of(config))
    engine = Noting(watched)

    @contextmanager
    def engine_for(_: RunConfig) -> Iterator[Engine]:
        yield engine

    with pytest.MonkeyPatch.context() as patch, samples() as drawn:
        patch.setitem(METHODS, config.method.name, method)
        patch.setattr(training, "engine_for", engine_for)
        model = stobatch.train(config, out, dataset=dataset_with(config, watched), quiet=True)
    found = [f"{len(read.rows)} examples read outside of a release" for read in watched.reads if read.release is None]
    releases = len(engine.releases)
    if len(drawn) != releases:
        found.append(f"{len(drawn)} Poisson samples for {releases} releases")
    if model.accounted_steps != releases:
        found.append(f"{model.accounted_steps} steps are accounted for, {releases} were released")
    for release, sample in enumerate(drawn):
        rows = sorted(row for read in watched.reads if read.release == release for row in read.rows)
        if rows != sorted(sample):
            found.append(f"release {release} read {len(rows)} positions, its sample has {len(sample)}")
    return found


def reads_of_preparation(method: Method, config: RunConfig) -> list[str]:
    """Of binding the method to data, before the first step."""
    watched = Watched(train_of(config))
    prepared(method, config, watched)
    return [f"{len(read.rows)} examples read before the first step" for read in watched.reads]


def unlike_poisson(drawn: list[set[int]], num_examples: int, rate: float) -> list[str]:
    """Samples that do not look like independent ones; a false alarm has probability below 4 `FALSE_ALARM`.

    Sizes are binomial, each and all together; no record is in more samples than chance allows; and not all samples
    have one size (twelve samples of 30 in 300 do so with probability below 1e-13).
    """
    found, steps = [], len(drawn)
    sizes = [len(sample) for sample in drawn]
    checks = [*((size, num_examples, FALSE_ALARM / steps) for size in sizes)]
    checks.append((sum(sizes), steps * num_examples, FALSE_ALARM))
    for count, trials, share in checks:
        low, high = binom.ppf(share / 2, trials, rate), binom.isf(share / 2, trials, rate)
        if not low <= count <= high:
            found.append(f"{count} of {trials} were drawn at a rate of {rate:g}")
    most = binom.isf(FALSE_ALARM / num_examples, steps, rate)
    often = [row for row in range(num_examples) if sum(row in sample for sample in drawn) > most]
    if often:
        found.append(f"records {often[:3]} are in more than {most:g} of {steps} samples")
    if len(set(sizes)) == 1:
        found.append(f"all samples have {sizes[0]} records")
    return found


def watched_rows(drawn: list[set[int]]) -> list[int]:
    """Records to be changed: one that comes late, one that comes early and often, and one that never comes, if any."""
    rows = sorted(set.union(*drawn))
    first = {row: next(n for n, sample in enumerate(drawn) if row in sample) for row in rows}
    often = {row: sum(row in sample for sample in drawn) for row in rows}
    never = set(range(rows[-1])) - set(rows)
    late = max(rows, key=lambda row: first[row])
    return [late, max(rows, key=lambda row: (often[row] < len(drawn), often[row], -first[row])), *sorted(never)[:1]]


def undue_influence(method: Method, config: RunConfig, folder: Path) -> list[str]:
    """Where a record moves a release that did not draw it, or moves one that did by more than its bound.

    The training with the changed record hears the releases of the one without the change. So a record that was drawn
    before has its effect through releases alone, and whoever remembers it is found out.
    """
    first = trained(method, config, folder / "first")
    unit, found = first.trainable.per_example_bound, list[str]()
    if not unit:
        return ["no bound on what an example adds to a release"]
    # The last one: noise that views are made with goes by the place in the sample, and others keep theirs.
    without = trained(method, config, folder / "without", like=first, keep=lambda rows: rows[:-1])
    found += _too_far("the last record, removed,", _moved(first, without), unit)
    for row in watched_rows(first.drawn):
        other = trained(method, config, folder / f"{row}", train=replaced(train_of(config), row), like=first)
        moved = _moved(first, other)
        found += _too_far(f"record {row}, replaced,", moved, 2 * unit)
        for release, (sample, by) in enumerate(zip(first.drawn, moved, strict=True)):
            if row not in sample and by > 0:
                found.append(f"record {row} moves release {release}, which did not draw it")
        if any(row in sample for sample in first.drawn) and not any(moved):
            found.append(f"record {row} moves nothing: this check sees nothing")
    return found


def _moved(one: Trained, other: Trained) -> list[float]:
    return [distance(*pair) for pair in zip(one.engine.releases, other.engine.releases, strict=True)]


def _too_far(who: str, moved: list[float], most: float) -> list[str]:
    return [
        f"{who} moves release {release} by {by:.3g}, more than {most:.3g}"
        for release, by in enumerate(moved)
        if not by <= most * (1 + _ROUNDING)
    ]


def early_parameters(method: Method, config: RunConfig, folder: Path) -> list[str]:
    """Whether a record moves the parameters, or a release, before it first takes part. Nobody hears anybody here."""
    first = trained(method, config, folder / "first")
    row = watched_rows(first.drawn)[0]
    turn = next(n for n, sample in enumerate(first.drawn) if row in sample)
    other = trained(method, config, folder / "other", train=replaced(train_of(config), row))
    found = []
    for release in range(turn + 1):
        if not same(first.engine.began_at[release], other.engine.began_at[release]):
            found.append(f"record {row} moves the parameters before release {release}, and first takes part in {turn}")
    if same(first.engine.releases[turn], other.engine.releases[turn]):
        found.append(f"record {row} does not move release {turn}, in which it takes part")
    return found


def silent_releases(method: Method, config: RunConfig) -> list[str]:
    """Releases of an empty sample are noise, and other noise with other seeds; silence would tell that it is empty."""
    engines = Noting(), Noting()
    for seed, engine in enumerate(engines):
        trainable = prepared(method, config.override("seed", seed))
        with samples(lambda rows: []):
            for step in range(config.training.steps):
                trainable.release(step, engine)
    found = []
    for step, (one, other) in enumerate(zip(engines[0].releases, engines[1].releases, strict=True)):
        silent = [name for name, value in one.items() if not bool(value.any())]
        found += [f"release {step} of nobody has no noise on {name}" for name in silent]
        if any(one[name].equal(other[name]) for name in one):
            found.append(f"release {step} has the same noise with two seeds")
    return found


def proof_by_sampling(plan: Plan) -> tuple[int, float]:
    """The number of records and the sampling rate that a proof rests on."""
    sizes = plan.sizes()
    rate = getattr(plan, "sampling_rate", None)
    assert rate is not None, "a proof that does not rest on Poisson sampling needs checks of its own: write them here"
    return int(sizes["num_examples"]), float(rate)
