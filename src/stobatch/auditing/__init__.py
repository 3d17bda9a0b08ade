"""Audits: measure what training leaks, try to break certificates, and say what was found with its confidence.

An audit is one-sided. A bound above the claim refutes it; a bound below it, or an attack that failed, is evidence of
nothing but the attack's own strength. Nothing here knows which method it audits.

The bounds need no run, only the scores of an attacker:

>>> from stobatch import auditing
>>> print(auditing.one_run_bound([0.1, 0.9] * 100, [0, 1] * 100, delta=1e-5))
ε ≥ 3.87 at δ = 1e-05 with 95% confidence
"""

from typing import TYPE_CHECKING

from stobatch.lazy import lazy_names

if TYPE_CHECKING:
    from stobatch.auditing.lower_bounds import two_sample_bound
    from stobatch.auditing.one_run_bounds import canaries_needed, one_run_bound
    from stobatch.results import EpsilonBound

__all__ = ["EpsilonBound", "canaries_needed", "one_run_bound", "two_sample_bound"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "lower_bounds": ("EpsilonBound", "two_sample_bound"),
        "one_run_bounds": ("canaries_needed", "one_run_bound"),
    },
)
