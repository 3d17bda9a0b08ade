"""The published protocol against a slow copy of its description, and what the adaptive one promises."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch
from samples import images, network, seeded, trained
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from stobatch.attacks import Goal, Victim
from stobatch.config import CertificationConfig, EvaluationConfig
from stobatch.errors import SettingError, UnitError
from stobatch.evaluation.accuracy import WORST, AttackedTable
from stobatch.evaluation.functions import Deployed, SinglePass, Vote
from stobatch.evaluation.protocols import Adaptive, Protocol, Published, radii_of
from stobatch.files import Columns
from stobatch.models import Network
from stobatch.published.verified_inference import VerifiedInference
from stobatch.types import Norm, Radius

INPUTS, LABELS = images(45)
SIZES = {"linf": (0.1, 0.3, 0.6), "l2": (0.4, 1.2, 3.0), "l1": (1.5, 5.0, 15.0)}
every_norm = pytest.mark.parametrize("norm", sorted(SIZES))


def settings(norm: str = "linf", **changes: object) -> EvaluationConfig:
    small = EvaluationConfig(
        norm=norm,
        radii=SIZES[norm],
        attack_steps=5,
        adaptive_attacks=("fgsm", "ifgsm", "madry", "apgd_t", "square"),
        adaptive_steps=8,
        restarts=2,
        queries=10,
        vote_attacks=("ifgsm",),
        noise_draws=2,
    )
    return small.replace(**changes)


def table(protocol: Protocol, function: Deployed, seed: int = 0, inputs: Tensor = INPUTS) -> AttackedTable:
    radii = radii_of(protocol.config, inputs[0].numel())
    columns = protocol.rows(function, inputs, LABELS[: len(inputs)], seeded(seed))
    return AttackedTable(protocol.name, function.name, protocol.attack_names(function), tuple(radii), columns)


@dataclass(frozen=True)
class Watched(Deployed):
    """A single pass that remembers the points it was asked about and what the attacks were told to do."""

    name: ClassVar[str] = "watched"
    meaning: ClassVar[str] = "a single pass, watched"
    network: Network
    rows: int = 50
    deterministic: bool = True  # type: ignore[misc]
    asked: list[Tensor] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)

    def answer(self, points: Tensor, generator: torch.Generator) -> Columns:
        self.asked.append(points.clone())
        return SinglePass(self.network, self.rows).answer(points, generator)

    def victims(self, points: Tensor, goal: Goal, generator: torch.Generator) -> dict[str, Victim]:
        self.goals.append(goal)
        plain = SinglePass(self.network, self.rows).victims(points, goal, generator)
        return dict.fromkeys(("", "score", "vote"), plain[""])


# The published protocol, from its description.


@dataclass(frozen=True)
class Slow:
    """Attacks on the weights alone, one image after the other, labels fixed to what the copy says at the start."""

    network: Network
    size: float
    steps: int
    bound: bool = False
    true_labels: bool = False
    follow: bool = False

    def scores(self, image: Tensor) -> Tensor:
        body, output = self.network.head.body, self.network.head.output
        hidden = F.conv2d(image, self.network.encoder.weight, stride=2, padding=1).relu().flatten(1)
        last = F.linear(hidden, body[2].weight, body[2].bias)
        return F.linear(last.clamp(-1, 1) if self.bound else last, output.weight)

    def slope(self, image: Tensor, label: Tensor) -> Tensor:
        leaf = image.clone().requires_grad_()
        scores = self.scores(leaf)
        aim = scores.argmax(1) if self.follow else label
        return torch.autograd.grad(F.cross_entropy(scores, aim), leaf)[0]

    def point(self, name: str, image: Tensor, start: Tensor, label: Tensor) -> Tensor:
        own = label if self.true_labels else self.scores(image).argmax(1)
        steps = 1 if name == "fgsm" else self.steps
        point, momentum = start, torch.zeros_like(image)
        for _ in range(steps):
            slope = self.slope(point, own)
            if name == "mim":
                momentum = momentum + slope / slope.abs().mean()
                slope = momentum
            point = point + self.size / steps * slope.sign()
            point = torch.minimum(torch.maximum(point, image - self.size), image + self.size).clamp(-1, 1)
        return point


def slow_published(made: Network, name: str, size: float, inputs: Tensor, seed: int, **broken: bool) -> list[Tensor]:
    slow = Slow(made, size, 5, **broken)
    offsets = 2 * torch.rand(inputs.shape, generator=seeded(seed)).to(inputs) - 1
    starts = (inputs + size * offsets).clamp(-1, 1) if name == "madry" else inputs
    parts = zip(torch.split(inputs, 1), torch.split(starts, 1), torch.split(LABELS, 1), strict=True)
    return [slow.point(name, image, start, label) for image, start, label in parts]


def compared(name: str, size: float, **broken: bool) -> bool:
    """Whether the fast protocol and the slow one end at the same points; the records must be about those."""
    made, inputs = trained().double(), INPUTS.double()
    made.head.body[2].weight.data.mul_(3)
    function = Watched(made, rows=7)
    columns = Published(settings(radii=(size,), attacks=(name,))).rows(function, inputs, LABELS, seeded(4))
    clean, found = function.asked
    assert torch.equal(clean, inputs)
    assert columns["prediction"] == made(inputs).argmax(1).tolist()
    assert columns[f"{name}@{size:g}"] == made(found).argmax(1).tolist()
    assert columns[f"{name}@{size:g}/distance"] == (found - inputs).abs().flatten(1).amax(1).tolist()
    return torch.allclose(torch.cat(slow_published(made, name, size, inputs, 4, **broken)), found, atol=1e-9)


@pytest.mark.parametrize("size", [0.1, 0.5])
@pytest.mark.parametrize("name", ["fgsm", "ifgsm", "mim", "madry"])
def test_the_published_protocol_is_its_description(name: str, size: float) -> None:
    assert compared(name, size)


@pytest.mark.parametrize("broken", ["bound", "true_labels", "follow"])
def test_another_description_is_caught(broken: str) -> None:
    """Twins: with the bound on the last layer, led away from true labels, or from the prediction at each step."""
    assert not all(compared(name, 1.0, **{broken: True}) for name in ("fgsm", "ifgsm", "mim", "madry"))


def test_the_published_protocol_does_not_look_at_labels() -> None:
    made = trained()
    ours, theirs = (
        Published(settings()).rows(SinglePass(made, 50), INPUTS, labels, seeded()) for labels in (LABELS, 2 - LABELS)
    )
    ours.pop("label")
    assert theirs.pop("label") == (2 - LABELS).tolist()
    assert ours == theirs


# The adaptive protocol.


@every_norm
def test_a_larger_radius_breaks_no_less_and_a_broken_example_is_broken_at_a_point_inside(norm: str) -> None:
    function = Watched(trained())
    found = table(Adaptive(settings(norm)), function)
    order = {"linf": torch.inf, "l2": 2, "l1": 1}[norm]
    asked = torch.cat(function.asked).double()
    wrong_as = function.network(asked.float()).argmax(1)
    broken_before = dict.fromkeys(found.attacks, ~found.clean())
    for radius in found.radii:
        for attack in found.attacks:
            broken = ~found.survives(attack, radius)
            assert not (broken_before[attack] & ~broken).any()
            assert found.column(attack, radius, "distance").max() <= radius.size
            broken_before[attack] = broken
            for row in broken.nonzero()[0].tolist():
                away = torch.linalg.vector_norm((asked - INPUTS[row].double()).flatten(1), order, dim=1)
                assert ((away <= radius.size) & (wrong_as != LABELS[row])).any()
        assert found.survives(WORST, radius).sum() <= min(found.survives(a, radius).sum() for a in found.attacks)
    assert found.survives(WORST, found.radii[0]).sum() > found.survives(WORST, found.radii[-1]).sum()


@every_norm
def test_the_adaptive_protocol_breaks_what_the_published_one_shows_and_more(norm: str) -> None:
    function = SinglePass(trained(noise=0.3), 50)
    published, adaptive = (table(protocol(settings(norm)), function) for protocol in (Published, Adaptive))
    left = [
        (int(published.survives(WORST, radius).sum()), int(adaptive.survives(WORST, radius).sum()))
        for radius in published.radii
    ]
    assert all(ours <= theirs for theirs, ours in left)
    assert any(ours < theirs for theirs, ours in left)
    assert published.records["prediction"] == adaptive.records["prediction"]


def test_scores_of_each_attack_are_never_below_the_worst() -> None:
    for score in (found := table(Adaptive(settings()), SinglePass(trained(), 50))).conventional():
        worst = next(s for s in found.conventional() if (s.attack, s.radius) == (WORST, score.radius))
        assert worst.count <= score.count


@pytest.mark.parametrize("protocol", [Published, Adaptive])
def test_the_generator_decides_the_records(protocol: type[Protocol]) -> None:
    function = SinglePass(trained(), 50)
    first, again, other = (table(protocol(settings()), function, seed).records for seed in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.parametrize("protocol", [Published, Adaptive])
def test_how_many_rows_pass_at_once_does_not_change_the_records(protocol: type[Protocol]) -> None:
    made = trained().double()
    small, large = (table(protocol(settings()), SinglePass(made, rows), inputs=INPUTS.double()) for rows in (7, 500))
    for name, column in large.records.items():
        assert small.records[name] == pytest.approx(column, abs=1e-9), name


def goal_of(**changes: object) -> Goal:
    function = Watched(trained(noise=0.6))
    table(Adaptive(settings(adaptive_attacks=("fgsm",), radii=(0.1,), **changes)), function)
    return function.goals[0]


def test_attacks_lead_away_from_true_labels_or_from_predictions() -> None:
    made = trained(noise=0.6)
    made.head.output.weight.data = made.head.output.weight.data.roll(1, 0)
    for labels, wanted in (("true", LABELS), ("predicted", made(INPUTS).argmax(1))):
        function = Watched(made)
        table(Adaptive(settings(adaptive_attacks=("fgsm",), labels=labels)), function)
        assert torch.equal(function.goals[0].labels, wanted)
        assert not function.goals[0].targeted
    assert not torch.equal(LABELS, made(INPUTS).argmax(1))


def test_a_random_target_is_another_class_and_every_other_one_comes_up() -> None:
    """Each of 45 examples is sent to one of two other classes; that one is never chosen has probability 6e-14."""
    goal = goal_of(target="random")
    assert goal.targeted
    assert not (goal.labels == LABELS).any()
    assert set(((goal.labels - LABELS) % 3).tolist()) == {1, 2}


def test_the_least_likely_target_is_the_smallest_score_among_the_others() -> None:
    """On a model whose labels are mixed up, so that the smallest score of all is often the true label's."""
    made = trained()
    made.head.output.weight.data = made.head.output.weight.data.roll(1, 0)
    function, scores = Watched(made), made(INPUTS)
    table(Adaptive(settings(adaptive_attacks=("fgsm",), target="least_likely")), function)
    goal = function.goals[0]
    assert goal.targeted
    assert (scores.argmin(1) == LABELS).any()
    for row, label in enumerate(LABELS.tolist()):
        others = [other for other in range(3) if other != label]
        assert int(goal.labels[row]) == min(others, key=lambda other: float(scores[row, other]))


def test_a_targeted_attack_ends_in_its_target_where_it_breaks() -> None:
    function = Watched(trained())
    found = table(Adaptive(settings(adaptive_attacks=("madry",), target="least_likely")), function)
    last = found.column("madry", found.radii[-1])
    reached = torch.tensor(last) == function.goals[0].labels
    plain = table(Adaptive(settings(adaptive_attacks=("madry",))), Watched(trained()))
    elsewhere = torch.tensor(plain.column("madry", plain.radii[-1])) == function.goals[0].labels
    assert reached.sum() > elsewhere.sum()


def test_a_broken_example_is_not_attacked_again_and_a_vote_is_asked_anew() -> None:
    made = trained()
    for deterministic in (True, False):
        function = Watched(made, deterministic=deterministic)
        found = table(Adaptive(settings(adaptive_attacks=("fgsm",), vote_attacks=("fgsm",))), function)
        counts = [len(points) for points in function.asked[1:]]
        if deterministic:
            resisting = [int(found.clean().sum())]
            resisting += [int(found.survives("fgsm", radius).sum()) for radius in found.radii[:-1]]
            assert counts == [count for count in resisting if count]
            assert counts[-1] < len(INPUTS)
        else:
            assert counts == [len(INPUTS)] * 6


def vote(made: Network) -> Vote:
    config = CertificationConfig(noise_draws=30, resampling_shrinkage=1.0)
    return Vote.of(VerifiedInference(made, config, input_noise_scale=0.2, hidden_noise_scale=0.2), 512, 2)


@every_norm
def test_a_vote_is_attacked_through_both_of_its_smooth_forms(norm: str) -> None:
    function = vote(trained())
    found = table(Adaptive(settings(norm)), function, inputs=INPUTS[:9])
    assert found.attacks == ("ifgsm:score", "ifgsm:vote")
    assert "gradient" not in found.records
    for attack in found.attacks:
        for radius in found.radii:
            assert found.column(attack, radius, "distance").max() <= radius.size
            assert found.column(attack, radius, "corrected").min() >= 0
            assert found.column(attack, radius, "abstain").dtype == bool
    assert found.survives(WORST, found.radii[-1]).sum() < found.clean().sum()


def test_gradient_sizes_are_those_of_the_cross_entropy() -> None:
    made = network(dtype=torch.float64).requires_grad_(False)
    columns = Adaptive(settings(adaptive_attacks=("fgsm",))).rows(
        SinglePass(made, 4), INPUTS.double(), LABELS, seeded()
    )
    for row in (0, 7, 44):
        leaf = INPUTS[row : row + 1].double().requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(made(leaf), LABELS[row : row + 1]), leaf)
        assert columns["gradient"][row] == pytest.approx(float(slope.abs().max()))


def test_every_piece_of_work_is_heard_of_once() -> None:
    for protocol in (Published(settings()), Adaptive(settings())):
        heard: list[float] = []
        protocol.rows(SinglePass(trained(), 50), INPUTS, LABELS, seeded(), heard.append)
        assert sum(heard) == pytest.approx(1)
        assert len(heard) == 3 * len(protocol.attack_names(SinglePass(trained(), 50)))


@pytest.mark.parametrize(("norm", "widest"), [("linf", 2.0), ("l2", 2 * 6.0), ("l1", 2 * 36.0)])
def test_a_radius_wider_than_the_range_is_refused(norm: str, widest: float) -> None:
    fits = radii_of(settings(norm, radii=(widest, 0.5)), 36)
    assert fits == [Radius(0.5, Norm(norm)), Radius(widest, Norm(norm))]
    with pytest.raises(SettingError if norm == "linf" else UnitError, match=r"in \[-1, 1\]"):
        radii_of(settings(norm, radii=(widest * 1.01,)), 36)
