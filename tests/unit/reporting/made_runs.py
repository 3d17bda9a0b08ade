"""Run directories made by hand: every file a verb would write, with numbers that can be told apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from stobatch.files import write_tensors
from stobatch.runs import Run

HASH = "0123456789ab"
RADII = (0.05, 0.2, 0.6)
ATTACKS = {"published": ["fgsm", "ifgsm"], "adaptive": ["ifgsm", "madry"]}


def share(value: float, total: int = 200) -> dict[str, Any]:
    return {
        "value": value,
        "count": round(value * total),
        "total": total,
        "low": max(0.0, value - 0.0613),
        "high": min(1.0, value + 0.0437),
    }


def rows(protocol: str, function: str, top: float) -> list[dict[str, Any]]:
    """Accuracies that fall with the radius, a little different for each attack."""
    return [
        {
            "protocol": protocol,
            "function": function,
            "attack": attack,
            "radius": radius,
            "norm": "linf",
            "input_range": "[-1, 1]",
            **share(top - radius - 0.0123 * place),
        }
        for radius in RADII
        for place, attack in enumerate([*ATTACKS[protocol], "worst"])
    ]


def under_attack(protocol: str, function: str) -> dict[str, Any]:
    top = {"published": 0.97, "adaptive": 0.81}[protocol] - 0.1 * (function == "vote")
    rules = {"published": 0.76, "corrected": 0.72} if function == "vote" else {}
    return {
        "protocol": {"name": protocol, "meaning": f"what {protocol} means"},
        "function": function,
        "attacks": ATTACKS[protocol],
        "rows": 200,
        "clean_accuracy": share(0.975),
        "accuracy": rows(protocol, function, top),
        "certified_at_attacked": {rule: rows(protocol, function, value) for rule, value in rules.items()},
    }


def gaps(function: str) -> list[dict[str, Any]]:
    found = []
    for radius in RADII:
        first, second = (
            next(r for r in under_attack(p, function)["accuracy"] if (r["attack"], r["radius"]) == ("worst", radius))
            for p in ("published", "adaptive")
        )
        gap = first["value"] - second["value"]
        between = {"value": gap, "low": gap - 0.05, "high": gap + 0.05}
        shares = {"published": share(first["value"]), "adaptive": share(second["value"])}
        found.append({"radius": radius, **shares, "gap": between})
    return found


def same_images(function: str, rows: int) -> dict[str, Any]:
    """What `evaluate` leaves of the images that attacks and certificates have in common, with numbers of its own."""

    def falling(top: float) -> list[dict[str, Any]]:
        return [{"radius": radius, **share(top - radius, rows)} for radius in RADII]

    gap = {"value": 0.2, "low": 0.15, "high": 0.25}
    return {
        "function": function,
        "rows": rows,
        "clean_accuracy": share(0.935, rows),
        "attacked": {"published": falling(0.92), "adaptive": falling(0.72)},
        "gaps": [
            {"radius": radius, "published": share(0.92 - radius), "adaptive": share(0.72 - radius), "gap": gap}
            for radius in RADII
        ],
        "certified": {"corrected": falling(0.66)} if function == "vote" else {},
    }


def guarantee(status: str, epsilon: float = 1.25) -> dict[str, Any]:
    budget = {} if status == "none" else {f"{status}_epsilon": epsilon, f"{status}_delta": 0.0}
    return {
        **budget,
        "status": status,
        **({"void_reason": "public seed", "status_with_secret_seeds": "proved"} if status == "void" else {}),
        "neighbours": "replace-one",
        "unit": "training tuple",
        "source": "the paper's Theorem 4",
        "assumptions": ["the bound is enforced"],
        "objections": ["one draw of noise is shared"] if status == "claimed" else [],
    }


def kind(name: str, status: str) -> dict[str, Any]:
    return {
        "name": name,
        "function": "vote",
        "status": status,
        "source": f"where {name} comes from",
        "norm": "linf",
        "input_range": "[-1, 1]",
        "failure_probability": 0.05 if status == "proved" else None,
        "assumptions": ["exact arithmetic"] if status == "proved" else [],
    }


def certificates() -> dict[str, Any]:
    return {
        "config_hash": "ba9876543210",
        "training_hash": HASH,
        "settings": {"noise_draws": 300, "failure_probability": 0.05},
        "rows": 200,
        "seconds": 2.1,
        "kinds": [kind("published", "claimed"), kind("corrected", "proved")],
        "verified_accuracy": {name: share(0.66) for name in ("correct", "correct_without_abstaining", "abstained")},
        "certified_accuracy": {
            name: [{"radius": radius, **share(top - radius)} for radius in RADII]
            for name, top in (("published", 0.637), ("corrected", 0.6111))
        },
        "largest_radius": {"published": 0.0439, "corrected": 0.0978},
    }


FLAG = {
    "name": "zero gradients",
    "level": "warning",
    "raised_if": "more than 1% have none",
    "explanation": "Attacks cannot move there.",
    "remedy": "Use square.",
    "evidence": "2.0% of the test inputs",
}


def scores(functions: tuple[str, ...] = ("single_pass", "vote")) -> dict[str, Any]:
    return {
        "training_hash": HASH,
        "settings": {"norm": "linf", "radii": list(RADII), "adaptive_steps": 40, "noise_draws": None, "limit": None},
        "rows": 200,
        "norm": "linf",
        "input_range": "[-1, 1]",
        "guarantee": guarantee("claimed"),
        "clean_accuracy": share(0.975),
        "under_attack": [under_attack(protocol, function) for function in functions for protocol in ATTACKS],
        "gaps": {function: gaps(function) for function in functions},
        "flags": [FLAG],
        "images": {
            "file": "images.safetensors",
            "public": True,
            "attack": "madry",
            "labels": [0, 1],
            "predictions": {"clean": [0, 1], "0.2": [0, 0]},
        },
        "certificates": certificates(),
    }


def config(seed: int | None = None) -> dict[str, Any]:
    settings = {"method": {"name": "stobatch"}, "data": {"name": "mnist"}, "model": {}, "training": {}, "seed": seed}
    sizes = {"input_shape": [1, 8, 8], "num_classes": 2, "num_train": 1000, "num_test": 200}
    dataset = {"name": "mnist", **sizes, "class_names": ["cat", "dog"]}
    return {"training_hash": HASH, "content_hash": "ffffffffffff", "config": settings, "dataset": dataset}


PLAN = {
    "guarantee": guarantee("claimed"),
    "rows": [{"name": "batch size", "symbol": "m", "value": 2499, "formula": "", "paper": "Appendix P"}],
}
TRAINING = {
    "steps": 4002,
    "seconds_since_last_start": 324.1,
    "device": "cuda",
    "torch": "2.11.0",
    "history": [{"step": step, "test_accuracy": 0.9 + step / 10_000} for step in (200, 400)],
}


def make(path: Path, found: dict[str, Any] | None = None, settings: dict[str, Any] | None = None) -> Run:
    """A run with all its public files, around the scores and the configuration given."""
    run, found = Run(path), found or scores()
    run.write("config", settings or config())
    run.write("plan", PLAN)
    run.write("training", TRAINING)
    if found["certificates"]:
        run.write("certificates", found["certificates"])
    run.write("scores", found)
    pixels = torch.arange(2 * 1 * 8 * 8, dtype=torch.uint8).reshape(2, 1, 8, 8)
    tensors = {"clean": pixels, "0.2": 255 - pixels}
    write_tensors(path / "images.safetensors", tensors, {"config_hash": HASH}, private=False)
    return run


def bound(epsilon: float, assumes: str = "", delta: float = 0.0) -> dict[str, Any]:
    return {
        "epsilon_at_least": epsilon,
        "at_delta": delta,
        "confidence": 0.95,
        "name": "poisson_family" if assumes else "clopper_pearson",
        "assumes": assumes,
        "details": {"false_positives": 11, "true_positives": 160, "direction": "without"},
    }


def finding(instrument: str, verdict: str, about: str = "privacy", **details: Any) -> dict[str, Any]:
    return {
        "instrument": instrument,
        "about": about,
        "claim": "claimed ε = 1.25, NOT a proven guarantee",
        "claim_status": "claimed",
        "verdict": verdict,
        "statement": f"what {instrument} found about {about}",
        "threat_model": f"what the attacker of {instrument} sees",
        "attack": f"how {instrument} attacks",
        "confidence": 0.95,
        "details": details,
        "evidence": f"evidence/{instrument}.json",
    }


def of_release(verdict: str, epsilon: float = 4.91) -> dict[str, Any]:
    budget = {"claimed_epsilon": 1.25, "claimed_delta": 0.0, "neighbours": "replace-one"}
    return finding(
        "release", verdict, release="perturbed inputs", source="Lemma 3", trials=2000, right=1999, **budget,
        bounds=[bound(epsilon)],
    )  # fmt: skip


def of_many_runs(verdict: str, epsilon: float = 3.65) -> dict[str, Any]:
    budget = {"claimed_epsilon": 1.25, "claimed_delta": 0.0, "neighbours": "replace-one"}
    spread = {"edges": [-2.0, -1.0, 0.0, 1.0, 2.0], "without": [4, 9, 2, 0], "with": [0, 1, 8, 6]}
    bounds = [bound(epsilon / 2), bound(epsilon, "the noise is as its proof says")]
    return finding("many_runs", verdict, **budget, trainings=640, bounds=bounds, histogram=spread)


def of_membership(verdict: str, epsilon: float = 0.21, claimed: float | None = 1.25) -> dict[str, Any]:
    rates = {"0.01": {"value": 0.0436, "low": 0.04, "high": 0.05}}
    return finding(
        "membership", verdict, neighbours="replace-one", auroc=0.853, auroc_interval=[0.848, 0.858],
        tpr_at=rates, fpr_at={"0.01": {"value": 0.011, "low": 0.009, "high": 0.013}}, confidence=0.95, num_shadows=32,
        num_targets=32, num_examples=500, variance="pooled",
        claimed_epsilon=claimed, claimed_delta=1e-5, bounds=[bound(epsilon, delta=1e-5)],
        roc={"false_positive_rate": [0.002, 0.02, 0.2, 1.0], "true_positive_rate": [0.0, 0.1, 0.5, 1.0]},
    )  # fmt: skip


def of_certificates(verdict: str, kind: str = "corrected", broken: int = 0, attacked: int = 50) -> dict[str, Any]:
    return finding(
        "certificates", verdict, kind,
        certified=140 if attacked else 0, attacked=attacked, broken=broken, broken_by={"madry": broken},
    )  # fmt: skip


def audit(*findings: dict[str, Any]) -> dict[str, Any]:
    refuted = any(one["verdict"] == "refuted" for one in findings)
    return {"training_hash": HASH, "verdict": "refuted" if refuted else "consistent", "findings": list(findings)}


def audit_of_everything() -> dict[str, Any]:
    instruments = of_release, of_many_runs, of_membership, of_certificates
    return audit(*(instrument("refuted") for instrument in instruments))
