"""Public images to pretrain on: a batch at a time, in the shape that a network takes, and what a card says of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from stobatch import data
from stobatch.config import DataConfig
from stobatch.data import Examples
from stobatch.data.generated import dead_leaves, untrained_generators
from stobatch.data.image_folder import SUFFIXES
from stobatch.data.mnist import shrink_to_small
from stobatch.data.pixels import PictureRule, in_turn, list_images, read_images
from stobatch.data.rendered_digits import SHEET, Glyphs, RenderedDigits, list_fonts, read_font_glyphs
from stobatch.data.sources import is_public
from stobatch.data.stroke_digits import make_stroke_glyphs, read_ways
from stobatch.errors import DataError, SettingError
from stobatch.files import sha256_of
from stobatch.registry import DATA_SETS
from stobatch.results import PriorSource
from stobatch.results.prior import UNKNOWN
from stobatch.seeds import Seeds

Shape = tuple[int, int, int]

DIGITS, FONTS, STROKES, LEAVES, GENERATORS = "digits", "fonts", "strokes", "dead-leaves", "generators"
MADE = (DIGITS, FONTS, STROKES, LEAVES, GENERATORS)
"""Images that need no file but the package's own; `digits` are those of fonts and of strokes."""
_STROKES_PER_DIGIT = 400
GENERATED = 16_384
"""The most images that are generated; they are drawn from again and again."""
_SHIFT = 14
"""An image is shifted by at most its side over this, as digits and objects in pictures are."""

KNOWN: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "mnist": ("CC BY-SA 3.0", ("mnist", "small_digits")),
    "small_digits": ("CC BY-SA 3.0", ("mnist", "small_digits")),
    "fashion_mnist": ("MIT, copyright 2017 Zalando SE", ("fashion_mnist",)),
    "cifar10": ("none stated by its authors, who ask to be cited", ("cifar10",)),
    "tiny_imagenet": ("ImageNet's terms: research and teaching only", ("tiny_imagenet", "imagenet")),
}
"""Of public data sets: the licence, and the names of sets whose records a network that learnt from one has seen."""


class PublicImages(ABC):
    """Images that a batch is drawn from."""

    sources: tuple[PriorSource, ...]
    may_contain: tuple[str, ...]
    num_classes: int | None = None
    """None where they have no labels."""
    tuned_on: tuple[str, ...] = ()
    """Data sets that were looked at to choose how the images are made."""
    records: Tensor | None = None
    """The images themselves; None where they are drawn afresh in every step."""

    @abstractmethod
    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return images in [-1, 1] and their labels, zeros where they have none; the generator decides everything."""


class Rendered(PublicImages):
    """Digits of fonts, of strokes or of both, drawn afresh each time."""

    may_contain = ()
    num_classes = 10
    tuned_on = ("mnist",)

    def __init__(self, name: str, shape: Shape, seeds: Seeds) -> None:
        parts: list[tuple[Glyphs, PriorSource]] = []
        if name in (DIGITS, FONTS):
            parts.append((read_font_glyphs(), _font_facts()))
        if name in (DIGITS, STROKES):
            glyphs = make_stroke_glyphs(_STROKES_PER_DIGIT, seeds.generator("strokes"))
            parts.append((glyphs, _stroke_facts(len(glyphs))))
        self.sources = tuple(facts for _, facts in parts)
        self.digits, self.shape = RenderedDigits(Glyphs.join([glyphs for glyphs, _ in parts])), shape

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        images, labels = self.digits.draw(count, generator)
        return (shrink_to_small(images) if self.shape == (1, 8, 8) else fit(images, self.shape)), labels


_DRAWN = (
    "rotated, slanted, stretched, bent and drawn with another pen in every step; chosen by looking at training images "
    "of MNIST"
)


def _font_facts() -> PriorSource:
    fonts = len(list_fonts())
    return PriorSource(
        name=FONTS,
        what=f"the ten digits of {fonts} handwriting fonts, {_DRAWN}",
        licence="SIL Open Font License 1.1; copyright notices in stobatch/data/font_digit_files",
        sha256=sha256_of(SHEET),
        records=10 * fonts,
    )


def _stroke_facts(count: int) -> PriorSource:
    ways = sum(map(len, read_ways()))
    return PriorSource(
        name=STROKES,
        what=f"digits as strokes of a pen, in {ways} ways, their points moved at random, {_DRAWN}",
        licence="MIT, as the library",
        sha256=None,
        records=count,
    )


class Kept(PublicImages):
    """Images that are there, each shifted a little when it is drawn."""

    def __init__(self, examples: Examples, source: PriorSource, may_contain: tuple[str, ...], labelled: bool) -> None:
        self.examples, self.sources, self.may_contain = examples, (source,), may_contain
        self.num_classes, self.records = examples.num_classes if labelled else None, examples.inputs

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        rows = torch.randint(len(self.examples), (count,), generator=generator)
        images, labels = self.examples.fetch(rows)
        return shift(images, generator), labels


def public_images(
    name: str,
    config: DataConfig,
    shape: Shape,
    *,
    root: Path | None,
    seeds: Seeds,
    count: int,
    licence: str | None = None,
) -> PublicImages:
    """Return what `--from-data` names, in this shape, to draw `count` images from; no private data are read."""
    if name in (DIGITS, FONTS, STROKES):
        return Rendered(name, shape, seeds)
    if name in (LEAVES, GENERATORS):
        return _draw_generated(name, shape, seeds, min(count, GENERATED))
    known, _, first = name.partition(":")
    if is_public(known) and (not first or (first.isdecimal() and int(first) > 1)):
        return _read_named(
            DataConfig(name=known, num_classes=int(first) if first else None), config, shape, root, seeds
        )
    folder = Path(name)
    if folder.is_dir():
        return _read_folder(folder, shape, licence)
    public = [known for known in DATA_SETS if is_public(known)]
    raise SettingError(
        f"'{name}' is neither a public data set nor a folder.",
        remedy=f"Use {', '.join((*MADE, *public))} (tiny_imagenet:30 for its first 30 classes), or the path of a "
        "folder of images.",
    )


def _draw_generated(name: str, shape: Shape, seeds: Seeds, count: int) -> Kept:
    make: Callable[[int, Shape, torch.Generator], Tensor]
    make, what = {
        LEAVES: (dead_leaves, "dead leaves: ellipses and rectangles of one colour each, one on the other"),
        GENERATORS: (untrained_generators, "what convolutions with random weights make of noise"),
    }[name]
    images = make(count, shape, seeds.generator("images"))
    examples = Examples(images, torch.zeros(len(images), dtype=torch.int64), 2)
    facts = PriorSource(
        name=name, what=what, licence="none needed", sha256=examples.fingerprint(), records=len(examples)
    )
    return Kept(examples, facts, (), labelled=False)


def _read_named(asked: DataConfig, config: DataConfig, shape: Shape, root: Path | None, seeds: Seeds) -> Kept:
    name = asked.name
    licence, seen = KNOWN.get(name, ("not stated", (name, UNKNOWN)))
    if config.name in seen:
        raise SettingError(
            f"the prior would see {name}, and {config.name} is what is to be private.",
            why="A training from weights that have seen its records protects none of them.",
            remedy="Choose other images, as `--from-data digits`.",
        )
    whole = data.load(asked, root=root, seeds=seeds).train.in_memory()
    examples = Examples(fit(whole.inputs, shape), whole.labels, whole.num_classes)
    facts = PriorSource(
        name=name,
        what=f"the training images of {name}"
        + (f", its first {asked.num_classes} classes" if asked.num_classes else ""),
        licence=licence,
        sha256=whole.fingerprint(),
        records=len(whole),
    )
    return Kept(examples, facts, seen, labelled=True)


def _read_folder(folder: Path, shape: Shape, licence: str | None) -> Kept:
    """Return the images of FOLDER/train/CLASS or FOLDER/CLASS, or those of the folder itself, without labels."""
    inside = folder / "train" if (folder / "train").is_dir() else folder
    classes = sorted(path for path in inside.iterdir() if path.is_dir() and path.name[0] != ".")
    files = in_turn([list_images(one, SUFFIXES) for one in classes or [inside]])
    if not files:
        raise DataError(f"{folder} has no images.", remedy=f"Put {', '.join(SUFFIXES)} files into class folders there.")
    rule = PictureRule(resize=True, crop=True, recolour=True)
    examples = read_images(files, shape, max(2, len(classes)), rule)
    facts = PriorSource(
        name=folder.resolve().name,
        what=f"a folder of images, in {len(classes)} classes" if classes else "a folder of images without labels",
        licence=licence or "not stated",
        sha256=examples.fingerprint(),
        records=len(examples),
    )
    return Kept(examples, facts, (UNKNOWN,), labelled=len(classes) > 1)


def fit(images: Tensor, shape: Shape) -> Tensor:
    """Return images in another shape: grey is repeated over channels, colours are averaged, sides are resized.

    >>> tuple(fit(torch.zeros(2, 1, 28, 28), (3, 32, 32)).shape)
    (2, 3, 32, 32)
    """
    channels, height, width = shape
    if images.shape[1] != channels:
        images = images.mean(1, keepdim=True).expand(-1, channels, -1, -1)
    if tuple(images.shape[2:]) != (height, width):
        images = F.interpolate(images, size=(height, width), mode="bilinear", align_corners=False, antialias=True)
    return images.clamp(-1, 1).contiguous()


def shift(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return each image moved by a few pixels of its own, its border repeated."""
    count, channels, height, width = images.shape
    most = [side // _SHIFT for side in (height, width)]
    moved = [torch.randint(-m, m + 1, (count, 1), generator=generator) for m in most]
    rows = (torch.arange(height) + moved[0]).clamp(0, height - 1).view(count, 1, height, 1)
    columns = (torch.arange(width) + moved[1]).clamp(0, width - 1).view(count, 1, 1, width)
    return images[torch.arange(count).view(-1, 1, 1, 1), torch.arange(channels).view(1, -1, 1, 1), rows, columns]
