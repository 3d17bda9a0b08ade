"""`report`: run directories into one HTML file, with t-tests where there are several seeds."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from stobatch.errors import SettingError
from stobatch.files import as_written
from stobatch.reporting.facts import Facts
from stobatch.runs import Run
from stobatch.settings import content_hash
from stobatch.verbs.t_tests import t_tests_between

Key = tuple[str, str, str, str, float]
"""What two scores must have in common to be compared: protocol, function, norm, input range, radius."""


def report(runs: Sequence[str | Path], out: str | Path | None = None, *, images: bool = True) -> dict[str, Any]:
    """Write the report of one run, or of several with a comparison; reads what `evaluate` left, trains nothing."""
    from stobatch.reporting.html import write_report

    directories = [Run(Path(run)) for run in runs]
    if not directories:
        raise SettingError("there is no run to report on.", remedy="Give at least one run directory.")
    if out is None and len(directories) > 1:
        raise SettingError("a report on several runs belongs to none of them.", remedy="Say where with --out FILE.")
    target = Path(out) if out is not None else directories[0].path / "report.html"
    with directories[0].held() if out is None and directories[0].exists else nullcontext(), as_written(_named(runs)):
        comparisons = _comparisons(directories)
        write_report(directories, target, comparisons=comparisons, images=images)
    return {"report": str(target), "runs": [str(run.path) for run in directories], "comparisons": comparisons}


def _named(runs: Sequence[str | Path]) -> Path:
    """All runs of a report, as one path for messages: which of them is damaged is not known."""
    return Path(", ".join(str(run) for run in runs))


def _comparisons(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Two-tailed t-tests between every two settings that were trained with two seeds or more."""
    groups: dict[str, dict[int, dict[Key, float]]] = {}
    for place, run in enumerate(runs, 1):
        facts = Facts.read(run)
        config = facts.config["config"]
        # A secret seed pairs with none: no public seed is negative.
        seed = config["seed"] if config["seed"] is not None else -place
        groups.setdefault(_name(config, facts.status), {})[seed] = _worst(facts.scores)
    found = []
    for first, second, key, test in t_tests_between(groups):
        protocol, function, norm, input_range, radius = key
        found.append({"first": first, "second": second, "protocol": protocol, "function": function, "norm": norm,
                      "input_range": input_range, "radius": radius, "t_test": test.to_dict()})  # fmt: skip
    return found


def _name(config: dict[str, Any], status: str) -> str:
    """A setting without its seed: method, budget with its status, and a hash for the rest."""
    trained = {key: config[key] for key in ("method", "data", "model", "training")}
    epsilon = config["method"].get("total_epsilon")
    budget = f", {status} ε = {epsilon:g}" if epsilon is not None else ""
    return f"{config['method']['name']}{budget} [{content_hash(trained)[:6]}]"


def _worst(scores: dict[str, Any]) -> dict[Key, float]:
    return {
        (row["protocol"], row["function"], row["norm"], row["input_range"], row["radius"]): row["value"]
        for under in scores["under_attack"]
        for row in under["accuracy"]
        if row["attack"] == "worst"
    }
