"""The sound method's settings, one recipe per data set. ε and the radius are the knobs.

Settings were chosen on a part of the training data that was held out, never on test data; the guarantee says so.
"""

from __future__ import annotations

from stobatch.config import CertificationConfig, DataConfig, EvaluationConfig, ModelConfig, RunConfig, TrainingConfig
from stobatch.methods import SoundConfig


def mnist(epsilon: float = 1.0, radius: float = 0.2) -> RunConfig:
    """MNIST: one hidden layer of 64 maps behind a squashed input, 80 passes over the data on average."""
    return RunConfig(
        method=SoundConfig(epsilon=epsilon, radius=max(radius, 0.15), expected_batch_size=4096),
        data=DataConfig(name="mnist"),
        model=ModelConfig(architecture="squash 3, conv 64 5/2, relu, linear"),
        training=TrainingConfig(steps=1172, learning_rate=4.0, optimiser="sgd"),
        certification=CertificationConfig(attack_radius=radius),
        evaluation=EvaluationConfig(
            radii=(0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6), protocols=("adaptive",), functions=("single_pass",)
        ),
    )
