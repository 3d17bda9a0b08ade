"""Pages of the documentation: the code in them, and running it as a reader would."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from .command_line import call

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
"""Of the repository."""


def blocks(page: Path, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.S)


def quotes(page: Path, *numbers: str) -> bool:
    """Whether one paragraph, list or table of a page has all of these numbers; how it words them is its own affair."""
    return any(all(_has(part, number) for number in numbers) for part in re.split(r"\n\s*\n", page.read_text()))


def _has(text: str, number: str) -> bool:
    """Whether the number stands there as a whole.

    >>> [_has("from 12.5% to 3%.", number) for number in ("12.5%", "3%", "2.5%", "12", "3")]
    [True, True, False, False, True]
    """
    return re.search(rf"(?<![\d.]){re.escape(number)}(?!\d|\.\d)", text) is not None


def run_code(parts: list[str], folder: Path) -> str:
    """Run blocks of Python in order, in an empty directory; what they print.

    In this process: what is claimed is that the code works, and a fresh interpreter imports everything once more.
    """
    out, names = io.StringIO(), {"__name__": "__main__"}
    with contextlib.chdir(folder), contextlib.redirect_stdout(out):
        exec(compile("\n".join(parts), "<page>", "exec"), names)
    return out.getvalue()


def run_python(page: Path, folder: Path) -> str:
    """Run all Python blocks of a page."""
    return run_code(blocks(page), folder)


def run_shell(lines: str, folder: Path) -> str:
    """Run the commands of a page in order, each in full on its line; what they print. All have to succeed.

    `stobatch` itself is called in this process, for the same reason.
    """
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    said = ""
    for line in lines.splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["stobatch"]:
            with contextlib.chdir(folder):
                done = call(*words[1:])
            assert done.code == 0, f"{line}\n{done.err[-3000:]}"
            said += done.out
        elif words:
            shell = subprocess.run(
                ["sh", "-c", line],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=600,
            )
            assert shell.returncode == 0, f"{line}\n{shell.stdout[-1000:]}{shell.stderr[-3000:]}"
            said += shell.stdout
    return said
