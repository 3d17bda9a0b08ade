"""The command line: the same verbs as the Python API."""

from stobatch.cli import comparing, federation, guarantee  # noqa: F401  (each adds its verbs)
from stobatch.cli.app import main

__all__ = ["main"]
