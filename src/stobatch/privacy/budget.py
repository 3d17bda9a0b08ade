"""Splitting a total budget (Appendix P) and adding the parts up again (Theorems 1-4), as the paper claims them."""

from __future__ import annotations

from collections.abc import Callable

from stobatch.errors import BudgetError
from stobatch.paper import equations, implements

SHARED_NOISE = "the noise is one draw shared by all examples, so one step already separates neighbours perfectly"


@implements("Theorem 1", *equations(16, 18), verdict=f"false: {SHARED_NOISE} (an exact rank test tells them apart).")
def encoder_budget(encoder_epsilon: float, input_noise_surplus: float) -> float:
    """ε1/γ_x + ε1, the claimed cost of learning θ1 from benign examples."""
    return encoder_epsilon / input_noise_surplus + encoder_epsilon


@implements(
    "Theorem 2", "Eq. 31", verdict="false: it rests on Theorem 1, and each tuple serves both objectives in Algorithm 1."
)
def adversarial_encoder_budget(encoder_epsilon: float, input_noise_surplus: float) -> float:
    """ε1/γ_x + ε1, the claimed cost of learning θ1 from DP adversarial examples."""
    return encoder_budget(encoder_epsilon, input_noise_surplus)


@implements("Theorem 3", verdict="false: labels reach every parameter below the output layer without any noise.")
def head_budget(encoder_epsilon: float, hidden_noise_surplus: float, label_epsilon: float) -> float:
    """ε1/γ + ε2, the claimed cost of learning θ2."""
    return encoder_epsilon / hidden_noise_surplus + label_epsilon


@implements(
    "Theorem 4",
    *equations(24, 30),
    verdict=f"false: {SHARED_NOISE}; batches that share their noise do not compose in parallel.",
)
def total_budget(
    encoder_epsilon: float, input_noise_surplus: float, hidden_noise_surplus: float, label_epsilon: float
) -> float:
    """ε1 + ε1/γ_x + ε1/γ + ε2, the claimed cost of the whole training."""
    return encoder_budget(encoder_epsilon, input_noise_surplus) + head_budget(
        encoder_epsilon, hidden_noise_surplus, label_epsilon
    )


def fixed_label_epsilon(total_epsilon: float, base: float) -> float:
    """ε2 does not depend on the total: 0.1 on MNIST, 1 on Tiny ImageNet."""
    return base


def third_of_surplus(total_epsilon: float, base: float) -> float:
    """ε2 = 1 + r/3 where the total is 2 + r with r >= 0: CIFAR-10."""
    if total_epsilon < 2 * base:
        raise BudgetError(
            f"a total epsilon of {total_epsilon:g} is below the {2 * base:g} that this split starts from.",
            why="Appendix P gives the labels 1 + r/3 of a total of 2 + r, with r at least 0.",
            remedy=f"Raise method.total_epsilon to {2 * base:g} or more, or use method.budget_split=fixed_label.",
        )
    return base + (total_epsilon - 2 * base) / 3


SPLITS: dict[str, Callable[[float, float], float]] = {
    "fixed_label": fixed_label_epsilon,
    "third_of_surplus": third_of_surplus,
}


@implements("Appendix P", verdict="arithmetic; the parts add up to the total, which Theorem 4 then claims as ε.")
def split_budget(
    total_epsilon: float,
    *,
    split: str,
    label_epsilon_base: float,
    input_noise_surplus: float,
    hidden_noise_surplus: float,
) -> tuple[float, float]:
    """(ε1, ε2) such that ε1 (1 + 1/γ + 1/γ_x) + ε2 is the total.

    >>> e1, e2 = split_budget(0.2, split="fixed_label", label_epsilon_base=0.1, input_noise_surplus=1.981,
    ...                       hidden_noise_surplus=8.47)
    >>> round(e1, 4), e2
    (0.0616, 0.1)
    """
    label_epsilon = SPLITS[split](total_epsilon, label_epsilon_base)
    rest = total_epsilon - label_epsilon
    if rest <= 0 or label_epsilon <= 0:
        raise BudgetError(
            f"a total epsilon of {total_epsilon:g} leaves {rest:g} for the encoder and {label_epsilon:g} for labels.",
            why="Both parts have to be positive.",
            remedy=f"Raise method.total_epsilon above {label_epsilon_base:g} or lower method.label_epsilon.",
        )
    return rest / (1 + 1 / hidden_noise_surplus + 1 / input_noise_surplus), label_epsilon
