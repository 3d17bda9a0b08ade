"""Positive controls: every known mistake is caught, its sound twin passes, and a closed form agrees with both.

300 benches caught out of 300, measured once for each control with these settings, put the power above 0.99 at 95%
confidence; of the 1200 sound twins none was refuted. The tests take 2 of them, each caught again with that power. Cost
on one core: 0.03 s for bounds, 0.2 to 0.5 s for votes. The twins alarm falsely with probability 1% at most, each.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attempts import CHEAP, attempt, certificates_of
from support.broken_certificates import CONTROLS

from stobatch.auditing.vote_counts import count
from stobatch.types import Verdict

SEEDS = 2

every_control = pytest.mark.parametrize("name", CONTROLS)


@pytest.mark.slow
@every_control
def test_the_mistake_is_caught(name: str) -> None:
    for seed in range(SEEDS):
        bench = CONTROLS[name](seed)
        outcome = attempt(bench.broken, bench.inputs, seed)
        assert outcome.finding.verdict is Verdict.REFUTED, (seed, outcome.finding.statement)
        assert outcome.finding.about == name


@pytest.mark.slow
@every_control
def test_the_sound_twin_passes(name: str) -> None:
    for seed in range(SEEDS):
        bench = CONTROLS[name](seed)
        outcome = attempt(bench.sound, bench.inputs, seed)
        assert outcome.finding.details.attacked == CHEAP.num_inputs
        assert outcome.finding.verdict is Verdict.CONSISTENT, (seed, outcome.finding.statement)


@every_control
def test_what_breaks_is_what_the_closed_form_says(name: str) -> None:
    """Every break is beyond the distance at which the label ends, and all that is well beyond it breaks."""
    bench = CONTROLS[name](0)
    columns = attempt(bench.broken, bench.inputs, 0, CHEAP.replace(num_inputs=None)).attempt.columns
    reach = bench.reach.double().numpy()[columns["index"]]
    broken, radius = np.array(columns["broken"]), np.array(columns["radius"])
    distance = np.array(columns["distance"])
    assert broken.sum() >= 5
    assert (distance[broken] > (1 - 1e-6) * reach[broken]).all()
    # Half as far again is beyond doubt for a vote of 1000 draws, except where the boundary is near in the first place.
    beyond = radius > 1.5 * reach + (0.0 if name == "enlarged bounds" else 0.1 * reach.max())
    assert broken[beyond].all()


@every_control
def test_the_twin_claims_less_than_the_closed_form_and_the_mistake_more(name: str) -> None:
    bench = CONTROLS[name](1)
    reach = bench.reach.double().numpy()
    sound, broken = (
        certificates_of(verifier, bench.inputs, torch.Generator().manual_seed(1)).radius
        for verifier in (bench.sound, bench.broken)
    )
    assert (sound <= reach * (1 + 1e-6)).all()
    assert (broken > reach).sum() >= 10
    assert (sound > 0.2 * reach).sum() >= 10, "the twin is nearly tight, so that the mistake can show"


@every_control
def test_the_mistake_is_in_the_radius_alone(name: str) -> None:
    bench = CONTROLS[name](2)
    sound, broken = (
        verifier.verify(bench.inputs, torch.Generator().manual_seed(3)).label
        for verifier in (bench.sound, bench.broken)
    )
    assert (sound == broken).all()
    assert set(sound.tolist()) >= {0, 1}


@pytest.mark.parametrize("name", ["summed sizes", "nominal noise", "observed frequency"])
def test_both_twins_deploy_the_same_vote(name: str) -> None:
    bench = CONTROLS[name](2)
    sound, broken = (
        count(verifier, bench.inputs, 50, torch.Generator().manual_seed(3)).sums
        for verifier in (bench.sound, bench.broken)
    )
    assert (sound == broken).all()
    assert (sound.sum(1) == 50).all()
