"""The document of a comparison: a row for each method and deployed function, from the records of its runs alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

from stobatch.comparison.plan import Compared
from stobatch.dp.guarantee import PrivacyGuarantee
from stobatch.evaluation.statistics import t_tests_between
from stobatch.reporting.format import privacy_words, spoken
from stobatch.reporting.summary import Facts
from stobatch.results import (
    AttackedSpread,
    CertifiedSpread,
    ComparedFlag,
    ComparedRow,
    ComparedTest,
    Comparison,
    Kind,
    ProtocolTable,
    SeedsGuarantee,
    Spread,
    at_radius,
)
from stobatch.types import Status

BySeed = dict[int, Facts]
CLEAN = "clean"
"""The measure that no attack belongs to."""
LEVEL = 0.05
"""The p-value below which people begin to look."""


def comparison(compared: Sequence[Compared], out: Path) -> Comparison:
    """What `compare` found: rows in the order of their configurations, and t-tests between them."""
    by_name: dict[str, BySeed] = {}
    for one in compared:
        by_name.setdefault(one.name, {})[one.number] = Facts.read(one.run)
    radii = list(compared[0].config.evaluation.radii)
    facts = next(iter(by_name[compared[0].name].values()))
    rows = [
        _row(name, function, by_seed, radii, out)
        for name, by_seed in by_name.items()
        for function in next(iter(by_seed.values())).functions
    ]
    public = compared[0].public
    tests = _t_tests(rows, public)
    return Comparison(
        norm=facts.scores.norm,
        input_range=facts.scores.input_range,
        radii=tuple(radii),
        public_seeds=public,
        seeds=tuple(dict.fromkeys(one.number for one in compared)),
        data=facts.started.dataset.name,
        protocols={e.protocol.name: e.protocol.meaning for e in _entries(by_name)},
        rows=tuple(rows),
        flags=tuple(
            ComparedFlag(row=f"{name} ({privacy_words([facts.status])})", seed=seed, **dict(flag))
            for name, by_seed in by_name.items()
            for seed, facts in by_seed.items()
            for flag in facts.scores.flags
        ),
        t_tests=tuple(tests),
        t_tests_below_level=sum(test.t_test.p_value < LEVEL for test in tests),
        t_tests_below_level_by_chance=round(LEVEL * len(tests), 2),
    )


def _entries(by_name: Mapping[str, BySeed]) -> Iterator[ProtocolTable]:
    for by_seed in by_name.values():
        for facts in by_seed.values():
            yield from facts.scores.under_attack


def _row(name: str, function: str, by_seed: BySeed, radii: Sequence[float], out: Path) -> ComparedRow:
    first = next(iter(by_seed.values()))
    guarantees = _grouped({seed: facts.guarantee for seed, facts in by_seed.items()})
    words = privacy_words([held.guarantee.status for held in guarantees])
    blocks = {seed: facts.same_images(function) for seed, facts in by_seed.items()}
    trainings = {seed: facts.training for seed, facts in by_seed.items() if facts.training is not None}
    memory = {seed: one.peak_memory_mb for seed, one in trainings.items() if one.peak_memory_mb is not None}
    return ComparedRow(
        name=name,
        label=f"{name} ({words}), {spoken(function)}",
        method=first.started.method,
        function=function,
        guarantees=guarantees,
        test_examples=next(iter(blocks.values())).rows,
        clean=_spread({seed: block.clean_accuracy.value for seed, block in blocks.items()}),
        attacked=tuple(_attacked(by_seed, function, radii)),
        certified=tuple(_certified(by_seed, function, radii)),
        training_seconds=_spread_if_any({seed: one.seconds_since_last_start for seed, one in trainings.items()}),
        peak_memory_mb=_spread_if_any(memory),
        peak_memory_of=tuple(sorted({one.peak_memory_of for one in trainings.values() if one.peak_memory_of})),
        devices=tuple(sorted({one.device for one in trainings.values()})),
        runs={str(seed): facts.run.path.relative_to(out).as_posix() for seed, facts in by_seed.items()},
    )


def _grouped(by_seed: Mapping[int, PrivacyGuarantee]) -> tuple[SeedsGuarantee, ...]:
    """What is the same for several seeds once, with the seeds; an audit may have refuted it for one of them."""
    groups: list[tuple[PrivacyGuarantee, list[int]]] = []
    for seed, found in by_seed.items():
        same = next((seeds for guarantee, seeds in groups if guarantee == found), None)
        if same is None:
            groups.append((found, [seed]))
        else:
            same.append(seed)
    return tuple(SeedsGuarantee(seeds=tuple(seeds), guarantee=guarantee) for guarantee, seeds in groups)


def _attacked(by_seed: BySeed, function: str, radii: Sequence[float]) -> Iterator[AttackedSpread]:
    """Accuracy under the worst attack, example by example."""
    for protocol in next(iter(by_seed.values())).protocols:
        for radius in radii:
            shares = {seed: at_radius(facts.worst(protocol, function), radius) for seed, facts in by_seed.items()}
            values = {seed: share.value for seed, share in shares.items() if share}
            if values:
                yield AttackedSpread(protocol=protocol, radius=radius, **dict(_spread(values)))


def _certified(by_seed: BySeed, function: str, radii: Sequence[float]) -> Iterator[CertifiedSpread]:
    """Certified accuracy of clean inputs; one entry for each rule and status, over the seeds for which it has it."""
    kinds: dict[tuple[str, Status], dict[int, Kind]] = {}
    for seed, facts in by_seed.items():
        for kind in facts.kinds(function):
            kinds.setdefault((kind.name, kind.status), {})[seed] = kind
    for (rule, status), found in kinds.items():
        kind = next(iter(found.values()))
        for radius in radii:
            shares = {seed: at_radius(by_seed[seed].certified(one), radius) for seed, one in found.items()}
            values = {seed: share.value for seed, share in shares.items() if share}
            if values:
                yield CertifiedSpread(
                    rule=rule,
                    status=status,
                    source=kind.source,
                    norm=kind.norm,
                    input_range=kind.input_range,
                    failure_probability=kind.failure_probability,
                    radius=radius,
                    test_examples=next(share.total for share in shares.values() if share),
                    **dict(_spread(values)),
                )


def _spread_if_any(values: Mapping[int, float]) -> Spread | None:
    """The spread of what older records may lack."""
    return _spread(values) if values else None


def _spread(values: Mapping[int, float]) -> Spread:
    """A number for each seed, with mean, standard deviation (of two seeds or more) and range."""
    numbers = list(values.values())
    return Spread(
        mean=fmean(numbers),
        stddev=stdev(numbers) if len(numbers) > 1 else None,
        min=min(numbers),
        max=max(numbers),
        per_seed={str(seed): value for seed, value in values.items()},
    )


def _t_tests(rows: Sequence[ComparedRow], public: bool) -> list[ComparedTest]:
    """Two-tailed tests over seeds between every two rows, on clean inputs and under each protocol at each radius.

    Rows are paired by public seed. Secret seeds pair with none, so each gets a number that no other row has; functions
    of one model are paired all the same.
    """
    groups: dict[str, dict[int, dict[tuple[str, float], float]]] = {}
    models = list(dict.fromkeys(row.name for row in rows))
    for row in rows:
        shift = 0 if public else models.index(row.name) * len(row.clean.per_seed)
        measures: dict[tuple[str, float], Spread] = {(CLEAN, 0.0): row.clean}
        measures |= {(entry.protocol, entry.radius): entry for entry in row.attacked}
        group = groups.setdefault(row.label, {})
        for measure, spread in measures.items():
            for seed, value in spread.per_seed.items():
                group.setdefault(int(seed) + shift, {})[measure] = value
    return [
        ComparedTest(
            first=first, second=second, measure=measure, radius=None if measure == CLEAN else radius, t_test=test
        )
        for first, second, (measure, radius), test in t_tests_between(groups)
    ]
