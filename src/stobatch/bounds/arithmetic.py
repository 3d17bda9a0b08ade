"""How the products of a float32 pass are computed: what bounds allow for, and how to find out that it is not that.

The rounding allowance of `bounds.linear` covers sums of float32 products, accumulated in float32 or wider
in any order, fused or not. It covers nothing else: operands rounded to TF32 or bfloat16 first, and algorithms that
combine inputs before they multiply (Winograd, FFT), whose error is not a share of the products that are summed.

PyTorch has a switch for each, by device and library, and some by environment. They are read here, in one place.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
from torch import nn

from stobatch.errors import ModelError
from stobatch.models.scattering import Scattering

_SWITCHES = {"cpu": ("mkldnn.matmul", "mkldnn.conv"), "cuda": ("cuda.matmul", "cudnn.conv")}
"""Where `torch.backends` says, from PyTorch 2.9 on, in which precision float32 products are made."""
_ALL_SWITCHES = ("", "mkldnn", "cudnn", "mkldnn.rnn", "cudnn.rnn", *_SWITCHES["cpu"], *_SWITCHES["cuda"])
"""Those that the others inherit from, first; PyTorch refuses to read older switches where these differ."""
_ENVIRONMENT = {
    "cpu": {"ONEDNN_DEFAULT_FPMATH_MODE": "STRICT", "DNNL_DEFAULT_FPMATH_MODE": "STRICT"},
    "cuda": {"NVIDIA_TF32_OVERRIDE": "0", "CUBLAS_EMULATE_SINGLE_PRECISION": "0"},
}
"""Variables that change products behind PyTorch's back, and the value that does not."""


def use_plain_float32() -> None:
    """Have products made in float32 in this process: no TF32, no bfloat16 and no NNPACK.

    Products of bfloat16 numbers are summed in float32.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    for path in _ALL_SWITCHES:
        if _precision(path) not in ("none", "ieee"):
            _switch(path).fp32_precision = "ieee"  # type: ignore[attr-defined]
    switch_nnpack_off()


def switch_nnpack_off() -> None:
    """NNPACK's convolutions are Winograd and FFT; PyTorch takes them on CPUs where oneDNN is missing or off."""
    torch.backends.nnpack.set_flags(False)  # type: ignore[no-untyped-call]


def require_plain_float32(layers: Iterable[nn.Module], device: torch.device) -> None:
    """Raise unless passes through these layers are made of sums of float32 products, as far as can be found out.

    NNPACK is switched off rather than refused: nobody asks for it.
    """
    switch_nnpack_off()
    if device.type not in _SWITCHES:
        raise ModelError(
            f"how a device of type '{device.type}' rounds is not known.",
            why="The certificate allows for the rounding of float32 sums on CPUs and CUDA devices.",
            remedy="Use --device cpu.",
        )
    reduced = [f"torch.backends.{path}" for path in _SWITCHES[device.type] if _precision(path) not in ("none", "ieee")]
    reduced += _old_switches(device)
    reduced += [
        name
        for name, plain in _ENVIRONMENT[device.type].items()
        if os.environ.get(name, plain).upper() not in ("", plain)
    ]
    if torch.is_autocast_enabled(device.type):
        reduced.append("torch.autocast")
    if reduced:
        raise ModelError(
            f"float32 products are rounded to TF32, bfloat16 or less in this process, says {reduced[0]}.",
            why="That is a thousand times the rounding that the certificate allows for.",
            remedy="Call stobatch.bounds.arithmetic.use_plain_float32(), leave autocast, and unset the variable, if it "
            "is one.",
        )
    cudnn = torch.backends.cudnn
    if device.type == "cuda" and cudnn.enabled and cudnn.is_available():  # type: ignore[no-untyped-call]
        for layer in layers:
            if isinstance(layer, Scattering) or (isinstance(layer, nn.Conv2d) and layer.stride == (1, 1)):
                raise ModelError(
                    "a convolution of stride 1 may be computed by Winograd or FFT on this device.",
                    why="cuDNN chooses the algorithm and does not say which; their rounding is not bounded.",
                    remedy="Use --device cpu, set torch.backends.cudnn.enabled = False wherever the network runs, or "
                    "give the convolution a larger stride.",
                )


def _old_switches(device: torch.device) -> list[str]:
    """Return the switches from before PyTorch 2.9. Where newer ones contradict them they cannot be read, and those
    count.
    """
    found = []
    try:
        if torch.get_float32_matmul_precision() != "highest":
            found.append("torch.get_float32_matmul_precision()")
        if device.type == "cuda" and torch.backends.cudnn.allow_tf32:
            found.append("torch.backends.cudnn.allow_tf32")
    except RuntimeError:
        pass
    return found


def _switch(path: str) -> object | None:
    place: object | None = torch.backends
    for part in filter(None, path.split(".")):
        place = getattr(place, part, None)
    return place


def _precision(path: str) -> str:
    return str(getattr(_switch(path), "fp32_precision", "none"))
