"""The training loop, its schedules, its checkpoints, and the engines that run trainers."""

from stobatch.training.loop import encoder_and_head, train
from stobatch.training.trainable import Trainable

__all__ = ["Trainable", "encoder_and_head", "train"]
