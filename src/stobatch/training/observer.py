"""Watching a training: what may be seen of it as it goes on, who is told, and a log for TensorBoard."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from stobatch.files import make_folder, open_private


@dataclass(frozen=True)
class Look:
    """What may be seen of a training: released or public numbers, never a loss or a norm of private examples."""

    step: int
    """Steps that have been made."""
    steps: int
    """All that will be made."""
    learning_rate: float
    """Of the latest step; a function of the settings."""
    test_accuracy: float
    """On held-out test images, of the parameters at this step: it depends on the training data through them alone."""
    monitored: Mapping[str, float]
    """What the method watches, from parameters and plan: `epsilon_spent`, for those that descend by DP-SGD.

    Show that one with the status of the plan's guarantee; `training.json` has it as `epsilon_spent_status`.
    """

    def to_dict(self) -> dict[str, float]:
        """Return every number by its name."""
        return {"learning_rate": self.learning_rate, "test_accuracy": self.test_accuracy, **self.monitored}


class Observer:
    """Told of a training as it goes on, in the process that writes; an error that it raises ends the training."""

    def begin(self, first: int, last: int) -> None:
        """Note that steps from `first` to `last` (excluded) are counted, and about to be made."""

    def look(self, look: Look) -> None:
        """Note a measurement: every `training.monitor_every` steps, and after the last."""


Callback = Callable[[Look], object]


@dataclass(frozen=True)
class CallingBack(Observer):
    """Hands every look to a function."""

    callback: Callback

    def look(self, look: Look) -> None:
        self.callback(look)


_POLYNOMIAL = 0x82F63B78
_MASK = 0xA282EAD8
_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5
"""How a field of a protocol buffer is stored."""


@cache
def _crc_table() -> tuple[int, ...]:
    values = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        values.append(value)
    return tuple(values)


def crc32c(content: bytes) -> int:
    """Return the CRC-32 with Castagnoli's polynomial.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    value = 0xFFFFFFFF
    for byte in content:
        value = _crc_table()[(value ^ byte) & 0xFF] ^ value >> 8
    return value ^ 0xFFFFFFFF


def _masked_crc(content: bytes) -> bytes:
    crc = crc32c(content)
    return struct.pack("<I", ((crc >> 15 | crc << 17 & 0xFFFFFFFF) + _MASK) & 0xFFFFFFFF)


def _record(content: bytes) -> bytes:
    length = struct.pack("<Q", len(content))
    return length + _masked_crc(length) + content + _masked_crc(content)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _field_key(number: int, kind: int) -> bytes:
    return _varint(number << 3 | kind)


def _message(number: int, content: bytes) -> bytes:
    return _field_key(number, _BYTES) + _varint(len(content)) + content


def _event(wall_time: float, step: int, rest: bytes) -> bytes:
    return _field_key(1, _EIGHT_BYTES) + struct.pack("<d", wall_time) + _field_key(2, _VARINT) + _varint(step) + rest


def _scalars(values: Mapping[str, float]) -> bytes:
    pairs = (
        _message(1, tag.encode()) + _field_key(2, _FOUR_BYTES) + struct.pack("<f", value)
        for tag, value in values.items()
    )
    return _message(5, b"".join(_message(1, pair) for pair in pairs))


@dataclass
class TensorBoardLog(Observer):
    """Writes every look at a training into a new event file of a folder, for the owner alone.

    The times of looks depend on how large samples were, which ε does not cover; so the folder is private.
    """

    folder: Path
    _file: Path | None = field(default=None, init=False)

    def look(self, look: Look) -> None:
        now = time.time()
        if self._file is None:
            make_folder(self.folder, private=True)
            self._file = self.folder / f"events.out.tfevents.{int(now)}.stobatch.{os.getpid()}"
            self._append(_event(now, 0, _message(3, b"brain.Event:2")))
        self._append(_event(now, look.step, _scalars(look.to_dict())))

    def _append(self, event: bytes) -> None:
        assert self._file is not None
        descriptor = open_private(self._file, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(descriptor, _record(event))
        finally:
            os.close(descriptor)
