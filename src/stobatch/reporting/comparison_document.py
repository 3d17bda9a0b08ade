"""The document of a comparison: a row for each setting and deployed function, from the records of its runs alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from statistics import fmean, stdev

from stobatch.dp.guarantee import PrivacyGuarantee
from stobatch.evaluation.statistics import t_tests_between
from stobatch.reporting.format import privacy_words, title_of
from stobatch.reporting.summary import Facts, common_radii
from stobatch.results import (
    AttackedSpread,
    CertifiedSpread,
    ComparedFlag,
    ComparedRow,
    ComparedTest,
    Comparison,
    Kind,
    SeedsGuarantee,
    SettingsTest,
    Spread,
    at_radius,
)
from stobatch.settings import content_hash
from stobatch.types import Status

BySeed = Mapping[int, Facts]
CLEAN = "clean"
"""The measure that no attack belongs to."""
LEVEL = 0.05
"""The p-value below which people begin to look."""


def build_comparison(groups: Mapping[str, BySeed], radii: Sequence[float], root: Path | None = None) -> Comparison:
    """Return rows in the order of `groups`, which has the trainings of each setting by seed, and t-tests between them.

    The first of the radii is the one that figures show; `root` is the folder that holds the runs, where one does.
    """
    runs = [facts for by_seed in groups.values() for facts in by_seed.values()]
    public = {name for name, by_seed in groups.items() if all(facts.seed is not None for facts in by_seed.values())}
    rows = [
        _row(name, function, by_seed, radii, root)
        for name, by_seed in groups.items()
        for function in _functions(by_seed)
    ]
    tests = _t_tests(rows, public)
    return Comparison(
        norm=runs[0].scores.norm,
        input_range=runs[0].scores.input_range,
        radii=tuple(radii),
        public_seeds=public == set(groups),
        seeds=tuple(dict.fromkeys(number for by_seed in groups.values() for number in by_seed)),
        data=" / ".join(dict.fromkeys(facts.started.dataset.name for facts in runs)),
        protocols={e.protocol.name: e.protocol.meaning for facts in runs for e in facts.scores.under_attack},
        rows=tuple(rows),
        flags=tuple(
            ComparedFlag(row=f"{name} ({privacy_words([facts.status])})", seed=seed, **dict(flag))
            for name, by_seed in groups.items()
            for seed, facts in by_seed.items()
            for flag in facts.scores.flags
        ),
        t_tests=tuple(tests),
        t_tests_below_level=sum(test.t_test.p_value < LEVEL for test in tests),
        t_tests_below_level_by_chance=round(LEVEL * len(tests), 2),
    )


def compare_runs(runs: Sequence[Facts]) -> Comparison | None:
    """Compare runs of any origin, grouped by setting and seed; None where they share no function, radius and unit."""
    radii = common_radii(runs)
    if not radii:
        return None
    trained: dict[tuple[str, Status], list[Facts]] = {}
    for facts in runs:
        trained.setdefault((facts.setting, facts.status), []).append(facts)
    return build_comparison({_name(same): _runs_by_seed(same) for same in trained.values()}, radii)


def _runs_by_seed(same: Sequence[Facts]) -> dict[int, Facts]:
    """Return the runs by public seed; a secret one, or a seed that was given twice, gets a number that is free."""
    by_seed: dict[int, Facts] = {}
    rest = []
    for facts in same:
        if facts.seed is None or facts.seed in by_seed:
            rest.append(facts)
        else:
            by_seed[facts.seed] = facts
    free = (number for number in count(1) if number not in by_seed)
    return by_seed | dict(zip(free, rest, strict=False))


def _name(trained: Sequence[Facts]) -> str:
    """Return a setting without its seed: method, largest budget with its status, and a hash for the rest."""
    first, spent = trained[0], [facts.epsilon for facts in trained if facts.epsilon is not None]
    budget = f", {first.status} ε = {max(spent):g}" if spent else ""
    settings = first.started.config
    plain = {key: settings[key] for key in ("method", "data", "model", "training")}
    return f"{first.method}{budget} [{content_hash(plain)[:6]}]"


def settings_tests(document: Comparison) -> list[SettingsTest]:
    """Return the t-tests between two settings on the same deployed function, as `report` lists them."""
    rows = {row.label: row for row in document.rows}
    tests = []
    for test in document.t_tests:
        first, second = rows[test.first], rows[test.second]
        if test.radius is None or first.function != second.function or first.name == second.name:
            continue
        tests.append(
            SettingsTest(
                first=first.name,
                second=second.name,
                protocol=test.measure,
                function=first.function,
                norm=document.norm,
                input_range=document.input_range,
                radius=test.radius,
                t_test=test.t_test,
            )
        )
    return tests


def _functions(by_seed: BySeed) -> list[str]:
    """Return the functions that were attacked in every training of a row."""
    first, *others = by_seed.values()
    return [function for function in first.functions if all(function in facts.functions for facts in others)]


def _row(name: str, function: str, by_seed: BySeed, radii: Sequence[float], root: Path | None) -> ComparedRow:
    first = next(iter(by_seed.values()))
    guarantees = _group_seeds({seed: facts.guarantee for seed, facts in by_seed.items()})
    words = privacy_words([held.guarantee.status for held in guarantees])
    blocks = {seed: facts.same_images(function) for seed, facts in by_seed.items()}
    trainings = {seed: facts.training for seed, facts in by_seed.items() if facts.training is not None}
    seconds = {seed: one.seconds_since_last_start for seed, one in trainings.items()}
    memory = {seed: one.peak_memory_mb for seed, one in trainings.items()}
    return ComparedRow(
        name=name,
        label=f"{name} ({words}), {title_of(function)}",
        method=first.started.method,
        function=function,
        guarantees=guarantees,
        test_examples=min(block.rows for block in blocks.values()),
        clean=_spread({seed: block.clean_accuracy.value for seed, block in blocks.items()}),
        attacked=tuple(_attacked_spreads(by_seed, function, radii)),
        certified=tuple(_certified_spreads(by_seed, function, radii)),
        training_seconds=_spread_if_any(seconds),
        peak_memory_mb=_spread_if_any(memory),
        peak_memory_of=tuple(sorted({one.peak_memory_of for one in trainings.values() if one.peak_memory_of})),
        devices=tuple(sorted({one.device for one in trainings.values()})),
        runs={str(seed): _place(facts, root) for seed, facts in by_seed.items()},
    )


def _place(facts: Facts, root: Path | None) -> str:
    return facts.name if root is None else facts.run.path.relative_to(root).as_posix()


def _group_seeds(by_seed: Mapping[int, PrivacyGuarantee]) -> tuple[SeedsGuarantee, ...]:
    """Return what is the same for several seeds once, with the seeds; an audit may have refuted it for one of them."""
    groups: list[tuple[PrivacyGuarantee, list[int]]] = []
    for seed, own in by_seed.items():
        same = next((seeds for guarantee, seeds in groups if guarantee == own), None)
        if same is None:
            groups.append((own, [seed]))
        else:
            same.append(seed)
    return tuple(SeedsGuarantee(seeds=tuple(seeds), guarantee=guarantee) for guarantee, seeds in groups)


def _attacked_spreads(by_seed: BySeed, function: str, radii: Sequence[float]) -> Iterator[AttackedSpread]:
    """Yield the accuracy under the worst attack, example by example."""
    for protocol in dict.fromkeys(protocol for facts in by_seed.values() for protocol in facts.protocols):
        for radius in radii:
            shares = {seed: at_radius(facts.worst(protocol, function), radius) for seed, facts in by_seed.items()}
            values = {seed: share.value for seed, share in shares.items() if share}
            if values:
                yield AttackedSpread(protocol=protocol, radius=radius, **dict(_spread(values)))


def _certified_spreads(by_seed: BySeed, function: str, radii: Sequence[float]) -> Iterator[CertifiedSpread]:
    """Yield certified accuracy of clean inputs, by rule and status, over the seeds that have it."""
    kinds: dict[tuple[str, Status], dict[int, Kind]] = {}
    for seed, facts in by_seed.items():
        for kind in facts.kinds(function):
            kinds.setdefault((kind.name, kind.status), {})[seed] = kind
    for (rule, status), by_kind in kinds.items():
        kind = next(iter(by_kind.values()))
        for radius in radii:
            shares = {seed: at_radius(by_seed[seed].certified(one), radius) for seed, one in by_kind.items()}
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


def _spread_if_any(values: Mapping[int, float | None]) -> Spread | None:
    """Return the spread of what older records, and runs with secret seeds, may lack."""
    known = {seed: value for seed, value in values.items() if value is not None}
    return _spread(known) if known else None


def _spread(values: Mapping[int, float]) -> Spread:
    """Return a number for each seed, with mean, standard deviation (of two seeds or more) and range."""
    numbers = list(values.values())
    return Spread(
        mean=fmean(numbers),
        stddev=stdev(numbers) if len(numbers) > 1 else None,
        min=min(numbers),
        max=max(numbers),
        per_seed={str(seed): value for seed, value in values.items()},
    )


def _t_tests(rows: Sequence[ComparedRow], public: set[str]) -> list[ComparedTest]:
    """Test every two rows over seeds, two-tailed, on clean inputs and under each protocol at each radius.

    Rows are paired by public seed. Secret seeds pair with none, so each gets a number that no other row has; functions
    of one model are paired all the same.
    """
    groups: dict[str, dict[int, dict[tuple[str, float], float]]] = {}
    models = list(dict.fromkeys(row.name for row in rows))
    most = max(len(row.clean.per_seed) for row in rows)
    for row in rows:
        # Below 0 there is no public seed.
        first = -most * (1 + models.index(row.name))
        numbers = {seed: int(seed) if row.name in public else first + n for n, seed in enumerate(row.clean.per_seed)}
        measures: dict[tuple[str, float], Spread] = {(CLEAN, 0.0): row.clean}
        measures |= {(entry.protocol, entry.radius): entry for entry in row.attacked}
        group = groups.setdefault(row.label, {})
        for measure, spread in measures.items():
            for seed, value in spread.per_seed.items():
                group.setdefault(numbers[seed], {})[measure] = value
    return [
        ComparedTest(
            first=first, second=second, measure=measure, radius=None if measure == CLEAN else radius, t_test=test
        )
        for first, second, (measure, radius), test in t_tests_between(groups)
    ]
