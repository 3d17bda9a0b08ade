"""The sound method's certificates: bounds of the network itself, votes of it under noise, and the best of both.

They speak of different functions. Bounds are about the network as it is, without any noise; votes are about the class
that it names most often under noise. A model is deployed as one or the other, so one of them is chosen for all inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stobatch.attacks.expectation import Sample
from stobatch.bounds.certifier import BoxCertifier
from stobatch.models import Classifier
from stobatch.models.validators import unchanged
from stobatch.results import Chosen
from stobatch.types import PAPER_RANGE, Norm, Radius, Status
from stobatch.verifier import CertificateKind, Flags, Labels, Verifier, require_same_scores
from stobatch.votes.confidence import Floats
from stobatch.votes.counting import SmoothedClassifier, VoteCertificates, VoteSettings
from stobatch.votes.noise import SmoothingNoise
from stobatch.votes.soft import vote_samples

_BOUND_ASSUMPTIONS = (
    "the deployed pass is a call of the saved network, without hooks, in float32: sums of products in any order, fused "
    "or not; no TF32, half precision, quantisation, Winograd (NNPACK, cuDNN) or FFT",
    "every output depends on its own input alone",
)
_PILOT = 100
"""Inputs on which two ways to certify are compared."""


@dataclass(frozen=True)
class BoundCertificates:
    """What bounds say about a batch: the network's own label, and the largest radius asked about that is proved."""

    label: Labels
    radius: Floats

    @property
    def abstain(self) -> Flags:
        return np.zeros(len(self.label), dtype=bool)

    def columns(self) -> dict[str, NDArray[Any]]:
        return {"label": self.label, "abstain": self.abstain, "radius": self.radius}


@final
class BoundsVerifier(Verifier):
    """Interval and linear bounds of a stack of layers: deterministic, and certain.

    **Guarantee.** No input of [-1, 1] within `radius` of the given one, in the norm asked about, gets another label
    from the deployed float32 pass. Bounds are for l-infinity balls; an l1 or l2 ball lies in the l-infinity ball of the
    same radius. The radius is the largest of those asked about that holds, 0 if none does.
    """

    def __init__(self, network: Classifier, norm: Norm, radii: Sequence[float], memory_mb: int) -> None:
        self.network, self.norm, self.radii = network, norm, tuple(sorted(set(radii)))
        self.certifier = BoxCertifier.of(network, memory_mb)

    @property
    def kinds(self) -> tuple[CertificateKind, ...]:
        source = "interval and linear bounds, docs/guarantees.md, section 5"
        inside = "" if self.norm is Norm.LINF else "; the ball lies inside the l-infinity ball of the same radius"
        unit = Radius(1.0, self.norm, PAPER_RANGE)
        return (
            CertificateKind(
                "bounds", Status.PROVED, source + inside, unit, 0.0, _BOUND_ASSUMPTIONS, function="single_pass"
            ),
        )

    def verify(self, inputs: Tensor, generator: torch.Generator) -> BoundCertificates:
        holds = self.certifier.certified_at(inputs, self.radii)
        # From small to large, what fails at one radius is not claimed at a larger one.
        sizes = torch.tensor((0.0, *self.radii), dtype=torch.float64)
        label = self.certifier.predict(inputs)
        return BoundCertificates(label.cpu().numpy(), sizes[holds.sum(1).cpu()].numpy())


@final
class VotesVerifier(Verifier):
    """The most frequent class under fresh noise (randomised smoothing); what is deployed is that vote.

    **Guarantee.** As `SmoothedClassifier`: each input's certificate fails with probability at most
    failure_probability, over the draws.
    """

    def __init__(
        self,
        network: Classifier,
        behind_noise: Callable[[Tensor], Tensor],
        noise: SmoothingNoise,
        norm: Norm,
        radii: Sequence[float],
        settings: VoteSettings,
        *,
        stop_early: bool,
    ) -> None:
        self.network, self.behind_noise, self.noise, self.norm = network, behind_noise, noise, norm
        self.radii = tuple(sorted(set(radii)))
        self.settings, self.stop_early = settings, stop_early
        self.classifier = SmoothedClassifier(behind_noise, noise, network.num_classes, settings)

    @property
    def kinds(self) -> tuple[CertificateKind, ...]:
        found = next(kind for kind in self.classifier.kinds if kind.unit.norm is self.norm)
        source = "randomised smoothing by vote, docs/guarantees.md, section 6"
        return (
            CertificateKind(
                *("votes", found.status, source, found.unit, found.failure_probability, found.assumptions),
                column=f"radius_{self.norm}",
            ),
        )

    def with_draws(self, draws: int) -> VotesVerifier:
        settings = self.settings.replace(draws=draws)
        return VotesVerifier(
            self.network, self.behind_noise, self.noise, self.norm, self.radii, settings, stop_early=self.stop_early
        )

    def verify(self, inputs: Tensor, generator: torch.Generator) -> VoteCertificates:
        asked = [Radius(size, self.norm, PAPER_RANGE) for size in (0.0, *self.radii)]
        inputs = inputs.to(self.network.device)
        with unchanged(self.network):
            found = self.classifier.certify(inputs, generator, asked if self.stop_early else None)
            rows = self.settings.rows_at_once
            require_same_scores(self.network, lambda part: self.behind_noise(self.noise.seen(part)), inputs, rows)
        return found

    def samples(self) -> dict[str, Sample]:
        return vote_samples(self.network, self.behind_noise, self.noise)


def best_of(verifiers: Sequence[Verifier], inputs: Tensor, radii: Sequence[float]) -> tuple[Verifier, Chosen | None]:
    """The way that proves the larger radii on the first inputs, and what was compared; labels are not looked at."""
    radii = sorted(radii)
    if len(verifiers) == 1:
        return verifiers[0], None
    few, means = inputs[:_PILOT], []
    for verifier in verifiers:
        found = verifier.verify(few, torch.Generator().manual_seed(1)).columns()
        # Bounds are known at the radii asked about only, so votes are rounded down to them as well.
        steps = np.array((0.0, *radii))
        proved = steps[np.searchsorted(steps, found[verifier.kinds[0].column], side="right") - 1]
        means.append(float(proved.mean()))
    best = verifiers[int(np.argmax(means))]
    names = [verifier.kinds[0].name for verifier in verifiers]
    return best, Chosen(
        certificate=best.kinds[0].name,
        mean_radius=dict(zip(names, means, strict=True)),
        compared_on=f"the first {len(few)} inputs, without their labels",
    )
