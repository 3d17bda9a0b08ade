"""Every party counts its own answers, before it gives them, and stops at its cap whatever it is asked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support.small_federation import STEPS, ask, flat, opened, pictures, started, terms
from torch import Tensor

import stobatch
from stobatch.dp.accounting import PoissonGaussian, noise_for
from stobatch.dp.plan import NOISE_ASSUMPTION
from stobatch.federated import (
    Answer,
    FederatedPlan,
    Federation,
    FederationError,
    InProcessTransport,
    Party,
    Spent,
    converse,
)
from stobatch.training.ledger import Ledger
from stobatch.types import Neighbours, Status
from stobatch.verification.checks import first_difference


def test_epsilon_is_the_largest_of_the_parties_own(tmp_path: Path) -> None:
    """The oracle knows the accountant and the sizes, and nothing of the classes."""
    federation, directories = started(tmp_path / "run")
    model = converse(federation, InProcessTransport(opened(directories)))
    expected = {}
    for name, records, batch, rounds in (("north", 40, 12, 6), ("east", 30, 8, 6), ("south", 20, 6, 4)):
        noise = noise_for(3.0, 1e-3, batch / records, rounds)
        expected[name] = (noise, PoissonGaussian(batch / records, noise, rounds).epsilon(1e-3))
    table = {row["name"]: row for row in model.run.read("federation")["parties"]}
    assert {name: (row["noise_multiplier"], row["epsilon"]) for name, row in table.items()} == expected
    assert {name: row["rounds"] for name, row in table.items()} == {"north": 6, "east": 6, "south": 4}
    guarantee = model.guarantee
    assert guarantee.epsilon == max(epsilon for _, epsilon in expected.values()) <= 3.0
    assert (guarantee.delta, guarantee.neighbours, guarantee.status) == (1e-3, Neighbours.ADD_REMOVE, Status.VOID)
    assert guarantee.secret_seed_status is model.claim.status is Status.PROVED
    assert guarantee.unit == "training example of any one party"
    for name, path in directories.items():
        said = json.loads((path / "participation.json").read_text())
        assert said["epsilon"] == said["guarantee"]["void_epsilon"] == expected[name][1]


def test_given_noise_is_every_partys_own_and_what_it_spends_is_accounted(tmp_path: Path) -> None:
    agreed = terms(**{"method.noise_multiplier": 2.0, "method.epsilon": 30.0})
    federation, directories = started(tmp_path / "run", agreed)
    model = converse(federation, InProcessTransport(opened(directories)))
    sizes = (("north", 40, 12, 6), ("east", 30, 8, 6), ("south", 20, 6, 4))
    expected = {
        name: PoissonGaussian(batch / records, 2.0, rounds).epsilon(1e-3) for name, records, batch, rounds in sizes
    }
    table = {row["name"]: row for row in model.run.read("federation")["parties"]}
    assert {name: (row["noise_multiplier"], row["epsilon"]) for name, row in table.items()} == {
        name: (2.0, epsilon) for name, epsilon in expected.items()
    }
    assert model.guarantee.epsilon == max(expected.values()) < 30.0
    checked = stobatch.verify(model.run.path, dataset=pictures(), sample=0)
    assert {check.name: check.outcome for check in checked.checks}["second accountant"] == "agrees"


def test_a_party_that_took_part_less_has_spent_less(tmp_path: Path) -> None:
    """South stays away from the third round on; the others' guarantee does not change, its own does."""
    federation, directories = started(tmp_path / "run")
    parties = opened(directories)

    class WithoutSouth(InProcessTransport):
        def answers(self, names: list[str], federation: Federation) -> dict[str, Answer]:  # type: ignore[override]
            return super().answers([n for n in names if n != "south" or federation.step < 2], federation)

    model = converse(federation, WithoutSouth(parties))
    assert isinstance(model.plan, FederatedPlan)
    south = next(account for account in model.plan.accounts if account.name == "south")
    assert south.rounds == 1
    assert south.epsilon == PoissonGaussian(0.3, south.plan.noise_multiplier, 1).epsilon(1e-3)
    assert south.epsilon < model.guarantee.epsilon
    assert parties["south"].guarantee.epsilon == south.epsilon
    assert "south: 20 records, sampling rate 0.3" in " ".join(model.guarantee.assumptions)


def test_a_federation_and_its_parties_say_the_same_of_their_noise() -> None:
    plan = stobatch.plan(terms(), dataset=pictures())
    assert isinstance(plan, FederatedPlan)
    (line,) = [line for line in plan.guarantee.assumptions if "noise is" in line]
    assert line.startswith(NOISE_ASSUMPTION)
    assert all(NOISE_ASSUMPTION in party.guarantee.assumptions for party in plan.plans.values())
    older = "floating-point Gaussian noise is treated as ideal, and how long an answer takes tells nothing"
    assert not first_difference([older], [line], "files of older versions are verified")


def test_before_training_a_plan_promises_what_the_caps_allow() -> None:
    plan = stobatch.plan(terms(), dataset=pictures())
    assert isinstance(plan, FederatedPlan)
    assert [account.rounds for account in plan.accounts] == [6, 6, 4]
    assert 2.9 < plan.guarantee.epsilon <= 3.0


@pytest.mark.parametrize("steps", [[0] * STEPS, [5, 4, 3, 2, 1, 0], [3, 3, 1, 1, 0, 2]])
def test_beyond_its_cap_a_party_refuses_whatever_the_server_asks(steps: list[int], tmp_path: Path) -> None:
    federation, directories = started(tmp_path / "run")
    north = Party.open(directories["north"])
    for step in steps:
        ask(north, federation, step)
    for step in range(STEPS):
        with pytest.raises(Spent, match="north has answered 6 times and answers no more"):
            ask(north, federation, step)
    with pytest.raises(Spent):
        ask(Party.open(directories["north"]), federation)
    assert Ledger.of(directories["north"]) == Ledger(6, 0)
    assert north.guarantee.epsilon == north.plan.guarantee.epsilon <= 3.0


def test_a_crash_between_the_ledger_and_the_message_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    federation, directories = started(tmp_path / "run")
    north = Party.open(directories["north"])
    ask(north, federation)

    def crash(self: Party, step: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Party, "_compute", crash)
        with pytest.raises(KeyboardInterrupt):
            ask(north, federation, 1)
    assert Ledger.of(directories["north"]) == Ledger(1, 1)
    assert north.rounds == 2
    assert north.guarantee.epsilon == PoissonGaussian(0.3, north.plan.noise_multiplier, 2).epsilon(1e-3)
    again = Party.open(directories["north"])
    assert again.answer(federation.parameters(), 1, federation.agreed).rounds == 3
    for _ in range(3):
        ask(again, federation, 2)
    with pytest.raises(Spent):
        ask(again, federation, 3)


def test_the_number_of_an_answer_is_never_used_twice_even_by_two_processes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation, directories = started(tmp_path / "run")
    numbers: list[int] = []
    entered = Party._count_answer

    def remember(self: Party) -> int:
        numbers.append(entered(self))
        return numbers[-1]

    monkeypatch.setattr(Party, "_count_answer", remember)
    copies = [Party.open(directories["north"]) for _ in range(STEPS)]
    with ThreadPoolExecutor(STEPS) as pool:
        messages = list(pool.map(lambda party: flat(ask(party, federation)), copies))
    assert sorted(numbers) == list(range(STEPS))
    assert Ledger.of(directories["north"]) == Ledger(STEPS, 0)
    assert len(torch.stack(messages).unique(dim=0)) == STEPS


class AsksTwice(InProcessTransport):
    """A broken server: it asks one party a second time in every round, to average its noise away."""

    def answers(self, names: list[str], federation: Federation) -> dict[str, Answer]:  # type: ignore[override]
        super().answers(["north"], federation)
        return super().answers(names, federation)


def test_a_server_that_asks_twice_pays_twice_and_gets_no_more(tmp_path: Path) -> None:
    federation, directories = started(tmp_path / "run")
    parties = opened(directories)
    model = converse(federation, AsksTwice(parties))
    assert parties["north"].rounds == model.run.read("training")["rounds"]["north"] == 6
    assert model.run.read("federation")["answers_received"]["north"] == 3
    assert model.guarantee.epsilon <= 3.0


class Forgets(Party):
    """A broken party: what it counted it forgets."""

    def answer(self, parameters: Mapping[str, Tensor], step: int, terms: str) -> Answer:
        found = super().answer(parameters, step, terms)
        Ledger().save(self.run.path)
        return Answer(found.gradients, self.rounds)


def test_a_party_that_does_not_count_is_excluded_and_nothing_is_said_about_its_records(tmp_path: Path) -> None:
    federation, directories = started(tmp_path / "run")
    model = converse(
        federation, InProcessTransport(opened(directories) | {"north": Forgets.open(directories["north"])})
    )
    assert federation.excluded == {"north": "north counts 0 answers and has given 1."}
    assert model.run.read("federation")["answers_received"] == {"north": 0, "east": 6, "south": 4}
    assert model.guarantee.unit == "training example of any one party but north"
    assert "nothing is said about the records of north, which was excluded" in " ".join(model.guarantee.objections)
    assert stobatch.load(federation.run.path).guarantee == model.guarantee


def test_a_ledger_that_was_set_back_is_found_out(tmp_path: Path) -> None:
    federation, directories = started(tmp_path / "run")
    parties = opened(directories)
    federation.enrol(InProcessTransport(parties).statements())
    for _ in range(2):
        federation.combine(InProcessTransport(parties).answers(federation.asked(), federation))
    Ledger().save(directories["north"])
    federation.combine(InProcessTransport(parties).answers(federation.asked(), federation))
    assert federation.excluded == {"north": "north counts 1 answers and has given 3."}
    assert "north" not in Federation.open(federation.run.path).asked()


def test_a_ledger_that_was_set_back_before_a_server_goes_on_is_refused_at_once(tmp_path: Path) -> None:
    federation, directories = started(tmp_path / "run")
    parties = opened(directories)
    federation.enrol(InProcessTransport(parties).statements())
    for _ in range(2):
        federation.combine(InProcessTransport(parties).answers(federation.asked(), federation))
    Ledger(1, 0).save(directories["north"])
    with pytest.raises(FederationError, match="north counts 1 answers and has given 2"):
        Federation.open(federation.run.path).enrol(InProcessTransport(parties).statements())
