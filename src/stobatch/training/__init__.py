"""The training loop, the descent, checkpoints, and the engines that run trainers."""

from stobatch.training.descent import encoder_and_head
from stobatch.training.loop import train
from stobatch.training.trainable import Trainable
