"""Where the trainers of a step run."""

from stobatch.training.engines.base import Averaged, Engine, Gradients, InProcessEngine, Parts, Stop, TrainerTask, never
