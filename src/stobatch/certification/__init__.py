"""Certificates: bounds on what a network can answer near an input, and votes under noise; published and sound."""

from stobatch.certification.interval import BoxCertifier
from stobatch.certification.noise_layer import LayerGaussian, LayerLaplace, LayerNoise, layer_sensitivity
from stobatch.certification.noise_layer_verifier import LayerVerdicts, NoiseLayerVerifier
from stobatch.certification.smoothing import GaussianNoise, HiddenGaussian, HiddenLaplace, LaplaceNoise, SmoothingNoise
from stobatch.certification.sound import BoundsVerifier, VotesVerifier, best_of
from stobatch.certification.verified_inference import Verdicts, VerifiedInference
from stobatch.certification.verifier import Answers, CertificateKind, Verifier
from stobatch.certification.votes import SmoothedClassifier, VoteSettings

__all__ = [
    "Answers",
    "BoundsVerifier",
    "BoxCertifier",
    "CertificateKind",
    "GaussianNoise",
    "HiddenGaussian",
    "HiddenLaplace",
    "LaplaceNoise",
    "LayerGaussian",
    "LayerLaplace",
    "LayerNoise",
    "LayerVerdicts",
    "NoiseLayerVerifier",
    "SmoothedClassifier",
    "SmoothingNoise",
    "Verdicts",
    "VerifiedInference",
    "Verifier",
    "VoteSettings",
    "VotesVerifier",
    "best_of",
    "layer_sensitivity",
]
