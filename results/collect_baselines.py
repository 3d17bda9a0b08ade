"""Collect the runs of a comparison into records: `collect_baselines.py DIR > results/NAME.json`.

DIR is what `stobatch compare --seeds 1,2,3 --out DIR` wrote. A record is one method with one seed: its budget with its
status (void, since the seed is public), accuracy on clean inputs and under both protocols, certified accuracy by rule,
seconds and memory. Nothing private is read.
"""

import json
import sys
from pathlib import Path
from typing import Any

from stobatch.reporting.summary import Facts
from stobatch.results import WORST, Attack
from stobatch.runs import Run


def certified(facts: Facts, function: str) -> dict[str, Any]:
    """By rule: who vouches for it, and the share that is right and certified at each radius."""
    assert facts.certificates is not None or not facts.kinds(function)
    return {
        kind.name: {
            "status": str(kind.status),
            "source": kind.source,
            "test_examples": facts.all_certified(kind)[0].total,
            "accuracy": {f"{row.radius:g}": row.value for row in facts.all_certified(kind)},
        }
        for kind in facts.kinds(function)
    }


def attacked(facts: Facts, function: str) -> dict[str, Any]:
    """By protocol: what was tried on how many test images, and the accuracy that the worst of it leaves."""
    return {
        entry.protocol.name: {
            "attacks": list(entry.attacks),
            "test_examples": entry.rows,
            "accuracy": {f"{row.radius:g}": row.value for row in entry.of_attack(WORST)},
        }
        for entry in facts.scores.under_attack
        if entry.function == function
    }


def clean(facts: Facts, function: str) -> dict[str, Any]:
    """Of as many test images as there is a measurement of: all of them, where an attack on all was recorded."""
    found = [entry.clean_accuracy for entry in facts.scores.under_attack if entry.function == function]
    attack = Attack.read_if_there(facts.run)
    if attack is not None and attack.function == function:
        found.append(attack.clean_accuracy)
    largest = max(found, key=lambda share: share.total)
    return {"accuracy": largest.value, "test_examples": largest.total}


def network(model: dict[str, Any]) -> str:
    """A list of layers says its own normalisation."""
    listed = "," in model["architecture"]
    return model["architecture"] if listed else f"{model['architecture']}, {model['normalisation']} normalisation"


def record(run: Run) -> dict[str, Any]:
    facts = Facts.read(run)
    training, guarantee, function = facts.training, facts.guarantee.to_dict(), facts.main_function
    assert training is not None
    status = guarantee["status"]
    budget = {} if status == "none" else {"epsilon": facts.epsilon, "delta": guarantee[f"{status}_delta"]}
    return {
        "method": facts.started.method,
        "row": run.path.parent.name,
        "seed": facts.seed,
        "training_hash": facts.scores.training_hash,
        "status": status,
        **({f"{status}_{key}": value for key, value in budget.items()}),
        **({"status_with_secret_seeds": guarantee["status_with_secret_seeds"]} if status == "void" else {}),
        "neighbours": None if status == "none" else guarantee["neighbours"],
        "network": network(facts.started.config["model"]),
        "steps": training.steps,
        "training_seconds": training.seconds_since_last_start,
        "peak_memory_mb": training.peak_memory_mb,
        "peak_memory_of": training.peak_memory_of,
        "device": training.device,
        "torch": training.torch,
        "function": function,
        "radius_unit": facts.unit,
        "clean": clean(facts, function),
        "under_attack": attacked(facts, function),
        "certified": certified(facts, function),
        "flags": [{"level": str(one.level), "name": one.name, "evidence": one.evidence} for one in facts.scores.flags],
    }


if __name__ == "__main__":
    folders = sorted(path.parent for path in Path(sys.argv[1]).glob("*/seed-*/scores.json"))
    print(json.dumps([record(Run(folder)) for folder in folders], indent=1))
