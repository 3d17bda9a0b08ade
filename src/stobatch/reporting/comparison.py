"""Several runs side by side: one table, accuracy against ε, and t-tests over seeds."""

from __future__ import annotations

from collections.abc import Sequence

from stobatch.reporting.figures import epsilon_curves
from stobatch.reporting.format import chip, gap_cell, interval, percent, points, share_cell, spoken, unit
from stobatch.reporting.page import Html, join, table, tag, void
from stobatch.reporting.summary import Facts, middle
from stobatch.results import SettingsTest, TTest, at_radius


def comparison_section(runs: Sequence[Facts], comparisons: Sequence[SettingsTest]) -> Html:
    function, radius = _common(runs)
    parts = [
        _lead(runs, function, radius),
        _table(runs, function, radius),
        _curve(runs, function, radius),
        t_tests(comparisons),
    ]
    return join(parts)


def _common(runs: Sequence[Facts]) -> tuple[str, float | None]:
    """A function and a radius that all runs were attacked at, in the same units; the middle one of several."""
    functions = [f for f in runs[0].functions if all(f in other.functions for other in runs)]
    function = runs[0].main_function if runs[0].main_function in functions else (functions or [""])[0]
    radii = sorted(set.intersection(*(set(facts.radii) for facts in runs)))
    same_unit = len({facts.unit for facts in runs}) == 1
    return function, middle(radii) if radii and functions and same_unit else None


def _lead(runs: Sequence[Facts], function: str, radius: float | None) -> Html:
    """One sentence: the span of accuracies under each protocol."""
    spans: list[str] = []
    for protocol in ("published", "adaptive") if radius is not None else ():
        shares = [share for facts in runs if (share := at_radius(facts.worst(protocol, function), radius or 0.0))]
        if shares:
            low, high = (end(shares, key=lambda share: share.value) for end in (min, max))
            of_what = "" if spans else " of test images"
            spans.append(f"{percent(low)} to {percent(high)}{of_what} under the {protocol} protocol")
    if not spans:
        return tag("p", "These runs were not attacked at a common radius.", class_="lead")
    start = f"At radius {radius:g} ({runs[0].unit}) on the {spoken(function)}, these runs are right on "
    return tag("p", start, tag("b", ", and on ".join(spans)), ".", class_="lead")


def _table(runs: Sequence[Facts], function: str, radius: float | None) -> Html:
    headings = ["run", "method", "ε and its status", "seed", "test images", "clean"]
    if radius is None:
        caption = (
            "Accuracy in %, 95% interval in brackets. The runs share no function, radius and unit to be compared at."
        )
        return table(caption, headings, [_identity(place, facts) for place, facts in enumerate(runs, 1)])
    kinds = list(dict.fromkeys((kind.name, kind.function) for facts in runs for kind in facts.all_kinds))
    headings += ["published protocol", "adaptive protocol", "gap"]
    headings += [f"certified, {rule} rule, {spoken(certified)}" for rule, certified in kinds]
    caption = (
        f"Accuracy on the {spoken(function)} at radius {radius:g} ({runs[0].unit}), worst attack for each example, "
        "and certified accuracy of clean inputs at that radius, in %; gap in percentage points; 95% interval in "
        "brackets. Numbers are of as many test images as the row says, or as stands beside them."
    )
    rows = [[*_identity(p, facts), *_attacked(facts, function, radius, kinds)] for p, facts in enumerate(runs, 1)]
    return table(caption, headings, rows)


def _identity(place: int, facts: Facts) -> list[object]:
    epsilon = "" if facts.epsilon is None else f"{facts.epsilon:g} "
    seed = "secret" if facts.seed is None else facts.seed
    return [
        join([tag("a", facts.name, href=f"#run-{place}"), void("br"), tag("code", facts.scores.training_hash)]),
        facts.method,
        join([epsilon, chip(facts.status)]),
        seed,
        f"{facts.same_images(facts.main_function).rows:,}",
        share_cell(facts.clean(facts.main_function)),
    ]


def _attacked(facts: Facts, function: str, radius: float, kinds: Sequence[tuple[str, str]]) -> list[object]:
    gap = facts.gap(function, radius)
    worst = [share_cell(at_radius(facts.worst(p, function), radius)) for p in ("published", "adaptive")]
    return [*worst, gap_cell(gap.gap if gap else None), *(_certified(facts, radius, *kind) for kind in kinds)]


def _certified(facts: Facts, radius: float, rule: str, function: str) -> Html:
    """What one rule certifies at this radius, with its status in this run; a dash where it says nothing."""
    kind = next((kind for kind in facts.kinds(function) if kind.name == rule), None)
    share = at_radius(facts.certified(kind) or facts.all_certified(kind), radius) if kind else None
    if kind is None or share is None:
        return share_cell(None)
    same = share.total == facts.same_images(facts.main_function).rows
    others = "" if same else tag("small", f"of {share.total:,} images ")
    return join([share_cell(share), others, chip(kind.status)])


def _curve(runs: Sequence[Facts], function: str, radius: float | None) -> Html:
    budgeted = [facts for facts in runs if facts.epsilon is not None]
    if not budgeted:
        return Html("")
    where = "" if radius is None else f" on the {spoken(function)}, worst attack at radius {radius:g} ({runs[0].unit})"
    left_out = len(runs) - len(budgeted)
    caption = f"Accuracy against ε{where}. Each dot is a run; lines join the means over seeds of the same setting."
    caption += f" Runs without any privacy guarantee are not on it: {left_out}." if left_out else ""
    return tag("figure", epsilon_curves(budgeted, function, radius, "epsilon"), tag("figcaption", caption))


def t_tests(comparisons: Sequence[SettingsTest]) -> Html:
    if not comparisons:
        return Html("")
    headings = ["first", "second", "protocol", "function", "radius"]
    rows = ([*_compared(comparison), *t_test_cells(comparison.t_test)] for comparison in comparisons)
    caption = t_tests_caption(len(comparisons))
    return join([tag("h2", "Two-tailed t-tests over seeds"), table(caption, [*headings, *TEST_HEADINGS], rows)])


def _compared(comparison: SettingsTest) -> list[object]:
    return [
        comparison.first,
        comparison.second,
        comparison.protocol,
        spoken(comparison.function),
        f"{comparison.radius:g}, {unit(comparison.norm, comparison.input_range)}",
    ]


TEST_HEADINGS = ("difference", "p-value", "test", "seeds")


def t_tests_caption(count: int) -> str:
    """How to read a table of t-tests, and how many would look like findings if there were none."""
    return (
        "First minus second, accuracy in percentage points with its 95% interval. Paired where both have the same "
        f"seeds, else Welch's test. Of {count} tests, {count / 20:.1f} would come out below p = 0.05 by chance if "
        "nothing differed."
    )


def t_test_cells(test: TTest) -> list[object]:
    return [
        join([tag("b", points(test.difference)), " ", tag("small", interval(test))]),
        f"{test.p_value:.2g}",
        "paired" if test.paired else "Welch",
        " and ".join(str(seeds) for seeds in test.num_seeds),
    ]
