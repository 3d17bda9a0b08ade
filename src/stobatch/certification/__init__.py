"""From noisy votes to certificates: confidence bounds, composition, radii, verified inference."""

from stobatch.certification.verified_inference import CertificateKind, Verdicts, VerifiedInference

__all__ = ["CertificateKind", "Verdicts", "VerifiedInference"]
