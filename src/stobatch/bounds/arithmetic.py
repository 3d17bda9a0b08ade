"""Float32 arithmetic: what the rounding allowance of bounds covers, and checks that PyTorch computes nothing else.

The allowance of `bounds.linear` covers sums of float32 products, accumulated in float32 or wider in any order, fused or
not. It does not cover operands that are first rounded to TF32 or bfloat16, nor algorithms that combine inputs before
they multiply (Winograd, FFT), whose error is not a share of the products that are summed.

PyTorch has switches for these, by device and library, and libraries have environment variables. All are read here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
from torch import nn

from stobatch.errors import ModelError
from stobatch.models.scattering import Scattering

_SWITCHES = {"cpu": ("mkldnn.matmul", "mkldnn.conv"), "cuda": ("cuda.matmul", "cudnn.conv")}
"""Attributes of `torch.backends` that hold, from PyTorch 2.9 on, the precision of float32 products."""
_ALL_SWITCHES = ("", "mkldnn", "cudnn", "mkldnn.rnn", "cudnn.rnn", *_SWITCHES["cpu"], *_SWITCHES["cuda"])
"""Parents first; PyTorch refuses to read older switches where these differ."""
_ENVIRONMENT = {
    "cpu": {"ONEDNN_DEFAULT_FPMATH_MODE": "STRICT", "DNNL_DEFAULT_FPMATH_MODE": "STRICT"},
    "cuda": {"NVIDIA_TF32_OVERRIDE": "0", "CUBLAS_EMULATE_SINGLE_PRECISION": "0"},
}
"""Variables that change products without PyTorch's knowledge, and their harmless value."""


def use_plain_float32() -> None:
    """Compute float32 products in float32 in this process: no TF32, no bfloat16 and no NNPACK.

    Products of bfloat16 numbers are accumulated in float32.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    for path in _ALL_SWITCHES:
        if _precision(path) not in ("none", "ieee"):
            _switch(path).fp32_precision = "ieee"  # type: ignore[attr-defined]
    switch_nnpack_off()


def switch_nnpack_off() -> None:
    """Switch NNPACK off: it uses Winograd and FFT, and PyTorch uses it on CPUs where oneDNN is missing or off."""
    torch.backends.nnpack.set_flags(False)  # type: ignore[no-untyped-call]


def require_plain_float32(layers: Iterable[nn.Module], device: torch.device) -> None:
    """Raise unless passes through these layers are sums of float32 products, as far as can be detected.

    NNPACK is switched off rather than refused, since it is never a deliberate choice.
    """
    switch_nnpack_off()
    if device.type not in _SWITCHES:
        raise ModelError(
            f"the rounding of a device of type '{device.type}' is not known.",
            why="The certificate covers the rounding of float32 sums on CPUs and CUDA devices.",
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
            f"float32 products are rounded to TF32, bfloat16 or less in this process: {reduced[0]} is set.",
            why="That is a thousand times the rounding that the certificate covers.",
            remedy="Call stobatch.bounds.arithmetic.use_plain_float32(), leave autocast, and unset environment "
            "variables named here.",
        )
    cudnn = torch.backends.cudnn
    if device.type == "cuda" and cudnn.enabled and cudnn.is_available():  # type: ignore[no-untyped-call]
        for layer in layers:
            if isinstance(layer, Scattering) or (isinstance(layer, nn.Conv2d) and layer.stride == (1, 1)):
                raise ModelError(
                    "a convolution of stride 1 may be computed by Winograd or FFT on this device.",
                    why="cuDNN does not say which algorithm it chooses, and the rounding of these is not covered.",
                    remedy="Use --device cpu, set torch.backends.cudnn.enabled = False wherever the network runs, or "
                    "give the convolution a larger stride.",
                )


def _old_switches(device: torch.device) -> list[str]:
    """Return the switches from before PyTorch 2.9 that reduce precision.

    PyTorch refuses to read them where newer ones contradict them; then the newer ones count.
    """
    reduced = []
    try:
        if torch.get_float32_matmul_precision() != "highest":
            reduced.append("torch.get_float32_matmul_precision()")
        if device.type == "cuda" and torch.backends.cudnn.allow_tf32:
            reduced.append("torch.backends.cudnn.allow_tf32")
    except RuntimeError:
        pass
    return reduced


def _switch(path: str) -> object | None:
    backend: object | None = torch.backends
    for part in filter(None, path.split(".")):
        backend = getattr(backend, part, None)
    return backend


def _precision(path: str) -> str:
    return str(getattr(_switch(path), "fp32_precision", "none"))
