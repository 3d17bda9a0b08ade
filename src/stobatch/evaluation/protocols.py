"""How a model is attacked. A score always carries the protocol it was measured under."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stobatch.attacks import ATTACKS, Ball, craft
from stobatch.config import EvaluationConfig
from stobatch.evaluation.accuracy import attacked_column
from stobatch.types import PAPER_RANGE, Norm, Radius


@dataclass(frozen=True)
class Protocol:
    """A name, and what exactly it means."""

    name: str
    meaning: str

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


DEPLOYED = Protocol(
    "deployed-single-pass",
    "white-box attacks with true labels on the deployed function itself, its fixed noise included, one pass per "
    "query; the attacked input is then classified by the same function",
)


def attack_records(
    network: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    config: EvaluationConfig,
    generator: torch.Generator,
    *,
    chunk: int,
) -> dict[str, list[Any]]:
    """Predictions on clean inputs and on every attack's output at every radius."""
    with torch.no_grad():
        columns = {"label": labels.tolist(), "prediction": network(inputs).argmax(1).tolist()}
    for radius in config.radii:
        ball = Ball.around(inputs, Radius(radius, Norm.LINF, PAPER_RANGE))
        for name in config.attacks:
            points = craft(network, ball, [ATTACKS[name](config.attack_steps)], generator, labels=labels, chunk=chunk)
            with torch.no_grad():
                columns[attacked_column(name, radius)] = network(points).argmax(1).tolist()
    return columns
