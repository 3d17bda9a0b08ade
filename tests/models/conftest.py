from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

collect_ignore = ["conftest.py"]
"""For doctests: two modules of one name cannot be collected."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors gain nothing from threads, and threads that wait for a busy core cost a hundredfold."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
