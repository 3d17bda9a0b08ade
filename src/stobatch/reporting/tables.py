"""What a person reads in a terminal. Every epsilon and every radius is printed with its status and its units."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) or float(value).is_integer() else f"{value:.5g}"


def _percent(share: dict[str, Any]) -> str:
    return f"{100 * share['value']:.1f}% [{100 * share['low']:.1f}, {100 * share['high']:.1f}]"


def guarantee_line(guarantee: dict[str, Any]) -> str:
    """The budget with its status in front, so that neither can be read without the other."""
    status = guarantee["status"]
    if status == "none":
        return "NO PRIVACY GUARANTEE"
    epsilon, delta = guarantee[f"{status}_epsilon"], guarantee[f"{status}_delta"]
    word = {"claimed": "CLAIMED, NOT PROVED", "proved": "proved", "refuted": "REFUTED"}[status]
    return f"{word}: ε = {epsilon:g}" + (f", δ = {delta:g}" if delta else "")


def guarantee_card(guarantee: dict[str, Any]) -> RenderableType:
    """What is guaranteed, by whom, and what speaks against it."""
    style = {"none": "red", "claimed": "yellow", "proved": "green", "refuted": "red"}[guarantee["status"]]
    lines = [Text(guarantee_line(guarantee), style=f"bold {style}")]
    lines.append(Text(f"{guarantee['neighbours']} neighbours, per {guarantee['unit']}, {guarantee['source']}"))
    lines += [Text(f"assumes: {line}") for line in guarantee["assumptions"]]
    lines += [Text(f"against it: {line}", style=style) for line in guarantee["objections"]]
    return Panel(Group(*lines), title="privacy towards the training data", border_style=style)


def plan_table(plan: dict[str, Any]) -> RenderableType:
    """The plan: a number per line, its formula, and its place in the paper."""
    table = Table(title="plan, before any data is read", title_justify="left")
    for heading, justify in (("quantity", "left"), ("symbol", "left"), ("value", "right"), ("formula", "left")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    table.add_column("paper")
    for row in plan["rows"]:
        table.add_row(row["name"], row["symbol"], _number(row["value"]), row["formula"], row["paper"])
    return Group(table, guarantee_card(plan["guarantee"]))


def certificate_table(summary: dict[str, Any]) -> RenderableType:
    """Certified accuracy on clean test inputs, the published rule beside the corrected one."""
    unit = summary["kinds"][0]
    table = Table(
        title=f"certified accuracy, clean inputs, {unit['norm']} over {unit['input_range']}, "
        f"n = {summary['settings']['noise_draws']}, {summary['rows']} test examples",
        title_justify="left",
    )
    table.add_column("radius", justify="right")
    for kind in summary["kinds"]:
        table.add_column(f"{kind['name']} radius\n{kind['status']}: {kind['source']}", justify="right")
    shares = [summary["certified_accuracy"][kind["name"]] for kind in summary["kinds"]]
    for row in zip(*shares, strict=True):
        table.add_row(f"{row[0]['radius']:g}", *[_percent(share) for share in row])
    table.add_row(
        "largest radius, any label", *[f"{summary['largest_radius'][kind['name']]:.4f}" for kind in summary["kinds"]]
    )
    verified = summary["verified_accuracy"]
    note = Text(
        f"verified inference: {_percent(verified['correct_without_abstaining'])} correct, "
        f"{_percent(verified['abstained'])} abstained; each corrected certificate fails with probability at most "
        f"{summary['settings']['failure_probability']:g}"
    )
    return Group(table, note)


def score_table(scores: dict[str, Any]) -> RenderableType:
    """Accuracy under attack with the protocol it was measured under."""
    protocol = scores["protocol"]
    attacks = scores["settings"]["attacks"]
    table = Table(
        title=f"accuracy under attack, linf over [-1, 1], protocol {protocol['name']}, {scores['rows']} test examples",
        title_justify="left",
    )
    table.add_column("radius", justify="right")
    for name in (*attacks, "worst of them"):
        table.add_column(name, justify="right")
    table.add_row("clean", *[_percent(scores["clean_accuracy"])] * (len(attacks) + 1))
    for row in scores["attacked_accuracy"]:
        table.add_row(f"{row['radius']:g}", *[_percent(row[name]) for name in (*attacks, "worst")])
    return Group(table, Text(f"protocol: {protocol['meaning']}; 95% intervals over test examples"))


def show(*parts: RenderableType) -> None:
    """Print to standard output, without colours where nobody looks."""
    console = Console(highlight=False)
    for part in parts:
        console.print(part)
