"""Deterministic certificates: bounds on every score of a network in a box around an input.

>>> import torch
>>> from stobatch import bounds
>>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
>>> certificates = bounds.certify(model, torch.zeros(5, 4), [0.01, 0.1])
"""

from typing import TYPE_CHECKING

from stobatch.lazy import lazy_names

if TYPE_CHECKING:
    from stobatch.bounds.certifier import BoundCertificates, BoxCertifier, certify

__all__ = ["BoundCertificates", "BoxCertifier", "certify"]

__getattr__, __dir__ = lazy_names(__name__, {"certifier": __all__})
