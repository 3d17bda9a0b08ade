"""Code on pages of the documentation: a block is run as it stands, or a comment above it says why not.

The comments, each on the line before the fence:

- `<!-- not run: REASON -->`: nothing runs it; its commands are still read as the program would read them.
- `<!-- run by test_x.py -->`: that test runs it, with a preparation of its own.
- `<!-- run with: --set key=value ... -->`: it is run with these settings added to every training, so that it takes
  seconds where a reader's takes minutes.

`<!-- blocks run by test_x.py -->` anywhere on a page is for all of its blocks that say nothing themselves.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from stobatch.cli.app import parser
from stobatch.settings import dotted_keys
from stobatch_recipes import RECIPES, recipe

from .pages import ROOT, run_shell

LANGUAGES = ("python", "sh", "bash")
OTHER_LANGUAGES = ("text", "toml", "json", "")
COMMAND = re.compile(
    r"\s*(?:[A-Z_]+=\S+ )*(?:stobatch|torchrun|python|pip|make|openssl|ssh-keygen|flwr|flower-\w+)\s+[\w-]"
)
MARK = re.compile(r"\s*<!-- (not run: |run by |run with: )(.+) -->")
WHOLE_PAGE = re.compile(r"^<!-- blocks run by (\S+) -->$", re.M)


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    code: str
    mark: str = ""
    """`not run`, `run by`, `run with`, or nothing: it is run as it stands."""
    words: str = ""

    def __str__(self) -> str:
        place = self.page.relative_to(ROOT) if self.page.is_relative_to(ROOT) else self.page
        return f"{place}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """Lines of a shell block, continued ones joined."""
        return [line for line in self.code.replace("\\\n", " ").splitlines() if line.strip()]


def blocks_of(page: Path) -> list[Block]:
    """Return every fenced block of a page, with its mark."""
    text = page.read_text()
    whole = WHOLE_PAGE.search(text)
    found, lines = [], text.splitlines()
    start: int | None = None
    for number, line in enumerate(lines):
        if not line.lstrip().startswith("```"):
            continue
        if start is None:
            start = number
            continue
        opening = lines[start]
        indent = len(opening) - len(opening.lstrip())
        language = opening.strip().removeprefix("```")
        code = "".join(f"{inside[indent:]}\n" for inside in lines[start + 1 : number])
        mark = MARK.fullmatch(lines[start - 1]) if start else None
        kind, words = (mark[1].strip(": "), mark[2]) if mark else ("", "")
        if not kind and whole and language in LANGUAGES:
            kind, words = "run by", whole[1]
        found.append(Block(page, start + 1, language, code, kind, words))
        start = None
    return found


def run_blocks(page: Path, folder: Path) -> str:
    """Run the blocks of a page that no other test runs, in order, in a folder; return what they print."""
    names: dict[str, object] = {"__name__": "__main__"}
    out = io.StringIO()
    for block in blocks_of(page):
        if block.language not in LANGUAGES or block.mark in ("not run", "run by"):
            continue
        if block.language == "python":
            with contextlib.chdir(folder), contextlib.redirect_stdout(out):
                exec(compile(block.code, str(block), "exec"), names)
        else:
            out.write(run_shell("\n".join(with_settings(block)), folder))
    return out.getvalue()


def with_settings(block: Block) -> Iterator[str]:
    """Yield commands with the settings of a `run with` mark where a configuration is made."""
    for command in block.commands:
        words = shlex.split(command, comments=True)
        makes = any(verb in words[:2] for verb in ("plan", "train", "tune", "compare", "demo"))
        yield f"{command.split(' #')[0]} {block.words}" if block.mark == "run with" and makes else command


def misread(command: str) -> str | None:
    """Return what the program would not understand of a command line: a verb, an option, or a setting."""
    words = shlex.split(command, comments=True)
    if "stobatch" not in words:
        return None
    verb, *arguments = words[words.index("stobatch") + 1 :]
    program = parser()
    known = program.get_command(click.Context(program), verb)
    if known is None:
        return f"verb {verb}"
    if arguments and arguments[0] in getattr(known, "commands", {}):
        verb, *arguments = arguments
        known = known.commands[verb]
    options = {name for parameter in known.params for name in parameter.opts}
    for option, value in zip(arguments, [*arguments[1:], ""], strict=True):
        if option.startswith("--") and option not in options:
            return f"option {option} of {verb}"
        if option == "--set" and value.partition("=")[0] not in settings():
            return f"setting {value}"
    return None


def settings() -> set[str]:
    """Return the dotted names of every setting that a recipe has."""
    if not _SETTINGS:
        for name in RECIPES:
            _SETTINGS.update((*dotted_keys(recipe(name)), *_flat(recipe(name).to_dict(), "")))
    return _SETTINGS


_SETTINGS: set[str] = set()


def _flat(settings: dict[str, object], place: str) -> Iterator[str]:
    for name, value in settings.items():
        yield f"{place}{name}"
        if isinstance(value, dict):
            yield from _flat(value, f"{place}{name}.")
