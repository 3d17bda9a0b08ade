"""docs/results/published.md: what the published mechanism gives, by its own measure and by an adversary's."""

from __future__ import annotations

from itertools import pairwise

from .records import Record, percent, record, records, render, slashed, table

RADII = ("0.1", "0.2", "0.4", "0.6")
PROTOCOLS = ("published", "adaptive")
HEADER = (
    "privacy (in brackets: with secret seeds)",
    "configuration",
    "clean",
    "attacked as published, at 0.1 / 0.2 / 0.4 / 0.6",
    "attacked adaptively, at the same radii",
    "verified inference (n = 2,000, ψ = 2): correct / abstained",
    "certified at 0.05: published rule (claimed) / corrected (proved)",
)


def worst(run: Record, protocol: str, function: str = "single_pass") -> dict[str, float]:
    (under,) = (u for u in run["under_attack"] if (u["protocol"], u["function"]) == (protocol, function))
    accuracy: dict[str, float] = under["accuracy"]["worst"]
    return {"clean": under["clean"], **accuracy}


def row(run: Record) -> list[str]:
    return [
        f"void (claimed, not proved, ε = {run['claimed_epsilon']:.1f})",
        f"`{run['training_hash']}`",
        percent(run["clean"]),
        *(slashed(worst(run, protocol)[radius] for radius in RADII) for protocol in PROTOCOLS),
        slashed((run["verified"], run["abstained"])),
        slashed(run["certified"][rule]["0.05"] for rule in ("published", "corrected")),
    ]


def noise_row(run: Record) -> list[str]:
    stopped = " (stopped)" if "stopped" in run.get("incomplete", "") else ""
    accuracy = run.get("test_accuracy", run.get("history", [{}])[-1].get("test_accuracy"))
    words = run["noise"].replace("chi1", "χ1").replace("chi2", "χ2").replace("chi3", "χ3").replace("epsilon", "ε")
    return [words, f"{run['steps']:,}{stopped}", percent(accuracy)]


def adam_row(run: Record) -> list[str]:
    return [noise_row(run)[0], f"{run['learning_rate']:g}", *noise_row(run)[1:]]


def curve(run: Record, steps: tuple[int, ...]) -> str:
    """The accuracy of a training at some of its steps."""
    accuracy = {point["step"]: percent(point["test_accuracy"]) for point in run["history"]}
    return table(("step", *(f"{step:,}" for step in steps)), [["test accuracy", *(accuracy[step] for step in steps)]])


def falls(run: Record) -> int:
    """How often the accuracy fell by more than ten points from one look to the next."""
    seen = [point["test_accuracy"] for point in run["history"]]
    return sum(after < before - 0.1 for before, after in pairwise(seen))


def page() -> str:
    runs = records("paper_mnist")
    seeds = [*runs, *records("paper_mnist_seeds")]
    tests = record("paper_mnist_t_tests")["comparisons"]
    (partial,) = records("paper_cifar10_partial")
    noises = sorted(records("paper_cifar10_noises"), key=lambda run: (run["noise"], run["steps"]))
    (without_labels,) = (run for run in noises if run["steps"] == 3500)
    adam = records("paper_cifar10_adam")
    (whole,) = (run for run in adam if run["steps"] == run["steps_of_the_recipe"])
    (released,) = records("paper_cifar10_released")
    (no_labels,) = (run for run in adam if run["noise"].endswith("chi3 off"))
    rounded, exact = sorted(records("paper_cifar10_400_steps"), key=lambda run: str(run["precision"]))
    return render(
        "published",
        mnist_table=table(HEADER, map(row, runs)),
        one={protocol: worst(runs[1], protocol) for protocol in PROTOCOLS},
        vote={protocol: worst(runs[2], protocol, "vote") for protocol in PROTOCOLS},
        clean={
            epsilon: sorted(run["clean"] for run in seeds if run["claimed_epsilon"] == epsilon)
            for epsilon in (0.2, 2.0)
        },
        smallest=min(tests, key=lambda test: test["t_test"]["p_value"]),
        num_tests=len(tests),
        adaptive=min(test["t_test"]["p_value"] for test in tests if test["protocol"] == "adaptive"),
        repeat=slashed(run["clean"] for run in records("paper_mnist_repeat")),
        partial=partial,
        on_the_way=[point["test_accuracy"] for point in partial["history"]],
        noise_table=table(("noise", "steps", "test accuracy"), map(noise_row, noises)),
        without_labels=without_labels,
        blind=worst(without_labels, "published")["0.05"],
        aimed=worst(without_labels, "adaptive")["0.05"],
        released=released,
        released_best=max(point["test_accuracy"] for point in released["history"]),
        released_curve=curve(released, (50, 1000, *range(2000, 16_001, 2000), released["steps"])),
        released_under={protocol: worst(released, protocol) for protocol in PROTOCOLS},
        adam_table=table(("noise", "rate", "steps", "test accuracy"), map(adam_row, adam)),
        adam_curve=curve(whole, (1000, *range(2000, 16_001, 2000), whole["steps"])),
        whole=whole,
        whole_best=max(point["test_accuracy"] for point in whole["history"]),
        whole_falls=falls(whole),
        under={protocol: worst(whole, protocol) for protocol in PROTOCOLS},
        no_labels=no_labels,
        rounded=rounded,
        exact=exact,
    )
