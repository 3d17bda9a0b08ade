"""The functional mechanism (Appendix B) and the error of the paper's truncated expansions (Appendix O)."""

from __future__ import annotations

from math import e

import torch
from torch import Tensor

from stobatch.paper import equations, implements
from stobatch.privacy.noise import laplace


@implements(
    "Appendix B",
    "Eq. 14",
    verdict="holds: one release of the noisy coefficients is ε-DP, and any minimisation afterwards is post-processing.",
)
def functional_mechanism(
    coefficients: Tensor, largest_norm: float, epsilon: float, generator: torch.Generator
) -> Tensor:
    """Release Σᵢ λᵢ, the coefficients of a polynomial objective, with Laplace noise.

    `coefficients` holds one row per example, every row of 1-norm at most `largest_norm`.

    **Guarantee.** ε-DP for replace-one neighbours: the sensitivity is Δ = 2 max ‖λ‖₁ and every entry of the sum gets
    its own draw of Lap(Δ/ε). Rows that are too long are scaled down first and rows that are no numbers count as zero,
    so the guarantee needs no trust in the data.
    """
    finite = torch.where(coefficients.isfinite().all(1, keepdim=True), coefficients, 0.0)
    norms = finite.abs().sum(1, keepdim=True)
    bounded = finite * (largest_norm / norms.clamp(min=largest_norm))
    scale = 2 * largest_norm / epsilon
    return bounded.sum(0) + laplace(tuple(bounded.shape[1:]), scale, generator).to(bounded)


@implements(
    "Appendix O",
    *equations(35, 43),
    verdict="a statement about utility only; with inputs in [-1, 1] the auto-encoder objective has no minimiser, "
    "so the first bound is void there.",
)
def approximation_error_bounds(inputs_per_neuron: int, num_classes: int) -> tuple[float, float]:
    """Bounds on the average error of truncating R (first order) and L (second order).

    >>> [round(bound, 4) for bound in approximation_error_bounds(1, 1)]
    [0.7864, 0.3147]
    """
    return 4 * e * inputs_per_neuron / (1 + e) ** 2, (e**2 + 2 * e - 1) / (e * (1 + e) ** 2) * num_classes
