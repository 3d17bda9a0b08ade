"""A prior: weights made without private data, as NAME.safetensors, and their card, NAME.card.json.

Beside them may lie NAME.records.safetensors: a digest of each record that the weights were made from, so that a
training can look whether its own are among them. Records that are private after all could be guessed from it: it stands
in no card, and no run copies it.

The card says what the weights have seen. Those who train from them on private data cannot find that out from the
numbers, and a guarantee that starts from weights which have seen the private records is none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from stobatch.errors import RunError
from stobatch.files import (
    read_json,
    read_tensors,
    require_writable,
    serialise_tensors,
    tensors_sha256,
    write_atomically,
    write_json,
    write_tensors,
)
from stobatch.results.document import Count, Document, Part, Settings, Text

UNKNOWN = "unknown"
"""In `may_contain`: it is not known which records the weights have seen."""
_WEIGHTS, _CARD, _RECORDS = ".safetensors", ".card.json", ".records.safetensors"
_DIGESTS = "digests"
"""The tensor with a row for each record."""


class PriorSource(Part):
    """Something that the weights were made from."""

    name: Text
    what: Text
    """In a sentence: which images, and how many kinds of them."""
    licence: Text
    sha256: Text | None
    """Of the records as they were trained on, or of the files; none where they are drawn afresh in every step."""
    records: Count | None
    """How many; none where they are drawn afresh in every step."""


class PriorCard(Document):
    """What a prior is, what it was made from, and which records it may have seen."""

    kind = "prior"

    name: Text
    made_by: Text
    architecture: Settings | None
    """The `model` section of the settings that the weights fit; none for a network that was handed over."""
    input_shape: tuple[Count, ...]
    num_classes: Count
    sources: tuple[PriorSource, ...]
    may_contain: tuple[Text, ...]
    """Names of data sets whose records it may have seen, or the word `unknown`."""
    weights_sha256: Text
    """Over the tensors, ordered by name, as in `training.json`."""
    method: Literal["supervised", "contrastive", "other"]
    settings: Settings
    """What it was trained with."""
    tuned_on: tuple[Text, ...] = ()
    """Names of data sets that somebody looked at to choose how the sources are made; no network was trained on them.
    Towards their records the prior is as private as any choice of settings is: nothing is proved of it."""

    def lines(self) -> list[str]:
        shape = "x".join(map(str, self.input_shape))
        seen = ", ".join(self.may_contain) or "none"
        return [
            f"{self.name}: made by {self.made_by}, {self.method}, {shape} inputs, {self.num_classes} classes",
            *(_line(source) for source in self.sources),
            f"data sets whose records it may have seen: {seen}",
            *([f"settings chosen by looking at: {', '.join(self.tuned_on)}"] if self.tuned_on else []),
            f"privacy: none towards its sources; {self._others()}",
        ]

    def _others(self) -> str:
        """Say what is known about records that are not among the sources."""
        if self.may_contain or self.tuned_on:
            return "nothing is proved towards the data sets named above"
        return "by its maker's word it saw no other record; no file can show that"


def _line(source: PriorSource) -> str:
    count = "drawn anew in every step" if source.records is None else f"{source.records:,} records"
    return f"source {source.name}: {source.what} ({count}; licence: {source.licence})"


def prior_files(prior: Path) -> tuple[Path, Path]:
    """Return where the weights and the card of a prior are, from its name with or without its ending.

    >>> [path.name for path in prior_files(Path("priors/fonts.v2"))]
    ['fonts.v2.safetensors', 'fonts.v2.card.json']
    """
    name = prior.name.removesuffix(_WEIGHTS).removesuffix(_CARD)
    return prior.with_name(name + _WEIGHTS), prior.with_name(name + _CARD)


def records_file(prior: Path) -> Path:
    """Return where the digests of the records are that a prior was made from, if they were kept."""
    weights = prior_files(prior)[0]
    return weights.with_name(weights.name.removesuffix(_WEIGHTS) + _RECORDS)


def require_new_prior(prior: Path) -> None:
    """Raise where one of its files is there already, or none can be written."""
    require_writable(prior)
    for path in (*prior_files(prior), records_file(prior)):
        if path.exists():
            raise RunError(f"{path} is there already.", remedy="Choose another --out, or remove it.")


def write_prior(prior: Path, tensors: dict[str, Any], card: PriorCard, records: Any | None = None) -> PriorCard:
    """Write the weights, then the card, each whole or not at all; return the card with the weights' digest.

    `records` are the digests of what the weights were trained on (`data.overlap.digest_records`), for trainings to
    compare theirs with.
    """
    weights, card_file = prior_files(prior)
    blob = serialise_tensors(tensors, {"stobatch": PriorCard.kind})
    card = card.replace(weights_sha256=tensors_sha256(blob))
    write_atomically(weights, lambda out: out.write(blob))
    if records is not None:
        owner = {"weights_sha256": card.weights_sha256}
        write_tensors(records_file(prior), {_DIGESTS: records}, owner, private=False)
    write_json(card_file, PriorCard.kind, card.to_dict())
    return card


def read_card(prior: Path) -> PriorCard:
    """Return the card of a prior."""
    card_file = prior_files(prior)[1]
    return PriorCard.from_dict(read_json(card_file, PriorCard.kind), card_file)


def read_records(prior: Path, card: PriorCard) -> Any | None:
    """Return the digests of the records that a prior was made from; None where they were not kept, or not given."""
    path = records_file(prior)
    if not path.exists():
        return None
    tensors, metadata = read_tensors(path)
    if metadata.get("weights_sha256") != card.weights_sha256 or tensors.keys() != {_DIGESTS}:
        raise RunError(
            f"{path} is not of the weights that {prior_files(prior)[1]} describes.",
            why="It says whether private records are among those that the weights have seen.",
            remedy="Take all files from one place, or make the prior again.",
        )
    return tensors[_DIGESTS]


def read_prior(prior: Path) -> tuple[dict[str, Any], PriorCard]:
    """Return the tensors and the card of a prior; raises where either is missing, damaged or of another."""
    (weights, card_file), card = prior_files(prior), read_card(prior)
    tensors, _ = read_tensors(weights)
    if tensors_sha256(serialise_tensors(tensors, {})) != card.weights_sha256:
        raise RunError(
            f"{weights} holds other weights than {card_file} describes.",
            why="What a card says of other weights says nothing of these.",
            remedy="Take both files from one place, or make the prior again.",
        )
    return tensors, card
