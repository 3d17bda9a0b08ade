"""What the sound method descends on: terms along the ramp, views, adversarial points, and an average of parameters."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sound_steps import CLASSES, pictures, prepared, settings
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from stobatch.bounds.boxes import TrainingBox, worst_case_scores
from stobatch.models import Classifier, Layered, build
from stobatch.sound.averaged import AveragedSGD
from stobatch.sound.losses import IBP, Adversarial, CrossEntropy, NoisyViews, Objective, Ramp, normal_sampler
from stobatch.sound.settings import SoundConfig, _craft_points, view_noise

# The objective along the ramp.


def losses_at(objective: Objective, network: Layered, progress: float, inputs: Tensor, labels: Tensor) -> Tensor:
    normal = normal_sampler(torch.Generator().manual_seed(0), torch.device("cpu"))
    batch, losses = objective.prepare(network, inputs, labels, progress, normal)
    return losses(network, batch)


@pytest.mark.parametrize(
    ("progress", "share"), [(0.0, 0.0), (0.19, 0.0), (0.2, 0.0), (0.325, 0.25), (0.45, 0.5), (0.7, 1.0), (1.0, 1.0)]
)
def test_hard_terms_and_their_radius_grow_and_cross_entropy_has_the_rest(progress: float, share: float) -> None:
    data = pictures()
    network = build(settings().model, (1, 6, 6), CLASSES, torch.Generator().manual_seed(2))
    assert isinstance(network, Layered)
    inputs, labels = data.train.inputs[:5], data.train.labels[:5]
    radii: list[float] = []

    def attack(network: Classifier, inputs: Tensor, labels: Tensor, radius: float) -> Tensor:
        radii.append(radius)
        return (inputs + radius).clamp(-1, 1)

    views = NoisyViews(lambda shape, normal: torch.full(shape, 0.1), 2)
    terms = ((0.4, CrossEntropy()), (0.5, IBP(0.2)), (0.7, Adversarial(0.3, attack)), (0.2, views))
    found = losses_at(Objective(terms, Ramp(0.2, 0.5)), network, progress, inputs, labels)

    def natural(points: Tensor) -> Tensor:
        return F.cross_entropy(network(points), labels, reduction="none")

    worst = worst_case_scores(network.layers, TrainingBox.around(inputs, share * 0.2), labels)
    expected = (0.4 + (1 - share) * (0.5 + 0.7)) * natural(inputs)
    expected = expected + share * 0.5 * F.cross_entropy(worst, labels, reduction="none")
    expected = expected + share * 0.7 * natural((inputs + share * 0.3).clamp(-1, 1)) + 0.2 * natural(inputs + 0.1)
    assert torch.allclose(found, expected, rtol=1e-5)
    assert radii == ([] if share == 0 else [pytest.approx(share * 0.3)])


def test_a_ramp_without_length_is_a_step() -> None:
    assert [Ramp(0.3, 0.0).share(progress) for progress in (0.0, 0.29, 0.3, 1.0)] == [0.0, 0.0, 1.0, 1.0]
    assert Ramp(1.0, 0.5).share(0.999) == 0.0


def test_adversarial_points_are_worse_and_inside_the_ball() -> None:
    trainable = prepared(settings(**{"method.adversarial_weight": 1.0, "method.certified_weight": 0.0}))
    inputs, labels = trainable.reader.kept
    normal = normal_sampler(torch.Generator(), torch.device("cpu"))
    (given, _, points), _ = trainable.objective.prepare(trainable.network, inputs, labels, 1.0, normal)
    assert torch.equal(given, inputs)
    assert float((points - inputs).abs().max()) <= 0.2 + 1e-6
    assert float(points.abs().max()) <= 1
    assert not points.requires_grad
    before, after = (F.cross_entropy(trainable.network(x), labels, reduction="none") for x in (inputs, points))
    assert (after >= before - 1e-6).float().mean() > 0.9


# Between attack and box.


def between(loss: str, share: float, progress: float) -> tuple[Tensor, Tensor, Tensor, Layered]:
    """Return losses, inputs, labels and the network of one loss without cross-entropy; the ramp ends half way."""
    changes = {"natural_weight": 0.0, "certified_weight": 1.0, "box_loss": loss, "box_share": share}
    trainable = prepared(settings(**{f"method.{name}": value for name, value in changes.items()}))
    assert isinstance(trainable.network, Layered)
    inputs, labels = trainable.reader.kept
    return (
        losses_at(trainable.objective, trainable.network, progress, inputs, labels),
        inputs,
        labels,
        trainable.network,
    )


@pytest.mark.parametrize("progress", [0.25, 1.0])
@pytest.mark.parametrize("loss", ["sabr", "cc_ibp", "mtl_ibp"])
def test_losses_between_attack_and_box_are_as_printed_and_meet_at_the_box(loss: str, progress: float) -> None:
    found, inputs, labels, network = between(loss, 0.4, progress)
    share, natural = min(1.0, 2 * progress), F.cross_entropy(network(inputs), labels, reduction="none")
    radius = 0.2 * share

    def attacked(size: float) -> Tensor:
        return _craft_points(2, 512, network, inputs, labels, size)

    def worst(points: Tensor, size: float) -> Tensor:
        return worst_case_scores(network.layers, TrainingBox.around(points, size), labels)

    point = network(attacked(radius))
    scores = {
        "sabr": worst(attacked(0.6 * radius), 0.4 * radius),
        "cc_ibp": 0.6 * (point - point.gather(1, labels[:, None])) + 0.4 * worst(inputs, radius),
        "mtl_ibp": point,
    }
    expected = F.cross_entropy(scores[loss], labels, reduction="none")
    box = F.cross_entropy(worst(inputs, radius), labels, reduction="none")
    if loss == "mtl_ibp":
        expected = 0.6 * expected + 0.4 * box
    assert torch.allclose(found, (1 - share) * natural + share * expected, rtol=1e-5)
    whole = between(loss, 1.0, progress)[0]
    assert torch.allclose(whole, between("box", 0.5, progress)[0], rtol=1e-6)
    # Nothing that was attacked can be worse than the worst in the box.
    assert bool((found <= whole + 1e-6).all())
    assert bool((found < whole - 1e-3).any())


def test_the_small_box_stays_in_the_example_s_own() -> None:
    """Beyond it, it would train for balls that nobody asks about."""
    trainable = prepared(settings(**{"method.box_loss": "sabr", "method.box_share": 0.3}))
    inputs, labels = trainable.reader.kept
    normal = normal_sampler(torch.Generator(), torch.device("cpu"))
    (_, _, points), _ = trainable.objective.prepare(trainable.network, inputs, labels, 1.0, normal)
    small, own = TrainingBox.around(points, 0.3 * 0.2), TrainingBox.around(inputs, 0.2)
    assert bool((small.low >= own.low - 1e-6).all() and (small.high <= own.high + 1e-6).all())
    assert float((points - inputs).abs().max()) == pytest.approx(0.7 * 0.2, rel=1e-5)


@pytest.mark.parametrize("kind", ["gaussian", "laplace"])
def test_views_carry_the_noise_that_votes_are_taken_under(kind: str) -> None:
    """The same law: by the quantiles of a large sample, within six standard errors."""
    config = settings(**{"method.smoothing_stddev": 0.5, "method.smoothing_noise": kind, "method.views_weight": 1.0})
    method = config.method
    assert isinstance(method, SoundConfig)
    assert method.noise is not None
    normal = normal_sampler(torch.Generator().manual_seed(0), torch.device("cpu"))
    ours = view_noise(method.smoothing_noise, method.smoothing_stddev, (200_000,), normal)
    theirs = method.noise.draw((200_000,), torch.Generator().manual_seed(1))
    assert float(ours.std()) == pytest.approx(0.5, rel=0.02)
    distance = max(
        abs(float((ours < at).double().mean() - (theirs < at).double().mean())) for at in np.linspace(-2, 2, 41)
    )
    assert distance < 6 * math.sqrt(0.5 / 200_000)


# Descent with an average.


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_descent_is_torchs_and_the_average_follows_the_released_parameters(momentum: float) -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(40, 7, generator=generator, dtype=torch.float64)
    ours, theirs = (nn.Parameter(torch.ones(7, dtype=torch.float64)) for _ in range(2))
    averaged = AveragedSGD([ours], lr=0.1, momentum=momentum, decay=0.8)
    plain = torch.optim.SGD([theirs], lr=0.1, momentum=momentum)
    average = theirs.detach().clone()
    for count, gradient in enumerate(gradients):
        for parameter, optimiser in ((ours, averaged), (theirs, plain)):
            parameter.grad = gradient.clone()
            optimiser.step()
        assert torch.allclose(ours, theirs, atol=1e-12)
        # Nothing enters the average but the parameters, which are released.
        decay = min(0.8, (1 + count) / (10 + count))
        average = decay * average + (1 - decay) * theirs.detach()
    assert not torch.allclose(ours, average, atol=1e-3)
    averaged.use_average()
    assert torch.allclose(ours, average, atol=1e-12)
    adopted = ours.detach().clone()
    averaged.use_average()
    assert torch.equal(ours, adopted)


def test_an_average_without_steps_leaves_the_parameters() -> None:
    parameter = nn.Parameter(torch.ones(3))
    AveragedSGD([parameter], lr=0.1, momentum=0.0, decay=0.9).use_average()
    assert torch.equal(parameter, torch.ones(3))


def test_the_average_survives_a_checkpoint() -> None:
    parameters = [nn.Parameter(torch.zeros(4)) for _ in range(2)]
    one, other = (AveragedSGD([p], lr=0.3, momentum=0.5, decay=0.9) for p in parameters)
    gradients = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    for gradient in gradients[:5]:
        parameters[0].grad = gradient
        one.step()
    other.load_state_dict(one.state_dict())
    parameters[1].data.copy_(parameters[0].data)
    for gradient in gradients[5:]:
        for parameter, optimiser in zip(parameters, (one, other), strict=True):
            parameter.grad = gradient
            optimiser.step()
    one.use_average()
    other.use_average()
    assert torch.equal(*parameters)
