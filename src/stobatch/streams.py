"""A cryptographic stream of random bits for what privacy rests on: noise, and who is sampled.

SHAKE-256 of a secret key and a block number. Whoever could predict such bits, or tell them from fair coins, without the
key would break SHA-3; a generator for simulations such as Philox promises nothing of the kind.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

VERSION = 1
"""Of the way from keys to bits; another one is another stream."""
BLOCK = 2**15
"""Words of one call of SHAKE-256: 256 KiB, so that what is computed from them stays in the cache."""
_WORD = 64


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
