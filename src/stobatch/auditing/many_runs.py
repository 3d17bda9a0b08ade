"""The audit by many trainings: half of the models see one data set, half its neighbour; an attacker tells them apart.

What the attacker sees is part of the finding. `final` is the trained model, queried at the canary: the least that a
deployment gives away. `steps` is every noisy step, which is what the proof of DP-SGD speaks about; there the attacker
subtracts what the other records are expected to add, and sums up the likelihood ratios of the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log1p

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stobatch.auditing.lower_bounds import privacy_finding, two_sided_bounds
from stobatch.auditing.neighbours import Pair, require_relation, worst_case
from stobatch.auditing.subject import Audited, require_claim, require_enough, scores_by_world
from stobatch.auditing.tradeoff_curves import PoissonGaussianFamily
from stobatch.data import Examples
from stobatch.dp.accounting import PoissonGaussian
from stobatch.dp.canaries import Canaries, GradientCanaries
from stobatch.dp.guarantee import PrivacyGuarantee
from stobatch.dp.plan import Plan
from stobatch.errors import SettingError
from stobatch.files import Columns
from stobatch.methods import method_of
from stobatch.progress import Tick
from stobatch.results import Finding, Histogram
from stobatch.seeds import Seeds
from stobatch.training import Trainable
from stobatch.training.engines import Gradients
from stobatch.training.loop import OneByOne, train_one
from stobatch.types import Neighbours

Floats = NDArray[np.float64]

THREATS = {
    "final": "the attacker knows both data sets and queries the trained model at the canary; weights stay hidden",
    "steps": "the attacker knows both data sets and sees every noisy step of the training",
}
ATTACKS = {
    ("final", "input"): "the trained model's scores at the canary: of its label against the label it has instead, or "
    "against all others",
    ("steps", "input"): "the likelihood ratio of each step along the canary's own clipped gradient",
    ("steps", "gradient"): "the likelihood ratio of each step in the canary's coordinate, with the sign of the step",
}


def final_scores(logits: Tensor, pair: Pair) -> Floats:
    """Return how much each model prefers the canary's label: [models, 1, classes] to [models]."""
    label = int(pair.canary[1][0])
    at = logits[:, 0].double()
    scores = at[:, label] - at[:, pair.instead] if pair.instead is not None else at.log_softmax(1)[:, label]
    values: Floats = scores.detach().numpy()
    return values


@dataclass
class StepAttack:
    """Sums the likelihood ratios that each released step gives the presence of the canary.

    In units of the bound on one example, a step without the canary is N(0, σ²) along its contribution; with it, a step
    that has sampled it is N(1, σ²). Both hold once the other records' expected part is subtracted.
    """

    curve: PoissonGaussian
    contribution: Callable[[int, Trainable], Gradients]
    others: tuple[Tensor, ...]
    """Inputs, labels and, where there are any, persons."""
    total: float = 0.0

    def see(self, step: int, trainable: Trainable, released: Gradients) -> None:
        unit, q, variance = trainable.per_example_bound, self.curve.sampling_rate, self.curve.noise_multiplier**2
        along = self.contribution(step, trainable)
        inputs, labels, *groups = self.others
        rest = trainable.contributions(inputs, labels, step, *groups)
        shares = [(released[name] - q * rest[name]).double().mul(value.double()).sum() for name, value in along.items()]
        seen = sum(float(share) for share in shares) / unit**2
        power = sum(float(value.double().square().sum()) for value in along.values()) / unit**2
        exponent = (seen - power / 2) / variance
        # log(1 - q + q e^x) without overflow.
        self.total += exponent + log1p((1 - q) * np.expm1(-exponent)) if exponent > 0 else log1p(q * np.expm1(exponent))


def many_runs_finding(
    without: Floats,
    with_: Floats,
    guarantee: PrivacyGuarantee,
    curve: PoissonGaussian | None,
    *,
    view: str,
    canary: str,
    confidence: float,
    pair: Pair,
) -> Finding:
    """Return the bounds from the scores of both sides, held against the claim."""
    family = None if curve is None else PoissonGaussianFamily(curve.sampling_rate, curve.steps)
    # A likelihood ratio decides at 0; other scores have no natural threshold, and choose one on half of the models.
    threshold = 0.0 if view == "steps" else None
    bounds = two_sided_bounds(
        without, with_, delta=guarantee.delta, confidence=confidence, family=family, threshold=threshold
    )
    return privacy_finding(
        "many_runs",
        guarantee,
        bounds,
        tried=f"{len(without)} + {len(with_)} models trained on two {pair.relation} neighbours{_words_of(pair)}:",
        threat_model=THREATS[view],
        attack=ATTACKS[view, canary],
        confidence=confidence,
        records=pair.size,
        trainings=len(without) + len(with_),
        canaries=1,
        histogram=histogram(without, with_),
    )


def _persons_of(examples: Examples) -> tuple[Tensor, ...]:
    """Return the persons' numbers as a further argument, where there are any."""
    return () if examples.groups is None else (examples.groups,)


def _words_of(pair: Pair) -> str:
    """Say in what neighbours differ, where it is a person."""
    return "" if pair.pool.groups is None else f" that differ in a person of {pair.canary_records} records"


def histogram(without: Floats, with_: Floats, bins: int = 40) -> Histogram:
    """Return how the scores of both sides spread, for a picture."""
    both = np.concatenate([without, with_])
    low, high = np.quantile(both[np.isfinite(both)], [0.001, 0.999])
    edges = np.linspace(low, high if high > low else low + 1, bins + 1)
    counts = [np.histogram(np.clip(side, edges[0], edges[-1]), edges)[0].tolist() for side in (without, with_)]
    return Histogram(edges=edges.tolist(), without=counts[0], with_=counts[1])


def of_many_runs(audited: Audited) -> list[Finding]:
    """Train models on two neighbouring data sets, half on each, and let an attacker tell them apart."""
    require_claim(audited)
    settings, claim = audited.settings, audited.claim
    relation = require_relation(settings.neighbours, claim.neighbours)
    if (settings.canary, settings.view) == ("gradient", "final"):
        raise SettingError(
            "a gradient canary pulls there and back, so the trained model does not show it.",
            remedy="Set audit.view=steps, or audit.canary=input.",
        )
    require_enough(settings.trainings, audited)
    pair = worst_case(audited.data().train.in_memory(), relation, audited.canary_records)
    persons = pair.first.persons
    plan = audited.plan_for(pair.size, None if persons is None else len(persons))
    curve = plan.curve
    if settings.view == "steps" and curve is None:
        raise SettingError("this method's proof says nothing about single steps.", remedy="Set audit.view=final.")
    trials = Trials(audited, plan, pair)
    identity = [settings.canary, settings.view, settings.models_at_once, pair.pool.fingerprint()]
    table = audited.table("many_runs", identity, settings.trainings, settings.models_at_once, trials.rows)
    finding = many_runs_finding(
        *scores_by_world(table), claim, curve,
        view=settings.view, canary=settings.canary, confidence=audited.confidence, pair=pair,
    )  # fmt: skip
    return [finding]


@dataclass(frozen=True)
class Trials:
    """Trains models on the one or the other data set and scores them."""

    audited: Audited
    plan: Plan
    pair: Pair

    def rows(self, start: int, count: int, tick: Tick) -> Columns:
        worlds = [index % 2 for index in range(start, start + count)]
        seeds = [self.audited.root.child("many_runs", index) for index in range(start, start + count)]
        final = self.audited.settings.view == "final"
        scores = self._final(worlds, seeds, tick) if final else self._steps(worlds, seeds, tick)
        return {"world": worlds, "score": scores.tolist()}

    def _final(self, worlds: Sequence[int], seeds: Sequence[Seeds], tick: Tick) -> Floats:
        audited, pair = self.audited, self.pair
        if pair.relation is Neighbours.REPLACE_ONE:
            members = torch.stack([pair.members(world) for world in worlds])
            networks = [audited.fresh_network(each) for each in seeds]
            stack = method_of(audited.config).stack(audited.config, self.plan, networks, pair.pool, members, seeds)
            if stack is not None:
                stack.train(tick)
                return final_scores(stack.logits(pair.canary[0]), pair)
        models = OneByOne(
            audited.config, (self._start_training(*each) for each in zip(worlds, seeds, strict=True)), len(worlds)
        )
        models.train(tick)
        return final_scores(models.logits(pair.canary[0]), pair)

    def _start_training(self, world: int, seeds: Seeds) -> Trainable:
        pair = self.pair
        if pair.relation is Neighbours.REPLACE_ONE:
            return self.audited.fresh(self.plan, pair.pool.take(pair.members(world)), seeds)
        trainable = self.audited.fresh(self.plan, pair.first, seeds)
        if world:
            inputs, labels = (values[:1] for values in pair.canary)
            here = torch.tensor([True])
            gradient = self.audited.settings.canary == "gradient"
            trainable.add_canaries(
                Canaries(here, self._place(trainable)) if gradient else Canaries(here, None, inputs, labels)
            )
        return trainable

    @staticmethod
    def _place(trainable: Trainable) -> GradientCanaries:
        """Return the auditor's choice, the same in every training: a coordinate of the last parameters."""
        return GradientCanaries(torch.tensor([sum(p.numel() for p in trainable.parameters.values()) - 1]))

    def _steps(self, worlds: Sequence[int], seeds: Sequence[Seeds], tick: Tick) -> Floats:
        curve, others = self.plan.curve, self.pair.first
        known = (others.inputs, others.labels, *_persons_of(others))
        assert curve is not None
        scores = []
        for world, each in zip(worlds, seeds, strict=True):
            trainable = self._start_training(world, each)
            attack = StepAttack(curve, self._contribution(trainable), known)
            train_one(trainable, self.audited.config, attack)
            scores.append(attack.total)
            tick(1 / len(worlds))
        return np.array(scores)

    def _contribution(self, trainable: Trainable) -> Callable[[int, Trainable], Gradients]:
        if self.audited.settings.canary == "input":
            own = self.pair.pool.take(slice(self.pair.size, None))
            return lambda step, present: present.contributions(*self.pair.canary, step, *_persons_of(own))
        canary = self._place(trainable)

        def pull(step: int, present: Trainable) -> Gradients:
            zero = {name: torch.zeros_like(p) for name, p in present.targets(step).items()}
            canary.add(zero, torch.tensor([0]), step, present.per_example_bound)
            return zero

        return pull
