"""The conversation of a federation: statements, then rounds of questions and answers. By whatever carries it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from stobatch.federated.party import Party, Spent, Statement
from stobatch.federated.server import Federation, Said
from stobatch.interrupts import finish_first
from stobatch.loading import TrainedModel
from stobatch.progress import progress


class Transport(Protocol):
    """Carries words between a server and its parties."""

    def statements(self) -> dict[str, Statement]:
        """What every party says of itself."""

    def answers(self, names: Sequence[str], federation: Federation) -> dict[str, Said]:
        """What these parties say to the present step; nothing of those that are silent for `method.answer_within`."""

    def counts(self, names: Sequence[str]) -> dict[str, int]:
        """How many answers these parties count, of those that can be reached."""


class Rounds(Protocol):
    """Runs a federation with the parties of these directories to its end."""

    def __call__(
        self, federation: Federation, directories: Mapping[str, Path], *, quiet: bool = True
    ) -> TrainedModel: ...


def converse(federation: Federation, post: Transport, *, quiet: bool = True) -> TrainedModel:
    """All rounds that are left. A stop is obeyed between two rounds, with everything saved."""
    with federation.run.held():
        federation.enrol(post.statements())
        steps = federation.terms.training.steps
        with finish_first() as stop, progress("federate", steps, start=federation.step, quiet=quiet) as advance:
            while not federation.done:
                stop.raise_if_asked()
                federation.combine(post.answers(federation.asked(), federation))
                advance(1, note=federation.note)
        if silent := federation.silent_parties():
            federation.hear(post.counts(silent))
        return federation.finish()


@dataclass(frozen=True)
class InProcessTransport:
    """All parties at one table: no library, no network. Every other post must give the same bits."""

    parties: Mapping[str, Party]

    def statements(self) -> dict[str, Statement]:
        return {name: party.statement() for name, party in self.parties.items()}

    def answers(self, names: Sequence[str], federation: Federation) -> dict[str, Said]:
        found: dict[str, Said] = {}
        for name in names:
            try:
                found[name] = self.parties[name].answer(federation.parameters(), federation.step, federation.agreed)
            except Spent:
                found[name] = None
        return found

    def counts(self, names: Sequence[str]) -> dict[str, int]:
        return {name: self.parties[name].rounds for name in names}


def in_process(federation: Federation, directories: Mapping[str, Path], *, quiet: bool = True) -> TrainedModel:
    """The reference: all parties in this process, one after the other."""
    return converse(
        federation, InProcessTransport({name: Party.open(path) for name, path in directories.items()}), quiet=quiet
    )
