"""What a person reads about a federation: a line for each party, every ε with its status."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from stobatch.reporting.tables import guarantee_card
from stobatch.reporting.words import STATUS_WORDS

_COLUMNS = (
    ("records", "records", ","),
    ("sampling rate", "sampling_rate", ".4g"),
    ("noise multiplier", "noise_multiplier", ".4g"),
    ("rounds", "rounds", ","),
    ("at most", "most_rounds", ","),
    ("ε", "epsilon", "g"),
    ("δ", "delta", "g"),
)


def party_table(federation: dict[str, Any]) -> RenderableType:
    """The table behind a federation's guarantee, and the guarantee."""
    guarantee = federation["guarantee"]
    table = Table(
        title=f"parties; every ε is {STATUS_WORDS[guarantee['status']]}, for that party's records", title_justify="left"
    )
    table.add_column("party")
    for heading, _, _ in _COLUMNS:
        table.add_column(heading, justify="right")
    for party in federation["parties"]:
        table.add_row(party["name"], *[format(party[key], form) for _, key, form in _COLUMNS])
    return Group(table, guarantee_card(guarantee))
