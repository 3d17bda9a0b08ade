"""`stobatch tune`: a search for settings whose cost the winner's guarantee covers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stobatch.cli.app import app
from stobatch.cli.options import Config, Device, Json, Prior, Recipe, Resume, Set, read_settings, show, training_changes
from stobatch.errors import SettingError

if TYPE_CHECKING:
    from stobatch.config import RunConfig

_MOST_HELD_OUT = 5000


@app.command(rich_help_panel="Train")
def tune(
    out: Annotated[Path, typer.Option(help="The folder to write: the winner, and in private/ all candidates.")],
    recipe: Recipe = None,
    config: Config = None,
    try_: Annotated[
        list[str] | None,
        typer.Option("--try", help="Values of one setting, as training.learning_rate=1,2,4; may be repeated."),
    ] = None,
    set_: Set = None,
    held_out: Annotated[
        int | None,
        typer.Option(
            help="Training records, or persons, that each candidate keeps aside to be scored on; a tenth if unset."
        ),
    ] = None,
    from_: Prior = None,
    workers: Annotated[int, typer.Option(min=1, help="Candidates trained at once, each in a process of its own.")] = 1,
    device: Device = None,
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """Search settings at random and pay for it: the winner's ε covers the whole search, at most method.epsilon."""
    import stobatch
    from stobatch.reporting import terminal as tables
    from stobatch.results import Search
    from stobatch.runs import Run

    directory = Run(out)
    if resume and directory.has("search") and not (recipe or config):
        if try_ or held_out is not None:
            raise SettingError(
                "--try and --held-out are not for --resume.", remedy="Leave them out: the search has its own."
            )
        settings = _config_of(Search.read(directory)).override_all(training_changes(set_, None, device))
    else:
        settings = _settings(read_settings(recipe, config, set_, None, device), try_, held_out)
    document = stobatch.tune(settings, out, prior=from_, workers=workers, resume=resume, quiet=as_json)
    private = f"all candidates, for the owner alone: {out}/private/candidates.json and candidates.svg"
    parts: list[Any] = [*document.lines()[1:], tables.guarantee_lines(document.guarantee, out / "winner"), private]
    show(document, as_json, *parts)
    if document.winner is None:
        raise SystemExit(1)


def _settings(config: RunConfig, tried: list[str] | None, held_out: int | None) -> RunConfig:
    from stobatch import data
    from stobatch.evaluation.tables import data_root

    changes: dict[str, Any] = {"search.settings": tried} if tried else {}
    if not tried and not config.search.settings:
        raise SettingError(
            "nothing is searched.", remedy="Give settings with several values, as --try training.learning_rate=1,2,4."
        )
    if held_out is not None:
        changes["data.held_out"] = held_out
    elif not config.data.held_out:
        info = data.describe(config.data, data_root(config))
        number = info.num_train if info.num_persons is None else info.num_persons
        changes["data.held_out"] = max(1, min(_MOST_HELD_OUT, number // 10))
    return config.override_all(changes)


def _config_of(search: Any) -> RunConfig:
    from stobatch.config import RunConfig

    return RunConfig.from_dict(search.config)
