"""Randomness that is named, not consumed: every draw has a path such as ("step", 17, "attack").

Because a stream is derived from its path and not from how many numbers were drawn before, a resumed run, and a run
on several processes, sees exactly the numbers an undisturbed run sees.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field

import numpy as np
import torch

from stobatch.streams import Stream


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
        """The root of a run of its own, as public as this one; audits train thousands of models from one root."""
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
        """The cryptographic stream of this path, for noise and samples that privacy rests on."""
        return Stream(self._digest(*path))

    def wide_generator(self, *path: str | int) -> np.random.Generator:
        """A generator with a key of 128 bits (Philox), for what is drawn often and need not be secret."""
        return np.random.Generator(np.random.Philox(key=int.from_bytes(self._digest(*path)[:16], "little")))

    def normal(self, shape: tuple[int, ...], *path: str | int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator(*path))
