"""What every document has in common: frozen, versioned, checked when it is read, written with the keys it has in files.

A document is read as strictly as it is written: a value of another type, a key that nothing writes and a key that is
missing are refused. Keys that older versions did not write have defaults; they are left out again when such a document
is written, so that reading and writing changes no byte.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
    WithJsonSchema,
)

from stobatch.dp.guarantee import PrivacyGuarantee
from stobatch.errors import RunError
from stobatch.files import SCHEMA_VERSION
from stobatch.runs import Run
from stobatch.types import Neighbours, Status

Text = StrictStr
Flag = StrictBool
Whole = StrictInt
Count = Annotated[int, Field(strict=True, ge=0)]
Number = Annotated[
    StrictInt | Annotated[float, Field(strict=True, allow_inf_nan=False)], WithJsonSchema({"type": "number"})
]
"""A whole number stays one: files say 1 where the program wrote 1, and 1.0 where it wrote 1.0."""
Size = Annotated[
    Count | Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)],
    WithJsonSchema({"type": "number", "minimum": 0}),
]
"""A radius, a duration: a number that is at least 0."""


def _present(value: Any) -> Any:
    if value is None:
        raise ValueError("it may be left out, and not be null")
    return value


NotNull = BeforeValidator(_present)
"""Of a key that older versions did not write: its absence says so, a null says nothing."""
Settings = dict[str, Any]
"""A section of the settings as `config` writes it; `config` has the classes to read it with."""


def _guarantee(stored: Any) -> PrivacyGuarantee:
    """Return a guarantee from its dictionary, with every value of its type."""
    if isinstance(stored, PrivacyGuarantee):
        return stored
    if not isinstance(stored, Mapping):
        raise ValueError("it is not a guarantee")
    try:
        guarantee = PrivacyGuarantee.from_dict(stored)
    except KeyError as error:
        raise ValueError(f"it has no {error.args[0]}") from None
    except TypeError as error:
        raise ValueError(str(error)) from None
    budget = (guarantee.epsilon, guarantee.delta)
    lines = (*guarantee.assumptions, *guarantee.objections, *guarantee.audits, guarantee.unit, guarantee.source)
    if any(isinstance(number, bool) or not isinstance(number, int | float) for number in budget):
        raise ValueError("its budget is not two numbers")
    if not all(isinstance(line, str) for line in lines):
        raise ValueError("its assumptions, objections and source are not all texts")
    if (prior := guarantee.prior) is not None:
        texts = (prior.name, prior.weights_sha256, *prior.read, *prior.may_contain)
        maybe = (prior.promise or "", prior.conflict or "", prior.tuned or "")
        if not all(isinstance(text, str) for text in (*texts, *maybe)) or not isinstance(prior.new_head, bool):
            raise ValueError("what it says of its prior is not all texts")
    written = guarantee.to_dict()
    if unknown := stored.keys() - written.keys():
        raise ValueError(f"nothing writes {', '.join(sorted(unknown))} for this status")
    if missing := written.keys() - stored.keys() - {"audits"}:
        raise ValueError(f"it has no {', '.join(sorted(missing))}")
    if other := [key for key, value in stored.items() if written[key] != value]:
        raise ValueError(f"nothing writes such a value of {other[0]}")
    return guarantee


_LINES = {"type": "array", "items": {"type": "string"}}
GUARANTEE_SCHEMA: dict[str, Any] = {
    "description": "A privacy guarantee; its budget is named by its status, as in claimed_epsilon.",
    "type": "object",
    "properties": {
        "status": {"enum": [str(status) for status in Status]},
        "void_reason": {"type": "string"},
        "status_with_secret_seeds": {"enum": [str(status) for status in Status]},
        "neighbours": {"enum": [str(relation) for relation in Neighbours]},
        "unit": {"type": "string"},
        "source": {"type": "string"},
        "assumptions": _LINES,
        "objections": _LINES,
        "audits": _LINES,
        "prior": {
            "description": "The weights that training started from; left out where they were random.",
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "weights_sha256": {"type": "string"},
                "read": _LINES,
                "may_contain": _LINES,
                "promise": {"type": ["string", "null"]},
                "new_head": {"type": "boolean"},
                "conflict": {"type": ["string", "null"]},
                "tuned": {"type": ["string", "null"]},
            },
            "required": ["name", "weights_sha256", "read", "may_contain", "promise", "new_head", "conflict", "tuned"],
            "additionalProperties": False,
        },
    },
    "patternProperties": {"^(claimed|proved|refuted|void)_(epsilon|delta)$": {"type": "number"}},
    "required": ["status", "neighbours", "unit", "source", "assumptions", "objections"],
    "additionalProperties": False,
}
Guarantee = Annotated[
    PrivacyGuarantee,
    BeforeValidator(_guarantee),
    PlainSerializer(PrivacyGuarantee.to_dict),
    WithJsonSchema(GUARANTEE_SCHEMA),
]
"""A guarantee as a field of a document."""


class Part(BaseModel):
    """A part of a document: attributes instead of keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", populate_by_name=True, arbitrary_types_allowed=True, defer_build=True
    )

    def to_dict(self) -> dict[str, Any]:
        """Return what files and `--json` hold, with their keys in their order."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)

    def replace(self, **changes: Any) -> Self:
        """Return the same with some attributes changed."""
        return self.model_copy(update=changes)


class Document(Part):
    """A whole document: what a verb returns, and mostly a file of a run."""

    kind: ClassVar[str] = ""
    """The name of the file and of its schema; empty for what is only returned."""
    version: ClassVar[int] = SCHEMA_VERSION

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], file: Path | str | None = None) -> Self:
        """Return the inverse of `to_dict`; raise one sentence with the file and the first field that is wrong."""
        try:
            return cls.model_validate(dict(content))
        except ValidationError as error:
            raise RunError(
                f"{file or 'the document'} does not hold what stobatch writes.",
                why=f"{describe(error)}: it was edited or damaged, or another version wrote it.",
                remedy="Restore it, or run the verb that writes it again.",
            ) from error

    @classmethod
    def read(cls, run: Run) -> Self:
        return cls.from_dict(run.read(cls.kind), run.path / f"{cls.kind}.json")

    @classmethod
    def read_if_there(cls, run: Run) -> Self | None:
        return cls.read(run) if run.has(cls.kind) else None

    def write(self, run: Run) -> None:
        run.write(self.kind, self.to_dict())

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def schema_of_file(cls) -> dict[str, Any]:
        """Return the JSON schema of the file, or of what `--json` prints where there is no file."""
        schema: dict[str, Any] = _without_titles(cls.model_json_schema(by_alias=True))
        if cls.kind:
            envelope = {"schema": cls._schema_name(), "version": {"const": cls.version}}
            schema["properties"] = envelope | schema["properties"]
            schema["required"] = [*envelope, *schema.get("required", [])]
        return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}

    @classmethod
    def _schema_name(cls) -> dict[str, str]:
        return {"const": f"stobatch.{cls.kind}"}

    def lines(self) -> list[str]:
        """Return what a person wants to see first; every epsilon and radius with its status and unit."""
        return []

    def __repr__(self) -> str:
        return "\n  ".join([f"{type(self).__name__}:", *self.lines()])

    __str__ = __repr__

    def _repr_html_(self) -> str:
        items = "".join(f"<li>{escape(line)}</li>" for line in self.lines())
        return f"<b>{type(self).__name__}</b><ul>{items}</ul>"


def _without_titles(schema: Any) -> Any:
    """Return a schema without the titles that repeat each field's name."""
    if isinstance(schema, dict):
        return {key: _without_titles(part) for key, part in schema.items() if key != "title"}
    return [_without_titles(part) for part in schema] if isinstance(schema, list) else schema


def describe(error: ValidationError) -> str:
    """Return the first fault, and where it is: `accuracy[0].radius is missing`."""
    first = error.errors(include_url=False)[0]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    fault = {"missing": "is missing", "extra_forbidden": "is nothing that it may hold"}.get(first["type"])
    return f"{where or 'It'} {fault or 'is wrong (' + first['msg'][:1].lower() + first['msg'][1:] + ')'}"
