"""The command line: what every verb of it shares, and how it ends.

Results go to standard output (as JSON with `--json`), progress and errors to standard error. Exit codes: 0 done,
1 an audit refuted a claim, a proved certificate was broken, or `verify` found a difference,
2 something to mend in the call, 130 interrupted with everything saved.

Nothing here or in the verbs' files imports PyTorch or pydantic before a verb runs: `--help` answers at once.
"""

from __future__ import annotations

import json
import os
import re
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from stobatch.errors import EndedElsewhere, SettingError, StobatchError
from stobatch.interrupts import STOPPED, Interrupted, obey_stops
from stobatch.processes import one_of_several

app = typer.Typer(
    help="Train classifiers with differential privacy and certified robustness, and see what is guaranteed by whom.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


_REFERENCE = Path(__file__).with_name("reference.json")


def read_reference(section: str) -> list[dict[str, Any]]:
    """Return part of what docs/make_reference.py wrote from the declarations: asking it imports none of them."""
    entries: list[dict[str, Any]] = json.loads(_REFERENCE.read_text(encoding="utf-8"))[section]
    return entries


def _print_version(asked: bool) -> None:
    if asked:
        from stobatch import __version__

        print(f"stobatch {__version__}")
        raise typer.Exit


@app.callback()
def _main_options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train classifiers with differential privacy and certified robustness, and see what is guaranteed by whom."""
    if one_of_several() and context.invoked_subcommand != "train":
        raise SettingError(
            f"`stobatch {context.invoked_subcommand}` runs in one process, and torchrun started several.",
            remedy="Run it without torchrun; only `train` is spread over processes.",
        )


@cache
def parser() -> Any:
    """Make the parser once: reading the signatures of all verbs takes longer than most calls."""
    return typer.main.get_command(app)


def main() -> None:
    """Run the command line and turn every expected failure into one line and an exit code."""
    try:
        with obey_stops():
            try:
                _require_encodable(sys.argv[1:])
                code = parser()(standalone_mode=False)
                raise SystemExit(code if isinstance(code, int) else 0)
            finally:
                sys.stdout.flush()
    except EndedElsewhere as error:
        raise SystemExit(error.code) from None
    except StobatchError as error:
        if one_of_several() and not _should_report(error):
            raise SystemExit(2) from None
        _exit_with(str(error), 2)
    except (Interrupted, KeyboardInterrupt):
        # torchrun ends the others when one fails, which has said why.
        if one_of_several() and not _should_report(StobatchError(STOPPED, remedy="")):
            raise SystemExit(130) from None
        _exit_with(STOPPED, 130)
    except MemoryError:
        _exit_with("the memory is not enough. Lower machine.memory_mb, or take a smaller network or less data.", 2)
    except OSError as error:
        if _output_fails():
            # What the interpreter would flush at exit has nowhere to go.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            _exit_with(f"cannot write the output: {error.strerror}. Send it somewhere else.", 2)
        what = f"cannot use {error.filename}" if error.filename is not None else "the system refused a request"
        _exit_with(f"{what}: {error.strerror or error}. Look at its place and permissions, then run again.", 2)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        _exit_with_usage(error)


def _exit_with_usage(error: Any) -> NoReturn:
    """Say what the parser refused; where the classes of its errors live depends on the version of typer."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        raise SystemExit(2)
    _exit_with(_usage_message(error.format_message()), 2)


def _usage_message(message: str) -> str:
    """Return the parser's message in one line with a remedy; an option that is a setting by name is looked up there."""
    sentence = " ".join(message.split()).rstrip(".")
    option = re.search(r"[Nn]o such option:? *'?(--[\w-]+)", sentence)
    if option is not None:
        name = option[1].removeprefix("--").replace("-", "_")
        keys = [row["key"] for row in read_reference("settings") if row["key"].rpartition(".")[2] == name]
        if keys:
            value = next((word for before, word in pairwise(sys.argv) if before == option[1]), "VALUE")
            return f"{option[1]} is not an option; {keys[0]} is a setting. Write --set {keys[0]}={value}."
    verbs = {command.callback.__name__ for command in app.registered_commands if command.callback}
    verb = next((f"{word} " for word in sys.argv[1:] if word in verbs), "")
    return f"{sentence[:1].lower()}{sentence[1:]}. Run `stobatch {verb}--help`."


def _require_encodable(arguments: list[str]) -> None:
    """Refuse half a character before a parser of the command line trips over it, as some versions do."""
    for argument in arguments:
        try:
            os.fsencode(argument)
        except UnicodeEncodeError:
            raise SettingError(
                f"{argument!a} cannot be written in the system's encoding.",
                why="It names no file and no setting.",
                remedy="Write the argument again.",
            ) from None


def _output_fails() -> bool:
    try:
        sys.stdout.flush()
    except OSError:
        return True
    return False


def _should_report(error: StobatchError) -> bool:
    """Return whether this process tells the user: of several that fail, one does."""
    from stobatch.training.engines.group import speaks

    return speaks(error)


def _exit_with(message: str, code: int) -> NoReturn:
    print(f"stobatch: {message}", file=sys.stderr)
    raise SystemExit(code)
