"""What cannot be collected where an optional package is missing."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("flwr") else ["src/stobatch/federated/flower.py", "tests/system/flower/local_grid.py"]
