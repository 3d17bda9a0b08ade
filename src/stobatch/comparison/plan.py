"""What must hold before methods are compared: asked of everything at once, so that bad input changes nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from stobatch import data
from stobatch.config import RunConfig, require_config
from stobatch.data import Dataset, DatasetInfo, require_dataset
from stobatch.dp.plan import Plan
from stobatch.errors import RunError, SettingError, StobatchError, UnitError
from stobatch.evaluation.protocols import radii_of
from stobatch.evaluation.tables import data_root
from stobatch.files import read_json
from stobatch.loading import make_network, make_plan, name_network
from stobatch.methods import can_certify, verifiers_of
from stobatch.models import Classifier, hand_over
from stobatch.prior import take_prior
from stobatch.reporting.format import privacy_words
from stobatch.results import StartedRun
from stobatch.runs import Run
from stobatch.seeds import Seeds
from stobatch.settings import names_of, unknown_key
from stobatch.training.device import use_device

TEST_DATA = "test_data"
"""The file that says which test data a comparison was started with, where they were handed over."""
_MAY_DIFFER = ("protocols", "functions", "num_images")
"""Evaluation settings that choose what is measured of a row, and leave every measurement as it is."""


@dataclass(frozen=True)
class Compared:
    """One training of a comparison: a row's settings with a seed, and its directory."""

    name: str
    number: int
    """Its public seed; where seeds are secret, which of the row's trainings it is."""
    config: RunConfig
    run: Run
    network: Classifier | None
    status: str
    prior: Path | None = None

    @property
    def certifies(self) -> bool:
        return can_certify(self.config, self.network)

    @property
    def public(self) -> bool:
        return self.config.seed is not None

    @property
    def training(self) -> str:
        return f"seed {self.number}" if self.public else f"training {self.number}"

    def __str__(self) -> str:
        return f"{self.name} ({privacy_words([self.status])}), {self.training}"


def slug(name: str) -> str:
    """Return a row's name as a folder's.

    >>> slug("dpsgd ε=0.2"), slug("Plain, no noise")
    ('dpsgd-eps-0.2', 'plain-no-noise')
    """
    return re.sub(r"[^a-z0-9.]+", "-", name.lower().replace("ε", "eps")).strip("-.")


def change_rows(configs: Mapping[str, RunConfig], changes: Mapping[str, Any]) -> dict[str, RunConfig]:
    """Return every configuration with the changes that concern it; a method's setting goes to those that have it."""
    names = {name: names_of(type(config.method)) for name, config in configs.items()}
    for key in changes:
        section, _, own = key.partition(".")
        if section == "method" and not any(own in known for known in names.values()):
            known = {f"method.{field}" for accepted in names.values() for field in accepted.values()}
            raise unknown_key(key, sorted(known))
    return {name: config.override_all(own_changes(config, changes)) for name, config in configs.items()}


def own_changes(config: RunConfig, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes that concern a configuration: all but those of settings that its method does not have.

    A setting that is given by both of its names is meant for this method by the one in files, which fewer have.
    """
    names = names_of(type(config.method))
    given = {field for name, field in names.items() if name != field and f"method.{name}" in changes}
    wanted = {f"method.{name}" for name in names if name not in given}
    return {key: value for key, value in changes.items() if not key.startswith("method.") or key in wanted}


def plan_comparison(
    configs: Mapping[str, RunConfig],
    out: Path,
    seeds: Sequence[int] | None,
    repeats: int,
    dataset: Dataset | None,
    networks: Mapping[str, nn.Module],
    priors: Mapping[str, str | Path],
    device: str | None,
) -> list[Compared]:
    """Return every training of a comparison in order, or an error; nothing is written."""
    require_dataset(dataset)
    _require_names(configs, networks, priors)
    _require_seeds(seeds, repeats)
    if Run(out).exists:
        raise RunError(
            f"{out} is a run.", why="A comparison is a folder of several runs.", remedy="Choose another --out."
        )
    placed = {n: c.override("machine.device", device) if device is not None else c for n, c in configs.items()}
    placed = {name: name_network(config, networks.get(name)) for name, config in placed.items()}
    _require_one_measurement(placed)
    planned: list[Compared] = []
    for name, given_config in placed.items():
        info = dataset.info if dataset else data.describe(given_config.data, data_root(given_config))
        try:
            given = networks.get(name)
            network = None if given is None else hand_over(given, info.input_shape, info.num_classes)
            prior = Path(priors[name]) if name in priors else None
            config, start = take_prior(given_config, info, prior, network)
            the_plan = make_plan(config, info, network)
        except StobatchError as error:
            raise type(error)(f"row '{name}': {error.what}", why=error.why, remedy=error.remedy) from None
        _require_answers(name, config, info, the_plan, network, start)
        use_device(config.machine)
        claim = the_plan.in_context(the_plan.claim)
        status = str((claim if seeds is None else claim.with_public_seed()).status)
        for number in range(1, repeats + 1) if seeds is None else seeds:
            folder = f"secret-{number}" if seeds is None else f"seed-{number}"
            own = config.replace(seed=None if seeds is None else number)
            planned.append(Compared(name, number, own, Run(out / slug(name) / folder), network, status, prior))
    for one in planned:
        require_own_directory(one, dataset)
    if dataset is not None:
        _require_same_test_data(out, dataset)
    return planned


def _require_names(
    configs: Mapping[str, RunConfig], networks: Mapping[str, nn.Module], priors: Mapping[str, str | Path]
) -> None:
    if not isinstance(configs, Mapping):
        raise SettingError(
            f"a {type(configs).__name__} is no table of settings.",
            remedy="Give a dictionary: a name for each RunConfig.",
        )
    for config in configs.values():
        require_config(config)
    if not configs:
        raise SettingError(
            "there is nothing to compare.", remedy="Give at least one row: a name and its configuration."
        )
    folders: dict[str, str] = {}
    for name in configs:
        folder = slug(name)
        if not folder:
            raise SettingError(f"'{name}' names no folder.", remedy="Use letters or digits in the names of rows.")
        if folder in folders:
            raise SettingError(
                f"'{folders[folder]}' and '{name}' would share the folder {folder}.",
                remedy="Give them names that differ in letters or digits.",
            )
        folders[folder] = name
    for given, what in ((networks, "network"), (priors, "prior")):
        for name in given:
            if name not in configs:
                raise SettingError(f"there is no row '{name}' for this {what}.", remedy=f"Rows: {', '.join(configs)}.")


def _require_seeds(seeds: Sequence[int] | None, repeats: int) -> None:
    if repeats < 1 or (seeds is not None and repeats > 1):
        raise SettingError(
            f"repeats={repeats} is not possible here.",
            remedy="Give a number of trainings with secret seeds, or a list of public seeds, and not both.",
        )
    if seeds is None:
        return
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise SettingError(
            f"seeds {', '.join(map(str, seeds)) or '(none)'} are not a set of seeds.",
            remedy="Give each seed once, as whole numbers from 0 on.",
        )


def _measurement(config: RunConfig) -> Iterator[tuple[str, Any]]:
    for key, value in config.evaluation.to_dict().items():
        if key not in _MAY_DIFFER:
            yield f"evaluation.{key}", value
    for key in ("name", "num_classes", "test_limit"):
        yield f"data.{key}", config.data.to_dict()[key]
    yield "certification.limit", config.certification.limit


def _require_one_measurement(configs: Mapping[str, RunConfig]) -> None:
    """Raise unless all attack the same test examples as hard at the same radii: a table compares methods alone."""
    (first, pattern), *others = configs.items()
    wanted = dict(_measurement(pattern))
    for name, config in others:
        for key, value in _measurement(config):
            if value != wanted[key]:
                raise SettingError(
                    f"'{first}' has {key}={wanted[key]}, '{name}' has {value}.",
                    why="Rows that are measured in different ways cannot be compared.",
                    remedy=f"Give all of them the same {key}.",
                )


def _require_answers(
    name: str,
    config: RunConfig,
    info: DatasetInfo,
    the_plan: Plan,
    network: Classifier | None,
    start: Mapping[str, Tensor] | None,
) -> None:
    """Raise unless the functions asked for exist and certificates are in the norm asked about: before any training."""
    settings = config.evaluation
    radii_of(settings, prod(info.input_shape))
    untrained = make_network(config, info, Seeds.reproducible(0), network, start).eval()
    ways = verifiers_of(config, the_plan, untrained) if can_certify(config, untrained) else ()
    for kind in (kind for way in ways for kind in way.kinds):
        if kind.unit.norm != settings.norm:
            raise UnitError(
                f"'{name}' certifies in {kind.unit.norm}, radii in {settings.norm} are asked about.",
                remedy=f"Ask in its norm (evaluation.norm={kind.unit.norm}), or leave the row out.",
            )
    # As `evaluate` has it: a vote that nothing deploys is passed over where there is something else to evaluate.
    if "single_pass" not in settings.functions and not any(way.function == "vote" for way in ways):
        raise SettingError(
            f"'{name}' has no vote to evaluate.",
            why="Its answer is not a vote over noise.",
            remedy="Set evaluation.functions=single_pass for it.",
        )


def require_own_directory(one: Compared, dataset: Dataset | None) -> None:
    """Raise unless what is there already is this very training, whole or begun."""
    run, wanted = one.run, one.config.training_hash
    if run.exists and (recorded := StartedRun.read(run).training_hash) != wanted:
        raise RunError(
            f"{run.path} holds configuration {recorded}, and '{one.name}', {one.training}, is {wanted}.",
            why="A comparison reuses trainings and never overwrites one.",
            remedy="Choose another --out, or ask for the settings that it was trained with.",
        )
    run.require_new(one.config, resume=True)
    trained_on = run.read("data", private=True).get("sha256") if run.has("data", private=True) else None
    if dataset is not None and trained_on not in (None, dataset.train.fingerprint()):
        raise RunError(
            f"{run.path} was trained with other data.",
            why="A comparison reuses trainings and never overwrites one.",
            remedy="Choose another --out, or hand over the same data.",
        )


def _require_same_test_data(out: Path, dataset: Dataset) -> None:
    path = out / f"{TEST_DATA}.json"
    if path.exists() and read_json(path, TEST_DATA).get("sha256") != dataset.test.fingerprint():
        raise RunError(
            f"{out} was measured with other test data.",
            why="What is there is reused, and would stand beside what is measured now.",
            remedy="Choose another --out, or hand over the same data.",
        )
