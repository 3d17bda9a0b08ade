"""The Open Inference Protocol, as a client of somebody else's speaks it."""

from __future__ import annotations

import base64
import io
import json
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.pages import ROOT

from stobatch.loading import TrainedModel

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    triton: Any = pytest.importorskip("tritonclient.http")

RADIUS = 0.05


@pytest.fixture
def theirs(client: Any) -> Any:
    return triton.InferenceServerClient(client.host)


def asked(values: np.ndarray[Any, Any], datatype: str = "FP32", *, binary: bool = True) -> Any:
    tensor = triton.InferInput("pictures", list(values.shape), datatype)
    tensor.set_data_from_numpy(values, binary_data=binary)
    return tensor


def as_png(picture: torch.Tensor) -> bytes:
    file = io.BytesIO()
    Image.fromarray(((picture[0] + 1) * 127.5).round().byte().numpy()).save(file, "PNG")
    return file.getvalue()


def test_the_server_and_its_models_say_what_they_are(theirs: Any, voting: TrainedModel) -> None:
    assert theirs.is_server_live()
    assert theirs.is_server_ready()
    assert theirs.is_model_ready("digits")
    assert not theirs.is_model_ready("nothing")
    assert theirs.get_server_metadata()["name"] == "stobatch"
    found = theirs.get_model_metadata("votes")
    assert found["versions"] == [voting.weights_sha256[:12]]
    assert found["inputs"] == [{"name": "pictures", "datatype": "FP32", "shape": [-1, 1, 28, 28]}]
    assert {"label", "radius", "abstains", "draws"} <= {one["name"] for one in found["outputs"]}
    assert theirs.is_model_ready("votes", found["versions"][0])
    assert not theirs.is_model_ready("votes", "other")


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_tensors_travel_as_bytes_and_as_json(
    theirs: Any, model: TrainedModel, inputs: torch.Tensor, binary_in: bool, binary_out: bool
) -> None:
    names = ("label", "class_name", "radius", "is_safe", "abstains", "scores")
    outputs = [triton.InferRequestedOutput(name, binary_data=binary_out) for name in names]
    tensor = asked(inputs[:3].numpy(), binary=binary_in)
    found = theirs.infer("digits", [tensor], outputs=outputs, request_id="a7", parameters={"radius": RADIUS})
    rows = model.predict(inputs[:3], radius=RADIUS).rows
    assert found.as_numpy("label").tolist() == [row.label for row in rows]
    assert found.as_numpy("radius").tolist() == [row.radius for row in rows]
    assert found.as_numpy("is_safe").tolist() == [row.is_safe for row in rows]
    names_found = [name.decode() if isinstance(name, bytes) else name for name in found.as_numpy("class_name")]
    assert names_found == [row.class_name for row in rows]
    assert found.as_numpy("scores").shape == (3, 10)
    said = found.get_response()
    assert said["id"] == "a7"
    assert said["parameters"]["status"] == "proved"
    assert (said["parameters"]["norm"], said["parameters"]["radius"]) == ("linf", RADIUS)


def test_bytes_and_files_are_the_same_pictures(theirs: Any, model: TrainedModel, inputs: torch.Tensor) -> None:
    rows = model.predict(inputs[:2]).rows
    pixels = ((inputs[:2] + 1) * 127.5).round().byte().numpy()
    files = np.array([as_png(picture) for picture in inputs[:2]], dtype=object)
    for tensor in (asked(pixels, "UINT8"), asked(pixels, "UINT8", binary=False), asked(files, "BYTES")):
        found = theirs.infer("digits", [tensor])
        assert found.as_numpy("radius").tolist() == [row.radius for row in rows]


def test_files_in_json_are_base64(client: Any, model: TrainedModel, inputs: torch.Tensor) -> None:
    text = base64.b64encode(as_png(inputs[0])).decode()
    tensor = {"name": "pictures", "datatype": "BYTES", "shape": [1], "data": [text]}
    code, answer, _ = client.ask("POST", "/v2/models/digits/infer", {"inputs": [tensor]})
    assert code == 200
    assert answer["outputs"][0]["data"] == [model.predict(inputs[:1]).rows[0].label]


def test_a_vote_says_what_was_used(theirs: Any, inputs: torch.Tensor) -> None:
    parameters = {"max_draws": 150, "deadline_ms": 60_000}
    found = theirs.infer("votes", [asked(inputs[:1].numpy())], parameters=parameters)
    said = found.get_response()["parameters"]
    assert found.as_numpy("draws").tolist() == [150]
    assert (said["max_draws"], said["deadline_ms"], said["deadline_reached"]) == (150, 60_000, False)
    assert said["failure_probability"] == 0.001
    more = theirs.infer("votes", [asked(inputs[:1].numpy())], parameters={"max_draws": 10**6})
    assert more.get_response()["parameters"]["max_draws"] == 400, "no more than the run's own"


def test_errors_are_the_protocols(theirs: Any, inputs: torch.Tensor) -> None:
    with pytest.raises(triton.InferenceServerException, match="no model of this name"):
        theirs.infer("nothing", [asked(inputs[:1].numpy())])
    with pytest.raises(triton.InferenceServerException, match="'raduis' is unknown"):
        theirs.infer("digits", [asked(inputs[:1].numpy())], parameters={"raduis": 0.1})
    with pytest.raises(triton.InferenceServerException, match="no output 'margin'"):
        theirs.infer("digits", [asked(inputs[:1].numpy())], outputs=[triton.InferRequestedOutput("margin")])


def test_every_route_is_in_the_openapi_document(client: Any) -> None:
    from stobatch.serving.application import ROUTES

    code, document, _ = client.ask("GET", "/openapi.json")
    assert code == 200
    told = {(path, method.upper()) for path, methods in document["paths"].items() for method in methods}
    assert told == {(path, method) for path, (method, _) in ROUTES.items()}
    assert document["openapi"].startswith("3.")
    assert document == json.loads((ROOT / "src/stobatch/serving/site/openapi.json").read_text())


def test_the_card_and_the_metrics(client: Any, model: TrainedModel) -> None:
    code, card, _ = client.ask("GET", "/card")
    assert code == 200
    assert card["models"]["digits"]["privacy"]["status"] == model.guarantee.status
    assert card["models"]["votes"]["certificates"][0]["failure_probability"] == 0.001
    code, text, headers = client.ask("GET", "/metrics")
    assert code == 200
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = [line for line in text.decode().splitlines() if not line.startswith("#")]
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}
    assert values['stobatch_requests_total{path="/card",code="200"}'] >= 1
    assert values[f'stobatch_model_info{{model="digits",weights="{model.weights_sha256[:12]}"}}'] == 1
    assert values["process_resident_memory_bytes"] > 1e7
