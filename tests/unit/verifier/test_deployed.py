"""A certificate is about the function that a call of the network computes, or there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils import parametrizations

from stobatch.baselines.noise_layer import LayerGaussian
from stobatch.baselines.noise_layer_verifier import NoiseLayerVerifier
from stobatch.bounds.certifier import BoxCertifier
from stobatch.config import CertificationConfig
from stobatch.dp.gaussian import Analytic
from stobatch.errors import ModelError
from stobatch.models import DenseEncoder, Head, Layered, Network
from stobatch.published.verified_inference import VerifiedInference
from stobatch.sound.verifiers import BoundsVerifier, VotesVerifier
from stobatch.types import Norm
from stobatch.verifier import Verifier
from stobatch.votes.counting import VoteSettings
from stobatch.votes.noise import GaussianNoise, HiddenGaussian

VOTES = VoteSettings(selection_draws=10, draws=50)


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)]


def inputs(count: int = 200) -> Tensor:
    return torch.rand(count, 6, generator=torch.Generator().manual_seed(1)) * 2 - 1


class Negated(Layered):
    """Says the opposite of its layers."""

    def forward(self, values: Tensor) -> Tensor:
        return -super().forward(values)


class Turning(Layered):
    """Its layers, until it has been called a hundred times."""

    calls = 0

    def forward(self, values: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(values) * (1 if self.calls < 100 else -1)


class OnlyWhenTraining(Layered):
    """Another function in each mode."""

    def forward(self, values: Tensor) -> Tensor:
        return super().forward(values) * (1 if self.training else -1)


def made(kind: type[Layered] = Layered) -> Layered:
    return kind(layers(), (6,)).requires_grad_(False)


def bounds(network: Layered) -> Verifier:
    return BoundsVerifier(network, Norm.LINF, [0.01, 0.1], 64)


def hidden_votes(network: Layered) -> Verifier:
    first = network.layers[0]
    assert isinstance(first, nn.Linear)
    noise = HiddenGaussian.behind(first, (6,), at_input=0.3, at_hidden=0.3)
    return VotesVerifier(network, network.layers[1:], noise, Norm.L2, (0.1,), VOTES, stop_early=False)


def input_votes(network: Layered) -> Verifier:
    return VotesVerifier(network, network, GaussianNoise(0.3), Norm.L2, (0.1,), VOTES, stop_early=False)


def verify(verifier: Verifier) -> None:
    verifier.verify(inputs(), torch.Generator().manual_seed(2))


@pytest.mark.parametrize("verifier", [bounds, hidden_votes, input_votes])
def test_a_plain_stack_is_certified(verifier: Callable[[Layered], Verifier]) -> None:
    verify(verifier(made()))
    verify(verifier(made().eval()))


@pytest.mark.parametrize("verifier", [bounds, hidden_votes])
def test_a_subclass_with_a_forward_of_its_own_gets_no_certificate_of_its_layers(
    verifier: Callable[[Layered], Verifier],
) -> None:
    network = made(Negated)
    with torch.no_grad():
        flipped = network(inputs()).argmax(1) != network.layers(inputs()).argmax(1)
    assert bool(flipped.all()), "the network says what its layers say: this test shows nothing"
    with pytest.raises(ModelError):
        verify(verifier(network))


def test_votes_of_the_whole_network_are_about_its_own_forward() -> None:
    """There nothing follows the layers: what votes is what is called."""
    network = made(Negated)
    found = input_votes(network).verify(inputs(), torch.Generator().manual_seed(2))
    sure = found.top_lower > 0.6
    with torch.no_grad():
        assert found.label[sure].tolist() != network.layers(inputs()).argmax(1)[sure].tolist()


def patch_forward(network: Layered) -> None:
    network.forward = lambda values: -network.layers(values)  # type: ignore[method-assign]


def patch_layer(network: Layered) -> None:
    network.layers[0].forward = lambda values: -nn.Linear.forward(network.layers[0], values)  # type: ignore


def compiled(network: Layered) -> None:
    network._compiled_call_impl = lambda values: -network.layers(values)  # type: ignore[assignment]


def hook(network: Layered) -> None:
    network.register_forward_hook(lambda module, given, found: -found)


def layer_hook(network: Layered) -> None:
    network.layers[0].register_forward_hook(lambda module, given, found: -found)


def pre_hook(network: Layered) -> None:
    network.layers.register_forward_pre_hook(lambda module, given: (-given[0],))


def weight_behind_the_parameter(network: Layered) -> None:
    network.layers[0].__dict__["weight"] = -network.layers[0].weight


def parametrized(network: Layered) -> None:
    parametrizations.weight_norm(network.layers[0])


CHANGES = [
    patch_forward, patch_layer, compiled, hook, layer_hook, pre_hook, weight_behind_the_parameter, parametrized,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_a_call_is_refused_before_and_after_the_verifier_was_made(
    change: Callable[[Layered], None],
) -> None:
    network = made()
    verifier = bounds(network)
    verify(verifier)
    change(network)
    with pytest.raises(ModelError):
        verify(verifier)
    with pytest.raises(ModelError):
        bounds(network)


@contextmanager
def on_all_modules(register: Callable[..., object], hook: Callable[..., object]) -> Iterator[None]:
    handle = register(hook)
    try:
        yield
    finally:
        handle.remove()  # type: ignore[attr-defined]


GLOBAL = {
    "forward": (register_module_forward_hook, lambda module, given, found: -found),
    "pre": (register_module_forward_pre_hook, lambda module, given: (-given[0],)),
}


@pytest.mark.parametrize("which", GLOBAL)
def test_hooks_on_all_modules_are_refused(which: str) -> None:
    with on_all_modules(*GLOBAL[which]), pytest.raises(ModelError, match="hook on all modules"):
        verify(bounds(made()))
    verify(bounds(made()))


def test_functions_patched_under_the_layers_are_found_by_their_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier, honest = bounds(made()), torch.nn.functional.linear
    monkeypatch.setattr(nn.functional, "linear", lambda *given: honest(*given) + 1e-3)
    with pytest.raises(ModelError, match="not those that its layers give"):
        verify(verifier)


@pytest.mark.parametrize("kind", [Turning, OnlyWhenTraining])
def test_votes_of_a_network_that_is_not_one_function_are_refused(kind: type[Layered]) -> None:
    with pytest.raises(ModelError, match=r"changes its 'calls'|other scores"):
        verify(input_votes(made(kind)))


def test_a_sequence_that_computes_something_else_is_refused() -> None:
    class Reversed(nn.Sequential):
        def forward(self, values: Tensor) -> Tensor:
            return -super().forward(values)

    with pytest.raises(ModelError, match="Reversed"):
        BoxCertifier(Reversed(*layers()))


class OtherNetwork(Network):
    """Another function than its encoder and head make."""

    def forward(self, values: Tensor) -> Tensor:
        return -super().forward(values)


def split(kind: type[Network]) -> Network:
    torch.manual_seed(0)
    head = Head(nn.Identity(), nn.Sequential(nn.ReLU(), nn.Linear(5, 4), nn.Tanh()), nn.Linear(4, 3, bias=False))
    return kind(DenseEncoder((6,), 5), head).requires_grad_(False)


def noise_layer(network: Network) -> Verifier:
    noise = LayerGaussian(network.encoder, torch.tensor(0.3))
    config = CertificationConfig(noise_draws=50)
    return NoiseLayerVerifier(network, noise, Analytic(), Norm.L2, config, source="a test")


def published(network: Network) -> Verifier:
    config = CertificationConfig(noise_draws=50)
    return VerifiedInference(network, config, input_noise_scale=0.2, hidden_noise_scale=0.4)


@pytest.mark.parametrize("verifier", [noise_layer, published])
@pytest.mark.parametrize("hooked", [False, True])
def test_a_network_in_two_parts_is_compared_with_what_is_certified(
    verifier: Callable[[Network], Verifier], hooked: bool
) -> None:
    verify(verifier(split(Network)))
    other = split(Network if hooked else OtherNetwork)
    made_before = verifier(other)
    if hooked:
        other.register_forward_hook(lambda module, given, found: -found)
    with pytest.raises(ModelError, match="other scores"):
        verify(made_before)
