"""Train classifiers with differential privacy and certified robustness, and see what is guaranteed and by whom.

>>> import stobatch
>>> from stobatch_recipes import recipe
>>> print(stobatch.plan(recipe("paper.mnist").override("method.total_epsilon", 0.2)).guarantee)
claimed ε = 0.2 (replace-one, per training tuple; the paper's Theorem 4), NOT a proven guarantee
"""

from stobatch.config import RunConfig
from stobatch.data import Dataset, from_tensors
from stobatch.errors import StobatchError
from stobatch.federated import federate
from stobatch.loading import TrainedModel, load
from stobatch.models import Network, from_layers
from stobatch.paper import where
from stobatch.types import InputRange, Neighbours, Norm, Radius, Status
from stobatch.verbs import attack, audit, certify, compare, evaluate, plan, report, shard, train
from stobatch.verification import sign, verify

__version__ = "0.1.0"

__all__ = [
    "Dataset",
    "InputRange",
    "Neighbours",
    "Network",
    "Norm",
    "Radius",
    "RunConfig",
    "Status",
    "StobatchError",
    "TrainedModel",
    "attack",
    "audit",
    "certify",
    "compare",
    "evaluate",
    "federate",
    "from_layers",
    "from_tensors",
    "load",
    "plan",
    "report",
    "shard",
    "sign",
    "train",
    "verify",
    "where",
]
