"""What is deployed, and what an attacker differentiates in its place."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from samples import images, network, seeded, trained
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from stobatch.attacks import Expectation, Goal, Plain
from stobatch.config import CertificationConfig
from stobatch.errors import ModelError
from stobatch.evaluation.functions import SinglePass, Vote
from stobatch.models import Network
from stobatch.published.monte_carlo import FreshNoise, SoftVotes, tally_products
from stobatch.published.verified_inference import VerifiedInference
from stobatch.votes.noise import split_generator

INPUTS, LABELS = images(11)
DOUBLE = INPUTS.double()


@pytest.mark.parametrize("rows", [1, 3, 11, 500])
def test_a_single_pass_answers_with_the_largest_score_whatever_passes_at_once(rows: int) -> None:
    made = trained()
    expected = made(INPUTS).argmax(1).tolist()
    assert SinglePass(made, rows).answer(INPUTS, seeded()) == {"prediction": expected}
    assert len(set(expected)) == 3


def test_the_memory_budget_limits_the_rows_of_a_pass() -> None:
    made = network()
    assert 1 <= SinglePass.of(made, 1).rows <= SinglePass.of(made, 512).rows <= 357


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_scores_that_are_no_numbers_are_no_prediction(value: float) -> None:
    made = network(normalised=False)
    made.head.output.weight.data[1, 0] = value
    with pytest.raises(ModelError, match="NaN or infinite"):
        SinglePass(made, 4).answer(INPUTS, seeded())


def verifier(made: Network, *, draws: int = 40, scale: float = 0.1) -> VerifiedInference:
    config = CertificationConfig(noise_draws=draws, resampling_shrinkage=1.0)
    return VerifiedInference(made, config, input_noise_scale=scale, hidden_noise_scale=scale)


def test_a_vote_answers_with_verified_inference() -> None:
    judge = verifier(trained(), scale=0.5)
    answer, verdicts = Vote.of(judge, 512, 2).answer(INPUTS, seeded(3)), judge.verify(INPUTS, seeded(3))
    assert answer == {
        "prediction": verdicts.label.tolist(),
        "abstain": verdicts.abstain.tolist(),
        "published": verdicts.published_largest_attack.tolist(),
        "corrected": verdicts.corrected_radius.tolist(),
    }
    assert max(answer["corrected"]) > 0
    assert answer != Vote.of(judge, 512, 2).answer(INPUTS, seeded(4))


def test_a_single_pass_is_attacked_itself() -> None:
    made = network()
    victims = SinglePass(made, 4).victims(INPUTS, Goal(LABELS), seeded())
    assert victims == {"": Plain(made)}


def chosen(scale: float, *, rows: int = 357, noise_draws: int | None = None) -> dict[str, int]:
    judge = verifier(trained(), scale=scale)
    vote = Vote(judge.network, rows, judge, noise_draws)
    victims = vote.victims(INPUTS, Goal(LABELS), seeded())
    assert all(isinstance(victim, Expectation) and victim.passes == 2 * victim.draws for victim in victims.values())
    return {name: victim.draws for name, victim in victims.items()}


def test_a_vote_is_attacked_through_its_score_and_its_count_with_the_draws_asked_for() -> None:
    assert chosen(0.1, noise_draws=3) == {"score": 3, "vote": 3}


def test_noisier_votes_are_given_more_draws() -> None:
    """Nearly no noise needs one draw; noise that drowns the input as many as there may be."""
    assert chosen(1e-4) == {"score": 1, "vote": 1}
    assert max(chosen(3.0).values()) >= 8
    assert max(chosen(3.0).values()) <= 16


def test_the_memory_budget_does_not_change_the_draws() -> None:
    """By contract `machine` changes no result."""
    for scale in (0.3, 0.6, 1.0, 2.0):
        assert chosen(scale, rows=1) == chosen(scale, rows=357)


Soft = Callable[[Network, int, torch.Generator], Callable[[Tensor], Tensor]]
NOISE = FreshNoise(0.15, 0.25)


def score_by_hand(made: Network, draws: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Product scores of every draw, one pass at a time; and those draws' winners."""
    at_input, at_hidden = NOISE.draw(made, draws, split_generator(generator))
    products = []
    for one, other in zip(at_input, at_hidden, strict=True):
        factors = []
        for inside, behind in ((one, 0.0), (0.0, other)):
            seen = DOUBLE + made.input_noise + inside
            hidden = F.conv2d(seen, made.encoder.weight, stride=2, padding=1) + made.hidden_noise + behind
            factors.append(made.head(hidden).softmax(1))
        products.append((factors[0] * factors[1]).detach())
    found = torch.stack(products)
    return found, F.one_hot(found.argmax(2), 3).double().mean(0)


def test_the_averaged_score_is_the_logarithm_of_the_mean_product() -> None:
    made = network(dtype=torch.float64)
    products, _ = score_by_hand(made, 6, seeded(1))
    found = SoftVotes(made, NOISE).averaged_score(6, seeded(1))(DOUBLE)
    assert torch.allclose(found.exp(), products.mean(0), atol=1e-12)


def test_the_soft_vote_is_the_logarithm_of_the_mean_of_sharpened_products() -> None:
    made = network(dtype=torch.float64)
    products, _ = score_by_hand(made, 6, seeded(1))
    sharpened = products**4 / (products**4).sum(2, keepdim=True)
    found = SoftVotes(made, NOISE).vote(6, seeded(1))(DOUBLE)
    assert torch.allclose(found.exp(), sharpened.mean(0), atol=1e-12)


def test_a_very_sharp_vote_is_the_count_of_verified_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    made = network(dtype=torch.float64)
    made.head.output.weight.data.mul_(5)
    tally = tally_products(made, DOUBLE, NOISE, 50, seeded(2), 512)
    monkeypatch.setattr("stobatch.published.monte_carlo.SHARPNESS", 1e6)
    found = SoftVotes(made, NOISE).vote(50, seeded(2))(DOUBLE)
    assert torch.allclose(found.exp(), tally.votes.double() / 50, atol=1e-6)
    assert ((tally.votes > 0) & (tally.votes < 50)).any(), "a unanimous vote would show little"
    _, winners = score_by_hand(made, 50, seeded(2))
    assert torch.allclose(tally.votes.double() / 50, winners)


DRAWS, TOLERANCE = 4000, 0.085


def furthest(noise: FreshNoise) -> float:
    """From the mean product over other draws."""
    made = network(dtype=torch.float64)
    made.head.output.weight.data.mul_(4)
    tally = tally_products(made, DOUBLE, NOISE, DRAWS, seeded(5), 512)
    with torch.no_grad():
        found = SoftVotes(made, noise).averaged_score(DRAWS, seeded(6))(DOUBLE)
    return float((found.exp() - tally.scores / DRAWS).abs().max())


def test_the_averaged_score_comes_to_what_verified_inference_averages() -> None:
    """Two independent means of 4000 products in [0, 1] are 0.085 apart with probability at most 2·exp(-4000·0.085²).

    For 11 inputs and 3 classes that is a false-alarm rate of 2e-11. The twins draw wider noise at one place.
    """
    assert furthest(NOISE) < TOLERANCE
    assert furthest(FreshNoise(NOISE.input_scale, 3.0)) > TOLERANCE
    assert furthest(FreshNoise(3.0, NOISE.hidden_scale)) > TOLERANCE


@pytest.mark.parametrize("which", ["averaged_score", "vote"])
def test_gradients_are_finite_differences(which: str) -> None:
    """Central differences along random directions in double precision; no ReLU turns within such a step."""
    made = network(dtype=torch.float64).requires_grad_(False)
    scores = getattr(SoftVotes(made, NOISE), which)(5, seeded(1))
    push = torch.randn(len(DOUBLE), 3, generator=seeded(2), dtype=torch.float64)
    leaf = DOUBLE.clone().requires_grad_()
    (gradient,) = torch.autograd.grad((scores(leaf) * push).sum(), leaf)
    for seed in range(4):
        way = torch.randn(DOUBLE.shape, generator=seeded(seed), dtype=torch.float64)
        ahead, behind = ((scores(DOUBLE + step * way) * push).sum() for step in (1e-7, -1e-7))
        assert float((ahead - behind) / 2e-7) == pytest.approx(float((gradient * way).sum()), rel=1e-4)


@pytest.mark.parametrize("which", ["averaged_score", "vote"])
def test_the_same_generator_state_gives_the_same_draws_and_the_next_one_others(which: str) -> None:
    sample, generator = getattr(SoftVotes(network(), NOISE), which), seeded(1)
    first, second, again = sample(3, generator), sample(3, generator), sample(3, seeded(1))
    assert torch.equal(first(INPUTS), again(INPUTS))
    assert torch.equal(first(INPUTS), first(INPUTS)), "a draw stays what it is"
    assert not torch.allclose(first(INPUTS), second(INPUTS))
    assert np.isfinite(first(INPUTS).detach().numpy()).all()
