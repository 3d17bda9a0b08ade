"""The direct distinguisher: look at one value that a proof calls private, many times, from both of two neighbours."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from stobatch.auditing.lower_bounds import privacy_finding, two_sided_bounds
from stobatch.auditing.neighbours import pattern_like, require_relation
from stobatch.auditing.subject import Audited, require_enough, scores_by_world
from stobatch.data import Examples
from stobatch.dp.guarantee import PrivacyGuarantee
from stobatch.errors import DataError, SettingError
from stobatch.files import Columns
from stobatch.methods import Release, Tuples, method_of
from stobatch.progress import Tick
from stobatch.results import Finding

Floats = NDArray[np.float64]

_TUPLES = 16
"""What is looked at of a batch: fewer tuples than were released can only tell less."""


def pair_of_tuples(records: Examples) -> tuple[Tuples, Tuples]:
    """Return a few records, and the same with the last one replaced by a pattern and another label."""
    if len(records) < 2:
        raise DataError("a release is looked at with at least two records.", remedy="Raise data.train_limit.")
    few = records.limit(_TUPLES)
    other = (few.labels[-1:] + 1) % few.num_classes
    second = Tuples(torch.cat([few.inputs[:-1], pattern_like(few.inputs)]), torch.cat([few.labels[:-1], other]))
    return Tuples(few.inputs, few.labels), second


def release_finding(
    release: Release, without: Floats, with_: Floats, guarantee: PrivacyGuarantee, confidence: float
) -> Finding:
    """Return the finding: the whole training is claimed to leak no more than ε, so each of its parts is too."""
    bounds = two_sided_bounds(without, with_, delta=guarantee.delta, confidence=confidence)
    # Zero on both sides is no decision.
    right, trials = int((with_ > 0).sum() + (without < 0).sum()), len(without) + len(with_)
    return privacy_finding(
        "release",
        guarantee,
        bounds,
        tried=f"{release.name} ({release.source}): {right} of {trials} told apart;",
        threat_model=f"the attacker sees {release.name} of one batch, and knows both data sets",
        attack=release.attack,
        confidence=confidence,
        release=release.name,
        source=release.source,
        trials=trials,
        right=right,
    )


_TRIALS_AT_ONCE = 500


def of_releases(audited: Audited) -> list[Finding]:
    """Draw every release that the method's proof names many times, from both of two neighbours."""
    releases = method_of(audited.config).releases(audited.plan)
    if not releases:
        raise SettingError(
            "this method's proof names no release of its own.",
            why="What it calls private are its steps, which many_runs and one_run look at.",
            remedy="Use audit.instruments=many_runs.",
        )
    settings = audited.settings
    require_relation(settings.neighbours, audited.claim.neighbours)
    require_enough(settings.release_trials, audited)
    pair = pair_of_tuples(audited.data().train.in_memory())
    return [_audit_release(audited, release, pair) for release in releases]


def _audit_release(audited: Audited, release: Release, pair: tuple[Tuples, Tuples]) -> Finding:
    trials = audited.settings.release_trials

    def rows_of(start: int, count: int, tick: Tick) -> Columns:
        worlds = [index % 2 for index in range(start, start + count)]
        seeds = [audited.root.child("release", release.name, index) for index in range(start, start + count)]
        scores = [release.score(pair[world], pair, each) for world, each in zip(worlds, seeds, strict=True)]
        return {"world": worlds, "score": scores}

    table = audited.table(f"release-{release.name}", trials, trials, _TRIALS_AT_ONCE, rows_of)
    return release_finding(release, *scores_by_world(table), audited.claim, audited.confidence)
