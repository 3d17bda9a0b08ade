"""A published run with a public seed whose claim a release audit refutes: its own documents agree with each other."""

from __future__ import annotations

import shutil
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

import stobatch
from stobatch.errors import RunError
from stobatch.reporting.terminal import verified_page
from stobatch_recipes import recipe


@pytest.fixture(scope="module")
def refuted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = {
        "data.train_limit": 200,
        "data.test_limit": 20,
        "method.batch_size": 50,
        "training.steps": 2,
        "audit.instruments": ["release"],
        "audit.release_trials": 60,
    }
    run = tmp_path_factory.mktemp("refuted") / "run"
    stobatch.train(recipe("audit.published").override_all({**settings, "seed": 1}), run, quiet=True)
    document = stobatch.audit(run, seed=1, quiet=True)
    assert document.verdict == "refuted"
    assert document.findings[0].claim.startswith("with secret seeds: claimed")
    return run


def test_a_claim_that_an_audit_refuted_is_still_the_claim_it_was_held_against(refuted: Path) -> None:
    found = stobatch.verify(refuted, sample=0)
    assert not found.differing, [check.detail for check in found.differing]


def test_files_that_agree_do_not_make_a_refuted_claim_look_sound(refuted: Path) -> None:
    found = stobatch.verify(refuted, sample=0)
    assert found.verdict == "agrees"
    assert found.guarantee is not None
    assert found.guarantee.status == "refuted"
    console = Console(width=200, record=True, file=StringIO())
    console.print(verified_page(found))
    assert console.export_text().splitlines()[-1].endswith("Privacy: refuted.")
    assert found.to_dict()["guarantee"]["status"] == "refuted"


@pytest.mark.parametrize("change", ["removed", "removed with its evidence", "edited"])
def test_a_refutation_cannot_be_taken_back_by_a_file(refuted: Path, tmp_path: Path, change: str) -> None:
    run = Path(shutil.copytree(refuted, tmp_path / "run"))
    if change == "edited":
        text = (run / "audit.json").read_text()
        (run / "audit.json").write_text(text.replace('"refuted"', '"consistent"'))
    else:
        (run / "audit.json").unlink()
        if "evidence" in change:
            shutil.rmtree(run / "evidence")
    with pytest.raises(RunError, match=r"audit\.json .*manifest"):
        _ = stobatch.load(run).guarantee
    with pytest.raises(RunError, match="manifest"):
        stobatch.attack(run, quiet=True)
    assert stobatch.verify(run, sample=0).differing
    stobatch.audit(run, seed=1, overrides={"audit.instruments": ["release"]}, quiet=True)
    assert stobatch.load(run).guarantee.status == "refuted"
