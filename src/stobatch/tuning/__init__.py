"""`tune`: settings drawn at random, a random number of times; the winner's guarantee pays for the search."""

from stobatch.tuning.search import tune

__all__ = ["tune"]
