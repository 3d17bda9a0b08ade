"""The training loop, its schedules, its checkpoints, and the engines that run trainers."""

from stobatch.training.loop import Trainable, train

__all__ = ["Trainable", "train"]
