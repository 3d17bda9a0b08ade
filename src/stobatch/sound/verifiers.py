"""The sound method's certificates: bounds of the network itself, votes of it under noise, and the best of both.

They speak of different functions. Bounds are about the network as it is, without any noise; votes are about the class
that it names most often under noise. A model is deployed as one or the other, so one of them is chosen for all inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from stobatch.attacks.expectation import Sample
from stobatch.bounds.branching import PLAIN, Effort
from stobatch.bounds.certifier import BoundCertificates, BoxCertifier, RadiusSearch
from stobatch.bounds.margins import MarginCertifier, margin_kind
from stobatch.config import RunConfig
from stobatch.dp.plan import Plan
from stobatch.errors import ModelError
from stobatch.models import Classifier, HandedOver, Layered, budget_mb, rows_in_memory
from stobatch.models.scattering import Scattering
from stobatch.models.validators import unchanged
from stobatch.results import Chosen
from stobatch.sound.settings import DpSgdSettings
from stobatch.types import PAPER_RANGE, Norm, Radius
from stobatch.verifier import CertificateKind, Search, Verifier, require_same_scores, require_stack
from stobatch.votes.counting import SmoothedClassifier, VoteCertificates, VoteSearch, VoteSettings
from stobatch.votes.noise import GaussianNoise, HiddenGaussian, SmoothingNoise, vote_samples

_FINEST = PAPER_RANGE.width / 2550
"""A tenth of a pixel value: how finely the largest radius is searched for."""
_PILOT = 100
"""Inputs on which two ways to certify are compared."""


@final
class BoundsVerifier(Verifier):
    """Interval and linear bounds of a stack of layers: deterministic, and certain.

    **Guarantee.** No input of [-1, 1] within `radius` of the given one, in the norm asked about, gets another label
    from the deployed float32 pass. Bounds are for l-infinity balls; an l1 or l2 ball lies in the l-infinity ball of the
    same radius. The radius is the largest of those asked about that holds, 0 if none does.
    """

    def __init__(
        self, network: Classifier, norm: Norm, radii: Sequence[float], memory_mb: int, effort: Effort = PLAIN
    ) -> None:
        self.network, self.norm, self.radii = network, norm, tuple(sorted(set(radii)))
        self.certifier = BoxCertifier.of(network, memory_mb, effort)

    @property
    def kinds(self) -> tuple[CertificateKind, ...]:
        return (self.certifier.kind(self._unit),)

    @property
    def _unit(self) -> Radius:
        return Radius(1.0, self.norm, PAPER_RANGE)

    def verify(self, inputs: Tensor, generator: torch.Generator) -> BoundCertificates:
        return self.certifier.certificates(inputs, self.radii, self._unit)

    def verify_farthest(self, inputs: Tensor, generator: torch.Generator) -> BoundCertificates:
        found = self.certifier.certified_radius(
            inputs.to(self.network.device), largest=PAPER_RANGE.width, tolerance=_FINEST
        )
        return BoundCertificates(found.prediction.cpu().numpy(), found.radius.cpu().numpy(), self.kinds[0])

    def search(self, inputs: Tensor, generator: torch.Generator, *, farthest: bool, anytime: bool) -> Search:
        if not farthest and len(self.radii) > 1:
            return super().search(inputs, generator, farthest=farthest, anytime=anytime)
        largest, tolerance = (PAPER_RANGE.width, _FINEST) if farthest else (self.radii[0], self.radii[0])
        return RadiusSearch(self.certifier, inputs, self._unit, largest=largest, tolerance=tolerance)


@final
class MarginsVerifier(Verifier):
    """Margins of a linear layer behind scattering: deterministic, for l2 (`bounds.margins`).

    **Guarantee.** That of `MarginCertifier`; an l1 ball lies in the l2 ball of the same radius, an l-infinity ball in
    one that is larger by the root of the number of pixels.
    """

    def __init__(self, network: Classifier, norm: Norm) -> None:
        self.network, self.norm, self.certifier = network, norm, MarginCertifier(network)

    @property
    def kinds(self) -> tuple[CertificateKind, ...]:
        return (margin_kind(self.norm),)

    def verify(self, inputs: Tensor, generator: torch.Generator) -> BoundCertificates:
        return self.certifier.certificates(inputs, self.norm)


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
            require_same_scores(self.network, lambda part: self.behind_noise(self.noise.noise_free(part)), inputs, rows)
        return found

    def verify_farthest(self, inputs: Tensor, generator: torch.Generator) -> VoteCertificates:
        """Return all draws are made: a vote that stops early knows its radius only up to those asked about."""
        patient = VotesVerifier(
            self.network, self.behind_noise, self.noise, self.norm, self.radii, self.settings, stop_early=False
        )
        return patient.verify(inputs, generator)

    def search(self, inputs: Tensor, generator: torch.Generator, *, farthest: bool, anytime: bool) -> Search:
        inputs = inputs.to(self.network.device)
        with unchanged(self.network):
            rows = self.settings.rows_at_once
            require_same_scores(self.network, lambda part: self.behind_noise(self.noise.noise_free(part)), inputs, rows)
        asked = [Radius(size, self.norm, PAPER_RANGE) for size in (0.0, *self.radii)]
        radii = None if farthest or not self.stop_early else asked
        return VoteSearch(self.classifier, inputs, generator, radii, anytime=anytime)

    def samples(self) -> dict[str, Sample]:
        return vote_samples(self.network, self.behind_noise, self.noise)


def best_of(verifiers: Sequence[Verifier], inputs: Tensor, radii: Sequence[float]) -> tuple[Verifier, Chosen | None]:
    """Return the way that proves the larger radii on the first inputs, and what was compared; labels are not looked
    at.
    """
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


def _asked_about(config: RunConfig) -> tuple[float, ...]:
    return tuple(sorted({*config.evaluation.radii, config.certification.attack_radius}))


def bounds(config: RunConfig, plan: Plan, network: Classifier) -> Verifier | None:
    """Bounds of the network itself; None for one in two parts, with noise between them.

    A network with an operation that has no bounds is refused where they are asked for by name, and passed over else.
    """
    if not isinstance(network, Layered | HandedOver):
        return None
    try:
        settings, norm = config.certification, Norm(config.evaluation.norm)
        effort = Effort(settings.slope_steps, settings.branches)
        return BoundsVerifier(network, norm, _asked_about(config), budget_mb(config.machine), effort)
    except ModelError:
        if settings.certificate == "bounds":
            raise
        return None


def margins(config: RunConfig, plan: Plan, network: Classifier) -> Verifier | None:
    """Margins over the norm of scattering; None for a network that does not start with it."""
    if not isinstance(network, Layered) or not isinstance(network.layers[0], Scattering):
        return None
    try:
        return MarginsVerifier(network, Norm(config.evaluation.norm))
    except ModelError:
        if config.certification.certificate == "margins":
            raise
        return None


def votes(config: RunConfig, plan: Plan, network: Classifier) -> Verifier | None:
    """Votes under the noise that the method trained for; None where it trained for none."""
    settings, method = config.certification, config.method
    noise = method.noise if isinstance(method, DpSgdSettings) else None
    if noise is None:
        return None
    behind: torch.nn.Module = network
    if settings.hidden_stddev:
        first = network.layers[0] if isinstance(network, Layered) else None
        if not isinstance(first, torch.nn.Conv2d | torch.nn.Linear) or not isinstance(noise, GaussianNoise):
            raise ModelError(
                "noise in the first hidden layer needs layers that start with conv or linear, and Gaussian noise.",
                remedy="Set certification.hidden_stddev=0.",
            )
        behind = require_stack(network)[1:]
        noise = HiddenGaussian.behind(
            first, network.input_shape, at_input=noise.stddev, at_hidden=settings.hidden_stddev
        )
    counted = VoteSettings(
        failure_probability=settings.failure_probability,
        selection_draws=settings.selection_draws,
        draws=settings.noise_draws,
        rows_at_once=rows_in_memory(network, budget_mb(config.machine), most=2_000),
    )
    norm = Norm(config.evaluation.norm)
    return VotesVerifier(network, behind, noise, norm, _asked_about(config), counted, stop_early=settings.stop_early)
