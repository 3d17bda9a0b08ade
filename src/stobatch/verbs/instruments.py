"""The instruments of an audit, each fed with a run: what is trained or drawn, in resumable parts, and the finding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from stobatch.auditing.bounds import require_enough_trainings
from stobatch.auditing.falsifier import COLUMNS, Certificates, FalsifierSettings, falsify, finding_of, nearest
from stobatch.auditing.finding import Finding
from stobatch.auditing.many_runs import Floats, StepAttack, final_scores, many_runs_finding
from stobatch.auditing.membership import logit_confidence
from stobatch.auditing.membership_finding import membership_finding
from stobatch.auditing.neighbours import Pair, require_relation, worst_case
from stobatch.auditing.one_run import input_scores, one_run_finding, require_planted
from stobatch.auditing.release import pair_of_tuples, release_finding
from stobatch.certification import CertificateKind, Verifier
from stobatch.config import AuditConfig, RunConfig
from stobatch.data import Dataset, DatasetInfo, Examples
from stobatch.errors import DataError, RunError, SettingError
from stobatch.files import PRIVATE, read_tensors, write_tensors
from stobatch.loading import TrainedModel, make_network, make_plan
from stobatch.methods import method_of
from stobatch.models import Classifier
from stobatch.privacy.canaries import GradientCanaries, Planted
from stobatch.privacy.guarantee import PrivacyGuarantee
from stobatch.privacy.plan import Plan
from stobatch.runs import Run
from stobatch.seeds import Seeds
from stobatch.settings import content_hash
from stobatch.training import Trainable
from stobatch.training.engines import Gradients
from stobatch.training.many import OneByOne, train_one
from stobatch.types import Neighbours, Status
from stobatch.verbs.planting import CANARY_SCORES, planted_in
from stobatch.verbs.tables import Columns, PartOf, Tick, fill, fingerprint, read_data, test_examples

_BALLS_AT_ONCE = 50
_NOTHING: Columns = {name: [] for name in (*COLUMNS, "row", "point")}


@dataclass(frozen=True)
class Audited:
    """An opened run, or a configuration without a model: what every instrument works on."""

    run: Run
    config: RunConfig
    info: DatasetInfo
    plan: Plan
    claim: PrivacyGuarantee
    seeds: Seeds
    model: TrainedModel | None
    dataset: Dataset | None
    network: Classifier | None
    seed: int | None
    resume: bool
    quiet: bool

    @property
    def settings(self) -> AuditConfig:
        return self.config.audit

    @property
    def root(self) -> Seeds:
        """Where the audit's own randomness comes from; never that of the training itself."""
        return (self.seeds if self.seed is None else Seeds.reproducible(self.seed)).child("audit")

    def data(self) -> Dataset:
        return self.dataset or read_data(self.config, self.seeds, self.quiet)

    def trained(self) -> TrainedModel:
        if self.model is None:
            raise RunError(
                f"{self.run.path} is not trained.",
                remedy="Train it first, or audit its settings: audit.instruments=many_runs.",
            )
        return self.model

    def table(self, name: str, identity: object, total: int, tile: int, rows_of: PartOf) -> Columns:
        """A private table of the audit, made or completed: what single trainings leaked stays with the owner."""
        key = content_hash([self.config.training_hash, name, identity, self.seed])
        records = self.run.records(f"audit-{name}", config_hash=key, expected_rows=total, private=True)
        fill(records, total, tile, rows_of, title=name.replace("_", " "), resume=self.resume, quiet=self.quiet)
        return records.read()

    def fresh(self, plan: Plan, train: Examples, seeds: Seeds) -> Trainable:
        """A training of its own with these records and secrets."""
        network = make_network(self.config, self.info, seeds, self.network).to(self.config.machine.device)
        return method_of(self.config).prepare(self.config, plan, network, train, seeds)

    def plan_for(self, size: int) -> Plan:
        return make_plan(self.config, replace(self.info, num_train=size), self.network)


def require_claim(audited: Audited) -> None:
    if audited.claim.status is Status.NONE:
        raise SettingError(
            f"this method claims no privacy ({audited.claim.source}), so there is nothing to refute.",
            remedy="Audit with membership, which measures what leaks, whatever is claimed.",
        )


def of_releases(audited: Audited) -> list[Finding]:
    """Every release that the method's proof names, drawn many times from both of two neighbours."""
    releases = method_of(audited.config).releases(audited.plan)
    if not releases:
        raise SettingError(
            "this method's proof names no release of its own.",
            why="What it calls private are its steps, which many_runs and one_run look at.",
            remedy="Use audit.instruments=many_runs.",
        )
    settings = audited.settings
    require_relation(settings.neighbours, audited.claim.neighbours)
    _enough(settings.release_trials, audited)
    pair = pair_of_tuples(audited.data().train)
    findings = []
    for release in releases:

        def rows_of(start: int, count: int, tick: Tick, release=release) -> Columns:  # type: ignore[no-untyped-def]
            worlds = [index % 2 for index in range(start, start + count)]
            seeds = [audited.root.child("release", release.name, index) for index in range(start, start + count)]
            scores = [release.score(pair[world], pair, each) for world, each in zip(worlds, seeds, strict=True)]
            return {"world": worlds, "score": scores}

        table = audited.table(f"release-{release.name}", settings.release_trials, settings.release_trials, 500, rows_of)
        findings.append(release_finding(release, *_sides(table), audited.claim, settings.confidence))
    return findings


def _enough(trials: int, audited: Audited) -> None:
    """Half of the trials are of one side, and half of those choose the threshold."""
    bounds = 1 if audited.plan.curve is None else 2
    wanted = audited.claim
    require_enough_trainings(
        trials // 2, wanted.epsilon, delta=wanted.delta, confidence=audited.settings.confidence, bounds=bounds
    )


def _sides(table: Columns) -> tuple[Floats, Floats]:
    world, score = np.asarray(table["world"]), np.asarray(table["score"], dtype=np.float64)
    return score[world == 0], score[world == 1]


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
    _enough(settings.trainings, audited)
    pair = worst_case(audited.data().train, relation)
    plan = audited.plan_for(pair.size)
    curve = plan.curve
    if settings.view == "steps" and curve is None:
        raise SettingError("this method's proof says nothing about single steps.", remedy="Set audit.view=final.")
    trials = _Trials(audited, plan, pair)
    identity = [settings.canary, settings.view, settings.models_at_once, fingerprint(pair.pool)]
    table = audited.table("many_runs", identity, settings.trainings, settings.models_at_once, trials.rows)
    finding = many_runs_finding(
        *_sides(table), claim, curve,
        view=settings.view, canary=settings.canary, confidence=settings.confidence, pair=pair,
    )  # fmt: skip
    return [finding]


@dataclass(frozen=True)
class _Trials:
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
            zero = {name: torch.zeros_like(p) for name, p in present.network.named_parameters() if p.requires_grad}
            canary.add(zero, torch.tensor([0]), step, present.unit)
            return zero

        return pull


def of_one_run(audited: Audited) -> list[Finding]:
    """The canaries that were planted in this very training."""
    model, config, claim = audited.trained(), audited.config, audited.claim
    require_claim(audited)
    relation = require_relation(audited.settings.neighbours, claim.neighbours)
    require_planted(audited.run, config.canaries, claim, audited.settings.confidence)
    canaries = planted_in(config, audited.info, model.network, audited.seeds)
    if config.canaries.kind == "gradient":
        tensors, metadata = read_tensors(audited.run.path / PRIVATE / CANARY_SCORES)
        if metadata.get("config_hash") != config.training_hash or len(tensors["canary_sums"]) != config.canaries.num:
            raise RunError(
                f"the canaries' scores in {audited.run.path} belong to another training.",
                remedy="Restore them, or train again.",
            )
        scores = tensors["canary_sums"].numpy()
    else:
        assert canaries.inputs is not None
        inputs = canaries.inputs.to(model.network.device, model.network.dtype)
        with torch.no_grad():
            logits = torch.cat([model.network(part) for part in torch.split(inputs, 500)])
        scores = input_scores(logits, canaries, relation)
    finding = one_run_finding(
        scores, canaries.included, claim, audited.plan.curve,
        kind=config.canaries.kind, confidence=audited.settings.confidence,
    )  # fmt: skip
    return [finding]


def of_membership(audited: Audited) -> list[Finding]:
    """Shadow models on random halves of the training data, and the likelihood ratio of every record's membership."""
    settings, pool = audited.settings, audited.data().train
    half = len(pool) // 2
    if half < 2:
        raise DataError(f"{len(pool)} records have no halves to train on.", remedy="Raise data.train_limit.")
    plan = audited.plan_for(half)

    def rows_of(start: int, count: int, tick: Tick) -> Columns:
        seeds = [audited.root.child("membership", index) for index in range(start, start + count)]
        members = torch.stack([torch.randperm(len(pool), generator=each.generator("half"))[:half] for each in seeds])
        networks = [make_network(audited.config, audited.info, each, audited.network) for each in seeds]
        models = method_of(audited.config).stack(audited.config, plan, networks, pool, members, seeds) or OneByOne(
            audited.config,
            (audited.fresh(plan, pool.take(own), each) for own, each in zip(members, seeds, strict=True)),
            count,
        )
        models.train(tick)
        scores = logit_confidence(models.logits(pool.inputs).numpy(), pool.labels.numpy())
        within = torch.zeros(count, len(pool), dtype=torch.bool).scatter_(1, members, True)
        return {"member": within.tolist(), "score": scores.tolist()}

    identity = [settings.models_at_once, fingerprint(pool)]
    table = audited.table("membership", identity, settings.shadow_models, settings.models_at_once, rows_of)
    member, score = np.asarray(table["member"]), np.asarray(table["score"])
    return [membership_finding(member, score, audited.claim, settings.confidence)]


def of_certificates(audited: Audited) -> list[Finding]:
    """Every kind of certificate that `certify` left, attacked inside the balls nearest to a border."""
    model, run = replace(audited.trained(), config=audited.config), audited.run
    if not run.has("certificates"):
        raise RunError(f"{run.path} is not certified.", remedy=f"Certify it first: `{run.command('certify')}`.")
    document = run.read("certificates")
    records = run.records("certify", config_hash=document["config_hash"], expected_rows=document["rows"]).read()
    test = test_examples(model, audited.dataset, document["rows"], audited.quiet)
    if test.labels.tolist() != records["label"]:
        raise DataError(
            f"the certificates in {run.path} are for other test data.", remedy="Certify the same data first."
        )
    names = [kind["name"] for kind in document["kinds"]]
    verifier = next(way for way in model.verifiers() if way.kinds[0].name == names[0])
    return [
        _Falsified(audited, verifier, kind, test, records, document["config_hash"]).finding() for kind in verifier.kinds
    ]


@dataclass(frozen=True)
class _Falsified:
    """One kind of certificate under attack."""

    audited: Audited
    verifier: Verifier
    kind: CertificateKind
    test: Examples
    records: Columns
    certified_by: str

    @property
    def settings(self) -> FalsifierSettings:
        given = self.audited.settings
        return FalsifierSettings(
            num_inputs=given.num_inputs,
            steps=given.attack_steps,
            restarts=given.restarts,
            judging_draws=given.judging_draws,
            confidence=given.confidence,
        )

    def finding(self) -> Finding:
        audited, settings = self.audited, self.settings
        memory_mb = audited.config.machine.memory_mb
        whole = Certificates.of(self.kind, self.test.inputs, self.records["prediction"], self.records)
        stream = audited.root.generator("certificates", self.kind.name)
        chosen = whole.part(nearest(self.verifier, whole, settings, stream, memory_mb=memory_mb))
        tests = len(chosen.index) * len(self.verifier.kinds)

        def rows_of(start: int, count: int, tick: Tick) -> Columns:
            part = chosen.part(np.arange(start, start + count))
            own = audited.root.generator("certificates", self.kind.name, start)
            attempt = falsify(self.verifier, part, settings, own, tests=tests, memory_mb=memory_mb, tick=tick)
            points: list[list[float] | None] = [None] * count
            for row, point in zip(np.flatnonzero(attempt.columns["broken"]), attempt.points, strict=True):
                points[row] = point.flatten().tolist()
            rest = {name: column for name, column in attempt.columns.items() if name != "index"}
            return {**rest, "row": attempt.columns["index"], "point": points}

        identity = [self.certified_by, settings.to_dict(), fingerprint(self.test)]
        name = f"certificates-{self.kind.name}"
        table = audited.table(name, identity, len(chosen.index), _BALLS_AT_ONCE, rows_of) if tests else _NOTHING
        self._keep_broken(table)
        return finding_of(
            self.kind, table, settings, certified=len(whole.certified()), num_kinds=len(self.verifier.kinds)
        )

    def _keep_broken(self, table: Columns) -> None:
        """The inputs whose certificate broke, and the points that broke it, for whoever wants to see it again."""
        broken = [row for row, point in enumerate(table["point"]) if point is not None]
        path = self.audited.run.path / "evidence" / f"certificates-{self.kind.name}.safetensors"
        path.unlink(missing_ok=True)
        if broken:
            which = torch.tensor([table["row"][row] for row in broken])
            shape = self.test.inputs.shape[1:]
            tensors = {
                "index": which,
                "input": self.test.inputs[which],
                "point": torch.tensor([table["point"][row] for row in broken]).reshape(-1, *shape),
                "radius": torch.tensor([table["radius"][row] for row in broken], dtype=torch.float64),
                "certified_label": torch.tensor([table["label"][row] for row in broken]),
            }
            write_tensors(path, tensors, {"config_hash": self.audited.config.training_hash}, private=False)    by = document["config_hash"]
    return [_Falsified(audited, verifier, kind, test, records, by).finding() for kind in verifier.kinds]


@dataclass(frozen=True)
class _Falsified:
    """One kind of certificate under attack."""

    audited: Audited
    verifier: Verifier
    kind: CertificateKind
    test: Examples
    records: Columns
    certified_by: str

    @property
    def settings(self) -> FalsifierSettings:
        given = self.audited.settings
        return FalsifierSettings(
            num_inputs=given.num_inputs,
            steps=given.attack_steps,
            restarts=given.restarts,
            judging_draws=given.judging_draws,
            confidence=given.confidence,
        )

    def finding(self) -> Finding:
        audited, settings = self.audited, self.settings
        memory_mb = audited.config.machine.memory_mb
        whole = Certificates.of(self.kind, self.test.inputs, self.records["prediction"], self.records)
        stream = audited.root.generator("certificates", self.kind.name)
        chosen = whole.part(nearest(self.verifier, whole, settings, stream, memory_mb=memory_mb))
        tests = len(chosen.index) * len(self.verifier.kinds)

        def rows_of(start: int, count: int, tick: Tick) -> Columns:
            part = chosen.part(np.arange(start, start + count))
            own = audited.root.generator("certificates", self.kind.name, start)
            attempt = falsify(self.verifier, part, settings, own, tests=tests, memory_mb=memory_mb, tick=tick)
            points: list[list[float] | None] = [None] * count
            for row, point in zip(np.flatnonzero(attempt.columns["broken"]), attempt.points, strict=True):
                points[row] = point.flatten().tolist()
            rest = {name: column for name, column in attempt.columns.items() if name != "index"}
            return {**rest, "row": attempt.columns["index"], "point": points}

        identity = [self.certified_by, settings.to_dict(), fingerprint(self.test)]
        name = f"certificates-{self.kind.name}"
        table = audited.table(name, identity, len(chosen.index), _BALLS_AT_ONCE, rows_of) if tests else _NOTHING
        self._keep_broken(table)
        return finding_of(
            self.kind, table, settings, certified=len(whole.certified()), num_kinds=len(self.verifier.kinds)
        )

    def _keep_broken(self, table: Columns) -> None:
        """The inputs whose certificate broke, and the points that broke it, for whoever wants to see it again."""
        broken = [row for row, point in enumerate(table["point"]) if point is not None]
        path = self.audited.run.path / "evidence" / f"certificates-{self.kind.name}.safetensors"
        path.unlink(missing_ok=True)
        if broken:
            which = torch.tensor([table["row"][row] for row in broken])
            shape = self.test.inputs.shape[1:]
            tensors = {
                "index": which,
                "input": self.test.inputs[which],
                "point": torch.tensor([table["point"][row] for row in broken]).reshape(-1, *shape),
                "radius": torch.tensor([table["radius"][row] for row in broken], dtype=torch.float64),
                "certified_label": torch.tensor([table["label"][row] for row in broken]),
            }
            write_tensors(path, tensors, {"config_hash": self.audited.config.training_hash}, private=False)
