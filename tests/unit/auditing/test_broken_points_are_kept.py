"""A certificate that does not hold is refuted through the verb, and the point that breaks it is kept."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import stobatch
from stobatch.results import CertificateSummary
from stobatch.runs import Run, seal
from stobatch.training.device import environment
from stobatch.types import Status
from stobatch_recipes import recipe

RADII = [0.05, 0.1]
TOO_LARGE = 1.5


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "certified"
    config = recipe("audit.sound").override_all(
        {"method.epsilon": 50.0, "training.steps": 40, "data.test_limit": 60, "seed": 3, "machine.threads": 1,
         "evaluation.radii": RADII, "certification.attack_radius": RADII[-1], "audit.num_inputs": 10,
         "audit.attack_steps": 5, "audit.instruments": ["certificates"]}
    )  # fmt: skip
    stobatch.train(config, out, quiet=True)
    stobatch.certify(out, quiet=True)
    return out


def test_right_certificates_stand(certified: Path) -> None:
    document = stobatch.audit(certified, quiet=True)
    (finding,) = document.findings
    assert (finding.verdict, finding.claim_status) == ("consistent", "proved")
    assert finding.details.attacked == 10
    assert not (certified / "private" / "evidence" / "certificates-bounds.safetensors").exists()


def test_certificates_that_claim_too_much_are_refuted_with_the_points(certified: Path) -> None:
    """The broken twin: somebody has enlarged the radii in the records, and sealed them again."""
    run = Run(certified)
    made = CertificateSummary.read(run)
    weights = made.weights_sha256
    records = run.records("certify", config_hash=made.config_hash, expected_rows=made.rows, weights_sha256=weights)
    columns = records.read()
    records.write(0, {**columns, "radius": [TOO_LARGE] * made.rows})
    seal(run, "certify", environment("cpu"))
    document = stobatch.audit(certified, seed=1, quiet=True)
    (finding,) = document.findings
    assert document.verdict == finding.verdict == "refuted"
    assert json.loads((certified / finding.evidence).read_text())["findings"] == document.to_dict()["findings"]
    kept = load_file(certified / "private" / "evidence" / "certificates-bounds.safetensors")
    assert len(kept["index"]) == finding.details.broken > 0
    distance = np.abs(kept["point"].astype(np.float64) - kept["input"].astype(np.float64)).max((1, 2, 3))
    assert (distance <= kept["radius"]).all()
    assert np.abs(kept["point"]).max() <= 1
    model = stobatch.load(certified)
    said = model.network(torch.from_numpy(kept["point"])).argmax(1).numpy()
    assert (said != kept["certified_label"]).all()
    # A broken certificate says nothing about privacy.
    assert model.guarantee.secret_seed_status is Status.PROVED
