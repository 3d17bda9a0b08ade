"""A short summary of a run, in words and in one picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stobatch.files import write_atomically
from stobatch.reporting.figures import summary_figure
from stobatch.reporting.tables import guarantee_line
from stobatch.runs import Run


def _share(share: dict[str, Any]) -> str:
    return f"{100 * share['value']:.1f}%"


def write_summary(run: Run) -> Path:
    """Write `summary.md` and `summary.png` from the run's files; returns the Markdown file."""
    training, scores = run.read("training"), run.read("scores")
    certificates = run.read("certificates")
    summary_figure(run.path / "summary.png", training, certificates, scores)
    guarantee = scores["guarantee"]
    kinds = certificates["kinds"]
    lines = [
        f"# Run {run.path.name}, configuration {scores['training_hash']}",
        "",
        f"**Privacy: {guarantee_line(guarantee)}** "
        f"({guarantee['neighbours']} neighbours, per {guarantee['unit']}, {guarantee['source']}).",
        *[f"- against it: {objection}" for objection in guarantee["objections"]],
        "",
        f"Clean accuracy {_share(scores['clean_accuracy'])} on {scores['rows']} test images. "
        f"Radii are {kinds[0]['norm']} over {kinds[0]['input_range']}; certificates on {certificates['rows']} test "
        f"images, each corrected one failing with probability at most "
        f"{certificates['settings']['failure_probability']:g}.",
        "",
        "| radius | under attack (worst) | "
        + " | ".join(f"certified, {k['name']} ({k['status']})" for k in kinds)
        + " |",
        "|---|---|" + "---|" * len(kinds),
    ]
    certified = {k["name"]: {s["radius"]: s for s in certificates["certified_accuracy"][k["name"]]} for k in kinds}
    for row in scores["attacked_accuracy"]:
        cells = [certified[k["name"]].get(row["radius"]) for k in kinds]
        shown = " | ".join(_share(cell) if cell else "not certified" for cell in cells)
        lines.append(f"| {row['radius']:g} | {_share(row['worst'])} | {shown} |")
    lines += ["", f"Attack protocol: {scores['protocol']['meaning']}.", "", "![summary](summary.png)", ""]
    path = run.path / "summary.md"
    text = "\n".join(lines)
    write_atomically(path, lambda out: out.write(text.encode()))
    return path
