"""Documents are read by attribute: no room looks up one of their values by a literal key.

A misspelt attribute is found by the type checker, a misspelt key by a user.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[3] / "src" / "stobatch"
ROOMS = ("auditing", "cli", "comparison", "doctor", "evaluation", "federated", "figures", "loading.py", "reporting",
         "results",
         "sharding.py", "training_run.py", "verification")  # fmt: skip
"""Rooms that read or write documents. The mathematics knows none."""

COLUMNS = "columns of a table of records, by name"
TENSORS = "tensors and texts of a safetensors file, by name"
PRIVATE = "a file of the private folder, which no other room reads"
PROBE = "the line that a probe in a process of its own prints"
MESSAGE = "a message of another library, or of the other side"
SETTINGS = "settings that may be changed, by their dotted names"
ALLOWED: dict[str, dict[str, str]] = {
    "auditing": {r"(self\.|attempt\.)?(columns|records)|table": COLUMNS, r"metadata|tensors": TENSORS},
    "cli": {r"changes|overrides": SETTINGS, r"row(\['minutes'\])?|shown\[0\]": "the reference, made from declarations"},
    "comparison": {
        r"run\.read\('data', private=True\)": PRIVATE,
        r"read_json\(path, TEST_DATA\)": "the digest of the test data of a comparison",
    },
    "doctor": {r"gpu|answer|numbers": PROBE, r"os\.environ|environment": "variables of the environment"},
    "evaluation": {
        r"(self\.|table\.)?(columns|records|answers)|clean|function\.answer\(\w+, generator\)": COLUMNS,
        r"identity": "what names a table of records",
        r"of_function": "tables by protocol",
        r"changes": SETTINGS,
    },
    "federated": {
        r"metadata|tensors|self\.optimiser\.state_dict\(\)": TENSORS,
        r"directory\.read\('(data|seeds)', private=True\)": PRIVATE,
        r"agreed": "terms.json: settings, which `config` reads",
        r"(reply\.)?content(\['\w+'\])?|self\._content_of\(reply\)(\['\w+'\])?|question|refusal|context\.\w+": MESSAGE,
        r"json\.loads\(done\.stdout\)": MESSAGE,
        r"os\.environ": "variables of the environment",
    },
    "figures": {
        r"LIGHT|_PAPER": "colours of the page",
        r"settings": "settings, for the few names that several methods have",
    },
    "loading.py": {r"metadata": TENSORS, r"run\.read\('seeds', private=True\)": PRIVATE},
    "reporting": {
        r"LIGHT|(curve\.)?look|_HEIGHTS": "colours of the page, and places in a figure",
        r"metadata|pixels": TENSORS,
        r"shares": "shares by protocol",
    },
    "results": {
        r"(self\.)?config(\['\w+'\])?|one": "settings, for the few names that every method has",
        r"schema|first": "a JSON schema, or an error of pydantic",
        r"stored|content|info\.data|GUARANTEE_SCHEMA": "a document before it is read, or as it is written",
        r"metadata": TENSORS,
    },
    "training_run.py": {r"run\.read\('data', private=True\)": PRIVATE},
    "verification": {
        r"(self\.|table\.)?(columns|records|recorded|rows|certified)": COLUMNS,
        r"metadata": TENSORS,
        r"ledger": PRIVATE,
        r"images\.predictions": "answers by the radius of a picture",
    },
}
"""By room: what may be asked by a literal key, and why it is no document."""


def look_ups(tree: ast.AST) -> Iterator[ast.expr]:
    """Every `x["name"]` and `x.get("name")`."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Subscript)
            and isinstance(node.slice, ast.Constant)
            and isinstance(node.slice.value, str)
        ) or (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "get"
            and node.args
            and isinstance(node.args[0], ast.Constant)
            and isinstance(node.args[0].value, str)
        ):
            yield node


def asked(node: ast.expr) -> str:
    """What is asked, as source."""
    inner = node.value if isinstance(node, ast.Subscript) else node.func.value  # type: ignore[attr-defined]
    return ast.unparse(inner)


def unexplained(text: str, room: str) -> list[str]:
    allowed = ALLOWED.get(room, {})
    return [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in look_ups(ast.parse(text))
        if not any(re.fullmatch(pattern, asked(node)) for pattern in allowed)
    ]


@pytest.mark.parametrize("room", ROOMS)
def test_no_document_is_asked_by_a_literal_key(room: str) -> None:
    files = [SOURCE / room] if room.endswith(".py") else sorted((SOURCE / room).rglob("*.py"))
    assert files
    found = {file.name: lines for file in files if (lines := unexplained(file.read_text(encoding="utf-8"), room))}
    assert not found, "read the document by its attributes (stobatch.results), or say above what is asked here"


@pytest.mark.parametrize("line", ["scores['norm']", "document.get('epsilon')", "run.read('audit')['findings']"])
def test_the_broken_twin_that_asks_a_document_is_caught(line: str) -> None:
    assert unexplained(line, "reporting")
    assert not unexplained("LIGHT['ink']", "reporting")


@pytest.mark.parametrize("room", ALLOWED)
def test_nothing_is_allowed_that_nobody_asks(room: str) -> None:
    files = [SOURCE / room] if room.endswith(".py") else sorted((SOURCE / room).rglob("*.py"))
    texts = [asked(node) for file in files for node in look_ups(ast.parse(file.read_text(encoding="utf-8")))]
    idle = [pattern for pattern in ALLOWED[room] if not any(re.fullmatch(pattern, text) for text in texts)]
    assert not idle
