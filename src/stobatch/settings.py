"""Configuration sections as pydantic models: declared ranges, overrides by dotted key, exact round trips, one hash.

A setting states its type, range and meaning where it is declared. The check, the error message, the reference page and
the fuzz test all read that one declaration.
"""

from __future__ import annotations

import hashlib
import json
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import TYPE_CHECKING, Any, Self

import annotated_types
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from stobatch import strict_json
from stobatch.errors import SettingError

LARGEST = 2**64
"""No setting is a larger whole number: counts of anything stay far below, and public seeds need no more."""
_LIMITS: dict[type[Any], str] = {
    annotated_types.Ge: "at least",
    annotated_types.Gt: "above",
    annotated_types.Le: "at most",
    annotated_types.Lt: "below",
}


@dataclass(frozen=True)
class _Names:
    """What pydantic has no word for: names that may grow while the program runs, and how it stands in files."""

    choices: Collection[str] | None
    stored: str | None
    added_later: bool


def setting(
    default: Any = PydanticUndefined,
    *,
    doc: str,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    choices: Collection[str] | None = None,
    stored: str | None = None,
    added_later: bool = False,
) -> Any:
    """Declare one field of a `Settings` class with its meaning and its allowed values.

    `choices` may be the names of a registry. `stored` is the name in files, where it is another one: hashes rest on it,
    and it is accepted wherever the field's own name is. One that was `added_later` is left out of files where it has
    its default, so that older settings keep their hash. Of a list, limits stand at the type of its entries.
    """
    field: Any = Field(default, description=doc, ge=at_least, gt=above, le=at_most, lt=below)
    field.metadata.append(_Names(choices, stored, added_later))
    return field


@dataclass(frozen=True)
class Setting:
    """One declared setting, for people and for tests."""

    name: str
    kind: type[Any]
    """Of the value, or of each entry of a list."""
    default: Any
    """None also where there is no default; see `is_required`."""
    doc: str
    limits: Mapping[str, float]
    choices: Collection[str] | None
    stored: str | None
    added_later: bool
    is_required: bool
    may_be_unset: bool
    is_list: bool

    @property
    def allowed(self) -> str:
        """Return the allowed values in words."""
        if self.choices is not None:
            return "one of " + ", ".join(self.choices)
        return " and ".join(f"{word} {bound:g}" for word, bound in self.limits.items()) or "any value"


@cache
def declared(section: type[Settings]) -> Mapping[str, Setting]:
    """Return every setting of a section by its name, sections within it left out."""
    declarations = {name: _read_declaration(name, field) for name, field in section.model_fields.items()}
    return {name: one for name, one in declarations.items() if one is not None}


def _read_declaration(name: str, field: FieldInfo) -> Setting | None:
    names = next((entry for entry in field.metadata if isinstance(entry, _Names)), None)
    if names is None:
        return None
    kind, metadata = field.annotation, list(field.metadata)
    options = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    (kind,) = (option for option in options if option is not types.NoneType)
    is_list = typing.get_origin(kind) is tuple
    if is_list:
        kind = typing.get_args(kind)[0]
    if typing.get_origin(kind) is typing.Annotated:
        kind, *inner = typing.get_args(kind)
        metadata += [entry for one in inner for entry in (one.metadata if isinstance(one, FieldInfo) else [one])]
    limits = {_LIMITS[type(entry)]: _bound(entry) for entry in metadata if type(entry) in _LIMITS}
    return Setting(
        name=name,
        kind=typing.cast(type[Any], kind),
        default=None if field.is_required() else field.default,
        doc=field.description or "",
        limits=limits,
        choices=names.choices,
        stored=names.stored,
        added_later=names.added_later,
        is_required=field.is_required(),
        may_be_unset=types.NoneType in options,
        is_list=is_list,
    )


def _bound(limit: Any) -> float:
    value: float
    (value,) = (getattr(limit, name) for name in ("ge", "gt", "le", "lt") if hasattr(limit, name))
    return value


class Settings(BaseModel):
    """Base of every configuration section: checks itself on construction and never changes afterwards."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    if not TYPE_CHECKING:

        def __init__(self, **values: Any) -> None:
            """Raise what pydantic finds as one sentence with a remedy."""
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise _explain(type(self), error) from None

    @field_validator("*", mode="before")
    @classmethod
    def _read(cls, value: Any, info: ValidationInfo) -> Any:
        """Take a list or a single value for a tuple; refuse what no setting may be before it is printed anywhere."""
        name = str(info.field_name)
        one = declared(cls).get(name)
        if one is not None and one.is_list:
            if isinstance(value, str | int | float) and not isinstance(value, bool):
                value = (value,)
            value = tuple(value) if isinstance(value, list) else value
        for entry in value if isinstance(value, tuple) else (value,):
            if isinstance(entry, int) and not -LARGEST <= entry <= LARGEST:
                raise SettingError(f"{name} is a number of {entry.bit_length()} bits.", remedy="Use at most 64 bits.")
            if isinstance(entry, str) and not entry.isprintable():
                raise SettingError(f"{name}={entry!a} has characters that cannot be printed.", remedy="Leave them out.")
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _choose(cls, value: Any, info: ValidationInfo) -> Any:
        one = declared(cls).get(str(info.field_name))
        if one is not None and value == ():
            raise SettingError(f"{one.name} is empty.", remedy=f"Give at least one value, {one.allowed}.")
        if one is not None and one.choices is not None:
            for entry in value if isinstance(value, tuple) else (value,):
                if entry is not None and entry not in one.choices:
                    raise _not_allowed_error(one, entry)
            # A registry takes other names for some of what it lists; files have one.
            shown = getattr(one.choices, "shown", None)
            if shown is not None and value is not None:
                return tuple(map(shown, value)) if isinstance(value, tuple) else shown(value)
        return value

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        known, plain = declared(type(self)), dict[str, Any]()
        for name, value in self:
            one = known.get(name)
            if one is None or not (one.added_later and value == one.default):
                plain[(one and one.stored) or name] = _plain(value)
        return plain

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the inverse of `to_dict`; an unknown key is an error that lists its nearest names."""
        if not isinstance(values, Mapping):
            raise SettingError(
                f"{show_value(values)} is not a section of settings.", remedy="Write a table of key = value pairs."
            )
        values, fields = own_names(cls, values), cls.model_fields
        for key in values:
            if key not in fields:
                raise unknown_key(key, list(fields))
        return cls(**{key: _build(value, fields[key].annotation) for key, value in values.items()})

    def replace(self, **changes: Any) -> Self:
        return type(self)(**{**dict(self), **own_names(type(self), changes)})

    def override(self, key: str, value: Any) -> Self:
        """Return a copy with one dotted key changed, as in `override("training.steps", 100)`."""
        return self.override_all({key: value})

    def override_all(self, assignments: Mapping[str, Any]) -> Self:
        """Return a copy with dotted keys changed at once: values that only fit together may come in any order."""
        assignments = own_names(type(self), assignments)
        known = list(type(self).model_fields)
        changes: dict[str, Any] = {}
        sections: dict[str, dict[str, Any]] = {}
        for key, value in assignments.items():
            name, _, rest = key.partition(".")
            if name not in known:
                raise unknown_key(name, dotted_keys(self) if not rest else known)
            current = getattr(self, name)
            if isinstance(current, Settings):
                if not rest:
                    raise SettingError(
                        f"'{name}' is a section, not a setting.",
                        remedy=f"Set one of its keys: {', '.join(name + '.' + k for k in dotted_keys(current)[:6])}.",
                    )
                sections.setdefault(name, {})[rest] = value
            elif rest:
                raise unknown_key(key, dotted_keys(self))
            else:
                changes[name] = value
        return self.replace(
            **changes, **{name: getattr(self, name).override_all(inner) for name, inner in sections.items()}
        )


def names_of(kind: type[Settings]) -> dict[str, str]:
    """Return the field that each accepted name means: its own, and the one in files where that is another."""
    stored = {one.stored: one.name for one in declared(kind).values() if one.stored}
    return {name: name for name in kind.model_fields} | stored


def own_names(kind: type[Settings], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by the fields' own names, where some may stand by the name in files; both at once are refused."""
    names, renamed = names_of(kind), dict[str, Any]()
    for key, value in values.items():
        name = names.get(key, key)
        if name in renamed:
            stored = next(other for other, field in names.items() if field == name != other)
            raise SettingError(f"'{name}' and '{stored}' are one setting.", remedy=f"Give {name} alone.")
        renamed[name] = value
    return renamed


def _explain(section: type[Settings], error: ValidationError) -> SettingError:
    """Return what pydantic finds first, in the words of every other error."""
    first = error.errors(include_url=False)[0]
    name, value = str(first["loc"][0]), first["input"]
    if first["type"] == "missing":
        return SettingError(f"'{name}' is missing.", remedy=f"Add {name}, or start from a recipe.")
    if first["type"] == "extra_forbidden":
        return unknown_key(name, list(section.model_fields))
    one = declared(section).get(name)
    if one is not None and first["type"] in _OUT_OF_RANGE:
        return _not_allowed_error(one, value)
    wanted = one.kind.__name__ if one is not None else "section"
    return SettingError(
        f"{name}={show_value(value)} is not of the right type.", remedy=f"Give {name} a value of type {wanted}."
    )


_OUT_OF_RANGE = ("greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number")


def _not_allowed_error(one: Setting, value: Any) -> SettingError:
    near = get_close_matches(str(value)[:100], one.choices or (), n=1)
    return SettingError(
        f"{one.name}={value} is not allowed.",
        why=f"{one.doc.rstrip('.')}.",
        remedy=f"Use {one.allowed}." + (f" Did you mean {near[0]}?" if near else ""),
    )


def show_value(value: Any) -> str:
    """Return a value as a message shows it; a number of thousands of digits has no text, nor a list in itself."""
    try:
        return repr(value)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__}"


def unknown_key(key: str, known: Sequence[str]) -> SettingError:
    # Of a long text only the beginning: matching takes time that grows with the square of the length.
    ends = [name for name in known if name.endswith(f".{key}")]
    near = ends[:3] or get_close_matches(key[:100], known, n=3, cutoff=0.6)
    remedy = f"Nearest: {', '.join(near)}." if near else "Run `stobatch settings` for all of them."
    return SettingError(f"there is no setting '{key}'.", remedy=remedy)


def dotted_keys(settings: Settings) -> list[str]:
    """Return every key that `override` takes."""
    keys: list[str] = []
    for name, value in settings:
        if isinstance(value, Settings):
            keys += [f"{name}.{key}" for key in dotted_keys(value)]
        else:
            keys.append(name)
    return keys


def parse_assignment(text: str) -> tuple[str, Any]:
    """Parse `key=value` from a command line; the value is read as JSON where it is JSON, else as text.

    >>> parse_assignment("training.steps=100"), parse_assignment("model.architecture=resnet18")
    (('training.steps', 100), ('model.architecture', 'resnet18'))
    """
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise SettingError(
            f"'{text}' is not a setting.", remedy="Write --set key=value, as in --set training.steps=100."
        )
    try:
        return key, strict_json.read(value)
    except ValueError as error:
        if value.lstrip()[:1] in ('"', "[", "{"):
            raise SettingError(f"{key}={value} is not valid JSON: {error}.", remedy="Mend its brackets.") from None
        return key, value


def content_hash(plain: Any) -> str:
    """Return twelve hexadecimal digits that change whenever the content does."""
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:12]


def _plain(value: Any) -> Any:
    if isinstance(value, Settings):
        return value.to_dict()
    return [_plain(v) for v in value] if isinstance(value, tuple) else value


def _build(value: Any, hint: Any) -> Any:
    if isinstance(hint, type) and issubclass(hint, Settings) and isinstance(value, Mapping):
        return hint.from_dict(value)
    return value
