"""Look up by name: methods, attacks, certificates, data sets, architectures, and what other packages add.

A name stands for a location, `package.module:attribute`, which is imported when it is first asked for; to ask whether
there is such a name imports nothing. Another package adds its own under the entry point group of a registry, and
nothing here has to change:

    [project.entry-points."stobatch.methods"]
    my_method = "my_package.my_method:MyMethod"

An entry point that is broken harms its own name alone, and says so in one line when it is asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from difflib import get_close_matches
from functools import cached_property
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from stobatch.errors import SettingError


class Registry(MutableMapping[str, Any]):
    """Objects of one kind by name: built in, added by an installed package, or registered in this process.

    A class without arguments stands for an object of it. An alias is accepted wherever a name is, and never listed.
    `of` says what an object must be: the locations of its classes, or none where any function will do.
    """

    def __init__(
        self,
        kind: str,
        group: str,
        built_in: Mapping[str, str],
        *,
        of: tuple[str, ...] = (),
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self.kind, self.group, self.of = kind, group, of
        self.aliases = dict(aliases or {})
        self._locations = dict(built_in)
        self._loaded: dict[str, Any] = {}

    @cached_property
    def _entry_points(self) -> dict[str, list[EntryPoint]]:
        """Return every entry point of the group, by name."""
        by_name: dict[str, list[EntryPoint]] = {}
        for point in entry_points(group=self.group):
            by_name.setdefault(point.name, []).append(point)
        return by_name

    def _is_ours(self, name: str) -> bool:
        return name in self._loaded or name in self._locations or name in self.aliases

    def shown(self, name: str) -> str:
        """Return the name that people read, of a name or an alias; a name that is not registered stays what it is.

        >>> METHODS.shown("stobatch"), METHODS.shown("sound")
        ('published', 'sound')
        """
        return self.aliases.get(name, name)

    def provider(self, name: str) -> str | None:
        """Return whose code a name stands for, in words; None where it is built in.

        >>> METHODS.provider("sound") is None, METHODS.provider("mine")
        (True, 'code registered in this process')
        """
        name = self.shown(name)
        if name in self._locations:
            return None
        points = self._entry_points.get(name)
        return _package(points[0]) if points else "code registered in this process"

    def __getitem__(self, name: str) -> Any:
        name = self.shown(name)
        if name not in self._loaded:
            points = self._entry_points.get(name, [])
            if name in self._locations:
                self._warn_taken(name, points)
                value = read_location(self._locations[name])
            elif points:
                value = self._load(name, points)
            else:
                raise KeyError(name)
            self._loaded[name] = value() if isinstance(value, type) else value
        return self._loaded[name]

    def _warn_taken(self, name: str, points: list[EntryPoint]) -> None:
        """Warn of packages whose entry point has the name of what is built in: it stays what it is."""
        for point in points:
            logging.getLogger("stobatch").warning(
                f"stobatch: the {self.kind} '{name}' of {_package(point)} is not used. The name is that of a built-in "
                f"{self.kind}, which stays what it is. Give the entry point another name."
            )

    def _load(self, name: str, points: list[EntryPoint]) -> Any:
        """Import what a package adds, or raise in one line."""
        if len(points) > 1:
            raise SettingError(
                f"there are {len(points)} packages with a {self.kind} '{name}'.",
                why=f"They are {' and '.join(_package(point) for point in points)}.",
                remedy="Uninstall all but one of them, or rename an entry point.",
            )
        (point,) = points
        what = f"the {self.kind} '{name}' of {_package(point)} cannot be used."
        try:
            value = point.load()
            value = value() if isinstance(value, type) else value
        except (Exception, SystemExit) as error:  # a module from elsewhere may raise anything when it is imported
            raise SettingError(
                what, why=f"{point.value} fails with {one_line(error)}.", remedy=_remedy(point)
            ) from error
        kinds = tuple(read_location(place) for place in self.of)
        if not (isinstance(value, kinds) if kinds else callable(value)):
            wanted = " or ".join(kind.__name__ for kind in kinds) or "function"
            raise SettingError(
                what, why=f"{point.value} is of type {type(value).__name__}, not a {wanted}.", remedy=_remedy(point)
            )
        return value

    def __setitem__(self, name: str, value: Any) -> None:
        """Register an object in this process."""
        self._loaded[self.shown(name)] = value

    def __delitem__(self, name: str) -> None:
        del self._loaded[self.shown(name)]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (self._is_ours(name) or name in self._entry_points)

    def __iter__(self) -> Iterator[str]:
        added = (name for name in self._entry_points if name not in self.aliases)
        return iter(dict.fromkeys((*self._locations, *added, *self._loaded)))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def require(self, name: str) -> Any:
        """Return what has the name, or raise with the nearest names.

        >>> METHODS.require("sond")
        Traceback (most recent call last):
        stobatch.errors.SettingError: there is no method 'sond'. Nearest: sound.
        """
        if name in self:
            return self[name]
        near = self.nearest(name)
        remedy = f"Nearest: {', '.join(near)}." if near else f"There are {', '.join(self)}."
        raise SettingError(f"there is no {self.kind} '{name}'.", remedy=remedy)

    def nearest(self, name: str) -> list[str]:
        """Return the names that a misspelt one may mean, if any.

        >>> METHODS.nearest("stobatsh"), METHODS.nearest("qqq")
        (['published'], [])
        """
        # Of a long text only the beginning: matching takes time that grows with the square of the length.
        begun = [known for known in self if len(name) > 2 and known.startswith(name)]
        near = begun[:3] or get_close_matches(name[:100], (*self, *self.aliases), n=2, cutoff=0.5)
        return list(dict.fromkeys(map(self.shown, near)))


class Names(Collection[str]):
    """Words of a setting's own, then the names of a registry."""

    def __init__(self, *words: str, registry: Registry) -> None:
        self.words, self.registry = words, registry

    def __contains__(self, name: object) -> bool:
        return name in self.words or name in self.registry

    def __iter__(self) -> Iterator[str]:
        yield from self.words
        yield from self.registry

    def __len__(self) -> int:
        return len(self.words) + len(self.registry)


def read_location(location: str) -> Any:
    """Return what `package.module:attribute` names."""
    module, _, attribute = location.partition(":")
    return getattr(import_module(module), attribute)


def one_line(error: BaseException) -> str:
    """Return what a stranger's code raised, without line breaks and without a full stop."""
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".: ")


def _package(point: EntryPoint) -> str:
    return f"the package {point.dist.name}" if point.dist else "an installed package"


def _remedy(point: EntryPoint) -> str:
    return f"Mend {_package(point)}, or uninstall it."


METHODS = Registry(
    "method",
    "stobatch.methods",
    {
        "sound": "stobatch.sound.method:Sound",
        "published": "stobatch.published.training:Published",
        "vanilla_adversarial": "stobatch.baselines.vanilla:VanillaAdversarial",
        "plain": "stobatch.baselines.plain:Plain",
        "pixeldp": "stobatch.baselines.pixeldp:PixelDp",
        "adlm": "stobatch.baselines.adlm:AdLm",
        "dpsgd": "stobatch.baselines.dpsgd:DpSgd",
        "dp_adversarial": "stobatch.baselines.dpsgd:DpAdversarial",
        "dp_smoothing": "stobatch.baselines.dpsgd:DpSmoothing",
        "securesgd": "stobatch.baselines.securesgd:SecureSgd",
        "securesgd_agm": "stobatch.baselines.securesgd:SecureSgdAgm",
        "control_half_noise": "stobatch.baselines.controls:HalfNoiseControl",
        "control_shared_noise": "stobatch.baselines.controls:SharedNoiseControl",
        "control_no_clipping": "stobatch.baselines.controls:NoClippingControl",
        "control_split_persons": "stobatch.baselines.controls:SplitPersonsControl",
        "control_record_clipping": "stobatch.baselines.controls:RecordClippingControl",
        "federated": "stobatch.federated.plan:Federated",
    },
    of=("stobatch.methods:Method",),
    aliases={"stobatch": "published"},
)
"""Ways to train: a `Method` each. `stobatch` is the name of the published mechanism in files, which hashes rest on."""

ATTACKS = Registry(
    "attack",
    "stobatch.attacks",
    {
        "fgsm": "stobatch.attacks.pgd:fgsm",
        "ifgsm": "stobatch.attacks.pgd:ifgsm",
        "mim": "stobatch.attacks.pgd:mim",
        "madry": "stobatch.attacks.pgd:madry",
        "apgd_ce": "stobatch.attacks.apgd:apgd_ce",
        "apgd_dlr": "stobatch.attacks.apgd:apgd_dlr",
        "apgd_t": "stobatch.attacks.apgd:apgd_t",
        "square": "stobatch.attacks.square:square",
    },
    aliases={"pgd": "madry"},
)
"""From a `Budget` to an `Attack` that spends it."""

CERTIFICATES = Registry(
    "certificate",
    "stobatch.certificates",
    {
        "bounds": "stobatch.sound.verifiers:bounds",
        "votes": "stobatch.sound.verifiers:votes",
        "margins": "stobatch.sound.verifiers:margins",
    },
)
"""Ways to certify what a method trained: from a configuration, a plan and a network to a `Verifier`, or to None where
they have nothing to say about such a model."""

DATA_SETS = Registry(
    "data set",
    "stobatch.data_sets",
    {
        "mnist": "stobatch.data.mnist:SOURCE",
        "small_digits": "stobatch.data.mnist:SMALL_DIGITS",
        "fashion_mnist": "stobatch.data.fashion_mnist:SOURCE",
        "cifar10": "stobatch.data.cifar10:SOURCE",
        "tiny_imagenet": "stobatch.data.tiny_imagenet:SOURCE",
        "image_folder": "stobatch.data.image_folder:SOURCE",
        "shards": "stobatch.data.shards:SOURCE",
        "tensors": "stobatch.data.sources:HANDED_OVER",
    },
    of=("stobatch.data.sources:Source",),
)
"""A `Source` each; `tensors` is handed over in Python."""

ARCHITECTURES = Registry(
    "architecture",
    "stobatch.architectures",
    {
        "mnist_cnn": "stobatch.models.architectures:MNIST_CNN",
        "cifar10_cnn": "stobatch.models.architectures:CIFAR10_CNN",
        "resnet18": "stobatch.models.architectures:RESNET18",
        "small_cnn": "stobatch.models.architectures:SMALL_CNN",
        "custom": "stobatch.models.architectures:HANDED_OVER",
    },
    of=("stobatch.models.architectures:Architecture", "builtins:str"),
)
"""Networks: an `Architecture` each, or a list of layers as text; `custom` is handed over in Python."""
