"""What every training method offers: a plan before data, something to train, and certificates afterwards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from stobatch.bounds.certifier import why_unbounded
from stobatch.config import MethodConfig, RunConfig
from stobatch.data import DatasetInfo, Examples, TrainingExamples
from stobatch.dp.plan import Plan
from stobatch.errors import ModelError, SettingError
from stobatch.models import AffineEncoder, Classifier, HandedOver, Network, build_encoder, require_per_example
from stobatch.registry import CERTIFICATES, METHODS
from stobatch.seeds import Seeds
from stobatch.training import Trainable
from stobatch.training.loop import ManyModels
from stobatch.training.trainable import working_precision
from stobatch.verifier import ForeignVerifier, Verifier, guarded


@dataclass(frozen=True)
class Tuples:
    """A few training tuples; the last one is where two neighbouring data sets differ."""

    inputs: Tensor
    labels: Tensor


class Release(ABC):
    """One intermediate result that a proof calls private, with an attacker who looks at nothing else."""

    name: str
    source: str
    """Which statement says that it is private."""
    attack: str

    @abstractmethod
    def score(self, own: Tuples, pair: tuple[Tuples, Tuples], seeds: Seeds) -> float:
        """Draw the release of `own`, one of the pair, and say how much it looks like the second rather than the first.

        The attacker knows the pair and every public number; not the noise, and not which of the two it is.
        """


class Method(ABC):
    """One way to train. Stateless: everything a run needs is in its configuration and its directory."""

    config_class: ClassVar[type[MethodConfig]]
    has_trainers: ClassVar[bool] = False
    """Whether `trainers` divides its data among owners; the published method's trainers follow from its batches."""
    trains_parts: ClassVar[bool] = False
    """Whether it can leave parameters as they are, train adapters next to them, and start from given weights."""
    takes_prior: ClassVar[bool] = False
    """Whether it can start from given weights, where it trains no parts."""
    certificates: ClassVar[tuple[str, ...]] = ()
    """Names of the ways to certify that `verifiers` itself looks at, and takes the best of."""

    @abstractmethod
    def plan(self, config: RunConfig, info: DatasetInfo, network: Classifier | None) -> Plan:
        """Return every number that a guarantee depends on, from public sizes only; raises what is impossible.

        `network` is one that was handed over; without it the configuration says what will be built.
        """

    @abstractmethod
    def prepare(
        self, config: RunConfig, plan: Plan, network: Classifier, train: TrainingExamples, seeds: Seeds
    ) -> Trainable:
        """Bind the method to data: check the network, draw what is private, perturb the inputs. Writes nothing."""

    def register_buffers(self, network: Classifier) -> None:
        """Add to a fresh network what the method keeps in the model besides its weights."""
        return

    def restore(self, network: Classifier, run: Path, config_hash: str) -> None:
        """Give a loaded network what its deployment needs besides its weights: nothing, by default."""
        return

    def certifies(self, config: RunConfig) -> bool:
        """Return whether there is verified inference for what this method trains with these settings."""
        return True

    def releases(self, plan: Plan) -> tuple[Release, ...]:
        """Return what the method's proof says is released on the way, each to be attacked by itself."""
        return ()

    def stack(
        self,
        config: RunConfig,
        plan: Plan,
        networks: Sequence[Classifier],
        pool: Examples,
        members: Tensor,
        seeds: Sequence[Seeds],
    ) -> ManyModels | None:
        """Return models on the examples `pool[members]`, a row each, trained in the same passes; None if it cannot."""
        return None

    @abstractmethod
    def verifiers(self, config: RunConfig, plan: Plan, network: Classifier) -> tuple[Verifier, ...]:
        """Return the method's own ways to certify, for the norm and radii of the evaluation; at least one."""


class UncertifiedMethod(Method):
    """A method without a certificate: there is no verified inference for what it trains."""

    title: ClassVar[str]
    why_uncertified: ClassVar[str] = ""

    def certifies(self, config: RunConfig) -> bool:
        return False

    def verifiers(self, config: RunConfig, plan: Plan, network: Classifier) -> tuple[Verifier, ...]:
        raise ModelError(
            f"{self.title} has no certificate.",
            why=self.why_uncertified,
            remedy="Evaluate it with `stobatch evaluate`, or train a method with certificates.",
        )


def method_of(config: RunConfig) -> Method:
    """Return the method that a configuration names."""
    method: Method = METHODS[config.method.name]
    return method


def can_certify(config: RunConfig, network: Classifier | None) -> bool:
    """Return whether `verifiers_of` has a way to certify this network trained with these settings, or will try one."""
    method = method_of(config)
    follows = isinstance(network, HandedOver) and "bounds" in method.certificates and not why_unbounded(network)
    return _names_other_certificate(config) or method.certifies(config) or follows


def verifiers_of(config: RunConfig, plan: Plan, network: Classifier) -> tuple[Verifier, ...]:
    """Return the ways to certify a trained network: the method's own, or the one that the settings name instead."""
    if _names_other_certificate(config):
        return make_verifiers((config.certification.certificate,), config, plan, network)
    own, provider = method_of(config).verifiers(config, plan, network), METHODS.provider(config.method.name)
    return own if provider is None else tuple(_attributed(way, config.method.title, provider) for way in own)


def _attributed(verifier: Verifier, method: str, provider: str) -> Verifier:
    """Return a verifier of a method that is not built in, attributed where its class is not this library's."""
    if type(verifier).__module__.partition(".")[0] == "stobatch":
        return verifier
    return ForeignVerifier(verifier, method, provider)


def _names_other_certificate(config: RunConfig) -> bool:
    return config.certification.certificate not in ("best", *method_of(config).certificates)


def make_verifiers(names: Sequence[str], config: RunConfig, plan: Plan, network: Classifier) -> tuple[Verifier, ...]:
    """Return the certificates of these names that have something to say about this network; raises if none has."""
    verifiers = []
    for name in names:
        make, provider = CERTIFICATES.require(name), CERTIFICATES.provider(name)
        with nullcontext() if provider is None else guarded(name, provider):
            verifier = make(config, plan, network)
        if not isinstance(verifier, Verifier | None):
            raise SettingError(
                f"the certificate '{name}' cannot be used.",
                why=f"It is made as a {type(verifier).__name__}, not as a Verifier.",
                remedy="Let its function return a stobatch.verifier.Verifier, or set certification.certificate=best.",
            )
        if verifier is not None:
            verifiers.append(verifier if provider is None else ForeignVerifier(verifier, name, provider))
    if not verifiers:
        wanted = config.certification.certificate
        raise ModelError(
            f"this model has no certificate of the kind '{wanted}'.",
            why="Votes need a model trained with method.smoothing_stddev; bounds need a list of layers without "
            "normalisation, or a network of your own that they can follow; margins need `scatter 8, linear`."
            if wanted in ("best", "bounds", "votes", "margins")
            else f"'{wanted}' has nothing to say about this network, or about radii in {config.evaluation.norm}.",
            remedy="Train with `--recipe sound.mnist`"
            + (", or set certification.certificate=best." if wanted != "best" else "."),
        )
    return tuple(verifiers)


def require_per_example_at_size(config: RunConfig, network: Classifier, rows: int) -> None:
    """Repeat the experiments on mixing with as many rows as training passes, in the precision that it uses."""
    with working_precision(config.machine.precision, network.device):
        require_per_example(network, rows)


def split_network(network: Classifier, method: str) -> Network:
    """Return the network in two parts: some methods put noise between its first affine layer and the rest."""
    if not isinstance(network, Network):
        raise _unfit_error(method, f"a {network.name if isinstance(network, HandedOver) else type(network).__name__}")
    return network


def encoder_of(config: RunConfig, info: DatasetInfo, network: Classifier | None, method: str) -> AffineEncoder:
    """Return the first affine layer, handed over or to be built: all that a plan needs to know."""
    if network is not None:
        return split_network(network, method).encoder
    if config.model.layers is not None:
        raise _unfit_error(method, "a list of layers")
    return build_encoder(config.model, info.input_shape)


def _unfit_error(method: str, kind: str) -> ModelError:
    return ModelError(
        f"{method} cannot train {kind}.",
        why="It needs the first affine layer apart from the rest.",
        remedy="Use one of the paper's networks, as model.architecture=mnist_cnn, or stobatch.models.from_layers.",
    )
