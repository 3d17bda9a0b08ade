"""For every test: one thread, no deadlines, the embedded images unpacked once, and every figure drawn once."""

from __future__ import annotations

import functools
import gc
import importlib
import os
from collections.abc import Callable, Iterator
from typing import Any

# Of the processes that tests start, too: their threads would wait for a core that another worker has.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

from stobatch.data.idx_files import IdxSet
from stobatch.reporting import accuracy, audits, comparison, figures
from stobatch.results.document import Document
from stobatch.sound import method
from stobatch.sound.step import DpSgdTrainable

collect_ignore_glob = ["*conftest.py", "support/extension/*"]
"""For doctests: two modules of one name cannot be collected, nor a package that is only installed where it is tried."""

# Cores may be shared with other work: how long an example takes says nothing about the claim.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


def pytest_collection_finish() -> None:
    """Every training collects garbage before it measures its memory, and what was imported never becomes any."""
    importlib.import_module("torch._dynamo")  # as the first optimiser does
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors gain nothing from threads, and threads that wait for a busy core cost a hundredfold."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def unpack_once() -> Iterator[None]:
    """Every run reads the same embedded files; unpacking them is a quarter of a second each time."""
    original, IdxSet.unpack = IdxSet.unpack, functools.cache(IdxSet.unpack)
    yield
    IdxSet.unpack = original


DRAWN = {
    figures: ("draw",),
    accuracy: ("learning_curve",),
    audits: ("score_histograms", "bounds_found", "membership_curve"),
    comparison: ("methods_figure", "methods_svg"),
}
"""Where figures are drawn, by the modules that call it."""


@pytest.fixture(scope="session", autouse=True)
def draw_once() -> Iterator[dict[str, Callable[..., Any]]]:
    """Pages of one run show the same curves, and drawing them takes half a second; gives what draws them anew."""
    drawn, originals = dict[str, Any](), dict[str, Callable[..., Any]]()

    def once(name: str) -> Callable[..., Any]:
        def draw(*given: Any, **named: Any) -> Any:
            # Documents print what people want to know, which is not all of them.
            whole = [one.to_dict() if isinstance(one, Document) else one for one in given]
            key = repr((name, whole, named))
            if key not in drawn:
                drawn[key] = originals[name](*given, **named)
            return drawn[key]

        return draw

    with pytest.MonkeyPatch.context() as patch:
        for module, names in DRAWN.items():
            for name in names:
                originals[name] = getattr(module, name)
                patch.setattr(module, name, once(name))
        yield originals


@pytest.fixture
def try_each_network_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An audit prepares hundreds of trainings of one network, and each tries it first: half of the time of two steps.

    What is tried depends on the layers and on the settings, not on weights, and has tests of its own.
    """
    tried: dict[Any, Any] = {}

    def once(name: str, real: Callable[..., Any], identity: Callable[..., Any]) -> Callable[..., Any]:
        def known(*given: Any) -> Any:
            key = (name, identity(*given))
            if key not in tried:
                tried[key] = real(*given)
            return tried[key]

        return known

    def same_training(own: DpSgdTrainable, precision: str, memory_mb: int) -> Any:
        return type(own), own.config, repr(own.network), own.rows, own.records_per_unit, precision, memory_mb

    def same_network(network: Any, *rows: int) -> Any:
        return repr(network), rows

    def same_passes(config: Any, network: Any, rows: int) -> Any:
        return config.machine, repr(network), rows

    monkeypatch.setattr(DpSgdTrainable, "_clipper", once("clipper", DpSgdTrainable._clipper, same_training))
    for name, identity in (("require_per_example", same_network), ("require_per_example_at_size", same_passes)):
        monkeypatch.setattr(method, name, once(name, getattr(method, name), identity))
