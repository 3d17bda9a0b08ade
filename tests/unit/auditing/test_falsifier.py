"""The attempt to break certificates: what it calls broken is broken, what it leaves alone it leaves alone.

Seeds are fixed. Where chance enters, the falsifier's own rate of false alarms is 1% for each finding.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from attempts import CHEAP, attempt, certificates_of
from scipy.stats import binom
from support.broken_certificates import CONTROLS, EnlargedBounds, NominalNoise, certify_apart
from torch import Tensor, nn

from stobatch.attacks import Ball, Goal, Plain
from stobatch.attacks.expectation import Sample
from stobatch.auditing.certificate_attacks import AttackedCertificates, FalsifierSettings, RandomSearch
from stobatch.auditing.falsifier import Attempt, falsify, finding_of, nearest
from stobatch.auditing.vote_counts import VoteCounts, count
from stobatch.bounds.certifier import BoundCertificates
from stobatch.config import CertificationConfig
from stobatch.errors import DataError, ModelError, SettingError
from stobatch.models import Classifier, ConvEncoder, Head, Layered, Network, affine, build_layered
from stobatch.published.verified_inference import VerifiedInference
from stobatch.sound.verifiers import BoundsVerifier
from stobatch.types import PAPER_RANGE, Norm, Radius, Status, Verdict
from stobatch.verifier import CertificateKind, Verifier

NORM_ORDER = {Norm.LINF: np.inf, Norm.L2: 2, Norm.L1: 1}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures(count: int = 12, seed: int = 1) -> Tensor:
    return torch.rand(count, 1, 6, 6, generator=seeded(seed)) * 2 - 1


def bounds(norm: Norm = Norm.LINF) -> BoundsVerifier:
    network = build_layered("squash 2 0 0.4, conv 3 3/2, relu, linear", (1, 6, 6), 3, seeded()).requires_grad_(False)
    return BoundsVerifier(network, norm, [0.002 * 1.3**i for i in range(20)], memory_mb=64)


class Claims(Verifier):
    """A verifier that claims whatever radius it is told about the labels of a network's single pass."""

    def __init__(self, network: Classifier, radius: float, **kind: object) -> None:
        self.network, self.radius = network, radius
        unit = Radius(1.0, Norm.LINF, PAPER_RANGE)
        self.kind = replace(
            CertificateKind("told", Status.CLAIMED, "nowhere", unit, 0.0, function="single_pass"),
            **kind,  # type: ignore[arg-type]
        )

    @property
    def kinds(self) -> tuple[CertificateKind, ...]:
        return (self.kind,)

    @torch.no_grad()
    def verify(self, inputs: Tensor, generator: torch.Generator) -> BoundCertificates:
        label = self.network(inputs.to(self.network.dtype)).argmax(1).numpy()
        return BoundCertificates(label, np.full(len(label), self.radius), self.kind)


def two_classes(slope: float, bias: float, base: float = 0.0) -> Layered:
    """The first class leads by slope·mean(x) + bias; `base` is added to both scores."""
    layer = nn.Linear(4, 2)
    layer.weight.data.copy_(torch.tensor([[slope / 8] * 4, [-slope / 8] * 4]))
    layer.bias.data.copy_(torch.tensor([base + bias, base]))
    return Layered([layer], (4,)).requires_grad_(False)


# What counts as broken.


@pytest.mark.parametrize("norm", Norm)
def test_breaks_are_points_of_the_ball_that_the_deployed_pass_answers_otherwise(norm: Norm) -> None:
    inner = bounds(norm)
    verifier = EnlargedBounds(inner) if norm is Norm.LINF else Claims(inner.network, 3.0, unit=Radius(1.0, norm))
    inputs = pictures(20)
    outcome = attempt(verifier, inputs, 0, CHEAP.replace(num_inputs=None, steps=20))
    columns, points = outcome.attempt.columns, outcome.attempt.points
    broken = np.flatnonzero(columns["broken"])
    assert len(points) == len(broken) > 0
    assert points.dtype == torch.float32
    index = np.array(columns["index"])[broken]
    offset = (points.double() - inputs[index].double()).flatten(1).numpy()
    distance = np.linalg.norm(offset, NORM_ORDER[norm], axis=1)
    assert (distance <= np.array(columns["radius"])[broken]).all()
    assert distance == pytest.approx(np.array(columns["distance"])[broken], rel=1e-12)
    assert float(points.abs().max()) <= 1
    answers = inner.network(points).argmax(1).tolist()
    assert answers == [columns["found"][row] for row in broken]
    assert all(answer != columns["label"][row] for answer, row in zip(answers, broken, strict=True))
    assert outcome.finding.verdict is Verdict.REFUTED
    assert outcome.finding.details.broken == len(broken) == sum(outcome.finding.details.broken_by.values())


@pytest.mark.parametrize("norm", Norm)
def test_bounds_hold_in_every_norm_although_the_attacks_come_close(norm: Norm) -> None:
    verifier = bounds(norm)
    outcome = attempt(verifier, pictures(20), 0, CHEAP.replace(num_inputs=None, steps=20))
    assert outcome.finding.verdict is Verdict.CONSISTENT
    assert outcome.finding.details.attacked >= 10
    assert not any(outcome.attempt.columns["broken_float64"])
    assert outcome.finding.details.smallest_margin > 0
    assert len(outcome.attempt.points) == 0


def test_a_break_of_a_vote_is_seen_again_by_whoever_votes_anew() -> None:
    bench = CONTROLS["nominal noise"](5)
    outcome = attempt(bench.broken, bench.inputs, 5)
    columns, points = outcome.attempt.columns, outcome.attempt.points
    broken = np.flatnonzero(columns["broken"])
    index, label = np.array(columns["index"])[broken], np.array(columns["label"])[broken]
    offset = np.abs(points.double().numpy() - bench.inputs[index].double().numpy())
    assert (offset.reshape(len(offset), -1).max(1) <= np.array(columns["radius"])[broken]).all()
    verdicts = bench.sound.verify(points, seeded(99))
    assert ((verdicts.label != label) & ~verdicts.abstain).mean() > 0.8
    assert outcome.finding.details.broken_float64 is None


def test_every_input_is_attacked_at_its_own_radius() -> None:
    """Score mean(x) + 0.5: a label holds up to 0.5 around 0, and each ball is as large as its own claim."""
    network, radii = two_classes(1.0, 0.5), np.array([0.0, 0.3, 0.499, 0.501, 0.7, 1.5, np.inf])
    verifier = Claims(network, 1.0)
    columns = {"abstain": [False] * 7, "radius": radii}
    certificates = AttackedCertificates.of(verifier.kinds[0], torch.zeros(7, 4), [0] * 7, columns)
    found = falsify(verifier, certificates, CHEAP, seeded()).columns
    assert found["index"] == [1, 2, 3, 4, 5, 6], "where nothing is claimed there is nothing to break"
    assert found["broken"] == [False, False, True, True, True, True]
    assert found["radius"] == [0.3, 0.499, 0.501, 0.7, 1.5, 2.0], "no ball is larger than the range"
    assert found["margin"][:2] == pytest.approx([0.2, 0.001], abs=1e-6), "the corner is reached"


def test_the_deployed_network_is_left_as_it_was() -> None:
    bench = CONTROLS["enlarged bounds"](0)
    network = bench.broken.network
    before = copy.deepcopy(network.state_dict())
    for parameter in network.parameters():
        parameter.requires_grad_()
    attempt(bench.broken, bench.inputs, 0)
    assert network.dtype == torch.float32
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in network.parameters())


# Two precisions.


def test_the_copy_in_float64_finds_what_float32_gradients_hide() -> None:
    """A lead of 120 leaves a cross-entropy gradient of e^-120, which float32 rounds to zero."""
    verifier = Claims(two_classes(1000.0, 120.0), 0.2)
    settings = CHEAP.replace(attacks=("mim",), num_inputs=None)
    outcome = attempt(verifier, torch.zeros(1, 4), 0, settings)
    assert outcome.attempt.columns["broken"] == [True]
    assert outcome.attempt.columns["attack"] == ["mim in float64"]
    assert int(verifier.network(outcome.attempt.points).argmax()) == 1


def test_a_flip_in_float64_alone_is_told_and_refutes_nothing() -> None:
    """Beside 1e9 float32 does not see a score change by 10, so the deployed pass never changes its answer."""
    outcome = attempt(Claims(two_classes(10.0, 1.0, base=1e9), 0.5), torch.zeros(3, 4), 0)
    assert outcome.attempt.columns["broken"] == [False] * 3
    assert outcome.attempt.columns["broken_float64"] == [True] * 3
    assert outcome.finding.verdict is Verdict.CONSISTENT
    assert "in float64 3 would" in outcome.finding.statement


# Chance.


@pytest.mark.parametrize("draws", [1, 7, 40, 1001])
def test_the_sign_test_alarms_no_more_often_than_it_says(draws: int) -> None:
    """Exactly, over all outcomes of two classes that share the votes equally."""
    against = np.arange(draws + 1.0)
    sums = np.stack([draws - against, against], axis=1)
    zeros = np.zeros(draws + 1, dtype=np.int64)
    chance = VoteCounts(sums, draws, whole=True).chance(zeros, zeros + 1)
    for level in (0.5, 0.05, 1e-3, 1e-6):
        assert binom.pmf(against, draws, 0.5)[chance <= level].sum() <= level * (1 + 1e-9)


@pytest.mark.parametrize("draws", [1, 40, 1000])
def test_the_test_on_scores_alarms_no_more_often_than_it_says(draws: int) -> None:
    """Exactly, for the worst scores there are: all of a draw to one class or the other."""
    against = np.arange(draws + 1.0)
    sums = np.stack([draws - against, against], axis=1)
    zeros = np.zeros(draws + 1, dtype=np.int64)
    chance = VoteCounts(sums, draws, whole=False).chance(zeros, zeros + 1)
    for level in (0.5, 0.05, 1e-3, 1e-6):
        assert binom.pmf(against, draws, 0.5)[chance <= level].sum() <= level * (1 + 1e-9)


def test_the_rival_is_the_best_other_class_and_the_lead_a_share() -> None:
    ballots = VoteCounts(np.array([[5.0, 3.0, 2.0], [1.0, 2.0, 7.0]]), 10, whole=True)
    label = np.array([0, 1])
    assert ballots.rival(label).tolist() == [1, 2]
    assert ballots.lead(label, ballots.rival(label)).tolist() == pytest.approx([0.2, -0.5])


class FailsTogether(Claims):
    """A vote that is always right about the label; its radius is right but for a chance, one for all inputs at once."""

    def __init__(self, network: Classifier, rate: float, failure_probability: float) -> None:
        super().__init__(network, 0.4, function="vote", failure_probability=failure_probability)
        self.rate = rate

    def samples(self) -> dict[str, Sample]:
        return {"vote": lambda draws, generator: self.network}

    def verify(self, inputs: Tensor, generator: torch.Generator) -> BoundCertificates:
        right = super().verify(inputs, generator)
        fails = float(torch.rand((), generator=generator)) < self.rate
        return replace(right, radius=right.radius * (2 if fails else 1))


@count.register
def _(verifier: FailsTogether, points: Tensor, draws: int, generator: torch.Generator) -> VoteCounts:
    votes = nn.functional.one_hot(verifier.network(points).argmax(1), verifier.network.num_classes)
    return VoteCounts(draws * votes.double().numpy(), draws, whole=True)


@pytest.mark.parametrize(
    ("rate", "verdict"), [(0.05, Verdict.CONSISTENT), (0.5, Verdict.REFUTED)], ids=["honest", "ten times too often"]
)
def test_bad_luck_that_all_inputs_share_refutes_nothing(rate: float, verdict: Verdict) -> None:
    """Certified together, all fail together with probability 5%, as stated; counting them would refute the claim."""
    verifier, inputs = FailsTogether(two_classes(1.0, 0.5), rate, failure_probability=0.05), torch.zeros(30, 4)
    unlucky = {"abstain": [False] * 30, "radius": [0.8] * 30}
    certificates = AttackedCertificates.of(verifier.kinds[0], inputs, [0] * 30, unlucky)
    made = falsify(verifier, certificates, CHEAP.replace(retests=100), seeded(1))
    finding = finding_of(verifier.kinds[0], made.columns, CHEAP, certified=30, num_kinds=1)
    assert finding.details.broken == 30
    assert binom.sf(29, 30, 0.05) < 1e-9, "a count over inputs would be sure"
    assert max(made.columns["distance"]) < 0.65, "drawn in from 0.8 to where the label is just lost, beyond 0.5"
    assert sum(made.columns["retests"]) == 100
    assert finding.verdict is verdict, finding.statement
    assert f"of {100} cases" in finding.statement


def test_an_honest_certificate_is_refuted_no_more_often_than_stated() -> None:
    """Whose turn it is depends on what came before, the chance of each failure does not; false alarms here: 1e-9."""
    verifier, runs = FailsTogether(two_classes(1.0, 0.5), 0.05, failure_probability=0.05), 60
    settings = CHEAP.replace(attacks=("corners",), confidence=0.9)
    columns = {"abstain": [False] * 5, "radius": [0.8] * 5}
    certificates = AttackedCertificates.of(verifier.kinds[0], torch.zeros(5, 4), [0] * 5, columns)
    made = [falsify(verifier, certificates, settings, seeded(seed)).columns for seed in range(runs)]
    findings = [finding_of(verifier.kinds[0], one, settings, certified=5, num_kinds=1) for one in made]
    assert all(finding.details.broken == 5 for finding in findings)
    refuted = sum(finding.verdict is Verdict.REFUTED for finding in findings)
    overclaims = sum(finding.details.overclaims for finding in findings)
    assert refuted <= binom.isf(1e-9, runs, 0.05)
    assert binom.ppf(1e-9, 100 * runs, 0.05) <= overclaims <= binom.isf(1e-9, 100 * runs, 0.05)
    assert len({turns for one in made for turns in one["retests"]}) > 10, "the turns are not dealt out evenly"


@pytest.mark.parametrize("failure_probability", [0.0, None])
def test_one_break_refutes_a_claim_that_admits_no_failure(failure_probability: float | None) -> None:
    verifier = FailsTogether(two_classes(1.0, 0.5), 0.0, failure_probability=0.05)
    verifier.kind = replace(verifier.kind, failure_probability=failure_probability)
    columns = {"abstain": [False] * 3, "radius": [0.8, 0.1, 0.1]}
    made = falsify(
        verifier, AttackedCertificates.of(verifier.kind, torch.zeros(3, 4), [0] * 3, columns), CHEAP, seeded()
    )
    finding = finding_of(verifier.kind, made.columns, CHEAP, certified=3, num_kinds=1)
    assert finding.verdict is Verdict.REFUTED
    assert (finding.details.broken, finding.details.retests) == (1, 0)


def test_more_tests_ask_for_more_evidence() -> None:
    bench = CONTROLS["observed frequency"](0)
    certificates = certificates_of(bench.broken, bench.inputs, seeded())
    few, many = (
        falsify(bench.broken, certificates, CHEAP, seeded(1), tests=tests).columns["broken"] for tests in (40, 10**12)
    )
    assert 0 < sum(many) < sum(few)
    assert all(one <= other for one, other in zip(many, few, strict=True))


@pytest.mark.parametrize("broken", [True, False])
def test_mean_scores_are_judged_by_mean_scores(broken: bool) -> None:
    """With Hoeffding's bounds the label is the class of the largest mean score, not of the most votes.

    They are so wide that ψ has to be 16 for the mistake to show.
    """
    bench = CONTROLS["nominal noise"](0)
    config = CertificationConfig(
        noise_draws=4000, resampling_shrinkage=16.0, failure_probability=0.01, interval="hoeffding"
    )
    kind = NominalNoise if broken else VerifiedInference
    verifier = kind(bench.sound.network, config, input_noise_scale=1.6, hidden_noise_scale=3.2)
    ballots = count(verifier, bench.inputs[:2], 50, seeded())
    assert not ballots.whole
    assert (ballots.sums.sum(1) < 50).all()
    outcome = attempt(verifier, bench.inputs, 0, CHEAP.replace(judging_draws=4000, num_inputs=6, retests=10))
    assert outcome.finding.details.attacked == 6
    assert outcome.finding.verdict is (Verdict.REFUTED if broken else Verdict.CONSISTENT)


def test_votes_counted_are_those_of_the_deployed_vote() -> None:
    """Where products of probabilities underflow the deployed vote falls to the first class, and so does the count."""
    encoder = ConvEncoder((1, 1, 1), 1, 1, stride=1, padding=0)
    encoder.weight.data.fill_(1.0)
    output = nn.Linear(1, 3, bias=False)
    output.weight.data.copy_(torch.tensor([[0.0], [300.0], [-300.0]]))
    network = Network(encoder, Head(nn.Identity(), nn.Flatten(), output)).requires_grad_(False)
    config = CertificationConfig(noise_draws=300, resampling_shrinkage=1.0)
    verifier = VerifiedInference(network, config, input_noise_scale=1.0, hidden_noise_scale=1.0)
    points = torch.full((1, 1, 1, 1), 0.3)
    sums = count(verifier, points, 2000, seeded()).sums[0]
    assert sums[0] > 200, "one pass says class 1, the other class 2, and nothing is left of their product"
    assert int(sums.argmax()) == int(verifier.verify(points, seeded(1)).label[0])


def test_certified_apart_every_input_has_its_own_draws() -> None:
    bench = CONTROLS["nominal noise"](0)
    same = bench.inputs[:1].expand(20, -1, -1, -1)
    apart = certify_apart(bench.sound, same, seeded())["score_lower"]
    together = bench.sound.verify(same, seeded()).columns()["score_lower"]
    assert len(set(together.tolist())) == 1
    assert len(set(apart.tolist())) > 5


# The published certificate.


class SignMean(nn.Module):
    """Votes of the hidden neurons: the mean of their signs; its gradient is zero everywhere."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.sign().flatten(1).mean(1, keepdim=True)


@pytest.mark.slow
def test_the_published_certificate_is_refuted_at_the_published_cifar10_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """b_x = 6.59, ψ = 10, n = 1000, 128 maps of delta kernels; corrected, the same votes hold."""
    monkeypatch.setattr(affine, "EXACT_SPECTRUM_UP_TO", 1000)  # for delta kernels the bound in its place is exact
    encoder = ConvEncoder((3, 28, 28), 128, 4, stride=2, padding=1)
    encoder.weight.data.zero_()
    encoder.weight.data.flatten(1)[torch.arange(128), torch.arange(128) % 48] = 0.3
    output = nn.Linear(1, 10, bias=False)
    output.weight.data.copy_(torch.tensor([[-50.0], [50.0]] + 8 * [[0.0]]))
    network = Network(encoder, Head(nn.Identity(), SignMean(), output)).requires_grad_(False)
    config = CertificationConfig(noise_draws=1000, resampling_shrinkage=10.0, attack_radius=0.065)
    verifier = VerifiedInference(network, config, input_noise_scale=6.59, hidden_noise_scale=13.18)
    inputs = torch.full((1, 3, 28, 28), -0.0517)
    answers = verifier.verify(inputs, seeded(1))
    settings = CHEAP.replace(steps=1, queries=2, noise_draws=2, judging_draws=200)
    findings, attempts = {}, {}
    for kind in verifier.kinds:
        certificates = AttackedCertificates.of(kind, inputs, answers.label, answers.columns())
        attempts[kind.name] = falsify(verifier, certificates, settings, seeded(2), tests=2)
        findings[kind.name] = finding_of(kind, attempts[kind.name].columns, settings, certified=1, num_kinds=2)
    assert findings["published"].verdict is Verdict.REFUTED
    assert findings["corrected"].verdict is Verdict.CONSISTENT
    assert "claimed: " in findings["published"].claim
    assert attempts["published"].columns["radius"][0] > 0.065
    again = verifier.verify(attempts["published"].points, seeded(3))
    assert again.label[0] == 1
    assert not again.abstain[0]


# What to attack, and in which parts.


def leads(lead: list[float], radius: list[float]) -> tuple[Verifier, AttackedCertificates]:
    """Inputs of a linear network with given leads."""
    verifier = Claims(two_classes(1.0, 0.0), 1.0)
    inputs = torch.tensor(lead).reshape(-1, 1).expand(-1, 4).contiguous()
    columns = {"abstain": [False] * len(lead), "radius": radius}
    return verifier, AttackedCertificates.of(verifier.kinds[0], inputs, [0] * len(lead), columns)


def test_inputs_with_the_smallest_lead_for_their_radius_come_first() -> None:
    verifier, certificates = leads([0.5, 0.1, 0.4, 0.9, 0.2], [0.1, 0.05, 0.3, 0.8, 0.0])
    assert nearest(verifier, certificates, CHEAP.replace(num_inputs=3), seeded()).tolist() == [3, 2, 1]
    assert nearest(verifier, certificates, CHEAP.replace(num_inputs=None), seeded()).tolist() == [0, 1, 2, 3]


def test_of_votes_the_nearest_are_chosen_by_the_averaged_score() -> None:
    bench = CONTROLS["nominal noise"](0)
    columns = {"abstain": [False] * 40, "corrected_radius": [0.01] * 40}
    kind = bench.sound.kinds[-1]
    certificates = AttackedCertificates.of(kind, bench.inputs, (bench.inputs.mean((1, 2, 3)) < 0).long(), columns)
    chosen = nearest(bench.sound, certificates, CHEAP.replace(num_inputs=10, noise_draws=64), seeded())
    # Leads are estimated from some hundred draws, so the order is nearly that of the distances.
    assert bench.reach[chosen].mean() < bench.reach.sort().values[:15].mean()


def test_parts_join_to_the_whole() -> None:
    bench = CONTROLS["enlarged bounds"](3)
    certificates = certificates_of(bench.broken, bench.inputs, seeded())
    rows = nearest(bench.broken, certificates, CHEAP, seeded())
    heard: list[float] = []
    parts = [
        falsify(bench.broken, certificates.part(part), CHEAP, seeded(), tick=heard.append)
        for part in np.array_split(rows, 3)
    ]
    columns = {name: [value for part in parts for value in part.columns[name]] for name in parts[0].columns}
    joined = Attempt(columns, torch.cat([part.points for part in parts]))
    assert joined.columns["index"] == rows.tolist()
    assert len(joined.points) == sum(joined.columns["broken"]) > 0
    assert sum(heard) == pytest.approx(3)
    whole = falsify(bench.broken, certificates.part(rows), CHEAP, seeded())
    assert whole.columns["broken"] == joined.columns["broken"]
    stored = json.loads(json.dumps(joined.columns))
    kind = bench.broken.kinds[0]
    findings = [finding_of(kind, columns, CHEAP, certified=40, num_kinds=1) for columns in (joined.columns, stored)]
    assert findings[0] == findings[1]


def test_the_same_generator_finds_the_same() -> None:
    bench = CONTROLS["observed frequency"](1)
    first, second = (attempt(bench.broken, bench.inputs, 7).attempt for _ in range(2))
    assert first.columns == second.columns
    assert torch.equal(first.points, second.points)


def test_without_certified_inputs_the_finding_says_so() -> None:
    verifier, certificates = leads([0.5, 0.1], [0.0, 0.0])
    heard: list[float] = []
    assert len(nearest(verifier, certificates, CHEAP, seeded())) == 0
    made = falsify(verifier, certificates, CHEAP, seeded(), tick=heard.append)
    finding = finding_of(verifier.kinds[0], made.columns, CHEAP, certified=0, num_kinds=1)
    assert finding.verdict is Verdict.NOT_TESTED
    assert finding.details.could_not_refute == "no input has a certified ball"
    assert finding.statement == "No input has a certified ball, so there is nothing to break."
    assert heard == [1.0]
    assert len(made.points) == 0
    json.dumps(finding.to_dict())


def test_a_finding_tells_the_claim_and_all_its_numbers() -> None:
    bench = CONTROLS["summed sizes"](0)
    finding = attempt(bench.broken, bench.inputs, 0).finding
    assert (finding.instrument, finding.about, finding.confidence) == ("certificates", "summed sizes", 0.99)
    assert finding.claim.startswith("proved: within its radius (linf over [-1, 1])")
    assert "but for a chance of 0.01" in finding.claim
    details = finding.details
    assert details.certified == 40
    assert details.attacked == CHEAP.num_inputs
    assert details.smallest_radius <= details.largest_radius
    assert details.smallest_margin < 0
    assert details.overclaims > details.allowed_overclaims > 0
    assert json.loads(json.dumps(finding.to_dict()))["verdict"] == "refuted"


# Random search.


@dataclass(frozen=True)
class Judged:
    """Remembers every point that it is asked about."""

    points: list[Tensor]

    def __call__(self, points: Tensor) -> Tensor:
        self.points.append(points.detach())
        # Far in front, so that the search does not end before all is tried.
        return torch.stack([100 + 0 * points.flatten(1).sum(1), points.flatten(1).sum(1)], dim=1)


@pytest.mark.parametrize("norm", Norm)
def test_corners_are_outermost_points_and_all_lie_inside(norm: Norm) -> None:
    seen: list[Tensor] = []
    ball = Ball.around_each(torch.zeros(5, 6), torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5]), Radius(1.0, norm))
    RandomSearch(30).run(Plain(Judged(seen)), ball, Goal(torch.zeros(5).long()), seeded())
    distances = np.stack([np.linalg.norm(x.numpy(), NORM_ORDER[norm], axis=1) for x in seen if len(x) == 5])
    size = ball.sizes.numpy()
    assert (distances <= size * (1 + 1e-6)).all()
    on_the_edge = np.isclose(distances, size, rtol=1e-5)
    assert 20 <= on_the_edge.all(1).sum() < len(distances)
    if norm is Norm.LINF:
        corners = [x for x, edge in zip([x for x in seen if len(x) == 5], on_the_edge.all(1), strict=True) if edge]
        assert all(np.isclose(x.abs().numpy(), size[:, None], rtol=1e-5).all() for x in corners[:2])
        assert len({tuple(x.sign().flatten().tolist()) for x in corners}) > 15


def test_corners_break_what_has_no_gradient_to_follow() -> None:
    class Rounded(Layered):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs).detach()

    network = Rounded(list(two_classes(1.0, 0.5).layers), (4,))
    verifier, inputs = Claims(network, 0.6), torch.zeros(2, 4)
    assert attempt(verifier, inputs, 0, CHEAP.replace(attacks=("corners",))).finding.verdict is Verdict.REFUTED
    with pytest.raises(ModelError, match="square"):
        attempt(verifier, inputs, 0, CHEAP.replace(attacks=("mim",)))


# Errors.


def kind_of(status: Status) -> CertificateKind:
    return CertificateKind("some", status, "here", Radius(1.0, Norm.LINF, PAPER_RANGE), 0.0)


def test_who_proves_something_says_nothing_where_it_abstains() -> None:
    columns = {"abstain": [True, False], "radius": [0.3, 0.2]}
    radii = [
        AttackedCertificates.of(kind_of(status), torch.zeros(2, 4), [0, 0], columns).radius.tolist()
        for status in (Status.PROVED, Status.CLAIMED)
    ]
    assert radii == [[0.0, 0.2], [0.3, 0.2]]


@pytest.mark.parametrize(
    ("labels", "radius", "message"),
    [([0], [0.1, 0.1], "2 inputs come with 1 labels"), ([0, 0], [0.1, np.nan], "not numbers"),
     ([0, 0], [0.1, -0.1], "negative")],
)  # fmt: skip
def test_answers_that_do_not_fit_are_refused(labels: list[int], radius: list[float], message: str) -> None:
    with pytest.raises(DataError, match=message):
        AttackedCertificates.of(
            kind_of(Status.PROVED), torch.zeros(2, 4), labels, {"abstain": [False, False], "radius": radius}
        )


@pytest.mark.parametrize(
    "change",
    [{"confidence": 1.0}, {"confidence": 0.0}, {"attacks": ("fgsm",)}, {"attacks": ()}, {"num_inputs": 0},
     {"judging_draws": 0}, {"retests": 0}, {"steps": 0}, {"noise_draws": 0}, {"random_points": 0}],
    ids=str,
)  # fmt: skip
def test_settings_out_of_range_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(SettingError):
        FalsifierSettings(**change)


class NoSamples(FailsTogether):
    def samples(self) -> dict[str, Sample]:
        return {}


class UnknownVote(Claims):
    def samples(self) -> dict[str, Sample]:
        return {"vote": lambda draws, generator: self.network}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda network: Claims(network, 0.1, function="oracle"), "single_pass or vote"),
        (lambda network: NoSamples(network, 0.0, 0.05), "no samples"),
        (lambda network: UnknownVote(network, 0.1, function="vote"), "count.register"),
    ],
    ids=["unknown function", "no samples", "unknown vote"],
)
def test_what_cannot_be_attacked_is_refused(make: Callable[[Classifier], Verifier], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        attempt(make(two_classes(1.0, 0.5)), torch.zeros(2, 4), 0)
