"""Public starts: the weights that `train --from` takes, read from a run or from a file with its card.

Everything but the records is checked before any data is read: that the file is tensors and no code, that its card is of
these very weights, that they fit the network, and that a run that is taken was not trained on data of the same name.
Once data are read, and before anything is written, the records are compared with those that the weights were made
from. What a guarantee says of them goes into the settings, and the weights themselves into the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from stobatch.config import PriorConfig, RunConfig
from stobatch.data import DatasetInfo, Examples, TrainingExamples
from stobatch.data.overlap import count_seen
from stobatch.dp.prior import UNKNOWN, find_conflict
from stobatch.errors import ModelError, RunError, SettingError
from stobatch.files import serialise_tensors, tensors_sha256
from stobatch.loading import fresh_network, load, read_start, require_takes_prior
from stobatch.models.parts import last_layer
from stobatch.results import PriorSource, StartedRun
from stobatch.results.prior import prior_files, read_card, read_prior, read_records
from stobatch.runs import Run
from stobatch.seeds import Seeds

_OWN = ("tensors", "image_folder", "shards")
"""Names of a user's own data, which say nothing about their content."""
_PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""How files begin that `torch.save` and `pickle` write: an archive, and the protocols of pickle."""


@dataclass(frozen=True)
class Start:
    """Weights to start from, and what their card says of them."""

    tensors: dict[str, Tensor]
    said: PriorConfig
    input_shape: tuple[int, ...]
    num_classes: int
    has_head: bool
    """Whether its last layer was trained to tell classes."""


def take_prior(
    config: RunConfig, info: DatasetInfo, prior: str | Path | None, network: nn.Module | None, run: Run | None = None
) -> tuple[RunConfig, Mapping[str, Tensor] | None]:
    """Return the settings with what they start from, and its weights; None where they start from random ones.

    Without a prior of its own, a run that was started from one goes on from its copy.
    """
    if prior is None:
        return config, read_start(config, run)
    require_takes_prior(config)
    start = _read(Path(prior), network, info, config)
    described = _describe_start(start, config, info, network)
    if config.prior.name is not None and config.prior != described:
        raise SettingError(
            f"the settings start from the prior {config.prior.name} ({(config.prior.weights_sha256 or '')[:12]}…), and "
            f"{prior} is {described.name} ({(described.weights_sha256 or '')[:12]}…).",
            remedy="Give the prior that the settings name, or leave their section `prior` out.",
        )
    return config.replace(prior=described), start.tensors


def require_unseen(prior: str | Path, train: TrainingExamples) -> None:
    """Raise where private training records are among those that a prior, or a run, was made from.

    **Guarantee.** Whole sets are compared by the digests of its card, or in the private folder of a run, and single
    records by those beside the prior, where they are there: to the bit, as both were read. No near copy is found, and
    who wants to hide a record can. What is found is told to the owner alone, before anything is written: a card that
    has the digest of private records would bring it into the run's public files.
    """
    path = Path(prior)
    name, wholes, digests = _describe_sources(path)
    if wholes & _fingerprints(train):
        how = "the private training records"
    elif digests is not None and (seen := count_seen(train, digests)):
        how = f"{seen:,} of the {len(train):,} private training records"
    else:
        return
    raise SettingError(
        f"the prior {name} was made from {how}.",
        why="Weights that have seen records can carry them into the model past all noise, so ε would say nothing of "
        "them; and the files of such a prior are as private as the records.",
        remedy="Make a prior without them, as with `stobatch pretrain --from-data digits`, or take them out of the "
        "training records.",
    )


def _describe_sources(path: Path) -> tuple[str, set[str], Tensor | None]:
    """Return the name of a start, the digests of whole sets that it was made from, and of single records."""
    if (run := Run(path)).exists:
        own = run.read("data", private=True).get("sha256") if run.has("data", private=True) else None
        return path.resolve().name, {own} if isinstance(own, str) else set(), None
    card = read_card(path)
    return _one_line(card.name), {one.sha256.lower() for one in card.sources if one.sha256}, read_records(path, card)


def _fingerprints(train: TrainingExamples) -> set[str]:
    """Return the digests that training records may have in a card, which knows of no persons."""
    alone = {replace(train, groups=None).fingerprint()} if isinstance(train, Examples) else set[str]()
    return {train.fingerprint(), *alone}


def _read(path: Path, network: nn.Module | None, info: DatasetInfo, config: RunConfig) -> Start:
    if Run(path).exists:
        return _read_run(path, network, info, config)
    weights, card = prior_files(path)
    # What a person names is looked at first: `model.pt` is refused as a pickle, not as a missing model.pt.safetensors.
    for file in (path, weights):
        _require_tensors(file)
    if not weights.exists():
        raise RunError(
            f"there is no prior {path}.",
            why="A prior is a run, or NAME.safetensors with NAME.card.json beside it.",
            remedy="Make one with `stobatch pretrain`, or name one that is there.",
        )
    if not card.exists():
        raise RunError(
            f"{weights} has no card: {card.name} is not there.",
            why="Weights do not say what they have seen, and a guarantee has to.",
            remedy="Write what they were made from: stobatch.results.PriorCard and write_prior; docs/public-start.md.",
        )
    tensors, described = read_prior(path)
    return Start(
        tensors,
        PriorConfig(
            name=_one_line(described.name) or weights.stem,
            weights_sha256=described.weights_sha256,
            read=tuple(map(_source, described.sources)) or ("nothing that its card names",),
            may_contain=tuple(map(_one_line, described.may_contain)) or None,
            tuned_on=tuple(map(_one_line, described.tuned_on)) or None,
        ),
        described.input_shape,
        described.num_classes,
        described.method != "contrastive",
    )


def _require_tensors(path: Path) -> None:
    """Refuse files that run code when they are opened, by how they begin; nothing of them is loaded."""
    if path.is_file():
        with path.open("rb") as file:
            begins = file.read(4)
        if begins.startswith(_PICKLES):
            raise RunError(
                f"{path} is a pickle.",
                why="Opening it would run the code in it.",
                remedy="Ask its maker to save the tensors with safetensors.torch.save_file, and write a card.",
            )


def _one_line(text: str) -> str:
    """Return text that fits into a setting: one line."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _source(source: PriorSource) -> str:
    digest = f", sha256 {source.sha256[:16]}…" if source.sha256 else ""
    count = f", {source.records:,} records" if source.records is not None else ""
    return _one_line(f"{source.name}: {source.what} (licence: {source.licence}{count}{digest})")


def _read_run(path: Path, network: nn.Module | None, info: DatasetInfo, config: RunConfig) -> Start:
    """Return a finished run as a start. One that read the same records is refused: what both tell would add up."""
    model = load(path, network=network, device="cpu")
    started = StartedRun.read(Run(path))
    names = tuple(dict.fromkeys((started.data, started.dataset.name)))
    private = tuple(dict.fromkeys((config.data.name, info.name)))
    if find_conflict([name for name in names if name not in _OWN], [name for name in private if name not in _OWN]):
        raise SettingError(
            f"{path} was trained on {started.dataset.name}, and so would be what starts from it.",
            why="Both trainings tell something of the same records. What they tell together is not accounted for: "
            f"the run says {str(model.guarantee).partition(' (')[0]}, this training would say its own ε alone.",
            remedy="Start from a run on other data, or train once with the whole budget.",
        )
    before = model.config.prior
    # Somebody's own records have no name that tells two data sets apart, so it is not known what is in both.
    seen = (UNKNOWN,) if started.data in _OWN else names
    facts, data = started.dataset, f"{started.dataset.num_train:,} training records of {started.dataset.name}"
    tensors = _weights(model.network, network)
    return Start(
        tensors,
        PriorConfig(
            name=_one_line(path.resolve().name) or "run",
            weights_sha256=tensors_sha256(serialise_tensors(tensors, {})),
            read=(f"{data}, by method {model.config.method.title} (licence: that of the data)", *(before.read or ())),
            may_contain=tuple(dict.fromkeys((*seen, *(before.may_contain or ())))),
            tuned_on=before.tuned_on,
            promise=_one_line(str(model.guarantee)),
        ),
        tuple(facts.input_shape),
        facts.num_classes,
        True,
    )


def _weights(trained: nn.Module, given: nn.Module | None) -> dict[str, Tensor]:
    """Return the weights of a run's network, without the buffers that its method added."""
    added = {name for name, _ in trained.named_buffers(recurse=False)} if given is None else set[str]()
    return {name: value.clone() for name, value in trained.state_dict().items() if name not in added}


def _describe_start(start: Start, config: RunConfig, info: DatasetInfo, network: nn.Module | None) -> PriorConfig:
    """Return what the settings say of a start, or raise where it is for another network or for other inputs."""
    name = start.said.name
    if start.input_shape != info.input_shape:
        raise ModelError(
            f"the prior {name} takes inputs of {_shape(start.input_shape)}, the data are {_shape(info.input_shape)}.",
            remedy="Use a prior for inputs of this shape, or bring the data to its shape.",
        )
    blank = fresh_network(config, info, Seeds.reproducible(0), network)
    wanted, head = blank.state_dict(), last_layer(blank)
    for key, value in start.tensors.items():
        if not value.is_floating_point() or bool(value.isfinite().all()):
            continue
        raise ModelError(f"the prior {name} has values in {key} that are not numbers.", remedy="Make it again.")
    same_head = start.has_head and start.num_classes == info.num_classes
    strange = sorted(start.tensors.keys() - wanted.keys() - (set() if same_head else head))
    for key in (*strange, *wanted):
        if key in head and not same_head:
            continue
        here = _shape(wanted[key].shape) if key in wanted else "nothing of this name"
        there = _shape(start.tensors[key].shape) if key in start.tensors else "nothing of this name"
        if here != there:
            raise ModelError(
                f"the prior {name} does not fit the network: {key} is {there} there, and {here} here.",
                why="A start has the shapes of the network that is trained; only its last layer may be for other "
                "classes.",
                remedy="Set model.architecture to the prior's own, which its card names, or use another prior.",
            )
    return start.said.replace(new_head=not same_head)


def _shape(sizes: Any) -> str:
    return "x".join(map(str, sizes)) or "a number"
