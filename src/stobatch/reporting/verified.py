"""What `verify` found, on one page: what agrees, what differs, and what cannot be checked from outside."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

_OUTCOME_STYLES = {"agrees": "green", "differs": "bold red", "not checked": "yellow"}


def verified_page(document: dict[str, Any]) -> RenderableType:
    """A line for each check, then what no file can show, then the verdict."""
    width = max(len(outcome) for outcome in _OUTCOME_STYLES)
    lines = [Text(f"verify {document['run']}", style="bold")]
    for check in document["checks"]:
        about = f"{check['name']}, {check['file']}" if check["file"] else check["name"]
        outcome = Text(check["outcome"].ljust(width), style=_OUTCOME_STYLES[check["outcome"]])
        lines.append(Text.assemble("  ", outcome, f"  {about}: {check['detail']}"))
    lines.append(Text("No file can show", style="bold"))
    lines += [Text(f"  {line}") for line in document["cannot_be_checked"]]
    return Group(*lines, _verification_verdict(document))


def _verification_verdict(document: dict[str, Any]) -> Text:
    differing = sum(check["outcome"] == "differs" for check in document["checks"])
    if differing:
        return Text(f"DIFFERS in {differing} of {len(document['checks'])} checks: do not rely on it.", style="bold red")
    skipped = sum(check["outcome"] == "not checked" for check in document["checks"])
    return Text(f"Everything that was checked agrees; {skipped} things were not checked.", style="bold green")
