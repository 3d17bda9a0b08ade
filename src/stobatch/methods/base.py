"""What every training method offers: a plan before data, something to train, and certificates afterwards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

from stobatch.certification import VerifiedInference
from stobatch.config import MethodConfig, RunConfig
from stobatch.data import DatasetInfo, Examples
from stobatch.models import AffineEncoder, Network
from stobatch.privacy.plan import Plan
from stobatch.seeds import Seeds
from stobatch.training import Trainable


class Method(ABC):
    """One way to train. Stateless: everything a run needs is in its configuration and its directory."""

    config_class: ClassVar[type[MethodConfig]]
    certifies: ClassVar[bool] = True
    """Whether there is verified inference for what this method trains."""

    @abstractmethod
    def plan(self, config: RunConfig, info: DatasetInfo, encoder: AffineEncoder) -> Plan:
        """Every number that a guarantee depends on, from public sizes only; raises what is impossible."""

    @abstractmethod
    def prepare(self, config: RunConfig, plan: Plan, network: Network, train: Examples, seeds: Seeds) -> Trainable:
        """Bind the method to data: check the network, draw what is private, perturb the inputs. Writes nothing."""

    @abstractmethod
    def restore(self, network: Network, run: Path, config_hash: str) -> None:
        """Give a loaded network what its deployment needs beside its weights."""

    @abstractmethod
    def verifier(self, config: RunConfig, plan: Plan, network: Network) -> VerifiedInference:
        """Verified inference with this method's noise."""
