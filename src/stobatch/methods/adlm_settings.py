"""AdLM's settings."""

from __future__ import annotations

from dataclasses import dataclass

from stobatch.config import MethodConfig
from stobatch.settings import setting


@dataclass(frozen=True)
class AdLmConfig(MethodConfig, name="adlm"):
    """The budget and its parts, the estimation of relevances, and the descent under noise."""

    total_epsilon: float = setting(1.0, above=0, doc="The total budget ε1 + ε2 + ε3 that is claimed")
    delta: float = setting(1e-5, above=0, below=1, doc="The δ of the relevances; below one over the number of examples")
    relevance_share: float = setting(0.25, above=0, below=1, doc="Share of the budget for relevances, ε1")
    input_share: float = setting(
        0.25, above=0, below=1, doc="Share of the budget for inputs, ε2; the loss has the rest"
    )
    batch_size: int = setting(1800, at_least=1, doc="Examples in each random batch, |L|")
    input_bound: float = setting(10.0, at_least=1, doc="Noisy inputs are clipped to this size")
    taylor: str = setting(
        "corrected", choices=("corrected", "published"), doc="The expansion of the loss: right, or as printed"
    )
    even_share: float = setting(
        0.5, above=0, at_most=1, doc="Share of the input budget that is spread evenly; relevant values get the rest"
    )
    relevance_steps: int = setting(60, at_least=0, doc="Steps of DP-SGD before the one that releases relevances")
    relevance_batch_size: int = setting(2048, at_least=1, doc="Examples that a Poisson sample of those steps averages")
    relevance_clip_norm: float = setting(
        1.0, above=0, doc="The norm that an example's gradient, and its vector of relevances, is clipped to"
    )
    relevance_learning_rate: float = setting(1.0, above=0, doc="Of those steps; their gradients have norm at most 1")
    tuned_on_private_data: bool = setting(
        True, doc="Whether these settings were chosen by looking at the training data; said in the guarantee"
    )
