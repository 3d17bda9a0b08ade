"""The copy that the paper's authors attacked: the same weights, and nothing else of the deployed function."""

from __future__ import annotations

import copy

import pytest
import torch
from samples import CLASSES, SIDE, network, seeded
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from stobatch.errors import ModelError
from stobatch.evaluation.protocols import NoiseFreeSurrogate
from stobatch.models import Classifier, ConvEncoder, Network, ReferenceNorm, build_layered
from stobatch.models.network import Head


def points(count: int = 5) -> Tensor:
    return torch.rand(count, 1, SIDE, SIDE, generator=seeded(3), dtype=torch.float64) * 2 - 1


def by_hand(made: Network, inputs: Tensor) -> Tensor:
    """Two affine layers and an output, from the weights alone."""
    hidden = F.conv2d(inputs, made.encoder.weight, stride=2, padding=1).relu().flatten(1)
    linear = made.head.body[2]
    return F.linear(F.linear(hidden, linear.weight, linear.bias), made.head.output.weight)


def loud() -> Network:
    """With weights so large that the bound on the last hidden layer matters."""
    made = network(dtype=torch.float64)
    made.head.body[2].weight.data.mul_(20)
    made.calibrate()
    return made


def test_the_copy_is_the_weights_without_noise_normalisation_and_bound() -> None:
    made = loud()
    copied = NoiseFreeSurrogate(made)
    assert torch.allclose(copied(points()), by_hand(made, points()), atol=1e-12)
    bounded = made.head.scores_of_normalised(made.encoder(points()))
    assert not torch.allclose(copied(points()), bounded), "otherwise the bound would not be missed"


def test_noise_changes_the_deployed_function_and_not_the_copy() -> None:
    quiet, noisy = (network(noise=noise, dtype=torch.float64) for noise in (0.0, 5.0))
    assert torch.equal(NoiseFreeSurrogate(quiet)(points()), NoiseFreeSurrogate(noisy)(points()))
    assert not torch.allclose(quiet(points()), noisy(points()))


def test_the_copy_has_no_reference_normalisation_anywhere() -> None:
    made = network()
    made.head.body.append(nn.Sequential(ReferenceNorm((8,)), nn.Sequential(ReferenceNorm((8,)))))
    left = [module for module in NoiseFreeSurrogate(made).modules() if isinstance(module, ReferenceNorm)]
    assert left == []


class Twice(nn.Module):
    """One normalisation under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.before = self.after = ReferenceNorm((8,))

    def forward(self, values: Tensor) -> Tensor:
        return self.after(self.before(values))


def test_a_normalisation_under_two_names_is_switched_off_under_both() -> None:
    made = network()
    made.head.body.append(Twice())
    made.calibrate()
    assert not [module for module in NoiseFreeSurrogate(made).modules() if isinstance(module, ReferenceNorm)]


@pytest.mark.parametrize("layer", [nn.BatchNorm2d(4), ReferenceNorm((4, 3, 3))], ids=["batch", "reference"])
def test_a_first_normalisation_of_either_kind_is_switched_off(layer: nn.Module) -> None:
    torch.manual_seed(0)
    encoder = ConvEncoder((1, SIDE, SIDE), 4, 3, stride=2, padding=1)
    body = nn.Sequential(nn.Flatten(), nn.Linear(36, 8))
    made = Network(encoder, Head(layer, body, nn.Linear(8, CLASSES, bias=False))).eval()
    inputs = points().float()
    expected = made.head.output(body(F.conv2d(inputs, encoder.weight, stride=2, padding=1)))
    assert torch.allclose(NoiseFreeSurrogate(made)(inputs), expected, atol=1e-6)


def test_the_original_stays_what_it_is() -> None:
    made = loud()
    before, state = made(points()), copy.deepcopy(made.state_dict())
    copied = NoiseFreeSurrogate(made)
    copied(points())
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert torch.equal(made(points()), before)
    assert all(torch.equal(value, state[name]) for name, value in made.state_dict().items())
    assert sum(isinstance(module, ReferenceNorm) for module in made.modules()) == 2
    assert isinstance(made.head.norm, ReferenceNorm)
    assert made.head.norm.overwrites


def test_the_copy_of_plain_layers_is_those_layers() -> None:
    made = build_layered(
        "squash 3, conv 4 3/2, groupnorm 2, relu, linear", (1, SIDE, SIDE), CLASSES, seeded(1)
    ).double()
    copied = NoiseFreeSurrogate(made)
    assert torch.equal(copied(points()), made(points()))
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert made(points()).abs().max() > 0, "the copy shares nothing"


class Normalised(Classifier):
    """Somebody's own classifier, which normalises by the batch."""

    num_classes = CLASSES

    def __init__(self) -> None:
        super().__init__()
        self.input_shape = (1, SIDE, SIDE)
        self.norm, self.last = nn.BatchNorm2d(1), nn.Linear(SIDE * SIDE, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.last(self.norm(inputs).flatten(1))
        return scores


def test_the_copy_of_another_classifier_lacks_its_normalisation() -> None:
    made = Normalised().eval()
    made.norm.running_mean.fill_(0.5)
    inputs = points().float()
    assert torch.allclose(NoiseFreeSurrogate(made)(inputs), made.last(inputs.flatten(1)))
    assert isinstance(made.norm, nn.BatchNorm2d)


def test_a_bare_module_is_refused() -> None:
    with pytest.raises(ModelError, match="Linear has no noise-free copy"):
        NoiseFreeSurrogate(nn.Linear(2, 2))
