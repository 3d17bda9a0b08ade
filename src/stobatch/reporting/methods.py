"""How it was measured: protocols, settings, training and plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stobatch.reporting.figures import Chart, learning_curve
from stobatch.reporting.format import number, protocol_meanings, spoken
from stobatch.reporting.summary import Facts
from stobatch.reporting.table import Table
from stobatch.reporting.tables import plan_table
from stobatch.results import ProtocolTable

_VOTE = "the vote of verified inference (Algorithm 3) over fresh noise"
_SINGLE_PASS = {
    True: "one pass through the network with its fixed noise",
    False: "one pass through the network, which has no noise",
    None: "one pass through the network, with its fixed noise where it has any",
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
_OF_VOTES = ("vote_attacks", "noise_draws", "vote_draws", "vote_limit")
_UNSET = {"noise_draws": "as many as gradients need to agree", "limit": "all", "vote_limit": "all"}


Pairs = tuple[tuple[str, str], ...]
"""Terms with what they mean."""


@dataclass(frozen=True)
class Measuring:
    """Protocols, settings, training and plan; `training` is empty where the run has no record of it."""

    protocols: Pairs
    settings: Pairs
    training: Pairs
    curve: Chart | None
    plan: Table | None


def measuring(facts: Facts, name: str) -> Measuring:
    unused = _OF_VOTES if facts.scores.has_noise is False else ()
    settings = tuple(
        (_SETTINGS.get(key, key), _value(key, value))
        for key, value in facts.scores.settings.items()
        if key not in unused
    )
    plan = None if facts.plan is None else plan_table(facts.plan, facts.status)
    return Measuring(_protocols(facts), settings, _training(facts), _learning(facts, name), plan)


def _protocols(facts: Facts) -> Pairs:
    entries = facts.scores.under_attack
    meanings = {f"{name} protocol": meaning for name, meaning in protocol_meanings(facts.scores).items()}
    means = {"single_pass": _SINGLE_PASS[facts.scores.has_noise], "vote": _VOTE}
    functions = {spoken(f): means.get(f, f) for f in facts.functions}
    rows = {f"{e.protocol.name} on {spoken(e.function)}": _extent(e) for e in entries}
    return (*meanings.items(), *functions.items(), *rows.items(), ("accuracies assume", facts.test_records))


def _extent(entry: ProtocolTable) -> str:
    return f"{entry.rows} test images, attacks {', '.join(entry.attacks)}"


def _value(key: str, value: Any) -> str:
    if value is None:
        return _UNSET.get(key, "not set")
    if isinstance(value, list):
        return ", ".join(f"{item:g}" if isinstance(item, float) else str(item) for item in value)
    return number(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)


def _training(facts: Facts) -> Pairs:
    training = facts.training
    if training is None:
        return ()
    pairs = (
        ("training steps", number(training.steps)),
        ("device", training.device),
        ("seconds since its last start", f"{training.seconds_since_last_start:,.1f} s"),
        ("PyTorch", training.torch),
    )
    if training.test_accuracy is None:
        return pairs
    right = f"{100 * training.test_accuracy:.1f}% of {number(training.test_examples or 0)} held-out test images"
    return (*pairs, ("the saved model is right on", right))


def _learning(facts: Facts, name: str) -> Chart | None:
    training = facts.training
    if training is None or not training.history:
        return None
    whose = training.history_of or "the parameters of that step, before any averaging"
    caption = f"Accuracy on held-out test images while training, of {whose}; no attack."
    return learning_curve(training.history, f"{name}-learning").captioned(caption)
