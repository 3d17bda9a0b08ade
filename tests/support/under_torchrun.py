"""What torchrun starts: `stobatch`, with the accident that ACCIDENTS holds for this process and this attempt."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main() -> None:
    sys.path.append(str(Path(__file__).parents[1]))
    from stobatch.cli.app import main as stobatch
    from support.accidents import arrange

    whose = f"{os.environ['RANK']}/{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    arrange(json.loads(os.environ.get("ACCIDENTS", "{}")).get(whose, {}))
    sys.argv[0] = "stobatch"
    stobatch()


if __name__ == "__main__":
    main()
