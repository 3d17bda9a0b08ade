"""The DP adversarial objective (Eq. 9): benign and adversarial losses in one weighted mean."""

from __future__ import annotations

import torch
from torch import Tensor

from stobatch.paper import implements


@implements(
    *("Eq. 9", "Eq. 15", "Appendix C"),
    verdict="definitions; with noise on the label coefficients only, Eq. 9 is not private (Theorem 3).",
)
def example_weights(num_benign: int, num_adversarial: int, adversarial_weight: float) -> Tensor:
    """What each example's loss counts in L: 1/(m1 + ξ m2) if benign, ξ/(m1 + ξ m2) if adversarial.

    The benign examples come first. Eq. 9 has m1 = m2 = m; Eq. 15 allows two sizes.

    >>> example_weights(2, 2, 1.0)
    tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """
    total = num_benign + adversarial_weight * num_adversarial
    return torch.cat([torch.full((num_benign,), 1.0), torch.full((num_adversarial,), adversarial_weight)]) / total
