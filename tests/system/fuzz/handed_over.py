"""What is handed over in Python or by another party: tensors as data, and words of a federation."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from stobatch.data import Examples, from_tensors
from stobatch.federated.server import statement_of

from .mutate import as_json, mutated, mutated_text

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.bool, torch.uint8,
           torch.int8, torch.int16, torch.int32, torch.int64)  # fmt: skip
_ODD = (float("nan"), float("inf"), -float("inf"), 1.0000001, -1.5, 255.0, 1e38, 0.0, -1.0, 1.0)


def _one_value(rng: Random, tensor: Tensor) -> Tensor:
    changed = tensor.clone()
    if changed.numel():
        odd = rng.choice(_ODD) if tensor.is_floating_point() else rng.choice((-1, 99, 2**62))
        changed[tuple(rng.randrange(size) for size in changed.shape)] = odd
    return changed


_WAYS: tuple[Callable[[Random, Tensor], Any], ...] = (
    lambda rng, tensor: tensor.to(rng.choice(_DTYPES)),
    _one_value,
    lambda rng, tensor: tensor[:0],
    lambda rng, tensor: tensor[:-1],
    lambda rng, tensor: tensor.to_sparse(),
    lambda rng, tensor: tensor.to("meta"),
    lambda rng, tensor: tensor.unsqueeze(rng.randrange(tensor.ndim + 1)),
    lambda rng, tensor: tensor.reshape(-1),
    lambda rng, tensor: tensor.flip(0).transpose(0, -1),
    lambda rng, tensor: tensor.tolist(),
    lambda rng, tensor: rng.choice((None, "data", 3, [], {}, object())),
    lambda rng, tensor: tensor.new_zeros(()).expand(tensor.shape),
    lambda rng, tensor: tensor.requires_grad_() if tensor.is_floating_point() else tensor.numpy(),
    lambda rng, tensor: torch.quantize_per_tensor(tensor.detach().float(), 0.1, 0, torch.quint8),
    lambda rng, tensor: torch.nested.nested_tensor([tensor[:1], tensor], layout=torch.jagged),
)
"""What a tensor may be instead of what it should be."""


def _is_plain(given: Any) -> bool:
    """Whether it can be changed once more."""
    if not isinstance(given, Tensor) or given.is_nested or given.is_quantized:
        return False
    return given.layout is torch.strided and not given.is_meta and not given.requires_grad and given.ndim > 0


def datasets(rng: Random, folder: Path) -> None:
    """`from_tensors` on tensors with odd types, shapes, layouts and values."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    shapes = [rng.randrange(1, 5), rng.randrange(1, 5)]
    given: list[Any] = []
    for count in shapes:
        given += [
            torch.rand(count, 1, 2, 2, generator=generator) * 2 - 1,
            torch.randint(0, 3, (count,), generator=generator),
        ]
    for _ in range(rng.randrange(3)):
        at = rng.randrange(4)
        if _is_plain(given[at]) and not given[at].is_complex():
            given[at] = rng.choice(_WAYS)(rng, given[at])
    classes = rng.choice((None, 3, 3, 3, 2, 1, 0, -1, 10**9, 2.5, "3", True))
    dataset = from_tensors(*given, num_classes=classes)
    for part in (dataset.train, dataset.test):
        assert isinstance(part, Examples)
        assert part.inputs.dtype == torch.float32
        assert part.labels.dtype == torch.int64
        assert bool(((part.inputs >= -1) & (part.inputs <= 1)).all())
        assert bool(((part.labels >= 0) & (part.labels < part.num_classes)).all())
        assert len(part.fingerprint()) == 64
        assert not part.inputs.requires_grad
    if classes is not None:
        assert dataset.info.num_classes == classes
        assert isinstance(dataset.info.num_classes, int)


@cache
def _statement() -> dict[str, Any]:
    sizes = {"num_examples": 700, "expected_batch_size": 70, "steps": 10}
    return {"name": "north", "terms": "abc", "sizes": sizes, "noise_multiplier": 1.5, "rounds": 3, "epsilon": 0.5,
            "seed_mark": "ab" * 16}  # fmt: skip


def messages(rng: Random, folder: Path) -> None:
    """What a party says of itself, as text from the network."""
    words: Any = _statement()
    if rng.random() < 0.7:
        words = mutated(rng, words, rng.randrange(1, 3))
    text = as_json(words)
    if rng.random() < 0.3:
        text = mutated_text(rng, text)
    said = statement_of(text)
    assert said.to_dict() == json.loads(text)
    assert type(said.rounds) is int
    assert said.rounds >= 0
    assert said.epsilon >= 0
