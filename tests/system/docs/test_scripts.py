"""Scripts outside of the package import names that exist: none of them is imported by a test as a whole."""

from __future__ import annotations

import ast
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDERS = ("benchmarks", "docs", "examples", "results")
SCRIPTS = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def missing(script: Path) -> list[str]:
    """Names that a script asks the library for, and that are not there."""
    found = []
    for node in ast.walk(ast.parse(script.read_text())):
        if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] not in (
            "stobatch",
            "stobatch_recipes",
        ):
            continue
        module = node.module or ""
        try:
            there = import_module(module)
        except ModuleNotFoundError:
            found.append(module)
            continue
        names = [name.name for name in node.names if not hasattr(there, name.name)]
        found += [
            f"{module}.{name}" for name in names if not (hasattr(there, "__path__") and find_spec(f"{module}.{name}"))
        ]
    return found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_name_that_a_script_imports_exists(script: Path) -> None:
    assert not missing(script)


def test_a_name_that_is_gone_is_found(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from stobatch.privacy import plan\nfrom stobatch.dp import nothing\nfrom stobatch import dp\n")
    assert missing(script) == ["stobatch.privacy", "stobatch.dp.nothing"]
