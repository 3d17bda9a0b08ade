"""The top of a run's report: who it is, what is guaranteed, and the one number that matters most."""

from __future__ import annotations

from stobatch.dp.guarantee import PrivacyGuarantee
from stobatch.reporting.format import interval, percent, points, spoken
from stobatch.reporting.page import Html, bullets, join, tag
from stobatch.reporting.summary import Facts, middle
from stobatch.reporting.terminal import NOT_LOOKED_FOR, PUBLIC_SEED_MEANS, guarantee_line
from stobatch.results import Difference, Share, at_radius

_STATUS_MEANINGS = {
    "claimed": "Its source says so. Nobody has proved it here, and it must not be relied on as a guarantee.",
    "proved": "A proof stands behind this, under the assumptions listed.",
    "refuted": "An audit or a counterexample shows that this does not hold.",
    "void": PUBLIC_SEED_MEANS,
    "none": "This method promises nothing about its training data.",
}


def opening(facts: Facts) -> Html:
    return join([identity(facts), headline(facts), tiles(facts), guarantee_card(facts)])


def identity(facts: Facts) -> Html:
    seed = "secret" if facts.seed is None else facts.seed
    line = f"method {facts.method} · data {facts.started.data} · seed {seed} · configuration "
    return tag("p", line, tag("code", facts.scores.training_hash), class_="muted")


def guarantee_card(facts: Facts) -> Html:
    """What is guaranteed about the training data, by whom, and what speaks against it; never without its status."""
    note = [] if facts.guarantee.audits else [_not_audited(facts)]
    note.append(tag("p", f"Accuracies assume: {facts.scores.test_records or NOT_LOOKED_FOR}.", class_="muted"))
    return card_of(facts.guarantee, "Privacy towards the training data", *note)


def card_of(guarantee: PrivacyGuarantee, eyebrow: str, *notes: object) -> Html:
    """A guarantee as a card of its own."""
    status = guarantee.status
    parts: list[object] = [
        tag("p", eyebrow, class_="eyebrow"),
        tag("p", guarantee_line(guarantee), class_="status"),
        tag("p", _STATUS_MEANINGS[status]),
    ]
    if status == "none":
        parts.append(tag("p", f"Source: {guarantee.source}.", class_="muted"))
    else:
        about = f"{guarantee.neighbours} neighbours, per {guarantee.unit}; source: {guarantee.source}."
        parts.append(tag("p", about, class_="muted"))
    lists = {"Audits": guarantee.audits, "Against it": guarantee.objections, "It assumes": guarantee.assumptions}
    for title, lines in lists.items():
        if lines:
            parts += [tag("h3", title), bullets(lines)]
    return tag("section", *parts, *notes, class_=f"card {status}")


def _not_audited(facts: Facts) -> Html:
    """How to audit; RUN stands for the directory, whose place is nobody's business once the page is mailed."""
    if facts.findings:
        instrument = "membership" if facts.status == "none" else "many_runs"
        note, options = "Only certificates were audited so far, not this. To do so: ", f" --instrument {instrument}"
    else:
        note, options = "Nothing was audited yet. To do so: ", ""
    return tag("p", note, tag("code", f"stobatch audit RUN{options}"), class_="muted")


def headline(facts: Facts) -> Html:
    """One sentence: what the published protocol shows, what an adaptive attacker leaves, and the gap."""
    function, radius = facts.main_function, middle(facts.radii)
    shares = {p: at_radius(facts.worst(p, function), radius) for p in facts.protocols}
    setting = f"At radius {radius:g} ({facts.unit}) on the {spoken(function)}, "
    published, adaptive, gap = shares.get("published"), shares.get("adaptive"), facts.gap(function, radius)
    if published and adaptive and gap:
        measured = (
            f"the model is right on {percent(published)} of {published.total} test images when attacked as "
            f"published, and on {percent(adaptive)} when attacked the way an adversary would: "
        )
        return tag("p", setting + measured, tag("b", _gap_words(gap.gap)), class_="lead")
    protocol, share = next((p, s) for p, s in shares.items() if s)
    proved = facts.proved(function, radius)
    if protocol == "adaptive" and proved:
        left = f"attacks leave the model right on {percent(share)} of {share.total} test images. "
        promise = f"On {percent(proved)} of {proved.total} it is right and proved to stay so, whatever the attack."
        return tag("p", setting + left, tag("b", promise), class_="lead")
    missing = "adaptive" if protocol == "published" else "published"
    only = f"the model is right on {percent(share)} of {share.total} test images under the {protocol} protocol. "
    note = f"The {missing} protocol was not run, so the gap between them is unknown."
    return tag("p", setting + only, tag("b", note), class_="lead")


def _gap_words(gap: Difference) -> str:
    certain = f"(95% interval {100 * gap.low:.1f} to {100 * gap.high:.1f})"
    if gap.low > 0:
        return f"the published test flatters the model by {points(gap.value)} {certain}."
    if gap.high < 0:
        return (
            f"the published attacks do better by {points(-gap.value)} (95% interval {-100 * gap.high:.1f} to "
            f"{-100 * gap.low:.1f}), so the adaptive ones are too weak to rely on."
        )
    return f"a gap of {points(gap.value)} {certain}, which may be chance."


def tiles(facts: Facts) -> Html:
    function, radius = facts.main_function, middle(facts.radii)
    found = [_tile("clean", "clean accuracy", facts.clean(function), "test images")]
    for protocol in facts.protocols:
        share = at_radius(facts.worst(protocol, function), radius)
        if share:
            found.append(_tile(protocol, f"{protocol} protocol", share, f"test images, radius {radius:g}"))
    proved = facts.proved(function, radius)
    if proved:
        found.append(_tile("proved", "proved to stay right", proved, f"test images, radius {radius:g}"))
    gap = facts.gap(function, radius)
    if gap:
        large = tag("b", points(gap.gap.value))
        note = tag("small", f"95% interval {interval(gap.gap)}, radius {radius:g}")
        found.append(tag("div", tag("span", "gap between them"), large, note, class_="tile gap"))
    return tag("div", *found, class_="tiles")


def _tile(kind: str, title: str, share: Share, of_what: str) -> Html:
    note = f"95% interval {interval(share)}, {share.total} {of_what}"
    return tag("div", tag("span", title), tag("b", percent(share)), tag("small", note), class_=f"tile {kind}")


def one_line(facts: Facts) -> Html:
    """A run in one line, to fold its section under."""
    function = facts.main_function
    gap = facts.gap(function, middle(facts.radii))
    parts = [facts.name, guarantee_line(facts.guarantee)]
    parts.append(f"clean {percent(facts.clean(function))}")
    if gap:
        parts.append(f"gap {points(gap.gap.value)} at radius {gap.radius:g}")
    return join(parts, " · ")
