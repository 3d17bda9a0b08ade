"""The paper's networks are clipped by one backward pass, exactly, although they overwrite values on their way.

Their encoder tells the tape of its uses; their hidden values are overwritten by noise, normalisation and ReLU, and the
tape takes gradients where the values were made.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from stobatch.config import ModelConfig
from stobatch.dp import layer_gradients as tape
from stobatch.dp.clipping import (
    Batch,
    ClippedSum,
    Losses,
    clipped_sum_by_example,
    clipped_sum_in_one_pass,
    clipped_sum_mixed,
    clipper_for,
    parameters_without_rule,
)
from stobatch.dp.layer_gradients import Tape, WeightForm
from stobatch.models import Classifier, ConvEncoder, Network, ReferenceNorm, affine, build, from_layers
from stobatch.models import network as normalisation
from stobatch.sound.losses import (
    Adversarial,
    CrossEntropy,
    NoisyViews,
    Objective,
    Ramp,
    Reconstruction,
    Term,
    normal_sampler,
)
from stobatch.training.trainable import working_precision

CLASSES = 4
EXACT = 1e-9
SHAPES = {"mnist_cnn": (1, 28, 28), "cifar10_cnn": (3, 16, 16), "small_cnn": (1, 8, 8), "resnet18": (3, 16, 16)}
NORMS = ("reference", "group", "none")
MNIST = ("mnist_cnn", "reference")


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(autouse=True)
def few_anchors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(normalisation, "NUM_ANCHORS", 8)


def dense() -> Network:
    torch.manual_seed(0)
    body = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(12, 6))
    return from_layers(nn.Linear(64, 12), body, nn.Linear(6, CLASSES), (1, 8, 8))


def own_conv() -> Network:
    """Oblong images do not divide into phases: the encoder is a plain convolution."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(60, 6))
    return from_layers(nn.Conv2d(2, 3, 3, stride=2, padding=1), body, nn.Linear(6, CLASSES), (2, 7, 9))


OWN = {"dense": dense, "own conv": own_conv}


def made(name: str, norm: str) -> Network:
    """In float64, with noise in both places and statistics that are not those of the start."""
    config = ModelConfig(architecture=name, normalisation=norm, last_hidden_size=32) if name in SHAPES else None
    network = build(config, SHAPES[name], CLASSES, seeded(0)) if config else OWN[name]()
    assert isinstance(network, Network)
    if isinstance(network.encoder, ConvEncoder):
        assert (network.encoder.phases is not None) == (name in SHAPES)
    shapes = (network.input_noise.shape, network.hidden_noise.shape)
    network.set_noise(*(0.1 * torch.randn(shape, generator=seeded(1)) for shape in shapes))
    network.double().calibrate()
    return network


def examples(network: Network) -> Batch:
    """Few where gradients are large: the slow way forms them all."""
    count = 3 if sum(p.numel() for p in network.parameters()) < 10**6 else 2
    inputs = torch.rand(count, *network.input_shape, generator=seeded(2), dtype=torch.float64) * 2 - 1
    return inputs.to(network.dtype), torch.arange(count) % CLASSES


def natural(network: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(network(batch[0]), batch[1], reduction="none")


def uphill(network: Classifier, inputs: Tensor, labels: Tensor, radius: float) -> Tensor:
    leaf = inputs.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(natural(network, (leaf, labels)).sum(), leaf)
    return (inputs + radius * gradient.sign()).clamp(-1, 1)


def attacked_inside(network: nn.Module, batch: Batch) -> Tensor:
    """The attack's passes meet the same weights while the tape is open."""
    assert isinstance(network, Network)
    point = uphill(network, *batch, 0.1)
    with torch.no_grad():
        natural(network, (point, batch[1]))
    return natural(network, (point, batch[1]))


def noise_between(network: nn.Module, batch: Batch) -> Tensor:
    """Fresh noise between encoder and head."""
    assert isinstance(network, Network)
    inputs, labels, noise = batch
    scores = network.head(network.noisy_hidden(inputs) + noise)
    return F.cross_entropy(scores, labels, reduction="none")


def with_noise_between(network: Network) -> tuple[Batch, Losses]:
    inputs, labels = examples(network)
    noise = torch.randn(len(labels), *network.encoder.hidden_shape, generator=seeded(3), dtype=torch.float64)
    return (inputs, labels, 0.3 * noise), noise_between


def of_terms(*terms: Term) -> Callable[[Network], tuple[Batch, Losses]]:
    objective = Objective(tuple((1.0 + i, term) for i, term in enumerate(terms)), Ramp(0.0, 0.5))
    return lambda n: objective.prepare(n, *examples(n), 1.0, normal_sampler(seeded(4), torch.device("cpu")))


VIEWS = NoisyViews(lambda shape, coins: 0.3 * coins(shape), 2)
OBJECTIVES: dict[str, Callable[[Network], tuple[Batch, Losses]]] = {
    "cross-entropy": of_terms(CrossEntropy()),
    "views": of_terms(VIEWS),
    "adversarial": of_terms(Adversarial(0.1, uphill)),
    "all and reconstruction": of_terms(CrossEntropy(), VIEWS, Adversarial(0.1, uphill), Reconstruction()),
    "noise between": with_noise_between,
}
CASES = [
    *((name, norm, objective) for name in ("mnist_cnn", "small_cnn") for norm in NORMS for objective in OBJECTIVES),
    # Three million weights: all terms together, and noise in the middle.
    *(("cifar10_cnn", norm, objective) for norm in NORMS for objective in ("all and reconstruction", "noise between")),
    *((name, "none", objective) for name in OWN for objective in OBJECTIVES),
    *(("resnet18", norm, "noise between") for norm in NORMS),
]


def flat(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([gradients[name].flatten() for name in sorted(gradients)]).double()


def same(one: ClippedSum, other: ClippedSum, tolerance: float = EXACT) -> bool:
    """Parameter by parameter, so that a large one hides no small one."""
    assert one.gradients.keys() == other.gradients.keys()
    pairs = [(one.norms, other.norms), *((one.gradients[name], value) for name, value in other.gradients.items())]
    return all(float((a - b).norm()) <= tolerance * float(b.norm()) for a, b in pairs)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of torch.func, for pooling in resnet18
@pytest.mark.parametrize(("name", "norm", "objective"), CASES)
def test_the_fast_clipper_is_used_and_equals_formed_gradients(name: str, norm: str, objective: str) -> None:
    network = made(name, norm)
    batch, losses = OBJECTIVES[objective](network)
    assert clipper_for(network, losses, batch) is clipped_sum_in_one_pass
    fast = clipped_sum_in_one_pass(network, losses, batch, 0.1)
    assert same(fast, clipped_sum_by_example(network, losses, batch, 0.1))
    assert float(fast.norms.min()) > 0.1, "all are clipped, so the sum depends on the norms"


def one_at_a_time(network: Network, losses: Losses, batch: Batch, clip_norm: float) -> ClippedSum:
    """By autograd alone, which knows nothing of tapes or of `torch.func`."""
    parameters = dict(network.named_parameters())
    total, norms = {name: torch.zeros_like(p) for name, p in parameters.items()}, []
    for row in range(len(batch[1])):
        (loss,) = losses(network, tuple(entry[row : row + 1] for entry in batch))
        single = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
        norms.append(flat(single).norm())
        total = {name: total[name] + single[name] * min(1, clip_norm / norms[-1]) for name in parameters}
    return ClippedSum(total, torch.stack(norms))


@pytest.mark.parametrize("name", ["mnist_cnn", "small_cnn"])
@pytest.mark.parametrize("norm", NORMS)
def test_the_fast_clipper_equals_one_example_at_a_time(name: str, norm: str) -> None:
    network = made(name, norm)
    for batch, losses in (OBJECTIVES["all and reconstruction"](network), (examples(network), attacked_inside)):
        slow = one_at_a_time(network, losses, batch, 0.1)
        assert same(clipped_sum_in_one_pass(network, losses, batch, 0.1), slow)


@pytest.mark.parametrize("objective", ["all and reconstruction", "noise between"])
@pytest.mark.parametrize(("name", "norm"), [MNIST, ("mnist_cnn", "group"), ("dense", "none")])
def test_no_contribution_is_longer_than_c(name: str, norm: str, objective: str) -> None:
    network = made(name, norm)
    batch, losses = OBJECTIVES[objective](network)
    for scale in (1.0, 30.0):
        large = (scale * batch[0], *batch[1:])
        for row in range(len(batch[1])):
            alone = clipped_sum_in_one_pass(network, losses, tuple(entry[row : row + 1] for entry in large), 0.1)
            assert 0.1 * (1 - 1e-6) <= float(flat(alone.gradients).norm()) <= 0.1 * (1 + EXACT)


@pytest.mark.parametrize(("name", "norm"), [MNIST, ("small_cnn", "group"), ("dense", "none")])
def test_no_contribution_in_bfloat16_is_longer_than_c(name: str, norm: str) -> None:
    network = made(name, norm).float()
    batch, losses = OBJECTIVES["all and reconstruction"](network)
    with working_precision("bfloat16", torch.device("cpu")):
        assert network(batch[0]).dtype == torch.bfloat16
        for row in range(len(batch[1])):
            alone = clipped_sum_in_one_pass(network, losses, tuple(entry[row : row + 1] for entry in batch), 0.1)
            assert all(value.dtype == torch.float32 for value in alone.gradients.values())
            assert 0.099 <= float(flat(alone.gradients).norm()) <= 0.1 * (1 + 1e-5)


def test_an_open_tape_changes_no_bit_and_stops_no_overwriting() -> None:
    network = made(*MNIST)
    inputs, _ = examples(network)
    plain = network(inputs)
    with Tape(network) as recorded:
        hidden = network.noisy_hidden(inputs + network.input_noise)
        before = hidden.detach().clone()
        assert torch.equal(network.head(hidden), plain)
    assert not torch.equal(hidden, before)
    assert isinstance(network.head.norm, ReferenceNorm)
    assert {type(layer).__name__ for layer in recorded.uses} == {"ConvEncoder", "Conv2d", "Linear"}


def test_another_networks_encoder_counts_for_nothing() -> None:
    network, teacher = made("dense", "none"), made("dense", "none")

    def taught(network: nn.Module, batch: Batch) -> Tensor:
        return natural(network, batch) + natural(teacher, batch)

    batch = examples(network)
    assert same(
        clipped_sum_in_one_pass(network, taught, batch, 0.1), clipped_sum_in_one_pass(network, natural, batch, 0.1)
    )


# Broken twins.


def forgetting(*forgotten: WeightForm) -> Callable[..., None]:
    def record_use(layer: nn.Module, inputs: Tensor, outputs: Tensor, form: WeightForm) -> None:
        if form not in forgotten:
            tape.record_use(layer, inputs, outputs, form)

    return record_use


@pytest.mark.parametrize(
    ("forgotten", "objective"),
    [
        (WeightForm.WEIGHT, "cross-entropy"),
        (WeightForm.WEIGHT, "noise between"),
        (WeightForm.WEIGHT, "all and reconstruction"),
        (WeightForm.TRANSPOSE, "all and reconstruction"),
    ],
)
@pytest.mark.parametrize(("name", "norm"), [MNIST, ("dense", "none")])
def test_an_encoder_that_tells_too_little_is_caught(
    name: str, norm: str, forgotten: WeightForm, objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = made(name, norm)
    batch, losses = OBJECTIVES[objective](network)
    monkeypatch.setattr(affine, "record_use", forgetting(forgotten))
    assert not parameters_without_rule(network)
    assert clipper_for(network, losses, batch) is clipped_sum_by_example
    assert not same(
        clipped_sum_in_one_pass(network, losses, batch, math.inf),
        clipped_sum_by_example(network, losses, batch, math.inf),
        1e-2,
    )


def test_gradients_at_overwritten_values_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    network = made(*MNIST)
    batch, losses = OBJECTIVES["cross-entropy"](network)
    monkeypatch.setattr(tape, "get_gradient_edge", lambda outputs: outputs)
    assert clipper_for(network, losses, batch) is clipped_sum_by_example


def test_a_weight_used_outside_the_encoder_is_clipped_by_example() -> None:
    network = made(*MNIST)

    def penalised(network: nn.Module, batch: Batch) -> Tensor:
        assert isinstance(network, Network)
        return natural(network, batch) + network.encoder.columns().square().sum()

    assert clipper_for(network, penalised, examples(network)) is clipped_sum_by_example


def test_the_gradients_of_an_encoder_of_another_kind_are_formed() -> None:
    class Doubled(affine.DenseEncoder):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(2 * inputs)

    network = made("dense", "none")
    network.encoder = Doubled((1, 8, 8), 12).double()
    assert clipper_for(network, natural, examples(network)) is clipped_sum_mixed
