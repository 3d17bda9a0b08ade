"""The rounds of a federation: statements, then questions and answers, over any transport.

`federate` is a whole federation on one machine: a data set cut among parties, each with a directory of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from stobatch.config import RunConfig, require_config
from stobatch.data import Dataset, Examples, describe, require_dataset
from stobatch.data.overlap import is_own, require_apart
from stobatch.errors import SettingError
from stobatch.evaluation.tables import data_root, read_data
from stobatch.federated.party import Party, Spent
from stobatch.federated.plan import sizes_of
from stobatch.federated.server import Federation, Said
from stobatch.interrupts import finish_first
from stobatch.loading import TrainedModel, load
from stobatch.prior import require_unseen, take_prior
from stobatch.progress import progress
from stobatch.results import Statement
from stobatch.runs import Run
from stobatch.seeds import Seeds


class Transport(Protocol):
    """Carries words between a server and its parties."""

    def statements(self) -> dict[str, Statement]:
        """Return what every party says of itself."""

    def answers(self, names: Sequence[str], federation: Federation) -> dict[str, Said]:
        """Return the answers of these parties to the present step; none of those silent for `method.answer_within`."""

    def counts(self, names: Sequence[str]) -> dict[str, int]:
        """Return how many answers these parties count, of those that can be reached."""


class Rounds(Protocol):
    """Runs a federation with the parties of these directories to its end."""

    def __call__(
        self, federation: Federation, directories: Mapping[str, Path], *, quiet: bool = True
    ) -> TrainedModel: ...


def converse(federation: Federation, post: Transport, *, quiet: bool = True) -> TrainedModel:
    """Run all rounds that are left. A stop is obeyed between two rounds, with everything saved."""
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
    """All parties at one table: no library, no network. Every other transport must give the same bits."""

    parties: Mapping[str, Party]

    def statements(self) -> dict[str, Statement]:
        return {name: party.statement() for name, party in self.parties.items()}

    def answers(self, names: Sequence[str], federation: Federation) -> dict[str, Said]:
        answers: dict[str, Said] = {}
        for name in names:
            try:
                answers[name] = self.parties[name].answer(federation.parameters(), federation.step, federation.agreed)
            except Spent:
                answers[name] = None
        return answers

    def counts(self, names: Sequence[str]) -> dict[str, int]:
        return {name: self.parties[name].rounds for name in names}


def in_process(federation: Federation, directories: Mapping[str, Path], *, quiet: bool = True) -> TrainedModel:
    """Return the reference transport: all parties in this process, one after the other."""
    return converse(
        federation, InProcessTransport({name: Party.open(path) for name, path in directories.items()}), quiet=quiet
    )


def parties_of(run: Path) -> Path:
    """Return where a simulation keeps its parties: next to the server's run, never inside it."""
    return run.with_name(f"{run.name}.parties")


def split(terms: RunConfig, train: Examples) -> dict[str, Examples]:
    """Give each party its records, none to two of them, by the terms' numbers alone; persons with all they own."""
    wanted = [(party.name, party.num_examples) for party in sizes_of(terms)]
    needed = sum(count for _, count in wanted)
    persons = train.persons
    there, called = (len(train), "records") if persons is None else (len(persons), "persons")
    if needed > there:
        raise SettingError(
            f"the parties want {needed} {called}, the data have {there}.",
            why=f"No {called.removesuffix('s')} may be held by two parties.",
            remedy="Lower the numbers in method.parties, or raise data.train_limit.",
        )
    # A public shuffle: which party got which record of a public data set is no secret of anyone.
    order = torch.randperm(there, generator=Seeds.reproducible(0).generator("parties"))
    parts, start = {}, 0
    for name, count in wanted:
        own = order[start : start + count]
        parts[name] = train.take(own if persons is None else persons.rows(own)[0])
        start += count
    return parts


def found_parties(terms: RunConfig, folder: Path, dataset: Dataset, *, resume: bool = False) -> dict[str, Path]:
    """Make a directory for each party with its share of the data; keep those that are there already."""
    directories = {}
    for name, own in split(terms, dataset.train.in_memory()).items():
        Party.found(folder / name, terms, dataset.info, name, own, resume=resume)
        directories[name] = folder / name
    return directories


def federate(
    terms: RunConfig,
    out: str | Path,
    *,
    dataset: Dataset | None = None,
    prior: str | Path | None = None,
    rounds: Rounds = in_process,
    resume: bool = False,
    quiet: bool = False,
) -> TrainedModel:
    """Cut a data set among parties, let them train one model, and keep everyone's files apart.

    `OUT` becomes the server's run, to be certified, evaluated and reported like any other; `OUT.parties/NAME` is each
    party's own. In earnest every party keeps its directory on its own machine. `prior` is what the server starts from,
    as in `train`; parties see it as the parameters of the first round.
    """
    require_config(terms)
    require_dataset(dataset)
    run, start = Run.at(out), None
    if prior is not None or terms.prior.name is not None:
        info = dataset.info if dataset else describe(terms.data, data_root(terms))
        terms, start = take_prior(terms, info, prior, None, run)
    run.require_new(terms, resume=resume)
    if run.is_trained:
        return load(run.path, threads=terms.machine.threads)
    own = dataset is not None or is_own(terms.data)
    dataset = dataset or read_data(terms, Seeds.secret(), quiet)
    if own:
        require_apart(dataset, terms.data)
    if prior is not None:
        require_unseen(prior, dataset.train)
    federation = Federation.found(run.path, terms, dataset.info, dataset.test, start=start, resume=resume)
    directories = found_parties(terms, parties_of(run.path), dataset, resume=resume)
    return rounds(federation, directories, quiet=quiet)
