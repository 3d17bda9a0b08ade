"""Who sees which record: fixed disjoint batches, trainers, and random subsamples, all as tensors of indices."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from stobatch.errors import DataError
from stobatch.seeds import Seeds, Stream


def fixed_disjoint_batches(num_examples: int, batch_size: int, generator: torch.Generator) -> Tensor:
    """Cut a random order of the records into batches [num_batches, batch_size]; the remainder is left unused.

    **Guarantee.** No index occurs twice, so every record lies in at most one batch. That is a statement about
    records: where `DatasetInfo.copies` is above 1, one original may lie in as many batches.

    **Paper.** Algorithms 1 and 4, line 2; drawn once and kept for all steps. Deviation: there the batches cover all
    of D, which needs N to be a multiple of m (the paper's 60,000 is none of 2,499); here the remainder is never read.

    >>> fixed_disjoint_batches(7, 3, torch.Generator().manual_seed(0)).shape
    torch.Size([2, 3])
    """
    if not 1 <= batch_size <= num_examples:
        raise DataError(
            f"batch_size={batch_size} does not fit {num_examples} training examples.",
            why="Batches are disjoint and equally large.",
            remedy=f"Use a batch size from 1 to {num_examples}." if num_examples > 0 else "Give training examples.",
        )
    num_batches = num_examples // batch_size
    order = torch.randperm(num_examples, generator=generator)
    return order[: num_batches * batch_size].view(num_batches, batch_size)


def trainer_batches(num_batches: int, generator: torch.Generator) -> Tensor:
    """Give each of num_batches // 2 trainers two batches of its own: [num_trainers, 2].

    The first is trained on as it is, adversarial examples are made of the second. **Paper.** Algorithm 4, line 4.
    """
    if num_batches < 2:
        raise DataError(
            f"{num_batches} batches are too few.",
            why="Each local trainer needs two disjoint ones: benign and adversarial.",
            remedy="Use a batch size of at most half the training examples.",
        )
    return torch.randperm(num_batches, generator=generator)[: num_batches // 2 * 2].view(-1, 2)


def pick_trainers(num_trainers: int, count: int, generator: torch.Generator) -> Tensor:
    """Draw `count` different trainers for one step. **Paper.** Algorithm 4, line 6."""
    if not 1 <= count <= num_trainers:
        raise DataError(
            f"cannot pick {count} of {num_trainers} local trainers.",
            why="A trainer takes part at most once per step.",
            remedy=f"Pick from 1 to {num_trainers}, or use a smaller batch size.",
        )
    return torch.randperm(num_trainers, generator=generator)[:count]


def holdings(shards: Sequence[range], num_trainers: int) -> list[tuple[range, ...]]:
    """Return what each trainer owns: whole shards, or equal parts of the only one.

    **Guarantee.** Every position belongs to exactly one trainer.

    >>> holdings([range(0, 10)], 3)
    [(range(0, 3),), (range(3, 6),), (range(6, 10),)]
    """
    if len(shards) == 1:
        ends = [len(shards[0]) * i // num_trainers for i in range(num_trainers + 1)]
        return [(shards[0][start:end],) for start, end in pairwise(ends)]
    if len(shards) < num_trainers:
        raise DataError(
            f"{len(shards)} shards are too few for {num_trainers} trainers.",
            why="Each trainer owns at least one.",
            remedy=f"Write at least {num_trainers} shards, or lower trainers.num to {len(shards)}.",
        )
    ends = [len(shards) * i // num_trainers for i in range(num_trainers + 1)]
    return [tuple(shards[start:end]) for start, end in pairwise(ends)]


def take_turns(step: int, num_trainers: int, count: int, seeds: Seeds) -> list[int]:
    """Draw `count` trainers for one step: all have a turn, in a random order, before any has a second one.

    **Guarantee.** In the first T steps no trainer has more than ⌈T / ⌊num_trainers / count⌋⌉ turns.
    """
    if count == num_trainers:
        return list(range(count))
    turns = num_trainers // count
    order = seeds.philox("turns", step // turns).permutation(num_trainers)
    first = step % turns * count
    return [int(trainer) for trainer in order[first : first + count]]


def poisson_sample(num_examples: int, rate: float, stream: Stream) -> Tensor:
    """Draw indices in which each record stands with probability `rate`, independently; there may be none.

    **Guarantee.** The probability is never above `rate`, and below it by less than 2⁻⁶⁴.
    """
    if not 0 <= rate <= 1:
        raise DataError(f"a sampling rate of {rate} is not a probability.", remedy="Use a rate from 0 to 1.")
    return torch.from_numpy(stream.choose(num_examples, rate)).nonzero().flatten()
