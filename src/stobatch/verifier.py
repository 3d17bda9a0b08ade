"""What every way to certify offers: a label for each input, how far it holds, and who vouches for that."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from stobatch.attacks.expectation import Sample
from stobatch.errors import ModelError, StobatchError
from stobatch.models import Classifier, Layered
from stobatch.models.classifier import in_mode
from stobatch.registry import one_line
from stobatch.types import Radius, Status

ASSUMPTIONS = (
    "exact arithmetic",
    "ideal random numbers",
    "every output depends on its own input alone (checked by experiment)",
)

Flags = NDArray[np.bool_]
Labels = NDArray[np.int64]


@dataclass(frozen=True)
class CertificateKind:
    """What a column of radii means: who vouches for it, for which function, in which units, how often it may fail."""

    name: str
    status: Status
    source: str
    unit: Radius
    failure_probability: float | None
    assumptions: tuple[str, ...] = ()
    function: str = "vote"
    column: str = "radius"
    """The column of records that holds the radii."""


@dataclass(frozen=True)
class Certificate:
    """The answer for one input: a label, how far it holds, and who vouches for that.

    >>> print(Certificate(3, False, Radius(0.1), Status.PROVED, 0.0))
    class 3 within linf 0.1 over [-1, 1] (proved)
    """

    label: int
    abstain: bool
    radius: Radius
    status: Status
    failure_probability: float
    """The chance, over the draws of noise, that it is wrong; 0 where nothing is drawn."""

    def __str__(self) -> str:
        if self.abstain:
            return "abstains: no label was proved"
        often = f", wrong with probability at most {self.failure_probability:g}" if self.failure_probability else ""
        return f"class {self.label} within {self.radius} ({self.status}{often})"


class Certificates(Protocol):
    """Answers for a batch of inputs; every column has one entry per input."""

    @property
    def label(self) -> Labels: ...

    @property
    def abstain(self) -> Flags: ...

    def columns(self) -> dict[str, NDArray[Any]]:
        """Return all of them, by name; the radii under the names that the kinds of certificate say."""


class Search(ABC):
    """Certificates of a batch that are worked out step by step, so that a deadline can be kept."""

    @abstractmethod
    def step(self) -> bool:
        """Do a little of the work; return whether any is left."""

    @abstractmethod
    def read(self) -> Certificates:
        """Return what is proved by now; after the first step."""

    @abstractmethod
    def drop(self, rows: slice) -> None:
        """Spend no more work on these rows, if that is possible; they may still be read."""


class WholeSearch(Search):
    """Certificates that come all at once."""

    def __init__(self, verify: Callable[[Tensor, torch.Generator], Certificates], *given: Any) -> None:
        self._verify, self._given = verify, given

    def step(self) -> bool:
        self._certificates = self._verify(*self._given)
        return False

    def read(self) -> Certificates:
        return self._certificates

    def drop(self, rows: slice) -> None:
        pass


class Verifier(ABC):
    """One way to certify a network's answers."""

    network: Any
    """The classifier whose answers are certified."""

    @property
    @abstractmethod
    def kinds(self) -> tuple[CertificateKind, ...]:
        """Return what the columns of radii mean."""

    @abstractmethod
    def verify(self, inputs: Tensor, generator: torch.Generator) -> Certificates:
        """Return label, abstention and radii for each input in [-1, 1]."""

    def verify_farthest(self, inputs: Tensor, generator: torch.Generator) -> Certificates:
        """Return the same with radii as large as this way can prove; `verify` looks at those asked about alone."""
        return self.verify(inputs, generator)

    def search(self, inputs: Tensor, generator: torch.Generator, *, farthest: bool, anytime: bool) -> Search:
        """Return the work of `verify_farthest`, or of `verify`, in steps; `anytime`: it may be read before the end.

        That has to be said before the first draw: a number of draws that was not fixed then needs other bounds.
        """
        return WholeSearch(self.verify_farthest if farthest else self.verify, inputs, generator)

    @property
    def draws_nothing(self) -> bool:
        """Return whether an answer depends on its input alone, so that inputs of several people may pass together."""
        return all(kind.failure_probability == 0 for kind in self.kinds)

    @property
    def function(self) -> str:
        """Return what has to be deployed for the certificates to hold."""
        return self.kinds[0].function

    def with_draws(self, draws: int) -> Verifier:
        """Return the same with another number of draws; for what draws nothing, itself."""
        return self

    def samples(self) -> dict[str, Sample]:
        """Return what an attacker of a vote differentiates, by name; empty where nothing is drawn."""
        return {}

    passes_per_draw: int = 1


@contextmanager
def guarded(name: str, provider: str) -> Iterator[None]:
    """Turn what the code of a foreign certificate raises into an error of one line that names the certificate."""
    try:
        yield
    except StobatchError:
        raise
    except Exception as error:  # code from elsewhere may raise anything
        raise _foreign_error(name, provider, f"It fails with {one_line(error)}.") from error


def _foreign_error(name: str, provider: str, why: str) -> ModelError:
    return ModelError(
        f"the certificate '{name}' of {provider} cannot be used.",
        why=why,
        remedy="Mend it, or set certification.certificate=best.",
    )


def _fault(found: Certificates, rows: int, kinds: tuple[CertificateKind, ...], classes: int) -> str:
    """Return what is wrong with the form of answers for this many inputs; an empty string if nothing is."""
    columns = {name: np.asarray(column) for name, column in found.columns().items()}
    columns |= {"label": np.asarray(found.label), "abstain": np.asarray(found.abstain)}
    for name, column in columns.items():
        if column.shape != (rows,):
            return f"Its column '{name}' has the shape {column.shape}, for {rows} inputs."
    label = columns["label"]
    if label.dtype.kind not in "iu" or not ((label >= 0) & (label < classes)).all():
        return f"It gives labels that are not whole numbers from 0 to {classes - 1}."
    for kind in kinds:
        radii = columns[kind.column]
        wrong = radii[~(np.isfinite(radii) & (radii >= 0))]
        if len(wrong):
            return f"It gives the radius {wrong[0]:g}; a radius is finite and at least 0."
    return ""


class ForeignVerifier(Verifier):
    """A way to certify that is not built in: it says whose it is, and answers of a wrong form are refused.

    **Guarantee.** Every answer has a label of the network's classes and finite radii of at least 0. That a radius holds
    is the word of those who wrote it: nothing here checks their proof.
    """

    def __init__(self, own: Verifier, name: str, provider: str) -> None:
        self.own, self.name, self.provider = own, name, provider
        with self.guarded():
            self.network, self.passes_per_draw = own.network, own.passes_per_draw
            self._kinds = tuple(
                replace(kind, source=f"{kind.source}, by {provider}, not checked by stobatch") for kind in own.kinds
            )

    @property
    def kinds(self) -> tuple[CertificateKind, ...]:
        return self._kinds

    def verify(self, inputs: Tensor, generator: torch.Generator) -> Certificates:
        with self.guarded():
            return self.checked(self.own.verify(inputs, generator), len(inputs))

    def verify_farthest(self, inputs: Tensor, generator: torch.Generator) -> Certificates:
        with self.guarded():
            return self.checked(self.own.verify_farthest(inputs, generator), len(inputs))

    def search(self, inputs: Tensor, generator: torch.Generator, *, farthest: bool, anytime: bool) -> Search:
        with self.guarded():
            search = self.own.search(inputs, generator, farthest=farthest, anytime=anytime)
        return _ForeignSearch(self, search, len(inputs))

    @property
    def draws_nothing(self) -> bool:
        return self.own.draws_nothing

    def with_draws(self, draws: int) -> Verifier:
        return ForeignVerifier(self.own.with_draws(draws), self.name, self.provider)

    def samples(self) -> dict[str, Sample]:
        return self.own.samples()

    def checked(self, found: Certificates, rows: int) -> Certificates:
        """Return the answers for this many inputs; raises where their form is wrong."""
        if fault := _fault(found, rows, self.kinds, self.network.num_classes):
            raise _foreign_error(self.name, self.provider, fault)
        return found

    def guarded(self) -> AbstractContextManager[None]:
        return guarded(self.name, self.provider)


class _ForeignSearch(Search):
    """The steps of a foreign verifier, its answers checked like those that come all at once."""

    def __init__(self, verifier: ForeignVerifier, search: Search, rows: int) -> None:
        self._verifier, self._search, self._rows = verifier, search, rows

    def step(self) -> bool:
        with self._verifier.guarded():
            return self._search.step()

    def read(self) -> Certificates:
        with self._verifier.guarded():
            return self._verifier.checked(self._search.read(), self._rows)

    def drop(self, rows: slice) -> None:
        with self._verifier.guarded():
            self._search.drop(rows)


_CALLS = ("__call__", "_wrapped_call_impl", "_call_impl")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_AGREEMENT = 1e-3
"""Of the largest score: far above what another order of float32 sums makes, far below what another function makes."""
_REMEDY = "Certify a stobatch.models.Layered that is made of the layers and is called as it is."


def require_stack(network: nn.Module) -> nn.Sequential:
    """Return the layers whose composition a call of the network computes; raises unless that is certain.

    Of the class itself: a subclass may compute anything.
    """
    if type(network) is not Layered:
        raise ModelError(
            f"the network is a {type(network).__name__}, not a plain stack of layers.",
            why="Bounds follow the layers, and its forward may compute something else.",
            remedy=_REMEDY,
        )
    require_unaltered("the network", network)
    return network.layers


def require_unaltered(name: str, module: nn.Module) -> None:
    """Raise if a call of the module may compute something else than its class's `forward` of its parameters."""
    kind = type(module)
    alterations = {
        "a hook": any(getattr(module, hooks) for hooks in _HOOKS),
        "a hook on all modules": any(getattr(torch_module, f"_global{hooks}", None) for hooks in _HOOKS),
        "a call of its own": any(getattr(kind, call) is not getattr(nn.Module, call) for call in _CALLS),
        "a compiled call": getattr(module, "_compiled_call_impl", None) is not None,
        # An attribute of the instance hides a method, a parameter or a layer of the same name.
        "an attribute in place of a method or a parameter": any(
            callable(getattr(kind, key, None)) or any(key in held for held in _held_tensors(module))
            for key in vars(module)
        ),
    }
    for what, is_there in alterations.items():
        if is_there:
            raise ModelError(
                f"{name} has {what}.",
                why="What a call computes is then not what its layers say, and the certificate is about the call.",
                remedy=_REMEDY,
            )


def _held_tensors(module: nn.Module) -> tuple[dict[str, object], ...]:
    return module._parameters, module._buffers, module._modules  # type: ignore[return-value]


@torch.no_grad()
def require_same_scores(
    network: Classifier, certified: Callable[[Tensor], Tensor], inputs: Tensor, rows_at_once: int
) -> None:
    """Raise unless the network itself, called as it is and in evaluation, gives these inputs the certified scores.

    `certified` is the function that is certified, its noise left out. Votes assume exact arithmetic, so scores may
    differ by rounding; a difference of functions is a thousand times that.
    """
    for part in torch.split(inputs.to(network.device, network.dtype), rows_at_once):
        # NaN scores are another error, which comes later.
        expected = certified(part.clone()).nan_to_num()
        allowed = _AGREEMENT * expected.abs().max()
        computed = {"the network that is called": network(part.clone())}
        if any(module.training for module in network.modules()):
            with in_mode(network, training=False):
                computed["the network in evaluation mode"] = network(part.clone())
        for which, scores in computed.items():
            if scores.shape != expected.shape or not bool(((scores.nan_to_num() - expected).abs() <= allowed).all()):
                raise ModelError(
                    f"{which} gives other scores than the function that is certified.",
                    why="A forward of its own, a hook or a mode makes it another function than its parts.",
                    remedy="Certify the network whose calls are deployed, without hooks, in evaluation mode.",
                )
