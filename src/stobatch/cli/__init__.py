"""The command line: the same verbs as the Python API."""

from stobatch.cli import training  # isort: skip  (each adds its verbs, in the order of `--help`)
from stobatch.cli import budgeting  # isort: skip
from stobatch.cli import measuring  # isort: skip
from stobatch.cli import predicting  # isort: skip
from stobatch.cli import comparing  # isort: skip
from stobatch.cli import reproducing  # isort: skip
from stobatch.cli import publishing  # isort: skip
from stobatch.cli import serving  # isort: skip
from stobatch.cli import looking  # isort: skip
from stobatch.cli import federation  # isort: skip
from stobatch.cli.app import main

__all__ = [
    "budgeting",
    "comparing",
    "federation",
    "looking",
    "main",
    "measuring",
    "predicting",
    "publishing",
    "reproducing",
    "serving",
    "training",
]
