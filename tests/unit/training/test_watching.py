"""Watching a training: what a callback and TensorBoard get is released or public, and no number more."""

from __future__ import annotations

import stat
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import stobatch
from stobatch.errors import SettingError
from stobatch.results import Outcome, Training
from stobatch.runs import Run, seal
from stobatch.training.device import environment
from stobatch.training.observer import Look, crc32c
from stobatch.types import Status
from tests.support.small_records import small_config, small_records

ALLOWED = {"learning_rate", "test_accuracy", "epsilon_spent"}


def records_of(content: bytes) -> Iterator[bytes]:
    """Yield the records of an event file, with their checksums checked."""

    def check(part: bytes, stored: bytes) -> None:
        crc = crc32c(part)
        assert struct.unpack("<I", stored)[0] == ((crc >> 15 | crc << 17) % 2**32 + 0xA282EAD8) % 2**32

    while content:
        (length,) = struct.unpack("<Q", content[:8])
        check(content[:8], content[8:12])
        check(content[12 : 12 + length], content[12 + length : 16 + length])
        yield content[12 : 12 + length]
        content = content[16 + length :]


def fields_of(message: bytes) -> Iterator[tuple[int, bytes | int]]:
    """Yield the numbers and values of a protocol buffer's fields."""
    place = 0

    def varint() -> int:
        nonlocal place
        value, shift = 0, 0
        while True:
            byte = message[place]
            place += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while place < len(message):
        number, kind = divmod(varint(), 8)
        if kind == 0:
            yield number, varint()
            continue
        size = {1: 8, 5: 4}.get(kind) or varint()
        yield number, message[place : place + size]
        place += size


def scalars(file: Path) -> dict[int, dict[str, float]]:
    """Return the values of an event file by step and tag."""
    found: dict[int, dict[str, float]] = {}
    first, *events = records_of(file.read_bytes())
    assert dict(fields_of(first))[3] == b"brain.Event:2"
    for event in events:
        fields = dict(fields_of(event))
        assert fields.keys() == {1, 2, 5}
        pairs = [dict(fields_of(value)) for _, value in fields_of(fields[5])]  # type: ignore[arg-type]
        found[fields[2]] = {  # type: ignore[index]
            pair[1].decode(): struct.unpack("<f", pair[2])[0]  # type: ignore[union-attr,arg-type]
            for pair in pairs
        }
    return found


def test_a_callback_sees_what_was_released_and_nothing_else(tmp_path: Path):
    looks: list[Look] = []
    config = small_config(training__schedule="linear")
    model = stobatch.train(config, tmp_path / "run", dataset=small_records(), quiet=True, callback=looks.append)
    assert [look.step for look in looks] == [1, 2, 3, 4]
    assert all(look.to_dict().keys() == ALLOWED for look in looks)
    assert vars(looks[0]).keys() == {"step", "steps", "learning_rate", "test_accuracy", "monitored"}
    history = Training.read(Run(tmp_path / "run")).history
    assert [look.test_accuracy for look in looks] == [row.test_accuracy for row in history]
    assert looks[-1].monitored["epsilon_spent"] == pytest.approx(model.guarantee.epsilon)
    rates = [look.learning_rate / config.training.learning_rate for look in looks]
    assert rates == [0.875, 0.625, 0.375, 0.125]


def test_what_is_spent_has_its_status_beside_it_and_another_one_is_found(tmp_path: Path):
    for seed, status in ((None, Status.PROVED), (5, Status.VOID)):
        run = Run(tmp_path / status)
        stobatch.train(small_config(seed=seed), run.path, dataset=small_records(), quiet=True)
        training = Training.read(run)
        assert training.epsilon_spent_status is status
        for changed in ({"epsilon_spent_status": Status.CLAIMED}, {}):
            kept = {key: value for key, value in training.to_dict().items() if key != "epsilon_spent_status"}
            Training.from_dict(kept | changed).write(run)
            seal(run, "train", environment(torch.device("cpu")))
            (check,) = (check for check in stobatch.verify(run.path, sample=0).checks if check.name == "steps")
            assert check.outcome is (Outcome.DIFFERS if changed else Outcome.AGREES), check


def test_watching_changes_no_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = small_config(seed=5)
    for name, how in (("watched", {"log": "tensorboard", "callback": lambda look: None}), ("alone", {})):
        stobatch.train(config, tmp_path / name, dataset=small_records(), quiet=True, **how)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("watched", "alone")]
    assert weights[0] == weights[1]


def test_tensorboard_gets_the_same_numbers_in_the_private_folder(tmp_path: Path):
    looks: list[Look] = []
    config = small_config()
    stobatch.train(
        config, tmp_path / "run", dataset=small_records(), quiet=True, log="tensorboard", callback=looks.append
    )
    (file,) = (tmp_path / "run" / "private" / "tensorboard").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    found = scalars(file)
    assert {step: set(values) for step, values in found.items()} == dict.fromkeys((1, 2, 3, 4), ALLOWED)
    for look in looks:
        assert found[look.step] == pytest.approx(look.to_dict(), rel=1e-6)
    assert stobatch.verify(tmp_path / "run", dataset=small_records()).verdict == "agrees"


def test_a_damaged_event_file_is_told_from_a_whole_one(tmp_path: Path):
    stobatch.train(small_config(), tmp_path / "run", dataset=small_records(), quiet=True, log="tensorboard")
    (file,) = (tmp_path / "run" / "private" / "tensorboard").iterdir()
    content = bytearray(file.read_bytes())
    content[-6] ^= 1
    file.write_bytes(content)
    with pytest.raises(AssertionError):
        scalars(file)


def test_another_log_is_refused_before_anything_is_written(tmp_path: Path):
    with pytest.raises(SettingError, match="no log 'wandb'"):
        stobatch.train(small_config(), tmp_path / "run", dataset=small_records(), quiet=True, log="wandb")
    assert not (tmp_path / "run").exists()
