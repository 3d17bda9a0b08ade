"""The Open Inference Protocol, version 2: what a request asks, and what an answer says; tensors as JSON or as bytes.

The certificate travels in the outputs (`radius`, `is_safe`, `abstains`) and in the parameters (who vouches for it, in
which norm, with which chance of failure), so that no radius is without its status.
"""

from __future__ import annotations

import base64
import binascii
import json
import struct
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from stobatch.data.pixels import PictureRule
from stobatch.errors import StobatchError
from stobatch.prediction import as_batch, picture_rule
from stobatch.results import Kind
from stobatch.serving.batching import Answer, Question, ServedModel
from stobatch.serving.pictures import read_uploads, rule_for
from stobatch.strict_json import require_distinct_keys
from stobatch.types import PAPER_RANGE

INPUT = "pictures"
HEADER = "inference-header-content-length"
EXTENSIONS = ("binary_tensor_data",)
NUMBERS: dict[str, np.dtype[Any]] = {"FP32": np.dtype("<f4"), "FP64": np.dtype("<f8"), "UINT8": np.dtype("u1")}
_LONGEST_MS = 600_000
_LARGEST_RADIUS = 1e3
_PARAMETERS = ("radius", "max_draws", "deadline_ms", "fit", "binary_data_output")
_TYPES = {"b": "BOOL", "i": "INT64", "f": "FP64", "O": "BYTES"}


class RequestError(StobatchError):
    """A request that the protocol does not allow."""


@dataclass(frozen=True)
class Request:
    """A request in the program's own terms."""

    inputs: Tensor
    radius: float | None
    max_draws: int | None
    deadline_ms: float | None
    id: str | None
    outputs: dict[str, bool] | None
    """Those asked for, and whether as bytes; None: all of them."""
    binary: bool
    """Whether outputs are bytes unless asked for otherwise."""

    def question(self, now: float, *, attack: bool) -> Question:
        deadline = None if self.deadline_ms is None else now + self.deadline_ms / 1000
        return Question(self.radius, self.max_draws, deadline, attack)


def read_request(body: bytes, header: bytes | None, model: ServedModel, most_rows: int) -> Request:
    """Read a request, or raise what a person can understand."""
    content, rest = _split(body, header)
    try:
        document = _DECODER.decode(content.decode())
    except (ValueError, RecursionError):
        raise RequestError("the body is no JSON.", remedy="Send a JSON object as the protocol says.") from None
    if not isinstance(document, dict):
        raise RequestError("the body is no JSON object.", remedy="Send an object with inputs.")
    parameters = _parameters(document)
    rule = rule_for(parameters.get("fit"), picture_rule(model.model.config))
    given = document.get("inputs")
    if not isinstance(given, list) or len(given) != 1 or not isinstance(given[0], dict):
        raise RequestError("the request does not have exactly one input.", remedy=f'Send one input named "{INPUT}".')
    inputs = _read_tensor(given[0], rest, model.model.network.input_shape, rule, most_rows)
    binary = parameters.get("binary_data_output", False)
    if not isinstance(binary, bool):
        raise RequestError("binary_data_output is neither true nor false.", remedy="Send true or false.")
    name = document.get("id")
    if name is not None and not (isinstance(name, str) and len(name) <= 200):
        raise RequestError("the id is no text of at most 200 characters.", remedy="Send a shorter text, or none.")
    return Request(
        inputs=inputs,
        radius=_number(parameters, "radius", _LARGEST_RADIUS),
        max_draws=_whole(parameters, "max_draws"),
        deadline_ms=_number(parameters, "deadline_ms", _LONGEST_MS),
        id=name,
        outputs=_outputs(document, binary),
        binary=binary,
    )


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _split(body: bytes, header: bytes | None) -> tuple[bytes, bytes]:
    """Return the JSON of a body and the bytes of its tensors."""
    if header is None:
        return body, b""
    if not (header.isdigit() and len(header) < 12 and int(header) <= len(body)):
        raise RequestError(
            f"the header {HEADER} is not the length of the JSON.", remedy="Send the number of its bytes."
        )
    return body[: int(header)], body[int(header) :]


def _parameters(document: dict[str, Any]) -> dict[str, Any]:
    parameters = document.get("parameters", {})
    if not isinstance(parameters, dict):
        raise RequestError("the parameters are no JSON object.", remedy="Send an object.")
    unknown = sorted(parameters.keys() - set(_PARAMETERS))
    if unknown:
        raise RequestError(
            f"the parameter {unknown[0][:50]!r} is unknown.",
            why="One that was overlooked would change what an answer means.",
            remedy=f"Known are {', '.join(_PARAMETERS)}.",
        )
    return parameters


def _number(parameters: dict[str, Any], name: str, largest: float) -> float | None:
    value = parameters.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= largest:
        raise RequestError(
            f"{name} is not a number above 0 and up to {largest:g}.", remedy="Send such a number, or none."
        )
    return float(value)


def _whole(parameters: dict[str, Any], name: str) -> int | None:
    value = parameters.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 10**9:
        raise RequestError(f"{name} is not a whole number from 1 to 10^9.", remedy="Send such a number, or none.")
    return value


def _outputs(document: dict[str, Any], binary: bool) -> dict[str, bool] | None:
    asked = document.get("outputs")
    if asked is None:
        return None
    if not isinstance(asked, list) or not all(
        isinstance(one, dict) and isinstance(one.get("name"), str) for one in asked
    ):
        raise RequestError("the outputs are no list of objects with names.", remedy="Send names, or leave outputs out.")
    found = {}
    for one in asked:
        given = one.get("parameters", {})
        value = given.get("binary_data", binary) if isinstance(given, dict) else None
        if not isinstance(value, bool):
            raise RequestError("binary_data of an output is neither true nor false.", remedy="Send true or false.")
        found[one["name"]] = value
    return found


# As strict_json reads, but for a check of each number, of which there are thousands: ranges are checked later.
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=require_distinct_keys)
_ENCODER = json.JSONEncoder(separators=(",", ":"))


# Pictures.


def _read_tensor(
    given: dict[str, Any], rest: bytes, shape: tuple[int, ...], rule: PictureRule, most_rows: int
) -> Tensor:
    if given.get("name") != INPUT:
        raise RequestError(f'the input is not named "{INPUT}".', remedy=f'Name it "{INPUT}".')
    sizes = given.get("shape")
    if not isinstance(sizes, list) or not all(type(size) is int and 0 < size < 2**31 for size in sizes) or not sizes:
        raise RequestError("the shape is no list of whole numbers above 0.", remedy="Send as in [1, 1, 28, 28].")
    if sizes[0] > most_rows:
        raise RequestError(f"{sizes[0]} pictures are in one request.", remedy=f"Send at most {most_rows}.")
    datatype, own = given.get("datatype"), given.get("parameters", {})
    length = own.get("binary_data_size") if isinstance(own, dict) else None
    if length is not None and (type(length) is not int or length != len(rest)):
        raise RequestError("binary_data_size is not the number of bytes behind the JSON.", remedy="Send that number.")
    if length is None and rest:
        raise RequestError(
            "there are bytes behind the JSON that no input names.", remedy="Name them by binary_data_size."
        )
    if datatype == "BYTES":
        files = _binary_texts(rest) if length is not None else _base64_texts(given.get("data"))
        if sizes not in ([len(files)], [len(files), 1]):
            raise RequestError(
                f"{len(files)} files are not of shape {sizes}.", remedy=f"Send the shape [{len(files)}]."
            )
        return read_uploads(files, shape, rule)
    if not isinstance(datatype, str) or datatype not in NUMBERS:
        raise RequestError("the datatype is unknown.", remedy=f"Use {', '.join(NUMBERS)}, or BYTES for files.")
    values = _binary_numbers(rest, NUMBERS[datatype]) if length is not None else _listed(given.get("data"), datatype)
    if values.size != prod(sizes):
        raise RequestError(f"{values.size} values are not of shape {sizes}.", remedy="Send as many as the shape says.")
    return as_batch(values.reshape(sizes), shape)


def _binary_numbers(rest: bytes, kind: np.dtype[Any]) -> NDArray[Any]:
    if len(rest) % kind.itemsize:
        raise RequestError(f"{len(rest)} bytes are no whole number of values.", remedy="Send whole values.")
    return np.frombuffer(rest, kind)


def _listed(data: Any, datatype: str) -> NDArray[Any]:
    """Return numbers from nested or flat lists."""
    if not isinstance(data, list):
        raise RequestError("the data are no list.", remedy="Send a list of numbers, nested or flat.")
    try:
        values = np.array(data)
    except ValueError:
        raise RequestError("the data are lists of different lengths.", remedy="Send as many values in each.") from None
    if values.dtype.kind not in "iuf":
        raise RequestError("the data are not all numbers.", remedy="Send numbers alone.")
    if datatype != "UINT8":
        return values.astype(np.float64)  # JSON may write 0 for 0.0
    if values.dtype.kind == "f" or (values.size and not (values.min() >= 0 and values.max() <= 255)):
        raise RequestError("the data are not whole numbers from 0 to 255.", remedy="Send bytes, or FP32 in [-1, 1].")
    return values.astype(np.uint8)


def _base64_texts(data: Any) -> list[bytes]:
    if not isinstance(data, list) or not data or not all(isinstance(text, str) for text in data):
        raise RequestError("the data are no list of texts.", remedy="Send files in base64.")
    try:
        return [base64.b64decode(text, validate=True) for text in data]
    except (binascii.Error, ValueError):
        raise RequestError("the data are not in base64.", remedy="Send files in base64.") from None


def _binary_texts(rest: bytes) -> list[bytes]:
    """Read texts, each behind its length in four bytes."""
    found, place = [], 0
    while place < len(rest):
        size = struct.unpack_from("<I", rest, place)[0] if place + 4 <= len(rest) else len(rest)
        place += 4
        if place + size > len(rest):
            raise RequestError("the bytes end within a file.", remedy="Send each file behind its length in four bytes.")
        found.append(rest[place : place + size])
        place += size
    if not found:
        raise RequestError("there is no file.", remedy="Send at least one.")
    return found


# Answers.


def columns_of(answer: Answer, request: Request, model: ServedModel) -> dict[str, tuple[NDArray[Any], dict[str, Any]]]:
    """Return the outputs by name, each with its parameters."""
    names = model.model.class_names
    labels = np.array([names[label] if label < len(names) else str(label) for label in answer.label], dtype=object)
    found: dict[str, tuple[NDArray[Any], dict[str, Any]]] = {
        "label": (answer.label, {}),
        "class_name": (labels, {}),
        "scores": (answer.scores, {}),
    }
    if answer.points is not None:
        return found | {"changed_picture": (answer.points.astype(np.float64), {})}
    found["abstains"] = (answer.abstains, {})
    if model.kind is None:
        return found
    radius = answer.radii[model.kind.name]
    found["radius"] = (radius, _vouching(model.kind))
    found["radius_of_255"] = (radius * 255 / PAPER_RANGE.width, _vouching(model.kind))
    if request.radius is not None:
        found["is_safe"] = ((radius > 0) & (radius >= request.radius), _vouching(model.kind))
    if not model.draws_nothing:
        found["draws"] = (answer.draws, {})
    for kind in model.kinds if len(model.kinds) > 1 else ():
        found[f"radius_{kind.name}"] = (answer.radii[kind.name], _vouching(kind))
    return found


def _vouching(kind: Kind) -> dict[str, Any]:
    said = {"status": str(kind.status), "kind": kind.name, "norm": str(kind.norm), "input_range": kind.input_range}
    often = {} if kind.failure_probability is None else {"failure_probability": kind.failure_probability}
    return said | often


def parameters_of(answer: Answer, request: Request, model: ServedModel) -> dict[str, Any]:
    """Return what was used, and what the answer rests on."""
    said: dict[str, Any] = {"weights_sha256": model.model.weights_sha256, "privacy_status": str(model.guarantee.status)}
    if model.warning is not None:
        said["warning"] = model.warning
    if request.radius is not None:
        said["radius"] = request.radius
    if request.deadline_ms is not None:
        said |= {"deadline_ms": request.deadline_ms, "deadline_reached": not bool(answer.finished.all())}
    if answer.points is not None:
        return said | {"meaning": "the strongest change that was found; where the label held, that proves nothing"}
    if model.kind is None:
        return said | {"status": "none", "meaning": "this model has no certificate: labels, and no radius"}
    if not model.draws_nothing:
        said["max_draws"] = min(request.max_draws or model.most_draws, model.most_draws)
    return said | _vouching(model.kind) | {"function": model.kind.function, "source": model.kind.source}


def write_answer(answer: Answer, request: Request, model: ServedModel) -> tuple[bytes, int | None]:
    """Return the body of an answer, and the length of its JSON where bytes follow it."""
    columns = columns_of(answer, request, model)
    wanted = dict.fromkeys(columns, request.binary) if request.outputs is None else request.outputs
    unknown = [name for name in wanted if name not in columns]
    if unknown:
        raise RequestError(f"there is no output {unknown[0][:50]!r}.", remedy=f"There are {', '.join(columns)}.")
    outputs, blobs = [], []
    for name, binary in wanted.items():
        values, parameters = columns[name]
        tensor: dict[str, Any] = {"name": name, "datatype": _TYPES[values.dtype.kind], "shape": list(values.shape)}
        if binary:
            blobs.append(_bytes_of(values))
            parameters = parameters | {"binary_data_size": len(blobs[-1])}
        else:
            tensor["data"] = values.ravel().tolist()
        outputs.append(tensor | ({"parameters": parameters} if parameters else {}))
    document: dict[str, Any] = {"model_name": model.name, "model_version": version_of(model)}
    document |= {} if request.id is None else {"id": request.id}
    document |= {"parameters": parameters_of(answer, request, model), "outputs": outputs}
    content = _ENCODER.encode(document).encode()
    return b"".join((content, *blobs)), len(content) if blobs else None


def _bytes_of(values: NDArray[Any]) -> bytes:
    if values.dtype.kind == "O":
        return b"".join(struct.pack("<I", len(text := str(value).encode())) + text for value in values)
    return np.ascontiguousarray(values).tobytes()


# What a model is.


def version_of(model: ServedModel) -> str:
    return model.model.weights_sha256[:12]


def describe_model(model: ServedModel) -> dict[str, Any]:
    """Return the protocol's description of a model."""
    shape, classes = list(model.model.network.input_shape), model.model.network.num_classes
    outputs = {"label": "INT64", "class_name": "BYTES", "scores": "FP64", "abstains": "BOOL"}
    if model.kind is not None:
        outputs |= {"radius": "FP64", "radius_of_255": "FP64", "is_safe": "BOOL"}
        outputs |= {} if model.draws_nothing else {"draws": "INT64"}
        outputs |= {f"radius_{kind.name}": "FP64" for kind in model.kinds if len(model.kinds) > 1}
    rows = [
        {"name": name, "datatype": kind, "shape": [-1, classes] if name == "scores" else [-1]}
        for name, kind in outputs.items()
    ]
    return {
        "name": model.name,
        "versions": [version_of(model)],
        "platform": "stobatch",
        "inputs": [{"name": INPUT, "datatype": "FP32", "shape": [-1, *shape]}],
        "outputs": rows,
        "parameters": {
            "input_range": str(PAPER_RANGE),
            "also_takes": "UINT8 of the same shape, or BYTES of shape [-1] with picture files (base64 in JSON)",
            "weights_sha256": model.model.weights_sha256,
            "class_names": ",".join(model.model.class_names),
        },
    }
