"""A process in which the example package is installed: calls of the command line, then the conformance suite.

Read from standard input: `{"calls": {NAME: [ARGUMENT, ...], ...}, "suite": [ARGUMENT OF PYTEST, ...], "out": FILE}`.
What the calls returned is written to the file; the exit code is that of the suite.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest


def main() -> int:
    sys.path.append(str(Path(__file__).parents[1]))
    from support.command_line import call

    asked = json.load(sys.stdin)
    found = {name: asdict(call(*arguments)) for name, arguments in asked["calls"].items()}
    Path(asked["out"]).write_text(json.dumps(found))
    return int(pytest.main(asked["suite"]))


if __name__ == "__main__":
    sys.exit(main())
