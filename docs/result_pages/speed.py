"""docs/results/speed.md: measured side by side with other libraries, also where they are faster."""

from __future__ import annotations

from .records import ROOT, Record, lines_of, render, table

ATTACKS = ("ifgsm", "mim", "pgd")
MAIN, CLIPPING = "benchmarks/results/2026-11-15.txt", "benchmarks/results/2026-11-16-clipping.txt"
VIEWS = "benchmarks/results/2026-11-17-views-step.txt"
DISTRIBUTED = "benchmarks/results/2026-11-15-distributed.txt"


def per_core() -> str:
    """Return what two processes do per core on the published CIFAR-10 network."""
    (line,) = [line for line in (ROOT / DISTRIBUTED).read_text().splitlines() if line.startswith("published,")]
    return line.split("per core ")[1].split(" ")[0]


def views_steps() -> list[tuple[float, float]]:
    """Return milliseconds of a plain step and of a clipped sum with four views, network by network."""
    times: dict[str, list[float]] = {"plain step, bfloat16": [], "clipped sum, bfloat16": []}
    for line in (ROOT / VIEWS).read_text().splitlines():
        for name, found in times.items():
            if line.startswith(name):
                found.append(float(line.removeprefix(name).split()[0]))
    return list(zip(*times.values(), strict=True))


def ratios() -> dict[str, float]:
    return {name: value for line in lines_of(MAIN) for name, value in line["ratios"].items()}


def rows(ratio: Record) -> list[tuple[str, object]]:
    """Return what was measured side by side, also where others are faster."""

    def attacks(kind: str, digits: int = 1) -> str:
        return " / ".join(f"{ratio[f'{attack}_fastest_peer_{kind}']:.{digits}f}" for attack in ATTACKS)

    def both(first: str, second: str, digits: int = 2) -> str:
        return f"{ratio[first]:.{digits}f} / {ratio[second]:.{digits}f}"

    attacked = "fastest of foolbox, torchattacks and ART over I-FGSM / MIM / PGD (10 steps, 2,499 images)"
    return [
        (f"{attacked}, each handed the whole batch", attacks("over_ours")),
        ("the same with the batch cut to the cache for the others", attacks("batch_cut_over_ours")),
        (
            "**the same with the batch cut, and on our own network: here they are faster**",
            attacks("on_our_network_over_ours", 2),
        ),
        (
            "the same with the whole batch, where every image breaks early and is let go",
            attacks("over_ours_all_broken"),
        ),
        (
            "crafting the fused ensemble (3 attacks, 2,499 images, 10 steps), over the bare passes it needs",
            ratio["ensemble_over_bare"],
        ),
        ("naive loop over verified inference, per noisy pass", f"{ratio['naive_over_ours']:.1f}"),
        (
            "ART's randomised smoothing over verified inference: its default batch / batches of 400",
            both("art_over_ours", "art_large_batches_over_ours", 1),
        ),
        (
            "the naive passes alone, given the same noise, over ours (identical votes)",
            f"{ratio['naive_over_ours_noise_given']:.1f}",
        ),
        (
            "per-example clipped training (2,499 images) over plain SGD, which is handed the whole batch / cut to the "
            "cache",
            both("time_ours_over_plain", "time_ours_over_plain_cut"),
        ),
        (
            "Opacus over our clipped training, whole batch: ghost clipping / its default",
            both("opacus_ghost_over_ours", "opacus_default_over_ours"),
        ),
        (
            "the same with the batch cut to the cache for Opacus",
            both("opacus_ghost_cut_over_ours", "opacus_default_cut_over_ours"),
        ),
        ("peak memory of our clipped training over plain SGD on the whole batch", ratio["memory_ours_over_plain"]),
        ("training with 5,000 canaries over training without (the demo's network)", ratio["canaries_over_none"]),
        (
            "two processes on two cores over one on one, per core, CIFAR-10 network "
            "([more](../distributed.md#how-it-scales))",
            per_core(),
        ),
        (
            "audit trainings of the published mechanism, one by one over side by side",
            ratio["one_by_one_over_side_by_side"],
        ),
    ]


def page() -> str:
    ratio = ratios()
    clipping = [line["ratios"] for line in lines_of(CLIPPING)]
    (long_attack,) = (line["steps"] for line in lines_of(MAIN) if line["benchmark"] == "long attack")
    faster = [1 - ratio[f"{attack}_fastest_peer_on_our_network_over_ours"] for attack in ATTACKS]
    return render(
        "speed",
        ratios_table=table(["time of the first over time of the second", "ratio"], rows(ratio)),
        faster=sorted(round(100 * share) for share in faster),
        ratio=ratio,
        plain=sorted(line["one pass over plain gradient"] for line in clipping),
        formed=sorted(line["example by example over one pass"] for line in clipping),
        long_attack=long_attack,
        views=views_steps(),
    )
