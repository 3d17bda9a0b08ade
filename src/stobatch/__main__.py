"""`stobatch`, and `python -m stobatch`: from the first import on a stop is obeyed."""

import sys
from io import TextIOWrapper

from stobatch.interrupts import STOPPED, Interrupted, obey_stops


def main() -> None:
    """Run the command line. Its imports take seconds, so they come after the handlers."""
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
