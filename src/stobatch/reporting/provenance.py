"""Where a report's numbers come from: when and by what they were made, who vouches for them, and what was left out."""

from __future__ import annotations

from stobatch.config import INSTRUMENTS
from stobatch.reporting.format import number, share_cell
from stobatch.reporting.page import Html, bullets, folded, join, table, tag
from stobatch.reporting.summary import Facts
from stobatch.results import Made, Outcome


def provenance_line(facts: Facts) -> Html:
    """In one line at the top: how far the page can be relied on."""
    return tag("p", tag("b", standing(facts)), class_="muted")


def standing(facts: Facts) -> str:
    """Who vouches for the numbers, and whether they were computed again."""
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


def provenance_section(facts: Facts) -> Html:
    parts = [tag("h2", "Where this comes from"), _made(facts), _list(_digests(facts)), _network(facts)]
    parts += [_classes(facts), tag("h3", "What was not looked at"), bullets(_missing(facts))]
    if facts.provenance is not None:
        parts += [tag("h3", "What no file can show"), bullets(facts.provenance.cannot_be_checked)]
        rows = [[c.name, c.outcome, c.file, c.detail] for c in facts.provenance.checks]
        headings = ["checked", "outcome", "file", "found"]
        parts.append(folded("What was checked", table("By `stobatch verify`, without a sample.", headings, rows)))
    return join(parts)


def _made(facts: Facts) -> Html:
    """Which verb ran when, by which version and on what."""
    if facts.manifest is None:
        return tag("p", "The run has no manifest: when and by what it was made is not recorded.", class_="muted")
    headings = ["verb", "date (UTC)", "stobatch", "commit", "machine"]
    # The report itself is not among them: it would have to know when it will have been written.
    made = {verb: entry for verb, entry in facts.manifest.made.items() if verb != "report"}
    rows = [
        [verb, entry.date, entry.stobatch, (entry.commit or "not from a checkout"), _machine(entry)]
        for verb, entry in made.items()
    ]
    return table("What made the files, as the manifest records it.", headings, rows)


def _machine(entry: Made) -> str:
    return (
        f"{entry.platform}, {entry.cpu}, {entry.device}; Python {entry.python}, torch {entry.torch}, "
        f"NumPy {entry.numpy}"
    )


def _digests(facts: Facts) -> list[tuple[str, object]]:
    """Weights and data; commitments say nothing without the owner's key."""
    rows: list[tuple[str, object]] = []
    if facts.training is not None and facts.training.weights_sha256:
        rows.append(("weights, SHA-256", tag("code", facts.training.weights_sha256)))
    data = facts.training.data if facts.training is not None else None
    if data is None:
        return rows
    sizes = f"{number(data.training_records)} records to train on, {number(data.test_records)} to test"
    rows.append(("data", f"{data.name}: {sizes}"))
    digests = {
        "training data, commitment (HMAC-SHA-256 under the owner's key)": data.training_commitment,
        "test data, commitment (HMAC-SHA-256 under the owner's key)": data.test_commitment,
        "test data, SHA-256": data.test_sha256,
    }
    return rows + [(words, tag("code", digest)) for words, digest in digests.items() if digest]


def _network(facts: Facts) -> Html:
    network = facts.training.network if facts.training is not None else None
    if network is None:
        return Html("")
    note = f"{number(network.parameters)} parameters in {len(network.layers)} layers"
    return folded(f"Network: {note}", bullets(network.layers))


def _classes(facts: Facts) -> Html:
    """Clean accuracy class by class: a mean may hide a class that is never found."""
    rows = facts.scores.accuracy_by_class
    if not rows:
        return Html("")
    cells = [[facts.started.dataset.class_name(row.label), row.total, share_cell(row)] for row in rows]
    caption = "Clean accuracy class by class, in %, 95% interval in brackets."
    return folded("Accuracy by class", table(caption, ["class", "test images", "right"], cells))


def _missing(facts: Facts) -> list[str]:
    """Attacks, certificates and audits that nobody made: silence about them is no good sign."""
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


def _list(rows: list[tuple[str, object]]) -> Html:
    return tag("dl", *(part for term, text in rows for part in (tag("dt", term), tag("dd", text))))
