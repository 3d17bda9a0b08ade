"""Frozen dataclasses as configuration: declared ranges, overrides by dotted key, exact round trips, one hash.

A setting states its range where it is declared; the check, the error message and the fuzz test all read that one
declaration.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from math import isfinite
from typing import Any, Self, TypeVar

from stobatch import strict_json
from stobatch.errors import SettingError

C = TypeVar("C", bound="Settings")
LARGEST = 2**64
"""No setting is a larger whole number: counts of anything stay far below, and public seeds need no more."""


def setting(
    default: Any = dataclasses.MISSING,
    *,
    doc: str,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    choices: Collection[str] | None = None,
    stored: str | None = None,
) -> Any:
    """Declare one field of a `Settings` class with its meaning and its allowed values.

    `choices` may be the names of a registry. `stored` is the name in files, where it is another one: hashes rest on it,
    and it is accepted wherever the field's own name is.
    """
    limits = {"at least": at_least, "above": above, "at most": at_most, "below": below}
    return dataclasses.field(
        default=default,
        metadata={
            "doc": doc,
            "limits": {k: v for k, v in limits.items() if v is not None},
            "choices": choices,
            "stored": stored,
        },
    )


def _allowed(value: float, limits: Mapping[str, float]) -> bool:
    return (isinstance(value, int) or isfinite(value)) and all(
        {
            "at least": value >= bound,
            "above": value > bound,
            "at most": value <= bound,
            "below": value < bound,
        }[kind]
        for kind, bound in limits.items()
    )


def describe(field: dataclasses.Field[Any]) -> str:
    """The allowed values of a field in words."""
    if field.metadata.get("choices") is not None:
        return "one of " + ", ".join(field.metadata["choices"])
    return " and ".join(f"{kind} {bound:g}" for kind, bound in field.metadata.get("limits", {}).items()) or "any value"


@dataclasses.dataclass(frozen=True)
class Settings:
    """Base of every configuration section: checks itself on construction and never changes afterwards."""

    def __post_init__(self) -> None:
        hints = _hints(type(self))
        for field in dataclasses.fields(self):
            value = _coerce(getattr(self, field.name), hints[field.name], field.name)
            object.__setattr__(self, field.name, value)
            self._check(field, value)

    def _check(self, field: dataclasses.Field[Any], value: Any) -> None:
        choices, limits = field.metadata.get("choices"), field.metadata.get("limits", {})
        if value == ():
            raise SettingError(f"{field.name} is empty.", remedy=f"Give at least one value, {describe(field)}.")
        for one in value if isinstance(value, tuple) else (value,):
            if one is None:
                continue
            if (choices is not None and one not in choices) or (limits and not _allowed(one, limits)):
                near = get_close_matches(str(one)[:100], choices or (), n=1)
                raise SettingError(
                    f"{field.name}={one} is not allowed.",
                    why=f"{field.metadata['doc'].rstrip('.')}.",
                    remedy=f"Use {describe(field)}." + (f" Did you mean {near[0]}?" if near else ""),
                )

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {f.metadata.get("stored") or f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`; an unknown key is an error that lists its nearest names."""
        if not isinstance(values, Mapping):
            raise SettingError(
                f"{show_value(values)} is not a section of settings.", remedy="Write a table of key = value pairs."
            )
        values, hints = own_names(cls, values), _hints(cls)
        known = [f.name for f in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                raise unknown_key(key, known)
        for field in dataclasses.fields(cls):
            if field.default is dataclasses.MISSING and field.name not in values:
                raise SettingError(f"'{field.name}' is missing.", remedy=f"Add {field.name}, or start from a recipe.")
        return cls(**{key: _build(value, hints[key]) for key, value in values.items()})

    def replace(self, **changes: Any) -> Self:
        return dataclasses.replace(self, **own_names(type(self), changes))

    def override(self, key: str, value: Any) -> Self:
        """A copy with one dotted key changed, as in `override("training.steps", 100)`."""
        return self.override_all({key: value})

    def override_all(self, assignments: Mapping[str, Any]) -> Self:
        """A copy with dotted keys changed at once: values that only fit together may come in any order."""
        assignments = own_names(type(self), assignments)
        known = [f.name for f in dataclasses.fields(self)]
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
    """The field that each accepted name means: its own, and the one in files where that is another."""
    fields = dataclasses.fields(kind)
    return {f.name: f.name for f in fields} | {f.metadata["stored"]: f.name for f in fields if f.metadata.get("stored")}


def own_names(kind: type[Settings], values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by the fields' own names, where some may stand by the name in files; both at once are refused."""
    names, found = names_of(kind), dict[str, Any]()
    for key, value in values.items():
        name = names.get(key, key)
        if name in found:
            stored = next(other for other, field in names.items() if field == name != other)
            raise SettingError(f"'{name}' and '{stored}' are one setting.", remedy=f"Give {name} alone.")
        found[name] = value
    return found


_HINTS: dict[type[Any], dict[str, Any]] = {}


def _hints(kind: type[Any]) -> dict[str, Any]:
    """The annotations of a class, evaluated once: that takes longer than all checks of a section."""
    if kind not in _HINTS:
        _HINTS[kind] = typing.get_type_hints(kind)
    return _HINTS[kind]


def show_value(value: Any) -> str:
    """A value as a message shows it; a number of thousands of digits has no text, nor has a list within itself."""
    try:
        return repr(value)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__}"


def unknown_key(key: str, known: Sequence[str]) -> SettingError:
    # Of a long text only the beginning: matching takes time that grows with the square of the length.
    near = get_close_matches(key[:100], known, n=3, cutoff=0.5) or sorted(known)[:8]
    return SettingError(f"there is no setting '{key}'.", remedy=f"Nearest: {', '.join(near)}.")


def dotted_keys(settings: Settings) -> list[str]:
    """Every key that `override` takes."""
    keys: list[str] = []
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if isinstance(value, Settings):
            keys += [f"{field.name}.{key}" for key in dotted_keys(value)]
        else:
            keys.append(field.name)
    return keys


def parse_assignment(text: str) -> tuple[str, Any]:
    """`key=value` from a command line; the value is read as JSON where it is JSON, else as text.

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
    """Twelve hexadecimal digits that change whenever the content does."""
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:12]


def _plain(value: Any) -> Any:
    if isinstance(value, Settings):
        return value.to_dict()
    return [_plain(v) for v in value] if isinstance(value, tuple) else value


def _build(value: Any, hint: Any) -> Any:
    if isinstance(hint, type) and issubclass(hint, Settings) and isinstance(value, Mapping):
        return hint.from_dict(value)
    return value


def _coerce(value: Any, hint: Any, name: str) -> Any:
    """Check a value against its annotation; the only conversions are list to tuple and int to float."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        options = typing.get_args(hint)
        if value is None and type(None) in options:
            return None
        hint = next(option for option in options if option is not type(None))
    if typing.get_origin(hint) is tuple:
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            value = [value]
        if isinstance(value, list | tuple):
            return tuple(_coerce(v, typing.get_args(hint)[0], name) for v in value)
    elif isinstance(value, int) and not isinstance(value, bool) and hint in (int, float):
        if not -LARGEST <= value <= LARGEST:
            raise SettingError(f"{name} is a number of {value.bit_length()} bits.", remedy="Use at most 64 bits.")
        return hint(value)
    elif isinstance(value, str) and hint is str and not value.isprintable():
        raise SettingError(f"{name}={value!a} has characters that cannot be printed.", remedy="Leave them out.")
    elif isinstance(hint, type) and isinstance(value, hint) and not (isinstance(value, bool) and hint is not bool):
        return value
    wanted = getattr(hint, "__name__", str(hint))
    raise SettingError(
        f"{name}={show_value(value)} is not of the right type.", remedy=f"Give {name} a value of type {wanted}."
    )
