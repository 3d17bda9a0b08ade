"""Algorithm 3: a label, a radius and a verdict for each input, as published and corrected, side by side."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stobatch.attacks.expectation import Sample
from stobatch.config import CertificationConfig
from stobatch.errors import DataError, ModelError
from stobatch.models import Network, require_per_example, rows_in_memory
from stobatch.models.validators import unchanged
from stobatch.paper import implements
from stobatch.published.monte_carlo import (
    CPU_ROWS,
    PASSES_PER_DRAW,
    FreshNoise,
    ShiftScorer,
    SoftVotes,
    Tally,
    tally_products,
)
from stobatch.published.radius import CorrectedRule, PublishedRule
from stobatch.types import PAPER_RANGE, Norm, Radius, Status
from stobatch.verifier import ASSUMPTIONS, CertificateKind, Flags, Labels, Verifier, require_same_scores
from stobatch.votes.confidence import INTERVALS, Floats
from stobatch.votes.margins import hidden_shift, input_shift


@dataclass(frozen=True)
class PublishedCertificates:
    """The answers for a batch of inputs; every field has one entry per input."""

    label: Labels
    abstain: Flags
    score_lower: Floats
    runner_up_upper: Floats
    published_radius: Floats
    published_robust: Flags
    published_largest_attack: Floats
    corrected_radius: Floats
    corrected_robust: Flags

    def columns(self) -> dict[str, NDArray[Any]]:
        return dict(vars(self))


class VerifiedInference(Verifier):
    """Verified inference for a network with Laplace noise at its input and its first hidden layer.

    **Guarantee** (corrected radius). For each input separately, with probability at least 1 - failure_probability over
    the draws, no l-infinity perturbation up to the radius changes the class with the largest expected score.
    All K lower and K upper bounds hold at once, each failing with probability failure_probability/(2K), so choosing
    the class on the same draws costs nothing. Assumes a per-example network (checked) and exact arithmetic.
    """

    def __init__(
        self,
        network: Network,
        config: CertificationConfig,
        *,
        input_noise_scale: float,
        hidden_noise_scale: float,
        memory_mb: int = 512,
    ) -> None:
        self.network, self.config, self.memory_mb = network, config, memory_mb
        self.rows_at_once = rows_in_memory(network, memory_mb, most=CPU_ROWS)
        with torch.no_grad():
            require_per_example(network, self.rows_at_once)
        self.nominal_scales = {"input_noise_scale": input_noise_scale, "hidden_noise_scale": hidden_noise_scale}
        self.attack_radius = Radius(config.attack_radius, Norm.LINF, PAPER_RANGE)
        self.noise = FreshNoise.shrunk(input_noise_scale, hidden_noise_scale, config.resampling_shrinkage)
        self.published = PublishedRule.of(network.encoder, input_noise_scale, hidden_noise_scale)
        self.corrected = CorrectedRule(
            self.noise.input_scale,
            self.noise.hidden_scale,
            input_shift(Norm.LINF, prod(network.encoder.input_shape)),
            hidden_shift(Norm.LINF, network.encoder),
        )

    @property
    def kinds(self) -> tuple[CertificateKind, CertificateKind]:
        unit, failure = Radius(1.0, Norm.LINF, PAPER_RANGE), self.config.failure_probability
        return (
            CertificateKind(
                *("published", Status.CLAIMED, "the paper's Eq. 13, not valid", unit, None),
                column="published_largest_attack",
            ),
            CertificateKind(
                *("corrected", Status.PROVED, "docs/guarantees.md, section 3", unit, failure, ASSUMPTIONS),
                column="corrected_radius",
            ),
        )

    passes_per_draw = PASSES_PER_DRAW

    def with_draws(self, draws: int) -> VerifiedInference:
        config = self.config.replace(noise_draws=draws)
        return VerifiedInference(self.network, config, memory_mb=self.memory_mb, **self.nominal_scales)

    def samples(self) -> dict[str, Sample]:
        votes = SoftVotes(self.network, self.noise)
        return {"score": votes.averaged_score, "vote": votes.vote}

    @implements(
        "Algorithm 3",
        verdict="sound with the corrected radius; with the published one a certified input can be broken.",
    )
    def verify(self, inputs: Tensor, generator: torch.Generator) -> PublishedCertificates:
        """Return label, radii and is-robust for each input, from one set of draws."""
        if not bool(((inputs >= PAPER_RANGE.low) & (inputs <= PAPER_RANGE.high)).all()):
            raise DataError(
                f"inputs to certify are outside {PAPER_RANGE} or NaN.",
                remedy="Scale pixels with x / 127.5 - 1 and remove NaNs.",
            )
        inputs = inputs.to(self.network.encoder.weight)
        with unchanged(self.network):
            tally = tally_products(self.network, inputs, self.noise, self.config.noise_draws, generator, self.memory_mb)
            require_same_scores(self.network, self._without_noise, inputs, self.rows_at_once)
        return self.judge(tally)

    def _without_noise(self, inputs: Tensor) -> Tensor:
        """Return the scores that votes are taken of, without fresh noise."""
        return ShiftScorer(self.network, inputs).logits(slice(None), torch.zeros_like(self.network.hidden_noise[None]))[
            0
        ]

    def judge(self, tally: Tally) -> PublishedCertificates:
        """Turn votes or scores into verdicts; separate from `verify` so that given votes can be judged."""
        evidence = (tally.votes if self.config.interval == "clopper_pearson" else tally.scores).cpu().double().numpy()
        if not np.isfinite(evidence).all():
            raise ModelError("the network returned scores that are NaN or infinite.", remedy="Train it again.")
        num_classes = evidence.shape[1]
        label = evidence.argmax(1)
        bounds = INTERVALS[self.config.interval]
        # As published: each side at (1 - η)/K. Corrected: 2K bounds hold at once, since the label is chosen here too,
        # and the runner-up is also bounded by what the top class leaves over, because scores sum to at most 1.
        split = self.config.failure_probability / num_classes
        claimed = _top_and_runner_up(*bounds(evidence, tally.draws, split), label)
        top, runner_up = _top_and_runner_up(*bounds(evidence, tally.draws, split / 2), label)
        proved = top, np.minimum(runner_up, 1 - top)
        published = self.published.radius(*claimed, self.attack_radius.size)
        corrected = self.corrected.radius(*proved)
        return PublishedCertificates(
            label=label,
            abstain=proved[0] <= proved[1],
            score_lower=proved[0],
            runner_up_upper=proved[1],
            published_radius=published,
            published_robust=published >= self.attack_radius.size,
            published_largest_attack=self.published.largest_attack(*claimed),
            corrected_radius=corrected,
            corrected_robust=corrected >= self.attack_radius.size,
        )


def _top_and_runner_up(lower: Floats, upper: Floats, label: Labels) -> tuple[Floats, Floats]:
    rows = np.arange(len(label))
    others = upper.copy()
    others[rows, label] = -np.inf
    return lower[rows, label], others.max(1)
