"""The training loop, its schedules, its checkpoints, and the engines that run trainers."""

from stobatch.training.loop import Trainable, encoder_and_head, train

__all__ = ["Trainable", "encoder_and_head", "train"]
