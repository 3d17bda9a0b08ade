"""What `predict` answers, and what `export` returns of the network that others will ask."""

from __future__ import annotations

from stobatch.results.certificates import CertificateSummary, Kind
from stobatch.results.checks import Source
from stobatch.results.document import Count, Document, Flag, Guarantee, Number, Part, Size, Text
from stobatch.results.scores import SanityFlag
from stobatch.results.training import DatasetFacts
from stobatch.types import Status


class Prediction(Part):
    """The answer for one picture, or why there is none."""

    name: Text
    """Its file, or its place among those handed over."""
    label: Count | None = None
    class_name: Text | None = None
    abstains: Flag = False
    """Whether no label could be proved; the label is then only the likeliest."""
    scores: tuple[Number, ...] = ()
    """The network's own, without noise; softmax makes shares of them."""
    radius: Size | None = None
    """Proved or claimed, as the kind of certificate says; in its norm over [-1, 1]."""
    radius_of_255: Size | None = None
    """The same on pixels from 0 to 255."""
    is_safe: Flag | None = None
    """Whether the label holds at the radius asked about; none where no radius was."""
    error: Text | None = None
    """Why there is no answer."""

    def line(self, kind: Kind | None) -> str:
        """Say it in one line; no radius without who vouches for it."""
        if self.error is not None:
            return f"{self.name}: {self.error}"
        if self.abstains:
            return f"{self.name}: abstains, no label could be proved"
        held, safe = "", ""
        if self.radius is not None:
            status = f"{kind.status}, {kind.norm}" if kind else "of no certificate"
            size = f" within {self.radius:.4g} ({status}; {self.radius_of_255:.3g} of 255)"
            held = size if self.radius else ", within no radius"
        if self.is_safe is not None:
            safe = f", {'holds' if self.is_safe else 'NOT shown to hold'} at the radius asked about"
        return f"{self.name}: {self.class_name}{held}{safe}"


class Predictions(Document):
    """Answers for pictures, with what they rest on."""

    run: Text
    weights_sha256: Text
    class_names: tuple[Text, ...]
    certificate: Kind | None
    """What the radii mean and who vouches for them; none where this model has no certificate."""
    asked_radius: Size | None
    rows: tuple[Prediction, ...]

    def meaning(self) -> str:
        """Return one line on what the radii mean."""
        kind = self.certificate
        if kind is None:
            return "this model has no certificate: labels, and no radius"
        often = (
            f", each wrong with probability at most {kind.failure_probability:g}" if kind.failure_probability else ""
        )
        return (
            f"radii are {kind.status} ({kind.source}), {kind.norm} over {kind.input_range}, of the "
            f"{kind.function.replace('_', ' ')}{often}"
        )

    def lines(self) -> list[str]:
        shown = [f"  {row.line(self.certificate)}" for row in self.rows[:20]]
        shown += ["  ..."] if len(self.rows) > 20 else []
        meaning = [self.meaning()] if self.certificate is None or any(row.radius for row in self.rows) else []
        return [f"{len(self.rows):,} pictures, model {self.weights_sha256[:12]}", *meaning, *shown]


class ProbeCheck(Part):
    """The exported file, loaded back, against the deployed network: the same label on every one of these inputs."""

    random_inputs: Count
    corners: Count
    """Inputs of which every value is -1 or 1."""
    seed: Count
    """The public seed that all of them are drawn from."""
    labels_seen: Count
    """How many of the classes the network answers with on them: the check says nothing about the others."""
    largest_difference: Size
    """Of any score on any of them."""
    largest_score: Size
    """What that difference is to be measured by."""

    def __str__(self) -> str:
        return (
            f"the same label on {self.random_inputs} random inputs and {self.corners} corners of the input range "
            f"(seed {self.seed}; {self.labels_seen} of the labels occur); scores, of sizes up to "
            f"{self.largest_score:.3g}, differ by at most {self.largest_difference:.3g}"
        )


class Exported(Document):
    """A network that others load without stobatch; its card says all of this in words."""

    folder: Text
    file: Text
    format: Text
    file_sha256: Text
    bytes: Count
    method: Text
    training_hash: Text
    weights_sha256: Text
    dataset: DatasetFacts
    pictures: Text
    """How a picture becomes an input, by the rule of the run."""
    dtype: Text
    torch: Text
    made_by: Source
    check: ProbeCheck
    test_accuracy: Number | None
    test_examples: Count | None
    guarantee: Guarantee
    votes: Flag
    """Whether what is certified is a vote under noise, which the file is not."""
    certificates: CertificateSummary | None
    """Of the run; a kind that an audit or an attack broke is refuted."""
    flags: tuple[SanityFlag, ...]
    not_checked: tuple[Text, ...]

    @property
    def is_certified(self) -> bool:
        """Return whether the run has certificates that are proved and that nothing broke."""
        return self.certificates is not None and any(kind.status is Status.PROVED for kind in self.certificates.kinds)

    def scope(self) -> str:
        """Return what certificates are about, and that this file is something else."""
        is_not = (
            "This file is one pass without that noise, and not the vote"
            if self.votes
            else "Other kernels round otherwise"
        )
        if not self.is_certified:
            vote = f" What could be is a vote over many passes under fresh noise. {is_not}." if self.votes else ""
            return f"Nothing is certified, neither for the run nor for this file.{vote}"
        pass_of = (
            f"Certificates hold for the deployed arithmetic of the run, the {self.dtype} pass as stobatch calls it"
        )
        function = ", and here for a vote over many such passes under fresh noise" if self.votes else ""
        return f"{pass_of}{function}. They do NOT hold for this file. {is_not}."

    def lines(self) -> list[str]:
        return [
            f"{self.folder}/{self.file}: {self.format}, {self.bytes:,} bytes, SHA-256 {self.file_sha256}",
            f"loaded back: {self.check}",
            f"privacy: {self.guarantee}",
            *(self.certificates.lines()[1:] if self.certificates else ["certificates: none were made"]),
            self.scope(),
            f"model card: {self.folder}/README.md; its license is for you to choose",
        ]
