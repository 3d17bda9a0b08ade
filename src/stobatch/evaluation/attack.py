"""`attack` and `evaluate`: the test set under one protocol, and under all of them with everything they say together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stobatch.attacks import FGSM, IFGSM, Attack, Ball, Budget, Goal, Plain, make_attack
from stobatch.config import CertificationConfig, EvaluationConfig
from stobatch.data import Dataset, Examples
from stobatch.data.sources import is_public
from stobatch.errors import DataError, SettingError
from stobatch.evaluation.accuracy import AttackedTable
from stobatch.evaluation.functions import Deployed, SinglePass, Vote
from stobatch.evaluation.protocols import PROTOCOLS, radii_of
from stobatch.evaluation.sanity import Certified, Evidence, Probe, certified_from
from stobatch.evaluation.summaries import attack_summary, probe_of, probe_radius, probed, score_summary
from stobatch.evaluation.tables import about_prior, about_test_records, begin, end, open_run, tabulate, test_examples
from stobatch.files import PRIVATE, Columns, as_written, serialise_tensors, tensors_sha256, write_tensors
from stobatch.loading import TrainedModel, model_of_prior, require_weights, seeds_of
from stobatch.models import budget_mb
from stobatch.progress import Tick
from stobatch.results import Attack as AttackDocument
from stobatch.results import CertificateSummary, Pictures, PriorScores, ProbeRecords, Scores
from stobatch.runs import IMAGES
from stobatch.types import PAPER_RANGE, Norm, Radius
from stobatch.verifier import Verifier

_PROBED = 100
"""Test inputs that the sanity flags' own attacks are run on."""
_NOT_IN_A_TABLE = ("protocols", "functions", "num_images", "limit", "vote_limit")
"""Settings that choose tables, and leave what stands in one as it is."""


@dataclass(frozen=True)
class _Opened:
    """An opened run with its test data: what both verbs work on."""

    model: TrainedModel
    test: Examples
    seed: int | None
    resume: bool
    quiet: bool
    public: bool
    """Whether the test images are those of a data set that everybody can download."""
    about: str = ""
    """Who is measured, in front of a bar's title; nothing for the run's own model."""

    @property
    def settings(self) -> EvaluationConfig:
        return self.model.config.evaluation

    @cached_property
    def votes(self) -> Verifier | None:
        """What deploys a vote over noise, if anything does; made once, since it computes norms of the first layer."""
        ways = self.model.verifiers() if self.model.certifies else ()
        return next((verifier for verifier in ways if verifier.function == "vote"), None)

    def function(self, name: str) -> Deployed:
        memory_mb = budget_mb(self.model.config.machine)
        if name == "single_pass":
            return SinglePass.of(self.model.network, memory_mb)
        votes = self.votes
        if votes is None:
            raise SettingError(
                "this model's answer is no vote over noise, so there is no vote to attack.",
                remedy="Attack single_pass: evaluation.functions=single_pass.",
            )
        return Vote.of(votes.with_draws(self.settings.vote_draws), memory_mb, self.settings.noise_draws)

    def on_device(self, examples: Examples) -> tuple[torch.Tensor, torch.Tensor]:
        network = self.model.network
        return examples.inputs.to(network.device, network.dtype), examples.labels.to(network.device)

    def table(self, protocol_name: str, function_name: str) -> AttackedTable:
        """Return the records of one protocol on one function, made or completed."""
        protocol, function = PROTOCOLS[protocol_name](self.settings), self.function(function_name)
        test = self.test if function.deterministic else self.test.limit(self.settings.vote_limit)
        radii = radii_of(self.settings, test.inputs[0].numel())
        plain = {key: value for key, value in self.settings.to_dict().items() if key not in _NOT_IN_A_TABLE}
        identity = {"protocol": protocol_name, "function": function_name, "attack": plain}
        if not function.deterministic:
            identity["certification"] = self.model.config.certification.to_dict()

        def rows_of(part: Examples, generator: torch.Generator, tick: Tick) -> Columns:
            return protocol.rows(function, *self.on_device(part), generator, tick)

        title = f"{self.about}{protocol_name}, {function_name.replace('_', ' ')}"
        name, records = tabulate(
            *("attack", self.model, identity, test, rows_of),
            title=title, seed=self.seed, resume=self.resume, quiet=self.quiet,
        )  # fmt: skip
        attacks = protocol.attack_names(function)
        return AttackedTable(protocol.name, function.name, attacks, tuple(radii), records, function.rules, name)


def _begin(
    run: str | Path,
    overrides: dict[str, Any] | None,
    dataset: Dataset | None,
    network: nn.Module | None,
    device: str | None,
    *,
    seed: int | None,
    resume: bool,
    quiet: bool,
) -> _Opened:
    model = open_run(run, overrides, network, device)
    test = test_examples(model, dataset, model.config.evaluation.limit, quiet)
    public = dataset is None and is_public(model.config.data.name)
    return _Opened(model, test, seed, resume, quiet, public)


def attack(
    run: str | Path,
    *,
    protocol: str = "adaptive",
    function: str = "single_pass",
    overrides: dict[str, Any] | None = None,
    dataset: Dataset | None = None,
    network: nn.Module | None = None,
    seed: int | None = None,
    resume: bool = False,
    quiet: bool = False,
    device: str | None = None,
) -> AttackDocument:
    """Attack the test set under one protocol: records for every example, and the accuracies they give."""
    for value, known in ((protocol, tuple(PROTOCOLS)), (function, ("single_pass", "vote"))):
        if value not in known:
            raise SettingError(f"there is no '{value}' to attack.", remedy=f"Use one of {', '.join(known)}.")
    opened = _begin(run, overrides, dataset, network, device, seed=seed, resume=resume, quiet=quiet)
    with opened.model.run.held():
        begin(opened.model, "attack.json")
        return _attack(opened, opened.table(protocol, function))


def _attack(opened: _Opened, table: AttackedTable) -> AttackDocument:
    document = AttackDocument(
        training_hash=opened.model.config.training_hash,
        weights_sha256=opened.model.weights_sha256,
        settings=opened.settings.to_dict(),
        guarantee=opened.model.guarantee,
        **dict(attack_summary(table)),
    )
    document.write(opened.model.run)
    end(opened.model, "attack", quiet=opened.quiet)
    return document


def evaluate(
    run: str | Path,
    *,
    overrides: dict[str, Any] | None = None,
    dataset: Dataset | None = None,
    network: nn.Module | None = None,
    seed: int | None = None,
    resume: bool = False,
    quiet: bool = False,
    device: str | None = None,
) -> Scores:
    """Return every protocol on every function that is deployed, the gap between protocols, and the sanity flags."""
    opened = _begin(run, overrides, dataset, network, device, seed=seed, resume=resume, quiet=quiet)
    with opened.model.run.held():
        return _evaluate(opened, dataset)


def _evaluate(opened: _Opened, dataset: Dataset | None) -> Scores:
    model, settings = opened.model, opened.settings
    names = [name for name in settings.functions if name == "single_pass" or opened.votes is not None]
    if not names:
        raise SettingError("this method has no vote to evaluate.", remedy="Set evaluation.functions=single_pass.")
    begin(model, "scores.json")
    certificates = CertificateSummary.read_if_there(model.run)
    with as_written(model.run.path / "certificates.json"):
        certified = _certified(opened, certificates)
    tables = [opened.table(protocol, name) for name in names for protocol in settings.protocols]
    probe, probe_records = _probe(opened, tables)
    lowest = float(opened.test.inputs.min())
    scores = Scores(
        training_hash=model.config.training_hash,
        weights_sha256=model.weights_sha256,
        settings=settings.to_dict(),
        rows=max(len(table.label) for table in tables),
        test_records=about_test_records(model, dataset),
        guarantee=model.guarantee,
        **dict(score_summary(Evidence(tables, probe, certified), lowest)),
        lowest_input=lowest,
        probe=probe_records,
        images=_keep_images(opened) if settings.num_images else None,
        certificates=certificates,
    )
    if (own := _prior(opened, names[0])) is not None:
        scores = scores.replace(prior=own)
    scores.write(model.run)
    end(model, "evaluate", quiet=opened.quiet)
    return scores


def protocol_of_prior(settings: EvaluationConfig) -> str:
    """Return the protocol under which a prior is attacked by itself: the stronger one, where it is asked for."""
    return "adaptive" if "adaptive" in settings.protocols else settings.protocols[0]


def _prior(opened: _Opened, function: str) -> PriorScores | None:
    """Return what the weights that a run started from are worth by themselves, under the same attacks."""
    start = model_of_prior(opened.model)
    if start is None:
        return None
    table = replace(opened, model=start, about="the prior, ").table(protocol_of_prior(opened.settings), function)
    return PriorScores(**about_prior(start), **dict(attack_summary(table)))


def _probe(opened: _Opened, tables: list[AttackedTable]) -> tuple[Probe | None, ProbeRecords | None]:
    """Return the sanity flags' own attacks on a few inputs, at the radius that breaks about half; and their rows."""
    adaptive = probed(tables)
    if adaptive is None:
        return None, None
    settings, model, function = opened.settings, opened.model, opened.function("single_pass")
    steps, widest = settings.adaptive_steps, Radius(PAPER_RANGE.width, Norm.LINF, PAPER_RANGE)
    radius = probe_radius(adaptive)
    tries: dict[str, tuple[Attack, Radius]] = {
        "one_step": (FGSM(), radius),
        "usual_steps": (IFGSM(steps), radius),
        "more_steps": (IFGSM(4 * steps), radius),
        "widest": (make_attack("madry", Budget(steps, settings.restarts)), widest),
    }

    def rows_of(part: Examples, generator: torch.Generator, tick: Tick) -> Columns:
        inputs, labels = opened.on_device(part)
        columns: Columns = {"label": part.labels.tolist()}
        for name, (one, size) in tries.items():
            ball = Ball.around(inputs, size)
            points = one.run(Plain(model.network), ball, Goal(labels), generator, chunk=function.rows)
            columns[name] = function.answer(points, generator)["prediction"]
            tick(1 / len(tries))
        return columns

    identity = {"radius": radius.size, "norm": str(radius.norm), "steps": steps, "restarts": settings.restarts}
    name, records = tabulate(
        *("probe", model, identity, opened.test.limit(_PROBED), rows_of),
        seed=opened.seed, resume=opened.resume, quiet=opened.quiet,
    )  # fmt: skip
    probe = probe_of(records, radius, model.network.num_classes)
    return probe, ProbeRecords(records=name, rows=len(probe.label), radius=radius.size)


def _certified(opened: _Opened, certificates: CertificateSummary | None) -> list[Certified]:
    """Return what `certify` left; read before anything is attacked, so that damage and other data are found in time."""
    if certificates is None:
        return []
    require_weights(opened.model, certificates.weights_sha256, "certificates.json", "certify")
    rows = certificates.rows
    records = opened.model.run.records(
        "certify",
        config_hash=certificates.config_hash,
        expected_rows=rows,
        weights_sha256=certificates.weights_sha256,
    ).read()
    common = min(rows, len(opened.test))
    if opened.test.labels[:common].tolist() != records["label"][:common]:
        raise DataError(
            f"the certificates in {opened.model.run.path} are for other test data.",
            why="Attacks on these inputs say nothing about them.",
            remedy="Certify the same data first, or remove certificates.json.",
        )
    settings = CertificationConfig.from_dict(certificates.settings)
    return certified_from(records, certificates.kinds, settings.failure_probability)


def _keep_images(opened: _Opened) -> Pictures | None:
    """Return a few test images, clean and attacked at some radii, as pixels; for people to look at."""
    few, model = opened.test.limit(opened.settings.num_images), opened.model
    if few.inputs.ndim != 4 or few.inputs.shape[1] not in (1, 3):
        return None
    inputs, labels = opened.on_device(few)
    function, generator = opened.function("single_pass"), seeds_of(model.config, model.run).generator("images")
    radii = radii_of(opened.settings, inputs[0].numel())
    shown = dict.fromkeys(radii[round(share * (len(radii) - 1))] for share in (0, 0.5, 1))
    pixels = {"clean": _pixels(inputs)}
    predictions = {"clean": function.answer(inputs, generator)["prediction"]}
    strong = make_attack("madry", Budget(opened.settings.adaptive_steps))
    for radius in shown:
        ball, name = Ball.around(inputs, radius), f"{radius.size:g}"
        points = strong.run(Plain(model.network), ball, Goal(labels), generator, chunk=function.rows)
        pixels[name], predictions[name] = _pixels(points), function.answer(points, generator)["prediction"]
    metadata = {
        "config_hash": model.config.training_hash,
        "weights_sha256": model.weights_sha256,
        "pixels_sha256": tensors_sha256(serialise_tensors(pixels, {})),
    }
    # Test images are somebody's, too: only the owner has them, and the report shows them when they are public anyway.
    write_tensors(model.run.path / PRIVATE / IMAGES, pixels, metadata, private=True)
    return Pictures(
        file=f"{PRIVATE}/{IMAGES}", public=opened.public, attack="madry", labels=tuple(labels.tolist()),
        predictions={name: tuple(found) for name, found in predictions.items()},
    )  # fmt: skip


def _pixels(inputs: torch.Tensor) -> torch.Tensor:
    return ((inputs - PAPER_RANGE.low) / PAPER_RANGE.width * 255).round().clamp(0, 255).to(torch.uint8)
