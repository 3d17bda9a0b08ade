"""Where the trainers of a step run."""

from stobatch.training.engines.base import Engine, Gradients, TrainerTask
from stobatch.training.engines.in_process import InProcessEngine

__all__ = ["Engine", "Gradients", "InProcessEngine", "TrainerTask"]
