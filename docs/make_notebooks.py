"""Run the notebooks in docs/notebooks and store what their cells print: `python docs/make_notebooks.py [NAME...]`."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "notebooks"


def run(notebook: dict[str, Any], folder: Path) -> list[str]:
    """Run the code cells in order in one namespace, in a folder; return what each prints."""
    names: dict[str, object] = {"__name__": "__main__"}
    printed = []
    for number, cell in enumerate(cell for cell in notebook["cells"] if cell["cell_type"] == "code"):
        out = io.StringIO()
        with contextlib.chdir(folder), contextlib.redirect_stdout(out):
            exec(compile("".join(cell["source"]), f"<cell {number + 1}>", "exec"), names)
        printed.append(out.getvalue())
    return printed


def with_outputs(notebook: dict[str, Any], printed: list[str]) -> dict[str, Any]:
    """Return a notebook whose code cells hold these outputs."""
    texts = iter(enumerate(printed, 1))
    cells = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            number, text = next(texts)
            outputs = [{"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)}]
            cells.append({**cell, "execution_count": number, "outputs": outputs if text else []})
        else:
            cells.append(cell)
    return {**notebook, "cells": cells}


if __name__ == "__main__":
    for path in sorted(FOLDER.glob("*.ipynb")):
        if not sys.argv[1:] or path.stem in sys.argv[1:]:
            found = json.loads(path.read_text())
            with tempfile.TemporaryDirectory() as folder:
                found = with_outputs(found, run(found, Path(folder)))
            path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
