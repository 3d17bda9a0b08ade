"""The direct distinguisher: look at one thing that a proof calls private, many times, from both of two neighbours."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from stobatch.auditing.bounds import two_sided_bounds
from stobatch.auditing.finding import Finding
from stobatch.auditing.neighbours import pattern_like
from stobatch.auditing.privacy_finding import privacy_finding
from stobatch.data import Examples
from stobatch.errors import DataError
from stobatch.privacy.guarantee import PrivacyGuarantee
from stobatch.privacy.release import Release, Tuples

Floats = NDArray[np.float64]

_TUPLES = 16
"""What is looked at of a batch: fewer tuples than were released can only tell less."""


def pair_of_tuples(records: Examples) -> tuple[Tuples, Tuples]:
    """A few records, and the same with the last one replaced by a pattern and another label."""
    if len(records) < 2:
        raise DataError("a release is looked at with at least two records.", remedy="Raise data.train_limit.")
    few = records.limit(_TUPLES)
    other = (few.labels[-1:] + 1) % few.num_classes
    second = Tuples(torch.cat([few.inputs[:-1], pattern_like(few.inputs)]), torch.cat([few.labels[:-1], other]))
    return Tuples(few.inputs, few.labels), second


def release_finding(
    release: Release, without: Floats, with_: Floats, guarantee: PrivacyGuarantee, confidence: float
) -> Finding:
    """The whole training is claimed to leak no more than ε, so each of its parts is."""
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
