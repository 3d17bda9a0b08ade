"""Real `stobatch` processes that meet an accident, for tests and for `benchmarks/reliability`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


class Server:
    """Ask the fork server for one `stobatch` process."""

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        script = Path(__file__).with_name("fork_server.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def __call__(self, *arguments: object, **accident: Any) -> Ended:
        streams = {name: str(self.folder / name) for name in ("out", "err")}
        request = {"arguments": [str(argument) for argument in arguments], **streams, **accident}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        code = json.loads(self._line())
        return Ended(code, *(Path(file).read_text() for file in streams.values()))

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(timeout=30)
        self.process.stdout.close()
