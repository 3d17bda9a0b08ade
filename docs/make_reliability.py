"""Make docs/reliability.md from the records in results/reliability: `python docs/make_reliability.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "results" / "reliability"
PAGE = ROOT / "docs" / "reliability.md"
_HEAD = """\
# Reliability: kills, signals and hostile inputs

Made by `python docs/make_reliability.py` from the records in `results/reliability`; a test compares the two. Each
record holds its command, its seed, the versions and the counts. All of it runs on one CPU core.

## What holds

- A file appears whole or not at all. A run has one writer at a time, and the next one removes what a killed one was
  writing.
- A training that was killed at any moment and continued ends with the same bits as one that was not, on a CPU with the
  same number of threads. Steps are entered in the ledger before they are made, so what was released is never counted
  too low.
- Ctrl-C and SIGTERM are obeyed wherever the program is, from its first import on. What was being made is discarded;
  what was reported done is kept. Training and the rounds of a federation finish their step first; a training in one
  process waits for that no longer than ten seconds. Exit code 130, one line, and the same command continues.
- Whatever is wrong with an input (settings, files, layers, tensors, words of other parties) ends with exit code 2 and
  one line that says what to do.
- Public files and folders have the modes that the umask gives; what is private has 0600 and 0700, logs included.

## Killed with SIGKILL at random moments, then continued
"""
NAMES = ("kills", "ranks", "signals", "fuzz")


def records() -> dict[str, dict[str, Any]]:
    return {name: json.loads((RECORDS / f"{name}.json").read_text()) for name in NAMES}


def page(found: dict[str, dict[str, Any]]) -> str:
    """The whole page; every number in it is one of the records'."""
    kills, ranks, signals, fuzz = (found[name] for name in NAMES)
    lines = [
        _HEAD,
        f"`{kills['command']}`, {kills['seconds']:.0f} s.",
        "*Same bits*: weights, tables and documents (but for times and counts of repeated steps) are those of an",
        "undisturbed run. *Undercounted*: fewer steps accounted for than distinct releases were observed.",
        "",
        "| verb | kills | of these at work | same bits | undercounted | temporary files left |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for verb, one in kills["verbs"].items():
        counted = one.get("undercounted", "-")
        cells = (verb, one["kills"], one["killed_at_work"], one["same_bits"], counted, one["left_over"])
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += [
        "",
        "## One process of several killed",
        "",
        f"`{ranks['command']}`, {ranks['seconds']:.0f} s: {ranks['kills']} times one of {ranks['processes']} processes",
        f"was killed at a random step. The other said so in one line {ranks['one_line']} times; continued by one or",
        f"two processes the training had the same bits {ranks['same_bits']} times, {ranks['undercounted']} were",
        f"undercounted, {ranks['left_over']} left a temporary file.",
        "",
        "## Signals",
        "",
        f"`{signals['command']}`, {signals['seconds']:.0f} s: {signals['obeyed']} of {signals['tried']} signals were",
        "obeyed (exit code 130, one line, nothing left, continued afterwards);",
        f"the slowest took {signals['slowest_s']:.1f} s.",
        "",
        "| moment and signal | seconds | obeyed |",
        "|---|---:|---|",
    ]
    for moment, one in signals["moments"].items():
        lines.append(f"| {moment} | {one['seconds']} | {'yes' if one['obeyed'] else 'NO'} |")
    lines += [
        "",
        "## Hostile inputs",
        "",
        f"`{fuzz['command']}`, {fuzz['seconds']:.0f} s: {fuzz['cases']:,} cases, {fuzz['tracebacks']} tracebacks,",
        f"{fuzz['hung']} beyond {fuzz['limit_s']:g} s, {fuzz['wrong']} wrong answers; the slowest took "
        f"{fuzz['slowest_s']:.1f} s.",
        "A wrong answer is an accepted input that is not what was written, or a damaged file taken for another one.",
        "Twenty thousand of the cases are part of the tests (`tests/system/fuzz`); each can be repeated by its number.",
        "",
        "| surface | cases | refused | accepted |",
        "|---|---:|---:|---:|",
    ]
    for surface, one in fuzz["surfaces"].items():
        lines.append(f"| {surface} | {one['cases']:,} | {one['refused']:,} | {one['accepted']:,} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(records()))
