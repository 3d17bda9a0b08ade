"""Find things by name: methods now, and whatever other packages add, each imported when it is first asked for.

A name stands for a location, `package.module:attribute`. Another package adds its own under the entry point group of a
registry, and nothing here has to change:

    [project.entry-points."stobatch.methods"]
    my_method = "my_package.my_method:MyMethod"
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from difflib import get_close_matches
from functools import cached_property
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from stobatch.errors import SettingError


class Registry(MutableMapping[str, Any]):
    """Objects of one kind by name: built in, registered in this process, or added by an installed package.

    A class without arguments stands for an object of it.
    """

    def __init__(self, kind: str, group: str, built_in: Mapping[str, str]) -> None:
        self.kind, self.group = kind, group
        self._locations = dict(built_in)
        self._loaded: dict[str, Any] = {}

    @cached_property
    def _added(self) -> dict[str, EntryPoint]:
        """Entry points of installed packages; a name that is taken stays what it was."""
        points = {point.name: point for point in entry_points(group=self.group)}
        return {name: point for name, point in points.items() if name not in self._locations}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            if name in self._locations:
                module, _, attribute = self._locations[name].partition(":")
                found = getattr(import_module(module), attribute)
            elif name in self._added:
                found = self._added[name].load()
            else:
                raise KeyError(name)
            self._loaded[name] = found() if isinstance(found, type) else found
        return self._loaded[name]

    def __setitem__(self, name: str, value: Any) -> None:
        """Register an object in this process."""
        self._loaded[name] = value

    def __delitem__(self, name: str) -> None:
        del self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self._loaded or name in self._locations or name in self._added

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self._locations, *self._added, *self._loaded)))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def require(self, name: str) -> Any:
        """Return what has the name, or raise with the nearest names.

        >>> METHODS.require("sond")
        Traceback (most recent call last):
        stobatch.errors.SettingError: there is no method 'sond'. Nearest: sound, stobatch.
        """
        if name in self:
            return self[name]
        near = get_close_matches(name, self, n=2, cutoff=0.3) or list(self)
        raise SettingError(f"there is no {self.kind} '{name}'.", remedy=f"Nearest: {', '.join(near)}.")


METHODS = Registry(
    "method",
    "stobatch.methods",
    {
        "sound": "stobatch.sound.method:Sound",
        "stobatch": "stobatch.published.training:Published",
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
        "federated": "stobatch.federated.plan:Federated",
    },
)
"""Ways to train; `stobatch` is the stored name of the published mechanism."""
