"""The federation as a method: plans and certificates as for any other; its training happens between the parties."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from stobatch.certification import Verifier
from stobatch.config import RunConfig
from stobatch.data import DatasetInfo, TrainingExamples
from stobatch.errors import SettingError
from stobatch.federated.plan import FederatedPlan
from stobatch.federated.settings import FederatedConfig, party_config, party_of, sizes_of
from stobatch.methods import Method, Sound
from stobatch.models import Classifier
from stobatch.privacy.dpsgd_plan import DpSgdPlan
from stobatch.privacy.plan import Plan
from stobatch.seeds import Seeds


class Federated(Method):
    """Parties that never show their data, and one model."""

    config_class = FederatedConfig

    def plan(self, config: RunConfig, info: DatasetInfo, network: Classifier | None) -> FederatedPlan:
        if config.canaries.num:
            raise SettingError(
                "a federation has no room for canaries.",
                why="A party's answers are for its own records; nobody can plant something in all of them.",
                remedy="Set canaries.num=0, and audit the sound method with the sizes of one party.",
            )
        return FederatedPlan(
            plans={party.name: party_plan(config, info, party.name) for party in sizes_of(config)},
            steps=config.training.steps,
        )

    def prepare(
        self, config: RunConfig, plan: Plan, network: Classifier, train: TrainingExamples, seeds: Seeds
    ) -> NoReturn:
        raise SettingError(
            "a federation is not trained in one place.",
            why="Its noise is drawn by the parties, each for its own records.",
            remedy="Use `stobatch federate`, or train with method sound.",
        )

    def restore(self, network: Classifier, run: Path, config_hash: str) -> None:
        """The weights are all there is."""

    def verifiers(self, config: RunConfig, plan: Plan, network: Classifier) -> tuple[Verifier, ...]:
        return Sound().verifiers(config, plan, network)


def party_plan(terms: RunConfig, info: DatasetInfo, name: str) -> DpSgdPlan:
    """One party's own plan, with its cap as the number of steps: what its noise is chosen for."""
    party = party_of(terms, name)
    own = DatasetInfo(
        name, info.input_shape, info.num_classes, party.num_examples, info.num_test, info.class_names, info.copies
    )
    return replace(Sound().plan(party_config(terms, party), own, None), public_seeds=terms.seed is not None)
