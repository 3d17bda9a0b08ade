"""Algorithm 3: verified inference, and an input that the published rule certifies although an attack breaks it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from stobatch.config import CertificationConfig
from stobatch.errors import DataError, ModelError
from stobatch.models import ConvEncoder, Head, Network, from_layers
from stobatch.published.monte_carlo import Tally
from stobatch.published.verified_inference import VerifiedInference
from stobatch.types import Status
from stobatch.votes.confidence import clopper_pearson


@pytest.fixture
def verifier(make_network: Callable[..., Network]) -> Callable[..., VerifiedInference]:
    def make(**settings: object) -> VerifiedInference:
        config = CertificationConfig(**{"noise_draws": 200, "attack_radius": 0.1, **settings})
        return VerifiedInference(make_network(), config, input_noise_scale=3.0, hidden_noise_scale=6.0)

    return make


def tally(*votes: list[int]) -> Tally:
    counts = torch.tensor(votes)
    return Tally(counts, counts.double(), int(counts[0].sum()))


class SignMean(nn.Module):
    """Votes of the hidden neurons: the mean of their signs."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.sign().flatten(1).mean(1, keepdim=True)


def counterexample() -> Network:
    """The published CIFAR-10 geometry: 128 maps of 4x4x3 patches on 28x28x3, here delta kernels of weight 0.3."""
    encoder = ConvEncoder((3, 28, 28), 128, 4, stride=2, padding=1)
    encoder.weight.data.zero_()
    encoder.weight.data.flatten(1)[torch.arange(128), torch.arange(128) % 48] = 0.3
    output = nn.Linear(1, 10, bias=False)
    output.weight.data.copy_(torch.tensor([[-50.0], [50.0]] + 8 * [[0.0]]))
    return Network(encoder, Head(nn.Identity(), SignMean(), output))


@pytest.mark.slow
def test_a_perturbation_within_the_published_radius_flips_most_votes() -> None:
    """Published CIFAR-10 settings: b_x = 6.59, ψ = 10, n = 1000. Certified: l∞ 0.065; x + 0.065 has another label."""
    config = CertificationConfig(noise_draws=1000, resampling_shrinkage=10.0, attack_radius=0.065)
    verifier = VerifiedInference(counterexample(), config, input_noise_scale=6.59, hidden_noise_scale=13.18)
    x = torch.full((1, 3, 28, 28), -0.0517)
    verdicts = verifier.verify(torch.cat([x, x + 0.065]), torch.Generator().manual_seed(1))
    assert verdicts.published_radius[0] == pytest.approx(0.0715, abs=5e-4)
    assert verdicts.published_robust[0]
    assert verdicts.label.tolist() == [0, 1]
    assert not verdicts.abstain[1], "the flip is significant"
    assert not verdicts.corrected_robust[0]
    assert 0 < verdicts.corrected_radius[0] < 0.065


def test_both_rules_judge_the_same_votes_side_by_side(verifier: Callable[..., VerifiedInference]) -> None:
    made = verifier()
    published, corrected = made.kinds
    assert (published.status, corrected.status) == (Status.CLAIMED, Status.PROVED)
    verdicts = made.judge(tally([200, 0, 0], [70, 65, 65], [0, 5, 195]))
    assert verdicts.label.tolist() == [0, 0, 2]
    assert verdicts.abstain.tolist() == [False, True, False]
    assert verdicts.corrected_radius[1] == 0
    assert verdicts.corrected_radius[0] > verdicts.corrected_radius[2] > 0
    assert (verdicts.corrected_robust == (verdicts.corrected_radius >= 0.1)).all()
    assert (verdicts.published_robust == (verdicts.published_radius >= 0.1)).all()
    agree = verdicts.published_largest_attack >= 0.1
    assert (verdicts.published_robust == agree).all()


def test_all_2k_bounds_share_the_failure_probability(verifier: Callable[..., VerifiedInference]) -> None:
    verdicts = verifier(failure_probability=0.06).judge(tally([150, 30, 20]))
    lower, _ = clopper_pearson(np.array([150.0]), 200, 0.01)
    _, upper = clopper_pearson(np.array([30.0]), 200, 0.01)
    assert verdicts.score_lower[0] == lower[0]
    assert verdicts.runner_up_upper[0] == min(upper[0], 1 - lower[0])


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 200), min_size=3, max_size=3).filter(any), st.sampled_from([0.001, 0.05, 0.3]))
def test_a_stricter_failure_probability_never_raises_a_radius(votes: list[int], failure: float) -> None:
    network = from_layers(nn.Linear(3, 2), nn.Identity(), nn.Linear(2, 3), (3,))
    radii = []
    for allowed in (failure, failure / 10):
        config = CertificationConfig(failure_probability=allowed)
        made = VerifiedInference(network, config, input_noise_scale=1.0, hidden_noise_scale=2.0)
        radii.append(float(made.judge(tally(votes)).corrected_radius[0]))
    assert radii[1] <= radii[0]


@pytest.mark.parametrize("interval", ["clopper_pearson", "hoeffding"])
def test_the_scale_of_the_corrected_rule_is_that_of_the_fresh_noise(
    verifier: Callable[..., VerifiedInference], interval: str
) -> None:
    """ψ = 1 and ψ = 10 on the same votes: ten times the proved radius, but the published one does not notice."""
    loud, quiet = (
        verifier(resampling_shrinkage=psi, interval=interval).judge(tally([200, 0, 0])) for psi in (1.0, 10.0)
    )
    assert loud.corrected_radius[0] == pytest.approx(10 * quiet.corrected_radius[0])
    assert loud.published_radius[0] == quiet.published_radius[0]


def test_verify_is_deterministic_in_its_generator(verifier: Callable[..., VerifiedInference]) -> None:
    inputs = torch.rand(4, 1, 6, 6, generator=torch.Generator().manual_seed(1)) * 2 - 1
    runs = [verifier().verify(inputs, torch.Generator().manual_seed(2)) for _ in range(2)]
    for name, column in runs[0].columns().items():
        assert (column == runs[1].columns()[name]).all()


@pytest.mark.parametrize("bad", [1.5, -2.0, float("nan"), float("inf")])
def test_inputs_outside_of_the_range_are_refused(verifier: Callable[..., VerifiedInference], bad: float) -> None:
    inputs = torch.zeros(1, 1, 6, 6)
    inputs[0, 0, 0, 0] = bad
    with pytest.raises(DataError):
        verifier().verify(inputs, torch.Generator())


def test_scores_that_are_no_numbers_and_batch_norm_are_refused(verifier: Callable[..., VerifiedInference]) -> None:
    broken = Tally(torch.zeros(1, 3, dtype=torch.int64), torch.full((1, 3), float("nan")), 10)
    with pytest.raises(ModelError):
        verifier(interval="hoeffding").judge(broken)
    mixing = from_layers(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 3), (3,))
    with pytest.raises(ModelError):
        VerifiedInference(mixing, CertificationConfig(), input_noise_scale=1.0, hidden_noise_scale=2.0)
