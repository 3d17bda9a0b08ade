"""The training loop: the same for one trainer (Algorithm 1) and for many (Algorithm 4), and for every method.

`train` makes a run: with files, checkpoints, and as many processes as there are. `train_one` makes the same steps and
nothing else; audits train thousands of models so, of one configuration, each with its own data and its own secrets.
`fingerprint` says what the bits of a step depend on, besides the state that it starts from.
"""

from __future__ import annotations

import platform
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from stobatch import seeds as streams
from stobatch.config import MachineConfig, RunConfig
from stobatch.data import Examples
from stobatch.interrupts import GRACE_S, Interrupted, finish_first
from stobatch.later import Later
from stobatch.models import Classifier, budget_mb
from stobatch.progress import Tick, progress
from stobatch.runs import Run, mark
from stobatch.settings import content_hash
from stobatch.training.checkpoint import TrainingState
from stobatch.training.descent import Descent, rate_share
from stobatch.training.engines import Engine, Gradients, InProcessEngine
from stobatch.training.engines.distributed import code_digest
from stobatch.training.ledger import Stretch
from stobatch.training.observer import Look, Observer
from stobatch.training.trainable import Monitored, Trainable, working_precision


def train(
    trainable: Trainable,
    config: RunConfig,
    engine: Engine,
    run: Path,
    held_out: Examples,
    *,
    resume: bool,
    quiet: bool,
    observers: Sequence[Observer] = (),
) -> TrainingState:
    """Train to the last step, checkpointing on the way. Every process of the engine runs this.

    **Guarantee.** On a CPU with the same number of threads in each process, a run that was killed at any moment and
    resumed ends with the same bits as an undisturbed one, for any number of processes before and after: a step
    depends on the parameters, the optimiser and the seeds alone. Where bits may differ, a step that is made again is
    another attempt, with draws of its own. Steps are accounted for before they are made.
    """
    network = trainable.network
    # Another run of the same settings has other secrets: its checkpoints are not this run's.
    identity = f"{config.training_hash} {mark(Run(run))}".strip()
    state = TrainingState(network, trainable.optimisers(config), trainable.extra_state())
    if resume and state.restore(run, identity, config.training.steps):
        trainable.require_counted(run, state.step)
        trainable.after_update()
    arithmetic = fingerprint(config.machine, network.device, engine)
    later = Later()
    # Nobody else hears of a step of one process, so what a GPU says of it may be read after it, before it is saved.
    trainable.later = later if engine.processes == 1 else None
    descent = Descent(config.training, dict(network.named_parameters()), state.optimisers, later)
    monitored = Monitored.of(held_out, config, network)
    note, every, stretch_end = "", config.machine.checkpoint_every, state.step
    with (
        # Of several processes none may leave a step alone.
        finish_first(GRACE_S if engine.processes == 1 else None) as stop,
        progress("train", config.training.steps, start=state.step, quiet=quiet or not engine.leads) as advance,
    ):
        while state.step < config.training.steps:
            if state.step == stretch_end:
                first, stretch_end = state.step, min(config.training.steps, (state.step // every + 1) * every)
                # The leader enters the steps and says which attempt they are; no process begins before it is on disk.
                attempt = 0
                if engine.leads:
                    stretch = Stretch(first, stretch_end, state.digest, arithmetic.digest, arithmetic.repeatable)
                    attempt = trainable.begin(run, stretch)
                    for observer in observers:
                        observer.begin(first, stretch_end)
                trainable.attempt = int(engine.exchange(f"attempt of step {first}", str(attempt))[0])
                engine.note(f"steps {first} to {stretch_end} begin")
            before = len(later)
            with working_precision(config.machine.precision, network.device):
                averaged = trainable.release(state.step, engine, lambda: stop.asked is not None)
            descent.step(state.step, averaged.gradients)
            trainable.after_update()
            state.step += 1
            last = state.step == config.training.steps
            saves = state.step % every == 0 or last or averaged.stopping
            watches = engine.leads and (state.step % config.training.monitor_every == 0 or last)
            # What was asked in the step before this one.
            later.look(leave=0 if saves or watches else len(later) - before)
            if watches:
                with trainable.keeping_state():
                    correct = monitored.accuracy(network)
                state.history.append((float(state.step), correct, trainable.monitor(state.step)))
                rate = config.training.learning_rate * rate_share(config.training, state.step - 1)
                seen = Look(
                    state.step, config.training.steps, rate, correct, {trainable.monitored: state.history[-1][2]}
                )
                for observer in observers:
                    observer.look(seen)
                note = f"test accuracy {correct:.3f}"
            if saves:
                later.look()
                state.save(run, identity, engine, partial(trainable.distrust, run))
                if engine.leads:
                    trainable.saved(run, state.step, state.digest)
            advance(1, note=note)
            if averaged.stopping:
                raise Interrupted
    return state


Watcher = Callable[[int, Trainable, Gradients], None]
"""Sees what a training releases at each step, before the parameters move."""


def train_one(trainable: Trainable, config: RunConfig, watcher: Watcher | None = None) -> Classifier:
    """Make the steps of `train` without its files and its monitoring."""
    engine, parameters = InProcessEngine(), dict(trainable.network.named_parameters())
    descent = Descent(config.training, parameters, trainable.optimisers(config))
    for step in range(config.training.steps):
        released = trainable.release(step, engine).gradients
        if watcher is not None:
            watcher(step, trainable, released)
        descent.step(step, released)
        trainable.after_update()
    trainable.use_average()
    return trainable.network


class ManyModels(ABC):
    """Models of one configuration that are to be trained. A method may train all of them in the same passes."""

    @abstractmethod
    def train(self, tick: Tick) -> None:
        """Train all of them to the last step."""

    @abstractmethod
    def logits(self, inputs: Tensor) -> Tensor:
        """Return the logits of each trained model: models x inputs x classes."""


class OneByOne(ManyModels):
    """Any method's own trainables, one after the other: the measure of everything faster."""

    def __init__(self, config: RunConfig, trainables: Iterator[Trainable], count: int) -> None:
        self.config, self.trainables, self.count = config, trainables, count
        self.networks: list[Classifier] = []

    def train(self, tick: Tick) -> None:
        for trainable in self.trainables:
            self.networks.append(train_one(trainable, self.config))
            tick(1 / self.count)

    @torch.no_grad()
    def logits(self, inputs: Tensor) -> Tensor:
        return torch.stack([network(inputs.to(network.device)).cpu() for network in self.networks])


@dataclass(frozen=True)
class Fingerprint:
    """A fingerprint of the arithmetic of all processes together."""

    digest: str
    repeatable: bool
    """Whether the same fingerprint means the same bits: on CPUs of one kind, with sums that do not depend on order."""


@cache
def processor() -> str:
    """Return the CPU's model, where the system says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def fingerprint(machine: MachineConfig, device: torch.device, engine: Engine) -> Fingerprint:
    """Compare this process with the others, and say what their steps depend on besides the state they start from."""
    own = content_hash(
        {
            "code": code_digest(),
            "stream": streams.VERSION,
            "torch": torch.__config__.show(),
            "version": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            "system": [platform.system(), platform.machine(), platform.libc_ver()],
            "processor": processor(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "libraries": [torch.backends.mkldnn.enabled, torch.are_deterministic_algorithms_enabled()],
            "matrix products": torch.get_float32_matmul_precision(),
            "device": device.type,
            "threads": torch.get_num_threads(),
            "settings": [machine.pieces, budget_mb(machine), machine.precision],
        }
    )
    kinds = sorted(set(engine.exchange("arithmetic", own)))
    exact = machine.exact_sums or engine.processes == 1
    return Fingerprint(content_hash(kinds), device.type == "cpu" and len(kinds) == 1 and exact)
