"""Passes that are not sums of float32 products are found out by every switch that PyTorch has, and refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from stobatch.bounds import arithmetic
from stobatch.bounds.arithmetic import _precision, require_plain_float32, use_plain_float32
from stobatch.bounds.certifier import BoxCertifier
from stobatch.errors import ModelError
from stobatch.models import Layered
from stobatch.models.layered import Squash
from stobatch.sound.verifiers import BoundsVerifier
from stobatch.types import Norm

CPU = torch.device("cpu")
HAS_SWITCHES = hasattr(getattr(torch.backends.mkldnn, "conv", None), "fp32_precision")


@pytest.fixture(autouse=True)
def _switched_back() -> Iterator[None]:
    use_plain_float32()
    yield
    use_plain_float32()


def certify(layers: nn.Sequential, inputs: Tensor) -> Tensor:
    return BoxCertifier(layers).margins(inputs, 0.01)


def small() -> tuple[nn.Sequential, Tensor]:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)).requires_grad_(False), torch.zeros(
        20, 1, 4, 4
    )


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_the_old_switch_is_read(precision: str) -> None:
    torch.set_float32_matmul_precision(precision)
    with pytest.raises(ModelError, match="TF32, bfloat16"):
        certify(*small())
    use_plain_float32()
    certify(*small())


@pytest.mark.skipif(not HAS_SWITCHES, reason="this PyTorch has no such switches")
@pytest.mark.parametrize("path", ["", "mkldnn", "mkldnn.conv", "mkldnn.matmul"])
def test_every_new_switch_of_the_cpu_is_read(path: str) -> None:
    place = torch.backends
    for part in filter(None, path.split(".")):
        place = getattr(place, part)
    place.fp32_precision = "tf32" if not path else "bf16"  # type: ignore[attr-defined]
    # What inherits from a switch has to be set to do so: others were set by name.
    for leaf in ("mkldnn.conv", "mkldnn.matmul"):
        if leaf.startswith(path) and leaf != path:
            getattr(torch.backends.mkldnn, leaf.split(".")[1]).fp32_precision = "none"
    with pytest.raises(ModelError, match=r"torch\.backends\.mkldnn"):
        certify(*small())
    use_plain_float32()
    assert {_precision(leaf) for leaf in ("mkldnn.conv", "mkldnn.matmul", "cudnn.conv", "cuda.matmul")} <= {
        "ieee",
        "none",
    }
    certify(*small())


@pytest.mark.skipif(not HAS_SWITCHES, reason="this PyTorch has no such switches")
@pytest.mark.parametrize("path", ["cudnn.conv", "cuda.matmul"])
def test_every_new_switch_of_the_gpu_is_read(path: str) -> None:
    library, operator = path.split(".")
    getattr(getattr(torch.backends, library), operator).fp32_precision = "tf32"
    with pytest.raises(ModelError, match="TF32"):
        require_plain_float32([], torch.device("cuda"))
    require_plain_float32([], CPU)


@pytest.mark.parametrize("name", ["ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"])
def test_variables_that_change_products_are_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "bf16")
    with pytest.raises(ModelError, match=name):
        certify(*small())
    monkeypatch.setenv(name, "strict")
    certify(*small())


def test_autocast_is_refused() -> None:
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ModelError, match=r"torch\.autocast"):
        certify(*small())


def test_devices_of_unknown_rounding_are_refused() -> None:
    with pytest.raises(ModelError, match="type 'mps'"):
        require_plain_float32([], torch.device("mps"))


def test_a_convolution_that_cudnn_may_turn_into_winograd_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    for stride, refused in ((1, True), (2, False)):
        layer = nn.Conv2d(1, 1, 3, stride)
        if refused:
            with pytest.raises(ModelError, match="Winograd"):
                require_plain_float32([layer], torch.device("cuda"))
        else:
            require_plain_float32([layer], torch.device("cuda"))
    with torch.backends.cudnn.flags(enabled=False, allow_tf32=False):
        require_plain_float32([nn.Conv2d(1, 1, 3)], torch.device("cuda"))


def bright_pixel() -> tuple[Layered, Tensor]:
    """One pixel becomes 10⁶, all others 0; the second convolution adds a thousandth, which decides about the class.

    The squash holds every pixel where it is throughout the ball, so that sums of products can only give a thousandth
    where the bright pixel is not in sight. Winograd and FFT carry its rounding all over their tiles.
    """
    torch.manual_seed(0)
    inputs = torch.full((1, 1, 16, 16), -0.75)
    inputs[..., 8, 8] = 0.75
    first, second, last = nn.Conv2d(1, 1, 1), nn.Conv2d(1, 1, 3), nn.Linear(196, 2)
    with torch.no_grad():
        first.weight.fill_(1e6), first.bias.zero_()  # type: ignore[union-attr]
        second.weight.abs_()
        second.bias.fill_(1e-3)  # type: ignore[union-attr]
        last.weight.zero_(), last.bias.zero_()
        with torch.backends.nnpack.flags(enabled=True), torch.backends.mkldnn.flags(enabled=False):
            hidden = (inputs.sign().clamp(min=0) * 1e6).repeat(16, 1, 1, 1)
            last.weight[0, int(second(hidden)[0].argmin())] = 1.0
    layers = [Squash(4.0), first, nn.ReLU(), second, nn.Flatten(), last]
    return Layered(layers, (1, 16, 16)).requires_grad_(False), inputs


@pytest.mark.skipif(not torch.backends.nnpack.is_available(), reason="this PyTorch has no NNPACK")
@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")
def test_nnpack_flips_a_certified_input_and_is_switched_off() -> None:
    network, inputs = bright_pixel()
    with torch.backends.mkldnn.flags(enabled=False):
        torch.backends.nnpack.set_flags(True)
        flipped = network(inputs.repeat(16, 1, 1, 1)).argmax(1)
        certified = BoundsVerifier(network, Norm.LINF, [0.1], 64).verify(inputs, torch.Generator())
        assert (certified.label.tolist(), certified.radius.tolist()) == ([0], [0.1])
        assert set(flipped.tolist()) == {1}, "NNPACK rounds like a sum: this test shows nothing"
        # From then on the same process, with the same switches, keeps to what was certified.
        assert set(network(inputs.repeat(16, 1, 1, 1)).argmax(1).tolist()) == {0}


@pytest.mark.skipif(not torch.backends.nnpack.is_available(), reason="this PyTorch has no NNPACK")
@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")
def test_scores_that_no_sum_of_products_gives_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should NNPACK be used all the same, the deployed scores are outside of what bounds of a point allow."""
    network, inputs = bright_pixel()
    monkeypatch.setattr(arithmetic, "switch_nnpack_off", lambda: None)
    with (
        torch.backends.mkldnn.flags(enabled=False),
        torch.backends.nnpack.flags(enabled=True),
        pytest.raises(ModelError, match="not those that its layers give"),
    ):
        BoxCertifier.of(network, 64).predict(inputs.repeat(16, 1, 1, 1))
