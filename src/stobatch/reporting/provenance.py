"""Where a report's numbers come from: when and by what they were made, who vouches for them, and what was left out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stobatch.config import INSTRUMENTS
from stobatch.reporting.format import number
from stobatch.reporting.summary import Facts
from stobatch.reporting.table import DASH, Entry, Table
from stobatch.reporting.tables import share_cell
from stobatch.results import Made, Outcome, Verification


@dataclass(frozen=True)
class Provenance:
    """What made the files, what they are, and what was not examined; None where it is not recorded."""

    standing: str
    """In one line at the top: how far the page can be relied on."""
    made: Table | None
    digests: tuple[tuple[str, str], ...]
    network: str
    layers: tuple[str, ...]
    classes: Table | None
    missing: tuple[str, ...]
    cannot_be_checked: tuple[str, ...]
    checks: Table | None


def provenance(facts: Facts) -> Provenance:
    checked = facts.provenance
    network = facts.training.network if facts.training is not None else None
    return Provenance(
        standing(facts),
        _history_table(facts),
        tuple(_digests(facts)),
        f"{number(network.parameters)} parameters in {len(network.layers)} layers" if network else "",
        tuple(network.layers) if network else (),
        _classes(facts),
        tuple(_unexamined(facts)),
        tuple(checked.cannot_be_checked) if checked else (),
        _checks(checked) if checked else None,
    )


def standing(facts: Facts) -> str:
    """Return who vouches for the numbers, and whether they were computed again."""
    checked = facts.provenance
    if checked is None:
        return "Self-reported: the numbers are those of the run's documents, and nothing was computed again."
    if facts.is_old:
        return "Self-reported, no manifest: an older version made this run, and it cannot be verified."
    signature = next(check for check in checked.checks if check.name == "signature")
    vouched = "Self-reported, unsigned"
    if signature.outcome is Outcome.AGREES:
        vouched = f"S{signature.detail.removeprefix('s')}"
    left = next((c for c in checked.checks if (c.name, c.outcome) == ("documents", Outcome.NOT_CHECKED)), None)
    if left is not None:
        return f"{vouched}; files match the manifest, numbers were not computed again: {left.detail}."
    return (
        f"{vouched}; every number was computed again from configuration, ledger and rows before this page was written."
    )


def _checks(checked: Verification) -> Table:
    headings = ["checked", "outcome", "file", "found"]
    rows = [[check.name, str(check.outcome), check.file, check.detail] for check in checked.checks]
    return Table.of("By `stobatch verify`, without a sample.", headings, rows)


def _history_table(facts: Facts) -> Table | None:
    """Return which verb ran when, by which version and on what."""
    if facts.manifest is None:
        return None
    headings = ["verb", "date (UTC)", "stobatch", "commit", "machine"]
    # The report itself is not among them: it would have to know when it will have been written.
    entries = {verb: entry for verb, entry in facts.manifest.made.items() if verb != "report"}
    rows = [
        [verb, entry.date, entry.stobatch or DASH, entry.commit or "not from a checkout", _machine(entry)]
        for verb, entry in entries.items()
    ]
    return Table.of("What made the files, as the manifest records it.", headings, rows)


def _machine(entry: Made) -> str:
    return (
        f"{entry.platform}, {entry.cpu}, {entry.device}; Python {entry.python}, torch {entry.torch}, "
        f"NumPy {entry.numpy}"
    )


def _digests(facts: Facts) -> Iterator[tuple[str, str]]:
    """Yield the digests of weights and data; commitments say nothing without the owner's key."""
    if facts.training is not None and facts.training.weights_sha256:
        yield "weights, SHA-256", facts.training.weights_sha256
    data = facts.training.data if facts.training is not None else None
    if data is None:
        return
    sizes = f"{number(data.training_records)} records to train on, {number(data.test_records)} to test"
    yield "data", f"{data.name}: {sizes}"
    digests = {
        "training data, commitment (HMAC-SHA-256 under the owner's key)": data.training_commitment,
        "test data, commitment (HMAC-SHA-256 under the owner's key)": data.test_commitment,
        "test data, SHA-256": data.test_sha256,
    }
    yield from ((words, digest) for words, digest in digests.items() if digest)


def _classes(facts: Facts) -> Table | None:
    """Return clean accuracy class by class: a mean may hide a class that is never predicted."""
    rows = facts.scores.accuracy_by_class
    if not rows:
        return None
    cells: list[list[Entry]] = [
        [facts.started.dataset.class_name(row.label), str(row.total), share_cell(row)] for row in rows
    ]
    caption = "Clean accuracy class by class, in %, 95% interval in brackets."
    return Table.of(caption, ["class", "test images", "right"], cells)


def _unexamined(facts: Facts) -> list[str]:
    """Return the attacks, certificates and audits that were not made: silence about them is no good sign."""
    done = {finding.instrument for finding in facts.findings}
    lines = [f"audit by {name.replace('_', ' ')}: not made" for name in INSTRUMENTS if name not in done]
    if facts.certificates is None:
        lines.append("certificates: none were compared with")
    wanted = [(p, f) for f in ("single_pass", "vote") for p in ("published", "adaptive")]
    lines += [
        f"{protocol} protocol on the {function.replace('_', ' ')}: not evaluated"
        for protocol, function in wanted
        if facts.entry(protocol, function) is None
    ]
    return lines
