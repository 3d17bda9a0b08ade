"""What cannot be collected where an optional package is missing, and which tests share a worker."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

collect_ignore = [] if find_spec("flwr") else ["src/stobatch/federated/flower.py", "tests/system/flower/local_grid.py"]
collect_ignore += [] if find_spec("triton") else ["src/stobatch/models/triton_kernels.py"]

ONE_WORKER = (
    "tests/system/cli/",
    "tests/system/kills/test_audit",
    "tests/system/kills/",
    "tests/system/processes/test_faults",
    "tests/system/processes/",
    "tests/unit/verification/",
)
"""Files that share a server of processes or a finished run, which would be made once for each worker; the first that
fits counts. What mostly waits is cut in two, so that no worker has it all at the end."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file at a time, and such files at a time."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return next((prefix for prefix in ONE_WORKER if file.startswith(prefix)), file)

    return Scheduling(config, log)
