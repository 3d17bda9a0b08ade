"""T-tests over seeds between baselines of one budget: `baselines_t_tests.py > results/baselines_mnist_t_tests.json`."""

import json
from pathlib import Path

from stobatch.evaluation.statistics import t_tests_between

Measures = dict[tuple[str, float], float]
by_budget: dict[float, dict[str, dict[int, Measures]]] = {}
for record in json.loads((Path(__file__).parent / "baselines_mnist.json").read_text()):
    if record["status"] == "none":
        continue
    measures: Measures = {("clean", 0.0): record["clean"]["accuracy"]}
    for protocol, under in record["under_attack"].items():
        measures |= {(protocol, float(radius)): value for radius, value in under["accuracy"].items()}
    budget = round(record[f"{record['status']}_epsilon"], 2)
    by_budget.setdefault(budget, {}).setdefault(record["row"], {})[record["seed"]] = measures
tests = [
    {"first": first, "second": second, "measure": measure, "radius": radius or None, **test.to_dict()}
    for rows in by_budget.values()
    for first, second, (measure, radius), test in t_tests_between(rows)
]
print(json.dumps(tests, indent=1))
