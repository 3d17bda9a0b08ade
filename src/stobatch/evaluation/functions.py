"""What is deployed, and so what an attack has to fool: one pass, or the vote of verified inference."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from stobatch.attacks import Expectation, Goal, Plain, Victim
from stobatch.certification import VerifiedInference
from stobatch.certification.soft_votes import PASSES_PER_DRAW, SoftVotes
from stobatch.errors import ModelError
from stobatch.models import Network, rows_in_memory

Columns = dict[str, list[Any]]

_CPU_ROWS = 357
"""Rows of one pass on a CPU: enough to fill the cores, few enough to stay in the cache."""

_COMPARED = 5
"""Points on which gradients are compared to choose the noise draws; more memory must not change the choice."""


class Deployed(ABC):
    """A function from inputs to labels that users of the model see."""

    name: ClassVar[str]
    deterministic: ClassVar[bool]
    network: Network
    rows: int
    """Rows that pass through the network at once."""

    @abstractmethod
    def answer(self, points: Tensor, generator: torch.Generator) -> Columns:
        """The prediction for each point, and what else the function says about it."""

    @abstractmethod
    def victims(self, points: Tensor, goal: Goal, generator: torch.Generator) -> dict[str, Victim]:
        """What an adaptive attacker differentiates, by name; the name of the function itself is empty."""


@final
@dataclass(frozen=True)
class SinglePass(Deployed):
    """The network with its fixed noise, once."""

    name: ClassVar[str] = "single_pass"
    deterministic: ClassVar[bool] = True
    network: Network
    rows: int

    @classmethod
    def of(cls, network: Network, memory_mb: int) -> SinglePass:
        return cls(network, rows_in_memory(network, memory_mb, most=_CPU_ROWS))

    @torch.no_grad()
    def answer(self, points: Tensor, generator: torch.Generator) -> Columns:
        scores = torch.cat([self.network(part) for part in torch.split(points, self.rows)])
        # The largest of scores that are no numbers is no prediction.
        if not bool(scores.isfinite().all()):
            raise ModelError("the network returned scores that are not numbers.", remedy="Train it again.")
        return {"prediction": scores.argmax(1).tolist()}

    def victims(self, points: Tensor, goal: Goal, generator: torch.Generator) -> dict[str, Victim]:
        return {"": Plain(self.network)}


@final
@dataclass(frozen=True)
class Vote(Deployed):
    """Verified inference (Algorithm 3): the class with most votes over fresh noise, with its certificates."""

    name: ClassVar[str] = "vote"
    deterministic: ClassVar[bool] = False
    network: Network
    rows: int
    verifier: VerifiedInference
    noise_draws: int | None

    @classmethod
    def of(cls, verifier: VerifiedInference, memory_mb: int, noise_draws: int | None) -> Vote:
        rows = rows_in_memory(verifier.network, memory_mb, most=_CPU_ROWS)
        return cls(verifier.network, rows, verifier, noise_draws)

    def answer(self, points: Tensor, generator: torch.Generator) -> Columns:
        verdicts = self.verifier.verify(points, generator)
        return {
            "prediction": verdicts.label.tolist(),
            "abstain": verdicts.abstain.tolist(),
            "published": verdicts.published_largest_attack.tolist(),
            "corrected": verdicts.corrected_radius.tolist(),
        }

    def victims(self, points: Tensor, goal: Goal, generator: torch.Generator) -> dict[str, Victim]:
        votes = SoftVotes(self.network, self.verifier.noise)
        few = points[:_COMPARED]
        found: dict[str, Victim] = {}
        samples: dict[str, Callable[..., Any]] = {"score": votes.averaged_score, "vote": votes.vote}
        for name, sample in samples.items():
            if self.noise_draws is not None:
                found[name] = Expectation(sample, self.noise_draws, PASSES_PER_DRAW)
                continue
            found[name] = Expectation.adaptive(
                sample, few, goal.part(slice(len(few))), generator, passes_per_draw=PASSES_PER_DRAW
            )
        return found
