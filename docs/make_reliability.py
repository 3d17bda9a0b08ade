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
record holds its command, its seed, the machine, the versions and the counts. Every process has one CPU thread.

## What holds

- A file appears whole or not at all. A run has one writer at a time, and the next one removes what a killed one was
  writing.
- A training that was killed at any moment and continued ends with the same bits as one that was not, on a CPU with the
  same number of threads, and with the same ledger. Steps are entered in it before they are made, so what was released
  is never counted too low; a step that is repeated with the same bits is the same release, and is counted once.
- Ctrl-C and SIGTERM are obeyed wherever the program is, from its first import on. What was being made is discarded;
  what was reported done is kept. Training and the rounds of a federation finish their step first; a training in one
  process waits for that no longer than ten seconds. Exit code 130, one line, and the same command continues.
- Whatever is wrong with an input (settings, files, layers, tensors, words of other parties) ends with exit code 2 and
  one line that says what to do.
- Public files and folders have the modes that the umask gives; what is private has 0600 and 0700, logs included.

## Killed with SIGKILL at random moments, then continued
"""
NAMES = ("kills", "kills_train", "ranks", "signals", "fuzz")


def records() -> dict[str, dict[str, Any]]:
    return {name: json.loads((RECORDS / f"{name}.json").read_text()) for name in NAMES}


def made(record: dict[str, Any]) -> str:
    """How long which command took, and where."""
    where = f"{record['cores']} cores ({record['processor']}, Python {record['python']}, torch {record['torch']})"
    return f"`{record['command']}`: {record['seconds']:.0f} s on {where}"


def _kill_row(verb: str, one: dict[str, int]) -> str:
    keys = ("kills", "killed_at_work", "same_bits", "undercounted", "overcounted", "left_over")
    return "| " + " | ".join([verb, *(str(one.get(key, "-")) for key in keys)]) + " |"


def page(found: dict[str, dict[str, Any]]) -> str:
    """The whole page; every number in it is one of the records'."""
    kills, again, ranks, signals, fuzz = (found[name] for name in NAMES)
    first, mended = kills["verbs"]["train"], again["verbs"]["train"]
    lines = [
        _HEAD,
        f"{made(kills)}.",
        "",
        "*Same bits*: weights, tables, documents, the ledger and the printed answer are those of an undisturbed run,",
        "but for times and for what is drawn anew (the key of the commitment to the data). *Undercounted* and",
        "*overcounted*: fewer or more steps accounted for than distinct releases were observed.",
        "",
        "| verb | kills | of these at work | same bits | undercounted | overcounted | temporary files left |",
        "|---|---:|---:|---:|---:|---:|---:|",
        _kill_row("train, before a mend", first),
        _kill_row("train", mended),
        *[_kill_row(verb, one) for verb, one in kills["verbs"].items() if verb != "train"],
        "",
        f"After {first['kills'] - first['same_bits']} of the first {first['kills']} kills of training the ledger was",
        "another one, though weights and counts were right: a kill between the last checkpoint and its entry left the",
        "last steps open in it for good. That was mended, and training was killed again",
        f"({made(again)}); the other rows are of before the mend.",
    ]
    lines += [
        "",
        "## One process of several killed",
        "",
        f"{made(ranks)}.",
        "",
        f"{ranks['kills']} times one of {ranks['processes']} processes was killed at a random step. The other said so",
        f"in one line {ranks['one_line']} times; continued by one or two processes the training had the same bits",
        f"{ranks['same_bits']} times, {ranks['undercounted']} were undercounted, {ranks['overcounted']} overcounted, "
        f"{ranks['left_over']} left a temporary file.",
        "",
        "## Signals",
        "",
        f"{made(signals)}.",
        "",
        f"{signals['obeyed']} of {signals['tried']} signals were obeyed (exit code 130, one line, nothing left,",
        f"continued afterwards); the slowest took {signals['slowest_s']:.1f} s.",
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
        f"{made(fuzz)}.",
        "",
        f"{fuzz['cases']:,} cases, {fuzz['tracebacks']} tracebacks, {fuzz['hung']} beyond {fuzz['limit_s']:g} s,",
        f"{fuzz['wrong']} wrong answers; the slowest took {fuzz['slowest_s']:.1f} s.",
        "A wrong answer is an accepted input that is not what was written, or a damaged file taken for another one.",
        "Of the cases 25,000 are part of the tests (`tests/system/fuzz`); each has a number to repeat it.",
        "An earlier pass ended in a traceback for half a character in a path, which an older click lets through;",
        "such an argument is refused now.",
        "",
        "| surface | cases | refused | accepted |",
        "|---|---:|---:|---:|",
    ]
    for surface, one in fuzz["surfaces"].items():
        lines.append(f"| {surface} | {one['cases']:,} | {one['refused']:,} | {one['accepted']:,} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(records()))
