"""The auto-encoder's objective for θ1 (Eq. 5 and 6) and its published gradient (Eq. 19)."""

from __future__ import annotations

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
    """R̄ = Σᵢ [Σⱼ ½ θ1ⱼ h̄ᵢ - x̄ᵢ x̃ᵢ] with h̄ = θ1ᵀx̄ + 2χ2/m and x̃ = θ1 h̄."""
    noisy_hidden = encoder(noisy_inputs) + hidden_noise
    return ((0.5 - noisy_inputs) * encoder.decode(noisy_hidden)).sum()


def reconstruction_losses(encoder: AffineEncoder, inputs: Tensor) -> Tensor:
    """R̃ of each example by itself, without noise: what DP-SGD clips and adds noise to."""
    return ((0.5 - inputs) * encoder.decode(encoder(inputs))).flatten(1).sum(1)


@implements(
    "Eq. 19",
    verdict="the gradient of R̄ with h̄ held fixed, as published; it equals -Cθ1 + uwᵀ with C the noise-free scatter "
    "matrix of the raw batch, which is why Theorem 1 fails.",
)
def reconstruction_gradient(encoder: AffineEncoder, noisy_inputs: Tensor, noisy_hidden: Tensor) -> Tensor:
    """∇R̄ = Σᵢ (½ - x̄ᵢ) h̄ᵢ, column by column.

    ⟨½ - x̄, θ1 h̄⟩ = ⟨θ1ᵀ(½ - x̄), h̄⟩, so the gradient is that of the encoder itself, fed with ½ - x̄.
    """
    return encoder.weight_gradient(0.5 - noisy_inputs, noisy_hidden)
