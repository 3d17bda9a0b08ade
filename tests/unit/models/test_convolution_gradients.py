"""Gradients of convolutions in bfloat16 are those of PyTorch; on a GPU the kernel's are those of float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.grad import conv2d_weight

from stobatch.models import convolution_gradients
from stobatch.models.convolution_gradients import pays, weight_gradient, with_fast_gradients
from stobatch.training.trainable import working_precision

CPU = torch.device("cpu")
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
"""PyTorch's compiler does what it then warns of."""


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kernels of 5 x 5 take this way on a CPU, where an oracle computes the sums."""
    monkeypatch.setattr(convolution_gradients, "pays", lambda inputs, weight, *rest: weight.shape[-1] == 5)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 5, padding=2), nn.ReLU(), nn.Conv2d(8, 4, 5, padding=1), nn.Conv2d(4, 4, 3))


def found(made: nn.Module, function: Callable[[Tensor], Tensor], precision: str) -> list[Tensor]:
    """Return gradients by inputs and by the weights that want one."""
    wanted = torch.rand(6, 3, 9, 9, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with working_precision(precision, CPU):
        loss = function(wanted.double() if precision == "float64" else wanted).double().square().sum()
    trained = [parameter for parameter in made.parameters() if parameter.requires_grad]
    return [gradient.double() for gradient in torch.autograd.grad(loss, [wanted, *trained])]


def off(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float((one - other).norm() / other.norm()) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("trained", [True, False])
def test_gradients_are_those_of_float64_up_to_bfloat16(trained: bool) -> None:
    made = network().requires_grad_(trained)
    ours = found(made, with_fast_gradients(made), "bfloat16")
    assert off(ours, found(made, made, "bfloat16")) < 0.02
    assert off(ours, found(made.double(), made, "float64")) < 0.05


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("trained", [True, False])
def test_they_can_be_compiled(trained: bool) -> None:
    made = network().requires_grad_(trained)
    compiled = torch.compile(with_fast_gradients(made), backend="aot_eager", fullgraph=True)
    assert off(found(made, compiled, "bfloat16"), found(made, with_fast_gradients(made), "bfloat16")) < 1e-6


@pytest.mark.usefixtures("everywhere")
def test_a_wrong_sum_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken twin: the kernel turned around, as a convolution in place of a correlation has it."""
    true = convolution_gradients.weight_gradient
    monkeypatch.setattr(convolution_gradients, "weight_gradient", lambda *rest: true(*rest).flip(2, 3))
    made = network()
    ours = found(made, with_fast_gradients(made), "bfloat16")
    assert off(ours, found(made.double(), made, "float64")) > 0.1


def test_on_a_cpu_nothing_changes() -> None:
    made = network()
    assert all(map(torch.equal, found(made, with_fast_gradients(made), "bfloat16"), found(made, made, "bfloat16")))


def test_a_sum_is_the_gradient_in_float32() -> None:
    values, gradients = torch.randn(4, 6, 7, 7), torch.randn(4, 5, 5, 5)
    weight = torch.zeros(5, 6, 5, 5, requires_grad=True)
    (expected,) = torch.autograd.grad(F.conv2d(values, weight, padding=1), weight, gradients)
    torch.testing.assert_close(weight_gradient(values, gradients, 5, 1), expected)


on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="runs the kernel of a GPU")


@on_a_gpu
@pytest.mark.parametrize(
    ("rows", "channels", "maps", "height", "side", "padding"),
    [
        *((64, 128, 128, 14, 5, 2), (64, 256, 256, 14, 5, 2), (33, 128, 256, 9, 7, 3)),
        *((5, 256, 128, 8, 5, 0), (1, 128, 128, 6, 5, 1)),
    ],
)
def test_the_kernel_sums_as_float64_does(
    rows: int, channels: int, maps: int, height: int, side: int, padding: int
) -> None:
    out = height + 2 * padding - side + 1
    values = torch.randn(rows, channels, height, height, device="cuda", dtype=torch.bfloat16)
    gradients = torch.randn(rows, maps, out, out, device="cuda", dtype=torch.bfloat16)
    expected = conv2d_weight(values.double(), [maps, channels, side, side], gradients.double(), padding=padding)
    ours = weight_gradient(values, gradients, side, padding)
    assert float((ours.double() - expected).norm() / expected.norm()) < 1e-5


@on_a_gpu
def test_it_pays_in_bfloat16_alone() -> None:
    values, weight = torch.zeros(1, 128, 8, 8, device="cuda"), torch.zeros(128, 128, 5, 5, device="cuda")
    assert not pays(values, weight, None, (1, 1), (2, 2))
    with working_precision("bfloat16", values.device):
        assert pays(values, weight, None, (1, 1), (2, 2))
        assert not pays(values, weight[:, :64], None, (1, 1), (2, 2))
        assert not pays(values, weight, None, (2, 2), (2, 2))
