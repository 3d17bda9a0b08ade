"""certificates.json: labels with certified radii on the test set, by each kind of certificate."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from stobatch.results.accuracy import Share, ShareAt
from stobatch.results.document import Count, Document, NotNull, Number, Part, Settings, Size, Text
from stobatch.types import Norm, Status


class Kind(Part):
    """What a column of radii means: who vouches for it, for which function, in which units, how often it may fail."""

    name: Text
    function: Text
    column: Text = ""
    """The column of records that holds the radii; older versions did not name it."""
    status: Status
    source: Text
    norm: Norm
    input_range: Text
    failure_probability: Number | None
    assumptions: tuple[Text, ...] = ()


class VerifiedAccuracy(Part):
    """Of verified inference on clean inputs: how often it is right, and how often it abstains."""

    correct: Share
    correct_without_abstaining: Share
    abstained: Share


class Chosen(Part):
    """Which certificate was chosen, by its mean radius on inputs without their labels."""

    certificate: Text
    mean_radius: dict[Text, Number]
    compared_on: Text


class _About(Part):
    config_hash: Text
    training_hash: Text
    weights_sha256: Text | None = None
    settings: Settings
    rows: Count
    seconds: Size


class CertifiedAccuracies(Part):
    """What follows from the rows of certificates alone: `verify` computes it again."""

    kinds: tuple[Kind, ...] = Field(min_length=1)
    verified_accuracy: VerifiedAccuracy
    certified_accuracy: dict[Text, tuple[ShareAt, ...]]
    """By kind: right and certified at each radius, on clean inputs."""
    largest_radius: dict[Text, Size]

    @model_validator(mode="after")
    def _speaks_of_its_kinds(self) -> Self:
        names = {kind.name for kind in self.kinds}
        if not names == self.certified_accuracy.keys() == self.largest_radius.keys():
            raise ValueError("accuracies and largest radii are not those of its kinds of certificate")
        if len({tuple(row.radius for row in rows) for rows in self.certified_accuracy.values()}) > 1:
            raise ValueError("its kinds of certificate are not asked about the same radii")
        return self

    def radii(self) -> tuple[float, ...]:
        """Return the radii that were asked about."""
        return tuple(row.radius for row in self.certified_accuracy[self.kinds[0].name])


class AboutPrior(Part):
    """The weights that a run started from, measured by themselves."""

    name: Text
    weights_sha256: Text
    conflict: Text | None
    """Why they may contain the private records; null where nothing says so."""
    tuned: Text | None
    """Why choosing how they are made may have told something of the private records; null where nothing says so."""

    @property
    def budget(self) -> str:
        """Return what the prior's certificates cost the private records, in words."""
        if self.conflict is not None:
            return "no ε: it may contain the private records"
        return "ε = 0" if self.tuned is None else "ε = 0 but for settings that were chosen by looking at them"


class _CertifiedPrior(AboutPrior):
    config_hash: Text
    """Which table of records has its rows."""
    rows: Count


class PriorCertificates(CertifiedAccuracies, _CertifiedPrior):
    """The same certificates of the weights that a run started from."""


class CertificateSummary(Document, CertifiedAccuracies, _About):
    """What `certify` found: certified accuracy at each radius, by each kind of certificate, with who vouches for it."""

    kind: ClassVar[str] = "certificates"

    chosen: Chosen | None = None
    prior: Annotated[PriorCertificates | None, NotNull] = None
    """Of a run that started from a prior with an answer of its own."""

    def lines(self) -> list[str]:
        lines = [f"{self.rows} test examples"]
        for kind in self.kinds:
            unit = f"{kind.norm} over {kind.input_range}"
            certified = f"certified by {kind.name} ({kind.status}) at radius ({unit})"
            lines.append(f"{certified} {_shares(self.certified_accuracy[kind.name])}")
            if self.prior is not None and kind.name in self.prior.certified_accuracy:
                own = _shares(self.prior.certified_accuracy[kind.name])
                lines.append(f"the prior {self.prior.name} alone ({self.prior.budget}), {certified} {own}")
        return lines


def _shares(rows: Iterable[ShareAt]) -> str:
    return ", ".join(f"{row.radius:g}: {row}" for row in rows)
