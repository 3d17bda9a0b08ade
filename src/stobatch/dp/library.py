"""The accountant's library, imported without `scipy.stats`, `scipy.signal` and `scipy.optimize`: a fifth of a plan.

Of the first it needs one distribution, of the second the composition of different trainings, of the third roots that
nobody here asks it for. While it is imported they are names that import themselves when they are used; the normal law's
three functions are those of `scipy.special`, with the same bits. A library that is imported already stays as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import log_ndtr, ndtr, ndtri


class CentredNormal:
    """`scipy.stats.norm(scale=scale)`: what the library asks it for, and anything else from there."""

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def cdf(self, values: ArrayLike) -> Any:
        return ndtr(np.asarray(values, np.float64) / self._scale)

    def logcdf(self, values: ArrayLike) -> Any:
        return log_ndtr(np.asarray(values, np.float64) / self._scale)

    def ppf(self, shares: ArrayLike) -> Any:
        return ndtri(np.asarray(shares, np.float64)) * self._scale

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # as copies ask, before there is a scale
            raise AttributeError(name)
        return getattr(_imported("scipy.stats").norm(scale=self._scale), name)


class _Normal:
    """`scipy.stats.norm`."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if not arguments and named.keys() == {"scale"} and named["scale"] > 0:
            return CentredNormal(named["scale"])
        return _imported("scipy.stats").norm(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(_imported("scipy.stats").norm, name)


class _Unimported(ModuleType):
    """A module that is imported when something of it is used."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_imported(self.__name__), name)


def _imported(name: str) -> ModuleType:
    if isinstance(sys.modules.get(name), _Unimported):
        del sys.modules[name]
    return import_module(name)


@contextmanager
def _unimported(*names: str) -> Iterator[None]:
    """Let these modules of SciPy stand unimported within, those that are not imported already."""
    absent = [name for name in names if name not in sys.modules]
    for name in absent:
        sys.modules[name] = module = _Unimported(name)
        if name == "scipy.stats":
            vars(module)["norm"] = _Normal()
    try:
        yield
    finally:
        for name in absent:
            if isinstance(sys.modules.get(name), _Unimported):
                del sys.modules[name]


with _unimported("scipy.optimize", "scipy.stats", "scipy.signal"):
    from dp_accounting import dp_event, rdp
    from dp_accounting.pld import common, privacy_loss_distribution

__all__ = ["common", "dp_event", "privacy_loss_distribution", "rdp"]
