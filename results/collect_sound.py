"""Collect runs of the sound method into records: `python results/collect_sound.py RUN... > results/sound_NAME.json`.

A record holds what docs/results quotes: the budget with its status (void where the seed is public), what training aimed
at, accuracy, certified accuracy by radius, and how the certified points fared under attack. Nothing private is read.
"""

import json
import sys
from pathlib import Path

from stobatch.config import PriorConfig, RunConfig
from stobatch.dp.guarantee import PrivacyGuarantee
from stobatch.runs import Run


def attacked(run: Run) -> dict[str, object] | None:
    """The falsifier's findings: accuracy under the worst attack, and whether a certified answer was changed."""
    if not run.has("scores"):
        return None
    scores = run.read("scores")
    (under,) = scores["under_attack"]
    (same,) = scores["same_images"]
    return {
        "attacks": under["attacks"],
        "steps": scores["settings"]["adaptive_steps"],
        "test_examples": under["rows"],
        "accuracy": {str(row["radius"]): row["value"] for row in under["accuracy"] if row["attack"] == "worst"},
        "certified_of_them": {
            kind: {f"{row['radius']:.6g}": row["value"] for row in rows} for kind, rows in same["certified"].items()
        },
        "broken_certificates": sum(flag["refutes"] == "proved" for flag in scores["flags"]),
    }


def alone(run: Run, kind: str) -> dict[str, object] | None:
    """What a run's prior is worth by itself, certified and attacked as the run was; None where it has no answer."""
    certificates = run.read("certificates").get("prior")
    if certificates is None:
        return None
    attacked = (run.read("scores").get("prior") if run.has("scores") else None) or {"accuracy": []}
    return {
        "weights_sha256": certificates["weights_sha256"],
        "test_examples": certificates["rows"],
        "clean": certificates["verified_accuracy"]["correct_without_abstaining"]["value"],
        "certified": {f"{row['radius']:.6g}": row["value"] for row in certificates["certified_accuracy"][kind]},
        "left": {f"{row['radius']:.6g}": row["value"] for row in attacked["accuracy"] if row["attack"] == "worst"},
    }


def record(path: Path) -> dict[str, object]:
    run = Run(path)
    document, training, certificates = run.read("config"), run.read("training"), run.read("certificates")
    config, claim = RunConfig.from_dict(document["config"]), PrivacyGuarantee.from_dict(run.read("plan")["guarantee"])
    guarantee = claim if config.seed is None else claim.with_public_seed()
    (kind,) = certificates["kinds"]
    prior = config.prior.to_dict()
    start: dict[str, object] = {}
    if prior:
        recipe_hash, own = config.replace(prior=PriorConfig()).training_hash, alone(run, kind["name"])
        start = {"recipe_hash": recipe_hash, "prior": prior, **({"prior_alone": own} if own else {})}
    return {
        "config_hash": document["training_hash"],
        **start,
        "seed": config.seed,
        "epsilon": round(guarantee.epsilon, 6),
        "delta": guarantee.delta,
        "neighbours": guarantee.neighbours,
        "status": guarantee.status,
        "status_with_secret_seeds": guarantee.secret_seed_status or guarantee.status,
        "train_radius": config.method.to_dict()["radius"],
        "smoothing_stddev": config.method.to_dict()["smoothing_stddev"],
        "network": config.model.architecture,
        "steps": training["steps"],
        "accounted_steps": training["accounted_steps"],
        "seconds": training.get("seconds_since_last_start"),
        "device": training["device"],
        "torch": training["torch"],
        "test_examples": certificates["rows"],
        "clean": certificates["verified_accuracy"]["correct_without_abstaining"]["value"],
        "certificate": {key: kind[key] for key in ("name", "status", "norm", "input_range", "failure_probability")},
        "certified": {f"{row['radius']:.6g}": row["value"] for row in certificates["certified_accuracy"][kind["name"]]},
        "attacked": attacked(run),
    }


if __name__ == "__main__":
    print(json.dumps([record(Path(path)) for path in sys.argv[1:]], indent=1))
