"""How it was measured: protocols, settings, training and plan."""

from __future__ import annotations

from typing import Any

from stobatch.reporting.figures import learning_curve
from stobatch.reporting.format import STATUS_WORDS, number, spoken
from stobatch.reporting.page import Html, folded, join, table, tag
from stobatch.reporting.summary import Facts
from stobatch.reporting.terminal import NOT_LOOKED_FOR
from stobatch.results import ProtocolTable

_FUNCTIONS = {
    "single_pass": "one pass through the network with its fixed noise",
    "vote": "the vote of verified inference (Algorithm 3) over fresh noise",
}
_SETTINGS = {
    "norm": "norm of all radii",
    "functions": "functions attacked",
    "attacks": "attacks, published protocol",
    "attack_steps": "gradient steps, published protocol",
    "adaptive_attacks": "attacks on the single pass, adaptive protocol",
    "adaptive_steps": "gradient steps, adaptive protocol",
    "restarts": "random starts of each adaptive attack",
    "num_aims": "classes that apgd_t walks towards",
    "queries": "queries of the square attack",
    "labels": "labels that adaptive attacks lead away from",
    "target": "class that adaptive attacks lead to",
    "vote_attacks": "attacks on the vote, adaptive protocol",
    "noise_draws": "noise draws per gradient step on the vote",
    "vote_draws": "draws of each vote on an attacked input",
    "vote_limit": "test examples for the vote, at most",
    "limit": "test examples, at most",
    "num_images": "pictures kept",
}
_UNSET = {"noise_draws": "as many as gradients need to agree", "limit": "all", "vote_limit": "all"}


def measuring_section(facts: Facts, name: str) -> Html:
    parts = [
        tag("h2", "How it was measured"),
        _protocols(facts),
        _settings(facts),
        _training(facts, name),
        _plan(facts),
    ]
    return join(parts)


def _list(rows: list[tuple[object, object]]) -> Html:
    return tag("dl", *(part for term, text in rows for part in (tag("dt", term), tag("dd", text))))


def _protocols(facts: Facts) -> Html:
    entries = facts.scores.under_attack
    meanings = {f"{e.protocol.name} protocol": e.protocol.meaning for e in entries}
    functions = {spoken(f): _FUNCTIONS.get(f, f) for f in facts.functions}
    rows = {f"{e.protocol.name} on {spoken(e.function)}": _extent(e) for e in entries}
    assumed = ("accuracies assume", facts.scores.test_records or NOT_LOOKED_FOR)
    return _list([*meanings.items(), *functions.items(), *rows.items(), assumed])


def _extent(entry: ProtocolTable) -> str:
    return f"{entry.rows} test images, attacks {', '.join(entry.attacks)}"


def _settings(facts: Facts) -> Html:
    rows = [(_SETTINGS.get(key, key), _value(key, value)) for key, value in facts.scores.settings.items()]
    return folded("Settings of the evaluation", _list(list(rows)))


def _value(key: str, value: Any) -> str:
    if value is None:
        return _UNSET.get(key, "not set")
    if isinstance(value, list):
        return ", ".join(f"{item:g}" if isinstance(item, float) else str(item) for item in value)
    return number(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)


def _training(facts: Facts, name: str) -> Html:
    training = facts.training
    if training is None:
        return tag("p", "The run has no record of its training.", class_="muted")
    rows: list[tuple[object, object]] = [
        ("training steps", number(training.steps)),
        ("device", training.device),
        ("seconds since its last start", f"{training.seconds_since_last_start:,.1f} s"),
        ("PyTorch", training.torch),
    ]
    if training.test_accuracy is not None:
        right = f"{100 * training.test_accuracy:.1f}% of {number(training.test_examples or 0)} held-out test images"
        rows.append(("the saved model is right on", right))
    parts = [tag("h3", "Training"), _list(rows)]
    if training.history:
        whose = training.history_of or "the parameters of that step, before any averaging"
        caption = f"Accuracy on held-out test images while training, of {whose}; no attack."
        curve = learning_curve(training.history, f"{name}-learning")
        parts.append(tag("figure", curve, tag("figcaption", caption)))
    return join(parts)


def _plan(facts: Facts) -> Html:
    if facts.plan is None:
        return Html("")
    status = STATUS_WORDS[facts.status]
    caption = f"Every number that was fixed before any data was read. Budgets (ε) in it: {status}."
    rows = [[r.name, r.symbol, number(r.value), r.formula, r.paper] for r in facts.plan.rows]
    headings = ["quantity", "symbol", "value", "formula", "place in the paper"]
    return folded(f"The plan, {len(rows)} rows", table(caption, headings, rows))
