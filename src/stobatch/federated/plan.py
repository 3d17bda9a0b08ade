"""The plan of a federation: a plan for each party, and the largest ε among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from stobatch.privacy.dpsgd_plan import DpSgdPlan
from stobatch.privacy.guarantee import PrivacyGuarantee
from stobatch.privacy.plan import Plan, PlanRow


@dataclass(frozen=True)
class Account:
    """What one party has promised and done, in public numbers: a line of the table behind the guarantee."""

    name: str
    plan: DpSgdPlan
    rounds: int
    """Answers that the party's own ledger counts; before the first one, its cap."""

    @property
    def epsilon(self) -> float:
        return self.plan.spent(self.rounds)

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "records": self.plan.num_examples,
            "expected_batch_size": self.plan.expected_batch_size,
            "sampling_rate": self.plan.sampling_rate,
            "noise_multiplier": self.plan.noise_multiplier,
            "clip_norm": self.plan.clip_norm,
            "most_rounds": self.plan.steps,
            "rounds": self.rounds,
            "epsilon": self.epsilon,
            "delta": self.plan.delta,
        }

    def __str__(self) -> str:
        plan = self.plan
        return (
            f"{self.name}: {plan.num_examples} records, sampling rate {plan.sampling_rate:.4g}, noise multiplier "
            f"{plan.noise_multiplier:.4g}, {self.rounds} of at most {plan.steps} rounds, ε = {self.epsilon:.6g}, "
            f"δ = {plan.delta:g}"
        )


@dataclass(frozen=True, kw_only=True)
class FederatedPlan(Plan):
    """Parties with plans of their own and a server that is not trusted.

    **Guarantee.** For whoever sees every message of every party, the server included, adding or removing one record of
    one party changes probabilities by at most e^ε, up to δ, with ε = max_i ε_i. If the data differ in a record of party
    i, every other message is a randomised function of unchanged data and of the messages before it, so the transcript
    tells no more than party i's own adaptive sequence of releases, which is DP-SGD (docs/guarantees.md, section 4;
    docs/federated.md).
    """

    plans: Mapping[str, DpSgdPlan]
    steps: int
    rounds: Mapping[str, int] = field(default_factory=dict)
    excluded: Mapping[str, str] = field(default_factory=dict)
    """Parties whose word the server stopped to believe, and why: nothing is said about their records."""

    @property
    def accounts(self) -> tuple[Account, ...]:
        return tuple(Account(name, plan, self.rounds.get(name, plan.steps)) for name, plan in self.plans.items())

    @property
    def denominator(self) -> int:
        """The expected batch size of all parties together."""
        return sum(plan.expected_batch_size for plan in self.plans.values())

    def recorded(self, training: Mapping[str, Any]) -> FederatedPlan:
        """With the answers that the parties counted, instead of all they may give."""
        return replace(self, rounds=training.get("rounds", {}), excluded=training.get("excluded", {}))

    @property
    def claim(self) -> PrivacyGuarantee:
        accounts = [account for account in self.accounts if account.name not in self.excluded]
        worst = max(accounts, key=lambda account: account.epsilon)
        but = f" but {', '.join(self.excluded)}" if self.excluded else ""
        return replace(
            worst.plan.claim,
            epsilon=worst.epsilon,
            delta=max(account.plan.delta for account in accounts),
            unit=f"training example of any one party{but}",
            source="DP-SGD of each party, the largest ε of them, towards the server and everyone else who sees all "
            "messages; docs/federated.md; PLD accountant (dp-accounting)",
            assumptions=(*map(str, accounts), *self._assumptions(worst.plan)),
            objections=(
                *worst.plan.claim.objections,
                *(
                    f"nothing is said about the records of {name}, which was excluded: {why}"
                    for name, why in self.excluded.items()
                ),
            ),
        )

    def _assumptions(self, plan: DpSgdPlan) -> tuple[str, ...]:
        return (
            "every party draws its own Poisson samples and adds all of its own noise, fresh for every answer, from "
            "seeds that no one else has",
            f"an example's whole contribution to an answer is clipped to norm {plan.clip_norm:g} as one vector",
            "a party counts every answer before it computes it, and refuses to answer beyond its rounds whatever it is "
            "asked",
            "the parties' numbers of records, batch sizes and rounds are public constants, and so is who takes part "
            "when: no privacy is claimed from not taking part",
            "no record is held by two parties, and a person has one record",
            "the network and the attacks mix no examples: an example's gradient depends on no other example",
            "floating-point Gaussian noise is treated as ideal, and how long an answer takes tells nothing",
        )

    def sizes(self) -> dict[str, Any]:
        return {"steps": self.steps, "parties": {name: plan.sizes() for name, plan in self.plans.items()}}

    def rows(self) -> list[PlanRow]:
        accounts = self.accounts
        rows = [
            PlanRow("steps", "T", self.steps, "a message of each party that takes part", "Algorithm 4"),
            PlanRow("parties", "", len(accounts), "each with data, noise and ledger of its own", "Algorithm 4"),
            PlanRow("expected batch size, all parties", "ΣB", self.denominator, "weights are B / ΣB", ""),
            PlanRow("clipping norm", "C", accounts[0].plan.clip_norm, "of an example's whole contribution", ""),
        ]
        for account in accounts:
            plan, name = account.plan, account.name
            rows += [
                PlanRow(f"{name}: records", "N", plan.num_examples, "public", ""),
                PlanRow(f"{name}: sampling rate", "q", plan.sampling_rate, "B / N, Poisson", ""),
                PlanRow(f"{name}: rounds at most", "", plan.steps, "refuses the next one", ""),
                PlanRow(f"{name}: noise multiplier", "σ", plan.noise_multiplier, "all its own: no trusted server", ""),
                PlanRow(f"{name}: epsilon", "ε", account.epsilon, "privacy loss distribution, rounded up", ""),
            ]
        return [*rows, PlanRow("accounted epsilon", "ε", self.claim.epsilon, "the largest of the parties'", "")]
