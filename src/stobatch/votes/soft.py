"""What an attacker differentiates to move a vote: the averaged score, and a smooth form of the vote itself."""

from __future__ import annotations

from collections.abc import Callable
from math import log

import torch
from torch import Tensor

from stobatch.attacks.expectation import Sample
from stobatch.models import Classifier
from stobatch.votes.noise import SmoothingNoise

SHARPNESS = 4.0


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
