"""federation.json and participation.json: what every party has promised and done, and what that guarantees."""

from __future__ import annotations

from typing import ClassVar

from stobatch.results.document import Count, Document, Guarantee, Number, Part, Settings, Text
from stobatch.results.training import Training


class PartyAccount(Part):
    """What one party has promised and done, in public numbers: a line of the table behind the guarantee."""

    name: Text
    records: Count
    expected_batch_size: Count
    sampling_rate: Number
    noise_multiplier: Number
    clip_norm: Number
    most_rounds: Count
    rounds: Count
    epsilon: Number
    """To be shown with the status of the federation's guarantee only."""
    delta: Number


class FederationAccount(Document):
    """federation.json: the parties' accounts, their answers, and the guarantee for everyone who sees all messages."""

    kind: ClassVar[str] = "federation"

    parties: tuple[PartyAccount, ...]
    answers_received: dict[Text, Count]
    answers_clipped: dict[Text, Count]
    answer_bounds: dict[Text, Number]
    excluded: dict[Text, Text]
    guarantee: Guarantee

    def lines(self) -> list[str]:
        status = self.guarantee.status
        spent = [f"{party.name}: {party.rounds} rounds, {status} ε = {party.epsilon:g}" for party in self.parties]
        return [str(self.guarantee), *spent]


class Participation(Document):
    """participation.json: what one party has said of itself, and its own guarantee."""

    kind: ClassVar[str] = "participation"

    name: Text
    terms: Text
    sizes: Settings
    noise_multiplier: Number
    rounds: Count
    epsilon: Number
    """To be shown with the status of the guarantee only."""
    seed_mark: Text | None = None
    guarantee: Guarantee

    def lines(self) -> list[str]:
        return [f"{self.name}, {self.rounds} rounds", str(self.guarantee)]


class FederatedTraining(Document):
    """What `federate` prints: the training, and the account of the federation."""

    run: Text
    training: Training
    parties: tuple[PartyAccount, ...]
    answers_received: dict[Text, Count]
    answers_clipped: dict[Text, Count]
    answer_bounds: dict[Text, Number]
    excluded: dict[Text, Text]
    guarantee: Guarantee
