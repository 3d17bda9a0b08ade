"""One party that lies, shouts or is gone costs the others no more than an honest one could."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.small_federation import STEPS, WIDE, flat, opened, pictures, started, terms
from torch import Tensor

import stobatch
from stobatch.config import RunConfig
from stobatch.data import Dataset
from stobatch.federated import Answer, Federation, FederationError, InProcessTransport, converse
from stobatch.federated import server as server_module
from stobatch.federated.rounds import found_parties, parties_of
from stobatch.federated.server import FAILURE, STATE, Said, answer_bound, clip_answer, median, norm_of

Change = Callable[[Answer, int], Said]


class Hostile(InProcessTransport):
    """All parties at one table, one of which says something else than it computed."""

    def __init__(self, parties: Mapping[str, Any], name: str, change: Change) -> None:
        super().__init__(parties)
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "change", change)

    def answers(self, names: Sequence[str], federation: Federation) -> dict[str, Said]:
        found = super().answers(names, federation)
        said = found.get(self.name)  # type: ignore[attr-defined]
        if isinstance(said, Answer):
            found[self.name] = self.change(said, federation.step)  # type: ignore[attr-defined]
        return found


def scaled(factor: float, *, at: int | None = None) -> Change:
    def change(answer: Answer, step: int) -> Answer:
        if at not in (None, step):
            return answer
        return Answer({name: value * factor for name, value in answer.gradients.items()}, answer.rounds)

    return change


# Counts.


@pytest.mark.parametrize("count", [10**9, STEPS + 1, 0, -1], ids=str)
def test_a_count_that_cannot_be_right_is_noticed_when_it_is_said_and_the_others_go_on(
    tmp_path: Path, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    federation, directories = started(tmp_path / "run")
    lie: Change = lambda answer, step: Answer(answer.gradients, count) if step == 3 else answer  # noqa: E731
    model = converse(federation, Hostile(opened(directories), "north", lie))
    assert f"north counts {count} answers" in capsys.readouterr().err
    assert model.run.read("federation")["answers_received"] == {"north": 3, "east": 6, "south": 4}
    assert model.guarantee.epsilon <= 3.0
    assert model.guarantee.unit.endswith("but north")


def test_a_statement_that_cannot_be_right_is_refused_before_the_first_step(tmp_path: Path) -> None:
    federation, directories = started(tmp_path / "run")
    statements = InProcessTransport(opened(directories)).statements()
    with pytest.raises(FederationError, match=r"north counts 7 answers and may give 6\."):
        federation.enrol(statements | {"north": statements["north"].replace(rounds=STEPS + 1)})


# Answers.


def test_an_answer_that_is_not_finite_excludes_its_party_and_the_last_good_state_stays(tmp_path: Path) -> None:
    federation, directories = started(tmp_path / "run")
    federation.enrol(InProcessTransport(opened(directories)).statements())
    shout = Hostile(opened(directories), "north", scaled(math.inf, at=1))
    federation.combine(shout.answers(federation.asked(), federation))
    before = federation.parameters()
    answers = shout.answers(federation.asked(), federation)
    with pytest.raises(FederationError, match=r"no answer in step 1 can be used. the answer of north is not made of"):
        federation.combine({"north": answers["north"]})
    kept = Federation.open(federation.run.path)
    assert kept.step == 1
    assert all(torch.equal(value, before[name]) for name, value in kept.parameters().items())
    federation.combine(answers)
    assert federation.excluded == {"north": "the answer of north is not made of numbers."}
    assert (federation.step, federation.asked()) == (2, ["east", "south"])


@pytest.mark.parametrize("factor", [1e4, 1e30])
def test_one_step_moves_no_further_than_the_bound_allows(tmp_path: Path, factor: float) -> None:
    """Against the same step without the lie: at most the liar's weight times twice its bound."""
    moved = []
    for number, change in enumerate((scaled(1.0), scaled(factor))):
        federation, directories = started(tmp_path / str(number))
        table = Hostile(opened(directories), "north", change)
        federation.enrol(table.statements())
        federation.combine(table.answers(federation.asked(), federation))
        moved.append(flat(federation.parameters()))
    rate, weight = federation.terms.training.learning_rate, 12 / (12 + 8)
    difference = float((moved[1] - moved[0]).norm())
    assert 0 < difference <= rate * weight * 2 * federation.bounds["north"] * (1 + 1e-5)
    assert federation.clipped == {"north": 1, "east": 0, "south": 0}


def test_honest_answers_are_left_as_they_are(tmp_path: Path) -> None:
    """1e-9 is the chance that a bound touches any of them; an answer of 20,003 weights comes near it."""
    federation, directories = started(tmp_path / "run", terms(**{"model.architecture": WIDE}))
    sizes = {}

    def remember(answer: Answer, step: int) -> Answer:
        sizes[step] = norm_of(answer.gradients)
        return answer

    model = converse(federation, Hostile(opened(directories), "north", remember))
    assert model.run.read("federation")["answers_clipped"] == {"north": 0, "east": 0, "south": 0}
    assert len(sizes) == STEPS
    assert all(0.6 < size / federation.bounds["north"] < 1 for size in sizes.values())


def test_the_bound_holds_in_a_simulation_and_one_for_half_the_noise_does_not() -> None:
    """2,000 honest answers, each as long as its sample and its noise can make it: all examples pull one way."""
    plan = stobatch.plan(terms(), dataset=pictures()).plans["north"]  # type: ignore[attr-defined]
    generator, weights = np.random.default_rng(0), 20_000
    samples = generator.binomial(plan.num_examples, plan.sampling_rate, 2000)
    noise = np.sqrt(generator.chisquare(weights, 2000))
    sizes = (samples + plan.noise_multiplier * noise) / plan.expected_batch_size
    assert sizes.max() < answer_bound(plan, weights, 2000) < 2 * sizes.mean()
    halved = replace(plan, target_epsilon=2 * plan.target_epsilon)
    assert halved.noise_multiplier < 0.7 * plan.noise_multiplier
    assert sizes.min() > answer_bound(halved, weights, 2000), "the broken twin clips honest answers"
    assert FAILURE == 1e-9


@given(st.integers(0, 2**32), st.floats(1e-3, 1e3), st.sampled_from([1.0, 1e-6, 1e4, 1e30]))
def test_what_is_clipped_keeps_its_direction_and_its_bound(seed: int, bound: float, factor: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    answer = {"w": torch.randn(3, 2, generator=generator) * factor, "b": torch.randn(4, generator=generator) * factor}
    kept = clip_answer(answer, bound)
    if norm_of(answer) <= bound:
        assert kept is answer
    else:
        assert norm_of(kept) == pytest.approx(bound, rel=1e-5)
        cosine = torch.nn.functional.cosine_similarity(flat(kept), flat(answer), dim=0)
        assert float(cosine) == pytest.approx(1, abs=1e-6)


def test_a_first_state_without_the_later_numbers_is_read(tmp_path: Path) -> None:
    federation, directories = started(tmp_path / "run")
    table = InProcessTransport(opened(directories))
    federation.enrol(table.statements())
    federation.combine(table.answers(federation.asked(), federation))
    tensors = load_file(tmp_path / "run" / STATE)
    old = {"step": "1", "descents": "1", "config_hash": federation.terms.training_hash}
    save_file(tensors | {"answers": tensors["answers"][:2].contiguous()}, tmp_path / "run" / STATE, old)
    again = Federation.open(tmp_path / "run")
    assert (again.taken, again.silent, again.excluded) == (federation.taken, dict.fromkeys(again.taken, 0), {})


def test_later_settings_leave_the_hash_of_older_federations_alone() -> None:
    plain = terms().to_dict()["method"]
    assert not {"combine", "answer_within"} & set(plain)
    changed = terms(**{"method.combine": "median", "method.answer_within": 5.0})
    assert RunConfig.from_dict(changed.to_dict()) == changed
    assert changed.training_hash != terms().training_hash


# The median.


@given(st.integers(1, 9), st.data())
def test_with_fewer_than_half_hostile_the_median_lies_among_the_honest(parties: int, data: st.DataObject) -> None:
    hostile = data.draw(st.integers(0, (parties - 1) // 2))
    numbers = st.floats(-(2.0**100), 2.0**100, width=32)
    values = data.draw(st.lists(st.tuples(numbers, numbers), min_size=parties, max_size=parties))
    answers = [{"w": torch.tensor(pair)} for pair in values]
    found = median(answers, {"w": torch.zeros(2)})["w"]
    honest = torch.stack([answer["w"] for answer in answers[hostile:]])
    assert bool((found >= honest.min(0).values).all())
    assert bool((found <= honest.max(0).values).all())


def pictures_of(train: int, tests: int = 200) -> Dataset:
    """Pictures that are bright on the left or on the right."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(2, (train + tests,), generator=generator)
    inputs = 0.3 * torch.randn(train + tests, 1, 6, 6, generator=generator)
    inputs[labels == 0, :, :, :3] += 0.5
    inputs[labels == 1, :, :, 3:] += 0.5
    inputs = inputs.clamp(-1, 1)
    return stobatch.from_tensors(inputs[:train], labels[:train], inputs[train:], labels[train:], num_classes=2)


def accuracy_under(path: Path, change: Change, **changes: Any) -> float:
    """Of five parties, the last of which is hostile; learning is easy, and 30 steps are enough for it."""
    own = {
        "method.parties": [f"p{number}:300:60" for number in range(5)],
        "method.epsilon": 8.0,
        "method.momentum": 0.0,
        "training.steps": 30,
        "training.monitor_every": 30,
        "training.learning_rate": 1.0,
        "model.architecture": "linear",
    }
    data, agreed = pictures_of(1500), terms(**own | changes)
    federation = Federation.found(path, agreed, data.info, data.test)
    directories = found_parties(agreed, parties_of(path), data)
    model = converse(federation, Hostile(opened(directories), "p4", change))
    return float((model.network(data.test.inputs).argmax(1) == data.test.labels).float().mean())


def unclipped(answer: dict[str, Tensor], bound: float) -> dict[str, Tensor]:
    return answer


def test_one_shout_costs_what_an_honest_answer_could_and_without_the_bound_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm = accuracy_under(tmp_path / "calm", scaled(1.0))
    assert calm > 0.9
    for number, factor in enumerate((-1e4, -1e30)):
        assert accuracy_under(tmp_path / f"shout-{number}", scaled(factor, at=25)) > calm - 0.05
    # The broken twin combines what it is sent.
    monkeypatch.setattr(server_module, "clip_answer", unclipped)
    assert accuracy_under(tmp_path / "broken", scaled(-1e4, at=25)) < calm - 0.2


def test_a_party_that_pulls_backwards_in_every_step_moves_the_mean_and_not_the_median(tmp_path: Path) -> None:
    mean = accuracy_under(tmp_path / "mean", against_the_labels)
    middle = accuracy_under(tmp_path / "median", against_the_labels, **{"method.combine": "median"})
    assert middle > 0.9
    assert mean < middle - 0.2


def against_the_labels(answer: Answer, step: int) -> Answer:
    """The direction that turns left into right, as long as the bound lets it be."""
    (weight, matrix), *rest = answer.gradients.items()
    pixels = torch.ones(6, 6)
    pixels[:, 3:] = -1
    push = torch.stack([pixels.flatten(), -pixels.flatten()]).reshape(matrix.shape)
    return Answer({weight: push * 1e9, **{name: value * 0 for name, value in rest}}, answer.rounds)


# Drop-out.


class Absent(InProcessTransport):
    """Parties some of which are gone in some steps."""

    gone: Mapping[str, range]

    def answers(self, names: Sequence[str], federation: Federation) -> dict[str, Said]:
        here = [name for name in names if federation.step not in self.gone.get(name, range(0))]
        return super().answers(here, federation)

    def counts(self, names: Sequence[str]) -> dict[str, int]:
        return super().counts([name for name in names if STEPS not in self.gone.get(name, range(0))])


def absent(parties: Mapping[str, Any], **gone: range) -> Absent:
    table = Absent(parties)
    object.__setattr__(table, "gone", gone)
    return table


def test_a_party_that_is_gone_for_good_is_counted_as_if_it_had_answered(tmp_path: Path) -> None:
    federation, directories = started(tmp_path / "run")
    model = converse(federation, absent(opened(directories), north=range(2, STEPS + 1)))
    training = model.run.read("training")
    assert model.run.read("federation")["answers_received"]["north"] == 2
    assert training["rounds"]["north"] == STEPS, "what it computed before it died nobody knows"
    assert training["steps"] == STEPS
    assert model.guarantee.epsilon == stobatch.plan(terms(), dataset=pictures()).guarantee.epsilon


def test_a_party_that_comes_back_says_what_it_counted(tmp_path: Path) -> None:
    federation, directories = started(tmp_path / "run")
    model = converse(federation, absent(opened(directories), north=range(2, 4), east=range(5, STEPS)))
    assert model.run.read("federation")["answers_received"] == {"north": 4, "east": 5, "south": 4}
    assert model.run.read("training")["rounds"] == {"north": 4, "east": 5, "south": 4}


def test_a_step_that_nobody_answers_is_not_taken(tmp_path: Path) -> None:
    federation, directories = started(tmp_path / "run")
    everyone = dict.fromkeys(directories, range(3, STEPS))
    with pytest.raises(FederationError, match=r"nobody answered in step 3 within 600 s\. See .* --resume"):
        converse(federation, absent(opened(directories), **everyone))
    model = converse(Federation.open(tmp_path / "run"), InProcessTransport(opened(directories)))
    assert model.run.read("training")["steps"] == STEPS


def test_a_server_goes_on_without_a_party_that_is_missing_after_the_first_step(tmp_path: Path) -> None:
    federation, directories = started(tmp_path / "run")
    parties = opened(directories)
    federation.enrol(InProcessTransport(parties).statements())
    federation.combine(InProcessTransport(parties).answers(federation.asked(), federation))
    again = Federation.open(tmp_path / "run")
    again.enrol({name: said for name, said in InProcessTransport(parties).statements().items() if name != "east"})
    again.combine(absent(parties, east=range(STEPS)).answers(again.asked(), again))
    assert (again.step, again.silent["east"]) == (2, 1)
