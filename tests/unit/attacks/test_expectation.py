"""Randomised models: attacks follow the mean over the noise, with fresh draws at every step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from oracles import NORMS, ROUNDING, ball, best_gains, digits, excess, rows, seeded
from torch import Tensor, nn

from stobatch.attacks import ATTACKS, Attack, Budget, Expectation, Goal, Plain, Scores, Victim, module_sample
from stobatch.attacks.expectation import Sample
from stobatch.errors import SettingError
from stobatch.types import Norm

VALUES = 16
LABELS = torch.zeros(6).long()

every_norm = pytest.mark.parametrize("norm", NORMS)


def weight(values: int = VALUES) -> Tensor:
    return torch.randn(2, values, generator=seeded(100), dtype=torch.float64) / values


def noisy_inputs(scale: float) -> Sample:
    """Logits W(x + noise) of two classes, the first far in front; the mean over all draws."""
    lead = torch.tensor([1 + 2 * float((weight()[1] - weight()[0]).abs().sum()), 0.0], dtype=torch.float64)

    def sample(draws: int, generator: torch.Generator) -> Scores:
        noise = scale * torch.randn(draws, 1, VALUES, generator=generator, dtype=torch.float64)
        return lambda x: ((x.flatten(1) + noise) @ weight().T).mean(0) + lead

    return sample


def noisy_weights(scale: float, values: int = VALUES) -> Sample:
    """Logits (W + noise)x: here the gradient itself is noisy."""

    def sample(draws: int, generator: torch.Generator) -> Scores:
        noise = scale * torch.randn(draws, 2, values, generator=generator, dtype=torch.float64).mean(0) / values
        return lambda x: x.flatten(1) @ (weight(values) + noise).T

    return sample


@every_norm
@pytest.mark.parametrize("name", ["fgsm", "ifgsm", "mim", "madry", "apgd_ce", "apgd_t"])
def test_on_a_noisy_linear_model_the_optimum_is_reached(name: str, norm: Norm) -> None:
    """The noise moves all points alike and the best point not at all; only APGD's choice of steps can suffer."""
    around = ball(digits(6), norm, 0.15)
    push = (weight()[1] - weight()[0]).numpy()
    victim = Expectation(noisy_inputs(0.5), draws=32)
    found = ATTACKS[name](Budget(steps=25)).run(victim, around, Goal(LABELS), seeded())
    assert excess(around, found) <= ROUNDING
    reached = (rows(found) - rows(around.centre)) @ push
    assert (reached >= (0.97 if name.startswith("apgd") else 0.999) * best_gains(around, push)).all()


@every_norm
def test_more_draws_come_closer_to_the_optimum_under_noisy_gradients(norm: Norm) -> None:
    """The first is the twin that attacks a single draw."""
    around = ball(digits(6), norm, 0.1)
    push = (weight()[1] - weight()[0]).numpy()
    shares = []
    for draws in (1, 400):
        found = ATTACKS["fgsm"](Budget()).run(Expectation(noisy_weights(5.0), draws), around, Goal(LABELS), seeded())
        shares.append(((rows(found) - rows(around.centre)) @ push / best_gains(around, push)).mean())
    assert shares[0] < 0.8
    assert shares[1] > 0.9


def test_steps_average_the_noise_even_with_few_draws_each() -> None:
    """Momentum over two hundred steps of one draw each sees the mean; the twin with frozen draws sees its one draw."""
    around = ball(digits(6), Norm.L2, 0.1)
    push = (weight()[1] - weight()[0]).numpy()

    def share(victim: Victim) -> float:
        found = ATTACKS["mim"](Budget(steps=200)).run(victim, around, Goal(LABELS), seeded())
        return float(((rows(found) - rows(around.centre)) @ push / best_gains(around, push)).mean())

    frozen = Plain(noisy_weights(5.0)(1, seeded(1)))
    assert share(Expectation(noisy_weights(5.0), 1)) > 0.9
    assert share(frozen) < 0.8


def distinct_draws(make: Callable[[Sample], Victim], attack: Attack) -> int:
    """How many different draws an attack has seen through such a victim."""
    seen: set[int] = set()

    def sample(draws: int, generator: torch.Generator) -> Scores:
        noise = int(torch.randint(2**62, (), generator=generator))

        def scores(x: Tensor) -> Tensor:
            seen.add(noise)
            return x.flatten(1) @ weight().T + torch.tensor([9.0, 0.0], dtype=x.dtype)

        return scores

    attack.run(make(sample), ball(digits(6), Norm.LINF, 0.1), Goal(LABELS), seeded())
    return len(seen)


@dataclass(frozen=True)
class Frozen:
    """The broken twin: it draws once and for all."""

    scores: Scores
    passes: int = 1
    deterministic: bool = False

    def draw(self, generator: torch.Generator) -> Scores:
        return self.scores

    def draw_to_compare(self, generator: torch.Generator) -> Scores:
        return self.scores


@pytest.mark.parametrize("name", ["ifgsm", "mim", "madry", "apgd_ce", "apgd_dlr", "apgd_t", "square"])
def test_every_step_sees_fresh_draws(name: str) -> None:
    """Two draws of 62 bits are equal with probability 1e-18."""
    attack = ATTACKS[name](Budget(steps=20, queries=20))
    assert distinct_draws(lambda sample: Expectation(sample, 2), attack) >= 20
    assert distinct_draws(lambda sample: Frozen(sample(2, seeded())), attack) == 1


def test_no_point_counts_as_a_success_for_a_lucky_draw() -> None:
    """One draw in ten flips the prediction. Whoever stops there stays near the centre; the label can really be left."""

    def sample(draws: int, generator: torch.Generator) -> Scores:
        luck = 4.0 * float(torch.rand((), generator=generator) < 0.1)
        return lambda x: torch.stack([1.0 - x.flatten(1).mean(1), luck + 0 * x.flatten(1)[:, 0]], 1)

    around = ball(-torch.ones(6, 1, 4, 4), Norm.LINF, 1.0)
    for name in ("ifgsm", "apgd_ce"):
        found = ATTACKS[name](Budget(steps=50)).run(Expectation(sample, 1), around, Goal(LABELS), seeded())
        assert float(found.mean()) > 0.99


def test_judging_does_not_see_a_shift_of_the_logits() -> None:
    """Adding a number to all logits of one draw changes no probability; a mean of exponentials of logits would."""

    def sample(shifted: float) -> Sample:
        def of(draws: int, generator: torch.Generator) -> Scores:
            first = float(torch.rand((), generator=generator) < 0.5)
            return lambda x: x + first * torch.tensor([3.0, 0.0]) + shifted * first

        return of

    points = torch.randn(5, 2, generator=seeded())
    plain, moved = (Expectation(sample(s), 1).draw_to_compare(seeded())(points).log_softmax(1) for s in (0.0, 50.0))
    assert torch.allclose(plain, moved, atol=1e-4)


def adaptive_draws(scale: float, *, most: int = 64) -> int:
    points = torch.rand(20, 400, generator=seeded(), dtype=torch.float64)
    goal = Goal(torch.zeros(20).long())
    return Expectation.adaptive(noisy_weights(scale, 400), points, goal, seeded(), most=most).draws


def test_as_many_draws_as_the_noise_needs() -> None:
    """The cosine of two noisy gradients is 1/(1 + s²/n) up to 400^(-1/2); a half needs n = s² draws.

    A cosine of random directions in 400 dimensions is off by 0.3 with probability below 2·exp(-400·0.3²/2) = 3e-8;
    the bounds below leave that much.
    """
    assert adaptive_draws(0.0) == 1
    assert adaptive_draws(0.1) == 1
    assert 2 <= adaptive_draws(2.5) <= 32
    assert 16 <= adaptive_draws(6.0, most=1024) <= 256
    assert adaptive_draws(2.5) < adaptive_draws(20.0)


@pytest.mark.parametrize("most", [1, 2, 3, 48, 64, 100])
def test_never_more_draws_than_allowed(most: int) -> None:
    assert most / 2 < adaptive_draws(1e6, most=most) <= most


@pytest.mark.parametrize("draws", [0, -1])
def test_no_draws_give_no_gradient(draws: int) -> None:
    with pytest.raises(SettingError, match="at least 1"):
        Expectation(noisy_inputs(1.0), draws)


def test_passes_count_draws_so_that_chunks_stay_as_large_as_asked() -> None:
    seen = []

    def sample(draws: int, generator: torch.Generator) -> Scores:
        def scores(x: Tensor) -> Tensor:
            seen.append(len(x) * draws * 3)
            return x.flatten(1) @ weight().T

        return scores

    victim = Expectation(sample, 4, passes_per_draw=3)
    assert victim.passes == 12
    around = ball(digits(30), Norm.LINF, 0.1)
    ATTACKS["ifgsm"](Budget(steps=2)).run(victim, around, Goal(torch.zeros(30).long()), seeded(), chunk=100)
    assert max(seen[1:]) <= 100, "all but the first look at what kind of scores there are"


def dropout() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Flatten(), nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 3)).double()
    layers[1].weight.data.mul_(3)
    return layers.train()


@pytest.mark.parametrize("name", sorted(ATTACKS))
def test_a_module_that_draws_as_it_runs_follows_the_generator_and_leaves_the_global_one_alone(name: str) -> None:
    around, attack = ball(digits(6), Norm.LINF, 0.1), ATTACKS[name](Budget(steps=5, queries=10))
    victim = Expectation(module_sample(dropout()), 3)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = attack.run(victim, around, Goal(LABELS), seeded(5))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(attack.run(victim, around, Goal(LABELS), seeded(5)), first)
    assert not torch.equal(attack.run(victim, around, Goal(LABELS), seeded(6)), first)


def test_a_modules_scores_are_the_logarithms_of_its_mean_probabilities() -> None:
    module, points = dropout(), digits(4)
    found = module_sample(module)(7, seeded(3))(points)
    assert torch.allclose(found.exp().sum(1), torch.ones(4).double())
    torch.manual_seed(int(torch.randint(2**62, (), generator=seeded(3))))
    by_hand = torch.stack([module(points).softmax(1) for _ in range(7)]).mean(0)
    assert np.allclose(found.exp().detach(), by_hand.detach())


def test_two_draws_of_a_module_differ_and_each_stays_what_it_is() -> None:
    sample, points, generator = module_sample(dropout()), digits(4), seeded()
    one, other = sample(1, generator), sample(1, generator)
    assert torch.equal(one(points), one(points))
    assert not torch.allclose(one(points), other(points))
