"""Pages from templates: each is one file that needs nothing else and runs nothing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Environment

PALETTE = {
    "page": ("#fdfdfc", "#16181c"),
    "card": ("#f5f5f2", "#1f2228"),
    "ink": ("#1d2126", "#e6e7e9"),
    "muted": ("#636b74", "#9aa3ad"),
    "line": ("#dcdcd6", "#373c44"),
    "published": ("#386fa4", "#76aee3"),
    "adaptive": ("#22262c", "#eceef0"),
    "clean": ("#8b929a", "#868e97"),
    "claimed": ("#99590d", "#e0a24c"),
    "proved": ("#2a7d45", "#62bd7e"),
    "void": ("#8a6a00", "#d8b53a"),
    "refuted": ("#b83232", "#ee7b78"),
    "consistent": ("#28748b", "#6fbdd4"),
    "attack-1": ("#4f86ba", "#7fb2e5"),
    "attack-2": ("#7b62ad", "#ab95dd"),
    "attack-3": ("#2f8f8f", "#5fc2c0"),
    "attack-4": ("#9c6b52", "#cf9d83"),
    "attack-5": ("#b3598f", "#e08fc0"),
    "attack-6": ("#73808d", "#a5b1bd"),
    "attack-7": ("#6c7a24", "#b2c063"),
    "attack-8": ("#35507a", "#8fa6d6"),
}
"""Light and dark value of each colour. The light ones differ, so a figure's colours can be told apart by value."""

LIGHT = {name: light for name, (light, _) in PALETTE.items()}


@dataclass(frozen=True)
class Note:
    """A remark, and the command that does something about it."""

    text: str
    command: str = ""


@cache
def templates() -> Environment:
    """Return the templates next to this file; they escape what they are given, and refuse unknown names."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates", encoding="utf-8"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.globals.update(palette=PALETTE)
    return environment


def render(template: str, **view: object) -> bytes:
    """Return a page; the same view gives the same bytes."""
    return templates().get_template(template).render(**view).encode()
