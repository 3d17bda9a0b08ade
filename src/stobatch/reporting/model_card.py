"""The model card of an exported network: what it is, who guarantees what, and what that is not about.

Its front matter is for programs, in the style of the Hugging Face Hub; every number in it has its status.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html import escape
from typing import Any

from stobatch.reporting.format import status_words, unit
from stobatch.reporting.guarantee import STATUS_MEANINGS, about, guarantee_line, start_lines
from stobatch.results import Exported, Kind, ShareAt
from stobatch.types import Status

_LIBRARIES = {"onnx": "onnx"}
_LOADED_BY = {
    "torchscript": 'import torch\n\nnetwork = torch.jit.load("model.pt")\nscores = network(inputs)',
    "pt2": 'import torch\n\nnetwork = torch.export.load("model.pt2").module()\nscores = network(inputs)',
    "onnx": 'import onnxruntime\n\nsession = onnxruntime.InferenceSession("model.onnx")\n'
    'scores = session.run(None, {"inputs": inputs})[0]  # a NumPy array',
}


def model_card(exported: Exported) -> str:
    """Return the card as Markdown with its front matter."""
    front = "\n".join(f"{key}: {_yaml(value)}" for key, value in _front_matter(exported).items())
    license_line = "license: null # for the owner to choose"
    return f"---\n{front}\n{license_line}\n---\n\n" + "\n\n".join(_sections(exported)) + "\n"


def _yaml(value: Any) -> str:
    """Return a value in YAML's flow style, which is JSON but for numbers like 1e-05: older readers want a dot there.

    >>> _yaml({"delta": 1e-05, "tags": ["a: b"]})
    '{"delta": 1.0e-05, "tags": ["a: b"]}'
    """
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_yaml(key)}: {_yaml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_yaml, value)) + "]"
    text = json.dumps(value, ensure_ascii=False)
    return re.sub(r"^(-?\d+)e", r"\1.0e", text) if isinstance(value, float) else text


def _front_matter(exported: Exported) -> dict[str, Any]:
    result = {
        "task": {"type": "image-classification"},
        "dataset": {"name": exported.dataset.name, "type": exported.dataset.name},
        "metrics": list(_metrics(exported)),
    }
    return {
        "library_name": _LIBRARIES.get(exported.format, "pytorch"),
        "pipeline_tag": "image-classification",
        "tags": list(_tags(exported)),
        "model-index": [{"name": f"{exported.method} {exported.training_hash}", "results": [result]}],
        "privacy": exported.guarantee.to_dict(),
        "sha256": {exported.file: exported.file_sha256, "weights": exported.weights_sha256},
    }


def _tags(exported: Exported) -> Iterator[str]:
    """Yield what people filter models by: a property only where it is proved, and nothing refuted it."""
    yield "image-classification"
    if exported.guarantee.status is Status.PROVED:
        yield "differential-privacy"
    if exported.is_certified:
        yield "certified-robustness"
    yield "stobatch"


def _metrics(exported: Exported) -> Iterator[dict[str, Any]]:
    if exported.test_accuracy is not None:
        yield {
            "type": "accuracy",
            "name": "accuracy (measured on the run's network, not on this file)",
            "value": exported.test_accuracy,
            "args": {"status": "measured", "test_examples": exported.test_examples},
        }
    for kind, row in _certified_rows(exported):
        where = f"radius {row.radius:g}, {unit(kind.norm, kind.input_range)}, {kind.name}"
        yield {
            "type": "certified_accuracy",
            "name": f"certified accuracy of the run, not of this file ({status_words(kind.status)}; {where})",
            "value": row.value,
            "args": {
                "status": str(kind.status),
                "kind": kind.name,
                "function": kind.function,
                "norm": str(kind.norm),
                "input_range": kind.input_range,
                "radius": row.radius,
                "interval_95": [row.low, row.high],
                "test_examples": row.total,
            },
        }


def _certified_rows(exported: Exported) -> Iterator[tuple[Kind, ShareAt]]:
    certificates = exported.certificates
    for kind in certificates.kinds if certificates else ():
        yield from ((kind, row) for row in certificates.certified_accuracy[kind.name]) if certificates else ()


def _sections(exported: Exported) -> Iterator[str]:
    data, version = exported.dataset, exported.made_by
    yield f"# A classifier of {_name(data.name)}, trained with `{exported.method}`"
    yield (
        f"`{exported.file}` is the network that a training with stobatch left, as {exported.format}, for programs "
        "without stobatch: one pass from inputs to scores. This card was written with it and says who vouches for what."
    )
    yield "## Input and output"
    shape = ", ".join(map(str, data.input_shape))
    yield _list(
        f"input: {exported.dtype} of shape [N, {shape}] (pictures, channels, height, width), every value in [-1, 1]",
        f"pictures: {_line(exported.pictures)}",
        f"output: {exported.dtype} scores of shape [N, {data.num_classes}]; the label is the place of the largest, "
        "softmax makes shares of them",
        f"labels: {', '.join(f'{label} = {_name(data.class_name(label))}' for label in range(data.num_classes))}",
    )
    yield f"```python\n{_LOADED_BY[exported.format]}\n```"
    if exported.test_accuracy is not None:
        images = f"{exported.test_examples:,} held-out test images"
        yield f"The run's network was right on {exported.test_accuracy:.1%} of {images} (measured; not on this file)."
    yield "## Privacy towards the training data"
    yield from _privacy(exported)
    yield "## Certified robustness"
    yield from _robustness(exported)
    yield "## What was checked, and what was not"
    yield f"The file, loaded back on a CPU with torch {exported.torch}, gives {exported.check}."
    yield _list(*map(_line, exported.not_checked))
    yield "## Digests"
    yield _list(
        f"`{exported.file}`, SHA-256: `{exported.file_sha256}`",
        f"weights of the run (`weights_sha256`): `{exported.weights_sha256}`",
        f"configuration of the training: `{exported.training_hash}`",
        f"written by stobatch {version.stobatch or 'of no installed version'}"
        + (f", commit `{version.commit}`" if version.commit else ""),
    )


def _privacy(exported: Exported) -> Iterator[str]:
    guarantee = exported.guarantee
    yield f"**{_line(guarantee_line(guarantee))}**"
    yield f"{STATUS_MEANINGS[guarantee.status]} {_line(about(guarantee))}"
    lists = {
        "It starts from": start_lines(guarantee),
        "It assumes": guarantee.assumptions,
        "Against it": guarantee.objections,
        "Audits": guarantee.audits,
    }
    for title, lines in lists.items():
        if lines:
            yield f"{title}:\n\n{_list(*map(_line, lines))}"


def _robustness(exported: Exported) -> Iterator[str]:
    yield f"**{exported.scope()}**"
    certificates = exported.certificates
    if certificates is None:
        yield "No certificates were made for this run."
        return
    rows = ["| certificate | status | function | radius | right and certified, 95% interval |", "|---|---|---|---|---|"]
    for kind, row in _certified_rows(exported):
        radius = f"{row.radius:g} ({unit(kind.norm, kind.input_range)})"
        status = _loud_status(kind.status)
        rows.append(f"| {kind.name} | {status} | {kind.function.replace('_', ' ')} | {radius} | {row} |")
    yield f"Of the run's own network on {certificates.rows:,} test images:"
    yield "\n".join(rows)
    for kind in certificates.kinds:
        assumes = "".join(f"; assumes {one}" for one in kind.assumptions)
        yield _line(f"{kind.name}: {_loud_status(kind.status)}, source: {kind.source}; {_reliability(kind)}{assumes}.")
    if exported.flags:
        flags = (_line(f"{flag.level.upper()}: {flag.name}. {flag.evidence}") for flag in exported.flags)
        yield f"Against these numbers:\n\n{_list(*flags)}"


def _reliability(kind: Kind) -> str:
    if kind.failure_probability is None:
        return "it states no probability of failure"
    if kind.failure_probability == 0:
        return "it does not fail by chance"
    return f"each certificate fails with probability at most {kind.failure_probability:g}"


def _loud_status(status: Status) -> str:
    """Return a status in words, loud where it must not be overlooked."""
    words = status_words(status)
    return words if status is Status.PROVED else words.upper()


def _list(*lines: str) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _line(text: str) -> str:
    """Return text as one line in which nothing is read as HTML."""
    return " ".join(escape(text, quote=False).split())


def _name(text: str) -> str:
    r"""Return a name that a user chose, with nothing in it read as Markdown.

    >>> print(_name("a|b*<i>"))
    a\|b\*\<i\>
    """
    return re.sub(r"([\\`*_{}\[\]<>()#|!~])", r"\\\1", " ".join(text.split()))
