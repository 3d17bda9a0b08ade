"""Hyper-parameter search: its checks, its combinations, and the plan of a candidate with the search's cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import inf, prod
from typing import Any

from stobatch.config import RunConfig
from stobatch.dp.plan import DpSgdPlan
from stobatch.dp.selection import RunLaw, Search, Searched, budget_of_candidates
from stobatch.errors import SettingError

MOST_COMBINATIONS = 1000
_FIELDS = {
    "method.batch_size": "expected_batch_size",
    "method.expected_batch_size": "expected_batch_size",
    "training.steps": "steps",
    "method.spare_steps": "spare_steps",
}
"""Settings that the cost of a training depends on, and their names in the plan."""
_FIXED = ("epsilon", "delta", "noise_multiplier", "tuned_on_private_data", "records_per_person", "name")
"""Settings of a method that define its guarantee, which is one for the whole search."""


def require_searchable(config: RunConfig) -> None:
    """Raise at settings that cannot be searched; reads no data."""
    space = config.search.space
    for key in space:
        section, _, name = key.partition(".")
        if section not in ("method", "model", "training") or (section == "method" and name in _FIXED):
            raise SettingError(
                f"'{key}' cannot be searched.",
                why="A search is over settings of training, model and method that leave its budget and its data alone.",
                remedy="Search training.learning_rate, method.clip_norm or method.batch_size, for instance.",
            )
        if config.prior.name is not None and section == "model" and name not in ("train_only", "adapter_rank"):
            raise SettingError(
                f"'{key}' cannot be searched from a prior.",
                why=f"The prior {config.prior.name} is for one network.",
                remedy="Search model.train_only or model.adapter_rank, or start without --from.",
            )
    number = prod(len(values) for values in space.values())
    if number < 2:
        raise SettingError(
            "there is one combination of settings, and nothing to search.",
            why="A search costs more than a training.",
            remedy="Give a setting several values, as --try training.learning_rate=1,2,4, or run `stobatch train`.",
        )
    if number > MOST_COMBINATIONS:
        raise SettingError(
            f"{number} combinations of settings are more than {MOST_COMBINATIONS}.",
            why="Each is checked before data are read, and a search tries a handful of them.",
            remedy="Give fewer values.",
        )
    if getattr(config.method, "noise_multiplier", None) is not None:
        raise SettingError(
            "method.noise_multiplier is not for a search.",
            why="The noise of candidates follows from the budget of the whole search.",
            remedy="Leave it unset, and set method.epsilon.",
        )
    if config.seed is not None or config.canaries.num:
        raise SettingError(
            "a public seed, or canaries, are not for a search.",
            why="The number of candidates has to stay secret, and audits look at one training.",
            remedy="Leave seed and canaries.num unset.",
        )
    if not config.data.held_out:
        raise SettingError(
            "a search without held-out records has nothing to score its candidates on.",
            remedy="Set data.held_out to a tenth of the training records, or of the persons.",
        )


def combinations(config: RunConfig) -> Iterator[dict[str, Any]]:
    """Yield every combination of the settings that are searched, in a fixed order."""
    space = config.search.space
    for values in product(*space.values()):
        yield dict(zip(space, values, strict=True))


def law_of(config: RunConfig) -> RunLaw:
    """Return the distribution of the number of candidates."""
    return RunLaw(config.search.mean, inf if config.search.law == "poisson" else config.search.shape)


def with_search(plan: DpSgdPlan, config: RunConfig) -> DpSgdPlan:
    """Return the plan of a candidate, or the plan itself where nothing is searched."""
    if not config.search.settings:
        return plan
    require_searchable(config)
    settings, law = config.search, law_of(config)
    candidates = [replace(plan, **changes) for changes in _plan_changes(config)]
    epsilon = settings.candidate_epsilon
    if epsilon is None:
        trainings = [(one.sampling_rate, one.releases) for one in candidates]
        epsilon = budget_of_candidates(plan.target_epsilon, plan.delta, trainings, settings.score_noise, law)
    mechanisms = tuple(dict.fromkeys(replace(one, target_epsilon=epsilon).curve for one in candidates))
    search = Search(mechanisms, settings.score_noise, law)
    if (search_epsilon := search.epsilon(plan.delta)) > plan.target_epsilon:
        raise SettingError(
            f"search.candidate_epsilon={epsilon:g} makes the search cost ε = {search_epsilon:.4g}, more than "
            f"epsilon={plan.target_epsilon:g}.",
            remedy="Leave search.candidate_epsilon unset: the largest within method.epsilon is found.",
        )
    number = prod(len(values) for values in settings.space.values())
    score = {"accuracy": "records classified rightly", "certified": "records classified rightly and certified"}
    score_words, word = score[settings.score], "record"
    if plan.num_persons is not None:
        score_words, word = f"the share of each one's {score_words}, added up", "person"
    return replace(plan, searched=Searched(search, epsilon, number, config.data.held_out, score_words, word))


def _plan_changes(config: RunConfig) -> Iterator[dict[str, Any]]:
    """Yield the combinations of searched settings that the cost of a candidate depends on."""
    space = {_FIELDS[key]: values for key, values in config.search.space.items() if key in _FIELDS}
    for values in product(*space.values()):
        yield dict(zip(space, values, strict=True))
