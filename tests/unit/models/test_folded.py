"""A folded network against the network itself, which is its oracle: scores, input gradients, and what is not folded."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from stobatch.config import ModelConfig
from stobatch.models import Network, build, from_layers, kernels
from stobatch.models.folded import fold


def gradient(scores: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    leaf = inputs.clone().requires_grad_()
    return torch.autograd.grad(F.cross_entropy(scores(leaf), torch.arange(len(inputs)) % 10), leaf)[0]


def made(architecture: str, normalisation: str, shape: tuple[int, int, int], *, last_hidden_size: int = 16) -> Network:
    generator = torch.Generator().manual_seed(0)
    config = ModelConfig(architecture=architecture, normalisation=normalisation, last_hidden_size=last_hidden_size)
    network = build(config, shape, 10, generator)
    assert isinstance(network, Network)
    noise = (torch.randn(shape, generator=generator) for shape in (shape, network.hidden_noise.shape))
    network.set_noise(*noise)
    for name, parameter in network.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, generator=generator)
    network.calibrate()
    return network.double()


CASES = [
    ("mnist_cnn", "reference", (1, 28, 28)),
    ("mnist_cnn", "none", (1, 28, 28)),
    ("small_cnn", "reference", (1, 8, 8)),
    ("cifar10_cnn", "reference", (3, 8, 8)),
]


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_scores_and_input_gradients_are_those_of_the_network(
    case: tuple[str, str, tuple[int, int, int]], noisy: bool
) -> None:
    network = made(*case)
    folded = fold(network, noisy_inputs=noisy)
    assert folded is not None
    inputs = torch.rand(3, *case[2], dtype=torch.float64) * 2 - 1
    arrives = inputs + network.input_noise if noisy else inputs
    assert torch.allclose(folded(arrives), network(inputs), rtol=1e-9, atol=1e-9)
    assert torch.allclose(gradient(folded, arrives), gradient(network, inputs), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("rows", [5, 40])
def test_the_papers_network_in_single_precision_is_the_one_in_double(
    rows: int, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "has_wide_vectors", lambda: wide)
    exact = made("mnist_cnn", "reference", (1, 28, 28), last_hidden_size=64)
    folded = fold(made("mnist_cnn", "reference", (1, 28, 28), last_hidden_size=64).float())
    assert folded is not None
    assert any(isinstance(layer, kernels.DenseConvolution) for layer in folded.children()) == wide
    inputs = torch.rand(rows, 1, 28, 28) * 2 - 1
    assert torch.allclose(folded(inputs).double(), exact(inputs.double()), rtol=1e-3, atol=1e-4)
    expected = gradient(exact, inputs.double())
    error = (gradient(folded, inputs).double() - expected).abs().max()
    # A value next to a kink may fall on its other side.
    assert float(error) <= 1e-2 * float(expected.abs().max())


def test_folding_leaves_the_network_and_its_bits_alone() -> None:
    network = made("mnist_cnn", "reference", (1, 28, 28))
    before = {name: value.clone() for name, value in (network.state_dict() | dict(network.named_buffers())).items()}
    folded = fold(network)
    assert folded is not None
    gradient(folded, torch.zeros(2, 1, 28, 28, dtype=torch.float64))
    after = network.state_dict() | dict(network.named_buffers())
    assert all(torch.equal(before[name], value) for name, value in after.items())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in network.parameters())


def test_what_is_not_known_is_not_folded() -> None:
    network = made("mnist_cnn", "reference", (1, 28, 28))
    hooked = made("mnist_cnn", "reference", (1, 28, 28))
    hooked.head.register_forward_hook(lambda *_: None)
    grouped = build(ModelConfig(normalisation="group"), (1, 28, 28), 10, torch.Generator().manual_seed(0))
    for other in (hooked, grouped, nn.Linear(2, 2), lambda x: x):
        assert fold(other) is None
    with torch.autocast("cpu"):
        assert fold(network) is None


def test_a_parametrised_layer_keeps_its_own_weights_and_the_normalisation_behind_it() -> None:
    body = nn.Sequential(nn.ReLU(), nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(32, 6)), nn.Tanh())
    network = from_layers(nn.Conv2d(1, 2, 3, stride=2, padding=1), body, nn.Linear(6, 10), (1, 8, 8))
    folded, inputs = fold(network), torch.rand(2, 1, 8, 8)
    assert folded is not None
    assert torch.allclose(folded(inputs), network(inputs), rtol=1e-4, atol=1e-5)
