"""The plan of AdLM: what its publication claims of the noise, and what is proved of the look at the data before it.

The publication counts ε1 for relevances that come from a network trained without any privacy. Here that network and
the relevances are steps of DP-SGD with an account of their own, so that the part ε1 is what it says.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp, inf

from stobatch.config import MethodConfig
from stobatch.dp.guarantee import PrivacyGuarantee
from stobatch.dp.plan import MOST_EPSILON, DpSgdPlan, Plan, PlanRow
from stobatch.errors import SettingError
from stobatch.settings import setting
from stobatch.types import Neighbours, Status

_NOTHING_LEFT = 300.0
"""e^300 to one against: a δ that is shared out over such odds leaves nothing to account with."""


def input_sensitivity(neurons_per_map: int, inputs_per_neuron: int) -> int:
    """Return Δ_h0 = 2βd as published: twice the coefficients of one map.

    >>> input_sensitivity(14**2, 25)
    9800
    """
    return 2 * neurons_per_map * inputs_per_neuron


def loss_sensitivity(num_classes: int, last_hidden_size: int) -> float:
    """Return Δ_F = K(|h_π| + |h_π|²/4) as published, for last hidden values in [-1, 1].

    >>> loss_sensitivity(10, 25)
    1812.5
    """
    return num_classes * (last_hidden_size + last_hidden_size**2 / 4)


@dataclass(frozen=True, kw_only=True)
class AdLmPlan(Plan):
    """ε1 for relevances, ε2 for the inputs of the affine layer, ε3 for the coefficients of the loss.

    **Guarantee**: proved for the relevances alone, (ε1, δ) when one tuple is replaced. A replacement is a removal and
    an addition, so DP-SGD that is (ε', δ') against either is (2ε', δ'(1 + e^ε')) against both: ε' = ε1/2, and
    δ' = δ/(1 + e^ε'). The rest, and with it the sum, is a claim.
    """

    num_examples: int
    batch_size: int
    steps: int
    inputs_per_neuron: int
    neurons_per_map: int
    last_hidden_size: int
    num_classes: int
    total_epsilon: float
    delta: float
    relevance_share: float
    input_share: float
    input_bound: float
    relevance_steps: int
    relevance_batch_size: int
    relevance_clip_norm: float
    tuned_on_private_data: bool
    records_per_person: int = 1

    def __post_init__(self) -> None:
        if self.relevance_share + self.input_share >= 1:
            raise SettingError(
                f"relevance_share={self.relevance_share:g} and input_share={self.input_share:g} leave nothing of ε.",
                why="What remains of the budget is for the coefficients of the loss.",
                remedy="Use shares whose sum is below 1, such as 0.25 and 0.25.",
            )
        if self.steps <= self.relevance_steps + 1:
            raise SettingError(
                f"training.steps={self.steps} is no more than the {self.relevance_steps + 1} that estimate relevances.",
                why="The steps of the estimation and the release of the relevances are counted among them.",
                remedy="Raise training.steps, or lower method.relevance_steps.",
            )
        if not 1 <= self.relevance_batch_size <= self.num_examples:
            raise SettingError(
                f"relevance_batch_size={self.relevance_batch_size} does not fit {self.num_examples} training examples.",
                remedy=f"Set method.relevance_batch_size to a number from 1 to {self.num_examples}.",
            )
        if self.delta >= 1 / self.num_examples:
            raise SettingError(
                f"delta={self.delta:g} is not below 1 / num_examples = {1 / self.num_examples:.3g}.",
                why="A mechanism that publishes one example picked at random would keep that promise.",
                remedy=f"Set method.delta to {0.1 / self.num_examples:.1g} or less.",
            )
        if self.epsilons[0] / 2 > MOST_EPSILON:
            raise SettingError(
                f"epsilon={self.total_epsilon:g} leaves ε1 = {self.epsilons[0]:g} for relevances.",
                why=f"Above {2 * MOST_EPSILON:g} it promises nothing.",
                remedy="Set method.epsilon to a number between 0.1 and 10.",
            )
        _ = self.relevance  # checks what is left to check

    @property
    def epsilons(self) -> tuple[float, float, float]:
        """Return (ε1, ε2, ε3)."""
        first, second = self.relevance_share * self.total_epsilon, self.input_share * self.total_epsilon
        return first, second, self.total_epsilon - first - second

    @property
    def relevance(self) -> DpSgdPlan:
        """Return the mechanism of the estimation by itself, against adding or removing one example."""
        epsilon = self.epsilons[0] / 2
        return DpSgdPlan(
            num_examples=self.num_examples,
            expected_batch_size=self.relevance_batch_size,
            steps=self.relevance_steps + 1,
            clip_norm=self.relevance_clip_norm,
            target_epsilon=epsilon,
            delta=self.delta / (1 + exp(epsilon)),
            tuned_on_private_data=self.tuned_on_private_data,
            records_per_person=self.records_per_person,
        )

    def relevance_epsilon(self, steps: int) -> float:
        """Return what the steps of the estimation cost when one tuple is replaced, at the δ of the claim.

        The planned number costs ε1. For more, ε' is raised until what is accounted at δ/(1 + e^ε') is within it.
        """
        half, mechanism = self.epsilons[0] / 2, self.relevance.mechanism(steps)
        while half < _NOTHING_LEFT:
            epsilon = mechanism.epsilon(self.delta / (1 + exp(half)))
            if epsilon <= half:
                return 2 * half
            half = epsilon * 1.001
        return inf

    @property
    def input_sensitivity(self) -> int:
        return input_sensitivity(self.neurons_per_map, self.inputs_per_neuron)

    @property
    def loss_sensitivity(self) -> float:
        return loss_sensitivity(self.num_classes, self.last_hidden_size)

    @property
    def input_noise_scale(self) -> float:
        """Return the scale of Laplace noise on an input value of average relevance; one with β_j has this over β_j."""
        return self.input_sensitivity / (self.epsilons[1] * self.batch_size)

    @property
    def loss_noise_scale(self) -> float:
        """Return the scale of Laplace noise on every coefficient of the loss."""
        return self.loss_sensitivity / (self.epsilons[2] * self.batch_size)

    @property
    def private_steps(self) -> int:
        """Return the number of steps of AdLM itself."""
        return self.steps - self.relevance_steps - 1

    @property
    def claim(self) -> PrivacyGuarantee:
        return PrivacyGuarantee(
            epsilon=self.total_epsilon,
            delta=self.delta,
            neighbours=Neighbours.REPLACE_ONE,
            unit="training tuple",
            status=Status.CLAIMED,
            source="AdLM (Phan et al., 2017), with its relevance estimation counted",
            assumptions=self._assumptions(),
            objections=self._objections(),
        )

    def after(self, accounted_steps: int) -> PrivacyGuarantee:
        """Return the plan as if all repeated steps were of the estimation; the claim counts the others once anyway."""
        again = accounted_steps - self.steps
        if again <= 0:
            return self.claim
        repeated = (
            f"{again} steps beyond the {self.steps} planned are counted as steps of the relevance estimation: a crash "
            "cut them off, and they were made again with draws of their own"
        )
        epsilon = self.relevance_epsilon(self.relevance.steps + again) + sum(self.epsilons[1:])
        return replace(self.claim, epsilon=epsilon, assumptions=(*self.claim.assumptions, repeated))

    def _assumptions(self) -> tuple[str, ...]:
        first, second, third = self.epsilons
        estimation = self.relevance
        return (
            f"the relevances are proved to cost ε1 = {first:g} and all of δ: {self.relevance_steps} steps of DP-SGD, "
            f"and one release in place of a gradient, each of a Poisson sample at rate {estimation.sampling_rate:.6g}, "
            f"of contributions clipped to norm {self.relevance_clip_norm:g}, under fresh Gaussian noise of standard "
            f"deviation {estimation.noise_stddev:.6g}",
            f"that is ε = {estimation.target_epsilon:g}, δ = {estimation.delta:.3g} when one example is added or "
            "removed, and a replacement is both",
            "the model starts again from its first weights: nothing of the estimation is left in it but the relevances",
            f"ε2 = {second:g} for the inputs and ε3 = {third:g} for the loss are claimed by the publication",
            "h_π in [-1, 1], enforced by the network",
            "the seeds of sampling and noise stay secret",
        )

    def _objections(self) -> tuple[str, ...]:
        tuned = "hyper-parameters were chosen on the private data: the search is counted nowhere"
        return (
            "the input noise of a step is shared by all examples of its batch: it cancels in their differences, where "
            "neither was clipped; `stobatch audit RUN` refutes the claim by that within seconds",
            f"noise is drawn anew in each of {self.private_steps} steps, and one ε2 and one ε3 are counted for all of "
            f"them; by the same reasoning so many steps would cost {self.private_steps} times as much",
            "labels reach every parameter below the output layer without any noise",
            "Δ_h0 bounds the coefficients of one map's sum over a batch, not an input; and all maps read one image",
            *((tuned,) if self.tuned_on_private_data else ()),
        )

    def rows(self) -> list[PlanRow]:
        first, second, third = self.epsilons
        estimation = self.relevance
        composed = first + self.private_steps * (second + third)
        return [
            PlanRow("training examples", "N", self.num_examples, "", "Section 2"),
            PlanRow("steps", "T", self.steps, "all of them", ""),
            PlanRow("steps of the estimation", "", self.relevance_steps, "DP-SGD", ""),
            PlanRow("releases of relevances", "", 1, "in the step after", ""),
            PlanRow("steps of AdLM", "", self.private_steps, "the rest", ""),
            PlanRow("relevance epsilon", "ε1", first, "its share of ε", ""),
            PlanRow("input epsilon", "ε2", second, "its share of ε", ""),
            PlanRow("loss epsilon", "ε3", third, "ε - ε1 - ε2", ""),
            PlanRow("estimation: expected batch size", "B", self.relevance_batch_size, "the public denominator", ""),
            PlanRow("estimation: sampling rate", "q", estimation.sampling_rate, "B / N, Poisson", ""),
            PlanRow("estimation: clipping norm", "C", self.relevance_clip_norm, "of gradients and of relevances", ""),
            PlanRow("estimation: epsilon", "ε'", estimation.target_epsilon, "ε1 / 2, add or remove one", ""),
            PlanRow("estimation: delta", "δ'", estimation.delta, "δ / (1 + e^ε')", ""),
            PlanRow("estimation: noise multiplier", "σ", estimation.noise_multiplier, "smallest within ε', δ'", ""),
            PlanRow("estimation: accounted epsilon", "", estimation.spent(estimation.steps), "at most ε'", ""),
            PlanRow("batch size", "|L|", self.batch_size, "random batches", ""),
            PlanRow("input sensitivity", "Δ_h0", self.input_sensitivity, "2βd, of one map", ""),
            PlanRow("loss sensitivity", "Δ_F", self.loss_sensitivity, "K (|h_π| + |h_π|²/4)", ""),
            PlanRow("input noise, Laplace scale", "", self.input_noise_scale, "Δ_h0 / (ε2 |L|), over β_j", ""),
            PlanRow("loss noise, Laplace scale", "", self.loss_noise_scale, "Δ_F / (ε3 |L|)", ""),
            PlanRow("noisy inputs, at most", "", self.input_bound, "clipped to this size", ""),
            PlanRow("claimed in total", "ε", self.total_epsilon, "ε1 + ε2 + ε3", ""),
            PlanRow("delta", "δ", self.delta, "of the relevances, below 1 / N", "Definition 1"),
            PlanRow("steps counted one by one", "", composed, "ε1 + (steps of AdLM)(ε2 + ε3)", ""),
        ]


class AdLmConfig(MethodConfig, name="adlm"):
    """The budget and its parts, the estimation of relevances, and the descent under noise."""

    epsilon: float = setting(1.0, above=0, doc="The total budget ε1 + ε2 + ε3 that is claimed", stored="total_epsilon")
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
