"""One whole attempt, as a verb would make it: certify, choose, attack, judge."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from support.broken_certificates import certify_apart
from torch import Tensor

from stobatch.auditing.certificate_attacks import AttackedCertificates, FalsifierSettings
from stobatch.auditing.falsifier import Attempt, falsify, finding_of, nearest
from stobatch.results import Finding
from stobatch.verifier import CertificateKind, Verifier

CHEAP = FalsifierSettings(
    num_inputs=24,
    steps=4,
    restarts=1,
    num_aims=1,
    queries=3,
    random_points=3,
    noise_draws=4,
    judging_draws=1000,
    retests=100,
)


@dataclass(frozen=True)
class Outcome:
    finding: Finding
    attempt: Attempt
    certificates: AttackedCertificates


def certificates_of(
    verifier: Verifier, inputs: Tensor, generator: torch.Generator, kind: CertificateKind | None = None
) -> AttackedCertificates:
    kind = kind or verifier.kinds[-1]
    columns = certify_apart(verifier, inputs, generator) if kind.function == "vote" else None
    columns = columns or verifier.verify(inputs, generator).columns()
    return AttackedCertificates.of(kind, inputs, columns["label"], columns)


def attempt(verifier: Verifier, inputs: Tensor, seed: int, settings: FalsifierSettings = CHEAP) -> Outcome:
    """On the verifier's last kind, which in every control is the broken one."""
    generator = torch.Generator().manual_seed(seed)
    certificates = certificates_of(verifier, inputs, generator)
    rows = nearest(verifier, certificates, settings, generator)
    made = falsify(verifier, certificates.part(rows), settings, generator)
    certified = len(certificates.certified())
    finding = finding_of(certificates.kind, made.columns, settings, certified=certified, num_kinds=len(verifier.kinds))
    return Outcome(finding, made, certificates)
