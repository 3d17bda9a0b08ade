"""How long a training took, and how much memory, depends on its samples: others see it where the seeds are public."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import stobatch
from stobatch.results import Training
from stobatch.runs import Run
from tests.support.small_records import small_config, small_records

MEASURED = {"seconds_since_last_start", "peak_memory_mb", "peak_memory_of"}


@pytest.mark.parametrize("seed", [None, 1])
def test_they_are_private_with_the_seeds(tmp_path: Path, seed: int | None) -> None:
    run = stobatch.train(small_config(seed=seed), tmp_path / "run", dataset=small_records(), quiet=True).run
    public = run.read("training")
    assert run.has("measurements", private=True) == (seed is None)
    assert MEASURED & public.keys() == (set() if seed is None else MEASURED)
    owned = public if seed is not None else run.read("measurements", private=True)
    assert owned["seconds_since_last_start"] > 0
    assert (" s" in Training.read(run).lines()[0].split("on cpu")[1]) == (seed is not None)
    assert not stobatch.verify(run.path, dataset=small_records(), sample=0).differing
    stobatch.evaluate(run.path, dataset=small_records(), quiet=True)
    page = Path(stobatch.report([run.path]).report).read_text()
    assert ("seconds since its last start" in page) == (seed is not None)


def test_of_a_training_the_day_is_told_and_of_other_verbs_the_second(tmp_path: Path) -> None:
    run = stobatch.train(small_config(), tmp_path / "run", dataset=small_records(), quiet=True).run
    stobatch.certify(run.path, dataset=small_records(), quiet=True)
    made = Run(run.path).read("manifest")["made"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", made["train"]["date"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", made["certify"]["date"])
