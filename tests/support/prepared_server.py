"""What a process that forks `stobatch` does beforehand, so that its children need not do it, each for itself."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import io
from collections.abc import Sequence
from itertools import pairwise


def prepare(*modules: str) -> None:
    """Import, unpack the embedded images, ask git for the commit, make the parser; leave all that to no collector."""
    import torch

    torch.set_num_threads(1)
    # What a first training would import, a second each time: the optimiser pulls in the compiler.
    training = ("scipy.stats", "torch._dynamo", "rich.progress", "safetensors.torch")
    for module in (*training, "stobatch.federated", "stobatch.cli", *modules):
        importlib.import_module(module)

    import stobatch
    from stobatch import data, runs
    from stobatch.cli.app import parser
    from stobatch.config import DataConfig
    from stobatch.data.idx_files import IdxSet
    from stobatch_recipes import recipe

    IdxSet.unpack = functools.cache(IdxSet.unpack)
    for verb in ("train", "certify", "evaluate", "audit", "report"):
        getattr(stobatch, verb)
    for name in ("sound.mnist", "published.demo", "audit.sound"):
        recipe(name)
    data.load(DataConfig(train_limit=1, test_limit=1))
    runs.source()
    parser()
    gc.freeze()


def plan_before(arguments: Sequence[str]) -> None:
    """Plan what is trained or audited once: children inherit what the accountant remembers."""
    chosen = ("--recipe", "--config", "--set")
    if arguments[0] in ("train", "audit"):
        _plan(*[part for pair in pairwise(arguments) if pair[0] in chosen for part in pair])


@functools.cache
def _plan(*options: str) -> None:
    from stobatch.cli.app import parser

    # A mistake is told by the child that makes it.
    with contextlib.suppress(Exception, SystemExit), contextlib.redirect_stdout(io.StringIO()):
        parser()(["plan", "--json", *options], standalone_mode=False)
