"""The command line in this process: `call("plan", "--json")` gives back the exit code and both streams."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from stobatch.cli.app import main


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    def json(self) -> Any:
        """Standard output as exactly one JSON document; anything beside it makes this fail."""
        return json.loads(self.out)

    def refusal(self) -> str:
        """The one line of a refused call."""
        assert self.code == 2, (self.code, self.err)
        assert self.out == ""
        assert self.err.startswith("stobatch: "), self.err
        assert self.err.endswith("\n")
        assert self.err.count("\n") == 1, self.err
        return self.err.removeprefix("stobatch: ").strip()


def call(*arguments: object) -> Result:
    """What a process would do and print, without the seconds that it takes to import everything."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "240")
        patch.setattr(sys, "argv", ["stobatch", *map(str, arguments)])
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            pytest.raises(SystemExit) as left,
        ):
            main()
    return Result(int(left.value.code or 0), out.getvalue(), err.getvalue())
