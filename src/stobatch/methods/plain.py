"""Plain training: no privacy, no robustness; the ceiling of clean accuracy for every other method."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stobatch.certification import Verifier
from stobatch.config import MethodConfig, RunConfig
from stobatch.data import DatasetInfo, TrainingExamples
from stobatch.errors import ModelError
from stobatch.methods.base import Method
from stobatch.methods.open_trainable import OpenTrainable, require_batches
from stobatch.models import Classifier
from stobatch.privacy.plan import OpenPlan, Plan
from stobatch.seeds import Seeds
from stobatch.settings import setting


@dataclass(frozen=True)
class PlainConfig(MethodConfig, name="plain"):
    """Cross-entropy on random batches."""

    batch_size: int = setting(256, at_least=1, doc="Examples of a step")


class Plain(Method):
    """Ordinary training, of any network."""

    config_class = PlainConfig

    def plan(self, config: RunConfig, info: DatasetInfo, network: Classifier | None) -> OpenPlan:
        method = config.method
        assert isinstance(method, PlainConfig)
        require_batches(info, method.batch_size, batches=1)
        return OpenPlan(info.num_train, method.batch_size, "plain training")

    def prepare(
        self, config: RunConfig, plan: Plan, network: Classifier, train: TrainingExamples, seeds: Seeds
    ) -> OpenTrainable:
        assert isinstance(config.method, PlainConfig)
        return OpenTrainable(
            network, train, seeds, batch_size=config.method.batch_size, memory_mb=config.machine.memory_mb,
            pieces=config.machine.pieces,
        )  # fmt: skip

    def restore(self, network: Classifier, run: Path, config_hash: str) -> None:
        """The weights are all there is."""

    def certifies(self, config: RunConfig) -> bool:
        return False

    def verifiers(self, config: RunConfig, plan: Plan, network: Classifier) -> tuple[Verifier, ...]:
        raise ModelError(
            "plain training has no certificate.",
            remedy="Evaluate it with `stobatch evaluate`, or train a method with certificates.",
        )
