"""A share of the hostile requests that `benchmarks/serving/fuzz.py` makes by the hundred thousand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from http_client import serving
from request_fuzz import KINDS, Fuzz

from stobatch.loading import TrainedModel

RADIUS = 0.05


@pytest.fixture
def fuzz(client: Any, model: TrainedModel, inputs: torch.Tensor) -> Fuzz:
    rows = model.predict(inputs[:8], radius=RADIUS).rows
    right = [(int(row.label or 0), float(row.radius or 0)) for row in rows]
    return Fuzz(client.host, inputs[:8].numpy(), right, RADIUS)


def test_no_hostile_request_is_more_than_refused(fuzz: Fuzz) -> None:
    fuzz.run(range(400))
    assert not fuzz.findings, fuzz.findings[:3]
    assert set(KINDS) <= set(fuzz.counts)
    assert fuzz.counts["code 200"] > 10
    assert fuzz.counts["code 400"] > 100


def test_a_wrong_answer_is_found(fuzz: Fuzz) -> None:
    fuzz.right = [(label + 1, radius) for label, radius in fuzz.right]
    fuzz.run(range(100))
    assert any("wrong answer" in finding for finding in fuzz.findings)


def test_a_failure_inside_is_found(fuzz: Fuzz, model: TrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("stobatch.serving.application.read_request", fail)
    with serving({"digits": model}) as client:
        fuzz.host = client.host
        fuzz.run(range(20))
    assert any("500" in finding for finding in fuzz.findings)
