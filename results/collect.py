"""Collect run directories into one file of records: `python results/collect.py RUN... > results/NAME.json`.

A record holds what docs/results quotes: the claim with its status (void where the seed is public), the configuration's
hash, and the measured scores.
Nothing private is read.
"""

import json
import sys
from collections import Counter
from pathlib import Path

from stobatch.reporting.summary import Facts
from stobatch.runs import Run


def commonest_share(run: Run, certificates: dict[str, object]) -> float:
    """How much of the test set verified inference gives the same label: 1 means that it ignores its input."""
    made_for = {"config_hash": certificates["config_hash"], "weights_sha256": certificates.get("weights_sha256")}
    predictions = run.records("certify", expected_rows=certificates["rows"], **made_for).read()["prediction"]
    return Counter(predictions).most_common(1)[0][1] / len(predictions)


def attacked(scores: dict[str, object]) -> list[dict[str, object]]:
    """For each protocol and function: its size, clean accuracy, and accuracy by attack and radius."""
    found = []
    for under in scores["under_attack"]:
        accuracy: dict[str, dict[str, float]] = {}
        for row in under["accuracy"]:
            accuracy.setdefault(row["attack"], {})[str(row["radius"])] = row["value"]
        found.append(
            {
                "protocol": under["protocol"]["name"],
                "function": under["function"],
                "test_examples": under["rows"],
                "clean": under["clean_accuracy"]["value"],
                "accuracy": accuracy,
                "certified_at_attacked_worst": {
                    rule: {str(row["radius"]): row["value"] for row in rows if row["attack"] == "worst"}
                    for rule, rows in under["certified_at_attacked"].items()
                },
            }
        )
    return found


def verified(run: Run, certificates: dict[str, object]) -> dict[str, object]:
    """Verified inference on clean inputs, and both kinds of certificates."""
    return {
        "verified": certificates["verified_accuracy"]["correct_without_abstaining"]["value"],
        "verified_or_abstained": certificates["verified_accuracy"]["correct"]["value"],
        "share_of_commonest_prediction": commonest_share(run, certificates),
        "abstained": certificates["verified_accuracy"]["abstained"]["value"],
        "noise_draws": certificates["settings"]["noise_draws"],
        "resampling_shrinkage": certificates["settings"]["resampling_shrinkage"],
        "certified": {
            kind["name"]: {
                "status": kind["status"],
                **{str(row["radius"]): row["value"] for row in certificates["certified_accuracy"][kind["name"]]},
            }
            for kind in certificates["kinds"]
        },
        "largest_certified_radius": certificates["largest_radius"],
    }


def record(run: Run) -> dict[str, object]:
    facts, training, config = Facts.read(run), run.read("training"), run.read("config")["config"]
    scores = facts.scores.to_dict()
    return {
        "training_hash": scores["training_hash"],
        "method": config["method"]["name"],
        "claimed_epsilon": round(facts.epsilon or 0.0, 12),
        "status": str(facts.status),
        "seed": config["seed"],
        "steps": training["steps"],
        "device": training["device"],
        "torch": training["torch"],
        "training_seconds": training.get("seconds_since_last_start"),
        "test_examples": scores["rows"],
        "clean": scores["clean_accuracy"]["value"],
        "radius_unit": f"{scores['norm']} over {scores['input_range']}",
        "under_attack": attacked(scores),
        "evaluation": scores["settings"],
        "flags": [{key: flag[key] for key in ("name", "level", "evidence")} for flag in scores["flags"]],
        **(verified(run, scores["certificates"]) if scores["certificates"] else {}),
    }


if __name__ == "__main__":
    print(json.dumps([record(Run(Path(path))) for path in sys.argv[1:]], indent=2))
