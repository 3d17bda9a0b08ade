"""Write what was measured of the server into docs/serving.md, from the records in results/serving.

`python docs/make_serving.py`; a test compares the page with the records.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from textwrap import fill as wrap
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "serving.md"
BY_TIME, BY_RATE = (f"share of the library's batches, by {what}" for what in ("processor time", "rate"))
BEGIN, END = "<!-- measured: by docs/make_serving.py -->\n", "<!-- end of what was measured -->\n"


def fill(text: str) -> str:
    return wrap(text, 120, break_long_words=False, break_on_hyphens=False)


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "results" / "serving" / f"{name}.json").read_text())
    return found


def middle(measured: Any, key: str) -> float:
    """Return the median over rounds."""
    rounds = measured if isinstance(measured, list) else [measured]
    return float(median(one[key] for one in rounds))


def row(name: str, measured: Any) -> str:
    first = measured[0] if isinstance(measured, list) else measured
    waits = f"{middle(measured, 'p50_ms'):.0f} / {middle(measured, 'p99_ms'):.0f}" if "p50_ms" in first else "-"
    return f"| {name} | {middle(measured, 'cpu_ms'):.2f} | {middle(measured, 'per_second'):.0f} | {waits} |"


def measured() -> str:
    """Return the section as Markdown."""
    load, soak, fuzz, votes = (read(name) for name in ("load", "soak", "fuzz", "votes"))
    commands = _commands(load, soak, fuzz, votes)
    parts = (_machine(load), _table(load), _shares(load, votes), _soak(soak), _fuzz(fuzz), commands)
    return "\n\n".join(parts) + "\n"


def _machine(load: dict[str, Any]) -> str:
    machine = load["machine"]
    return fill(
        f"On {machine['cores']} cores ({machine['cpu']}, torch {machine['torch']}), which clients and server share: "
        f"the load average was {machine['load'][0]} at the end. One picture in a request, a run of the recipe "
        "`demo`, one thread for the mathematics, a proof at one radius. Rates and waiting times hang on what else "
        "runs, processor time hangs on it less, and shares of what was measured in turns least. Other records name "
        "their own load."
    )


def _table(load: dict[str, Any]) -> str:
    one, lit = load["one radius, 0.2"], load["LitServe, no certificate"]
    names = {"a loop over `predict`": "plain loop", "`predict` on batches of 32": "batches of 32"}
    names |= {f"served, clients: {count}": f"served, bytes, {count} clients" for count in (1, 16, 100)}
    names["served as JSON, clients: 100"] = "served, json, 100 clients"
    return "\n".join(
        [
            "| | CPU ms a picture | pictures a second | p50 / p99 ms |",
            "|---|---:|---:|---:|",
            *(row(name, one[key]) for name, key in names.items()),
            *(
                row(f"LitServe {lit['version']} without certificates, clients: {count}", lit[f"{count} clients"])
                for count in (1, 16, 100)
            ),
        ]
    )


def _shares(load: dict[str, Any], votes: dict[str, Any]) -> str:
    one, largest = load["one radius, 0.2"], load["largest radius"]
    size, share = middle(largest["batches of 32"], "cpu_ms"), largest["share, by processor time"]
    of_draws = votes["share of the library's draws, by processor time"]
    own, theirs = (median(votes["draws_per_processor_second"][who]) for who in ("predict", "served"))
    return fill(
        f"**Beside the library's batches of 32**, {load['rounds']} rounds of {load['seconds_each']:g} s each in turns, "
        f"medians: the server with 100 clients answers "
        f"{one[BY_TIME]:.0%} as many pictures for the same processor time, and {one[BY_RATE]:.0%} as many a second. "
        f"Its own processor time is counted, that of the clients is not. Where the largest radius is looked for, "
        f"{size:.0f} ms a picture, the share of processor time is {share:.0%}, measured once. "
        f"Votes: {theirs:,.0f} draws for each processor second served to 16 clients, "
        f"{own:,.0f} by a loop over `predict`, a share of {of_draws:.0%}."
    )


def _soak(soak: dict[str, Any]) -> str:
    memory = soak["memory_mb"]
    return fill(
        f"**{soak['clients']} clients for ten minutes**: {soak['requests']:,} answers, {soak['wrong']} wrong "
        f"(each compared with "
        f"`predict`), {soak['counts']['killed']} clients killed while they waited; p99 is "
        f"{soak['p99_over_p50']:.1f} times p50; "
        f"memory at most {memory['first third']:.0f} MB in the first third and {memory['last third']:.0f} MB in "
        f"the last; load "
        f"average {soak['machine']['load'][0]}."
    )


def _fuzz(fuzz: dict[str, Any]) -> str:
    counts = fuzz["counts"]
    return fill(
        f"**{fuzz['cases']:,} hostile requests**: {fuzz['num_findings']} answers of 500, silences or wrong answers. "
        f"{counts['code 400']:,} were refused with 400, {counts['whole']:,} whole ones between them answered "
        f"rightly; the slowest "
        f"took {fuzz['slowest_s']:.1f} s; memory after each quarter: "
        f"{', '.join(f'{size:.0f}' for size in fuzz['memory_mb'][1:])} MB; load average {fuzz['machine']['load'][0]}."
    )


def _commands(*records: dict[str, Any]) -> str:
    return fill(", ".join(f"`{record['command']}`" for record in records) + ".")


def page() -> str:
    """Return the page with this section as the records have it."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}{measured()}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page())
