"""The whole state of a training in one file that is replaced at once: weights, optimiser, history, position.

Random state needs no room here: every draw is derived from the seeds and the step (`stobatch.seeds`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from stobatch.errors import RunError
from stobatch.files import PRIVATE, read_tensors, write_tensors
from stobatch.models import Classifier

FILE = Path(PRIVATE) / "checkpoint.safetensors"


@dataclass
class TrainingState:
    """What a training is made of at the end of a step."""

    network: Classifier
    optimisers: list[torch.optim.Optimizer]
    carried: dict[str, Tensor] = field(default_factory=dict)
    step: int = 0
    history: list[tuple[float, float, float]] = field(default_factory=list)
    """Rows of (step, accuracy on held-out test images, what the method monitors). Nothing here is computed from
    training data other than through the parameters: a training loss would be a release of its own."""

    def tensors(self) -> dict[str, Tensor]:
        named = {f"network.{name}": value for name, value in self.network.state_dict().items()}
        for part, optimiser in enumerate(self.optimisers):
            for index, values in optimiser.state_dict()["state"].items():
                named |= {f"optimiser.{part}.{index}.{key}": torch.as_tensor(v) for key, v in values.items()}
        named |= {f"carried.{name}": value for name, value in self.carried.items()}
        named["history"] = torch.tensor(self.history, dtype=torch.float64).reshape(-1, 3)
        return named

    def save(self, run: Path, config_hash: str) -> None:
        metadata = {"step": str(self.step), "config_hash": config_hash}
        write_tensors(run / FILE, self.tensors(), metadata, private=True)

    def restore(self, run: Path, config_hash: str) -> bool:
        """Continue from the run's checkpoint, if it has one. Returns whether there was one."""
        if not (run / FILE).exists():
            return False
        tensors, metadata = read_tensors(run / FILE)
        if metadata.get("config_hash") != config_hash:
            raise RunError(
                f"the checkpoint in {run} belongs to configuration {metadata.get('config_hash')}, not {config_hash}.",
                remedy="Resume with the settings it was started with, or choose another --out.",
            )
        parts: dict[str, dict[str, Tensor]] = {"network": {}, "optimiser": {}, "carried": {}}
        for name, value in tensors.items():
            if name != "history":
                kind, _, rest = name.partition(".")
                parts[kind][rest] = value
        try:
            self.network.load_state_dict(parts["network"])
        except RuntimeError as error:
            reason = str(error).splitlines()[-1].strip()
            raise RunError(
                f"the checkpoint in {run} does not fit the network: {reason}", remedy="Hand over the same network."
            ) from None
        for part, optimiser in enumerate(self.optimisers):
            state: dict[int, dict[str, Tensor]] = {}
            for name, value in parts["optimiser"].items():
                owner, index, key = name.split(".")
                if int(owner) == part:
                    state.setdefault(int(index), {})[key] = value
            optimiser.load_state_dict({**optimiser.state_dict(), "state": state})
        for name, value in self.carried.items():
            value.copy_(parts["carried"][name])
        self.history = [(row[0], row[1], row[2]) for row in tensors["history"].tolist()]
        self.step = int(metadata["step"])
        return True
