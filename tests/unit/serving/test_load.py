"""A few seconds of what `benchmarks/serving/load.py` does for ten minutes: a hundred clients, some of them killed."""

from __future__ import annotations

import sys
from typing import Any

import torch
from http_client import serving
from support.pages import ROOT

from stobatch.loading import TrainedModel
from stobatch.serving import Limits

sys.path.insert(0, str(ROOT / "benchmarks" / "serving"))
from load_clients import requests_of, run

RADIUS = 0.05


def test_a_hundred_clients_get_right_answers(model: TrainedModel, inputs: torch.Tensor) -> None:
    rows = model.predict(inputs, radius=RADIUS).rows
    with serving({"digits": model}, limits=Limits(per_client=1000)) as client:
        load = run(client.host, requests_of(inputs, rows, RADIUS, binary=True), 100, 3.0, killed=0.02)
        assert not load.wrong, load.wrong[:3]
        assert load.counts["200"] >= 100
        assert load.counts["killed"] > 0
        # The benchmark's limit is 5; a machine that is shared may stop everything for a second of these three.
        assert load.share(0.99) < 10 * load.share(0.5)
        text = client.ask("GET", "/metrics")[1].decode()
        assert "stobatch_waiting_pictures 0" in text
        assert 'stobatch_batch_pictures_bucket{model="digits",le="16"}' in text


def test_a_wrong_answer_is_noticed(client: Any, model: TrainedModel, inputs: torch.Tensor) -> None:
    rows = model.predict(inputs.flip(0), radius=RADIUS).rows
    load = run(client.host, requests_of(inputs, rows, RADIUS, binary=False), 4, 1.0)
    assert load.wrong


def test_a_full_queue_is_waited_for(model: TrainedModel, inputs: torch.Tensor) -> None:
    rows = model.predict(inputs, radius=RADIUS).rows
    with serving({"digits": model}, limits=Limits(queue_rows=2)) as client:
        load = run(client.host, requests_of(inputs, rows, RADIUS, binary=True), 30, 2.0)
    assert not load.wrong, load.wrong[:3]
    assert load.counts["503"] > 0
    assert load.counts["200"] > 0
