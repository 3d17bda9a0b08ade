"""One training with canary persons tells two mistakes about persons from the sound method, through the verb.

A claim that holds is refuted with probability at most 5 % over coins and draws: that is the false-alarm rate of each
finding. The seed here is fixed, and was not searched for; so each test gives the same answer every time, and its power
is that of one draw. Of ten seeds each, all ten refuted both controls, and none the sound method.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import stobatch
from stobatch import Dataset, load
from stobatch.config import MethodConfig
from stobatch.types import Status
from stobatch_recipes import recipe

CASES = {
    "a person split in two": ("control_split_persons", 40_000, "refuted"),
    "records clipped one by one": ("control_record_clipping", 600, "refuted"),
    "sound": ("sound", 600, "consistent"),
    "sound, many canaries": ("sound", 40_000, "consistent"),
}


def persons(config: stobatch.RunConfig) -> Dataset:
    """The recipe's digits, three of each person."""
    data = stobatch.data.load(config.data)
    train = data.train.in_memory()
    train = replace(train, groups=torch.arange(len(train)) // 3)
    assert train.persons is not None
    return replace(data, info=replace(data.info, num_persons=len(train.persons)), train=train)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_canary_persons_tell_broken_from_sound(case: tuple[str, int, str], tmp_path: Path) -> None:
    method, canaries, verdict = case
    config = recipe("audit.sound").override_all({"data.test_limit": 10, "seed": 0, "canaries.num": canaries})
    config = config.override_all({"model.architecture": "linear 1000, linear" if canaries > 600 else "linear"})
    data = persons(config)
    assert data.info.num_persons is not None
    config = config.replace(method=MethodConfig.from_dict({**config.method.to_dict(), "name": method}))
    config = config.override_all(
        {"method.batch_size": max(1, data.info.num_persons // 2), "method.delta": 1e-3, "method.records_per_person": 4}
    )
    run = tmp_path / "run"
    stobatch.train(config, run, dataset=data, quiet=True)
    document = stobatch.audit(run, dataset=data, overrides={"audit.instruments": ["one_run"]}, quiet=True)
    (finding,) = document.findings
    assert finding.verdict == document.verdict == verdict
    assert finding.details.canaries == canaries
    assert "canary persons of 4 records" in finding.statement
    assert "per person" in finding.claim
    assert finding.claim_status == (Status.PROVED if method == "sound" else Status.CLAIMED)
    assert load(run).guarantee.status is (Status.REFUTED if verdict == "refuted" else Status.VOID)
