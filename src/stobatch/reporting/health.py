"""What doctor found, as a table: the state first, what was tried and measured, and at the end what to do."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_STATE_STYLES = {"ok": "green", "warning": "yellow", "missing": "dim", "not here": "dim", "broken": "bold red"}


def health_table(document: dict[str, Any]) -> RenderableType:
    """A line for each check; below it a remedy for each one that has something to mend, broken ones last."""
    table = Table(title=f"this machine, in {document['seconds']:.0f} s", title_justify="left")
    for heading, justify in (("check", "left"), ("state", "left"), ("tried and measured", "left"), ("s", "right")):
        table.add_column(heading, justify=justify, no_wrap=heading != "tried and measured")  # type: ignore[arg-type]
    for check in document["checks"]:
        state = Text(check["status"], style=_STATE_STYLES[check["status"]])
        table.add_row(check["name"], state, Text(check["said"]), f"{check['seconds']:.1f}")
    return Group(table, *_remedies(document["checks"]), _health_verdict(document))


def _remedies(checks: list[dict[str, Any]]) -> list[Text]:
    mendable = sorted((check for check in checks if check["remedy"]), key=lambda check: check["status"] == "broken")
    return [Text(f"{check['name']}: {check['remedy']}", style=_STATE_STYLES[check["status"]]) for check in mendable]


def _health_verdict(document: dict[str, Any]) -> Text:
    broken = [check["name"] for check in document["checks"] if check["needed"] and check["status"] == "broken"]
    if document["ready"]:
        said = "Everything that training needs works." if document["complete"] else "What was checked works."
        return Text(said, style="bold green")
    return Text(f"Training needs what is broken: {', '.join(broken)}.", style="bold red")
