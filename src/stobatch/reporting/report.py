"""`report`: run directories into one HTML file, with t-tests where there are several seeds."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from stobatch.errors import RunError, SettingError
from stobatch.evaluation.statistics import t_tests_between
from stobatch.files import as_written, write_atomically
from stobatch.models import Classifier
from stobatch.reporting.accuracy import curves_section, tables_section
from stobatch.reporting.audits import audits_section
from stobatch.reporting.comparison import comparison_section, t_tests
from stobatch.reporting.flags import flags_section
from stobatch.reporting.header import one_line, opening
from stobatch.reporting.image_grid import pictures_section
from stobatch.reporting.methods import measuring_section
from stobatch.reporting.page import Html, folded, join, tag, whole_page
from stobatch.reporting.provenance import provenance_line, provenance_section
from stobatch.reporting.summary import Facts
from stobatch.results import WORST, ReportSummary, Scores, SettingsTest, Verification
from stobatch.runs import MANIFEST, SIGNATURE_FILES, Run, seal
from stobatch.settings import content_hash
from stobatch.training.device import environment
from stobatch.types import Norm
from stobatch.verification import is_old, require_agreement, verify

Key = tuple[str, str, str, str, float]
"""What two scores must have in common to be compared: protocol, function, norm, input range, radius."""


def report(
    runs: Sequence[str | Path],
    out: str | Path | None = None,
    *,
    images: bool | None = None,
    network: Classifier | None = None,
    signers: Path | None = None,
    identity: str | None = None,
) -> ReportSummary:
    """Write the report of one run, or of several with a comparison; reads what `evaluate` left, trains nothing.

    Every number is computed again from configuration, ledger and rows first (`verification.verify`); a difference is
    refused. Pictures are shown where the test data are public or `images` asks for them. A network that was handed over
    to `train` is handed over again, or what rests on it is reported as not checked.
    """
    directories = [Run(Path(run)) for run in runs]
    if not directories:
        raise SettingError("there is no run to report on.", remedy="Give at least one run directory.")
    if out is None and len(directories) > 1:
        raise SettingError("a report on several runs belongs to none of them.", remedy="Say where with --out FILE.")
    target = Path(out) if out is not None else directories[0].path / "report.html"
    inside = out is None
    if inside and any((directories[0].path / name).exists() for name in SIGNATURE_FILES):
        raise SettingError(
            f"{directories[0].path} is signed.",
            why="A new report.html in it would be a file that the signature does not cover.",
            remedy="Write the report elsewhere: --out FILE.",
        )
    with directories[0].held() if inside and directories[0].exists else nullcontext(), as_written(_named(runs)):
        for run in directories:
            # What a person can mend, a run that was not evaluated, is said before anything is computed.
            Facts.read(run)
        asked: dict[str, Any] = {"network": network, "signers": signers, "identity": identity}
        rewritten = ("report.html",) if inside else ()
        checked = [verify(run.path, sample=0, rewritten=rewritten, **asked) for run in directories]
        for one in checked:
            require_agreement(one)
        comparisons = _comparisons(directories)
        write_report(directories, target, comparisons=comparisons, images=images, provenance=checked)
        if inside and directories[0].has(MANIFEST):
            seal(directories[0], "report", environment("cpu"))
    names = tuple(str(run.path) for run in directories)
    return ReportSummary(report=str(target), runs=names, comparisons=tuple(comparisons))


def _named(runs: Sequence[str | Path]) -> Path:
    """All runs of a report, as one path for messages: which of them is damaged is not known."""
    return Path(", ".join(str(run) for run in runs))


def _comparisons(runs: Sequence[Run]) -> list[SettingsTest]:
    """Two-tailed t-tests between every two settings that were trained with two seeds or more."""
    trained: dict[tuple[str, str], dict[int, Facts]] = {}
    for place, run in enumerate(runs, 1):
        facts = Facts.read(run)
        # A secret seed pairs with none: no public seed is negative.
        seed = facts.seed if facts.seed is not None else -place
        trained.setdefault((facts.setting, facts.status), {})[seed] = facts
    groups = {
        _name([*same.values()]): {seed: _worst(facts.scores) for seed, facts in same.items()}
        for same in trained.values()
    }
    found = []
    for first, second, key, test in t_tests_between(groups):
        protocol, function, norm, input_range, radius = key
        found.append(
            SettingsTest(
                first=first,
                second=second,
                protocol=protocol,
                function=function,
                norm=Norm(norm),
                input_range=input_range,
                radius=radius,
                t_test=test,
            )
        )
    return found


def _name(trained: Sequence[Facts]) -> str:
    """A setting without its seed: method, the largest budget of its runs with its status, and a hash for the rest."""
    first, spent = trained[0], [facts.epsilon for facts in trained if facts.epsilon is not None]
    budget = f", {first.status} ε = {max(spent):g}" if spent else ""
    settings = first.started.config
    plain = {key: settings[key] for key in ("method", "data", "model", "training")}
    return f"{first.method}{budget} [{content_hash(plain)[:6]}]"


def _worst(scores: Scores) -> dict[Key, float]:
    return {
        (row.protocol, row.function, str(row.norm), row.input_range, row.radius): row.value
        for under in scores.under_attack
        for row in under.of_attack(WORST)
    }


def write_report(
    runs: Sequence[Run],
    out: Path,
    *,
    comparisons: Sequence[SettingsTest] = (),
    images: bool | None = None,
    provenance: Sequence[Verification] = (),
) -> Path:
    """Write one self-contained HTML file about one run or several; the same files give the same bytes.

    `provenance` is what `verify` said of each run; without it the page says that nothing was checked. `images` left
    open shows pictures of public data sets only.
    """
    if not runs:
        raise RunError("there is no run to report on.", remedy="Give at least one run directory.")
    checked: list[Verification | None] = [*provenance] if provenance else [None] * len(runs)
    facts = [
        replace(Facts.read(run), provenance=one, is_old=is_old(run)) for run, one in zip(runs, checked, strict=True)
    ]
    page = _page(facts, comparisons, images).encode()
    write_atomically(out, lambda file: file.write(page))
    return out


def _page(runs: Sequence[Facts], comparisons: Sequence[SettingsTest], images: bool | None) -> Html:
    several = len(runs) > 1
    title = f"{len(runs)} runs compared" if several else runs[0].name
    body = _several(runs, comparisons, images) if several else _one(runs[0], "run-1", images)
    tests = Html("") if several else t_tests(comparisons)
    return whole_page(title, "stobatch report", body, tests, footer="from the run's own files")


def _one(facts: Facts, name: str, images: bool | None) -> Html:
    return join(
        [
            opening(facts),
            provenance_line(facts),
            flags_section(facts),
            audits_section(facts, name),
            curves_section(facts, name),
            tables_section(facts),
            pictures_section(facts, images=images),
            measuring_section(facts, name),
            provenance_section(facts),
        ]
    )


def _several(runs: Sequence[Facts], comparisons: Sequence[SettingsTest], images: bool | None) -> Html:
    folds = [
        folded(one_line(facts), _one(facts, f"run-{place}", images), class_="run", id=f"run-{place}")
        for place, facts in enumerate(runs, 1)
    ]
    return join([comparison_section(runs, comparisons), tag("h2", "Run by run"), *folds])
