"""What `export` returns: the file that was written, how it was compared with the run, and what is known of both."""

from __future__ import annotations

from stobatch.results.certificates import CertificateSummary
from stobatch.results.checks import Source
from stobatch.results.document import Count, Document, Flag, Guarantee, Number, Part, Size, Text
from stobatch.results.scores import SanityFlag
from stobatch.results.training import DatasetFacts


class ProbeCheck(Part):
    """The exported file, loaded back, beside the deployed network: the same label on every one of these inputs."""

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
    """A network that others load without stobatch; the card beside it says all of this in words."""

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

    def scope(self) -> str:
        """Return what certificates are about, and that this file is something else."""
        pass_of = (
            f"Certificates hold for the deployed arithmetic of the run, the {self.dtype} pass as stobatch calls it"
        )
        function = ", and here for a vote over many such passes under fresh noise" if self.votes else ""
        is_not = (
            "This file is one pass without that noise, and not the vote"
            if self.votes
            else "Other kernels round otherwise"
        )
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
