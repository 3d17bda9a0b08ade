"""Randomness that is named, not consumed: every draw has a path such as ("step", 17, "attack").

Because a stream is derived from its path and not from how many numbers were drawn before, a resumed run, and a run
on several processes, sees exactly the numbers an undisturbed run sees. `Seeds` names streams; a `Stream` is the random
bits that privacy rests on, from a cryptographic hash.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import torch
from numpy.typing import NDArray

VERSION = 1
"""Of the way from keys to bits; another one is another stream."""
BLOCK = 2**15
"""Words of one call of SHAKE-256: 256 KiB, so that what is computed from them stays in the cache."""
_WORD = 64


@dataclass(frozen=True)
class Seeds:
    """The root of all randomness of a run.

    **Guarantee.** Streams with different paths have keys that SHA-256 makes of the root and the path.
    A root that someone else knows lets them rebuild the private noise, so a root is public only when the user asked
    for a reproducible experiment (`--seed`); otherwise it comes from the operating system and stays in `private/`.

    >>> a = Seeds.reproducible(3)
    >>> torch.equal(a.normal((4,), "x"), a.normal((4,), "x")), torch.equal(a.normal((4,), "x"), a.normal((4,), "y"))
    (True, False)
    """

    root: int = field(repr=False)
    public: bool

    @classmethod
    def reproducible(cls, seed: int) -> Seeds:
        return cls(seed, public=True)

    @classmethod
    def secret(cls) -> Seeds:
        return cls(secrets.randbits(128), public=False)

    def child(self, *path: str | int) -> Seeds:
        """Return the root of a run of its own, as public as this one; audits train thousands of models from one."""
        return Seeds(int.from_bytes(self._digest("child", *path), "little"), self.public)

    def _digest(self, *path: str | int) -> bytes:
        return hashlib.sha256(repr((self.root, *path)).encode()).digest()

    def generator(self, *path: str | int) -> torch.Generator:
        """A fresh CPU generator for this path; draws are made on the CPU so that they do not depend on the device.

        PyTorch's generator keeps 32 bits of its seed. That is enough for attacks and initial weights, and not for what
        a proof rests on: among a thousand steps two would share their noise with a probability above a usual δ.
        """
        return torch.Generator().manual_seed(int.from_bytes(self._digest(*path)[:8], "little") >> 1)

    def stream(self, *path: str | int) -> Stream:
        """Return the cryptographic stream of this path, for noise and samples that privacy rests on."""
        return Stream(self._digest(*path))

    def philox(self, *path: str | int) -> np.random.Generator:
        """Return a generator with a key of 128 bits (Philox), for what is drawn often and need not be secret."""
        return np.random.Generator(np.random.Philox(key=int.from_bytes(self._digest(*path)[:16], "little")))

    def normal(self, shape: tuple[int, ...], *path: str | int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator(*path))


class Stream:
    """The random bits that belong to one key, read by position and never used up.

    >>> stream = Stream(b"k" * 32)
    >>> int(next(stream.blocks(1))[0]) == int(next(stream.blocks(9))[0])
    True
    """

    def __init__(self, key: bytes) -> None:
        self._key = key

    def _bytes(self, purpose: str, index: int, size: int) -> bytes:
        # Purpose and index have fixed lengths, so no two inputs of the hash are equal.
        label = f"stobatch {VERSION} {purpose:>8}".encode() + index.to_bytes(16, "little")
        return hashlib.shake_256(label + self._key).digest(size)

    def blocks(self, count: int) -> Iterator[NDArray[np.uint64]]:
        """Yield the first `count` words of 64 bits, at most `BLOCK` of them at once."""
        for number, start in enumerate(range(0, count, BLOCK)):
            size = min(BLOCK, count - start)
            yield np.frombuffer(self._bytes("words", number, 8 * size), dtype="<u8").astype(np.uint64, copy=False)

    def further_bits(self, position: int, words: int) -> int:
        """Return further bits of the word at a position, as the digits behind its last one."""
        return int.from_bytes(self._bytes("further", position, 8 * words), "big")

    def chosen(self, count: int, probability: float) -> NDArray[np.bool_]:
        """Choose each of `count` independently.

        **Guarantee.** The probability of each is the largest multiple of 2⁻⁶⁴ that is at most `probability`.
        """
        threshold = int(Fraction(probability) * 2**_WORD)
        if threshold >= 2**_WORD:
            return np.ones(count, dtype=np.bool_)
        parts = [words < np.uint64(threshold) for words in self.blocks(count)]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.bool_)
