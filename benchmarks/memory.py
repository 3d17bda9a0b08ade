"""What every verb takes of memory on a CPU, against `machine.memory_mb`.

Claim: at most 1.25 times the setting, above a process that does nothing: one that has imported everything, loaded the
data and passed two examples forward and back. Each verb runs in a process of its own, forked from one that has imported
everything; what counts is the most resident memory of each. The settings are small in steps and draws but not in rows,
and the budgets are small enough to bind: a verb that minds no budget takes more.

    python benchmarks/memory.py                       # about a minute
    python benchmarks/memory.py --only published      # of one method; also: one verb, as sound/certify
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import pkgutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from PIL import Image

import stobatch
from stobatch.cli.app import main as command_line
from stobatch.config import RunConfig
from stobatch.data import load
from stobatch.models import build
from stobatch.training.device import PeakMemory
from stobatch_recipes import recipe

AIM = 1.25
BUDGETS = (64, 512)
"""MiB: one that binds, since with the cache's limits alone the same verbs would take two or three times that, and the
default. What a verb takes whatever the budget (tables, the accountant, a checkpoint) is most of the smaller one."""
LIBRARIES = (
    "matplotlib.figure",
    "mpmath.ctx_iv",
    "pandas",
    "pyarrow.dataset",
    "pyarrow.parquet",
    "safetensors.torch",
    "scipy.stats",
)
"""Which verbs import when they need them, pyarrow pandas where it is installed: a hundred MiB."""
EXPORTER = ("torch._dynamo", "torch.export._trace")
"""What `export` imports to follow a network, 70 MiB: no other verb may, so it is held against `export` alone."""
RUN, PICTURES = Path("run"), Path("pictures")


@dataclass(frozen=True)
class Method:
    """A recipe with so few steps that its rows decide."""

    recipe: str
    settings: dict[str, object]
    audits: tuple[str, ...]
    """Instruments; none for a method without a certificate, which `certify` refuses."""

    def config(self) -> RunConfig:
        return recipe(self.recipe).override_all(self.settings)

    def arguments(self, budget: int) -> list[str]:
        settings = self.settings | {"machine.memory_mb": budget}
        return [part for key, value in settings.items() for part in ("--set", f"{key}={json.dumps(value)}")]


COMMON: dict[str, object] = {
    "data.train_limit": 10_000,
    "data.test_limit": 1_000,
    "certification.limit": 500,
    "evaluation.limit": 500,
    "evaluation.radii": [0.1],
    "evaluation.restarts": 1,
    "evaluation.adaptive_attacks": ["madry"],
    "evaluation.adaptive_steps": 2,
    "audit.num_inputs": 50,
    "audit.attack_steps": 2,
    "audit.restarts": 1,
    "audit.trainings": 32,
    "audit.release_trials": 100,
}
METHODS = {
    "published": Method(
        "published.mnist",
        COMMON
        | {
            "training.steps": 2,
            "method.train_attack_steps": 2,
            "certification.noise_draws": 20,
            "evaluation.attack_steps": 2,
            "evaluation.vote_attacks": ["madry"],
            "evaluation.vote_draws": 20,
            "evaluation.noise_draws": 2,
            "evaluation.vote_limit": 50,
        },
        ("release",),
    ),
    "sound": Method("sound.mnist", COMMON | {"training.steps": 2, "canaries.num": 1000}, ("one_run", "certificates")),
    "dpsgd": Method("baselines.dpsgd", COMMON | {"training.steps": 2}, ()),
}


def verbs(method: Method, budget: int) -> dict[str, list[str]]:
    run = str(RUN)
    instruments = [part for name in method.audits for part in ("--instrument", name)]
    found = {
        "plan": ["plan", "--recipe", method.recipe, *method.arguments(budget)],
        "train": ["train", "--recipe", method.recipe, "--out", run, "--seed", "1", *method.arguments(budget)],
        "certify": ["certify", run],
        "attack": ["attack", run, "--attack", "madry"],
        "evaluate": ["evaluate", run],
        "audit": ["audit", run, *instruments],
        "predict": ["predict", run, str(PICTURES)],
        "verify": ["verify", run],
        "report": ["report", run],
        "export": ["export", run, "--to", "torchscript", "--out", "exported"],
    }
    return (
        found if instruments else {verb: found[verb] for verb in found if verb not in ("certify", "audit", "predict")}
    )


def draw_pictures(method: Method) -> None:
    PICTURES.mkdir()
    for number, values in enumerate(load(method.config().data).test.inputs[:50]):
        Image.fromarray(((values[0] + 1) * 127.5).round().to(torch.uint8).numpy()).save(PICTURES / f"{number}.png")


def nothing(method: Method, libraries: tuple[str, ...] = ()) -> None:
    """Hold what every verb holds: the data, a network, and what PyTorch makes ready for its first pass."""
    for library in libraries:
        importlib.import_module(library)
    config = method.config()
    data = load(config.data)
    network = build(config.model, data.info.input_shape, data.info.num_classes, torch.Generator().manual_seed(0))
    network(data.test.inputs[:2]).sum().backward()


def run_verb(arguments: list[str]) -> None:
    sys.argv = ["stobatch", *arguments]
    command_line()


def in_child(work: Callable[[], object], answer: Connection) -> None:
    peak, started, code = PeakMemory.begin(torch.device("cpu")), time.process_time(), 0
    with open(os.devnull, "w") as silence, contextlib.redirect_stdout(silence):
        try:
            work()
        except SystemExit as ended:
            code = int(ended.code or 0)
    answer.send((code, peak.mebibytes(), time.process_time() - started))


def measure(work: Callable[[], object]) -> tuple[int, float, float]:
    """Exit code, MiB at the peak and processor seconds of a process that does this and nothing else."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=in_child, args=(work, there))
    process.start()
    there.close()
    found: tuple[int, float, float] = here.recv()
    process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="methods that begin so, or one verb of one: METHOD/VERB")
    options = parser.parse_args()
    wanted, _, only_verb = options.only.partition("/")
    torch.set_num_threads(1)  # before anything runs in parallel: a fork inherits no threads
    for module in pkgutil.walk_packages(stobatch.__path__, "stobatch."):
        with contextlib.suppress(ImportError):  # what needs an extra
            importlib.import_module(module.name)
    for library in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(library)
    ratios, found = {}, []
    for name, method in METHODS.items():
        if not name.startswith(wanted):
            continue
        for budget in BUDGETS:
            with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
                measure(lambda method=method: draw_pictures(method))
                _, bare, _ = measure(lambda method=method: nothing(method))
                _, exporter, _ = measure(lambda method=method: nothing(method, EXPORTER))
                print(f"{name}: {bare:.0f} MiB with the data, nothing done, and with the exporter {exporter:.0f}",
                      flush=True)  # fmt: skip
                for verb, arguments in verbs(method, budget).items():
                    if only_verb and verb not in ("train", only_verb):
                        continue
                    code, peak, seconds = measure(lambda arguments=arguments: run_verb(arguments))
                    taken = max(0.0, peak - (exporter if verb == "export" else bare))
                    ended = "" if code in (0, 1) else f", ended with {code}"
                    print(f"  {verb:<10} {taken:6.0f} MiB, {taken / budget:5.2f} of {budget}, {seconds:5.1f} s{ended}",
                          flush=True)  # fmt: skip
                    assert not ended, f"{name}/{verb} failed"
                    ratios[f"{verb}_memory_over_{budget}_{name}"] = round(taken / budget, 2)
                    found.append({"method": name, "verb": verb, "mebibytes": round(taken, 1), "budget": budget})
    print(json.dumps({"benchmark": "memory", "ratios": ratios, "verbs": found}))


if __name__ == "__main__":
    main()
