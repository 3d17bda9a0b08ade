"""What an attacker differentiates to move a vote: the averaged score, and a smooth form of the vote itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log

import torch
from torch import Tensor

from stobatch.attacks.expectation import Sample
from stobatch.certification.monte_carlo import FreshNoise, two_streams
from stobatch.certification.smoothing import SmoothingNoise
from stobatch.models import Classifier, Network

PASSES_PER_DRAW = 2
"""One pass with fresh noise at the input, one with fresh noise at the hidden layer."""
SHARPNESS = 4.0


@dataclass(frozen=True)
class SoftVotes:
    """Fresh draws of the product f^h · f^x as a differentiable function of the inputs.

    Both noises are shifts of the hidden layer, because the first layer is linear; so the gradient passes the encoder
    once, whatever the number of draws.
    """

    network: Network
    noise: FreshNoise

    def averaged_score(self, draws: int, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
        """log of the mean product score, which the certificate is about."""
        products = self._products(draws, generator)
        return lambda points: products(points).logsumexp(0) - log(draws)

    def vote(self, draws: int, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
        """log of the mean of softened votes: each draw's winner gets nearly all of its weight, as in the count."""
        products = self._products(draws, generator)
        return lambda points: (SHARPNESS * products(points)).log_softmax(2).logsumexp(0) - log(draws)

    def _products(self, draws: int, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
        """Points to (draws, points, classes): the logarithms of the product scores."""
        network = self.network
        at_input, at_hidden = self.noise.draw(network, draws, two_streams(generator))
        with torch.no_grad():
            shifts = torch.cat([network.encoder(at_input), at_hidden])

        def log_products(points: Tensor) -> Tensor:
            hidden = network.noisy_hidden(points + network.input_noise)
            shifted = (hidden.unsqueeze(0) + shifts.unsqueeze(1)).flatten(0, 1)
            logs: Tensor = network.head(shifted).log_softmax(1).reshape(PASSES_PER_DRAW, draws, len(points), -1)
            return logs.sum(0)

        return log_products


def vote_samples(
    network: Classifier, behind_noise: Callable[[Tensor], Tensor], noise: SmoothingNoise
) -> dict[str, Sample]:
    """Of a smoothed network: log of the mean probability over fresh noise, plain and sharpened.

    Sharpened, each draw gives nearly all of its weight to its winner, as in the count.
    """

    def averaged(sharpness: float) -> Sample:
        def sample(draws: int, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
            shifts = noise.draw((draws, *network.input_shape), generator).to(network.device)

            def scores(points: Tensor) -> Tensor:
                seen = (noise.seen(points).unsqueeze(0) + shifts.unsqueeze(1)).flatten(0, 1)
                logs = (sharpness * behind_noise(seen)).log_softmax(1).reshape(draws, len(points), -1)
                return logs.logsumexp(0) - log(draws)

            return scores

        return sample

    return {"score": averaged(1.0), "vote": averaged(SHARPNESS)}
