"""The candidates of a search as a table and a figure; both are for the owner alone."""

from __future__ import annotations

from pathlib import Path

from stobatch.files import write_atomically
from stobatch.reporting.figures import canvas, standalone
from stobatch.reporting.page import LIGHT
from stobatch.reporting.table import Cell, Column, Table
from stobatch.results import Candidates


def candidates_table(candidates: Candidates) -> Table:
    """Return every candidate with its settings and its noisy score."""
    keys = list(candidates.rows[0].settings) if candidates.rows else []
    return Table.of(
        f"Candidates, scored on {candidates.held_out:,} held-out records with noise; for the owner alone",
        [Column("", is_number=True), *keys, Column("noisy score", is_number=True), ""],
        (
            [
                str(row.number),
                *(str(row.settings[key]) for key in keys),
                "" if row.noisy_score is None else f"{row.noisy_score:.1f}",
                Cell("the best" if row.won else row.failure),
            ]
            for row in candidates.rows
        ),
    )


def write_figure(candidates: Candidates, path: Path) -> None:
    """Write the scores of candidates against each setting that was searched, for the owner alone."""
    keys = list(candidates.rows[0].settings) if candidates.rows else []
    if not keys:
        return
    scored = [row for row in candidates.rows if row.noisy_score is not None]
    with canvas(len(keys), 2.6 * len(keys) + 0.6, 2.6) as (figure, axes):
        for axis, key in zip(axes, keys, strict=True):
            values = list(dict.fromkeys(str(row.settings[key]) for row in candidates.rows))
            for row in scored:
                share = (row.noisy_score or 0.0) / candidates.held_out
                colour = LIGHT["proved"] if row.won else LIGHT["muted"]
                axis.plot(values.index(str(row.settings[key])), share, "D" if row.won else "o", color=colour)
            axis.set_xticks(range(len(values)), values)
            axis.set_xlabel(key)
        axes[0].set_ylabel("noisy share of held-out records")
        content = standalone(figure, "candidates")
    write_atomically(path, lambda out: out.write(content), private=True)
