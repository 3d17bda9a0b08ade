"""A comparison made by hand, with numbers that can be told apart."""

from __future__ import annotations

from typing import Any

from made_runs import FLAG, guarantee

RADII = (0.2, 0.05)


def spread(mean: float, by: float = 0.01) -> dict[str, Any]:
    return {
        "mean": mean,
        "stddev": by * 2**0.5,
        "min": mean - by,
        "max": mean + by,
        "per_seed": {"1": mean - by, "2": mean + by},
    }


def certified(rule: str, status: str, top: float) -> list[dict[str, Any]]:
    unit = {"norm": "linf", "input_range": "[-1, 1]", "failure_probability": None, "source": f"where {rule} comes from"}
    return [
        {"rule": rule, "status": status, **unit, "radius": radius, "test_examples": 200, **spread(top - radius)}
        for radius in RADII
    ]


def row(name: str, status: str, function: str, top: float, *certificates: dict[str, Any]) -> dict[str, Any]:
    words = {"none": "no privacy", "claimed": "claimed, not proved"}.get(status, status)
    return {
        "name": name,
        "label": f"{name} ({words}), {function.replace('_', ' ')}",
        "method": name.partition(" ")[0],
        "function": function,
        "guarantees": [{"seeds": [1, 2], **guarantee(status)}],
        "test_examples": 200,
        "clean": spread(top),
        "attacked": [
            {"protocol": protocol, "radius": radius, **spread(top - radius - lower)}
            for protocol, lower in (("published", 0.0), ("adaptive", 0.1))
            for radius in RADII
        ],
        "certified": list(certificates),
        "training_seconds": spread(12.5),
        "peak_memory_mb": spread(512.0),
        "peak_memory_of": ["process"],
        "devices": ["cpu"],
        "runs": {"1": f"{name}/seed-1", "2": f"{name}/seed-2"},
    }


def document() -> dict[str, Any]:
    claimed = (*certified("published", "claimed", 0.71), *certified("corrected", "proved", 0.64))
    rows = [
        row("open", "none", "single_pass", 0.985),
        row("paper ε=1.25", "claimed", "single_pass", 0.931),
        row("paper ε=1.25", "claimed", "vote", 0.872, *claimed),
        row("sound ε=1.25", "proved", "single_pass", 0.913, *certified("bounds", "proved", 0.82)),
    ]
    test = {"difference": 0.054, "low": 0.01, "high": 0.098, "p_value": 0.0321, "paired": True, "num_seeds": [2, 2]}
    pair = {"first": rows[0]["label"], "second": rows[1]["label"], "t_test": test}
    return {
        "norm": "linf",
        "input_range": "[-1, 1]",
        "radii": list(RADII),
        "seeds": [1, 2],
        "data": "mnist",
        "protocols": {name: f"what {name} means" for name in ("published", "adaptive")},
        "rows": rows,
        "flags": [{"row": "paper ε=1.25 (claimed, not proved)", "seed": 1, "refutes": None, **FLAG}],
        "t_tests": [
            {**pair, "measure": "clean", "radius": None},
            {**pair, "measure": "adaptive", "radius": 0.2},
        ],
        "t_tests_below_0.05": 2,
        "t_tests_below_0.05_by_chance": 0.1,
    }
