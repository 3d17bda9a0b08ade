"""The notebooks run, cell by cell, and their stored outputs are of the same kind as what they print now."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest
from support.pages import ROOT

from stobatch.seeds import Seeds

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_notebooks", ROOT / "docs" / "make_notebooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def without_numbers(text: str) -> str:
    """Seeds are secret, so numbers that are measured differ from run to run; words and statuses do not.

    >>> without_numbers("right: 98%, ε ≥ 1.61 [0, 1]")
    'right: #%, ε ≥ # [#, #]'
    """
    # Which of its bounds is the largest, and so what it assumes, may differ as well.
    plain = re.sub(r", assuming .*?, where ", ", where ", text)
    return re.sub(r"\d[\d.,]*(?:e-?\d+)?(?<![.,])", "#", plain)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_stores_what_it_prints(
    path: Path, maker: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Secret as far as the library knows: whether a true claim survives an audit must not hang on luck.
    monkeypatch.setattr(Seeds, "secret", classmethod(lambda cls: cls(7, public=False)))
    notebook = json.loads(path.read_text())
    stored = ["".join(line for output in cell["outputs"] for line in output["text"])
              for cell in notebook["cells"] if cell["cell_type"] == "code"]  # fmt: skip
    for now, before in zip(maker.run(notebook, tmp_path), stored, strict=True):
        assert without_numbers(now) == without_numbers(before)
    assert any(stored)


def test_no_notebook_sets_a_public_seed() -> None:
    assert len(NOTEBOOKS) == 3
    for path in NOTEBOOKS:
        source = "".join(line for cell in json.loads(path.read_text())["cells"] for line in cell["source"])
        assert not re.search(r"[\"']seed[\"']|\bseeds?=[^\[]", source)
