"""What the method's proof says is released, looked at directly."""

from __future__ import annotations

from stobatch.auditing.finding import Finding
from stobatch.auditing.neighbours import require_relation
from stobatch.auditing.release import pair_of_tuples, release_finding
from stobatch.errors import SettingError
from stobatch.methods import method_of
from stobatch.privacy.release import Release, Tuples
from stobatch.verbs.instruments.audited import Audited, require_enough, sides
from stobatch.verbs.tables import Columns, Tick

_TRIALS_AT_ONCE = 500


def of_releases(audited: Audited) -> list[Finding]:
    """Every release that the method's proof names, drawn many times from both of two neighbours."""
    releases = method_of(audited.config).releases(audited.plan)
    if not releases:
        raise SettingError(
            "this method's proof names no release of its own.",
            why="What it calls private are its steps, which many_runs and one_run look at.",
            remedy="Use audit.instruments=many_runs.",
        )
    settings = audited.settings
    require_relation(settings.neighbours, audited.claim.neighbours)
    require_enough(settings.release_trials, audited)
    pair = pair_of_tuples(audited.data().train.in_memory())
    return [_looked_at(audited, release, pair) for release in releases]


def _looked_at(audited: Audited, release: Release, pair: tuple[Tuples, Tuples]) -> Finding:
    trials = audited.settings.release_trials

    def rows_of(start: int, count: int, tick: Tick) -> Columns:
        worlds = [index % 2 for index in range(start, start + count)]
        seeds = [audited.root.child("release", release.name, index) for index in range(start, start + count)]
        scores = [release.score(pair[world], pair, each) for world, each in zip(worlds, seeds, strict=True)]
        return {"world": worlds, "score": scores}

    table = audited.table(f"release-{release.name}", trials, trials, _TRIALS_AT_ONCE, rows_of)
    return release_finding(release, *sides(table), audited.claim, audited.confidence)
