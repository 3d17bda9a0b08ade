"""A run's checkpoints, found and read without the library, and tampered with as a careful forger would."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

LIST = "complete.json"
PATTERN = f"private/checkpoints/step-*/{LIST}"
"""Within a run: there once a checkpoint is whole."""


def folders(run: Path) -> list[Path]:
    """Those of all checkpoints, whole or not, oldest first."""
    return sorted((run / "private" / "checkpoints").glob("step-*"))


def parts(folder: Path) -> list[Path]:
    """The files that a checkpoint's list names."""
    return [folder / name for name in json.loads((folder / LIST).read_text())["parts"]]


def newest(run: Path) -> Path:
    """The folder of the last checkpoint that has its list."""
    return [folder for folder in folders(run) if (folder / LIST).exists()][-1]


def last_step(run: Path) -> int:
    return int(json.loads((newest(run) / LIST).read_text())["step"])


def tensors(run: Path) -> dict[str, Tensor]:
    """All of the newest checkpoint."""
    return {name: value for part in parts(newest(run)) for name, value in load_file(part).items()}


def same_bits(one: Path, other: Path, file: str | Path = "model.safetensors") -> bool:
    """Whether a file of two runs has the same tensors, to the last bit."""
    ours, theirs = (load_file(run / file) for run in (one, other))
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def forge(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of a checkpoint in one part, and its checksum with them, so that it is believed."""
    (part,) = parts(folder)
    with safe_open(part, framework="pt") as file:
        metadata = file.metadata()
    content = load_file(part)
    change(content)
    save_file(content, part, metadata)
    document = json.loads((folder / LIST).read_text())
    document["parts"][part.name] = hashlib.sha256(part.read_bytes()).hexdigest()
    (folder / LIST).write_text(json.dumps(document))
