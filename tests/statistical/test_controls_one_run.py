"""One training with canaries tells a broken method from the sound one, through the verb.

A claim that holds is refuted with probability at most 5 % over coins and draws: that is the false-alarm rate of each
finding. The seed here is fixed, and was not searched for. So each test gives the same answer every time, and its power
is that of one draw: of other seeds, up to one in twenty may refute the sound method. Of ten seeds each, all ten refuted
every control at the sizes below, and none the sound method.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

import stobatch
from stobatch import load
from stobatch.types import Status
from stobatch_recipes import recipe


@dataclass(frozen=True)
class Canaries:
    """A training with canaries of its own."""

    recipe: str
    canaries: int
    verdict: str
    architecture: str = "linear"
    epsilon: float = 3.0
    train_only: str | None = None


WIDE = "linear 1000, linear"
"""75,000 parameters, for as many canaries."""
CASES = {
    "half of the noise": Canaries("half_noise", 40_000, "refuted", WIDE),
    "half of the noise, ε = 1": Canaries("half_noise", 40_000, "refuted", WIDE, 1.0),
    "shared noise": Canaries("shared_noise", 150, "refuted"),
    "no clipping": Canaries("no_clipping", 300, "refuted"),
    "sound": Canaries("sound", 600, "consistent"),
    "sound, ε = 1": Canaries("sound", 600, "consistent", epsilon=1.0),
    "sound, ε = 0.2": Canaries("sound", 600, "consistent", epsilon=0.2),
    "sound, the rest frozen": Canaries("sound", 600, "consistent", "linear 64, relu, linear", train_only="head"),
    "no clipping, the rest frozen": Canaries(
        "no_clipping", 300, "refuted", "linear 64, relu, linear", train_only="head"
    ),
    "shared noise, the rest frozen": Canaries(
        "shared_noise", 150, "refuted", "linear 64, relu, linear", train_only="head"
    ),
    "sound, many canaries": Canaries("sound", 40_000, "consistent", WIDE),
    "sound, many canaries, ε = 1": Canaries("sound", 40_000, "consistent", WIDE, 1.0),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_one_training_with_canaries_tells_broken_from_sound(case: Canaries, tmp_path: Path) -> None:
    changes = {
        "canaries.num": case.canaries,
        "method.epsilon": case.epsilon,
        "model.architecture": case.architecture,
        "model.train_only": case.train_only,
        "data.test_limit": 10,
        "seed": 0,
    }
    run = tmp_path / "run"
    before = stobatch.train(recipe(f"audit.{case.recipe}").override_all(changes), run, quiet=True).guarantee
    document = stobatch.audit(run, overrides={"audit.instruments": ["one_run"]}, quiet=True)
    (finding,) = document.findings
    assert finding.verdict == document.verdict == case.verdict
    assert finding.details.canaries == case.canaries
    assert finding.confidence == 0.95
    assert finding.claim_status == (Status.PROVED if case.recipe == "sound" else Status.CLAIMED)
    assert (before.status, before.secret_seed_status) == (Status.VOID, finding.claim_status)
    assert load(run).guarantee.status is (Status.REFUTED if case.verdict == "refuted" else before.status)
    # The attack is not idle where there is something to see.
    best = max(bound.epsilon_at_least for bound in finding.details.bounds)
    assert best > 0.4 or case.epsilon < 3 or case.canaries < 600
