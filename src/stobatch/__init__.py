"""Train classifiers with differential privacy and certified robustness, and see what is guaranteed and by whom.

>>> import stobatch
>>> from stobatch_recipes import recipe
>>> print(stobatch.plan(recipe("published.mnist").override("method.epsilon", 0.2)).guarantee)
claimed ε = 0.2 (replace-one, per training tuple; the paper's Theorem 4), NOT a proven guarantee
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stobatch.auditing.audit import audit
    from stobatch.comparison.compare import compare
    from stobatch.config import RunConfig
    from stobatch.data import Dataset, from_tensors
    from stobatch.errors import StobatchError
    from stobatch.evaluation.attack import attack, evaluate
    from stobatch.evaluation.certify import certify
    from stobatch.exporting import export
    from stobatch.federated import federate
    from stobatch.loading import TrainedModel, load
    from stobatch.models import Network, from_layers
    from stobatch.paper import where
    from stobatch.pretraining.pretrain import pretrain
    from stobatch.reporting.report import report
    from stobatch.sharding import shard
    from stobatch.spending import budget
    from stobatch.training_run import plan, train
    from stobatch.tuning import tune
    from stobatch.types import InputRange, Neighbours, Norm, Radius, Status
    from stobatch.verification import verify
    from stobatch.verification.checks import sign

__version__ = "0.2.0"

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
    "budget",
    "certify",
    "compare",
    "evaluate",
    "export",
    "federate",
    "from_layers",
    "from_tensors",
    "load",
    "plan",
    "pretrain",
    "report",
    "shard",
    "sign",
    "train",
    "tune",
    "verify",
    "where",
]

_MODULES = {
    "auditing.audit": ("audit",),
    "comparison.compare": ("compare",),
    "config": ("RunConfig",),
    "data": ("Dataset", "from_tensors"),
    "errors": ("StobatchError",),
    "evaluation.attack": ("attack", "evaluate"),
    "evaluation.certify": ("certify",),
    "exporting": ("export",),
    "federated": ("federate",),
    "loading": ("TrainedModel", "load"),
    "models": ("Network", "from_layers"),
    "paper": ("where",),
    "pretraining.pretrain": ("pretrain",),
    "reporting.report": ("report",),
    "sharding": ("shard",),
    "spending": ("budget",),
    "types": ("InputRange", "Neighbours", "Norm", "Radius", "Status"),
    "training_run": ("plan", "train"),
    "tuning": ("tune",),
    "verification": ("sign", "verify"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name or a module when it is first used: `stobatch --help` does not wait for PyTorch."""
    if name in _MODULE_OF:
        globals()[name] = value = getattr(import_module(f"stobatch.{_MODULE_OF[name]}"), name)
        return value
    if not name.startswith("_") and find_spec(f"stobatch.{name}"):
        return import_module(f"stobatch.{name}")
    raise AttributeError(f"module 'stobatch' has no attribute '{name}'")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
