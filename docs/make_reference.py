"""Write the reference: every setting, recipe, verb and public name, from their own declarations.

`python docs/make_reference.py` writes docs/reference/*.md, and src/stobatch/cli/reference.json, from which
`stobatch settings` and `stobatch recipes` answer without importing PyTorch. A test regenerates all of it.
"""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from typer.models import ArgumentInfo, OptionInfo

import stobatch
import stobatch.cli
from stobatch import attacks, auditing, bounds, dp, votes
from stobatch.cli.app import app
from stobatch.config import RunConfig
from stobatch.registry import METHODS
from stobatch.settings import Setting, declared, dotted_keys
from stobatch_recipes import RECIPES, recipe

ROOT = Path(__file__).parents[1]
DATA = ROOT / "src" / "stobatch" / "cli" / "reference.json"
PAGES = ROOT / "docs" / "reference"
TIMES = ROOT / "results" / "recipe_times.json"


def _kind(setting: Setting) -> str:
    """The type in words.

    >>> from stobatch.config import EvaluationConfig
    >>> _kind(declared(EvaluationConfig)["radii"]), _kind(declared(EvaluationConfig)["limit"])
    ('float, one or a list', 'int, or unset')
    """
    return setting.kind.__name__ + ", one or a list" * setting.is_list + ", or unset" * setting.may_be_unset


def _row(setting: Setting, key: str) -> dict[str, Any]:
    default = list(setting.default) if isinstance(setting.default, tuple) else setting.default
    return {
        "key": key,
        "type": _kind(setting),
        "allowed": setting.allowed,
        "default": None if setting.is_required else json.dumps(default),
        "doc": setting.doc,
    }


def settings() -> list[dict[str, Any]]:
    """Every setting; one of a method names the methods that have it with this default."""
    found: list[dict[str, Any]] = []
    of_methods: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for name in METHODS:
        if name.startswith("control_"):
            continue  # broken on purpose, with the settings of `sound`
        for setting in declared(METHODS[name].config_class).values():
            row = _row(setting, f"method.{setting.name}")
            of_methods.setdefault(json.dumps(row), (row, []))[1].append(name)
    found += [{**row, "methods": names} for row, names in of_methods.values()]
    for section, field in RunConfig.model_fields.items():
        if section == "seed":
            found.append({**_row(declared(RunConfig)["seed"], "seed"), "methods": None})
        elif section != "method":
            rows = declared(field.annotation)  # type: ignore[arg-type]
            found += [{**_row(one, f"{section}.{one.name}"), "methods": None} for one in rows.values()]
    return found


def _value(config: RunConfig, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return list(value) if isinstance(value, tuple) else value


def _changed(config: RunConfig) -> dict[str, Any]:
    """What a recipe sets to something else than the default."""
    plain = RunConfig(method=type(config.method)())
    keys = [key for key in dotted_keys(config) if _value(config, key) != _value(plain, key)]
    return {"method.name": config.method.title} | {key: _value(config, key) for key in keys}


def recipes() -> list[dict[str, Any]]:
    """Every recipe with its purpose, what it guarantees, and how long its training takes."""
    times = json.loads(TIMES.read_text(encoding="utf-8"))["recipes"] if TIMES.exists() else {}
    found = []
    for name in RECIPES:
        config = recipe(name)
        guarantee = stobatch.plan(config).guarantee
        status = str(guarantee.status)
        budget = "none" if status == "none" else f"{status} ε = {guarantee.epsilon:.3g}"
        purpose = (inspect.getdoc(RECIPES[name]) or "").split("\n\n")[0].replace("\n", " ")
        found.append(
            {
                "name": name,
                "purpose": purpose,
                "method": config.method.title,
                "data": config.data.name,
                "steps": config.training.steps,
                "privacy": budget,
                "minutes": times.get(name, {}),
                "settings": _changed(config),
            }
        )
    return found


def _cell(text: object) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def _table(headings: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    names = list(headings)
    lines = [names, ["---"] * len(names), *([_cell(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def _settings_page(rows: list[dict[str, Any]]) -> str:
    parts = [
        f"# Settings\n\nAll {len({row['key'] for row in rows})} of them; `stobatch settings KEY` prints one. Set one "
        "with `--set KEY=VALUE`, in a TOML or JSON file (`--config`), or in Python with "
        '`config.override("KEY", value)`. Ranges are checked before anything is read.\n'
    ]
    sections = dict.fromkeys(row["key"].partition(".")[0] for row in rows)
    headings = ("setting", "type", "allowed", "default", "meaning")
    for section in sections:
        own = [row for row in rows if row["key"].partition(".")[0] == section]
        cells = [
            (
                f"`{row['key']}`",
                row["type"],
                row["allowed"],
                f"`{row['default']}`" if row["default"] else "",
                row["doc"],
            )
            for row in own
        ]
        if section == "method":
            names = [", ".join(row["methods"]) for row in own]
            with_methods = [(*cell, name) for cell, name in zip(cells, names, strict=True)]
            parts.append(f"## `{section}`\n\n" + _table((*headings, "of the methods"), with_methods))
        else:
            parts.append(f"## `{section}`\n\n" + _table(headings, cells))
    return "\n".join(parts)


def minutes(found: Mapping[str, Any], device: str) -> str:
    """How long a training takes, from a record, or nothing."""
    return f"{found[device]:.2g}" if device in found else ""


def _recipes_page(rows: list[dict[str, Any]]) -> str:
    cells = [
        (
            f"`{row['name']}`",
            row["purpose"],
            row["method"],
            row["data"],
            row["privacy"],
            f"{row['steps']:,}",
            minutes(row["minutes"], "cpu"),
            minutes(row["minutes"], "gpu"),
        )
        for row in rows
    ]
    headings = ("recipe", "purpose", "method", "data", "privacy", "steps", "min on one CPU core", "min on an H200")
    return (
        "# Recipes\n\nComplete configurations by name: `stobatch train --recipe NAME --out RUN`; "
        "`stobatch recipes NAME` prints what one sets. Minutes are of training alone: on one CPU core from a few "
        "steps of each (`benchmarks/recipe_times.py`), on a GPU from committed records of whole trainings; empty where "
        "nothing was measured. Privacy is what the plan says with secret seeds, before any audit.\n\n"
        + _table(headings, cells)
    )


def _cli_page() -> str:
    parts = ["# Command line\n\nEvery verb, its arguments and options. `stobatch VERB --help` prints the same.\n"]
    for command in app.registered_commands:
        verb: Any = command.callback
        options = typing.get_type_hints(verb, include_extras=True)
        rows = [_option(name, *typing.get_args(hint)[:2]) for name, hint in options.items() if name != "return"]
        table = _table(("argument or option", "type", "meaning"), rows)
        parts.append(f"## `stobatch {command.name or verb.__name__}`\n\n{inspect.getdoc(verb)}\n\n{table}")
    return "\n".join(parts)


def _option(name: str, kind: Any, info: OptionInfo | ArgumentInfo) -> tuple[str, str, str]:
    """A row of the page: how it is written, the type of its value, what it means."""
    given = [one for one in (info.default, *(info.param_decls or ())) if isinstance(one, str) and one[:1] == "-"]
    written = ", ".join(given) or f"--{name.replace('_', '-')}"
    if isinstance(info, ArgumentInfo):
        written = name.upper()
    types = [one for one in typing.get_args(kind) or (kind,) if one is not type(None)]
    shown = ", ".join(getattr(one, "__name__", str(one)).lower() for one in types)
    return f"`{written}`", shown, info.help or ""


def _api_page() -> str:
    parts = ["# Python\n\nThe public names: verbs and types of `stobatch`, and the core that works on any module.\n"]
    for module in (stobatch, dp, bounds, votes, attacks, auditing):
        rows = []
        for name in sorted(set(dir(module))):
            thing = getattr(module, name)
            public = name in getattr(module, "__all__", ()) or (module is not stobatch and not name.startswith("_"))
            if not public or inspect.ismodule(thing) or not (inspect.isclass(thing) or inspect.isfunction(thing)):
                continue
            if not thing.__module__.startswith("stobatch"):
                continue
            said = (inspect.getdoc(thing) or "").split("\n\n")[0].replace("\n", " ")
            rows.append((f"`{name}`", f"`{_signature(thing)}`" if inspect.isfunction(thing) else "class", said))
        parts.append(f"## `{module.__name__}`\n\n" + _table(("name", "call", "meaning"), rows))
    return "\n".join(parts)


def _signature(function: Any) -> str:
    """Parameters by name; types and defaults are in `help(...)`."""
    return "(" + ", ".join(inspect.signature(function).parameters) + ")"


def files() -> dict[Path, str]:
    """Every file of the reference with its text."""
    all_settings, all_recipes = settings(), recipes()
    content = {"settings": all_settings, "recipes": all_recipes}
    return {
        DATA: json.dumps(content, indent=1, ensure_ascii=False) + "\n",
        PAGES / "settings.md": _settings_page(all_settings),
        PAGES / "recipes.md": _recipes_page(all_recipes),
        PAGES / "command-line.md": _cli_page(),
        PAGES / "python.md": _api_page(),
    }


if __name__ == "__main__":
    PAGES.mkdir(exist_ok=True)
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
