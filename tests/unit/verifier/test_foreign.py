"""A certificate that is not built in says whose it is, and answers of a wrong form are refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stobatch.bounds import BoundCertificates
from stobatch.config import RunConfig
from stobatch.data import Examples
from stobatch.errors import ModelError
from stobatch.evaluation.certify import _rows_by
from stobatch.methods import make_verifiers, verifiers_of
from stobatch.models import Layered
from stobatch.prediction import PictureRule, predictions
from stobatch.registry import CERTIFICATES, METHODS
from stobatch.sound.method import Sound
from stobatch.sound.settings import SoundConfig
from stobatch.types import PAPER_RANGE, Norm, Radius, Status
from stobatch.verifier import CertificateKind, ForeignVerifier, Verifier
from tests.support.small_records import small_config

KIND = CertificateKind(
    "mine", Status.PROVED, "my own theorem", Radius(1.0, Norm.LINF, PAPER_RANGE), 0.0, function="single_pass"
)
SOURCE = "my own theorem, by code registered in this process, not checked by stobatch"
Arrays = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


class Mine(Verifier):
    """Certifies what it is told to."""

    kinds = (KIND,)

    def __init__(self, network: Layered, change: Callable[[Arrays], Arrays]) -> None:
        self.network, self.change = network, change

    def verify(self, inputs: Tensor, generator: torch.Generator) -> BoundCertificates:
        label, radius = self.change((np.zeros(len(inputs), dtype=np.int64), np.full(len(inputs), 0.4)))
        return BoundCertificates(label, radius, KIND)


def fail(answers: Arrays) -> Arrays:
    raise RuntimeError("first line\nsecond line")


FAULTS: dict[str, Callable[[Arrays], Arrays]] = {
    "It gives the radius nan": lambda a: (a[0], a[1] * np.nan),
    "It gives the radius inf": lambda a: (a[0], a[1] * np.inf),
    "It gives the radius -0.4": lambda a: (a[0], -a[1]),
    "Its column 'radius' has the shape \\(4,\\), for 5 inputs": lambda a: (a[0], a[1][:-1]),
    "Its column 'label' has the shape \\(4,\\), for 5 inputs": lambda a: (a[0][:-1], a[1]),
    "It gives labels that are not whole numbers from 0 to 2": lambda a: (a[0] + 99, a[1]),
    "It fails with RuntimeError: first line second line": fail,
}


def network() -> Layered:
    return Layered([nn.Flatten(), nn.Linear(6, 3)], (1, 2, 3)).requires_grad_(False)


def made(monkeypatch: pytest.MonkeyPatch, change: Callable[[Arrays], Arrays] = lambda a: a) -> Verifier:
    monkeypatch.setitem(CERTIFICATES, "mine", lambda config, plan, network: Mine(network, change))
    (verifier,) = make_verifiers(("mine",), small_config(), None, network())  # type: ignore[arg-type]
    return verifier


def certify(verifier: Verifier) -> object:
    part = Examples(torch.zeros(5, 1, 2, 3), torch.zeros(5, dtype=torch.int64), 3)
    return _rows_by(verifier)(part, torch.Generator(), lambda share: None)


def predict(verifier: Verifier) -> object:
    pictures = [(str(row), torch.zeros(1, 2, 3)) for row in range(5)]
    return list(predictions(verifier.network, ("a", "b", "c"), verifier, pictures, PictureRule()))


def serve(verifier: Verifier) -> object:
    search = verifier.search(torch.zeros(5, 1, 2, 3), torch.Generator(), farthest=True, anytime=False)
    search.step()
    return search.read()


@pytest.mark.parametrize("ask", [certify, predict, serve])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_one_line_that_names_the_certificate(
    fault: str, ask: Callable[[Verifier], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier = made(monkeypatch, FAULTS[fault])
    with pytest.raises(ModelError, match=fault) as caught:
        ask(verifier)
    assert "the certificate 'mine' of code registered in this process cannot be used." in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("ask", [certify, predict, serve])
def test_answers_without_fault_pass_as_they_are(
    ask: Callable[[Verifier], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier = made(monkeypatch)
    assert [kind.source for kind in verifier.kinds] == [SOURCE]
    assert verifier.draws_nothing
    assert ask(verifier)


def test_what_fails_when_it_is_made_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CERTIFICATES, "mine", lambda config, plan, network: 1 // 0)
    with pytest.raises(ModelError, match=r"certificate 'mine' of code .* It fails with ZeroDivisionError"):
        make_verifiers(("mine",), small_config(), None, network())  # type: ignore[arg-type]


def test_a_foreign_methods_own_verifiers_are_attributed_and_the_librarys_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class ForeignConfig(SoundConfig, name="foreign_method"):
        """Settings of a method of one's own."""

    class Foreign(Sound):
        config_class = ForeignConfig

        def verifiers(self, config: RunConfig, plan: Any, network: Any) -> tuple[Verifier, ...]:
            return Mine(network, lambda a: a), *super().verifiers(config, plan, network)

    monkeypatch.setitem(METHODS, "foreign_method", Foreign())
    config = small_config().replace(method=ForeignConfig())
    mine, bounds = verifiers_of(config, None, network())  # type: ignore[arg-type]
    assert mine.kinds[0].source == SOURCE
    assert not isinstance(bounds, ForeignVerifier)
    assert all(not isinstance(way, ForeignVerifier) for way in verifiers_of(small_config(), None, network()))  # type: ignore[arg-type]
