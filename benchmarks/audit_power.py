"""How often the privacy instruments catch each broken control, and raise a false alarm on the sound method.

    python benchmarks/audit_power.py --workers 16 >> results/audit_power.jsonl

Every audit is a real one: trainings by the library's own steps, scores by its own attack, the verdict of its own
finding. many_runs: so many trainings per audit (recipe audit.NAME, ε = 3 claimed). one_run: one training per audit with
20,000 gradient canaries in a network of 22,000 parameters. certificates: the test beds of
`tests/support/broken_certificates.py`, a new one for each seed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

import numpy as np
import torch

import stobatch
from stobatch.auditing.audit import open_subject
from stobatch.auditing.certificate_attacks import AttackedCertificates, FalsifierSettings
from stobatch.auditing.falsifier import falsify, finding_of, nearest
from stobatch.auditing.many_runs import Trials, many_runs_finding
from stobatch.auditing.neighbours import Pair, worst_case
from stobatch.auditing.subject import Audited
from stobatch.dp.plan import Plan
from stobatch.runs import Run
from stobatch.types import Verdict
from stobatch_recipes import recipe

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.broken_certificates import CONTROLS, certify_apart

MANY_RUNS = {"sound": 600, "half_noise": 600, "shared_noise": 300, "no_clipping": 100}
"""Trainings of one audit."""
CANARIES = {"canaries.num": 20_000, "model.architecture": "linear 300, relu, linear"}


@cache
def prepared(name: str, seed: int) -> tuple[Audited, Pair, Plan]:
    folder = Run(Path(tempfile.mkdtemp()) / name)
    audited = open_subject(folder, recipe(f"audit.{name}"), seed=seed)
    pair = worst_case(audited.data().train, audited.claim.neighbours)
    return audited, pair, audited.plan_for(pair.size)


def scores(job: tuple[str, int, int, int]) -> list[float]:
    name, seed, start, count = job
    audited, pair, plan = prepared(name, seed)
    found: list[float] = Trials(audited, plan, pair).rows(start, count, lambda share: None)["score"]
    return found


def one_run(job: tuple[str, int]) -> tuple[bool, list[float]]:
    name, seed = job
    out = Path(tempfile.mkdtemp())
    config = recipe(f"audit.{name}").override_all({**CANARIES, "seed": seed, "audit.instruments": ["one_run"]})
    stobatch.train(config, out / "run", quiet=True)
    (finding,) = stobatch.audit(out / "run", quiet=True).findings
    shutil.rmtree(out)
    return finding.verdict is Verdict.REFUTED, [bound.epsilon for bound in finding.bounds]


FALSIFIER = FalsifierSettings(
    num_inputs=24, steps=4, restarts=1, num_aims=1, queries=3, random_points=3, noise_draws=4, judging_draws=1000
)
"""The test beds have one way to break: little is enough to find it."""


def certificates(job: tuple[str, int]) -> tuple[bool, bool, float]:
    """Whether the broken certificate and its correct twin are refuted, and what both cost."""
    name, seed = job
    bench, started, found = CONTROLS[name](seed), time.perf_counter(), []
    for verifier in (bench.broken, bench.sound):
        stream, kind = torch.Generator().manual_seed(seed), verifier.kinds[-1]
        apart = kind.function == "vote"
        columns = (
            certify_apart(verifier, bench.inputs, stream)
            if apart
            else dict(verifier.verify(bench.inputs, stream).columns())
        )
        whole = AttackedCertificates.of(kind, bench.inputs, columns["label"], columns)
        rows = nearest(verifier, whole, FALSIFIER, stream)
        made = falsify(verifier, whole.part(rows), FALSIFIER, stream)
        finding = finding_of(kind, made.columns, FALSIFIER, certified=len(rows), num_kinds=len(verifier.kinds))
        found.append(finding.verdict is Verdict.REFUTED)
    return found[0], found[1], time.perf_counter() - started


def line(**values: object) -> None:
    print(json.dumps(values), flush=True)


def summary(bounds: list[list[float]]) -> dict[str, list[float]]:
    return {
        "median_bounds": np.median(bounds, 0).round(3).tolist(),
        "smallest_bounds": np.min(bounds, 0).round(3).tolist(),
        "largest_bounds": np.max(bounds, 0).round(3).tolist(),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--audits", type=int, default=100)
    parser.add_argument("--one-run-audits", type=int, default=300)
    parser.add_argument("--seed", type=int, default=777)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with multiprocessing.get_context("spawn").Pool(given.workers, torch.set_num_threads, (1,)) as pool:
        for name in CONTROLS:
            tried = pool.map(certificates, [(name, seed) for seed in range(given.one_run_audits)], chunksize=2)
            line(
                instrument="certificates", control=name, audits=len(tried), refuted=sum(broken for broken, *_ in tried),
                correct_twins_refuted=sum(sound for _, sound, _ in tried),
                seconds_each=round(float(np.median([cost for *_, cost in tried])) / 2, 3),
            )  # fmt: skip
        for name in MANY_RUNS:
            started = time.monotonic()
            found = pool.map(one_run, [(name, seed) for seed in range(given.one_run_audits)], chunksize=2)
            line(
                instrument="one_run", recipe=f"audit.{name}", canaries=CANARIES["canaries.num"], audits=len(found),
                refuted=sum(refuted for refuted, _ in found), claimed_epsilon=3.0,
                **summary([bounds for _, bounds in found]), seconds=round(time.monotonic() - started, 1),
            )  # fmt: skip
        for name, trainings in MANY_RUNS.items():
            started, total = time.monotonic(), trainings * given.audits
            jobs = [(name, given.seed, start, min(64, total - start)) for start in range(0, total, 64)]
            all_scores = np.array([score for part in pool.map(scores, jobs, chunksize=4) for score in part])
            audited, pair, plan = prepared(name, given.seed)
            findings = [
                many_runs_finding(
                    part[0::2], part[1::2], audited.claim, plan.curve,
                    view="steps", canary="gradient", confidence=0.95, pair=pair,
                )
                for part in np.split(all_scores, given.audits)
            ]  # fmt: skip
            line(
                instrument="many_runs", recipe=f"audit.{name}", trainings=trainings, audits=given.audits,
                refuted=sum(finding.verdict is Verdict.REFUTED for finding in findings), claimed_epsilon=3.0,
                **summary([[bound.epsilon for bound in f.bounds] for f in findings]),
                seconds=round(time.monotonic() - started, 1),
            )  # fmt: skip


if __name__ == "__main__":
    main()
