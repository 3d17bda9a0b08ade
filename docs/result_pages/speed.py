"""docs/results/speed.md: measured side by side with other libraries, also where they are faster or an aim is missed."""

from __future__ import annotations

from dataclasses import dataclass

from .records import ROOT, lines_of, render, table

ATTACKS = {"fgsm": "FGSM", "ifgsm": "I-FGSM", "mim": "MIM", "pgd": "PGD", "apgd": "APGD", "square": "Square"}
RECORDS = "benchmarks/results"
DISTRIBUTED = f"{RECORDS}/2026-11-15-distributed.txt"
VIEWS = f"{RECORDS}/2026-11-17-views-step.txt"
FEW_IMAGES = f"{RECORDS}/2026-11-17-attacks-357-one-thread.txt"


@dataclass(frozen=True)
class Found:
    """The newest record of a number."""

    value: float
    day: str


@dataclass(frozen=True)
class Row:
    """A ratio, what it should be, and what was tried where it is not."""

    text: str
    keys: str | tuple[str, ...]
    aim: float | None = None
    below: bool = False
    """Whether smaller is better."""
    tried: str = ""

    def found(self, ratios: dict[str, Found]) -> list[Found | None]:
        return [ratios.get(key) for key in ((self.keys,) if isinstance(self.keys, str) else self.keys)]

    def misses(self, hit: Found | None) -> bool:
        if hit is None or self.aim is None:
            return False
        return hit.value > self.aim if self.below else hit.value < self.aim


def shown(hits: list[Found | None]) -> str:
    return " / ".join("–" if hit is None else f"{hit.value:.2f}" for hit in hits)


def names() -> list[str]:
    """Return the records, oldest first: their names begin with the day."""
    return sorted(f"{RECORDS}/{path.name}" for path in (ROOT / RECORDS).glob("*.txt"))


def newest() -> dict[str, Found]:
    return {
        key: Found(value, name.removeprefix(f"{RECORDS}/")[:10])
        for name in names()
        for line in lines_of(name)
        for key, value in line.get("ratios", {}).items()
    }


_TRIED = (
    "a thread for each piece of the batch, a folded network, kernels with full vectors; most of FGSM is its one pass, "
    "and Square starts its threads for each query; a batch that is cut for them fits the cache as ours does"
)


def attack_rows() -> list[Row]:
    kinds = {
        "whole batch": ("over_ours", 2.5),
        "batch cut to the cache for them": ("batch_cut_over_ours", 1.8),
        "batch cut, and our own network handed to them": ("on_our_network_over_ours", 1.1),
    }
    found, several = [], " / ".join(ATTACKS.values())
    for kind, (part, aim) in kinds.items():
        text, keys = f"fastest of three libraries over {several}, {kind}", [f"{a}_fastest_peer_{part}" for a in ATTACKS]
        found.append(Row(text, tuple(keys), aim, tried=_TRIED))
        found.append(Row(f"{text}; one thread for all, processor time", tuple(f"{key}_on_one_thread" for key in keys)))
    return found


METHODS = ("published", "sound", "dpsgd")
BUDGETS = (64, 512)
VERBS = ("train", "certify", "attack", "evaluate", "audit", "predict", "verify", "report", "export")


def memory_rows() -> list[Row]:
    what = f"memory of {' / '.join(VERBS)} above an idle process with the data, over `machine.memory_mb`"
    return [
        Row(
            f"{what} = {budget}: {method}", tuple(f"{verb}_memory_over_{budget}_{method}" for verb in VERBS), 1.25,
            below=True,
            tried="archives are unpacked into their place, test images pass in as many as fit, the oracle of clipping "
            "forms one gradient at a time; slopes are climbed without PyTorch's compiler, "
            "`export` is held against a process that has imported it; of what training takes half is freed memory "
            "that the C library keeps, and to keep less makes steps a fifth slower",
        )
        for method in METHODS for budget in BUDGETS
    ]  # fmt: skip


ROWS = (
    *attack_rows(),
    Row("the same, PGD, every image breaks early and is let go", "pgd_fastest_peer_over_ours_all_broken"),
    Row("crafting the fused ensemble over the bare passes it needs", "ensemble_over_bare", 1.3, below=True),
    Row(
        "a published step in plain PyTorch, whole batch, over ours", "plain_step_over_ours", 3.0,
        tried="pieces in threads, a folded network; threads for gradients too, which helped on a loaded machine alone; "
        "the plain step has no privacy noise and no reconstruction loss; the row after the next is the floor: the most "
        "that passes alone could reach",
    ),
    Row("the same; one thread for both, processor time", "plain_step_over_ours_on_one_thread"),
    Row("the same over the passes of crafting alone, which no step can do without; one thread, processor time",
        "plain_step_over_its_passes_on_one_thread"),
    Row("a published step in plain PyTorch over ours, processor time of all threads", "plain_step_over_ours_processor"),
    Row("memory of our published step over the plain one", "memory_ours_over_plain_step", 0.33, below=True,
        tried="crafting in pieces of 300 rows; both keep the data, the weights and what PyTorch keeps"),
    Row("naive loop over verified inference, per noisy pass", "naive_over_ours", 2.3),
    Row("ART's randomised smoothing over verified inference, its default batch", "art_over_ours", 5.0,
        tried="noise shared by all inputs, normalised once for many draws, a thread for each part of the images; "
        "nearly all of what is left are the passes, a third of them one dense layer: another kernel for it would halve "
        "that, in other last bits than the deployed layer's; tiles of 25 to 200 rows are no faster"),
    Row("the same, batches of 400", "art_large_batches_over_ours", 4.0, tried="as above"),
    Row("certified images per second, over a plain vectorised CROWN's", "certified_per_second_over_plain_crown", 1.0,
        tried="cheaper bounds first, hidden values followed back where they fail, then slopes; ours pays for rounding"),
    Row("the same, without slopes", "certified_per_second_without_slopes_over_plain_crown"),
    Row("images certified by ours over those of the plain CROWN", "certified_ours_over_plain_crown", 1.0,
        tried="ours takes rounding off"),
    Row("the naive passes alone, given the same noise, over ours (identical votes)", "naive_over_ours_noise_given"),
    Row("per-example clipped training over plain SGD, whole batch", "time_ours_over_plain", below=True),
    Row("the same, batch cut to the cache for plain SGD", "time_ours_over_plain_cut", below=True),
    Row("Opacus, ghost clipping, over our clipped training, whole batch", "opacus_ghost_over_ours"),
    Row("the same, batch cut to the cache for it", "opacus_ghost_cut_over_ours"),
    Row("Opacus, its default, over our clipped training, whole batch", "opacus_default_over_ours"),
    Row("the same, batch cut to the cache for it", "opacus_default_cut_over_ours"),
    Row("peak memory of our clipped training over plain SGD on the whole batch", "memory_ours_over_plain", below=True),
    Row("forming every example's gradient over one pass, GroupNorm", "example by example over one pass", 10.0),
    Row("one clipped pass over a plain gradient, GroupNorm", "one pass over plain gradient", 1.7, below=True),
    *memory_rows(),
    Row("processor seconds of `stobatch plan` / `stobatch report`",
        ("plan_processor_seconds", "report_processor_seconds"), 2.0, below=True,
        tried="garbage is looked for seldom and not at the end, schemas are built when used, figures are drawn once, "
        "neither the accountant's library nor anything else imports scipy.stats; most of a plan is importing torch; a "
        "report draws and computes its numbers again besides"),
    Row("training with 5,000 canaries over training without", "canaries_over_none", below=True),
    Row("audit trainings one by one over side by side", "one_by_one_over_side_by_side"),
)  # fmt: skip


def per_core() -> str:
    """Return what two processes do per core on the published CIFAR-10 network."""
    (line,) = [line for line in (ROOT / DISTRIBUTED).read_text().splitlines() if line.startswith("published,")]
    return line.split("per core ")[1].split(" ")[0]


def few_images() -> str:
    """Return the three ratios of each attack on 357 images, where what is done once weighs more."""
    found = {key: value for line in lines_of(FEW_IMAGES) for key, value in line["ratios"].items()}
    texts = []
    for key, name in ATTACKS.items():
        keys = [f"{key}_fastest_peer_{part}over_ours_on_one_thread" for part in ("", "batch_cut_", "on_our_network_")]
        texts.append(f"{name} {' / '.join(format(found[each], '.2f') for each in keys)}")
    return ", ".join(texts)


def views_steps() -> list[tuple[float, float]]:
    """Return milliseconds of a plain step and of a clipped sum with four views, network by network."""
    times: dict[str, list[float]] = {"plain step, bfloat16": [], "clipped sum, bfloat16": []}
    for line in (ROOT / VIEWS).read_text().splitlines():
        for name, measured in times.items():
            if line.startswith(name):
                measured.append(float(line.removeprefix(name).split()[0]))
    return list(zip(*times.values(), strict=True))


def page() -> str:
    ratios = newest()
    measured = [(row, row.found(ratios)) for row in ROWS]
    days = {row.text: sorted({hit.day for hit in hits if hit is not None}) for row, hits in measured}
    missed = [(row, hits) for row, hits in measured if any(map(row.misses, hits))]
    lines = [
        (
            row.text,
            f"{shown(hits)}, **missed**" if (row, hits) in missed else shown(hits),
            "" if row.aim is None else f"{'≤' if row.below else '≥'} {row.aim:g}",
            ", ".join(days[row.text]) or "not yet",
        )
        for row, hits in measured
    ]
    everything = [line for name in names() for line in lines_of(name)]
    (long_attack,) = (line["steps"] for line in everything if line.get("benchmark") == "long attack")
    return render(
        "speed",
        day=max(day for found in days.values() for day in found),
        ratios_table=table(["time of the first over time of the second", "reached", "aimed at", "measured"], lines),
        missed=[f"{row.text} ({shown(hits)}; aim {row.aim:g}): {row.tried}" for row, hits in missed],
        seconds={key: ratios[f"{key}_seconds_of_1000"].value for key in ("published", "sound")},
        per_core=per_core(),
        long_attack=long_attack,
        views=views_steps(),
        few_images=few_images(),
        records=names(),
    )
