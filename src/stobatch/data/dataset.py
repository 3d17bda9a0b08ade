"""What every data set looks like once it is read: float images in [-1, 1], integer labels, and facts known beforehand.

Everything is checked once, on construction, because each bound in this library assumes inputs inside [-1, 1]: a
single NaN or a pixel of 255 would void a guarantee without any visible failure. What is too large for memory stays in
files (`TrainingExamples`) or comes by in chunks (`Stream`), and is checked there.
"""

from __future__ import annotations

import hashlib
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from stobatch.data.persons import Persons, as_dense, check_codes, person_codes
from stobatch.errors import DataError
from stobatch.types import PAPER_RANGE

MOST_CLASSES = 2**20
"""A label above this is a number of something else."""
_BYTES_AT_ONCE = 2**22
_CHANNELS = (1, 3, 4)


@dataclass(frozen=True)
class DatasetInfo:
    """What the privacy plan needs to know, obtained without reading an image.

    `copies` says how many training records stem from one original record: changing one person's image changes up to
    that many records, which is what a guarantee per person has to count. `num_persons` says how many persons the
    training records belong to, where that is known: then the guarantee is about persons. `classes_from_labels` says
    that nobody gave the number of classes: it is a statement about private labels, and guarantees object to it. So they
    do to `read_from_folder`: which of classes, size and colour nobody gave, so that private pictures decided them.
    """

    name: str
    input_shape: tuple[int, int, int]
    num_classes: int
    num_train: int
    num_test: int
    class_names: tuple[str, ...]
    copies: int = 1
    num_persons: int | None = None
    classes_from_labels: bool = False
    read_from_folder: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        fields = {**vars(self), "input_shape": list(self.input_shape), "class_names": list(self.class_names)}
        # As data sets were described before there were these.
        added_later = ("num_persons", "classes_from_labels", "read_from_folder")
        fields["read_from_folder"] = list(self.read_from_folder)
        return {key: value for key, value in fields.items() if value or key not in added_later}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DatasetInfo:
        channels, height, width = values["input_shape"]
        names, unsaid = tuple(values["class_names"]), tuple(values.get("read_from_folder", ()))
        shape = (channels, height, width)
        return cls(**{**values, "input_shape": shape, "class_names": names, "read_from_folder": unsaid})


class TrainingExamples(ABC):
    """Training examples by position, wherever they lie: in memory, or in files that do not fit into it.

    **Guarantee.** Positions 0 to N - 1 name the same examples for as long as `fingerprint` stays the same; what `fetch`
    returns is checked as `Examples` are.
    """

    num_classes: int

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def input_shape(self) -> tuple[int, int, int]:
        """Return channels, height and width of every input."""

    @property
    @abstractmethod
    def shards(self) -> tuple[range, ...]:
        """Return consecutive ranges that cover all positions: what can be read without the rest."""

    @property
    def persons(self) -> Persons | None:
        """Return whose records they are; None where each record stands for itself."""
        return None

    def require(self, shards: Iterable[int] | None = None) -> None:
        """Raise where one of these shards is not there, or not as it was written; all of them without a choice."""
        return

    @abstractmethod
    def fetch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs (float32) and labels (int64) at these positions, in this order; reads nothing else."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a digest that identifies the data. That of training data stays private: it confirms a guess."""

    @abstractmethod
    def in_memory(self) -> Examples:
        """Return all of them as tensors, for what cannot work by positions."""


@dataclass(frozen=True)
class Examples(TrainingExamples):
    """Images and their labels in memory, checked.

    **Guarantee.** `inputs` is float32 [N, C, H, W] with every value finite and inside [-1, 1]; `labels` is int64 [N]
    with every value in [0, num_classes). `groups`, where they are given, are the persons' numbers (`person_codes`).

    >>> few = Examples(torch.zeros(3, 1, 2, 2), torch.tensor([0, 1, 1]), num_classes=2)
    >>> len(few), few.take(torch.tensor([2, 0])).labels.tolist(), len(few.limit(1))
    (3, [1, 0], 1)
    """

    inputs: Tensor = field(repr=False)
    labels: Tensor = field(repr=False)
    num_classes: int
    groups: Tensor | None = field(default=None, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        check_examples(self.inputs, self.labels, self.num_classes)
        if self.groups is not None:
            check_codes(self.groups, len(self.labels))

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def input_shape(self) -> tuple[int, int, int]:
        channels, height, width = self.inputs.shape[1:]
        return channels, height, width

    @property
    def shards(self) -> tuple[range, ...]:
        return (range(len(self)),)

    @property
    def persons(self) -> Persons | None:
        return None if self.groups is None else Persons.in_memory(self.groups)

    def fetch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows by plain indexing, on the device where the tensors live."""
        return self.inputs[rows], self.labels[rows]

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for tensor in (self.inputs, self.labels, *(() if self.groups is None else (self.groups,))):
            digest.update(tensor.contiguous().cpu().numpy().data)
        return digest.hexdigest()

    def in_memory(self) -> Examples:
        return self

    def take(self, indices: Tensor | slice) -> Examples:
        """Return the examples at these positions, in this order."""
        groups = None if self.groups is None else as_dense(self.groups[indices])
        return Examples(self.inputs[indices], self.labels[indices], self.num_classes, groups=groups)

    def limit(self, count: int | None) -> Examples:
        """Return the first `count` examples; all of them where `count` is None or larger than the set."""
        return self if count is None else self.take(slice(count))


@dataclass(frozen=True)
class Dataset:
    """Training and test examples that keep what their `info` promised."""

    info: DatasetInfo
    train: TrainingExamples
    test: Examples

    def __post_init__(self) -> None:
        parts: tuple[tuple[str, TrainingExamples, int], ...] = (
            ("training", self.train, self.info.num_train),
            ("test", self.test, self.info.num_test),
        )
        for part, examples, count in parts:
            if not len(examples):
                raise DataError(f"{self.info.name} has no {part} examples.", remedy="Give at least one.")
            # Some persons may be held out with their records, whose number is not told: there are fewer then.
            fewer = part == "training" and self.info.num_persons is not None and len(examples) < count
            actual = (count if fewer else len(examples), *examples.input_shape, examples.num_classes)
            promised = (count, *self.info.input_shape, self.info.num_classes)
            if actual != promised:
                raise DataError(
                    f"the {part} examples of {self.info.name} are not what was described.",
                    why=f"Count, shape and classes are {actual}, not {promised}, so a plan made before would not hold.",
                    remedy="Leave the files alone between planning and training, then plan again.",
                )
        persons = self.train.persons
        if self.info.num_persons != (None if persons is None else len(persons)):
            raise DataError(
                f"the persons of {self.info.name} are not what was described.",
                why="Their number is public and fixed before the data are read: the sampling rate follows from it.",
                remedy="Describe the data by what they are: DatasetInfo.num_persons.",
            )


Chunk = tuple[Tensor, Tensor]
"""Inputs, float32 in [-1, 1], and labels, int64: consecutive examples, as few or as many as fit."""


@dataclass(frozen=True)
class Stream:
    """Training and test examples in chunks, each looked at once and in order; as many as `info` says."""

    info: DatasetInfo
    train: Iterable[Chunk]
    test: Iterable[Chunk]
    groups: Tensor | None = None
    """The persons' numbers of all training examples, where they have persons."""

    @classmethod
    def of(cls, dataset: Dataset) -> Stream:
        groups = None if dataset.train.persons is None else dataset.train.persons.codes()
        return cls(dataset.info, chunks(dataset.train), chunks(dataset.test), groups)


def rows_at_once(input_shape: tuple[int, int, int]) -> int:
    """Return how many examples make a chunk of about 4 MiB."""
    return max(1, _BYTES_AT_ONCE // (4 * math.prod(input_shape)))


def chunks(examples: TrainingExamples) -> Iterator[Chunk]:
    """Yield all examples in order, a few at a time."""
    rows = rows_at_once(examples.input_shape)
    for start in range(0, len(examples), rows):
        inputs, labels = examples.fetch(torch.arange(start, min(start + rows, len(examples))))
        yield inputs.cpu(), labels.cpu()


def from_tensors(
    train_inputs: Tensor,
    train_labels: Tensor,
    test_inputs: Tensor,
    test_labels: Tensor,
    *,
    num_classes: int | None = None,
    class_names: Sequence[str] | None = None,
    name: str = "tensors",
    groups: Any = None,
) -> Dataset:
    """Make a data set of images [N, C, H, W] that are already in [-1, 1].

    Give `class_names` or `num_classes` where you can: left out, the number is read off the labels, which are themselves
    private data, and guarantees object to it. `groups` says whose each training record is, by numbers or texts:
    guarantees are then about persons.
    """
    if class_names is not None:
        names_given = tuple(map(str, class_names))
        if num_classes not in (None, len(names_given)) or len(set(names_given)) < len(names_given):
            raise DataError(
                f"{len(names_given)} class names do not fit {num_classes or 'that number of'} classes.",
                remedy="Give each class one name of its own, in the order of the labels.",
            )
        num_classes = len(names_given)
    parts = [
        (_as_floats(train_inputs), _as_integers(train_labels)),
        (_as_floats(test_inputs), _as_integers(test_labels)),
    ]
    for inputs, labels in parts:
        _check_form(inputs, labels)
    largest = max((int(labels.max()) for _, labels in parts if labels.numel()), default=0)
    classes = max(2, largest + 1) if num_classes is None else num_classes
    if isinstance(classes, bool) or not isinstance(classes, int) or not 2 <= classes <= MOST_CLASSES:
        raise DataError(
            f"{classes} is not a number of classes.",
            why="Without num_classes it is the largest label and one more." if num_classes is None else "",
            remedy=f"Give a whole number from 2 to {MOST_CLASSES:,}, and labels below it.",
        )
    train, test = (Examples(inputs, labels, classes) for inputs, labels in parts)
    if groups is not None:
        train = replace(train, groups=person_codes(groups, len(train)))
    _warn_about_half_range(train.inputs)
    names = tuple(str(index) for index in range(classes)) if class_names is None else names_given
    persons = None if train.persons is None else len(train.persons)
    info = DatasetInfo(
        name, train.input_shape, classes, len(train), len(test), names,
        num_persons=persons, classes_from_labels=num_classes is None,
    )  # fmt: skip
    return Dataset(info, train, test)


def _warn_about_half_range(inputs: Tensor) -> None:
    """Say so where no value is negative: images over [0, 1] pass every check and use half of the range."""
    if inputs.numel() and float(inputs.min()) >= 0 and float(inputs.max()) > 0.5:
        logging.getLogger("stobatch").warning(
            "stobatch: no input is below 0, so they seem to be over [0, 1]. Radii and noise are meant over [-1, 1]. "
            "Multiply the inputs by 2 and subtract 1."
        )


def _plain_tensor(values: Any, what: str) -> Tensor:
    """Return a plain strided tensor of values from any library."""
    try:
        tensor = torch.as_tensor(values).detach()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        reason = " ".join(str(error).split())
        raise DataError(
            f"the {what} are not a tensor: {reason}.", remedy="Give torch tensors or NumPy arrays."
        ) from None
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized or tensor.is_nested:
        raise DataError(
            f"the {what} are sparse, quantised, nested or without values.", remedy="Give plain, dense tensors."
        )
    return tensor


def _as_floats(inputs: Tensor) -> Tensor:
    """Return any floating type as float32; whole numbers stay as they are, for the check to refuse with its remedy."""
    inputs = _plain_tensor(inputs, "inputs")
    return inputs.float() if inputs.is_floating_point() else inputs


def _as_integers(labels: Tensor) -> Tensor:
    labels = _plain_tensor(labels, "labels")
    return labels if labels.is_floating_point() or labels.is_complex() else labels.long()


def check_examples(
    inputs: Tensor, labels: Tensor, num_classes: int, *, called: Callable[[int], str] = "example {}".format
) -> None:
    """Raise unless these can be trained on; `called` names one of them in a message."""
    _check_form(inputs, labels)
    _check_inputs(inputs, called)
    _check_labels(labels, num_classes, called)


def require_dataset(dataset: object) -> None:
    """Raise unless what a caller handed over is a data set, or nothing."""
    if dataset is None or isinstance(dataset, Dataset):
        return
    raise DataError(
        f"dataset is a {type(dataset).__name__}, and a data set is a Dataset.",
        remedy="Make one of your tensors: stobatch.from_tensors(inputs, labels, test_inputs, test_labels, "
        "num_classes=...).",
    )


def _check_form(inputs: Tensor, labels: Tensor) -> None:
    if inputs.dtype == torch.uint8:
        raise DataError("inputs are bytes (uint8), not floats in [-1, 1].", remedy="Divide by 127.5 and subtract 1.")
    if inputs.dtype != torch.float32:
        raise DataError(f"inputs are {inputs.dtype}, not torch.float32.", remedy="Convert them with inputs.float().")
    if labels.dtype != torch.int64:
        raise DataError(f"labels are {labels.dtype}, not torch.int64.", remedy="Give class numbers, as labels.long().")
    if inputs.ndim == 4 and inputs.shape[3] in _CHANNELS and inputs.shape[1] not in _CHANNELS:
        raise DataError(
            f"inputs of shape {tuple(inputs.shape)} seem to be [N, H, W, C].",
            why="Channels come before height and width here.",
            remedy="Give inputs.permute(0, 3, 1, 2).",
        )
    if inputs.ndim != 4 or labels.ndim != 1 or len(inputs) != len(labels):
        raise DataError(
            f"inputs of shape {tuple(inputs.shape)} and labels of shape {tuple(labels.shape)} do not belong together.",
            remedy="Give inputs [N, C, H, W] and labels [N] with the same N.",
        )


def _check_inputs(inputs: Tensor, called: Callable[[int], str]) -> None:
    """Raise for inputs out of range or NaN. Minimum and maximum decide in one pass; NaN makes both NaN."""
    if not inputs.numel():
        return
    low, high = (float(extreme) for extreme in torch.aminmax(inputs))
    if low >= PAPER_RANGE.low and high <= PAPER_RANGE.high:
        return
    flat = inputs.flatten(1)
    finite = flat.isfinite().all(1)
    if not finite.all():
        raise DataError(
            f"{called(_first_index(~finite))} has a value that is NaN or infinite.",
            why="No bound holds for it.",
            remedy="Remove or mend it.",
        )
    outside = (flat < PAPER_RANGE.low).any(1) | (flat > PAPER_RANGE.high).any(1)
    bytes_like = low >= 0 and high <= 255
    raise DataError(
        f"{called(_first_index(outside))} leaves {PAPER_RANGE}: values span [{low:g}, {high:g}].",
        why="Every bound assumes that range.",
        remedy="Divide by 127.5 and subtract 1." if bytes_like else f"Rescale or clip the inputs to {PAPER_RANGE}.",
    )


def _check_labels(labels: Tensor, num_classes: int, called: Callable[[int], str]) -> None:
    wrong = (labels < 0) | (labels >= num_classes)
    if wrong.any():
        index = _first_index(wrong)
        raise DataError(
            f"{called(index)} has label {int(labels[index])}.",
            why=f"With {num_classes} classes the labels are 0 to {num_classes - 1}.",
            remedy="Renumber the labels or give a larger num_classes.",
        )


def _first_index(mask: Tensor) -> int:
    return int(mask.nonzero()[0])
