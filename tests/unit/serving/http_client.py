"""A client that speaks HTTP as any program would, and servers for it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import torch

from stobatch.loading import TrainedModel


class Client:
    """Speaks to a server as any program would."""

    def __init__(self, address: str) -> None:
        self.address, self.host = address, urlsplit(address).netloc

    def ask(
        self, method: str, path: str, body: bytes | Mapping[str, Any] | None = None, **headers: str
    ) -> tuple[int, Any, dict[str, str]]:
        connection = HTTPConnection(self.host, timeout=60)
        try:
            content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, content, named)
            answer = connection.getresponse()
            text = answer.read()
            told = {name.lower(): value for name, value in answer.getheaders()}
            is_json = told.get("content-type", "").startswith("application/json")
            return answer.status, json.loads(text) if is_json else text, told
        finally:
            connection.close()

    def infer(self, inputs: torch.Tensor, name: str = "digits", verb: str = "infer", **parameters: Any) -> Any:
        return self.ask("POST", f"/v2/models/{name}/{verb}", request_of(inputs, **parameters))


def request_of(inputs: torch.Tensor, **parameters: Any) -> dict[str, Any]:
    tensor = {"name": "pictures", "datatype": "FP32", "shape": list(inputs.shape), "data": inputs.flatten().tolist()}
    return {"inputs": [tensor], **({"parameters": parameters} if parameters else {})}


def outputs_of(answer: Any) -> dict[str, list[Any]]:
    return {one["name"]: one["data"] for one in answer["outputs"]}


@contextmanager
def serving(models: Mapping[str, TrainedModel], **options: Any) -> Iterator[Client]:
    from stobatch.serving import Server

    server = Server(models, **{"port": 0, **options})
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield Client(server.address)
    finally:
        server.stop()
        thread.join(60)
        assert not thread.is_alive()
