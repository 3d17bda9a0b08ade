"""Thousands of trainings on two neighbouring data sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from stobatch.auditing.finding import Finding
from stobatch.auditing.many_runs import Floats, StepAttack, final_scores, many_runs_finding
from stobatch.auditing.neighbours import Pair, require_relation, worst_case
from stobatch.errors import SettingError
from stobatch.loading import make_network
from stobatch.methods import method_of
from stobatch.privacy.canaries import GradientCanaries, Planted
from stobatch.privacy.plan import Plan
from stobatch.seeds import Seeds
from stobatch.training import Trainable
from stobatch.training.engines import Gradients
from stobatch.training.many import OneByOne, train_one
from stobatch.types import Neighbours
from stobatch.verbs.instruments.audited import Audited, require_claim, require_enough, sides
from stobatch.verbs.tables import Columns, Tick


def of_many_runs(audited: Audited) -> list[Finding]:
    """Models on two neighbouring data sets, half on each, and an attacker who tells them apart."""
    require_claim(audited)
    settings, claim = audited.settings, audited.claim
    relation = require_relation(settings.neighbours, claim.neighbours)
    if (settings.canary, settings.view) == ("gradient", "final"):
        raise SettingError(
            "a gradient canary pulls there and back, so the trained model does not show it.",
            remedy="Set audit.view=steps, or audit.canary=input.",
        )
    require_enough(settings.trainings, audited)
    pair = worst_case(audited.data().train.in_memory(), relation)
    plan = audited.plan_for(pair.size)
    curve = plan.curve
    if settings.view == "steps" and curve is None:
        raise SettingError("this method's proof says nothing about single steps.", remedy="Set audit.view=final.")
    trials = Trials(audited, plan, pair)
    identity = [settings.canary, settings.view, settings.models_at_once, pair.pool.fingerprint()]
    table = audited.table("many_runs", identity, settings.trainings, settings.models_at_once, trials.rows)
    finding = many_runs_finding(
        *sides(table), claim, curve,
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
            networks = [make_network(audited.config, audited.info, each, audited.network) for each in seeds]
            stack = method_of(audited.config).stack(audited.config, self.plan, networks, pair.pool, members, seeds)
            if stack is not None:
                stack.train(tick)
                return final_scores(stack.logits(pair.canary[0]), pair)
        models = OneByOne(audited.config, (self._one(*each) for each in zip(worlds, seeds, strict=True)), len(worlds))
        models.train(tick)
        return final_scores(models.logits(pair.canary[0]), pair)

    def _one(self, world: int, seeds: Seeds) -> Trainable:
        pair = self.pair
        if pair.relation is Neighbours.REPLACE_ONE:
            return self.audited.fresh(self.plan, pair.pool.take(pair.members(world)), seeds)
        trainable = self.audited.fresh(self.plan, pair.pool.take(pair.without), seeds)
        if world:
            inputs, labels = pair.canary
            here = torch.tensor([True])
            gradient = self.audited.settings.canary == "gradient"
            trainable.plant(Planted(here, self._place(trainable)) if gradient else Planted(here, None, inputs, labels))
        return trainable

    @staticmethod
    def _place(trainable: Trainable) -> GradientCanaries:
        """The auditor's choice, the same in every training: a coordinate of the last parameters."""
        return GradientCanaries(torch.tensor([sum(p.numel() for p in trainable.network.parameters()) - 1]))

    def _steps(self, worlds: Sequence[int], seeds: Sequence[Seeds], tick: Tick) -> Floats:
        curve, others = self.plan.curve, self.pair.pool.take(self.pair.without)
        assert curve is not None
        scores = []
        for world, each in zip(worlds, seeds, strict=True):
            trainable = self._one(world, each)
            attack = StepAttack(curve, self._contribution(trainable), (others.inputs, others.labels))
            train_one(trainable, self.audited.config, attack)
            scores.append(attack.total)
            tick(1 / len(worlds))
        return np.array(scores)

    def _contribution(self, trainable: Trainable) -> Callable[[int, Trainable], Gradients]:
        if self.audited.settings.canary == "input":
            return lambda step, present: present.contributions(*self.pair.canary, step)
        canary = self._place(trainable)

        def pull(step: int, present: Trainable) -> Gradients:
            zero = {name: torch.zeros_like(p) for name, p in present.targets(step).items()}
            canary.add(zero, torch.tensor([0]), step, present.unit)
            return zero

        return pull
