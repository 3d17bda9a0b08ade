"""The Taylor objective for θ2 with noise on its label coefficients."""

from __future__ import annotations

from collections.abc import Callable
from math import log

import torch
from torch import Tensor


def taylor_corrected(scores: Tensor, targets: Tensor) -> Tensor:
    """Second-order expansion of the sigmoid cross-entropy: log 2 + z/2 + z²/8 - zy (as the released code has it)."""
    return log(2) + scores / 2 + scores.square() / 8 - scores * targets


def taylor_published(scores: Tensor, targets: Tensor) -> Tensor:
    """z - zy - |z|/2 + z²/8, as printed: right for z >= 0 (up to log 2), wrong for z < 0."""
    return scores - scores * targets - scores.abs() / 2 + scores.square() / 8


TAYLOR_FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "corrected": taylor_corrected,
    "published": taylor_published,
}


def taylor_loss(scores: Tensor, labels: Tensor, form: str) -> Tensor:
    """One loss per example: the sum over the K classes."""
    targets = (labels.unsqueeze(1) == torch.arange(scores.shape[1], device=scores.device)).to(scores)
    return TAYLOR_FORMS[form](scores, targets).sum(1)


def label_noise_term(output_weight: Tensor, label_noise: Tensor) -> Tensor:
    """Σ_k (χ3/m) W_πk, what the noise on the coefficients h_π y adds to L̄2 per example.

    `label_noise` is either one vector shared by the classes (the paper) or one row per class.
    """
    return (output_weight * label_noise).sum()
