"""docs/results/paper.md: the claims of the paper's experiments, what the records say of each, and a verdict by rule.

Claims are results/figures/paper.json (numbers of the text) and claims.json (all others). One that no rule can judge has
its verdict in the file, with references whose values are compared with the records before they are printed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial, reduce
from math import prod
from operator import getitem
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from stobatch import plan
from stobatch.data import describe
from stobatch.evaluation.statistics import compare_over_seeds
from stobatch.figures.catalogue import FIGURES, METHODS
from stobatch.figures.records import CURVES, file_of, main_attack, own_settings, read_points
from stobatch.published.radius import PublishedRule
from stobatch.results import LearningCurve
from stobatch.votes.confidence import clopper_pearson
from stobatch_recipes import recipe

from . import records as sources
from .baselines import PROVED_RULES, epsilon, method
from .records import PRIVACY, Record, percent, records, render, table
from .sound import LARGE, MNIST, SMALL, certified, of_recipe

MEASURED = "benchmarks/distributed/measured.json"
CLOSE = 0.03
"""Shares that differ by no more agree."""
VERDICTS = ("refuted", "not reproduced", "reproduced", "not run")
NAMES = {name: method.label for name, method in METHODS.items()}
RISING = {"adlm": 1000}
"""Steps after which a method's learning curve was still rising."""
RELEASED = "method.label_noise=penalty"
"""No other recipe on photographs: the code that made the paper's numbers there adds no noise to labels."""
Place = tuple[float, float]
PLACES: dict[int, list[Place]] = {
    number: [(budget, radius) for budget in figure.epsilons for radius in figure.radii]
    for number, figure in FIGURES.items()
}
"""By figure: its ε and μ_a."""
STRONG = {number: set(figure.steps) for number, figure in FIGURES.items() if len(figure.steps) > 1}
"""Figures of trainings of their own, and the T_a that the paper averages over in them."""


@dataclass(frozen=True)
class Point:
    """An accuracy of one training. `note` says why it does not count, `rank` whose points go first.

    Points of one seed and place that differ in `series`, attack and T_a, are averaged.
    """

    dataset: str
    method: str
    measure: str
    epsilon: float | None
    radius: float
    accuracy: float
    seed: int | None
    file: str
    rank: int
    note: str = ""
    series: tuple[str, int] = ("", 0)
    figure: int | None = None


def published_points(name: str, dataset: str) -> Iterator[Point]:
    """Yield what a record of the published mechanism says of its single pass, its vote and its certificates."""
    for run in records(name):
        whole = run.get("steps_of_the_recipe", run["steps"])
        note = "with Adam" if run.get("optimiser_of_theta2") == "adam" else ""
        note = note if run["steps"] == whole else f"{run['steps']:,} of {whole:,} steps"
        found: dict[str, Mapping[str, Any]] = {}
        for under in run.get("under_attack") or ():
            measure = under["protocol"] + (" vote" if under["function"] == "vote" else "")
            attacks = [shares for attack, shares in under["accuracy"].items() if attack != "worst"]
            found[measure] = under["accuracy"]["worst"]
            found[f"{measure} mean"] = {radius: fmean(own[radius] for own in attacks) for radius in attacks[0]}
        for rule, measure in (("published", "claimed"), ("corrected", "proved")):
            found[measure] = {
                key: share for key, share in run.get("certified", {}).get(rule, {}).items() if key != "status"
            }
        yield from in_points_of(
            found, dataset, "published", run["claimed_epsilon"], run["seed"], f"{name}.json", 1, note
        )


def baseline_points(name: str, dataset: str, rank: int) -> Iterator[Point]:
    """Yield what a record of a baseline says; on CIFAR-10 none had settings of its own or all of its steps."""
    for run in records(name):
        own, certificates = method(run["row"]).replace("-", "_"), run["certified"] or {}
        unfinished = dataset == "cifar10" or run["steps"] <= RISING.get(own, 0)
        note = f"{run['steps']:,} steps" if unfinished else ""
        found = {protocol: under["accuracy"] for protocol, under in (run["under_attack"] or {}).items()}
        for measure, rules in (("claimed", ("as compared",)), ("proved", PROVED_RULES)):
            rule = next((rule for rule in rules if rule in certificates), None)
            found |= {measure: certificates[rule]["accuracy"]} if rule else {}
        yield from in_points_of(found, dataset, own, epsilon(run), run["seed"], f"{name}.json", rank, note)


def in_points_of(
    found: Mapping[str, Mapping[str, Any]], dataset: str, own: str, budget: float | None, *rest: Any
) -> Iterator[Point]:
    for measure, shares in found.items():
        for radius, share in shares.items():
            yield Point(dataset, own, measure, budget, float(radius), share, *rest)


def sound_points(name: str) -> Iterator[Point]:
    """Yield what a recipe of the sound method proves, of all test images."""
    for run in of_recipe(name, MNIST[name]):
        found, budget = {"proved": run["certified"]}, round(run["epsilon"], 2)
        yield from in_points_of(found, "mnist", name, budget, run["seed"], f"{MNIST[name]}.json", 0)


def figure_points() -> Iterator[Point]:
    """Yield the points of runs that `stobatch figure` made; those it took from other records are read there."""
    measures = {
        ("published protocol", "conventional"): "published",
        ("adaptive protocol", "conventional"): "adaptive",
        ("published protocol", "certified"): "claimed",
        ("proved", "certified"): "proved",
    }
    for number, figure in FIGURES.items():
        path = file_of(sources.ROOT / "results" / "figures", figure, "full")
        for point in read_points(path, figure, "full"):
            measure, main = measures.get((point.protocol, point.kind_of_accuracy)), main_attack(point)
            if point.source.startswith("results/") or measure is None or not (main or measure == "published"):
                continue
            changes = list(own_settings(point))
            if point.method in RISING and point.training_steps > RISING[point.method]:
                # More steps than the recipe's are what its curve asks for, and no other recipe.
                changes = [change for change in changes if not change.startswith("training.steps=")]
            elif point.method in RISING:
                changes.insert(0, f"{point.training_steps:,} steps")
            if point.data != "mnist" and RELEASED in changes:
                changes.remove(RELEASED)
            yield Point(
                *(point.data, point.method, measure if main else f"{measure} mean", point.epsilon, point.radius),
                *(point.accuracy, point.seed, f"figures/{path.name}", 0, ", ".join(changes)),
                series=(point.attack, point.steps),
                figure=number if number in STRONG else None,
            )


def points() -> list[Point]:
    return [
        *figure_points(),
        *published_points("paper_mnist", "mnist"),
        *published_points("paper_mnist_seeds", "mnist"),
        *(point for name in MNIST for point in sound_points(name)),
        *(point for point in baseline_points("baselines_mnist", "mnist", 1) if point.method != "sound"),
        *baseline_points("baselines_mnist_radii", "mnist", 2),
        *published_points("paper_cifar10_released", "cifar10"),
        *published_points("paper_cifar10_adam", "cifar10"),
        *published_points("paper_cifar10_partial", "cifar10"),
        *baseline_points("baselines_cifar10", "cifar10", 1),
    ]


class Evidence:
    """What the records say on one claim, and which of them were asked."""

    def __init__(self, claim: Record, known: Sequence[Point], *, all_runs: bool = False) -> None:
        """Take also trainings that were changed or stopped, if there is no other, where `all_runs` says so."""
        self.claim, self.certified = claim, claim["kind"] == "certified"
        about = [point for point in known if self.concerns(point)]
        self.known = sorted((p for p in about if all_runs or not p.note), key=lambda p: (bool(p.note), p.rank))
        self.notes = {point.method: f" ({point.note} only)" for point in reversed(about) if point.note}
        self.used: set[Point] = set()

    def place(self, point: Point) -> Place:
        return (self.claim["epsilon"] if point.epsilon is None else point.epsilon, point.radius)

    def concerns(self, point: Point) -> bool:
        """Whether a point is of the data set, the budget and the radii that the claim is about."""
        claim, (budget, radius) = self.claim, self.place(point)
        return (
            (point.dataset, point.figure) == (claim["dataset"], claim["figure"] if claim["figure"] in STRONG else None)
            and claim["epsilon"] in (None, budget)
            and claim["radius"] in (None, radius)
            and radius in claim.get("radii", (radius,))
        )

    def at(self, own: str, measure: str) -> dict[Place, list[Point]]:
        """Return a method's points by place: those of the first records that have the place."""
        found: dict[Place, list[Point]] = {}
        for point in self.known:
            if (point.method, point.measure) == (own, measure):
                there = found.setdefault(self.place(point), [])
                again = any((point.seed, point.series) == (other.seed, other.series) for other in there)
                if not there or (not again and (there[0].rank, there[0].note) == (point.rank, point.note)):
                    there.append(point)
        return found

    def missing(self, *names: str, more: str = "") -> str:
        """Name the methods of which nothing counts, the claim's own among them, and what there is of them."""
        own = self.claim["method"]
        absent = dict.fromkeys([*([own] if own and own not in {p.method for p in self.known} else []), *names])
        words = ", ".join(NAMES[name] + self.notes.get(name, "") for name in absent)
        return f"missing: {words}{more}" if absent else ""

    def mean(self, found: Sequence[Point]) -> float:
        self.used |= set(found)
        return fmean(point.accuracy for point in found)

    def level(self, own: str, *measures: str, places: Sequence[Place]) -> float | None:
        """Return the mean over places by the first measure that has them all."""
        for measure in measures:
            found = self.at(own, measure)
            steps = STRONG.get(self.claim["figure"], set()) if measure != "adaptive" else set()
            if places and all(place in found and steps <= {p.series[1] for p in found[place]} for place in places):
                return fmean(self.mean(found[place]) for place in places)
        return None

    def shown(self, own: str, places: Sequence[Place]) -> float | None:
        """Return what the paper's own measure gives: averaged over its attacks where each was recorded."""
        return self.level(own, *(("claimed",) if self.certified else ("published mean", "published")), places=places)

    def left(self, own: str, places: Sequence[Place]) -> float | None:
        """Return what an attacker leaves; of a certificate that was not asked."""
        return None if self.certified else self.level(own, "adaptive", places=places)

    def leads(self, other: str, protocol: str = "published") -> dict[Place, float]:
        """Return by how much the claim's method is ahead of another, wherever both were measured."""
        measure = {"published": "claimed", "adaptive": "none"}[protocol] if self.certified else protocol
        mine, others = self.at(self.claim["method"], measure), self.at(other, measure)
        return {place: self.mean(mine[place]) - self.mean(others[place]) for place in sorted(set(mine) & set(others))}


@dataclass(frozen=True)
class Finding:
    """A verdict; what the paper says, its protocol gives and an attacker leaves; what is missing."""

    verdict: str
    paper: str = ""
    ours: str = ""
    attacker: str = ""
    remark: str = ""
    by_calculation: bool = False


def in_points(value: float) -> str:
    return f"{100 * value + 1e-9:.1f} points"


def span(values: Sequence[float], form: Callable[[float], str]) -> str:
    low, high = form(min(values)), form(max(values))
    return low if low == high else f"{low.removesuffix(' points')} to {high}"


def agrees(found: float, printed: float) -> str:
    return "reproduced" if abs(found - printed) <= CLOSE else "not reproduced"


def in_brackets(*texts: str) -> list[str]:
    """Mark numbers that do not count."""
    return [text and f"({text})" for text in texts]


def optional(value: float | None, form: Callable[[float], str]) -> str:
    return "" if value is None else form(value)


def value(claim: Record, evidence: Evidence) -> Finding:
    """Within 3 points. Refuted where StoBatch reaches it by the paper's measure and an attacker leaves less."""
    budget, radius, printed, own = (claim[key] for key in ("epsilon", "radius", "accuracy", "method"))
    places = [place for place in PLACES[claim["figure"]] if budget == place[0] and radius in (None, place[1])]
    ours, left = evidence.shown(own, places or [(budget, radius)]), evidence.left(own, places or [(budget, radius)])
    if ours is None:
        return Finding("not run", percent(printed), remark=evidence.missing(own, more=f" at ε = {budget:g}"))
    broken = own == "published" and left is not None and left < printed - CLOSE <= ours
    verdict = "refuted" if broken else agrees(ours, printed)
    return Finding(verdict, percent(printed), percent(ours), optional(left, percent))


def ahead(claim: Record, evidence: Evidence) -> Finding:
    """Ahead at every place that was measured, or at most of them. Refuted where an attacker puts it 3 points behind.

    A lead over some of the methods that are named does not show the lead over all; one place behind does disprove it.
    """
    leads = {other: list(evidence.leads(other).values()) for other in claim["than"]}
    found = [lead for own in leads.values() for lead in own]
    absent = evidence.missing(*(other for other, own in leads.items() if not own))
    if not found:
        return Finding("not run", "ahead", remark=absent)
    real = [lead for other in claim["than"] for lead in evidence.leads(other, "adaptive").values()]
    few = len(found) / 2 if claim.get("most") else 0
    verdict = "reproduced" if sum(lead <= 0 for lead in found) <= few else "not reproduced"
    verdict = "refuted" if sum(lead < -CLOSE for lead in real) > few else verdict

    def words(leads: Sequence[float]) -> str:
        won = sum(lead > 0 for lead in leads)
        return f"ahead at {won} of {len(leads)} places ({span(leads, in_points)})" if leads else ""

    if verdict == "reproduced" and absent:
        return Finding("not run", "ahead", *in_brackets(words(found), words(real)), absent)
    return Finding(verdict, "ahead", words(found), words(real), absent)


def gain(claim: Record, evidence: Evidence) -> Finding:
    """A mean lead, over the places that were measured, of which there have to be two: the same within 3 points."""
    (other,) = claim["than"]
    found, real = evidence.leads(other).values(), evidence.leads(other, "adaptive").values()
    printed = in_points(claim["points"])
    if not found:
        return Finding("not run", printed, remark=evidence.missing(other))
    ours = f"{in_points(fmean(found))} over {len(found)} place{'s' if len(found) > 1 else ''}"
    attacker = in_points(fmean(real)) if real else ""
    if len(found) == 1:
        return Finding("not run", printed, *in_brackets(ours, attacker), remark="measured at one place only")
    return Finding(agrees(fmean(found), claim["points"]), printed, ours, attacker)


def by_seed(found: Sequence[Point]) -> dict[int, float]:
    seeds = {point.seed for point in found if point.seed is not None}
    return {seed: fmean(point.accuracy for point in found if point.seed == seed) for seed in seeds}


def t_test(claim: Record, evidence: Evidence) -> Finding:
    """Every two-tailed test over seeds has the claimed sign, and a p below the paper's."""
    measure, tests, absent = "claimed" if evidence.certified else "published", [], []
    for other in claim["than"]:
        both = evidence.at(claim["method"], measure), evidence.at(other, measure)
        common = [place for place in both[0] if min(len(by_seed(found.get(place, ()))) for found in both) > 1]
        for first, second in ([found[place] for found in both] for place in common):
            evidence.used |= {*first, *second}
            tests.append(compare_over_seeds(by_seed(first), by_seed(second)))
        absent += [] if common else [other]
    paper = f"p < {claim['p_value']:.3g}"
    if not tests:
        return Finding("not run", paper, remark=evidence.missing(*absent, more=", two seeds or more"))
    holds = all(test.difference > 0 and test.p_value < claim["p_value"] for test in tests)
    found = span([test.p_value for test in tests], lambda p: f"{p:.2g}")
    ours = f"p = {found}, {len(tests)} tests over seeds"
    return Finding("reproduced" if holds else "not reproduced", paper, ours, remark=evidence.missing(*absent))


def drop(claim: Record, evidence: Evidence) -> Finding:
    """A loss between two places: the same within 3 points."""
    budget, radius, own = claim["epsilon"], claim["radius"], claim["method"]
    ends = [(end if budget is None else budget, end if radius is None else radius) for end in claim["ends"]]
    ours, left = ([ask(own, [end]) for end in ends] for ask in (evidence.shown, evidence.left))
    losses = [None if None in pair else pair[0] - pair[1] for pair in (ours, left)]  # type: ignore[operator]
    printed = claim["points"]
    if losses[0] is None:
        gone = [f"{end:g}" for end, share in zip(claim["ends"], ours, strict=True) if share is None]
        return Finding("not run", in_points(printed), remark=evidence.missing(own, more=f" at {' and '.join(gone)}"))
    return Finding(agrees(losses[0], printed), *(optional(x, in_points) for x in (printed, *losses)))


def trend(claim: Record, evidence: Evidence) -> Finding:
    """From the smallest to the largest budget: *grows* where it gains, *no effect* where all are within 3 points."""
    measured = evidence.at(claim["method"], "published")
    shares = [evidence.mean(measured[place]) for place in sorted(measured)]
    if len(shares) < 2:
        return Finding("not run", claim["trend"], remark=evidence.missing(claim["method"], more=" at two budgets"))
    holds = shares[-1] > shares[0] if claim["trend"] == "grows" else max(shares) - min(shares) <= CLOSE
    ours = ", ".join(
        f"{percent(share)} (ε = {place[0]:g})" for place, share in zip(sorted(measured), shares, strict=True)
    )
    return Finding("reproduced" if holds else "not reproduced", claim["trend"], ours)


def withstands(claim: Record, evidence: Evidence) -> Finding:
    """Refuted where an attacker leaves 3 points less than the paper's protocol shows."""
    shown, left = (evidence.at(claim["method"], protocol) for protocol in ("published", "adaptive"))
    common = sorted(set(shown) & set(left))
    if not common:
        return Finding("not run", "resistant", remark=evidence.missing(claim["method"]))
    pairs = [(evidence.mean(shown[place]), evidence.mean(left[place])) for place in common]
    verdict = "refuted" if any(one > two + CLOSE for one, two in pairs) else "reproduced"
    return Finding(verdict, "resistant", *(span(side, percent) for side in zip(*pairs, strict=True)))


def defenceless(claim: Record, evidence: Evidence) -> Finding:
    """More often wrong than right at every radius that was measured."""
    found = {other: evidence.at(other, "published") for other in claim["than"]}
    shares = {other: [evidence.mean(own) for own in places.values()] for other, places in found.items()}
    absent = evidence.missing(*(other for other, own in shares.items() if not own))
    if not any(shares.values()):
        return Finding("not run", "defenceless", remark=absent)
    most = {other: max(own) for other, own in shares.items() if own}
    ours = "at most " + ", ".join(f"{percent(share)} ({NAMES[other]})" for other, share in most.items())
    return Finding("reproduced" if max(most.values()) < 0.5 else "not reproduced", "defenceless", ours, remark=absent)


def referred(evidence: Sequence[Record]) -> list[Any]:
    """Return the values that a judgement rests on; one that has changed since asks for another judgement."""
    for one in evidence:
        text, value = (sources.ROOT / one["file"]).read_text(), one["value"]
        if not (reduce(getitem, one["at"], json.loads(text)) == value if "at" in one else value in text):
            raise ValueError(f"{one['file']} does not hold {value} any more: judge results/figures/claims.json anew.")
    return [one["value"] for one in evidence]


@cache
def reach(dataset: str, budget: float) -> float:
    """Return the largest radius that Eq. 13 can give: all votes for one class, and an encoder that adds nothing."""
    config = recipe(f"published.{dataset}").override("method.epsilon", budget)
    settings, made, info = config.certification, plan(config), describe(config.data, Path())
    allowed, draws = settings.failure_probability / info.num_classes, settings.noise_draws
    lower, upper = clopper_pearson(np.array([float(draws), 0.0]), draws, allowed)
    rule = PublishedRule(made.input_noise_scale, made.hidden_noise_scale, prod(info.input_shape), 1e-9)
    return float(rule.largest_attack(lower[:1], upper[1:])[0])


def impossible(claim: Record) -> str:
    """Say why Eq. 13 cannot give what is claimed of StoBatch's certificates, whatever the training; else nothing."""
    if (claim["method"], claim["kind"]) != ("published", "certified"):
        return ""
    limit, along = reach(claim["dataset"], claim["epsilon"]), PLACES.get(claim["figure"], PLACES[6])
    own = [claim["radius"]] if claim["radius"] else claim.get("radii") or claim.get("ends")
    radii = own or [radius for _, radius in along]
    share = fmean(radius <= limit for radius in radii)
    most = 0.5 if claim.get("most") else 1.0
    needed = {"value": claim.get("accuracy"), "gain": claim.get("points"), "ahead": most, "drop": 1.0}
    if claim["rule"] not in needed or share >= needed[claim["rule"]]:
        return ""
    mean = 0 < share < 1 and claim["rule"] in ("value", "gain")
    average = f" and at most {percent(share)} on average" if mean else ""
    return f"Eq. 13 gives no radius beyond {limit:.3f}{average} ([how](../guarantees/published-radius.md))"


RULES: dict[str, Callable[[Record, Evidence], Finding]] = {
    rule.__name__: rule for rule in (value, ahead, gain, t_test, drop, trend, withstands, defenceless)
}


ABSOLUTE = ("value", "withstands")
"""Rules that ask for an accuracy: what a training that was helped does not reach, one as printed does not either."""


def printed_steps() -> int:
    """Return how far StoBatch was trained on CIFAR-10 as printed."""
    return max(int(run["steps"]) for run in records("paper_cifar10_partial"))


def judge(claim: Record, known: Sequence[Point]) -> Finding:
    """Judge a claim; what only a changed or unfinished training says stands in brackets and does not count.

    One exception: where the mechanism was helped, by Adam, and still falls short of an accuracy that is claimed.
    """
    if claim["rule"] == "judged":
        names = sorted({one["file"] for one in claim["evidence"]})
        why = claim["why"].format(*referred(claim["evidence"]))
        return Finding(claim["verdict"], remark=" ".join([why, linked(names)]).strip())
    rule, evidence = RULES[claim["rule"]], Evidence(claim, known)
    found = rule(claim, evidence)
    if found.verdict == "not run":
        every = Evidence(claim, known, all_runs=True)
        other = rule(claim, every)
        if other.verdict != "not run":
            evidence, shown = every, ("ours", "attacker")
            notes = sorted({f"{NAMES[point.method]} {point.note}" for point in every.used if point.note})
            helped = {point.note for point in every.used if point.note} == {"with Adam"}
            if helped and claim["rule"] in ABSOLUTE and other.verdict in ("not reproduced", "refuted"):
                why = (
                    f"{', '.join(notes)}, which helps it: as printed it had not learnt after {printed_steps():,} steps"
                )
                found = replace(other, verdict="not reproduced", remark=why)
            else:
                brackets = {key: f"({getattr(other, key)})" for key in shown if getattr(other, key)}
                found = replace(found, **brackets, remark=f"not counted: {', '.join(notes)}")
    names = sorted({f"results/{point.file}" for point in evidence.used})
    if reason := impossible(claim):
        found = replace(found, verdict="refuted", by_calculation=True)
    return replace(
        found, remark="; ".join(filter(None, [reason, found.remark, seeds_of(evidence.used), linked(names)]))
    )


def seeds_of(used: Iterable[Point]) -> str:
    """Say of how many trainings the numbers of each method are, at the place that has fewest and most."""
    places: dict[str, dict[Place, set[int | None]]] = {}
    for point in used:
        places.setdefault(point.method, {}).setdefault((point.epsilon or 0.0, point.radius), set()).add(point.seed)
    counts = {own: [len(seeds) for seeds in found.values()] for own, found in sorted(places.items())}
    return f"seeds: {', '.join(f'{NAMES[own]} {span(n, str)}' for own, n in counts.items())}" if counts else ""


def linked(names: Sequence[str]) -> str:
    return ", ".join(f"[{Path(name).stem}](../../{name})" for name in names)


def of_figure(found: Sequence[Finding]) -> str:
    """Return the worst verdict of a figure's claims, and say where it is by calculation alone."""
    verdict = next(verdict for verdict in VERDICTS if any(one.verdict == verdict for one in found))
    calculated = all(one.by_calculation for one in found if one.verdict == "refuted")
    return f"{verdict} by calculation" if verdict == "refuted" and calculated else verdict


def proved(known: Sequence[Point], dataset: str, place: Place, note: str = "") -> str:
    """Return the most that a sound model of this budget or a smaller one proves at a radius, and which.

    `note` names trainings that do not count elsewhere, such as those from a public start.
    """
    budget, radius = place
    about = (dataset, "proved", radius, note)
    found = [p for p in known if (p.dataset, p.measure, p.radius, p.note) == about and "sound" in p.method]
    sound = [p for p in found if p.epsilon is not None and p.epsilon <= budget]
    shares: dict[str, list[float]] = {}
    for point in (p for p in sound if p.rank == min(other.rank for other in sound)):
        shares.setdefault(point.method, []).append(point.accuracy)
    best = max(shares, key=lambda name: fmean(shares[name]), default=None)
    return "" if best is None else f"{percent(fmean(shares[best]))} (`{best}`)"


ATTACKED = {
    "its protocol, mean of the attacks": "published mean",
    "the worst of them": "published",
    "an attacker": "adaptive",
    "its vote, its protocol": "published vote",
    "its vote, an attacker": "adaptive vote",
}
CERTIFIED = {
    "published rule (claimed)": "claimed",
    "corrected rule (proved)": "proved",
    "its vote, an attacker": "adaptive vote",
}


def curve(number: int, own: Sequence[Record], known: Sequence[Point]) -> str:
    """Return StoBatch along a figure's axis, and what the sound method proves there."""
    printed = {
        (c["epsilon"], c["radius"]): c["accuracy"] for c in own if c["method"] == "published" and "accuracy" in c
    }
    (kind,) = {claim["kind"] for claim in own}
    claim = {"figure": number, "kind": kind, "dataset": own[0]["dataset"], "epsilon": None, "radius": None}
    counted, all_runs = Evidence(claim, known), Evidence(claim, known, all_runs=True)

    def cell(place: Place, measure: str) -> str:
        share, other = (one.level("published", measure, places=[place]) for one in (counted, all_runs))
        return optional(share, percent) or optional(other, lambda share: f"({percent(share)})")

    columns = CERTIFIED if kind == "certified" else ATTACKED
    rows = [
        [
            f"void (claimed ε = {place[0]:g})",
            f"{place[1]:g}",
            optional(printed.get(place), percent),
            *(cell(place, measure) for measure in columns.values()),
            proved(known, claim["dataset"], place),
        ]
        for place in PLACES[number]
    ]
    return table([PRIVACY, "μ_a", "the paper prints", *columns, "`sound`, proved with that ε"], rows)


def claims_table(found: Sequence[tuple[Record, Finding]]) -> str:
    header = ("claim", "where", "the paper", "its protocol", "an attacker", "verdict", "evidence")
    rows = (
        (claim["claim"], claim["where"], one.paper, one.ours, one.attacker, f"**{one.verdict}**", one.remark)
        for claim, one in found
    )
    return table(header, rows)


def processes_table() -> str:
    """Return one training on one and two processes, and a step of the CIFAR-10 network on up to sixteen."""
    steps = json.loads((sources.ROOT / MEASURED).read_text())["strong"]
    alone = fmean(steps["1"]["seconds"])
    rows = [
        [
            f"`published.{run['recipe'].partition('.')[2]}`, `{run['changes'][0]}`",
            own["processes"],
            f"{own['seconds']:.0f} s",
            percent(own["test_accuracy"][-1]),
        ]
        for run in records("distributed_mnist")
        if run["recipe"].startswith("paper.")
        for own in sorted(run["runs"], key=lambda own: own["processes"])
    ]
    rows += [
        [
            f"a step of `published.cifar10`, m = {own['batch']}",
            count,
            f"{fmean(own['seconds']):.1f} s, {alone / fmean(own['seconds']):.1f}x",
            "",
        ]
        for count, own in steps.items()
    ]
    return table(["what, one trainer (ℕ = 1)", "processes (𝕄)", "time", "accuracy"], rows)


def share(known: Sequence[Point], dataset: str, own: str, measure: str, budget: float, radius: float) -> str:
    """Return one number of the text; of a training that does not count where there is no other."""
    claim = {"figure": None, "kind": None, "method": own, "dataset": dataset, "epsilon": budget, "radius": radius}
    found = Evidence(claim, known, all_runs=True).level(own, measure, places=[(budget, radius)])
    if found is None:
        raise ValueError(f"no record of {own} on {dataset}: {measure} at ε = {budget:g} and radius {radius:g}.")
    return percent(found)


def accuracies(own: str, *changes: str) -> dict[float, list[float]]:
    """Return a method's accuracies every 50 steps while it was trained for a figure with these changes, by ε."""
    settings = tuple(sorted((*changes, "training.monitor_every=50")))
    path = sources.ROOT / "results" / "figures" / CURVES
    curves = [LearningCurve.from_dict(json.loads(line), path) for line in path.read_text().splitlines()]
    own_curves = (curve for curve in curves if curve.method == own and tuple(sorted(curve.settings)) == settings)
    return {curve.epsilon: [row.test_accuracy for row in curve.history] for curve in own_curves}


def page() -> str:
    known = points()
    claims = [{**number, "rule": "value"} for number in records("figures/paper")] + records("figures/claims")
    found = [(claim, judge(claim, known)) for claim in claims]
    figures = {number: [pair for pair in found if pair[0]["figure"] == number] for number in sorted(PLACES)}
    rest = [pair for pair in found if pair[0]["figure"] is None]
    (unfinished,) = records("paper_cifar10_partial")
    return render(
        "paper",
        share=partial(share, known),
        verdicts={number: of_figure([finding for _, finding in own]) for number, own in figures.items()},
        counts={number: Counter(finding.verdict for _, finding in own) for number, own in figures.items()},
        order=VERDICTS,
        total=Counter(finding.verdict for _, finding in found),
        pictures={number for number in figures if (sources.FIGURES / f"paper-figure-{number}.svg").exists()},
        curves={
            number: curve(number, [claim for claim, _ in own], known)
            for number, own in figures.items()
            if number not in STRONG
        },
        tables={number: claims_table(own) for number, own in figures.items()},
        others=claims_table([pair for pair in rest if not pair[0].get("distributed")]),
        distributed=claims_table([pair for pair in rest if pair[0].get("distributed")]),
        processes=processes_table(),
        released=records("paper_cifar10_released")[0],
        adlm=accuracies("adlm", "training.steps=5000"),
        learnt=accuracies("published", "method.label_noise=penalty"),
        unfinished=unfinished,
        reach=reach,
        proved=partial(proved, known),
        close=CLOSE,
        sound_cifar10=certified(of_recipe("sound.cifar10_strict_wide", "sound_cifar10"), LARGE),
        sound_tiny=certified(of_recipe("sound.tiny_imagenet", "sound_tiny_imagenet"), SMALL),
    )
