"""Verifiers of DP-SGD methods: bounds of the network itself, votes under noise, and the choice between them.

They certify different functions. Bounds are about the network itself, without any noise; votes are about the class that
it predicts most often under noise. A model is deployed as one or the other, so one of them is chosen for all inputs.
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
"""A tenth of a pixel value: the resolution of the search for the largest radius."""
_PILOT = 100
"""Inputs on which verifiers are compared."""


@final
class BoundsVerifier(Verifier):
    """Interval and linear bounds of the network: deterministic.

    **Guarantee.** No input of [-1, 1] within `radius` of the given one, in `norm`, gets another label from the deployed
    float32 pass. Bounds are for l-infinity balls; an l1 or l2 ball lies in the l-infinity ball of the same radius. The
    radius is the largest of `radii` that is proved, 0 if none is.
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
        label, radius = self.certifier.certified_radius(
            inputs.to(self.network.device), largest=PAPER_RANGE.width, tolerance=_FINEST
        )
        return BoundCertificates(label.cpu().numpy(), radius.cpu().numpy(), self.kinds[0])

    def search(self, inputs: Tensor, generator: torch.Generator, *, farthest: bool, anytime: bool) -> Search:
        if not farthest and len(self.radii) > 1:
            return super().search(inputs, generator, farthest=farthest, anytime=anytime)
        largest, tolerance = (PAPER_RANGE.width, _FINEST) if farthest else (self.radii[0], self.radii[0])
        return RadiusSearch(self.certifier, inputs, self._unit, largest=largest, tolerance=tolerance)


@final
class MarginsVerifier(Verifier):
    """Margins of a linear layer behind scattering: deterministic, for l2 and l-infinity (`bounds.margins`).

    **Guarantee.** As for `MarginCertifier`; an l1 ball lies in the l2 ball of the same radius.
    """

    def __init__(self, network: Classifier, norm: Norm, radii: Sequence[float]) -> None:
        self.network, self.norm, self.radii = network, norm, tuple(radii)
        self.certifier = MarginCertifier(network)

    @property
    def kinds(self) -> tuple[CertificateKind, ...]:
        return (margin_kind(self.norm),)

    def verify(self, inputs: Tensor, generator: torch.Generator) -> BoundCertificates:
        return self.certifier.certificates(inputs, self.norm, self.radii)

    def verify_farthest(self, inputs: Tensor, generator: torch.Generator) -> BoundCertificates:
        return self.certifier.certificates(inputs, self.norm)

    def radius_at(self, inputs: Tensor, radius: float) -> float:
        """Return what is proved of one input, at most effort for this radius and for the largest."""
        return max(float(self.certifier.certificates(inputs, self.norm, of).radius[0]) for of in ([radius], None))


@final
class VotesVerifier(Verifier):
    """The most frequent class under fresh noise (randomised smoothing); what is deployed is that vote.

    **Guarantee.** As for `SmoothedClassifier`: each input's certificate fails with probability at most
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
        own = next(kind for kind in self.classifier.kinds if kind.unit.norm is self.norm)
        source = "randomised smoothing by vote, docs/guarantees.md, section 6"
        return (
            CertificateKind(
                *("votes", own.status, source, own.unit, own.failure_probability, own.assumptions),
                column=f"radius_{self.norm}",
            ),
        )

    def with_draws(self, draws: int) -> VotesVerifier:
        settings = self.settings.replace(draws=draws)
        return VotesVerifier(
            self.network, self.behind_noise, self.noise, self.norm, self.radii, settings, stop_early=self.stop_early
        )

    @property
    def _radii_to_decide(self) -> list[Radius]:
        """Return the radii at which drawing may stop; 0 decides the label where no other is proved."""
        return [Radius(size, self.norm, PAPER_RANGE) for size in (0.0, *self.radii)]

    def verify(self, inputs: Tensor, generator: torch.Generator) -> VoteCertificates:
        return self._verify(inputs, generator, self._radii_to_decide if self.stop_early else None)

    def verify_farthest(self, inputs: Tensor, generator: torch.Generator) -> VoteCertificates:
        """Return certificates after all draws: with early stopping radii are known up to `radii` only."""
        return self._verify(inputs, generator, None)

    def _verify(self, inputs: Tensor, generator: torch.Generator, radii: Sequence[Radius] | None) -> VoteCertificates:
        inputs = inputs.to(self.network.device)
        with unchanged(self.network):
            certificates = self.classifier.certify(inputs, generator, radii)
            self._require_same_scores(inputs)
        return certificates

    def search(self, inputs: Tensor, generator: torch.Generator, *, farthest: bool, anytime: bool) -> Search:
        inputs = inputs.to(self.network.device)
        with unchanged(self.network):
            self._require_same_scores(inputs)
        radii = None if farthest or not self.stop_early else self._radii_to_decide
        return VoteSearch(self.classifier, inputs, generator, radii, anytime=anytime)

    def _require_same_scores(self, inputs: Tensor) -> None:
        rows = self.settings.rows_at_once
        require_same_scores(self.network, lambda part: self.behind_noise(self.noise.noise_free(part)), inputs, rows)

    def samples(self) -> dict[str, Sample]:
        return vote_samples(self.network, self.behind_noise, self.noise)


def best_of(verifiers: Sequence[Verifier], inputs: Tensor, radii: Sequence[float]) -> tuple[Verifier, Chosen | None]:
    """Return the verifier with the largest mean radius on the first inputs, and the comparison; labels are not used."""
    radii = sorted(radii)
    if len(verifiers) == 1:
        return verifiers[0], None
    few, means = inputs[:_PILOT], []
    for verifier in verifiers:
        columns = verifier.verify(few, torch.Generator().manual_seed(1)).columns()
        # Bounds prove the given radii only, so radii of votes are rounded down to these.
        sizes = np.array((0.0, *radii))
        proved = sizes[np.searchsorted(sizes, columns[verifier.kinds[0].column], side="right") - 1]
        means.append(float(proved.mean()))
    best = verifiers[int(np.argmax(means))]
    names = [verifier.kinds[0].name for verifier in verifiers]
    return best, Chosen(
        certificate=best.kinds[0].name,
        mean_radius=dict(zip(names, means, strict=True)),
        compared_on=f"the first {len(few)} inputs, without their labels",
    )


def _radii_of(config: RunConfig) -> tuple[float, ...]:
    return tuple(sorted({*config.evaluation.radii, config.certification.attack_radius}))


def bounds(config: RunConfig, plan: Plan, network: Classifier) -> Verifier | None:
    """Return the verifier by bounds; None for a network in two parts, with noise between them.

    A network with an operation without bounds is an error if certification.certificate=bounds; else return None.
    """
    if not isinstance(network, Layered | HandedOver):
        return None
    try:
        settings, norm = config.certification, Norm(config.evaluation.norm)
        effort = Effort(settings.slope_steps, settings.branches)
        return BoundsVerifier(network, norm, _radii_of(config), budget_mb(config.machine), effort)
    except ModelError:
        if settings.certificate == "bounds":
            raise
        return None


def margins(config: RunConfig, plan: Plan, network: Classifier) -> Verifier | None:
    """Return the verifier by margins; None for a network that does not start with scattering."""
    if not isinstance(network, Layered) or not isinstance(network.layers[0], Scattering):
        return None
    try:
        return MarginsVerifier(network, Norm(config.evaluation.norm), _radii_of(config))
    except ModelError:
        if config.certification.certificate == "margins":
            raise
        return None


def votes(config: RunConfig, plan: Plan, network: Classifier) -> Verifier | None:
    """Return the verifier by votes under the noise that the method trained for; None where it trained for none."""
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
    vote_settings = VoteSettings(
        failure_probability=settings.failure_probability,
        selection_draws=settings.selection_draws,
        draws=settings.noise_draws,
        rows_at_once=rows_in_memory(network, budget_mb(config.machine), most=2_000),
    )
    norm = Norm(config.evaluation.norm)
    return VotesVerifier(network, behind, noise, norm, _radii_of(config), vote_settings, stop_early=settings.stop_early)
