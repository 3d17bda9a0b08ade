"""Where the trainers of a step run."""

from stobatch.training.engines.base import Averaged, Engine, Gradients, Parts, Stop, TrainerTask, never
from stobatch.training.engines.in_process import InProcessEngine

__all__ = ["Averaged", "Engine", "Gradients", "InProcessEngine", "Parts", "Stop", "TrainerTask", "never"]
