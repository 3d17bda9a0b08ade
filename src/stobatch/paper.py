"""Where each numbered item of the paper lives in the code, and whether it holds.

`@implements("Lemma 2")` puts an item on the map; `stobatch where "Lemma 2"` prints the file, the line and our
verdict. An item is registered once: a second home for it is an error at import time.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar

from stobatch.errors import SettingError

T = TypeVar("T")


@dataclass(frozen=True)
class PaperItem:
    """One item of the paper: its code, and what we know about the claim."""

    name: str
    code: str
    file: str
    line: int
    summary: str
    verdict: str


def equations(first: int, last: int) -> list[str]:
    """The names of a run of equations, steps of one proof that share one home."""
    return [f"Eq. {number}" for number in range(first, last + 1)]


_registry: dict[str, PaperItem] = {}


def implements(*names: str, verdict: str) -> Callable[[T], T]:
    """Register the decorated function or class as the one home of the named items.

    `verdict` says in one sentence whether the paper's statement holds; the pages under docs/ give the reasons.
    """

    def register(thing: T) -> T:
        code = inspect.unwrap(thing)  # type: ignore[arg-type]
        where = f"{code.__module__}.{code.__qualname__}"
        summary = (inspect.getdoc(code) or "").split("\n")[0]
        for name in names:
            if name in _registry and _registry[name].code != where:
                raise RuntimeError(f"{name} is registered twice: {_registry[name].code} and {where}")
            _registry[name] = PaperItem(
                name,
                where,
                inspect.getsourcefile(code) or "",
                inspect.getsourcelines(code)[1],
                summary,
                verdict,
            )
        return thing

    return register


def _import_everything() -> None:
    # One module runs the program, the other needs a package that is optional; neither holds anything of the paper.
    left_out = ("stobatch.__main__", "stobatch.federated.flower")
    for module in pkgutil.walk_packages([str(Path(__file__).parent)], "stobatch."):
        if module.name not in left_out:
            importlib.import_module(module.name)


def items() -> dict[str, PaperItem]:
    """Every registered item, in the order of the paper's numbering."""
    _import_everything()
    order = ["Definition", "Lemma", "Theorem", "Corollary", "Algorithm", "Eq.", "Appendix"]

    def key(name: str) -> tuple[int, int, str]:
        kind, _, number = name.partition(" ")
        return order.index(kind), int(number) if number.isdigit() else 0, number

    return {name: _registry[name] for name in sorted(_registry, key=key)}


def where(name: str) -> PaperItem:
    """The home of one item, as in `where("Theorem 5")`."""
    known = items()
    wanted = " ".join(name.split()).casefold().replace("equation", "eq.").replace("thm.", "theorem")
    for item in known.values():
        if item.name.casefold() == wanted:
            return item
    near = get_close_matches(name, known, n=3, cutoff=0.4)
    raise SettingError(
        f"'{name}' is not a numbered item of the paper that this library implements.",
        remedy=f"Nearest: {', '.join(near)}." if near else "Run `stobatch where` for the whole list.",
    )


def relative_file(item: PaperItem) -> str:
    """The item's file as a path inside the package, the same on every machine."""
    return str(Path(item.file).relative_to(Path(__file__).parent.parent))
