"""What audits cost: trainings per second, one by one and side by side, and a training with canaries over one without.

    OMP_NUM_THREADS=2 python benchmarks/auditing.py

Alternating runs, medians; the ratios are what counts.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch

import stobatch
from stobatch.auditing.audit import open_subject
from stobatch.auditing.many_runs import Trials
from stobatch.auditing.neighbours import worst_case
from stobatch.loading import make_network
from stobatch.methods import method_of
from stobatch.runs import Run
from stobatch.training.loop import OneByOne
from stobatch_recipes import recipe

MODELS, ROUNDS = 32, 5
ASK = {"audit.instruments": ["one_run"]}


def seconds(call: object) -> float:
    started = time.perf_counter()
    call()  # type: ignore[operator]
    return time.perf_counter() - started


def published() -> dict[str, float]:
    """The published mechanism's stack against its own trainings one by one."""
    audited = open_subject(Run(Path(tempfile.mkdtemp()) / "run"), recipe("audit.published"), seed=1)
    pair = worst_case(audited.data().train, audited.claim.neighbours)
    plan, method = audited.plan_for(pair.size), method_of(audited.config)

    def stack() -> None:
        seeds = [audited.root.child("benchmark", index) for index in range(MODELS)]
        members = torch.stack([pair.members(index % 2) for index in range(MODELS)])
        networks = [make_network(audited.config, audited.info, each, None) for each in seeds]
        models = method.stack(audited.config, plan, networks, pair.pool, members, seeds)
        assert models is not None
        models.train(lambda share: None)

    def one_by_one() -> None:
        seeds = [audited.root.child("benchmark", index) for index in range(MODELS // 8)]
        records = pair.pool.take(pair.without)
        OneByOne(audited.config, (audited.fresh(plan, records, each) for each in seeds), len(seeds)).train(
            lambda share: None
        )

    together, apart = [], []
    for _ in range(ROUNDS):
        together.append(seconds(stack) / MODELS)
        apart.append(seconds(one_by_one) / (MODELS // 8))
    side, single = statistics.median(together), statistics.median(apart)
    print(f"published, {MODELS} models side by side: {1000 * side:.1f} ms a training, 1,000 in {1000 * side:.0f} s")
    print(f"published, one by one: {1000 * single:.1f} ms a training; side by side is {single / side:.1f} times faster")
    return {"one_by_one_over_side_by_side": round(single / side, 1), "published_seconds_of_1000": round(1000 * side)}


def sound() -> dict[str, float]:
    """The sound method's trainings, each step attacked."""
    audited = open_subject(Run(Path(tempfile.mkdtemp()) / "run"), recipe("audit.sound"), seed=1)
    pair = worst_case(audited.data().train, audited.claim.neighbours)
    trials = Trials(audited, audited.plan_for(pair.size), pair)
    each = statistics.median(
        seconds(lambda turn=turn: trials.rows(MODELS * turn, MODELS, lambda share: None)) / MODELS
        for turn in range(ROUNDS)
    )
    print(f"sound, every step attacked: {1000 * each:.1f} ms a training, 1,000 in {1000 * each:.0f} s")
    return {"sound_seconds_of_1000": round(1000 * each)}


def one_run() -> dict[str, float]:
    """The demo's training with 5,000 canaries and its audit, over the same training without."""
    base = recipe("demo").override_all({"training.steps": 40, "training.monitor_every": 40})
    folder, plain, planted, audits = Path(tempfile.mkdtemp()), [], [], []
    for turn in range(ROUNDS):
        for num, times in ((0, plain), (5000, planted)):
            out = folder / f"{num}-{turn}"
            config = base.override("canaries.num", num)
            times.append(seconds(lambda config=config, out=out: stobatch.train(config, out, quiet=True)))
        audits.append(seconds(lambda out=out: stobatch.audit(out, overrides=ASK, quiet=True)))
    shutil.rmtree(folder)
    ratios = [with_ / without for with_, without in zip(planted, plain, strict=True)]
    print(f"one run: training with 5,000 canaries over without, 40 steps: {statistics.median(ratios):.2f}")
    print(f"one run: its audit takes {statistics.median(audits):.1f} s, whatever the training takes")
    return {"canaries_over_none": round(statistics.median(ratios), 2)}


if __name__ == "__main__":
    print(json.dumps({"benchmark": "audits", "ratios": published() | sound() | one_run()}))
