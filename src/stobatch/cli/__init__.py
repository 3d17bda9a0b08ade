"""The command line: the same verbs as the Python API."""

from stobatch.cli.app import main

__all__ = ["main"]
