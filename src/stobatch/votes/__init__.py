"""Certificates by vote: what fresh noise proves about the classifier behind it.

>>> import torch
>>> from stobatch import votes
>>> certificates = votes.certify(torch.nn.Linear(4, 3), torch.zeros(5, 4), stddev=0.5, draws=1000)
"""

from typing import TYPE_CHECKING

from stobatch.lazy import lazy_names

if TYPE_CHECKING:
    from stobatch.votes.counting import SmoothedClassifier, VoteCertificates, VoteSettings, certify
    from stobatch.votes.noise import GaussianNoise, HiddenGaussian, HiddenLaplace, LaplaceNoise, SmoothingNoise

__all__ = [
    "GaussianNoise",
    "HiddenGaussian",
    "HiddenLaplace",
    "LaplaceNoise",
    "SmoothedClassifier",
    "SmoothingNoise",
    "VoteCertificates",
    "VoteSettings",
    "certify",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "counting": ("SmoothedClassifier", "VoteCertificates", "VoteSettings", "certify"),
        "noise": ("GaussianNoise", "HiddenGaussian", "HiddenLaplace", "LaplaceNoise", "SmoothingNoise"),
    },
)
