"""Your own network through `from_layers`: what is kept, what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stobatch.errors import ModelError
from stobatch.models import ConvEncoder, DenseEncoder, from_layers, rows_in_memory
from stobatch.models.classifier import bytes_per_row


def dense() -> tuple[nn.Linear, nn.Module, nn.Linear]:
    body = nn.Sequential(nn.ReLU(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 6))
    return nn.Linear(16, 8), body, nn.Linear(6, 3)


def test_a_dense_network_is_what_it_was_without_two_biases():
    first, body, last = dense()
    network = from_layers(first, body, last, (1, 4, 4))
    inputs = torch.rand(5, 1, 4, 4) * 2 - 1
    hidden = inputs.flatten(1) @ first.weight.t()
    expected = body(hidden).clamp(-1, 1) @ last.weight.t()
    assert torch.allclose(network(inputs), expected, atol=1e-6)
    assert isinstance(network.encoder, DenseEncoder)
    assert (network.encoder.inputs_per_neuron, network.encoder.neurons_per_map) == (16, 8)
    assert (network.num_classes, network.last_hidden_size) == (3, 6)


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(3, 1, 1), (4, 2, 0), (5, 3, 2)])
def test_a_convolutional_network_is_what_it_was_without_two_biases(kernel, stride, padding):
    first = nn.Conv2d(2, 4, kernel, stride=stride, padding=padding)
    side = (9 + 2 * padding - kernel) // stride + 1
    body = nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(4 * side**2, 6))
    last = nn.Linear(6, 3)
    network = from_layers(first, body, last, (2, 9, 9))
    inputs = torch.rand(5, 2, 9, 9) * 2 - 1
    hidden = nn.functional.conv2d(inputs, first.weight, stride=stride, padding=padding)
    expected = body(hidden).clamp(-1, 1) @ last.weight.t()
    assert torch.allclose(network(inputs), expected, atol=1e-5)
    assert isinstance(network.encoder, ConvEncoder)
    assert network.encoder.inputs_per_neuron == 2 * kernel**2
    assert network.encoder.neurons_per_map == side**2


def test_the_first_and_last_layers_are_copies():
    first, body, last = dense()
    network = from_layers(first, body, last, (1, 4, 4))
    network.encoder.weight.data.zero_()
    network.head.output.weight.data.zero_()
    assert first.weight.any()
    assert last.weight.any()


def test_last_hidden_values_are_clamped_for_you():
    first, _, last = dense()
    network = from_layers(first, nn.Sequential(nn.Linear(8, 6), nn.Hardtanh(-50, 50)), last, (1, 4, 4))
    network.set_noise(torch.full((1, 4, 4), 1e3), torch.zeros(8))
    largest = last.weight.abs().sum(1)
    assert (network(torch.zeros(1, 1, 4, 4)).abs() <= largest + 1e-6).all()


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(1, 4, (3, 5)),
        nn.Conv2d(1, 4, 3, stride=(1, 2)),
        nn.Conv2d(1, 4, 3, padding=(0, 1)),
        nn.Conv2d(1, 4, 3, dilation=2),
        nn.Conv2d(2, 4, 3, groups=2),
        nn.Conv2d(1, 4, 3, padding="same"),
        nn.Conv2d(1, 4, 3, padding="valid"),
    ],
    ids=["oblong", "uneven stride", "uneven padding", "dilated", "grouped", "padding same", "padding valid"],
)
def test_first_convolutions_whose_algebra_is_not_written_are_refused(layer):
    with pytest.raises(ModelError, match="square, undilated and ungrouped"):
        from_layers(layer, nn.Flatten(), nn.Linear(4, 2), (layer.in_channels, 8, 8))


@pytest.mark.parametrize(
    ("layer", "shape"), [(nn.Linear(15, 8), (1, 4, 4)), (nn.Conv2d(3, 4, 3), (1, 8, 8))], ids=["dense", "conv"]
)
def test_a_first_layer_that_does_not_fit_the_inputs_is_refused(layer, shape):
    with pytest.raises(ModelError, match=r"the first layer has weights .* need"):
        from_layers(layer, nn.Flatten(), nn.Linear(4, 2), shape)


def test_a_convolution_needs_images():
    with pytest.raises(ModelError, match="square"):
        from_layers(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4, 2), (64,))


def test_a_kernel_larger_than_the_image_is_refused():
    with pytest.raises(ModelError, match="9x9 kernel does not fit"):
        from_layers(nn.Conv2d(1, 4, 9), nn.Flatten(), nn.Linear(4, 2), (1, 8, 8))


@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
def test_another_kind_of_padding_is_refused(mode):
    with pytest.raises(ModelError):
        from_layers(nn.Conv2d(1, 4, 3, padding=1, padding_mode=mode), nn.Flatten(), nn.Linear(256, 2), (1, 8, 8))


@pytest.mark.parametrize("layer", [nn.ReLU(), nn.Conv1d(1, 4, 3)], ids=["relu", "conv1d"])
def test_a_first_layer_of_another_kind_is_refused(layer):
    with pytest.raises(ModelError):
        from_layers(layer, nn.Flatten(), nn.Linear(4, 2), (1, 8, 8))


def test_a_body_that_does_not_fit_is_refused():
    with pytest.raises(ModelError):
        from_layers(nn.Linear(16, 8), nn.ReLU(), nn.Linear(9, 2), (1, 4, 4))


def test_bytes_of_a_row_are_the_outputs_of_its_layers():
    network = from_layers(*dense(), (1, 4, 4))
    # encoder 8, first norm (identity) 8, ReLU 8, dense 5, tanh 5, dense 6, output 3 floats.
    assert bytes_per_row(network) == 4 * (8 + 8 + 8 + 5 + 5 + 6 + 3)


@pytest.mark.parametrize("megabytes", [16, 17, 512])
def test_rows_in_memory_stay_within_the_budget(megabytes):
    network = from_layers(*dense(), (1, 4, 4))
    rows = rows_in_memory(network, megabytes, most=10**9)
    row = 2 * bytes_per_row(network)
    assert rows * row <= megabytes * 2**20 < (rows + 1) * row
    assert rows_in_memory(network, megabytes, most=7) == 7


def test_one_row_passes_whatever_the_budget():
    wide = from_layers(nn.Linear(16, 8), nn.Linear(8, 5_000_000), nn.Linear(5_000_000, 2), (1, 4, 4))
    assert rows_in_memory(wide, 16, most=100) == 1


def test_measuring_leaves_no_hooks():
    network = from_layers(*dense(), (1, 4, 4))
    bytes_per_row(network)
    assert not any(module._forward_hooks for module in network.modules())


@pytest.mark.parametrize("rows_wanted", [1, 3, 40])
def test_certification_never_passes_more_rows_than_the_budget(monkeypatch, rows_wanted):
    """The largest batch that reaches the head, counted."""
    from stobatch.published import monte_carlo

    network = from_layers(*dense(), (1, 4, 4))
    monkeypatch.setattr(monte_carlo, "rows_in_memory", lambda network, memory_mb, most: rows_wanted)
    seen: list[int] = []
    network.head.body.register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    noise = monte_carlo.FreshNoise(0.5, 0.5)
    inputs = torch.rand(10, 1, 4, 4) * 2 - 1
    tally = monte_carlo.tally_products(network, inputs, noise, 20, torch.Generator().manual_seed(0), 16)
    assert max(seen) <= rows_wanted
    assert sum(seen) == 2 * 10 * 20
    assert (tally.votes.sum(1) == 20).all()


def test_training_never_passes_more_rows_than_the_budget(monkeypatch):
    from stobatch.data import Examples
    from stobatch.published import training as method
    from stobatch.published.noise import PrivateNoise
    from stobatch.seeds import Seeds

    network = from_layers(*dense(), (1, 4, 4))
    monkeypatch.setattr(method, "rows_in_memory", lambda network, memory_mb, most: 4)
    noise = PrivateNoise(torch.zeros(1, 4, 4), torch.zeros(8), torch.zeros(6))
    train = Examples(torch.rand(36, 1, 4, 4), torch.arange(36) % 3, 3)
    config = method.PublishedConfig(batch_size=12, train_attack_steps=2)
    trainable = method.PublishedTrainable(config, network, train, noise, Seeds.reproducible(0))
    seen: list[int] = []
    network.head.body.register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    (task,) = trainable.tasks(0)
    small = trainable.gradients(task, 0)
    assert max(seen) == 4
    trainable.chunk = 1000
    large = trainable.gradients(task, 0)
    assert max(seen) == 12
    assert all(torch.allclose(small[name], large[name], rtol=1e-4, atol=1e-6) for name in small)
