"""What several verbs have in common: options, how they are read, what is printed, and when a finding ends it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stobatch.errors import SettingError
from stobatch.types import Status, Verdict

if TYPE_CHECKING:
    from stobatch.config import RunConfig
    from stobatch.results import Audit, Document, Scores

Recipe = Annotated[
    str | None,
    typer.Option(
        help="A named configuration, as demo, sound.mnist or published.mnist; or your own, package.module:function."
    ),
]
Config = Annotated[Path | None, typer.Option(help="A TOML or JSON file instead of a recipe.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Change one setting, as in --set training.steps=100.")]
Prior = Annotated[
    Path | None,
    typer.Option("--from", help="Start from public weights: a run on other data, or a safetensors file with its card."),
]
Seed = Annotated[
    int | None,
    typer.Option(help="A public seed for an experiment that can be repeated; its privacy guarantee is void."),
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue what was interrupted.")]
Limit = Annotated[int | None, typer.Option(help="Only the first N test examples.")]
RunPath = Annotated[Path | None, typer.Argument(help="A run directory.", show_default=False)]
OutOfRun = Annotated[Path | None, typer.Option("--out", help="The run directory, instead of the argument.")]
Radii = Annotated[list[float] | None, typer.Option("--radius", help="Over [-1, 1]; may be repeated.")]
NormName = Annotated[str | None, typer.Option("--norm", help="linf, l2 or l1")]
Section = Annotated[str | None, typer.Option("--recipe", help="Take this recipe's settings for the verb.")]
Signers = Annotated[
    Path | None, typer.Option(help="Check the signature: ssh-keygen's allowed signers, or a minisign key.")
]
Identity = Annotated[str | None, typer.Option(help="Who has to have signed, as in the file of signers.")]
Draws = Annotated[int | None, typer.Option(help="Draw other random numbers, reproducibly.")]


def assignments(pairs: list[str] | None) -> dict[str, Any]:
    """Read what --set says."""
    from stobatch.settings import parse_assignment

    return dict(parse_assignment(pair) for pair in pairs or [])


def training_changes(pairs: list[str] | None, seed: int | None, device: str | None) -> dict[str, Any]:
    """Return what --set, --seed and --device change of a training. A public seed comes from --seed alone."""
    changes = assignments(pairs)
    if seed is None:
        require_secret(changes.get("seed"), "--set")
    chosen = {"seed": seed, "machine.device": device}
    return changes | {key: value for key, value in chosen.items() if value is not None}


def require_secret(seed: object, source: str) -> None:
    """Raise if a public seed comes from elsewhere than the command line's own option."""
    if seed is not None:
        raise SettingError(
            f"{source} has a public seed ({seed}), and --seed is not given.",
            why="With the seed anyone can take the noise off, so the privacy guarantee would be void.",
            remedy=f"Leave it out, or say that you want such an experiment: --seed {seed}.",
        )


def read_settings(
    recipe_name: str | None, file: Path | None, pairs: list[str] | None, seed: int | None, device: str | None
) -> RunConfig:
    from stobatch.config import load_config
    from stobatch_recipes import RECIPES, recipe

    if recipe_name and file:
        raise SettingError("both --recipe and --config are given.", remedy="Give one of them.")
    if not (recipe_name or file):
        raise SettingError(
            "neither --recipe nor --config is given.",
            remedy=f"Name a recipe, as in `--recipe sound.mnist`: {', '.join(RECIPES)}.",
        )
    config = load_config(file) if file else recipe(recipe_name or "")
    changes = training_changes(pairs, seed, device)
    if seed is None:
        require_secret(config.seed, str(file or recipe_name))
    return config.override_all(changes)


def whole_numbers(seeds: str) -> list[int]:
    """Read what --seeds says."""
    try:
        return [int(seed) for seed in seeds.split(",")]
    except ValueError:
        raise SettingError(f"--seeds {seeds} are not whole numbers.", remedy="Write --seeds 1,2,3.") from None


def run_path(argument: Path | None, option: Path | None) -> Path:
    if (argument is None) == (option is None):
        raise SettingError("no run directory, or two, are given.", remedy="Write `stobatch VERB RUN`.")
    return argument or option or Path()


def verb_overrides(section: str, recipe_name: str | None, pairs: list[str] | None, limit: int | None) -> dict[str, Any]:
    """Return a verb's settings: from a recipe, then from --set, then from --limit."""
    from stobatch_recipes import recipe

    named = getattr(recipe(recipe_name), section).to_dict() if recipe_name else {}
    limited = {f"{section}.limit": limit} if limit is not None else {}
    return {f"{section}.{key}": value for key, value in named.items()} | assignments(pairs) | limited


def show(document: Document | dict[str, Any], as_json: bool, *parts: Any) -> None:
    """Print a document as JSON, or its parts for people."""
    from stobatch.reporting.terminal import show as print_parts

    if as_json:
        print(json.dumps(document, indent=2) if isinstance(document, dict) else document.to_json())
    else:
        print_parts(*parts)


def exit_if_refuted(scores: Scores) -> None:
    """Exit where a proved claim was refuted, which must stop a pipeline; a refuted claim without proof is a finding."""
    if any(flag.refutes is Status.PROVED for flag in scores.flags):
        raise SystemExit(1)


def is_refuted(audit: Audit, *statuses: Status) -> bool:
    """Return whether a claim was refuted that had one of these statuses."""
    return any(f.verdict is Verdict.REFUTED and f.claim_status in statuses for f in audit.findings)
