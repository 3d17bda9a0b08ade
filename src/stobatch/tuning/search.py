"""`tune`: settings drawn at random, a random number of times, scored on held-out records; the best one is released.

How many candidates there are is drawn in secret and is on disk before the first one starts; it, and every candidate but
the best, stay in the search's private folder. The winner is an ordinary run whose guarantee covers the whole search
(docs/guarantees/search.md).
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from torch import Tensor, nn

from stobatch import data
from stobatch.book import Booking, cost_of
from stobatch.config import RunConfig, require_config
from stobatch.data import Dataset, require_dataset
from stobatch.dp.plan import DpSgdPlan
from stobatch.errors import RunError, SettingError, StobatchError
from stobatch.evaluation.tables import data_root
from stobatch.files import PRIVATE, make_folder, write_atomically, write_tensors
from stobatch.loading import load
from stobatch.prior import require_unseen, take_prior
from stobatch.progress import elapsed
from stobatch.results import CandidateRow, Candidates, Search, Training, Winner
from stobatch.runs import START, Run, make_key
from stobatch.seeds import Seeds
from stobatch.sound.search import combinations, law_of, require_searchable
from stobatch.training.device import use_device
from stobatch.training_run import plan
from stobatch.tuning.candidate import Candidate, Score

WINNER = "winner"
"""The run directory of the winner, in that of the search."""
_DAY = 24 * 3600 * 10**9
"""In nanoseconds."""


def tune(
    config: RunConfig,
    out: str | Path,
    *,
    dataset: Dataset | None = None,
    network: nn.Module | None = None,
    prior: str | Path | None = None,
    workers: int = 1,
    resume: bool = False,
    quiet: bool = False,
) -> Search:
    """Search settings and pay for it: `out/winner` is a run whose ε, at most `method.epsilon`, covers the search.

    `config.search` says what is searched and how; `config.data.held_out` records are kept aside by each candidate to be
    scored on. Every candidate starts from `prior`, where it is given. `workers` candidates are trained at once, each in
    a process of its own. A search that was interrupted goes on with `resume`, with the same candidates.
    """
    require_config(config)
    require_dataset(dataset)
    directory = Run.at(out)
    _require_new(directory, resume=resume)
    start = None
    if prior is not None or config.prior.name is not None:
        info = dataset.info if dataset else data.describe(config.data.replace(held_out=0), data_root(config))
        config, start = take_prior(config, info, prior, network, directory)
    planned = _plan_search(config, dataset, network)
    config = _set_candidate_epsilon(config, planned)
    if workers < 1:
        raise SettingError(f"{workers} workers train nothing.", remedy="Give a number from 1 on.")
    _require_same(directory, config)
    use_device(config.machine)
    booking = Booking.of(config, planned, directory, method=f"search, {config.method.title}")
    whole = dataset
    if booking is not None and not _is_finished(directory):
        booking.require_allowed()
    if (booking is not None or prior is not None) and not _is_finished(directory):
        whole = dataset or data.load(config.data.replace(held_out=0), root=data_root(config))
        if prior is not None:
            require_unseen(prior, whole.train)
        if booking is not None:
            booking.require_allowed(whole.train)
    with directory.held():
        seeds = _begin(directory, config, planned, start)
        if booking is not None and whole is not None and not _is_finished(directory):
            booking.enter(directory, whole.train)
        document = _finish(directory, config, planned, seeds, dataset, network, start, workers, quiet)
        if booking is not None and whole is not None:
            booking.settle(cost_of(planned))
    return document


def _plan_search(config: RunConfig, dataset: Dataset | None, network: nn.Module | None) -> DpSgdPlan:
    """Return the plan of the search, after every combination of settings has been tried on paper."""
    require_searchable(config)
    first = plan(config, dataset=dataset, network=network)
    if not isinstance(first, DpSgdPlan):
        raise SettingError(
            f"method '{config.method.title}' cannot be searched.",
            why="A search is paid for by what is proved of its candidates.",
            remedy="Set method.name=sound, or another method that descends by DP-SGD.",
        )
    decided, plans = _set_candidate_epsilon(config, first), []
    for settings in combinations(config):
        try:
            plans.append(plan(decided.override_all(settings), dataset=dataset, network=network))
        except StobatchError as error:
            drawn = ", ".join(f"{key}={value}" for key, value in settings.items())
            raise SettingError(f"with {drawn}: {error.what}", why=error.why, remedy=error.remedy) from None
    # Of a candidate: the settings that are searched need not have, outside of the search, one of their values.
    assert isinstance(plans[0], DpSgdPlan)
    return plans[0]


def _set_candidate_epsilon(config: RunConfig, planned: DpSgdPlan) -> RunConfig:
    """Return the settings with the ε that each candidate has, so that it need not be found again."""
    assert planned.searched is not None
    return config.override("search.candidate_epsilon", planned.searched.candidate_epsilon)


def _require_new(directory: Run, *, resume: bool) -> None:
    path = directory.path
    if directory.exists:
        raise RunError(f"{path} is a run.", why="A search is a folder of its own.", remedy="Choose another --out.")
    if directory.has("search"):
        if not resume:
            raise RunError(
                f"{path} already holds a search.",
                remedy="Add --resume (resume=True in Python) to continue it, or choose another --out.",
            )
        return
    # A start that was killed before its settings were there leaves secrets and a copy of the prior at most.
    if path.exists() and (not path.is_dir() or {entry.name for entry in path.iterdir()} - {PRIVATE, START}):
        raise RunError(f"{path} exists and is not a search.", remedy="Choose another --out.")


def _require_same(directory: Run, config: RunConfig) -> None:
    if directory.has("search") and (recorded := Search.read(directory).training_hash) != config.training_hash:
        raise RunError(
            f"{directory.path} was started with other settings.",
            why=f"It names configuration {recorded}, and these are {config.training_hash}.",
            remedy="Choose another --out, or resume with the settings it was started with.",
        )


def _is_finished(directory: Run) -> bool:
    return directory.has("search") and Search.read(directory).finished


def _begin(directory: Run, config: RunConfig, planned: DpSgdPlan, start: Mapping[str, Tensor] | None) -> Seeds:
    """Write the secrets of the search, the number of its candidates among them, before anything is trained."""
    make_key(directory)
    if not directory.has("seeds", private=True):
        if directory.has("search"):
            raise RunError(
                f"{directory.path / PRIVATE / 'seeds.json'} is not there.",
                why="Drawn again, the number of candidates would be another search.",
                remedy="Restore it, or search again into a new --out, which spends a budget of its own.",
            )
        directory.write("seeds", {"root": str(Seeds.secret().root)}, private=True)
    if not directory.has("search"):
        if start is not None:
            write_tensors(directory.path / START, start, {"stobatch": "prior"}, private=False)
        _document(config, planned).write(directory)
    return Seeds(int(directory.read("seeds", private=True)["root"]), public=False)


def _document(config: RunConfig, planned: DpSgdPlan) -> Search:
    """Return the search before it has a winner: its plan is that of the first combination of settings."""
    drawn = ", ".join(f"{key}={value}" for key, value in next(combinations(config)).items())
    guarantee, one = planned.guarantee, config.search.candidate_epsilon
    return Search(
        training_hash=config.training_hash,
        config=config.to_dict(),
        one_candidate=f"{guarantee.status} ε = {one:g} by itself; what is released has the ε of the guarantee",
        guarantee_of=f"a candidate with {drawn}: ε and δ are those of the search, numbers in assumptions its own",
        guarantee=guarantee,
        finished=False,
        winner=None,
    )


def draw_candidates(config: RunConfig, seeds: Seeds, folder: Path) -> list[Candidate]:
    """Draw how many candidates there are, and the settings of each: always the same from the same seeds."""
    number = law_of(config).draw(seeds.stream("number of candidates"))
    return [Candidate.draw(place, config, seeds, folder) for place in range(1, number + 1)]


def best_of(scores: Sequence[Score]) -> int | None:
    """Return the place of the largest noisy score, the first of equal ones; None where none is left.

    Candidates are alike and independent, so the first of two equal ones is a random one of them.
    """
    left = [(score.noisy, -place) for place, score in enumerate(scores) if score.noisy is not None]
    return -max(left)[1] if left else None


def _finish(
    directory: Run,
    config: RunConfig,
    planned: DpSgdPlan,
    seeds: Seeds,
    dataset: Dataset | None,
    network: nn.Module | None,
    start: Mapping[str, Tensor] | None,
    workers: int,
    quiet: bool,
) -> Search:
    known = Search.read(directory)
    if known.finished:
        return known
    folder = directory.path / PRIVATE / "candidates"
    make_folder(folder, private=True)
    candidates = draw_candidates(config, seeds, folder)
    with elapsed("searching", quiet=quiet):
        scores = list(_scores(candidates, (dataset, network, start), workers))
    best = best_of(scores)
    _write_table(directory, config, candidates, scores, best)
    document = _document(config, planned).replace(finished=True)
    if best is not None:
        winner = _release(directory, config, candidates[best], scores[best])
        guarantee = load(directory.path / WINNER, network=network).guarantee
        document = document.replace(winner=winner, guarantee_of="the winner", guarantee=guarantee)
    document.write(directory)
    _keep_days(directory.path / "search.json")
    return document


def _scores(
    candidates: Sequence[Candidate],
    given: tuple[Dataset | None, nn.Module | None, Mapping[str, Tensor] | None],
    workers: int,
) -> Iterator[Score]:
    """Yield what candidates score, in their order, however many are trained at once. Nothing tells how many."""
    if workers == 1:
        yield from (candidate.finish(*given) for candidate in candidates)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for pending in [pool.submit(Candidate.finish, one, *given) for one in candidates]:
            yield pending.result()


def _write_table(
    directory: Run, config: RunConfig, candidates: Sequence[Candidate], scores: Sequence[Score], best: int | None
) -> None:
    rows = tuple(
        CandidateRow(
            number=one.number,
            settings=one.settings,
            noisy_score=score.noisy,
            failure=score.failure,
            won=place == best,
        )
        for place, (one, score) in enumerate(zip(candidates, scores, strict=True))
    )
    table = Candidates(held_out=config.data.held_out, rows=rows)
    directory.write(table.kind, table.to_dict(), private=True)
    _write_figure(table, directory.path / PRIVATE / "candidates.svg")


def _write_figure(candidates: Candidates, path: Path) -> None:
    """Write the scores of candidates against each setting that was searched, for the owner alone."""
    from stobatch.reporting.figures import canvas, standalone
    from stobatch.reporting.page import LIGHT

    keys = list(candidates.rows[0].settings) if candidates.rows else []
    if not keys:
        return
    scored = [row for row in candidates.rows if row.noisy_score is not None]
    with canvas(len(keys), 2.6 * len(keys) + 0.6, 2.6) as (figure, axes):
        for axis, key in zip(axes, keys, strict=True):
            values = list(dict.fromkeys(str(row.settings[key]) for row in candidates.rows))
            for row in scored:
                share = (row.noisy_score or 0.0) / candidates.held_out
                colour = LIGHT["proved"] if row.won else LIGHT["muted"]
                axis.plot(values.index(str(row.settings[key])), share, "D" if row.won else "o", color=colour)
            axis.set_xticks(range(len(values)), values)
            axis.set_xlabel(key)
        axes[0].set_ylabel("noisy share of held-out records")
        content = standalone(figure, "candidates")
    write_atomically(path, lambda out: out.write(content), private=True)


def _release(directory: Run, config: RunConfig, best: Candidate, score: Score) -> Winner:
    """Copy the best candidate out of the private folder, whole or not at all."""
    place, temporary = directory.path / WINNER, directory.path / f".{WINNER}.tmp"
    if not place.exists():
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.copytree(best.run.path, temporary)
        _keep_days(temporary)
        temporary.chmod(0o755)
        temporary.rename(place)
    assert score.noisy is not None
    return Winner(
        run=WINNER,
        settings=best.settings,
        noisy_score=score.noisy,
        held_out=config.data.held_out,
        test_accuracy=Training.read(Run(place)).test_accuracy,
    )


def _keep_days(published: Path) -> None:
    """Leave of the times of files the day: the rest tells how many candidates came before and after the winner."""
    for path in (*published.rglob("*"), published):
        day = path.stat().st_mtime_ns // _DAY * _DAY
        os.utime(path, ns=(day, day))
