"""The noise of Algorithm 1, line 1: drawn once, before training, and kept private.

One draw is shared by every example, batch and step. That is the published mechanism, and the reason its privacy
claim fails: a constant added to every record cancels in every difference of two records.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from stobatch.dp.noise import laplace
from stobatch.errors import RunError
from stobatch.files import PRIVATE, read_tensors, write_tensors
from stobatch.seeds import Seeds


@dataclass(frozen=True)
class PrivateNoise:
    """χ1/m, 2χ2/m and χ3/m, as applied."""

    input_noise: Tensor
    hidden_noise: Tensor
    label_noise: Tensor

    @classmethod
    def draw(
        cls,
        seeds: Seeds,
        *,
        input_shape: tuple[int, ...],
        input_scale: float,
        hidden_shape: tuple[int, ...],
        hidden_scale: float,
        label_shape: tuple[int, ...],
        label_scale: float,
    ) -> PrivateNoise:
        return cls(
            laplace(input_shape, input_scale, seeds.generator("noise", "input")),
            laplace(hidden_shape, hidden_scale, seeds.generator("noise", "hidden")),
            laplace(label_shape, label_scale, seeds.generator("noise", "label")),
        )

    def save(self, run: Path, config_hash: str) -> None:
        """Write to the run's private folder, readable by its owner only."""
        write_tensors(run / PRIVATE / "noise.safetensors", vars(self), {"config_hash": config_hash}, private=True)

    @classmethod
    def load(cls, run: Path, config_hash: str) -> PrivateNoise:
        """Read a run's noise back; the noise of another run makes another function, so it is refused."""
        path = run / PRIVATE / "noise.safetensors"
        tensors, metadata = read_tensors(path)
        if metadata.get("config_hash") != config_hash:
            raise RunError(f"{path} belongs to another run.", remedy="Restore the run's own noise or train again.")
        return cls(**tensors)
