"""Where each numbered item of the paper lives in the code, and whether it holds.

`@implements("Lemma 2")` puts an item on the map; `stobatch where "Lemma 2"` prints the file, the line and our
verdict. The map is read from the source, so that asking imports nothing; an item has one home.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from stobatch.errors import SettingError

T = TypeVar("T")
Definition = ast.FunctionDef | ast.ClassDef
_PACKAGE = Path(__file__).parent


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
    """Return the names of a run of equations, steps of one proof that share one home."""
    return [f"Eq. {number}" for number in range(first, last + 1)]


def implements(*names: str, verdict: str) -> Callable[[T], T]:
    """Mark the decorated function or class as the one home of the named items.

    `verdict` says in one sentence whether the paper's statement holds; the pages under docs/ give the reasons.
    """
    del names, verdict  # `items` reads them from the source
    return lambda code: code


@cache
def items() -> Mapping[str, PaperItem]:
    """Return every item that has a home, in the order of the paper's numbering."""
    by_name: dict[str, PaperItem] = {}
    for file in sorted(_PACKAGE.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        for item in _items_of(file, ast.parse(text)) if "@implements(" in text else ():
            if item.name in by_name:
                raise RuntimeError(f"{item.name} has two homes: {by_name[item.name].code} and {item.code}")
            by_name[item.name] = item
    order = ["Definition", "Lemma", "Theorem", "Corollary", "Algorithm", "Eq.", "Appendix"]

    def key(name: str) -> tuple[int, int, str]:
        kind, _, number = name.partition(" ")
        return order.index(kind), int(number) if number.isdigit() else 0, number

    return {name: by_name[name] for name in sorted(by_name, key=key)}


def _items_of(file: Path, tree: ast.Module) -> Iterator[PaperItem]:
    """Yield the items of one file. Names and verdicts are made of literals, texts of the file's own and `equations`."""
    known: dict[str, Any] = {"equations": equations}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            known |= {target.id: node.value.value for target in node.targets if isinstance(target, ast.Name)}
    module = ".".join(file.relative_to(_PACKAGE.parent).with_suffix("").parts)
    for qualified, node in _definitions(tree.body, module):
        for call in node.decorator_list:
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "implements":
                names = ast.keyword("names", ast.List(call.args, ast.Load()))
                keywords = ast.Call(ast.Name("dict", ast.Load()), [], [names, *call.keywords])
                asked = eval(compile(ast.fix_missing_locations(ast.Expression(keywords)), file, "eval"), known)
                summary = (ast.get_docstring(node) or "").split("\n")[0]
                # The line of the first decorator, where a reader wants to begin.
                line = min(one.lineno for one in node.decorator_list)
                for name in asked["names"]:
                    yield PaperItem(name, qualified, str(file), line, summary, asked["verdict"])


def _definitions(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, Definition]]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield f"{prefix}.{node.name}", node
            yield from _definitions(node.body, f"{prefix}.{node.name}")


def where(name: str) -> PaperItem:
    """Return the home of one item, as in `where("Theorem 5")`."""
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
    """Return the item's file as a path inside the package, the same on every machine."""
    return str(Path(item.file).relative_to(_PACKAGE.parent))
