"""attack.json and scores.json: what is left under attack, what is certified, and flags for what looks wrong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, ClassVar

from stobatch.results.accuracy import AttackedShare, ClassShare, Gap, Share, ShareAt
from stobatch.results.certificates import AboutPrior, CertificateSummary
from stobatch.results.document import (
    Count,
    Document,
    Flag,
    Guarantee,
    NotNull,
    Number,
    Part,
    Settings,
    Size,
    Text,
    Whole,
)
from stobatch.types import Norm, Status

WORST = "worst"
"""The name under which the worst of all attacks, example by example, is reported."""


class Protocol(Part):
    """Who is attacked with what knowledge, in words."""

    name: Text
    meaning: Text


class ProtocolTable(Part):
    """Accuracy for each attack and radius of one protocol on one function, from the rows of one table of records."""

    protocol: Protocol
    function: Text
    records: Text = ""
    attacks: tuple[Text, ...]
    rows: Count
    clean_accuracy: Share
    accuracy: tuple[AttackedShare, ...]
    certified_at_attacked: dict[Text, tuple[AttackedShare, ...]]
    """By rule, of votes: the paper's certified accuracy, at the attacked input."""

    def of_attack(self, attack: str) -> tuple[AttackedShare, ...]:
        """Return one attack's accuracies, smallest radius first."""
        return of_attack(self.accuracy, attack)


def of_attack(rows: Iterable[AttackedShare], attack: str) -> tuple[AttackedShare, ...]:
    """Return the rows of one attack, smallest radius first."""
    return tuple(sorted((row for row in rows if row.attack == attack), key=lambda row: row.radius))


class _Measured(Part):
    training_hash: Text
    weights_sha256: Text | None = None
    settings: Settings
    guarantee: Guarantee


class Attack(Document, ProtocolTable, _Measured):
    """What `attack` found: the test set under one protocol."""

    kind: ClassVar[str] = "attack"

    def lines(self) -> list[str]:
        about = f"{self.protocol.name} protocol on {self.function}, {self.rows} test examples"
        return [about, f"clean: {self.clean_accuracy}", *_worst(self), f"privacy: {self.guarantee}"]


def _worst(table: ProtocolTable) -> Iterator[str]:
    for row in table.of_attack(WORST):
        yield f"worst attack at radius {row.radius:g} ({row.norm} over {row.input_range}): {row}"


class SanityFlag(Part):
    """A sign that an evaluation flatters its model: when it is raised, what it means, what to do."""

    name: Text
    level: Text
    raised_if: Text
    explanation: Text
    remedy: Text
    evidence: Text
    refutes: Status | None = None
    """The status of the certificates that it refutes, if it does."""


class SameImages(Part):
    """Accuracies of one function that may stand side by side, since all are of the same test images."""

    function: Text
    rows: Count
    clean_accuracy: Share
    attacked: dict[Text, tuple[ShareAt, ...]]
    """By protocol: right under the worst attack for each example."""
    gaps: tuple[Gap, ...]
    certified: dict[Text, tuple[ShareAt, ...]]
    """By kind of certificate: right and certified, clean inputs."""


class ProbeRecords(Part):
    """Where the rows of the sanity flags' own attacks are."""

    records: Text
    rows: Count
    radius: Size


class Pictures(Part):
    """A few test images that were kept, and what the model answers on them."""

    file: Text
    public: Flag | None = None
    """Whether these images are public; None where an older version did not say."""
    attack: Text
    labels: tuple[Whole, ...]
    predictions: dict[Text, tuple[Whole, ...]]
    """By radius, and `clean`."""


class PriorScores(ProtocolTable, AboutPrior):
    """The weights that a run started from under the same attacks."""


class _Evaluated(Part):
    training_hash: Text
    weights_sha256: Text | None = None
    settings: Settings
    rows: Count
    test_records: Text | None = None
    """What accuracies assume of the test records; None where copies were not looked for yet."""
    guarantee: Guarantee


class ScoreSummary(Part):
    """What follows from the rows of an evaluation alone: `verify` computes it again."""

    norm: Norm
    input_range: Text
    clean_accuracy: Share
    accuracy_by_class: tuple[ClassShare, ...] = ()
    under_attack: tuple[ProtocolTable, ...]
    gaps: dict[Text, tuple[Gap, ...]]
    """By function."""
    same_images: tuple[SameImages, ...] = ()
    flags: tuple[SanityFlag, ...]


class Scores(Document, ScoreSummary, _Evaluated):
    """What `evaluate` found: every protocol side by side, the gap between them, certificates, and sanity flags."""

    kind: ClassVar[str] = "scores"

    lowest_input: Number | None = None
    probe: ProbeRecords | None = None
    images: Pictures | None = None
    certificates: CertificateSummary | None = None
    prior: Annotated[PriorScores | None, NotNull] = None
    """Of a run that started from a prior with an answer of its own."""

    @property
    def has_noise(self) -> bool | None:
        """Return whether the deployed function adds noise to its inputs; None where no document says so."""
        kinds = self.certificates.kinds if self.certificates else ()
        if "vote" in {under.function for under in self.under_attack} | {kind.function for kind in kinds}:
            return True
        return False if kinds else None

    def lines(self) -> list[str]:
        lines = [f"{self.rows} test examples, clean: {self.clean_accuracy}"]
        for table in self.under_attack:
            lines += [f"{table.protocol.name} protocol on {table.function}, {line}" for line in _worst(table)]
        if self.prior is not None:
            about = f"the prior {self.prior.name} alone ({self.prior.budget}), {self.prior.protocol.name} protocol on "
            lines.append(f"{about}{self.prior.function}, clean: {self.prior.clean_accuracy}")
            lines += [f"{about}{self.prior.function}, {line}" for line in _worst(self.prior)]
        lines += self.certificates.lines()[1:] if self.certificates else []
        lines += [f"{flag.level.upper()}: {flag.name}. {flag.evidence}" for flag in self.flags]
        return [*lines, f"privacy: {self.guarantee}"]
