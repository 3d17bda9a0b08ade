"""`python -m tests.system.fuzz --cases 1000000 --seed 1`: exit code 1 where anything was found."""

from __future__ import annotations

import argparse
import json
import sys

from .campaign import SURFACES, campaign


def main() -> int:
    parser = argparse.ArgumentParser(description="Hostile inputs for everything that reads.")
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--surface", choices=list(SURFACES), help="Only this one.")
    parser.add_argument("--first", type=int, default=0, help="The number of the first case of the surface.")
    given = parser.parse_args()
    found = campaign(given.cases, given.seed, surface=given.surface, first=given.first)
    print(json.dumps({name: outcome.to_dict() for name, outcome in found.items()}, indent=2))
    return int(any(outcome.findings for outcome in found.values()))


if __name__ == "__main__":
    sys.exit(main())
