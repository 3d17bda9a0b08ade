"""The JSON schemas of docs/schemas are those of the classes, and speak of every document."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from stobatch.results import DOCUMENTS, Document

DOCS = Path(__file__).parents[3] / "docs"
MADE = runpy.run_path(str(DOCS / "make_schemas.py"))["schemas"]()


@pytest.mark.parametrize("name", MADE)
def test_a_committed_schema_is_the_class(name: str) -> None:
    written = (DOCS / "schemas" / name).read_text(encoding="utf-8")
    assert written == MADE[name], "run `python docs/make_schemas.py`"


def test_nothing_else_is_committed() -> None:
    assert {file.name for file in (DOCS / "schemas").iterdir()} == set(MADE)


def test_every_document_has_a_schema() -> None:
    kinds = [kind for kind in Document.__subclasses__() if kind.__module__.startswith("stobatch.results")]
    assert set(kinds) == set(DOCUMENTS.values())


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_schema_forbids_what_nothing_writes_and_names_its_version(name: str) -> None:
    schema = json.loads(MADE[f"{name}.json"])
    assert schema["additionalProperties"] is False
    if DOCUMENTS[name].kind:
        assert schema["properties"]["version"] == {"const": 1}
        assert {"schema", "version"} <= set(schema["required"])
