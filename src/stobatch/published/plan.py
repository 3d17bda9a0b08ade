"""The plan: every number that privacy depends on, fixed before any data is read."""

from __future__ import annotations

from dataclasses import dataclass

from stobatch.dp.guarantee import PrivacyGuarantee
from stobatch.dp.plan import Plan, PlanRow
from stobatch.published.lemmas import (
    adversarial_encoder_budget,
    approximation_error_bounds,
    encoder_budget,
    head_budget,
    label_sensitivity,
    noise_surplus,
    reconstruction_sensitivity,
    split_budget,
    total_budget,
)
from stobatch.types import Neighbours, Status

OBJECTIONS = (
    "one draw of noise is shared by all examples, batches and steps: it is a translation of the data set and cancels "
    "in every difference of two examples",
    "one gradient step on θ1 separates two neighbouring batches with probability 1, for every ε1 (exact rank test)",
    "labels reach every parameter below the output layer without any noise",
    "verified inference needs χ1 and χ2, so the deployed model contains the noise",
    "Δ_x = 1 and Δ_h are Lipschitz ratios, not sensitivities; Δ_R is too small by 2.9 times per map",
    "audited here, 6,000 small trainings refute a claimed 0.2: ε >= 5.32 with 95% confidence (docs/guarantees.md, 8); "
    "`stobatch audit RUN` refutes the claim of a run within seconds",
)
"""Why the published claim does not hold; docs/guarantees.md has the proofs and the experiments."""
_BARE_LABELS = (
    "labels get no noise at all: χ3 is the size of a penalty on weights, as in the released code on photographs"
)


@dataclass(frozen=True)
class PublishedPlan(Plan):
    """The plan of the published mechanism, from the sizes of the data and of the network alone."""

    num_examples: int
    batch_size: int
    inputs_per_neuron: int
    neurons_per_map: int
    last_hidden_size: int
    num_classes: int
    encoder_norm_bound: float
    total_epsilon: float
    label_epsilon_base: float
    split: str
    records_per_person: int = 1
    hides_labels: bool = True

    @property
    def reconstruction_sensitivity(self) -> int:
        return reconstruction_sensitivity(self.inputs_per_neuron, self.neurons_per_map)

    @property
    def label_sensitivity(self) -> int:
        return label_sensitivity(self.last_hidden_size)

    @property
    def input_noise_surplus(self) -> float:
        return noise_surplus(self.reconstruction_sensitivity, self.batch_size, self.encoder_norm_bound)[0]

    @property
    def hidden_noise_surplus(self) -> float:
        return noise_surplus(self.reconstruction_sensitivity, self.batch_size, self.encoder_norm_bound)[1]

    @property
    def epsilons(self) -> tuple[float, float]:
        """Return (ε1, ε2)."""
        return split_budget(
            self.total_epsilon,
            split=self.split,
            label_epsilon_base=self.label_epsilon_base,
            input_noise_surplus=self.input_noise_surplus,
            hidden_noise_surplus=self.hidden_noise_surplus,
        )

    @property
    def input_noise_scale(self) -> float:
        """Return the scale of χ1/m, as applied to every input."""
        return self.reconstruction_sensitivity / (self.batch_size * self.epsilons[0])

    @property
    def hidden_noise_scale(self) -> float:
        """Return the scale of 2χ2/m, as applied to every hidden neuron."""
        return 2 * self.input_noise_scale

    @property
    def label_noise_scale(self) -> float:
        """Return the scale of χ3/m, as applied to every coefficient."""
        return self.label_sensitivity / (self.batch_size * self.epsilons[1])

    @property
    def num_batches(self) -> int:
        return self.num_examples // self.batch_size

    @property
    def num_trainers(self) -> int:
        return self.num_batches // 2

    def _sum_of_parts(self) -> float:
        """Return Theorem 4's sum, which the split made equal to the total; rounded so that 1.0 is not 0.9999."""
        e1, e2 = self.epsilons
        return round(total_budget(e1, self.input_noise_surplus, self.hidden_noise_surplus, e2), 12)

    @property
    def claim(self) -> PrivacyGuarantee:
        group = (
            f"each person's {self.records_per_person} augmented copies count as separate tuples, so a person's claim "
            f"would be {self.records_per_person} times as large",
        )
        return PrivacyGuarantee(
            epsilon=self._sum_of_parts(),
            delta=0.0,
            neighbours=Neighbours.REPLACE_ONE,
            unit="training tuple",
            status=Status.CLAIMED,
            source="the paper's Theorem 4",
            assumptions=(
                f"‖θ1‖₁,₁ <= {self.encoder_norm_bound:g}, enforced at every step",
                "h_π in [-1, 1], enforced by the network",
                "fixed disjoint batches, one draw of χ1, χ2, χ3",
            ),
            objections=(
                *(() if self.hides_labels else (_BARE_LABELS,)),
                *(OBJECTIONS + (group if self.records_per_person > 1 else ())),
            ),
        )

    def rows(self) -> list[PlanRow]:
        e1, e2 = self.epsilons
        gamma_x, gamma = self.input_noise_surplus, self.hidden_noise_surplus
        errors = approximation_error_bounds(self.inputs_per_neuron, self.num_classes)
        return [
            PlanRow("training examples", "N", self.num_examples, "", "Section 2"),
            PlanRow("batch size", "m", self.batch_size, "", "Appendix P"),
            PlanRow("fixed disjoint batches", "N/m", self.num_batches, "rest of the examples unused", "Algorithm 1"),
            PlanRow("local trainers", "N/(2m)", self.num_trainers, "two batches each", "Algorithm 4"),
            PlanRow("reconstruction sensitivity", "Δ_R", self.reconstruction_sensitivity, "d(β + 2)", "Lemma 2"),
            PlanRow("label sensitivity", "Δ_L2", self.label_sensitivity, "2|h_π|", "Lemma 4"),
            PlanRow("bound on θ1's columns", "‖θ1‖₁,₁", self.encoder_norm_bound, "enforced at every step", "Lemma 3"),
            PlanRow("input noise surplus", "γ_x", gamma_x, "Δ_R / m", "Lemma 3"),
            PlanRow("hidden noise surplus", "γ", gamma, "2Δ_R / (m ‖θ1‖₁,₁)", "Lemma 3"),
            PlanRow("encoder epsilon", "ε1", e1, "(ε - ε2) / (1 + 1/γ + 1/γ_x)", "Appendix P"),
            PlanRow("label epsilon", "ε2", e2, self.split.replace("_", " "), "Appendix P"),
            PlanRow("input noise, Laplace scale", "χ1/m", self.input_noise_scale, "Δ_R / (m ε1)", "Algorithm 1"),
            PlanRow("hidden noise, Laplace scale", "2χ2/m", self.hidden_noise_scale, "2Δ_R / (m ε1)", "Algorithm 1"),
            PlanRow(
                "label noise, Laplace scale" if self.hides_labels else "label penalty, Laplace scale",
                *("χ3/m", self.label_noise_scale, "Δ_L2 / (m ε2)", "Algorithm 1"),
            ),
            PlanRow("claimed for θ1, benign", "", encoder_budget(e1, gamma_x), "ε1/γ_x + ε1", "Theorem 1"),
            PlanRow(
                "claimed for θ1, adversarial", "", adversarial_encoder_budget(e1, gamma_x), "ε1/γ_x + ε1", "Theorem 2"
            ),
            PlanRow("claimed for θ2", "", head_budget(e1, gamma, e2), "ε1/γ + ε2", "Theorem 3"),
            PlanRow("claimed in total", "ε", self.claim.epsilon, "ε1 + ε1/γ_x + ε1/γ + ε2", "Theorem 4"),
            PlanRow("error bound of R̃, average", "", errors[0], "4e d / (1 + e)²", "Appendix O"),
            PlanRow("error bound of L̃, average", "", errors[1], "K (e² + 2e - 1) / (e (1 + e)²)", "Appendix O"),
        ]
