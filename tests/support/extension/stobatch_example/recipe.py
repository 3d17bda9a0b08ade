"""A complete configuration in which every name is one that this package adds."""

from stobatch.config import CertificationConfig, DataConfig, EvaluationConfig, ModelConfig, RunConfig, TrainingConfig
from stobatch_example.method import SmoothLabelsConfig

TINY_STACK = "conv 4 3/2, relu, linear"


def bars() -> RunConfig:
    return RunConfig(
        method=SmoothLabelsConfig(epsilon=3.0, delta=1e-3, batch_size=30, clip_norm=0.5, average_decay=0.9),
        data=DataConfig(name="bars", train_limit=600, test_limit=40),
        model=ModelConfig(architecture="tiny_stack"),
        training=TrainingConfig(steps=40, learning_rate=1.0, optimiser="sgd", monitor_every=20, monitor_examples=40),
        certification=CertificationConfig(certificate="lipschitz"),
        evaluation=EvaluationConfig(
            radii=(0.002, 0.5),
            protocols=("adaptive",),
            functions=("single_pass",),
            adaptive_attacks=("shrinking_steps", "madry"),
            adaptive_steps=5,
            restarts=1,
            num_images=2,
        ),
    )
