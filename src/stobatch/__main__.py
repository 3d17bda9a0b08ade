"""`stobatch`, and `python -m stobatch`: from the first import on a stop is obeyed."""

import atexit
import gc
import sys
from io import TextIOWrapper

from stobatch.interrupts import STOPPED, Interrupted, obey_stops

GARBAGE_AFTER, AGAIN_AFTER = 20_000, 50
"""New objects that may be garbage before it is looked for, and looks before what stayed is looked through again.

Imports make 400,000 objects that all stay."""


def main() -> None:
    """Run the command line. Its imports take seconds, so they come after the handlers."""
    gc.set_threshold(GARBAGE_AFTER, AGAIN_AFTER, gc.get_threshold()[2])
    atexit.register(gc.freeze)  # a search through everything at the end frees what the system frees anyway
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a console may have no ε
    try:
        with obey_stops():
            from stobatch.cli.app import main as run

            run()
    except (Interrupted, KeyboardInterrupt):
        print(f"stobatch: {STOPPED}", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
