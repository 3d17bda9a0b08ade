"""The paper's three networks: shapes, counts, bounds, and where the noise enters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stobatch.config import ModelConfig
from stobatch.errors import ModelError
from stobatch.models import Network, ReferenceNorm, build, build_encoder

SHAPES = {"mnist_cnn": (1, 28, 28), "cifar10_cnn": (3, 28, 28), "resnet18": (3, 64, 64)}
EACH = ["mnist_cnn", "cifar10_cnn", pytest.param("resnet18", marks=pytest.mark.slow)]
NORMS = ("reference", "group", "none")


def make(architecture: str, normalisation: str = "reference", *, seed: int = 0, classes: int = 10) -> Network:
    config = ModelConfig(architecture=architecture, normalisation=normalisation)
    return build(config, SHAPES[architecture], classes, torch.Generator().manual_seed(seed))


def images(architecture: str, count: int, seed: int = 1) -> torch.Tensor:
    return torch.rand(count, *SHAPES[architecture], generator=torch.Generator().manual_seed(seed)) * 2 - 1


@pytest.mark.parametrize(
    ("architecture", "per_neuron", "per_map", "maps", "sensitivity"),
    [
        ("mnist_cnn", 25, 196, 32, 4950),
        ("cifar10_cnn", 48, 196, 128, 9504),
        ("resnet18", 147, 1024, 64, 150822),
    ],
)
def test_the_encoders_have_the_sizes_of_appendix_p(architecture, per_neuron, per_map, maps, sensitivity):
    encoder = build_encoder(ModelConfig(architecture=architecture), SHAPES[architecture])
    assert (encoder.inputs_per_neuron, encoder.neurons_per_map, encoder.num_maps) == (per_neuron, per_map, maps)
    assert encoder.inputs_per_neuron * (encoder.neurons_per_map + 2) == sensitivity
    hidden = encoder(images(architecture, 2))
    assert tuple(hidden.shape[1:]) == encoder.hidden_shape
    assert hidden[0].numel() == maps * per_map
    assert encoder.decode(hidden).shape == (2, *SHAPES[architecture])
    assert [name for name, _ in encoder.named_parameters()] == ["weight"], "the encoder has no bias"


def convolution(before: int, after: int, kernel: int, *, bias: bool = True) -> int:
    return before * after * kernel**2 + bias * after


def residual(before: int, after: int, *, narrowing: bool) -> int:
    first = convolution(before, after, 3, bias=False) + convolution(after, after, 3, bias=False)
    shortcut = convolution(before, after, 1, bias=False) if narrowing or before != after else 0
    return first + shortcut + 2 * convolution(after, after, 3, bias=False)


COUNTS = {
    "mnist_cnn": 32 * 25 + convolution(32, 64, 5) + (64 * 4 * 4 + 1) * 256 + 256 * 10,
    "cifar10_cnn": 128 * 48 + convolution(128, 128, 5) + convolution(256, 256, 5) + (256 * 49 + 1) * 256 + 2560,
    "resnet18": 64 * 147
    + residual(64, 64, narrowing=False)
    + residual(64, 128, narrowing=False)
    + residual(128, 256, narrowing=True)
    + residual(256, 512, narrowing=True)
    + (512 + 1) * 256
    + 2560,
}
CHANNELS = {
    "mnist_cnn": 32 + 64 + 256,
    "cifar10_cnn": 128 + 256 + 256 + 256,
    "resnet18": 64 + 64 * 4 + (64 + 128 * 3) + (128 + 256 * 3) + (256 + 512 * 3) + 512 + 256,
}


@pytest.mark.parametrize("architecture", SHAPES)
def test_parameter_counts(architecture):
    for normalisation in NORMS:
        count = sum(parameter.numel() for parameter in make(architecture, normalisation).parameters())
        extra = 2 * CHANNELS[architecture] if normalisation == "group" else 0
        assert count == COUNTS[architecture] + extra, normalisation


@pytest.mark.parametrize("architecture", SHAPES)
def test_the_output_layer_is_linear_without_bias(architecture):
    network = make(architecture, classes=7)
    assert network.head.output.bias is None
    assert network.num_classes == 7
    assert network.last_hidden_size == 256
    assert network(images(architecture, 2)).shape == (2, 7)


@pytest.mark.parametrize("normalisation", NORMS)
@pytest.mark.parametrize("architecture", EACH)
def test_last_hidden_values_are_bounded_and_reach_the_bound(architecture, normalisation):
    """Lemma 4 needs h in [-1, 1]; a network that never came near would make the clamp untested."""
    network = make(architecture, normalisation).eval()
    seen: list[torch.Tensor] = []
    network.head.output.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        network.set_noise(torch.full(network.encoder.input_shape, 40.0), torch.full(network.encoder.hidden_shape, 90.0))
        network(images(architecture, 2))
    (last,) = seen
    assert last.shape == (2, 256)
    assert float(last.abs().max()) == 1.0


@pytest.mark.parametrize("architecture", EACH)
def test_noise_enters_before_and_after_the_encoder(architecture):
    network = make(architecture).eval()
    if architecture == "mnist_cnn":
        network.calibrate()
    inputs = images(architecture, 1)
    at_input = torch.randn(network.encoder.input_shape)
    at_hidden = torch.randn(network.encoder.hidden_shape)
    with torch.no_grad():
        plain = network(inputs)
        assert torch.equal(plain, network.head(network.encoder(inputs)))
        network.set_noise(at_input, at_hidden)
        expected = network.head(network.encoder(inputs + at_input) + at_hidden)
        assert torch.equal(network(inputs), expected)
        assert torch.equal(network.scores_of_noisy(inputs + at_input), expected)
        assert not torch.allclose(expected, plain)
        network.set_noise(at_input, torch.zeros_like(at_hidden))
        assert torch.equal(network(inputs), network.head(network.encoder(inputs + at_input)))


@pytest.mark.parametrize("normalisation", NORMS)
def test_the_stored_state_is_the_parameters_alone(normalisation):
    """Reference statistics are functions of the private noise: storing them would publish it."""
    network = make("mnist_cnn", normalisation)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    network.set_noise(torch.randn(1, 28, 28), torch.randn(32, 14, 14))
    network.calibrate()
    after = network.state_dict()
    assert after.keys() == before.keys() == dict(network.named_parameters()).keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_calibration_takes_the_statistics_of_the_public_images():
    network = make("mnist_cnn")
    network.set_noise(torch.randn(1, 28, 28), torch.randn(32, 14, 14))
    network.calibrate()
    with torch.no_grad():
        hidden = network.encoder(network.anchors + network.input_noise) + network.hidden_noise
        normalised = network.head.norm(hidden.clone())
    assert torch.allclose(normalised.mean(0), torch.zeros(32, 14, 14), atol=1e-4)
    assert float(normalised.square().mean()) == pytest.approx(1.0, abs=1e-3)
    assert float(network.anchors.min()) >= -1
    assert float(network.anchors.max()) <= 1
    layers = [module for module in network.modules() if isinstance(module, ReferenceNorm)]
    assert len(layers) == 3
    assert not any(layer.calibrating for layer in layers)


def test_a_shift_passes_reference_normalisation_as_its_own_map_says():
    layer = ReferenceNorm((4,))
    layer.mean, layer.spread = torch.randn(4), torch.tensor(2.5)
    values, shift = torch.randn(6, 4), torch.randn(6, 4)
    assert torch.allclose(layer(values + shift), layer(values) + layer.of_shift(shift), atol=1e-6)


def test_weights_come_from_the_generator_alone():
    torch.manual_seed(0)
    one = make("mnist_cnn", seed=5)
    torch.manual_seed(1)
    same, other = make("mnist_cnn", seed=5), make("mnist_cnn", seed=6)
    for (name, a), b, c in zip(one.named_parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        if a.ndim >= 2:
            assert not torch.equal(a, c), name
        else:
            assert not a.any(), name


@pytest.mark.parametrize("normalisation", NORMS)
@pytest.mark.parametrize("architecture", EACH)
def test_each_output_depends_on_its_own_input_bit_for_bit(architecture, normalisation):
    network = make(architecture, normalisation)  # in training mode, as during training
    if architecture == "mnist_cnn":
        network.calibrate()
    inputs = images(architecture, 4)
    other = inputs.clone()
    other[0] = 1.0
    other[3] = -other[3]
    with torch.no_grad():
        before, after = network(inputs), network(other)
    assert torch.equal(before[1:3], after[1:3])
    assert not torch.equal(before[0], after[0])
    assert not torch.equal(before[3], after[3])


def test_batch_normalisation_would_fail_the_test_above():
    network = make("mnist_cnn", "batch")
    inputs = images("mnist_cnn", 4)
    other = inputs.clone()
    other[0] = 1.0
    with torch.no_grad():
        assert not torch.equal(network(inputs)[1:], network(other)[1:])


def test_a_network_from_outside_has_no_recipe():
    with pytest.raises(ModelError, match="handed over in Python"):
        build_encoder(ModelConfig(architecture="custom"), (1, 28, 28))
    with pytest.raises(ModelError, match="are not images"):
        build_encoder(ModelConfig(), (784,))
    with pytest.raises(ModelError, match="7x7 kernel does not fit"):
        build_encoder(ModelConfig(architecture="resnet18"), (3, 0, 64))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_images_too_small_for_the_body_are_refused():
    config = ModelConfig(architecture="mnist_cnn")
    with pytest.raises(ModelError):
        build(config, (1, 2, 2), 2, torch.Generator())(torch.zeros(1, 1, 2, 2))


def test_the_gradient_of_the_encoder_equals_torchs_own():
    """The fast backward pass of the first layer against the stock one."""
    for architecture, (kernel, stride, padding) in {"mnist_cnn": (5, 2, 2), "cifar10_cnn": (4, 2, 1)}.items():
        encoder = build_encoder(ModelConfig(architecture=architecture), SHAPES[architecture])
        stock = nn.Conv2d(SHAPES[architecture][0], encoder.num_maps, kernel, stride, padding, bias=False)
        stock.weight.data.copy_(encoder.weight.data)
        gradients = []
        for layer in (encoder, stock):
            inputs = images(architecture, 3).requires_grad_()
            layer(inputs).square().sum().backward()
            gradients.append((inputs.grad, layer.weight.grad))
        for ours, theirs in zip(*gradients, strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4)
