"""A trained model from its run directory, and the pieces that training and loading have in common."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stobatch.config import CertificationConfig, RunConfig
from stobatch.data import DatasetInfo
from stobatch.data.pixels import PictureRule
from stobatch.dp.guarantee import PrivacyGuarantee
from stobatch.dp.plan import Plan, TrainedPart
from stobatch.dp.prior import Prior, find_conflict, find_tuning
from stobatch.errors import ModelError, RunError, SettingError
from stobatch.files import PRIVATE, as_written, read_tensors, tensors_sha256
from stobatch.methods import can_certify, method_of, verifiers_of
from stobatch.models import Classifier, HandedOver, Network, build, hand_over
from stobatch.models.handed_over import PROBES, public_points
from stobatch.models.parts import choose_parts, describe_parts, last_layer
from stobatch.prediction import best_kind, describe_kind, name_pictures, picture_rule, predictions
from stobatch.registry import METHODS
from stobatch.results import (
    CERTIFICATES,
    Audit,
    CertificateSummary,
    Finding,
    Kind,
    NetworkFacts,
    Prediction,
    Predictions,
    StartedRun,
    Training,
    recheck,
)
from stobatch.runs import START, Run, commit, require_as_listed
from stobatch.seeds import Seeds
from stobatch.settings import content_hash
from stobatch.training.device import use_device
from stobatch.training.ledger import require_possible_count
from stobatch.types import Status, Verdict
from stobatch.verifier import Certificates, Verifier


@dataclass(frozen=True)
class TrainedModel:
    """A trained network with everything that is known about it.

    `network` is a plain torch module from inputs in [-1, 1] to logits: the function that is deployed, its fixed noise
    included. Hand it to any attack library as it is.
    """

    network: Classifier
    config: RunConfig
    plan: Plan
    run: Run
    accounted_steps: int = 0
    """Steps that have looked at the training data, as far as the method counts them."""
    class_names: tuple[str, ...] = ()
    weights_sha256: str = ""
    """Digest of the weights (`files.tensors_sha256`): what tables and certificates are bound to."""

    @property
    def claim(self) -> PrivacyGuarantee:
        """Return what the method says of this training with secret seeds, before anyone looked: what audits test."""
        return self.plan.in_context(self.plan.after(self.accounted_steps))

    @property
    def guarantee(self) -> PrivacyGuarantee:
        """Return the claim, void where the seed is public, in the light of the run's audits."""
        held = self.claim.with_public_seed() if self.plan.public_seeds else self.claim
        return held.audited(self.audit_findings())

    @property
    def certifies(self) -> bool:
        """Return whether there is verified inference for this model."""
        return can_certify(self.config, self.network)

    def verifiers(self) -> tuple[Verifier, ...]:
        """Return the ways to certify answers in the norm of the evaluation, one per kind of certificate."""
        return verifiers_of(self.config, self.plan, self.network)

    @property
    def verifier(self) -> Verifier:
        """Return the way to certify that `certify` chose, or the first."""
        ways = self.verifiers()
        certified = CertificateSummary.read_if_there(self.run)
        chosen = certified.chosen.certificate if certified and certified.chosen else None
        return next((way for way in ways if way.kinds[0].name == chosen), ways[0])

    def predict_verified(self, inputs: torch.Tensor, *, seeds: Seeds | None = None) -> Certificates:
        """Return a label with its certificates for a batch of inputs in [-1, 1], by the way that `certify` chose."""
        return self.verifier.verify(inputs, (seeds or Seeds.secret()).generator("verify"))

    def predict(
        self,
        pictures: Any,
        *,
        radius: float | None = None,
        norm: str | None = None,
        rule: PictureRule | None = None,
        seeds: Seeds | None = None,
    ) -> Predictions:
        """Label pictures, with certified radii: files, folders, arrays (bytes, or in [-1, 1]) or tensors.

        With `radius`, over [-1, 1], an answer says whether its label holds there, and is found with less work. Files
        are brought to the network's shape by the rule of the training data, or by the one given.
        """
        kind, rows = self.answers(pictures, radius=radius, norm=norm, rule=rule, seeds=seeds)
        return Predictions(
            run=str(self.run.path),
            weights_sha256=self.weights_sha256,
            class_names=self.class_names,
            certificate=kind,
            asked_radius=radius,
            rows=tuple(rows),
        )

    def answers(
        self,
        pictures: Any,
        *,
        radius: float | None = None,
        norm: str | None = None,
        rule: PictureRule | None = None,
        seeds: Seeds | None = None,
    ) -> tuple[Kind | None, Iterator[Prediction]]:
        """Return what `predict` returns piece by piece, for more pictures than fit into memory."""
        if radius is not None:
            _require_radius(radius)
        verifier = self.verifier_for(radius, norm)
        named = name_pictures(pictures, self.network.input_shape)
        kind = describe_kind(best_kind(verifier.kinds), self.refuted_kinds()) if verifier else None
        rule = rule or picture_rule(self.config)
        rows = predictions(self.network, self.class_names, verifier, named, rule, radius=radius, seeds=seeds)
        return kind, rows

    def verifier_for(self, radius: float | None = None, norm: str | None = None) -> Verifier | None:
        """Return the way to certify that answers a question about this radius, over [-1, 1]; None: there is none."""
        asked = {"evaluation.radii": [radius], "certification.attack_radius": radius} if radius is not None else {}
        changed = replace(self, config=self.config.override_all(asked | ({"evaluation.norm": norm} if norm else {})))
        return changed.verifier if self.certifies else None

    def refuted_kinds(self) -> frozenset[str]:
        """Return the names of the kinds of certificate that an audit broke."""
        findings = self.audit_findings()
        broken = (one for one in findings if one.instrument == CERTIFICATES and one.verdict is Verdict.REFUTED)
        return frozenset(one.about for one in broken)

    def audit_findings(self) -> tuple[Finding, ...]:
        """Return what audits of this run found; raise where audit.json was changed or removed since."""
        require_as_listed(self.run, "audit.json")
        audit = Audit.read_if_there(self.run)
        return recheck(audit.findings) if audit else ()


def _require_radius(radius: Any) -> None:
    if not isinstance(radius, Real):
        raise SettingError(
            f"a radius is one number, and this is a {type(radius).__name__}.",
            remedy="Ask about one radius at a time, as radius=0.1.",
        )
    if not float(radius) > 0:
        raise SettingError(f"a radius of {float(radius):g} says nothing.", remedy="Ask about a radius above 0.")


def name_network(config: RunConfig, network: nn.Module | None) -> RunConfig:
    """Return the settings of a run that trains a user's own module: no architecture of ours has its name."""
    if network is None or (isinstance(network, Classifier) and not isinstance(network, HandedOver)):
        return config
    return config.override("model.architecture", "custom")


def make_plan(config: RunConfig, info: DatasetInfo, network: nn.Module | None) -> Plan:
    """Return the method's plan for data of these sizes and this network; the one place that knows of public seeds."""
    network = None if network is None else hand_over(network, info.input_shape, info.num_classes)
    if isinstance(network, Network) and network.last_hidden_size != config.model.last_hidden_size:
        raise ModelError(
            f"your network's last hidden layer has {network.last_hidden_size} neurons, "
            f"model.last_hidden_size is {config.model.last_hidden_size}.",
            remedy=f"Set model.last_hidden_size={network.last_hidden_size}.",
        )
    method = method_of(config)
    if config.trainers.num > 1 and not method.has_trainers:
        raise SettingError(
            f"trainers.num={config.trainers.num} is not for method '{config.method.title}'.",
            why="Its data have one owner; the published method has N/(2m) trainers, which follow from its batches.",
            remedy="Set trainers.num=1, or method.name=sound.",
        )
    if not method.trains_parts and (config.model.train_only is not None or config.model.adapter_rank):
        raise SettingError(
            f"model.train_only and model.adapter_rank are not for method '{config.method.title}'.",
            why="Parties answer with the gradient of a whole network."
            if method.takes_prior
            else "What it proves, or claims, is of a network all of which moves.",
            remedy="Leave them out, or set method.name=sound.",
        )
    if config.model.first_weights != "fan_in" and config.model.layers is None:
        raise SettingError(
            f"model.first_weights={config.model.first_weights} is for a list of layers.",
            why="The paper's networks start as the paper says, and those handed over as they are.",
            remedy="Write the layers in model.architecture, or leave model.first_weights unset.",
        )
    parts, prior = _trained_part(config, info, network), describe_prior(config, info)
    plan = method.plan(config, info, network)
    if info.num_persons is not None and plan.claim.status is not Status.NONE and "person" not in plan.claim.unit:
        raise SettingError(
            f"method '{config.method.title}' has no guarantee for persons, and the records have some.",
            why=f"It speaks of a {plan.claim.unit}: a person with several records would be protected less.",
            remedy="Use method.name=sound or dpsgd, or leave the persons out and read the guarantee as it stands.",
        )
    return replace(
        plan,
        public_seeds=config.seed is not None,
        parts=parts,
        prior=prior,
        classes_from_labels=info.classes_from_labels,
        read_from_folder=info.read_from_folder,
        provider=METHODS.provider(config.method.name),
    )


def describe_prior(config: RunConfig, info: DatasetInfo) -> Prior | None:
    """Return what the training starts from for its guarantee, with the reason why it may contain the private data."""
    settings = config.prior
    if not settings.to_dict():
        return None
    if not (settings.name and settings.weights_sha256 and settings.read):
        raise SettingError(
            "the section `prior` does not say what training starts from.",
            why="Its name, its digest and what was read go together.",
            remedy="Leave the section out, and give the weights themselves: `stobatch train --from PRIOR`.",
        )
    require_takes_prior(config)
    may_contain, private = settings.may_contain or (), dict.fromkeys((config.data.name, info.name))
    return Prior(
        settings.name,
        settings.weights_sha256,
        settings.read,
        may_contain,
        settings.promise,
        settings.new_head,
        find_conflict(may_contain, private),
        find_tuning(settings.tuned_on or (), private),
    )


def require_takes_prior(config: RunConfig) -> None:
    """Raise where the method starts from random weights, always."""
    method = method_of(config)
    if not (method.trains_parts or method.takes_prior):
        raise SettingError(
            f"method '{config.method.title}' does not start from a prior.",
            why="What it proves, or claims, is of a training from random weights, all of which move.",
            remedy="Train it without --from, or set method.name=sound.",
        )


def _trained_part(config: RunConfig, info: DatasetInfo, network: nn.Module | None) -> TrainedPart | None:
    """Return what the settings, or the network that was handed over, leave to be trained."""
    if config.model.train_only is None and not config.model.adapter_rank:
        return describe_parts(network) if network is not None else None
    built = build(config.model, info.input_shape, info.num_classes, torch.Generator()) if network is None else network
    tried = copy.deepcopy(built)
    choose_parts(tried, config.model, torch.Generator())
    return describe_parts(tried)


def make_network(
    config: RunConfig,
    info: DatasetInfo,
    seeds: Seeds,
    given: nn.Module | None,
    start: Mapping[str, Tensor] | None = None,
) -> Classifier:
    """Return a network to be trained: fresh, of a prior, or a copy of one handed over; the rest of it is frozen."""
    if config.prior.name is not None and start is None:
        raise _missing_network_error(config)
    network = fresh_network(config, info, seeds, given)
    if start is not None:
        put_start(network, start, new_head=config.prior.new_head)
    method_of(config).register_buffers(network)
    choose_parts(network, config.model, seeds.generator("adapters"))
    return network


def plain_network(config: RunConfig, info: DatasetInfo, seeds: Seeds, given: nn.Module | None) -> Classifier:
    """Return a network as it is deployed, without adapters: fresh, or a copy of the one handed over."""
    network = fresh_network(config, info, seeds, given)
    method_of(config).register_buffers(network)
    return network


def put_start(network: Classifier, start: Mapping[str, Tensor], *, new_head: bool) -> None:
    """Give a network the weights of a prior, all or all but its last layer's."""
    kept = last_layer(network) if new_head else frozenset[str]()
    own = network.state_dict()
    network.load_state_dict({name: value if name in kept else start.get(name, value) for name, value in own.items()})


def read_start(config: RunConfig, run: Run | None) -> dict[str, Tensor] | None:
    """Return the weights that the settings start from, as the run keeps them; None where they are random."""
    if config.prior.name is None:
        return None
    path = None if run is None else run.path / START
    if path is None or not path.exists():
        raise _missing_network_error(config)
    tensors, _ = read_tensors(path)
    if tensors_sha256(path.read_bytes()) != config.prior.weights_sha256:
        raise RunError(
            f"{path} does not hold the weights that config.json names.",
            why=f"The run starts from {config.prior.name}, {(config.prior.weights_sha256 or '')[:12]}….",
            remedy="Restore it, or train again into a new --out.",
        )
    return tensors


def _missing_network_error(config: RunConfig) -> SettingError:
    return SettingError(
        f"the settings start from the prior {config.prior.name}, which is not here.",
        why="They name its digest; its weights are a file of their own.",
        remedy="Give it: --from PRIOR, or prior=... in Python.",
    )


def model_of_prior(model: TrainedModel) -> TrainedModel | None:
    """Return the prior of a run as a model of its own, untouched by the private data.

    None where the run has no prior, or where its last layer is of other classes.
    """
    if model.config.prior.name is None or model.config.prior.new_head:
        return None
    start, network = read_start(model.config, model.run), copy.deepcopy(model.network)
    assert start is not None
    put_start(network, start, new_head=False)
    # What the method keeps besides the weights may come from the private data.
    method_of(model.config).register_buffers(network)
    network.to(model.network.device, model.network.dtype)
    network.calibrate()
    return replace(model, network=network, weights_sha256=model.config.prior.weights_sha256 or "")


def fresh_network(config: RunConfig, info: DatasetInfo, seeds: Seeds, given: nn.Module | None) -> Classifier:
    """Return a network with random weights, or a copy of the one handed over; nothing of the method is in it yet."""
    given = None if given is None else hand_over(given, info.input_shape, info.num_classes)
    if given is None:
        network = build(config.model, info.input_shape, info.num_classes, seeds.generator("initial weights"))
        network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    elif given.num_classes != info.num_classes or given.input_shape != info.input_shape:
        raise ModelError(
            f"your network maps {given.input_shape} to {given.num_classes} classes, the data are "
            f"{info.input_shape} with {info.num_classes}.",
            remedy="Give from_layers the shape of one input, and the output layer one unit per class.",
        )
    else:
        network = copy.deepcopy(given)
    return network


def read_config(run: Run) -> RunConfig:
    """Return the settings that a run was started with."""
    with as_written(run.path / "config.json"):
        return RunConfig.from_dict(StartedRun.read(run).config)


def as_certified(config: RunConfig, document: CertificateSummary) -> RunConfig:
    """Return the settings that certificates were made with, in place of the run's own."""
    return config.replace(
        certification=CertificationConfig.from_dict(document.settings),
        evaluation=config.evaluation.replace(norm=document.kinds[0].norm, radii=document.radii()),
    )


def describe_network(network: Classifier, *, handed_over: bool, parts: TrainedPart | None = None) -> NetworkFacts:
    """Return the facts about a network for people and for `verify`.

    They are its layers, its size, whether it has to be handed over, and what was trained where that is not all.
    """
    layers = tuple(str(layer) for layer in network.modules() if not list(layer.children()))
    count = sum(parameter.numel() for parameter in network.parameters())
    probed: dict[str, Any] = {"probe": _probe(network)} if isinstance(network, HandedOver) else {}
    trained: dict[str, Any] = {"trained": parts.trained, "trained_names": parts.names} if parts else {}
    return NetworkFacts(handed_over=handed_over, layers=layers, parameters=count, **trained, **probed)


@torch.no_grad()
def _probe(network: Classifier) -> tuple[float, ...]:
    """Return the scores of public points: no configuration says what a user's own module computes."""
    return tuple(network(public_points(network, PROBES)).double().flatten().tolist())


_SAME_FUNCTION = 1e-3
"""Of the largest score: far above what another machine's rounding makes, far below what another function makes."""


def _require_same_function(network: Classifier, trained: NetworkFacts | None) -> None:
    """Refuse a module that the weights fit and that computes something else with them than the one trained."""
    if trained is None or trained.probe is None:
        return
    now = _probe(network)
    allowed = _SAME_FUNCTION * max(map(abs, trained.probe), default=0.0)
    if len(now) != len(trained.probe) or any(
        not abs(one - other) <= allowed for one, other in zip(now, trained.probe, strict=True)
    ):
        raise ModelError(
            "the network handed over is another function than the one trained.",
            why="The weights fit it, and on a public probe its scores are not those that training.json has.",
            remedy="Hand over the module that was trained: its code is no part of the run.",
        )


def seeds_of(config: RunConfig, run: Run) -> Seeds:
    """Return the run's seeds: public if asked for, else those in its private folder, else new secret ones."""
    if config.seed is not None:
        return Seeds.reproducible(config.seed)
    if run.has("seeds", private=True):
        with as_written(run.path / PRIVATE / "seeds.json"):
            return Seeds(int(run.read("seeds", private=True)["root"]), public=False)
    return Seeds.secret()


def load(
    run: str | Path, *, network: nn.Module | None = None, device: str | None = None, threads: int | None = None
) -> TrainedModel:
    """Load a trained model. Hand a network of your own over again: a run holds its weights and not its code."""
    directory = Run.at(run)
    directory.require_trained()
    started = StartedRun.read(directory)
    content = {"config": started.config, "dataset": started.dataset.to_dict()}
    if content_hash(content) != started.content_hash:
        raise RunError(
            f"{directory.path / 'config.json'} was changed after the run was started.",
            remedy="Restore it: what the run promises is read from it.",
        )
    with as_written(directory.path / "config.json"):
        config = RunConfig.from_dict(started.config)
        info = DatasetInfo.from_dict(started.dataset.to_dict())
    machine = config.machine.replace(device=device or config.machine.device, threads=threads or config.machine.threads)
    config = config.replace(machine=machine)
    tensors, metadata = read_tensors(directory.model_file)
    training = Training.read(directory)
    if not metadata.get("config_hash") == started.training_hash == config.training_hash:
        raise RunError(f"{directory.model_file} belongs to another run.", remedy="Restore it or train again.")
    built = plain_network(config, info, Seeds.reproducible(0), network)
    the_plan = make_plan(config, info, built)
    try:
        built.load_state_dict(tensors)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise ModelError(
            f"the weights do not fit the network: {reason}", remedy="Hand over the same network."
        ) from None
    weights_sha256 = tensors_sha256(directory.model_file.read_bytes())
    _require_own_weights(directory, training, weights_sha256)
    method_of(config).restore(built, directory.path, config.training_hash)
    built.to(use_device(config.machine)).eval().requires_grad_(False)
    built.calibrate()
    _require_same_function(built, training.network)
    accounted = 0
    if training.accounted_steps is not None:
        accounted = require_possible_count(training.accounted_steps, training.steps, directory.path)
    recorded = the_plan.recorded(training.rounds or {}, training.excluded or {})
    return TrainedModel(built, config, recorded, directory, accounted, info.class_names, weights_sha256)


def _require_own_weights(run: Run, training: Training, weights_sha256: str) -> None:
    """Refuse weights and private tensors that this training did not leave; old trainings have no digests to ask."""
    if training.weights_sha256 not in (None, weights_sha256):
        raise RunError(
            f"{run.model_file} does not hold the weights that training.json names.",
            remedy="Restore both files, or train again.",
        )
    for name, commitment in training.private_files.items():
        path = run.path / PRIVATE / name
        if path.exists() and commit(run, path.read_bytes()) not in (None, commitment):
            raise RunError(f"{path} belongs to another training.", remedy="Restore the run's own, or train again.")


def require_weights(model: TrainedModel, weights_sha256: str | None, name: str, verb: str) -> None:
    """Refuse a document about other weights. Only a run from before there were digests may hold one without."""
    unnamed = Training.read(model.run).weights_sha256 is None
    if weights_sha256 not in (model.weights_sha256, *((None,) if unnamed else ())):
        raise RunError(
            f"{model.run.path / name} is about other weights than {model.run.model_file.name}.",
            remedy=f"Make it again: `{model.run.command(verb)}`.",
        )
