"""A radius from the margin and a Lipschitz constant: the product of the layers' l-infinity norms."""

from math import prod

import torch
from torch import Tensor, nn

from stobatch.bounds import BoundCertificates
from stobatch.config import RunConfig
from stobatch.dp.plan import Plan
from stobatch.models import Classifier, Layered
from stobatch.types import PAPER_RANGE, Norm, Radius, Status
from stobatch.verifier import CertificateKind, Verifier, require_stack

NORMS = {nn.ReLU: 1.0, nn.Flatten: 1.0}


def norm_of(layer: nn.Module) -> float | None:
    """By how much a layer can stretch an l-infinity distance; None where this file does not know."""
    if isinstance(layer, nn.Conv2d | nn.Linear):
        return float(layer.weight.detach().double().abs().flatten(1).sum(1).max())
    return NORMS.get(type(layer))


class LipschitzVerifier(Verifier):
    """**Guarantee.** Scores move by at most the constant times the distance, so a label with a margin of m keeps it
    within m / (2 · constant), in exact arithmetic."""

    def __init__(self, network: Layered, constant: float) -> None:
        self.network, self.constant = network, constant

    @property
    def kinds(self) -> tuple[CertificateKind, ...]:
        unit, source = Radius(1.0, Norm.LINF, PAPER_RANGE), "margin over twice the product of the layers' norms"
        assumed = ("exact arithmetic",)
        return (CertificateKind("lipschitz", Status.PROVED, source, unit, 0.0, assumed, function="single_pass"),)

    @torch.no_grad()
    def verify(self, inputs: Tensor, generator: torch.Generator) -> BoundCertificates:
        scores = self.network(inputs.to(self.network.device, self.network.dtype)).double().cpu()
        (first, second), label = scores.topk(2).values.unbind(1), scores.argmax(1)
        radius = (first - second) / (2 * self.constant)
        return BoundCertificates(label.numpy(), radius.numpy(), *self.kinds)


def lipschitz(config: RunConfig, plan: Plan, network: Classifier) -> Verifier | None:
    """The function that the entry point names; None where there is nothing to say about such a model."""
    if not isinstance(network, Layered) or config.evaluation.norm != Norm.LINF:
        return None
    norms = [norm_of(layer) for layer in require_stack(network)]
    known = [norm for norm in norms if norm is not None]
    return LipschitzVerifier(network, prod(known)) if len(known) == len(norms) else None
