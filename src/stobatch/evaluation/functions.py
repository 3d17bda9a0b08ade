"""What is deployed, and so what an attack has to fool: one pass, or the vote of verified inference."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from stobatch.attacks import Expectation, Goal, Plain, Victim
from stobatch.errors import ModelError
from stobatch.files import Columns
from stobatch.models import Classifier, rows_in_memory
from stobatch.verifier import Verifier

_CPU_ROWS = 357
"""Rows of one pass on a CPU: enough to fill the cores, few enough to stay in the cache."""

_COMPARED = 5
"""Points on which gradients are compared to choose the noise draws; more memory must not change the choice."""


class Deployed(ABC):
    """A function from inputs to labels that users of the model see."""

    name: ClassVar[str]
    deterministic: ClassVar[bool]
    network: Classifier
    rows: int
    """Rows that pass through the network at once."""

    @property
    def rules(self) -> tuple[str, ...]:
        """Return the kinds of certificate that come with every answer."""
        return ()

    @abstractmethod
    def answer(self, points: Tensor, generator: torch.Generator) -> Columns:
        """Return the prediction for each point, and what else the function says about it."""

    @abstractmethod
    def victims(self, points: Tensor, goal: Goal, generator: torch.Generator) -> dict[str, Victim]:
        """Return what an adaptive attacker differentiates, by name; the name of the function itself is empty."""


@final
@dataclass(frozen=True)
class SinglePass(Deployed):
    """The network with its fixed noise, once."""

    name: ClassVar[str] = "single_pass"
    deterministic: ClassVar[bool] = True
    network: Classifier
    rows: int

    @classmethod
    def of(cls, network: Classifier, memory_mb: int) -> SinglePass:
        return cls(network, rows_in_memory(network, memory_mb, most=_CPU_ROWS))

    @torch.no_grad()
    def answer(self, points: Tensor, generator: torch.Generator) -> Columns:
        scores = torch.cat([self.network(part) for part in torch.split(points, self.rows)])
        # The largest of NaN scores is no prediction.
        if not bool(scores.isfinite().all()):
            raise ModelError("the network returned scores that are NaN or infinite.", remedy="Train it again.")
        return {"prediction": scores.argmax(1).tolist()}

    def victims(self, points: Tensor, goal: Goal, generator: torch.Generator) -> dict[str, Victim]:
        return {"": Plain(self.network)}


@final
@dataclass(frozen=True)
class Vote(Deployed):
    """A vote over fresh noise, with its certificates: the paper's Algorithm 3, or a smoothed classifier."""

    name: ClassVar[str] = "vote"
    deterministic: ClassVar[bool] = False
    network: Classifier
    rows: int
    verifier: Verifier
    noise_draws: int | None

    @classmethod
    def of(cls, verifier: Verifier, memory_mb: int, noise_draws: int | None) -> Vote:
        rows = rows_in_memory(verifier.network, memory_mb, most=_CPU_ROWS)
        return cls(verifier.network, rows, verifier, noise_draws)

    @property
    def rules(self) -> tuple[str, ...]:
        return tuple(kind.name for kind in self.verifier.kinds)

    def answer(self, points: Tensor, generator: torch.Generator) -> Columns:
        verdicts = self.verifier.verify(points, generator)
        columns = verdicts.columns()
        return {
            "prediction": verdicts.label.tolist(),
            "abstain": verdicts.abstain.tolist(),
            **{kind.name: columns[kind.column].tolist() for kind in self.verifier.kinds},
        }

    def victims(self, points: Tensor, goal: Goal, generator: torch.Generator) -> dict[str, Victim]:
        few, passes = points[:_COMPARED], self.verifier.passes_per_draw
        victims: dict[str, Victim] = {}
        for name, sample in self.verifier.samples().items():
            if self.noise_draws is not None:
                victims[name] = Expectation(sample, self.noise_draws, passes)
            else:
                aim = goal.part(slice(len(few)))
                victims[name] = Expectation.adaptive(sample, few, aim, generator, passes_per_draw=passes)
        return victims
