"""What AdLM says is private in a step: the noisy inputs that every layer reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from stobatch.privacy.adlm_plan import AdLmPlan
from stobatch.privacy.noise import laplace
from stobatch.privacy.release import Release, Tuples
from stobatch.seeds import Seeds


@final
@dataclass(frozen=True)
class NoisyBatch(Release):
    """x̄ = x + Lap(Δ_h0/ε2)/|L|, clipped, of a batch; budgets of inputs are public, and even here."""

    plan: AdLmPlan
    name = "noisy inputs of a batch"
    source = "AdLM, the perturbed affine layer"
    attack = "the difference of two noisy inputs, in which the noise cancels wherever neither was clipped"

    def score(self, own: Tuples, pair: tuple[Tuples, Tuples], seeds: Seeds) -> float:
        bound, stream = self.plan.input_bound, seeds.generator("noise", "input")
        noise = laplace(tuple(own.inputs.shape[1:]), self.plan.input_noise_scale, stream)
        released = (own.inputs + noise).clamp(-bound, bound)
        whole = (released[[0, -1]].abs() < bound).all(0)
        seen = (released[-1] - released[0])[whole]
        first, second = ((tuples.inputs[-1] - tuples.inputs[0])[whole] for tuples in pair)
        return float((seen - first).norm() - (seen - second).norm())
