"""A published run with a public seed whose claim a release audit refutes: its own documents agree with each other."""

from __future__ import annotations

from pathlib import Path

import stobatch
from stobatch_recipes import recipe


def test_a_claim_that_an_audit_refuted_is_still_the_claim_it_was_held_against(tmp_path: Path) -> None:
    settings = {
        "data.train_limit": 200,
        "data.test_limit": 20,
        "method.batch_size": 50,
        "training.steps": 2,
        "audit.instruments": ["release"],
        "audit.release_trials": 60,
    }
    run = tmp_path / "run"
    stobatch.train(recipe("audit.published").override_all({**settings, "seed": 1}), run, quiet=True)
    document = stobatch.audit(run, seed=1, quiet=True)
    assert document.verdict == "refuted"
    assert document.findings[0].claim.startswith("with secret seeds: claimed")
    found = stobatch.verify(run, sample=0)
    assert not found.differing, [check.detail for check in found.differing]
