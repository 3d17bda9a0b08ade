"""The whole state of a training: weights, optimiser, history, position. The process that leads writes it.

A checkpoint is a folder with the tensors and, last of all, a list of their files with checksums. Without the list, or
with a file that does not match it, it is no checkpoint, and the one before it counts; two are kept. (The list may name
several files: older versions wrote one per process.) Every process holds the same state, so any number of them can
continue. Random state needs no room here: every draw is derived from the seeds and the step (`stobatch.seeds`).
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stobatch.errors import RunError
from stobatch.files import PRIVATE, read_json, read_tensors, sha256_of, write_json, write_tensors
from stobatch.models import Classifier
from stobatch.training.engines import Engine

FOLDER = Path(PRIVATE) / "checkpoints"
TENSORS = "part-1-of-1.safetensors"
LIST = "complete.json"
KEPT = 2
DRIFTED = {"parameters": "Use nodes of one kind, and look for failing memory; resume from the last checkpoint."}


@dataclass
class TrainingState:
    """What a training is made of at the end of a step."""

    network: Classifier
    optimisers: list[torch.optim.Optimizer]
    carried: dict[str, Tensor] = field(default_factory=dict)
    step: int = 0
    history: list[tuple[float, float, float]] = field(default_factory=list)
    """Rows of (step, accuracy on held-out test images, what the method monitors), kept by the process that leads.
    Nothing here is computed from training data other than through the parameters: a training loss would be a release
    of its own."""

    def tensors(self) -> dict[str, Tensor]:
        named = {f"network.{name}": value for name, value in self.network.state_dict().items()}
        for part, optimiser in enumerate(self.optimisers):
            named |= optimiser_tensors(optimiser, f"optimiser.{part}.")
        named |= {f"carried.{name}": value for name, value in self.carried.items()}
        named["history"] = torch.tensor(self.history, dtype=torch.float64).reshape(-1, 3)
        return named

    @property
    def digest(self) -> str:
        """Return a digest of all that the next step reads, to the last bit."""
        return tensors_digest({name: value for name, value in sorted(self.tensors().items()) if name != "history"})

    @property
    def parameters_digest(self) -> str:
        """Return a digest by which processes see whether they hold the same parameters, to the last bit."""
        return tensors_digest(dict(self.network.named_parameters()))

    def save(self, run: Path, config_hash: str, engine: Engine, drifted: Callable[[], None] = lambda: None) -> None:
        """Write a checkpoint, complete once all processes have shown that they hold the same parameters.

        `drifted` is called before an error says that they do not.
        """
        folder, identity = run / FOLDER / f"step-{self.step:08d}", {"step": str(self.step), "config_hash": config_hash}
        if engine.leads:
            write_tensors(folder / TENSORS, self.tensors(), identity, private=True)
        # A leader that is lost while it writes is noticed here, apart from what follows: its steps are to be trusted.
        engine.exchange(f"checkpoint {self.step}", "")
        # The same all-reduced gradients moved the same parameters: where they differ, hardware or memory is at fault.
        try:
            engine.require_equal(f"after step {self.step}", {"parameters": self.parameters_digest}, DRIFTED)
        except RunError:
            drifted()
            raise
        if engine.leads:
            parts = {TENSORS: sha256_of(folder / TENSORS)}
            write_json(folder / LIST, "checkpoint", {**identity, "parts": parts}, private=True)
            # Those of now are complete and durable; older ones than the last two would never be read again.
            for old in sorted((run / FOLDER).glob("step-*"), reverse=True)[KEPT:]:
                _remove(old)

    def restore(self, run: Path, config_hash: str, steps: int) -> bool:
        """Continue from the run's last whole checkpoint, if it has one. Returns whether there was one."""
        folders = sorted((run / FOLDER).glob("step-*"), reverse=True)
        checkpoint = next(_complete_checkpoints(folders), None)
        if checkpoint is None:
            if any((folder / LIST).exists() for folder in folders):
                raise RunError(
                    f"every checkpoint in {run / FOLDER} is damaged.",
                    why="Parts are missing, or do not match their checksums.",
                    remedy="Restore them, or train again into a new --out.",
                )
            return False
        document, tensors = checkpoint
        if document["config_hash"] != config_hash:
            raise RunError(
                f"the checkpoint in {run} belongs to configuration {document['config_hash']}, not {config_hash}.",
                remedy="Resume with the settings it was started with, or choose another --out.",
            )
        self._restore_tensors(run, tensors)
        self.step = int(document["step"])
        latest = max((row[0] for row in self.history), default=0)
        if not latest <= self.step <= steps:
            raise RunError(
                f"the checkpoint in {run} cannot be right: it is of step {self.step} of {steps}, and its history is "
                f"of step {latest:g}.",
                why="It was edited or damaged.",
                remedy="Restore private/checkpoints as it was, or train again into a new --out.",
            )
        return True

    def _restore_tensors(self, run: Path, tensors: dict[str, Tensor]) -> None:
        weights = named_after("network.", tensors)
        kept = {value.dtype for value in weights.values() if value.is_floating_point()}
        if kept != {self.network.dtype}:
            raise RunError(
                f"the checkpoint in {run} is in another precision than {self.network.dtype}.",
                remedy="Resume with the machine.precision it was started with.",
            )
        try:
            self.network.load_state_dict(weights)
        except RuntimeError as error:
            reason = str(error).splitlines()[-1].strip()
            raise RunError(
                f"the checkpoint in {run} does not fit the network: {reason}", remedy="Hand over the same network."
            ) from None
        for part, optimiser in enumerate(self.optimisers):
            load_optimiser(optimiser, named_after(f"optimiser.{part}.", tensors))
        for name, value in self.carried.items():
            value.copy_(tensors[f"carried.{name}"])
        self.history = [(row[0], row[1], row[2]) for row in tensors["history"].tolist()]


def optimiser_tensors(optimiser: torch.optim.Optimizer, prefix: str) -> dict[str, Tensor]:
    """Return an optimiser's state as named tensors; `load_optimiser` takes it back."""
    state = optimiser.state_dict()["state"]
    return {f"{prefix}{index}.{key}": torch.as_tensor(v) for index, kept in state.items() for key, v in kept.items()}


def load_optimiser(optimiser: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        index, key = name.split(".")
        state.setdefault(int(index), {})[key] = value
    optimiser.load_state_dict({**optimiser.state_dict(), "state": state})


def named_after(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names begin so, by the rest of their names."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _remove(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunError(
            f"cannot remove {error.filename or folder}: {error.strerror}.",
            why="Checkpoints that are not needed any more would fill the disk.",
            remedy="Look at its permissions, then run the same command with --resume.",
        ) from None


def _complete_checkpoints(folders: list[Path]) -> Iterator[tuple[dict[str, Any], dict[str, Tensor]]]:
    """Yield checkpoints all of whose parts are there and as they were written, newest first."""
    for folder in folders:
        try:
            document = read_json(folder / LIST, "checkpoint")
            if folder.name != f"step-{int(document['step']):08d}":
                continue
            identity = {"step": document["step"], "config_hash": document["config_hash"]}
            tensors: dict[str, Tensor] = {}
            for name, digest in document["parts"].items():
                part, recorded = read_tensors(folder / name)
                if recorded != identity or sha256_of(folder / name) != digest:
                    break
                tensors |= part
            else:
                if tensors:
                    yield document, tensors
        except (RunError, OSError, KeyError, AttributeError, TypeError, ValueError):
            # Not what `save` writes: damaged, or edited.
            continue


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a short digest of names and bits."""
    digest = hashlib.sha256()
    for name, value in tensors.items():
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]
