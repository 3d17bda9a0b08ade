"""A party: its records, its seeds, its ledger. It trusts no one, and answers only what its plan allows."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from stobatch.config import RunConfig
from stobatch.data import DatasetInfo, Examples
from stobatch.dp.guarantee import PrivacyGuarantee
from stobatch.dp.plan import DpSgdPlan
from stobatch.errors import DataError, ModelError, RunError, StobatchError
from stobatch.federated.plan import Account, PartySizes, party_config, party_info, party_of, party_plan, terms_hash
from stobatch.files import PRIVATE, as_written, open_private, read_tensors, remove_temporaries, write_tensors
from stobatch.loading import make_network
from stobatch.results import Participation, Statement
from stobatch.runs import Run
from stobatch.seeds import Seeds
from stobatch.sound.method import Sound
from stobatch.training.device import use_device
from stobatch.training.engines import Gradients
from stobatch.training.ledger import Ledger
from stobatch.training_run import write_start

EXAMPLES = Path(PRIVATE) / "examples.safetensors"


def write_examples(path: Path, examples: Examples) -> None:
    """Keep records in a private file of the owner's."""
    tensors = {"inputs": examples.inputs, "labels": examples.labels}
    if examples.groups is not None:
        tensors["groups"] = examples.groups
    write_tensors(path, tensors, {"num_classes": str(examples.num_classes)}, private=True)


def read_examples(path: Path) -> Examples:
    tensors, metadata = read_tensors(path)
    return Examples(tensors["inputs"], tensors["labels"], int(metadata["num_classes"]), groups=tensors.get("groups"))


class Refused(StobatchError):  # noqa: N818
    """A party does not answer; nothing was computed from its records, and nothing counted."""


class Spent(Refused):
    """A party has given all the answers that its noise was chosen for. The others may go on."""


@dataclass(frozen=True)
class Answer:
    """A noisy gradient, and how many answers the party has counted with this one."""

    gradients: Gradients
    rounds: int


class Party:
    """One owner of records, bound to a run directory of its own.

    **Guarantee.** Everything that ever leaves a party through `answer`, taken together, is (ε, δ)-private when one of
    its records is added or removed, with `guarantee`'s ε. An answer is counted on disk before it is
    computed, so a crash counts too often and never too seldom. Its sample and noise depend on that count and on nothing
    that the server says, so the same question asked twice gets two independent answers, and pays twice. Beyond the cap
    there are none. Assumes secret seeds, and a directory that is never set back to an older copy.
    """

    def __init__(
        self, run: Path, terms: RunConfig, info: DatasetInfo, name: str, train: Examples, seeds: Seeds
    ) -> None:
        self.run, self.terms, self.name = Run(run), terms, name
        self.sizes: PartySizes = party_of(terms, name)
        self.config = party_config(terms, self.sizes)
        self.plan: DpSgdPlan = party_plan(terms, info, name)
        self.root = seeds
        self.info = party_info(info, self.sizes, len(train))
        self.agreed = terms_hash(terms, info.input_shape, info.num_classes, persons=info.num_persons is not None)
        _require_own_data(train, self.info)
        device = use_device(self.config.machine)
        network = make_network(self.config, self.info, Seeds.reproducible(0), None).to(device)
        self.trainable = Sound().prepare(self.config, self.plan, network, train, seeds)
        self.train = train

    @classmethod
    def found(
        cls, run: Path, terms: RunConfig, info: DatasetInfo, name: str, train: Examples, *, resume: bool = False
    ) -> Party:
        """Make a party's directory, or open the one that is there. Checks everything before it writes anything."""
        sizes = party_of(terms, name)
        Run(run).require_new(party_config(terms, sizes), resume=resume)
        if resume and Run(run).has("terms"):
            party = cls.open(run)
            if party.train.fingerprint() != train.fingerprint():
                raise RunError(
                    f"{run} was started with other records.", remedy="Hand over the same ones, or another run."
                )
            return party
        # Different parties of one reproducible experiment still draw different numbers.
        seeds = Seeds.secret() if terms.seed is None else Seeds.reproducible(terms.seed).child("party", name)
        party = cls(run, terms, info, name, train, seeds)
        write_start(party.run, party.config, party.info, party.plan, Seeds(seeds.root, public=False))
        party.run.write("data", {"sha256": train.fingerprint()}, private=True)
        write_examples(run / EXAMPLES, train)
        # Last of all: a directory without terms is a start that was cut off, and nothing was answered from it.
        party.run.write("terms", {"party": name, "config": terms.to_dict(), "dataset": info.to_dict()})
        return party

    @classmethod
    def open(cls, run: Path) -> Party:
        """Return the party that a directory belongs to, with its own records and seeds."""
        directory = Run(run)
        if not directory.has("terms"):
            raise RunError(f"{run} is not a party.", remedy="Make one: `stobatch federate`, or Party.found in Python.")
        with as_written(run):
            agreed = directory.read("terms")
            terms, info = RunConfig.from_dict(agreed["config"]), DatasetInfo.from_dict(agreed["dataset"])
            train = read_examples(run / EXAMPLES)
            if train.fingerprint() != directory.read("data", private=True)["sha256"]:
                raise RunError(
                    f"the records in {run} were changed.", remedy="Restore them: the guarantee is about those."
                )
            root = int(directory.read("seeds", private=True)["root"])
            return cls(run, terms, info, agreed["party"], train, Seeds(root, public=terms.seed is not None))

    @property
    def rounds(self) -> int:
        """Return the number of counted answers, those that a crash cut off included."""
        return Ledger.of(self.run.path).accounted

    @property
    def guarantee(self) -> PrivacyGuarantee:
        """Return the party's guarantee for the answers counted so far, towards an observer of all of them."""
        planned = self.plan.claim
        spent = replace(
            planned,
            epsilon=self.plan.spent(self.rounds),
            unit=f"{self.plan.unit} of {self.name}",
            assumptions=(str(Account(self.name, self.plan, self.rounds)), *planned.assumptions),
        )
        return spent.with_public_seed() if self.root.public else spent

    def statement(self) -> Statement:
        """Return the party's public numbers, and keep them in its directory, with the guarantee."""
        with self._locked():
            return self._statement()

    def _statement(self) -> Statement:
        rounds = self.rounds
        statement = Statement(
            name=self.name,
            terms=self.agreed,
            sizes=self.plan.sizes(),
            noise_multiplier=self.plan.noise_multiplier,
            rounds=rounds,
            epsilon=self.plan.spent(rounds),
            seed_mark=format(self.root.child("mark").root, "064x")[:32],
        )
        Participation(**statement.to_dict(), guarantee=self.guarantee).write(self.run)
        return statement

    def answer(self, parameters: Mapping[str, Tensor], step: int, terms: str) -> Answer:
        """Return the noisy clipped gradient at the parameters it was sent: (Σ clipped + σC noise) / (C · B)."""
        with self._locked():
            self._require_valid_question(parameters, step, terms)
            number = self._count_answer()
            # Not the step, which the server chooses: the same noise at two points would cancel in the difference.
            self.trainable.seeds = self.root.child("answer", number)
            gradients = self._compute(step)
            Ledger.of(self.run.path).made(1).save(self.run.path)
            return Answer(gradients, self._statement().rounds)

    def _count_answer(self) -> int:
        """Count an answer before it is computed. Returns its number, which no other answer has."""
        ledger = Ledger.of(self.run.path)
        if ledger.accounted >= self.plan.steps:
            raise Spent(
                f"{self.name} has answered {ledger.accounted} times and answers no more.",
                why="Its noise was chosen for that many answers, no matter who asks.",
                remedy="Go on without it, or make a new federation with more noise.",
            )
        ledger.begun(1).save(self.run.path)
        return ledger.accounted

    def _compute(self, step: int) -> Gradients:
        # How far the federation is, in steps of the party's own plan: schedules follow the common clock.
        clock = step * self.plan.steps // self.terms.training.steps
        (task,) = self.trainable.tasks(clock)
        return {name: value.detach().cpu() for name, value in self.trainable.gradients(task, clock).items()}

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of this directory, over all processes that opened it: two answers must not share a number."""
        import fcntl  # here, because not every system has it, and only answers need it

        path = self.run.path / PRIVATE / "lock"
        with os.fdopen(open_private(path, os.O_WRONLY), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            remove_temporaries(self.run.path)
            yield

    def _require_valid_question(self, parameters: Mapping[str, Tensor], step: int, terms: str) -> None:
        """Refuse what does not belong to this federation, before records are touched."""
        if terms != self.agreed:
            raise Refused(
                f"{self.name} agreed to terms {self.agreed}, and is asked under {terms}.",
                why="Noise, clipping and schedule follow from the terms.",
                remedy="Start server and parties with the same settings.",
            )
        steps = self.terms.training.steps
        if not 0 <= step < steps:
            raise Refused(f"step {step} is none of the {steps} agreed on.", remedy=f"Ask for steps 0 to {steps - 1}.")
        own = dict(self.trainable.network.named_parameters())
        shapes = {name: tuple(value.shape) for name, value in parameters.items()}
        if shapes != {name: tuple(value.shape) for name, value in own.items()}:
            raise Refused(
                f"the parameters that {self.name} was sent do not fit its network.",
                remedy="Start server and parties with the same model.architecture.",
            )
        with torch.no_grad():
            for name, value in own.items():
                value.copy_(parameters[name].to(value))
        try:
            self.trainable.after_update()
        except ModelError as error:
            raise Refused(error.what, why=error.why, remedy=error.remedy) from None


def _require_own_data(train: Examples, info: DatasetInfo) -> None:
    actual = (len(train), tuple(train.inputs.shape[1:]), train.num_classes)
    if actual != (info.num_train, info.input_shape, info.num_classes):
        raise DataError(
            f"the records of {info.name} are not what the terms say.",
            why=f"Count, shape and classes are {actual}, not {(info.num_train, info.input_shape, info.num_classes)}.",
            remedy="Agree on terms with the party's real numbers; the noise follows from them.",
        )
    if (None if train.persons is None else len(train.persons)) != info.num_persons:
        raise DataError(
            f"the persons of {info.name} are not what the terms say.",
            why="A party's numbers count persons where its records have some, and the noise follows from them.",
            remedy="Agree on terms with the party's real number of persons.",
        )
