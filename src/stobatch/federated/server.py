"""The server's side: send parameters, combine noisy answers with public weights, descend. It never sees a record."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from math import log, sqrt
from pathlib import Path

import torch
from pydantic import ValidationError
from scipy.stats import binom
from torch import Tensor

from stobatch import strict_json
from stobatch.config import RunConfig
from stobatch.data import DatasetInfo, Examples
from stobatch.dp.plan import DpSgdPlan
from stobatch.errors import RunError, StobatchError
from stobatch.federated.party import Answer, read_examples, write_examples
from stobatch.federated.plan import FederatedPlan, method_of_terms, sizes_of, terms_hash
from stobatch.files import (
    PRIVATE,
    as_written,
    read_tensors,
    serialise_tensors,
    tensors_sha256,
    write_atomically,
    write_tensors,
)
from stobatch.loading import TrainedModel, describe_network, load, make_network, make_plan, read_start, seeds_of
from stobatch.results import DataDigests, FederationAccount, HistoryRow, StartedRun, Statement, Training
from stobatch.results.document import describe
from stobatch.runs import Run, seal
from stobatch.sound.averaged import make_descent
from stobatch.training.checkpoint import load_optimiser, named_after, optimiser_tensors
from stobatch.training.descent import Descent
from stobatch.training.device import environment, use_device
from stobatch.training.engines import Gradients
from stobatch.training.trainable import BEFORE_AVERAGING, Monitored
from stobatch.training_run import keep_measurements, write_start

STATE = Path(PRIVATE) / "federation.safetensors"
WATCHED = Path(PRIVATE) / "held_out.safetensors"
"""Test images that accuracy is watched on: not a party's records, and kept from the parties."""


class FederationError(StobatchError):
    """A party that does not fit the federation, or an answer that does not fit the round."""


Said = Answer | FederationError | None
"""What a party says to a question: an answer, why there is none, or nothing because its rounds are spent."""


def statement_of(text: str) -> Statement:
    """Return what a party says of itself, from the text that came by the network; refuse what is malformed."""
    try:
        return Statement.model_validate(strict_json.read(text))
    except ValueError as error:
        fault = describe(error) if isinstance(error, ValidationError) else str(error)
        raise FederationError(
            f"a party's statement cannot be read: {fault}.", remedy="Start all parties with this version."
        ) from None


class Federation:
    """The model that the parties train together, and what the public knows of them.

    What it holds is computed from answers, which are private already, from public terms and from held-out test images.
    So its directory, its logs and the model cost the parties nothing beyond their answers.
    """

    def __init__(
        self,
        run: Path,
        terms: RunConfig,
        info: DatasetInfo,
        held_out: Examples,
        start: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.run, self.terms, self.info = Run(run), terms, info
        self.method = method_of_terms(terms)
        plan = make_plan(terms, info, None)
        assert isinstance(plan, FederatedPlan)
        self.plan = plan
        self.parties = sizes_of(terms)
        self.agreed = terms_hash(terms, info.input_shape, info.num_classes, persons=info.num_persons is not None)
        self.seeds = seeds_of(terms, self.run)
        start = start or read_start(terms, self.run)
        self.network = make_network(terms, info, self.seeds, None, start).to(use_device(terms.machine))
        self.network.calibrate()
        self.optimiser = make_descent(self.network.parameters(), terms.training, self.method)
        self.descent = Descent(terms.training, dict(self.network.named_parameters()), [self.optimiser])
        self.monitored = Monitored.of(held_out, terms, self.network)
        self.step, self.descents, self.history = 0, 0, list[HistoryRow]()
        self.taken, self.counted = dict.fromkeys(self.plan.plans, 0), dict.fromkeys(self.plan.plans, 0)
        self.silent = dict.fromkeys(self.plan.plans, 0)
        """Questions since a party was last heard that it may have counted without an answer arriving."""
        self.excluded: dict[str, str] = {}
        """Parties that are not asked any more, and why."""
        self.clipped = dict.fromkeys(self.plan.plans, 0)
        self.bounds = self._answer_bounds()
        self.started = time.monotonic()
        if (run / STATE).exists():
            with as_written(run / STATE):
                self._restore()

    @classmethod
    def found(
        cls,
        run: Path,
        terms: RunConfig,
        info: DatasetInfo,
        held_out: Examples,
        *,
        start: Mapping[str, Tensor] | None = None,
        resume: bool = False,
    ) -> Federation:
        """Make the server's directory, or continue with the one that is there; `start` are the weights of a prior."""
        Run(run).require_new(terms, resume=resume)
        watched = held_out.limit(terms.training.monitor_examples)
        federation = cls(run, terms, info, watched, start)
        write_start(federation.run, terms, info, federation.plan, federation.seeds, start)
        write_examples(run / WATCHED, watched)
        return federation

    @classmethod
    def open(cls, run: Path) -> Federation:
        """Return the federation that a directory belongs to, at the step it has come to."""
        with as_written(run):
            started = StartedRun.read(Run(run))
            watched = read_examples(run / WATCHED)
            terms, info = RunConfig.from_dict(started.config), DatasetInfo.from_dict(started.dataset.to_dict())
        return cls(run, terms, info, watched)

    @property
    def done(self) -> bool:
        return self.step == self.terms.training.steps

    @property
    def note(self) -> str:
        return f"test accuracy {self.history[-1].test_accuracy:.3f}" if self.history else ""

    def parameters(self) -> dict[str, Tensor]:
        """Return what a round sends to the parties."""
        return {name: value.detach().cpu().clone() for name, value in self.network.named_parameters()}

    def asked(self) -> list[str]:
        """Return who takes part in the present step, by the public timetable."""
        steps = self.terms.training.steps
        due = [party.name for party in self.parties if party.takes_part(self.step, steps)]
        return [name for name in due if name not in self.excluded]

    def silent_parties(self) -> list[str]:
        """Return who was asked and not heard since, and so may have counted more answers than the server knows of."""
        return [name for name, questions in self.silent.items() if questions and name not in self.excluded]

    def enrol(self, statements: Mapping[str, Statement]) -> None:
        """Refuse a party that has other terms, other numbers or another party's seeds.

        All have to be there before the first step. One that is missing later is left out until it is back.
        """
        missing = set(self.plan.plans) - set(statements)
        if missing and not self.step:
            raise FederationError(f"no word from {', '.join(sorted(missing))}.", remedy="Start all parties.")
        statements = {name: statement for name, statement in statements.items() if name not in self.excluded}
        marks: dict[str, str] = {}
        for name, statement in statements.items():
            if name not in self.plan.plans or statement.name != name:
                raise FederationError(
                    f"'{statement.name}' is not a party of this federation.", remedy="Mend method.parties."
                )
            planned = self.plan.plans[name].sizes()
            for key in sorted(planned):
                if statement.sizes.get(key) != planned[key]:
                    raise FederationError(
                        f"{name} has {key}={statement.sizes.get(key)}, the terms say {planned[key]}.",
                        why="Weights and guarantee follow from public numbers that all have agreed on.",
                        remedy="Start server and parties with the same settings.",
                    )
            if statement.terms != self.agreed:
                raise FederationError(
                    f"{name} agreed to terms {statement.terms}, the server to {self.agreed}.",
                    why="Model, losses or schedule differ.",
                    remedy="Start server and parties with the same settings.",
                )
            if statement.seed_mark in marks:
                raise FederationError(
                    f"{name} and {marks[statement.seed_mark]} have the same seeds.",
                    why="Each could take the other's noise off.",
                    remedy="Make a new one; never copy a party's directory.",
                )
            marks[statement.seed_mark] = name
        for name, statement in statements.items():
            self._count(name, statement.rounds, given=self.taken[name])

    def hear(self, counts: Mapping[str, int]) -> None:
        """Believe the final counts of parties that had been silent; of the others assume the most."""
        for name, counted in counts.items():
            try:
                self._count(name, counted, given=self.taken[name])
            except FederationError as error:
                self._exclude(name, error)

    def _count(self, name: str, counted: int, *, given: int) -> None:
        """Believe a party's ledger, which knows of crashes, where it can be right: when it speaks, not at the end."""
        most = self.plan.plans[name].steps
        if not counted <= most:
            raise FederationError(
                f"{name} counts {counted} answers and may give {most}.",
                why="A party refuses beyond its rounds, so its count cannot be right.",
                remedy="Ask its owner.",
            )
        if counted < max(given, self.counted[name]):
            raise FederationError(
                f"{name} counts {counted} answers and has given {max(given, self.counted[name])}.",
                why="Its ledger was set back, so its ε would be too small.",
                remedy="Restore the party's private/ledger.json.",
            )
        self.taken[name], self.counted[name], self.silent[name] = given, counted, 0

    @property
    def rounds(self) -> dict[str, int]:
        """Return the answers to account for: what a party counts, and later questions that it may have counted."""
        plans = self.plan.plans.items()
        return {name: min(plan.steps, self.counted[name] + self.silent[name]) for name, plan in plans}

    def combine(self, answers: Mapping[str, Said]) -> None:
        """Take one step: the mean Σ B_i g_i / Σ B_i of those who answered, or the median, and the descent.

        Every answer is clipped to its public bound first. One that cannot be right, whose count cannot, or that is not
        finite, excludes its party, and the others go on. Who has not answered is left out of the step, and counted as
        if it had. Where all who are asked have spent their rounds, because a crash made some necessary again, the step
        passes and the model stays what it is. Where no answer came, or no usable one, nothing happens at all: the
        state on disk is that of the last step.
        """
        asked = self.asked()
        if strangers := [name for name in answers if name not in asked]:
            raise FederationError(f"{strangers[0]} was not asked in step {self.step}.", remedy="Follow the timetable.")
        usable: dict[str, Gradients] = {}
        wrong: dict[str, FederationError] = {}
        failed = {name: answer for name, answer in answers.items() if isinstance(answer, FederationError)}
        for name in asked:
            answer = answers.get(name)
            if isinstance(answer, Answer):
                try:
                    usable[name] = self._check_answer(name, answer)
                except FederationError as error:
                    wrong[name] = error
        absent = [name for name in asked if name not in answers or name in failed]
        if not usable and (wrong or absent):
            raise self._no_answer_error([*wrong.values(), *failed.values()])
        for name, reason in wrong.items():
            self._exclude(name, reason)
        for name in absent:
            self.silent[name] += 1
        if usable:
            self._descend(usable)
        self.step += 1
        self._measure_accuracy()
        # After every step: one that is asked for again costs the parties privacy.
        self._save()

    def _no_answer_error(self, reasons: Sequence[FederationError]) -> FederationError:
        remedy = "See that the parties run, then continue with --resume."
        if reasons:
            sentences = dict.fromkeys(f"{error.what} {error.why}".strip() for error in reasons)
            return FederationError(
                f"no answer in step {self.step} can be used.", why=" ".join(sentences), remedy=remedy
            )
        return FederationError(
            f"nobody answered in step {self.step} within {self.method.answer_within:g} s.", remedy=remedy
        )

    def _check_answer(self, name: str, answer: Answer) -> Gradients:
        """Return an answer that can be right, clipped; its count is taken down."""
        wanted = {key: tuple(value.shape) for key, value in self.network.named_parameters()}
        if {key: tuple(value.shape) for key, value in answer.gradients.items()} != wanted:
            raise FederationError(
                f"the answer of {name} does not fit the network.", remedy="Start all with the same settings."
            )
        if not all(value.is_floating_point() and bool(value.isfinite().all()) for value in answer.gradients.values()):
            raise FederationError(f"the answer of {name} is not made of numbers.", remedy="Ask its owner.")
        self._count(name, answer.rounds, given=self.taken[name] + 1)
        kept = clip_answer(answer.gradients, self.bounds[name])
        self.clipped[name] += kept is not answer.gradients
        return kept

    def _exclude(self, name: str, error: FederationError) -> None:
        self.excluded[name] = error.what
        print(f"stobatch: {error.what} It is excluded from step {self.step} on.", file=sys.stderr)

    def _descend(self, usable: Mapping[str, Gradients]) -> None:
        parameters = dict(self.network.named_parameters())
        if self.method.combine == "median":
            combined = median(list(usable.values()), parameters)
        else:
            weights = [self.plan.plans[name].expected_batch_size for name in usable]
            combined = weighted_mean(list(usable.values()), weights, parameters)
        self.descents += 1
        self.descent.step(self.step, combined)
        self.network.calibrate()

    def _answer_bounds(self) -> dict[str, float]:
        size = sum(value.numel() for value in self.network.parameters())
        answers = sum(plan.steps for plan in self.plan.plans.values())
        return {name: answer_bound(plan, size, answers) for name, plan in self.plan.plans.items()}

    def _measure_accuracy(self) -> None:
        training = self.terms.training
        if self.step % training.monitor_every == 0 or self.done:
            right = self.monitored.accuracy(self.network)
            self.history.append(HistoryRow(step=self.step, test_accuracy=right))

    def finish(self) -> TrainedModel:
        """Return the averaged model, and the guarantee for the answers that the parties themselves have counted."""
        if not any(self.taken.values()):
            raise FederationError(
                "no party has answered, so there is no model.",
                why="Their rounds are spent.",
                remedy="Plan a new federation; what these parties may tell is told.",
            )
        rounds = self.rounds
        final = self.plan.recorded(rounds, self.excluded)
        self.optimiser.use_average()
        self.network.calibrate()
        model = serialise_tensors(self.network.state_dict(), {"config_hash": self.terms.training_hash})
        FederationAccount(
            parties=tuple(account.to_document() for account in final.accounts),
            answers_received=self.taken,
            answers_clipped=self.clipped,
            answer_bounds=self.bounds,
            excluded=self.excluded,
            guarantee=final.guarantee,
        ).write(self.run)
        Training(
            rounds=rounds,
            excluded=self.excluded,
            steps=self.descents,
            **keep_measurements(self.run, self.seeds, time.monotonic() - self.started),
            data=DataDigests(
                name=self.info.name,
                public=False,
                training_records=sum(plan.num_examples for plan in self.plan.plans.values()),
                test_records=self.info.num_test,
            ),
            network=describe_network(self.network, handed_over=False),
            device=str(self.network.device),
            torch=torch.__version__,
            **self.monitored.saved(self.network),
            history_of=BEFORE_AVERAGING,
            weights_sha256=tensors_sha256(model),
            history=tuple(self.history),
        ).write(self.run)
        write_atomically(self.run.model_file, lambda out: out.write(model))
        seal(self.run, "train", environment(self.network.device))
        return load(self.run.path, device=str(self.network.device), threads=self.terms.machine.threads)

    def _save(self) -> None:
        tensors = {f"network.{name}": value for name, value in self.network.state_dict().items()}
        tensors |= optimiser_tensors(self.optimiser, "optimiser.")
        tensors["answers"] = torch.tensor(
            [list(numbers.values()) for numbers in (self.taken, self.counted, self.silent, self.clipped)]
        )
        rows = [[row.step, row.test_accuracy] for row in self.history]
        tensors["history"] = torch.tensor(rows, dtype=torch.float64).reshape(-1, 2)
        metadata = {
            "step": str(self.step),
            "descents": str(self.descents),
            "config_hash": self.terms.training_hash,
            "excluded": json.dumps(self.excluded),
        }
        write_tensors(self.run.path / STATE, tensors, metadata, private=True)

    def _restore(self) -> None:
        tensors, metadata = read_tensors(self.run.path / STATE)
        if metadata.get("config_hash") != self.terms.training_hash:
            raise RunError(f"{self.run.path / STATE} is of another federation.", remedy="Choose another --out.")
        self.step, self.descents = int(metadata["step"]), int(metadata["descents"])
        # A state that was written before parties could stay away has the first two rows.
        kept = (self.taken, self.counted, self.silent, self.clipped)
        for numbers, row in zip(kept, tensors["answers"].tolist(), strict=False):
            numbers.update(zip(numbers, row, strict=True))
        self.excluded = json.loads(metadata.get("excluded", "{}"))
        self.history = [HistoryRow(step=int(step), test_accuracy=right) for step, right in tensors["history"].tolist()]
        self.network.load_state_dict(named_after("network.", tensors))
        load_optimiser(self.optimiser, named_after("optimiser.", tensors))
        self.network.calibrate()


FAILURE = 1e-9
"""The probability that a bound touches any answer of honest parties in a whole federation."""


def answer_bound(plan: DpSgdPlan, num_parameters: int, num_answers: int) -> float:
    """Return a bound on the norm of a party's answer that honest answers keep.

    **Guarantee.** Over all `num_answers` of a federation, honest answers exceed their bounds with probability at most
    `FAILURE`. An answer is (Σ clipped / C + σZ) / B: the sum has norm at most n, the size of a Poisson sample, and
    ‖Z‖ is at most √d + t but for a chance of e^(-t²/2), since the norm is 1-Lipschitz and its mean is at most √d. Half
    of an answer's share of `FAILURE` goes to the binomial tail of n, half to the Gaussian one.
    """
    half = FAILURE / num_answers / 2
    most = min(plan.num_examples, int(binom.isf(half, plan.num_examples, plan.sampling_rate)))
    noise = plan.noise_multiplier * (sqrt(num_parameters) + sqrt(2 * log(1 / half)))
    return (most + noise) / plan.expected_batch_size


def norm_of(answer: Gradients) -> float:
    """Return the norm of all of an answer as one vector, in float64: float32 squares overflow from 1e19 on."""
    return sqrt(sum(float(value.double().square().sum()) for value in answer.values()))


def clip_answer(answer: Gradients, bound: float) -> Gradients:
    """Return the answer, scaled down to the bound where it is longer; to the bit where it is not."""
    size = norm_of(answer)
    return answer if size <= bound else {name: value * (bound / size) for name, value in answer.items()}


def weighted_mean(answers: Sequence[Gradients], weights: Sequence[int], like: Mapping[str, Tensor]) -> Gradients:
    """Return Σ B_i g_i / Σ B_i, in the order given."""
    total = sum(weights)
    average = {key: torch.zeros_like(value) for key, value in like.items()}
    for answer, weight in zip(answers, weights, strict=True):
        for key, value in answer.items():
            average[key] += value.to(average[key]) * (weight / total)
    return average


def median(answers: Sequence[Gradients], like: Mapping[str, Tensor]) -> Gradients:
    """Return the median of each coordinate, one vote for each party; of an even number the mean of the middle two.

    **Guarantee.** Where fewer than half of the answers are hostile, every coordinate lies between the smallest and the
    largest of the honest answers: of the middle two, each has an honest answer on either side, or is one.

    >>> [value.tolist() for value in median([{"w": torch.tensor([x])} for x in (1.0, 9e30, 3.0)], {"w": torch.zeros(1)}
    ... ).values()]
    [[3.0]]
    """
    medians = {}
    for key, value in like.items():
        ordered = torch.stack([answer[key].to(value) for answer in answers]).sort(dim=0).values
        medians[key] = (ordered[(len(answers) - 1) // 2] + ordered[len(answers) // 2]) / 2
    return medians
