"""Every sign is raised by something that deserves it, and not by its healthy twin; how often by chance, by simulation.

Simulations have fixed seeds. Had they none, each would raise a false alarm with probability at most 1e-9: a count of
flags is refused beyond the 1e-9 quantile of the binomial law of the module's own rate, 0.001.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from samples import of_the_mean, radii, seeded, table, with_mean
from scipy import stats
from torch import Tensor

from stobatch.attacks import FGSM, IFGSM, Attack, Ball, Goal, Madry, Plain
from stobatch.config import EvaluationConfig
from stobatch.evaluation import sanity
from stobatch.evaluation.accuracy import AttackedTable
from stobatch.evaluation.functions import SinglePass
from stobatch.evaluation.protocols import Adaptive, Published
from stobatch.evaluation.sanity import (
    BROKEN_CERTIFICATE,
    RULES,
    Certified,
    Evidence,
    Probe,
    certified_from,
    flags,
)
from stobatch.models import Network
from stobatch.results import Kind, SanityFlag

RATE = 0.001
Labels = NDArray[np.int64]


def names(found: list[SanityFlag]) -> set[str]:
    return {flag.name for flag in found}


def labels_of(made: Network, inputs: Tensor) -> Tensor:
    """The model's own answers, so that it is right on every clean input."""
    with torch.no_grad():
        return made(inputs).argmax(1)


def probed(made: Network, inputs: Tensor, size: float, steps: int) -> Evidence:
    """One step, the usual steps and four times as many; and the widest ball."""
    labels, (radius, widest) = labels_of(made, inputs), radii(size, 2.0)

    def answers(attack: Attack, within: float) -> Labels:
        ball = Ball.around(inputs, replace(radius, size=within))
        return made(attack.run(Plain(made), ball, Goal(labels), seeded())).argmax(1).numpy()

    one, usual, more = (answers(attack, size) for attack in (FGSM(), IFGSM(steps), IFGSM(4 * steps)))
    return Evidence((), Probe(labels.numpy(), one, usual, more, answers(Madry(steps), widest.size), radius, 2))


def attacked(made: Network, inputs: Tensor, size: float, steps: int = 20) -> Evidence:
    """Both protocols on a single pass, with attacks that follow gradients only."""
    config = EvaluationConfig(
        radii=(size,), attacks=("fgsm", "ifgsm"), attack_steps=steps,
        adaptive_attacks=("fgsm", "ifgsm"), adaptive_steps=steps,
    )  # fmt: skip
    function, labels = SinglePass(made, 100), labels_of(made, inputs)
    tables = []
    for protocol in (Published(config), Adaptive(config)):
        columns = protocol.rows(function, inputs, labels, seeded())
        attacks = protocol.attack_names(function)
        tables.append(table(columns, attacks, (size,), protocol=protocol.name))
    return Evidence(tables)


# Models of two classes whose logits are formulas of the mean input u.


def slope(mean: Tensor) -> tuple[Tensor, Tensor]:
    return mean, -mean


def rounded(mean: Tensor) -> tuple[Tensor, Tensor]:
    """Right wherever the mean is not far below zero, in steps that have no slope."""
    return (10 * mean).round() / 10 + 0.45, 0 * mean


def unrounded(mean: Tensor) -> tuple[Tensor, Tensor]:
    return mean + 0.45, 0 * mean


def saturated(mean: Tensor) -> tuple[Tensor, Tensor]:
    """Beyond the bound on the last hidden layer nearly everywhere: no slope there, except in the copy without it."""
    return 50 * mean, -50 * mean


def trap(mean: Tensor) -> tuple[Tensor, Tensor]:
    """For the second class: a low hill close by, where small steps end, and a high one further off."""
    return 0 * mean, -0.3 + 0.2 * torch.sin(2 * torch.pi * mean / 0.4) + 2.5 * (mean - 0.3).clamp(min=0)


def ridge(mean: Tensor) -> tuple[Tensor, Tensor]:
    """The second class wins between 0.1 and 0.2 only, so that one long step passes it by."""
    return 0 * mean, 0.05 - (mean - 0.15).abs()


NEAR_ZERO, POSITIVE, ASIDE = with_mean(-0.02, 0.02), with_mean(0.05, 0.5), with_mean(0.2, 0.4)


def certificates(**changes: object) -> Certified:
    plain = Certified(
        kind="corrected",
        status="proved",
        norm="linf",
        input_range="[-1, 1]",
        function="single_pass",
        failure_probability=0.0,
        prediction=np.zeros(60, dtype=np.int64),
        size=np.full(60, 0.05),
    )
    return replace(plain, **changes)


SOUND = ASIDE[:, 0, 0, 0].double().numpy() - 1e-6
"""The model below changes its mind at a mean of 0, so this is how far each of the inputs is safe: 0.2 to 0.4."""


def with_certificates(factor: float, **changes: object) -> Evidence:
    """Attacked with 0.3, which breaks some; certified for a multiple of what is true."""
    evidence = attacked(of_the_mean(slope), ASIDE, 0.3)
    return replace(evidence, certified=[certificates(size=factor * SOUND, **changes)])


Case = Callable[[], list[SanityFlag]]
RAISED: dict[str, Case] = {
    "more steps do not help": lambda: flags(probed(of_the_mean(rounded), POSITIVE, 0.9, 10)),
    "attack has not converged": lambda: flags(probed(of_the_mean(ridge), NEAR_ZERO, 0.5, 1)),
    "the widest ball does not reach chance": lambda: flags(probed(of_the_mean(rounded), POSITIVE, 0.9, 10)),
    "single-step beats iterative": lambda: flags(attacked(of_the_mean(trap), NEAR_ZERO, 0.5)),
    "transfer beats white-box": lambda: flags(attacked(of_the_mean(saturated), ASIDE, 0.5)),
    "zero gradients": lambda: flags(attacked(of_the_mean(slope, scale=1e4), ASIDE, 0.1)),
    "a certified input was broken inside its radius": lambda: flags(with_certificates(1.5)),
    "more is certified than survives": lambda: flags(with_certificates(9.0)),
    "units of radius differ": lambda: flags(with_certificates(1.5, norm="l2")),
    "inputs look like [0, 1]": lambda: flags(Evidence(()), lowest_input=0.0),
}
HEALTHY: dict[str, Case] = {
    "more steps do not help": lambda: flags(probed(of_the_mean(ridge), NEAR_ZERO, 0.5, 4)),
    "attack has not converged": lambda: flags(probed(of_the_mean(ridge), NEAR_ZERO, 0.5, 20)),
    "the widest ball does not reach chance": lambda: flags(probed(of_the_mean(unrounded), POSITIVE, 0.9, 10)),
    "single-step beats iterative": lambda: flags(attacked(of_the_mean(ridge), NEAR_ZERO, 0.5)),
    "transfer beats white-box": lambda: flags(attacked(of_the_mean(slope), ASIDE, 0.5)),
    "zero gradients": lambda: flags(attacked(of_the_mean(slope), ASIDE, 0.1)),
    "a certified input was broken inside its radius": lambda: flags(with_certificates(1.0)),
    "more is certified than survives": lambda: flags(with_certificates(1.0)),
    "units of radius differ": lambda: flags(with_certificates(1.0)),
    "inputs look like [0, 1]": lambda: flags(Evidence(()), lowest_input=-1.0),
}


def test_every_rule_has_its_case() -> None:
    assert [rule.name for rule in RULES] == list(RAISED) == list(HEALTHY)
    for rule in RULES:
        assert rule.level in ("warning", "error")
        assert all(text.strip() for text in (rule.raised_if, rule.explanation, rule.remedy))


@pytest.mark.parametrize("name", RAISED)
def test_what_deserves_a_flag_gets_it(name: str) -> None:
    found = RAISED[name]()
    flag = next(flag for flag in found if flag.name == name)
    assert flag.evidence
    rule = next(rule for rule in RULES if rule.name == name)
    assert flag.to_dict() == {**vars(rule), "evidence": flag.evidence, "refutes": flag.refutes}
    assert (flag.refutes is not None) == (flag.level == "error")


@pytest.mark.parametrize("name", HEALTHY)
def test_what_is_healthy_gets_no_such_flag(name: str) -> None:
    assert name not in names(HEALTHY[name]())


def test_sound_certificates_are_tried_before_they_are_found_healthy() -> None:
    evidence = with_certificates(1.0)
    assert (evidence.certified[0].size >= 0.3).sum() >= 20
    assert not evidence.tables[1].survives("ifgsm", evidence.tables[1].radii[0]).all()


def test_errors_come_first() -> None:
    found = flags(with_certificates(1.5), lowest_input=0.5)
    assert len(found) > 1
    assert [flag.level for flag in found] == sorted(flag.level for flag in found)
    assert found[0].level == "error"


def test_without_evidence_there_is_no_flag() -> None:
    assert flags(Evidence(())) == []


# Broken certificates.


def votes(other: NDArray[np.bool_], *, size: float = 0.1, abstain: NDArray[np.bool_] | None = None) -> AttackedTable:
    """A vote under one attack, which makes some answers another label than 0."""
    quiet = np.zeros(len(other), dtype=bool)
    columns = {
        "label": np.zeros(len(other), dtype=int),
        "abstain": quiet,
        f"madry@{size:g}": other.astype(int),
        f"madry@{size:g}/abstain": quiet if abstain is None else abstain,
    }
    return table(columns, ("madry",), (size,), function="vote")


def broken(other: NDArray[np.bool_], failure: float = 0.05, **kept: NDArray[np.bool_]) -> list[SanityFlag]:
    vouched = certificates(
        function="vote", failure_probability=failure, prediction=np.zeros(len(other), dtype=int),
        size=np.full(len(other), 0.2),
    )  # fmt: skip
    found = flags(Evidence([votes(other, **kept)], certified=[vouched]))
    return [flag for flag in found if flag.name == BROKEN_CERTIFICATE.name]


def first(count: int, total: int = 100) -> NDArray[np.bool_]:
    return np.arange(total) < count


def test_a_radius_far_too_large_is_refuted_on_a_deterministic_function_by_a_single_input() -> None:
    evidence = with_certificates(1.0)
    sizes = np.zeros(60)
    sizes[0] = 0.3  # its mean is 0.2, so 0.3 is far too much
    flag = flags(replace(evidence, certified=[certificates(size=sizes)]))[0]
    assert flag.level == "error"
    assert "1 of 1 certified inputs broken (rows 0)" in flag.evidence
    assert "corrected certificates (proved)" in flag.evidence


def test_a_vote_may_fail_as_often_as_it_says_and_no_more() -> None:
    """2 x 0.05 of 100 may go wrong; from where on 0.001 is exceeded the binomial law says."""
    limit = int(stats.binom.isf(RATE, 100, 0.1)) + 1
    assert broken(first(limit + 1)) != []
    assert broken(first(limit - 1)) == []
    assert broken(first(5)) == []
    assert broken(first(100))[0].level == "error"


def test_answers_that_abstain_do_not_count() -> None:
    assert broken(first(100), abstain=first(100)) == []
    assert broken(first(100), abstain=first(60)) != []


def test_inputs_without_a_certificate_that_large_do_not_count() -> None:
    vouched = certificates(function="vote", prediction=np.zeros(100, dtype=int), size=np.full(100, 0.0999))
    assert flags(Evidence([votes(first(100))], certified=[vouched])) == []
    exact = replace(vouched, size=np.full(100, 0.1))
    assert flags(Evidence([votes(first(100))], certified=[exact])) != []


def test_certificates_of_another_function_do_not_count() -> None:
    vouched = certificates(function="single_pass", prediction=np.zeros(100, dtype=int), size=np.full(100, 0.2))
    assert flags(Evidence([votes(first(100))], certified=[vouched])) == []


def test_only_the_inputs_in_both_tables_are_compared() -> None:
    vouched = certificates(function="vote", prediction=np.zeros(30, dtype=int), size=np.full(30, 0.2))
    assert flags(Evidence([votes(~first(30))], certified=[vouched])) == []
    assert "30 of 30" in flags(Evidence([votes(first(30))], certified=[vouched]))[0].evidence


def test_certificates_are_read_from_what_certify_leaves() -> None:
    """An abstaining verdict certifies nothing; the published rule knows no abstaining and states no probability."""
    records = {
        "prediction": [1, 2],
        "abstain": [False, True],
        "corrected_radius": [0.1, 0.2],
        "published_largest_attack": [0.3, 0.4],
    }
    unit = {"norm": "linf", "input_range": "[-1, 1]", "function": "vote", "source": "here"}
    kinds = [
        Kind(name="published", status="claimed", failure_probability=None, column="published_largest_attack", **unit),
        Kind(name="corrected", status="proved", failure_probability=0.01, column="corrected_radius", **unit),
    ]
    (sure,) = certified_from(records, [kinds[1].replace(failure_probability=0.0)], 0.05)
    assert sure.failure_probability == 0.0, "a certificate that never fails may not be allowed a few breaks"
    published, corrected = certified_from(records, kinds, 0.05)
    assert published.size.tolist() == [0.3, 0.4]
    assert corrected.size.tolist() == [0.1, 0.0]
    assert (published.failure_probability, corrected.failure_probability) == (0.05, 0.01)
    assert (published.status, corrected.status) == ("claimed", "proved")
    assert corrected.prediction.tolist() == [1, 2]


# How often chance raises a flag.

TRIALS = 2000
MOST = int(stats.binom.isf(1e-9, TRIALS, RATE))


def exchangeable(random: np.random.Generator, probability: float, *, count: int = 60) -> tuple[Labels, Labels]:
    """Two attacks that are equally good: each answer is wrong (1) with the same probability."""
    wrong = random.random((2, count)) < probability
    return wrong[0].astype(np.int64), wrong[1].astype(np.int64)


def chance_of_steps(random: np.random.Generator) -> Evidence:
    usual, more = exchangeable(random, 0.5)
    right = np.zeros(60, dtype=np.int64)
    return Evidence((), Probe(right, right, usual, more, 1 - right, radii(0.1)[0], 2))


def chance_of_the_widest_ball(random: np.random.Generator) -> Evidence:
    """Exactly at chance: two classes, half of the answers right."""
    widest, _ = exchangeable(random, 0.5)
    right = np.zeros(60, dtype=np.int64)
    return Evidence((), Probe(right, right, right, 1 - right, widest, radii(0.1)[0], 2))


SIZES = (0.1, 0.2, 0.3)


def chance_of_a_single_step(random: np.random.Generator) -> Evidence:
    columns: dict[str, Labels] = {"label": np.zeros(60, dtype=np.int64)}
    for size in SIZES:
        columns[f"fgsm@{size:g}"], columns[f"ifgsm@{size:g}"] = exchangeable(random, 0.5)
    return Evidence([table(columns, ("fgsm", "ifgsm"), SIZES)])


def chance_of_transfer(random: np.random.Generator) -> Evidence:
    ours, theirs = ({"label": np.zeros(60, dtype=np.int64)} for _ in range(2))
    for size in SIZES:
        ours[f"madry@{size:g}"], theirs[f"madry@{size:g}"] = exchangeable(random, 0.5)
    return Evidence([table(ours, ("madry",), SIZES, protocol="published"), table(theirs, ("madry",), SIZES)])


def chance_of_a_broken_certificate(random: np.random.Generator) -> Evidence:
    """As bad as a sound one may be: certificates and attacked answers each wrong with 0.05, six looks at each input."""
    attacks = ("ifgsm:score", "ifgsm:vote")
    columns: dict[str, object] = {"label": np.zeros(100, dtype=int), "abstain": np.zeros(100, dtype=bool)}
    for size in SIZES:
        for attack in attacks:
            columns[f"{attack}@{size:g}"] = (random.random(100) < 0.05).astype(int)
            columns[f"{attack}@{size:g}/abstain"] = np.zeros(100, dtype=bool)
    vouched = certificates(
        function="vote", failure_probability=0.05, prediction=(random.random(100) < 0.05).astype(int),
        size=np.full(100, 0.5),
    )  # fmt: skip
    return Evidence([table(columns, attacks, SIZES, function="vote")], certified=[vouched])


BY_CHANCE = {
    "attack has not converged": chance_of_steps,
    "the widest ball does not reach chance": chance_of_the_widest_ball,
    "single-step beats iterative": chance_of_a_single_step,
    "transfer beats white-box": chance_of_transfer,
    "a certified input was broken inside its radius": chance_of_a_broken_certificate,
}


def raised(name: str, *, trials: int = TRIALS) -> int:
    """In how many trials chance raises the flag, at one radius or several."""
    random = np.random.default_rng(0)
    return sum(name in names(flags(BY_CHANCE[name](random))) for _ in range(trials))


@pytest.mark.parametrize("name", BY_CHANCE)
def test_chance_raises_a_statistical_flag_one_time_in_a_thousand_at_most(name: str) -> None:
    """False alarm 1e-9."""
    assert raised(name) <= MOST


@pytest.mark.parametrize("name", [name for name in BY_CHANCE if "certified" not in name])
def test_a_careless_level_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken twin: one flag in twenty by chance."""
    monkeypatch.setattr(sanity, "FALSE_ALARM_RATE", 0.05)
    assert raised(name) > MOST


def test_one_test_for_all_looks_at_an_input_is_caught() -> None:
    """The broken twin: it allows for one attacked answer that is wrong, where each attack and radius asks anew."""
    random = np.random.default_rng(0)
    count = 0
    for _ in range(200):
        evidence = chance_of_a_broken_certificate(random)
        found, label = evidence.tables[0], evidence.certified[0].prediction
        other = [found.column(attack, radius) != label for attack in found.attacks for radius in found.radii]
        ever = int(np.logical_or.reduce(other).sum())
        count += stats.binom.sf(ever - 1, 100, 0.1) < RATE
    assert count > stats.binom.isf(1e-9, 200, RATE)
