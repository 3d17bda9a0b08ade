"""Passes in bfloat16 keep what the published mechanism hides under its noise, and fused ones are the same passes."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from stobatch.models import ConvEncoder, Head, Network, ReferenceNorm
from stobatch.published.losses import taylor_loss
from stobatch.published.training import frozen, fuse
from stobatch.training.trainable import working_precision

NOISE = 13.0
"""The scale of 2χ2/m in the recipe for CIFAR-10 at a claimed ε of 2; values without noise are at most 1."""
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
"""PyTorch's compiler looks at what it then warns of."""
LABELS = torch.arange(64) % 5


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def network(noise: float = NOISE) -> Network:
    torch.manual_seed(0)
    encoder = ConvEncoder((3, 8, 8), 6, 4, stride=2, padding=1)
    encoder.limit_columns(1.0)
    body = nn.Sequential(
        nn.ReLU(inplace=True), nn.Conv2d(6, 8, 3, padding=1), ReferenceNorm((8, 4, 4)), nn.ReLU(), nn.AvgPool2d(2)
    ).extend([nn.Flatten(), nn.Linear(32, 12), ReferenceNorm((12,))])
    made = Network(encoder, Head(ReferenceNorm((6, 4, 4)), body, nn.Linear(12, 5, bias=False)))
    made.set_noise(
        noise / 2 * torch.randn(3, 8, 8, generator=seeded(1)), noise * torch.randn(6, 4, 4, generator=seeded(2))
    )
    made.calibrate()
    return made


def images() -> Tensor:
    return torch.rand(64, 3, 8, 8, generator=seeded(3)) * 2 - 1


Pass = Callable[[Tensor], Tensor]


def gradients(made: Network, precision: str, head: Pass | None = None) -> list[Tensor]:
    """Of the loss by the head's parameters, as a step takes it, in float64 for comparing."""
    made = made.double() if precision == "float64" else made
    with working_precision(precision, torch.device("cpu")):
        with torch.no_grad():
            hidden = made.noisy_hidden(images().to(made.dtype) + made.input_noise)
        loss = taylor_loss((head or made.head)(hidden), LABELS, "corrected").sum()
    return [g.double() for g in torch.autograd.grad(loss, list(made.head.parameters()))]


def slopes(made: Network, precision: str, head: Pass | None = None) -> Tensor:
    """Of the loss by the inputs, as an attack takes them."""
    made = made.double() if precision == "float64" else made
    leaf = (images().to(made.dtype) + made.input_noise).requires_grad_()
    with frozen(made), working_precision(precision, torch.device("cpu")):
        loss = taylor_loss((head or made.head)(made.noisy_hidden(leaf)), LABELS, "corrected").sum()
    (found,) = torch.autograd.grad(loss, leaf)
    return found.double()


def distance(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest relative difference of two lists of tensors."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True))


def rounded_early(made: Network, noisy_inputs: Tensor) -> Tensor:
    """The broken twin: in mixed precision the encoder answers in the lower one, and noise is added in it."""
    return made.encoder(noisy_inputs).add_(made.hidden_noise)


def test_noise_rounds_nothing_away() -> None:
    exact = gradients(network(), "float64")
    assert distance(gradients(network(), "bfloat16"), exact) < 0.1
    assert distance([slopes(network(), "bfloat16")], [slopes(network(), "float64")]) < 0.2


def test_noise_added_in_bfloat16_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = gradients(network(), "float64")
    monkeypatch.setattr(Network, "noisy_hidden", rounded_early)
    assert distance(gradients(network(), "bfloat16"), exact) > 0.2


def test_without_noise_the_same_rounding_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = gradients(network(0.0), "float64")
    monkeypatch.setattr(Network, "noisy_hidden", rounded_early)
    assert distance(gradients(network(0.0), "bfloat16"), exact) < 0.15


def test_layers_after_a_normalisation_work_in_bfloat16() -> None:
    made, seen = network(), []
    for layer in made.head.body:
        layer.register_forward_hook(lambda layer, inputs, output: seen.append((inputs[0].dtype, output.dtype)))
    with working_precision("bfloat16", torch.device("cpu")), torch.no_grad():
        hidden = made.noisy_hidden(images() + made.input_noise)
        made.head(hidden)
    assert hidden.dtype == torch.float32
    assert set(seen) == {(torch.bfloat16, torch.bfloat16)}


@pytest.mark.parametrize("precision", ["bfloat16", "float64"])
def test_a_fused_pass_is_the_same_function(precision: str) -> None:
    """Traced and differentiated as on a GPU, with the layers' own kernels: the fused ones need a GPU."""
    torch._dynamo.reset()
    made = network().double() if precision == "float64" else network()
    head = fuse(made.head, backend="aot_eager")
    for _ in range(3):
        assert distance(gradients(made, precision, head), gradients(made, precision)) < 1e-6
        assert distance([slopes(made, precision, head)], [slopes(made, precision)]) < 1e-6
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.mul_(1.1)
        made.calibrate()


def test_new_statistics_and_parameters_are_not_compiled_anew() -> None:
    torch._dynamo.reset()
    made, compiled = network(), 0

    def count(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        nonlocal compiled
        compiled += 1
        return graph.forward

    head = fuse(made.head, backend=count)
    for _ in range(4):
        gradients(made, "bfloat16", head)
        slopes(made, "bfloat16", head)
        made.encoder.weight.data.mul_(0.9)
        made.calibrate()
    assert compiled == 2, "one for parameters' gradients and one for inputs'"


def test_what_cannot_be_compiled_passes_as_it_is() -> None:
    torch._dynamo.reset()
    made = network()

    def fail(*_: object) -> Callable[..., object]:
        raise RuntimeError("no compiler here")

    head = fuse(made.head, backend=fail)
    with pytest.warns(UserWarning, match="not fused.*no compiler here"):
        first = gradients(made, "bfloat16", head)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = gradients(made, "bfloat16", head)
    assert distance(first, gradients(made, "bfloat16")) == distance(again, first) == 0


def test_frozen_parameters_want_no_gradient_and_thaw_also_after_an_error() -> None:
    made = network()
    made.head.output.weight.requires_grad_(False)
    before = [parameter.requires_grad for parameter in made.parameters()]

    def fail_while_frozen() -> None:
        with frozen(made):
            assert not any(parameter.requires_grad for parameter in made.parameters())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_while_frozen()
    assert [parameter.requires_grad for parameter in made.parameters()] == before
    assert before.count(False) == 1
