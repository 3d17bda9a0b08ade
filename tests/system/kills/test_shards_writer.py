"""A process that writes shards: killed on its way, and with less memory than it has data."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stobatch.data import Manifest, ShardedExamples
from stobatch.errors import DataError


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


COMMON = """
import sys, time, torch
from pathlib import Path
from stobatch.data import DatasetInfo, ShardedExamples, Stream, write_shards
from stobatch.seeds import Seeds

out, count, size, pause = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
def record(index):
    generator = torch.Generator().manual_seed(index)
    return torch.rand((1, 3, size, size), generator=generator).mul(2).sub(1), torch.tensor([index % 10])
def chunks(count, pause):
    for start in range(0, count, 20):
        time.sleep(pause)
        inputs, labels = zip(*(record(index) for index in range(start, min(start + 20, count))))
        yield torch.cat(inputs), torch.cat(labels)
info = DatasetInfo("made", (3, size, size), 10, count, 20, ())
def write():
    return write_shards(Stream(info, chunks(count, pause), chunks(20, 0)), out, 12, Seeds.reproducible(0))
"""


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", COMMON + script, *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.slow
def test_a_killed_writer_leaves_a_folder_that_is_refused_and_can_be_written_again(tmp_path: Path) -> None:
    out, undisturbed = tmp_path / "killed", tmp_path / "undisturbed"
    process = start("write()", out, 400, 8, 0.2)
    deadline = time.monotonic() + 60
    while sum(file.stat().st_size for file in out.glob("train-*.inputs.npy")) < 40_000:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    with pytest.raises(DataError, match=r"The folder was not written to its end\."):
        Manifest.read(out)
    again = start(f"write()\nout = Path({str(undisturbed)!r})\nwrite()", out, 400, 8, 0)
    assert not again.communicate()[1]
    assert contents(out) == contents(undisturbed)
    ShardedExamples(Manifest.read(out)).require()


LIMITED = """
import resource

# What is imported or allocated once does not count: a small folder is written and read before the limit is set.
warm = out.parent / "warm"
small = DatasetInfo("warm", (3, size, size), 10, 24, 20, ())
manifest = write_shards(Stream(small, chunks(24, 0), chunks(20, 0)), warm, 12, Seeds.reproducible(0))
ShardedExamples(manifest).fetch(torch.arange(3))
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
room = int(sys.argv[5])
resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room))
manifest = write()
assert manifest.num_bytes > 3 * room, (manifest.num_bytes, room)
examples = ShardedExamples(manifest)
total = 0
for row in torch.randperm(count, generator=torch.Generator().manual_seed(0)):
    inputs, labels = examples.fetch(row.view(1))
    total += int(labels)
assert total == sum(index % 10 for index in range(count))
try:
    examples.in_memory()
except (MemoryError, RuntimeError):
    print("does not fit")
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_AS is kept on Linux")
def test_data_several_times_larger_than_memory_is_written_and_read(tmp_path: Path) -> None:
    """1,500 images of 128 x 128 as floats are 295 MB; the process may take 96 MB, its chunks included."""
    process = start(LIMITED, tmp_path / "large", 1500, 128, 0, 96_000_000)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert out == "does not fit\n"
