"""Conventional and certified accuracy, from per-example records alone. Every score carries how it was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stobatch.evaluation.protocols import attacked_column
from stobatch.evaluation.statistics import paired_difference, share_of
from stobatch.files import Columns
from stobatch.results import WORST, AttackedShare, Gap, Share, VerifiedAccuracy
from stobatch.types import Radius
from stobatch.verifier import CertificateKind

Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class AttackedTable:
    """The records of one protocol on one function, and the accuracies they hold."""

    protocol: str
    function: str
    attacks: tuple[str, ...]
    radii: tuple[Radius, ...]
    records: Columns
    rules: tuple[str, ...] = ()
    """Of a vote: the kinds of certificate that come with every answer."""
    identity: str = ""
    """The name of the table of records."""

    @property
    def label(self) -> NDArray[np.int64]:
        return np.asarray(self.records["label"])

    def limit(self, count: int) -> AttackedTable:
        """Return the first `count` examples."""
        return replace(self, records={name: values[:count] for name, values in self.records.items()})

    def column(self, attack: str, radius: Radius, part: str = "prediction") -> NDArray[Any]:
        return np.asarray(self.records[attacked_column(attack, radius.size, part)])

    def clean(self) -> Flags:
        """Return which clean inputs are answered rightly."""
        right: Flags = np.asarray(self.records["prediction"]) == self.label
        return right

    def survives(self, attack: str, radius: Radius) -> Flags:
        """Return which attacked inputs are answered rightly; under `WORST`, after every attack."""
        names = self.attacks if attack == WORST else (attack,)
        right: Flags = np.logical_and.reduce([self.column(name, radius) == self.label for name in names])
        return right

    def conventional(self) -> list[AttackedShare]:
        """Return Σ isCorrect(x_adv) / |test| for each attack, and for the worst of them on each example."""
        return [
            self._share(attack, radius, self.survives(attack, radius))
            for radius in self.radii
            for attack in (*self.attacks, WORST)
        ]

    def _share(self, attack: str, radius: Radius, right: Flags) -> AttackedShare:
        """Return an accuracy with everything one must know to compare it with another."""
        return AttackedShare(
            protocol=self.protocol,
            function=self.function,
            attack=attack,
            radius=radius.size,
            norm=radius.norm,
            input_range=str(radius.range),
            **dict(share_of(right)),
        )

    def certified_at_attacked(self, rule: str) -> list[AttackedShare]:
        """Return Σ isCorrect(x_adv) & isRobust(x_adv) / |test|: the paper's certified accuracy, at the attacked input.

        It says that the *attacked* input is right and cannot be moved further, not that the clean input is safe.
        """
        scores = []
        for radius in self.radii:
            sound = {
                attack: (self.column(attack, radius) == self.label)
                & (self.column(attack, radius, rule) >= radius.size)
                & ~self.column(attack, radius, "abstain").astype(bool)
                for attack in self.attacks
            }
            sound[WORST] = np.logical_and.reduce(list(sound.values()))
            scores += [self._share(attack, radius, flags) for attack, flags in sound.items()]
        return scores


def certified_accuracy(
    records: Columns, kinds: Sequence[CertificateKind], radii: Sequence[float]
) -> dict[str, dict[float, Share]]:
    """Return the share that is correct *and* robust at each radius, on clean inputs, for each kind of certificate.

    The published rule depends on the attack size it is asked about, so its column is the largest size that passes.
    """
    correct = np.asarray(records["prediction"]) == np.asarray(records["label"])
    return {
        kind.name: {radius: share_of(correct & (np.asarray(records[kind.column]) >= radius)) for radius in radii}
        for kind in kinds
    }


def verified_accuracy(records: Columns) -> VerifiedAccuracy:
    """Return how often verified inference is right on clean inputs, and how often it abstains."""
    right = np.asarray(records["prediction"]) == np.asarray(records["label"])
    abstain = np.asarray(records["abstain"], dtype=bool)
    return VerifiedAccuracy(
        correct=share_of(right),
        correct_without_abstaining=share_of(right & ~abstain),
        abstained=share_of(abstain),
    )


def gaps(published: AttackedTable, adaptive: AttackedTable) -> list[Gap]:
    """Return the worst case under both protocols, on the same examples, radius by radius."""
    rows = []
    for radius in published.radii:
        first, second = published.survives(WORST, radius), adaptive.survives(WORST, radius)
        shares = {"published": share_of(first), "adaptive": share_of(second)}
        rows.append(Gap(radius=radius.size, gap=paired_difference(first, second), **shares))
    return rows
