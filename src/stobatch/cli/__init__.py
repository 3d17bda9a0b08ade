"""The command line: the same verbs as the Python API."""

from importlib import import_module

from stobatch.cli.app import main

# Each module adds its verbs, in the order of `--help`.
for _verbs in (
    *("training", "budgeting", "measuring", "predicting", "comparing"),
    *("reproducing", "publishing", "serving", "looking", "federation"),
):
    import_module(f"stobatch.cli.{_verbs}")

__all__ = ["main"]
