"""What cannot be collected where an optional package is missing, and which tests share a worker."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

collect_ignore = [] if find_spec("flwr") else ["src/stobatch/federated/flower.py", "tests/system/flower/local_grid.py"]

ONE_WORKER = ("tests/system/cli/", "tests/system/kills/", "tests/system/processes/", "tests/unit/verification/")
"""Folders whose files share a server of processes or a finished run, which would be made once for each worker."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file at a time, and such a folder at a time."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return next((folder for folder in ONE_WORKER if file.startswith(folder)), file)

    return Scheduling(config, log)
