"""What is minimised: reconstruction for θ1, the Taylor loss for θ2, benign and adversarial examples together."""

from stobatch.objectives.adversarial import example_weights
from stobatch.objectives.classification import label_noise_term, taylor_loss
from stobatch.objectives.reconstruction import reconstruction_gradient, reconstruction_loss

__all__ = [
    "example_weights",
    "label_noise_term",
    "reconstruction_gradient",
    "reconstruction_loss",
    "taylor_loss",
]
