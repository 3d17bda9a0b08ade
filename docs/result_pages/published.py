"""docs/results/published.md: what the published mechanism gives, by its own measure and by an adversary's."""

from __future__ import annotations

from .records import MADE, VOID, Record, link, percent, record, records, slashed, table

RADII = ("0.1", "0.2", "0.4", "0.6")


def worst(run: Record, protocol: str, function: str = "single_pass") -> dict[str, float]:
    (under,) = (u for u in run["under_attack"] if (u["protocol"], u["function"]) == (protocol, function))
    accuracy: dict[str, float] = under["accuracy"]["worst"]
    return {"clean": under["clean"], **accuracy}


def row(run: Record) -> list[str]:
    return [
        f"void (claimed, not proved: {run['claimed_epsilon']:.1f})",
        f"`{run['training_hash']}`",
        percent(run["clean"]),
        *(slashed(worst(run, protocol)[radius] for radius in RADII) for protocol in ("published", "adaptive")),
        slashed((run["verified"], run["abstained"])),
        slashed(run["certified"][rule]["0.05"] for rule in ("published", "corrected")),
    ]


def page() -> str:
    runs = records("paper_mnist")
    seeds = [*runs, *records("paper_mnist_seeds")]
    clean = {
        epsilon: sorted(100 * run["clean"] for run in seeds if run["claimed_epsilon"] == epsilon)
        for epsilon in (0.2, 2.0)
    }
    tests = record("paper_mnist_t_tests")["comparisons"]
    smallest = min(tests, key=lambda test: test["t_test"]["p_value"])
    adaptive = min(test["t_test"]["p_value"] for test in tests if test["protocol"] == "adaptive")
    votes = {protocol: worst(runs[2], protocol, "vote") for protocol in ("published", "adaptive")}
    repeat = " / ".join(f"{100 * run['clean'] + 1e-9:.1f}" for run in records("paper_mnist_repeat"))
    (partial,) = records("paper_cifar10_partial")
    on_the_way = [100 * point["test_accuracy"] for point in partial["history"]]
    rounded, exact = sorted(records("paper_cifar10_400_steps"), key=lambda run: run["precision"])
    return f"""# What the published mechanism gives

{MADE}

Its ε is *claimed*, never proved: [why](../guarantees/published-privacy.md). As soon as a run is audited it is *refuted*:
[audits](audits.md).

## MNIST

{VOID}
Appendix P's settings, 4,002 steps, one seed, the whole test set of 10,000 images; radii are l∞ over [-1, 1].

{
        table(
            [
                *("ε (with secret seeds)", "configuration", "clean", "attacked as published, at 0.1 / 0.2 / 0.4 / 0.6"),
                *("attacked adaptively, at the same radii",),
                *("verified inference (n = 2,000, ψ = 2): correct / abstained",),
                *("certified at 0.05: published rule (claimed) / corrected (proved)",),
            ],
            map(row, runs),
        )
    }

*Attacked as published* repeats the released code's test: FGSM, I-FGSM, MIM and Madry on a noise-free copy of the network, 10
steps, the worst of them; the paper reports 82.7% for it at ε = 0.2 and radius 0.2. *Attacked adaptively* is the worst of
seven attacks on the deployed function itself (40 steps, restarts). At radius 0.4 the first shows {
        percent(worst(runs[1], "published")["0.4"])
    } and the second
leaves {
        percent(worst(runs[1], "adaptive")["0.4"])
    } (ε = 1.0): the difference is the protocol, not the model. At ε = 0.2 the evaluation raises a flag on
the published protocol by itself: there a single step breaks more images than an iterated attack.

*Clean* accuracy does not fall with ε because the mechanism adds the same noise to every image, a constant that
normalisation subtracts: here by [public reference images](../decisions/0001-reference-normalisation.md), in the authors' code
by batch statistics. That is also why the claim is false. Over three seeds it is {clean[0.2][0]:.1f} to {
        clean[0.2][-1]:.1f}% at ε = 0.2 and {clean[2.0][0]:.1f} to
{clean[2.0][-1]:.1f}% at ε = 2.0. Under the published protocol *more* noise even looks more robust: at radius {
        smallest["radius"]
    } the smaller ε is ahead
by {100 * smallest["t_test"]["difference"]:.1f} points (two-tailed paired t-test over 3 seeds, p = {
        smallest["t_test"]["p_value"]:.4f}, the smallest of {len(tests)}); under the adaptive protocol no
difference at any radius is significant (p >= {adaptive:.3f}; {
        link("results/paper_mnist_seeds.json", "results/paper_mnist_t_tests.json")
    }).

*Verified inference* adds fresh noise that this network never saw, so it votes badly: at ε = 0.2 and 1.0 these two models give
every test image the same label (`share_of_commonest_prediction` in the records), and a constant label is easy to certify
and worthless. At ε = 2.0 its vote falls from {percent(votes["published"]["clean"])} (1,000 images, 1,000 draws) to {
        percent(votes["published"]["0.2"])
    } under the published protocol at
radius 0.2, and to {
        percent(votes["adaptive"]["0.2"])
    } under an attack in expectation over its noise. The paper's certified 84.3% at 0.05 and 72.4%
at 0.6 (ε = 1.0, measured on attacked inputs) cannot come from its own formula: whatever θ1 is, it certifies nothing beyond
0.121 there, even with all votes for one class ([the published radius](../guarantees/published-radius.md)).

An earlier version of the code, same settings and seed but other draws in certification, gave {repeat}% clean
({link("results/paper_mnist_repeat.json")}); a GPU's sums are not reproducible to the bit. torch 2.11 on one H200, 5.4
minutes a training and 5.2 minutes an evaluation with three at once:

<!-- not run: half an hour on a GPU -->
```sh
stobatch train --recipe published.mnist --set method.epsilon=EPSILON --set machine.memory_mb=8192 --seed 1 --device cuda --out RUN
stobatch certify RUN --device cuda
stobatch evaluate RUN --device cuda --set evaluation.vote_limit=1000 --set evaluation.vote_draws=1000
python results/collect.py RUN... > results/paper_mnist.json
```

Record: {link("results/paper_mnist.json")}.

## CIFAR-10: not whole

Experiment with a public seed, void as above. Of the {partial["steps_of_the_recipe"]:,} steps of `published.cifar10` {
        partial["steps"]:,} were made, at ε = {partial["claimed_epsilon"]:g} (claimed) and in
{partial["precision"]}: {100 * partial["test_accuracy"]:.1f}% of {
        partial["accuracy_of_test_examples"]:,} test images, between {min(on_the_way):.1f} and {
        max(on_the_way):.1f}% all the way, one label for every input. It had learnt
nothing, so attacks on {partial["test_examples"]} images left what there was, {percent(partial["clean"])}. After {
        exact["steps"]
    } steps {rounded["precision"]} had {100 * rounded["test_accuracy"]:.1f}% and {exact["precision"]} {
        100 * exact["test_accuracy"]:.1f}%. The
recipes at ε = 6 and 10, and Tiny ImageNet, were not run. Records: {
        link("results/paper_cifar10_partial.json", "results/paper_cifar10_400_steps.json")
    }.
"""
