"""What is minimised: reconstruction for θ1 (Eq. 5, 6 and 19), the Taylor loss for θ2, both kinds of example (Eq. 9)."""

from __future__ import annotations

from collections.abc import Callable
from math import log

import torch
from torch import Tensor

from stobatch.models.affine import AffineEncoder
from stobatch.paper import implements


@implements(
    "Eq. 5",
    "Eq. 6",
    verdict="well defined, but with inputs in [-1, 1] it is no cross-entropy and has no minimum; the bound on θ1 "
    "keeps the descent finite.",
)
def reconstruction_loss(encoder: AffineEncoder, noisy_inputs: Tensor, hidden_noise: Tensor) -> Tensor:
    """Return R̄ = Σᵢ [Σⱼ ½ θ1ⱼ h̄ᵢ - x̄ᵢ x̃ᵢ] with h̄ = θ1ᵀx̄ + 2χ2/m and x̃ = θ1 h̄."""
    noisy_hidden = encoder(noisy_inputs) + hidden_noise
    return ((0.5 - noisy_inputs) * encoder.decode(noisy_hidden)).sum()


def reconstruction_losses(encoder: AffineEncoder, inputs: Tensor) -> Tensor:
    """Return R̃ of each example by itself, without noise: what DP-SGD clips and adds noise to."""
    return ((0.5 - inputs) * encoder.decode(encoder(inputs))).flatten(1).sum(1)


@implements(
    "Eq. 19",
    verdict="the gradient of R̄ with h̄ held fixed, as published; it equals -Cθ1 + uwᵀ with C the noise-free scatter "
    "matrix of the raw batch, which is why Theorem 1 fails.",
)
def reconstruction_gradient(encoder: AffineEncoder, noisy_inputs: Tensor, noisy_hidden: Tensor) -> Tensor:
    """Return ∇R̄ = Σᵢ (½ - x̄ᵢ) h̄ᵢ, column by column.

    ⟨½ - x̄, θ1 h̄⟩ = ⟨θ1ᵀ(½ - x̄), h̄⟩, so the gradient is that of the encoder itself, fed with ½ - x̄.
    """
    return encoder.weight_gradient(0.5 - noisy_inputs, noisy_hidden)


def taylor_corrected(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the sigmoid cross-entropy to second order: log 2 + z/2 + z²/8 - zy (as the released code has it)."""
    return log(2) + scores / 2 + scores.square() / 8 - scores * targets


def taylor_published(scores: Tensor, targets: Tensor) -> Tensor:
    """Return z - zy - |z|/2 + z²/8, as printed: right for z >= 0 (up to log 2), wrong for z < 0."""
    return scores - scores * targets - scores.abs() / 2 + scores.square() / 8


TAYLOR_FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "corrected": taylor_corrected,
    "published": taylor_published,
}


def taylor_loss(scores: Tensor, labels: Tensor, form: str) -> Tensor:
    """Return one loss per example: the sum over the K classes."""
    targets = (labels.unsqueeze(1) == torch.arange(scores.shape[1], device=scores.device)).to(scores)
    return TAYLOR_FORMS[form](scores, targets).sum(1)


def label_noise_term(output_weight: Tensor, label_noise: Tensor) -> Tensor:
    """Return Σ_k (χ3/m) W_πk, what the noise on the coefficients h_π y adds to L̄2 per example.

    `label_noise` is either one vector shared by the classes (the paper) or one row per class.
    """
    return (output_weight * label_noise).sum()


def label_penalty(output_weight: Tensor, label_noise: Tensor) -> Tensor:
    """Return mean |χ3 W_π|, which the released code has in place of noise on CIFAR-10 and Tiny ImageNet."""
    return (output_weight * label_noise).abs().mean()


@implements(
    *("Eq. 9", "Eq. 15", "Appendix C"),
    verdict="definitions; with noise on the label coefficients only, Eq. 9 is not private (Theorem 3).",
)
def example_weights(num_benign: int, num_adversarial: int, adversarial_weight: float) -> Tensor:
    """Return what each example's loss counts in L: 1/(m1 + ξ m2) if benign, ξ/(m1 + ξ m2) if adversarial.

    The benign examples come first. Eq. 9 has m1 = m2 = m; Eq. 15 allows two sizes.

    >>> example_weights(2, 2, 1.0)
    tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """
    total = num_benign + adversarial_weight * num_adversarial
    return torch.cat([torch.full((num_benign,), 1.0), torch.full((num_adversarial,), adversarial_weight)]) / total
