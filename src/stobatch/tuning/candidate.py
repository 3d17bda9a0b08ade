"""One candidate of a search: its settings, its training and its score. All of it is for the owner alone.

Everything random in it has a name under the search's own secret root, so that a candidate that was killed, or whose
folder was lost, is made again and not drawn again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stobatch import data
from stobatch.config import RunConfig
from stobatch.data import Dataset, Examples, hold_out
from stobatch.dp.noise import COARSEST, add_noise
from stobatch.dp.plan import DpSgdPlan
from stobatch.errors import ModelError
from stobatch.evaluation.tables import data_root
from stobatch.loading import TrainedModel
from stobatch.runs import Run
from stobatch.seeds import Seeds
from stobatch.sound.search import combinations
from stobatch.training.ledger import Ledger
from stobatch.training_run import train_candidate

_SCORE = "score"
"""The file in a candidate's private folder that holds its noisy score, or why it has none."""
_CHUNK = 500


@dataclass(frozen=True)
class Score:
    """What a candidate scored, with noise; None where it failed, and cannot win."""

    noisy: float | None
    failure: str = ""


@dataclass(frozen=True)
class Candidate:
    """A candidate by its number, with settings that it drew."""

    number: int
    settings: dict[str, Any]
    config: RunConfig
    seeds: Seeds
    run: Run

    @classmethod
    def draw(cls, number: int, config: RunConfig, seeds: Seeds, folder: Path) -> Candidate:
        """Draw settings for a candidate, each combination with the same probability."""
        known = list(combinations(config))
        word = int(next(seeds.stream("settings", number).blocks(1))[0])
        settings = known[word * len(known) // 2**64]
        own = seeds.child("candidate", number)
        return cls(number, settings, config.override_all(settings), own, Run(folder / str(number)))

    @property
    def score(self) -> Score | None:
        """Return the score; None where it is not finished."""
        if not self.run.has(_SCORE, private=True):
            return None
        recorded = self.run.read(_SCORE, private=True)
        return Score(recorded["noisy"], recorded["failure"])

    def finish(
        self, dataset: Dataset | None, network: nn.Module | None, start: Mapping[str, Tensor] | None = None
    ) -> Score:
        """Train it, or go on where it was cut off, and score it once; silently, since lines could be counted."""
        known = self.score
        if known is not None:
            return known
        try:
            model = train_candidate(
                self.config, self.run.path, self.seeds, dataset=dataset, network=network, start=start
            )
            score = self._measure_score(model, dataset)
        except ModelError as error:
            # Diverged: a function of what was released, and a run of the search like any other.
            score = Score(None, str(error))
        self.run.write(_SCORE, {"noisy": score.noisy, "failure": score.failure}, private=True)
        return score

    def _measure_score(self, model: TrainedModel, dataset: Dataset | None) -> Score:
        plan = model.plan
        assert isinstance(plan, DpSgdPlan)
        if Ledger.of(self.run.path).accounted > plan.most_steps:
            return Score(None, f"more than the {plan.most_steps} steps that the search pays for were made, by crashes")
        right = count_right(model, held_out_records(self.config, self.seeds, dataset))
        return Score(noisy_count(right, self.config.search.score_noise, self.seeds))


def held_out_records(config: RunConfig, seeds: Seeds, dataset: Dataset | None) -> Examples:
    """Return what a candidate with these seeds has held out of the training records."""
    whole = dataset or data.load(config.data.replace(held_out=0), root=data_root(config), seeds=seeds)
    _, held = hold_out(whole, config.data, seeds)
    assert held is not None
    return held


def count_right(model: TrainedModel, records: Examples) -> float:
    """Return how many records count for a candidate, or, where they have persons, the sum of each one's share.

    **Guarantee.** A record, or a person with all records, adds from 0 to 1, for any others; sums are exact.
    """
    right = torch.cat(
        [_which_right(model, records.take(part)) for part in torch.split(torch.arange(len(records)), _CHUNK)]
    )
    if records.groups is None:
        return float(right.sum())
    counts = torch.bincount(records.groups)
    hits = torch.zeros_like(counts).index_add_(0, records.groups, right.long())
    # Whole multiples of the step of any grid that noise is drawn on, so that nothing is rounded on the way.
    return float((hits * round(1 / COARSEST) // counts).sum()) * COARSEST


def _which_right(model: TrainedModel, records: Examples) -> Tensor:
    """Return which records are classified rightly, or rightly and certified where that is the score."""
    network = model.network
    if model.config.search.score == "accuracy":
        with torch.no_grad():
            scores: Tensor = network(records.inputs.to(network.device, network.dtype))
        return scores.argmax(1).cpu() == records.labels
    radius = model.config.certification.attack_radius
    asked = {"evaluation.radii": [radius], "evaluation.norm": "linf", "certification.certificate": "bounds"}
    (way,) = replace(model, config=model.config.override_all(asked)).verifiers()
    certificates = way.verify(records.inputs, torch.Generator())
    proved = certificates.columns()[way.kinds[0].column] >= radius
    return torch.from_numpy(proved & (certificates.label == records.labels.numpy()))


def noisy_count(count: float, stddev: float, seeds: Seeds) -> float:
    """Add Gaussian noise to a sum that one record, or person, moves by at most 1, exactly rounded to a grid."""
    counted = {"score": torch.tensor([float(count)], dtype=torch.float64)}
    return float(add_noise(counted, stddev, seeds.stream("score"))["score"])
