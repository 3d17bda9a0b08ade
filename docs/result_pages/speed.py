"""docs/results/speed.md: measured side by side with other libraries, also where they are faster."""

from __future__ import annotations

from .records import MADE, ROOT, lines_of, link, table

ATTACKS = ("ifgsm", "mim", "pgd")
MAIN, CLIPPING = "benchmarks/results/2026-11-15.txt", "benchmarks/results/2026-11-16-clipping.txt"
DISTRIBUTED = "benchmarks/results/2026-11-15-distributed.txt"


def per_core() -> str:
    """Return what two processes do per core on the published CIFAR-10 network."""
    (line,) = [line for line in (ROOT / DISTRIBUTED).read_text().splitlines() if line.startswith("published,")]
    return line.split("per core ")[1].split(" ")[0]


def page() -> str:
    found = lines_of(MAIN)
    ratio = {name: value for line in found for name, value in line["ratios"].items()}
    (long_attack,) = (line["steps"] for line in found if line["benchmark"] == "long attack")
    clipping = [line["ratios"] for line in lines_of(CLIPPING)]
    plain = sorted(line["one pass over plain gradient"] for line in clipping)
    formed = sorted(line["example by example over one pass"] for line in clipping)
    on_ours = [ratio[f"{attack}_fastest_peer_on_our_network_over_ours"] for attack in ATTACKS]
    slower = sorted(round(100 * (1 - value)) for value in on_ours)

    def attacks(kind: str, digits: int = 1) -> str:
        return " / ".join(f"{ratio[f'{attack}_fastest_peer_{kind}']:.{digits}f}" for attack in ATTACKS)

    rows = [
        ["fastest of foolbox, torchattacks and ART over I-FGSM / MIM / PGD (10 steps, 2,499 images), each handed the "
         "whole batch", attacks("over_ours")],
        ["the same with the batch cut to the cache for the others", attacks("batch_cut_over_ours")],
        ["**the same with the batch cut, and on our own network: here they are faster**",
         attacks("on_our_network_over_ours", 2)],
        ["the same with the whole batch, where every image breaks early and is let go", attacks("over_ours_all_broken")],
        ["crafting the fused ensemble (3 attacks, 2,499 images, 10 steps), over the bare passes it needs",
         ratio["ensemble_over_bare"]],
        ["naive loop over verified inference, per noisy pass", f"{ratio['naive_over_ours']:.1f}"],
        ["ART's randomised smoothing over verified inference: its default batch / batches of 400",
         f"{ratio['art_over_ours']:.1f} / {ratio['art_large_batches_over_ours']:.1f}"],
        ["the naive passes alone, given the same noise, over ours (identical votes)",
         f"{ratio['naive_over_ours_noise_given']:.1f}"],
        ["per-example clipped training (2,499 images) over plain SGD, which is handed the whole batch / cut to the cache",
         f"{ratio['time_ours_over_plain']} / {ratio['time_ours_over_plain_cut']}"],
        ["Opacus over our clipped training, whole batch: ghost clipping / its default",
         f"{ratio['opacus_ghost_over_ours']} / {ratio['opacus_default_over_ours']}"],
        ["the same with the batch cut to the cache for Opacus",
         f"{ratio['opacus_ghost_cut_over_ours']} / {ratio['opacus_default_cut_over_ours']}"],
        ["peak memory of our clipped training over plain SGD on the whole batch", ratio["memory_ours_over_plain"]],
        ["training with 5,000 canaries over training without (the demo's network)", ratio["canaries_over_none"]],
        ["two processes on two cores over one on one, per core, CIFAR-10 network "
         "([more](../distributed.md#how-it-scales))", per_core()],
        ["audit trainings of the published mechanism, one by one over side by side",
         ratio["one_by_one_over_side_by_side"]],
    ]  # fmt: skip
    return f"""# Speed

{MADE}

`make benchmarks` measures side by side, alternating, on the machine it runs on. On two CPU cores, the paper's MNIST network;
above 1 means that ours takes less time, unless the row says otherwise:

{table(["time of the first over time of the second", "ratio"], rows)}

**Where others are faster.** What is gained in attacks is gained by the network's first layer (a strided convolution as a plain
one over its phases, channels last) and by cutting batches. Give another library both, our network and a batch that fits
the cache, and it is {slower[0]} to {
        slower[-1]
    }% faster than our loop. Where images break early and are let go, ours is ahead again. Per-example clipping costs {
        100 * (ratio["time_ours_over_plain_cut"] - 1):.0f}% over plain SGD with the batch cut as
well. Fusing ReLU with pooling, folding normalisations, one thread per chunk and `torch.compile` were tried for attacks and
brought next to nothing.

The paper's networks as the library builds them take the same one pass, whatever their normalisation: {
        plain[0]:.2f} to {plain[-1]:.2f} times a
plain gradient of the same chunks, and {formed[0]:.1f} to {
        formed[-1]:.1f} times as fast as forming every example's gradient, which they
needed before (`benchmarks/dp/paper_networks.py`, {link(CLIPPING)}).

1,000 audit trainings take {ratio["published_seconds_of_1000"]} s (published, side by side) and {
        ratio["sound_seconds_of_1000"]
    } s (sound, every step attacked). On one H200, 2,000
steps of PGD on all 10,000 test images take {long_attack["2000"]["seconds"]:.1f} s, in {
        long_attack["2000"]["peak_mib"]:,} MiB where 20 steps take {
        long_attack["20"]["peak_mib"]:,} (`benchmarks/long_attack.py`).
Runs on this shared machine differ by 20%.

Records: {link(MAIN, CLIPPING, DISTRIBUTED)}.
"""
