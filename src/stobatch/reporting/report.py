"""`report`: run directories into one HTML file, with t-tests where there are several seeds."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stobatch.errors import RunError, SettingError
from stobatch.files import as_written, write_atomically
from stobatch.reporting.accuracy import Accuracy, Measuring, measured_accuracy, measuring
from stobatch.reporting.audits import Audits, audits_of
from stobatch.reporting.comparison import several_runs
from stobatch.reporting.comparison_document import compare_runs, settings_tests
from stobatch.reporting.header import Flags, Header, one_line, opening, raised_flags
from stobatch.reporting.image_grid import Pictures, pictures_of
from stobatch.reporting.page import render
from stobatch.reporting.provenance import Provenance, provenance
from stobatch.reporting.summary import Facts
from stobatch.results import ReportSummary, Verification, is_old
from stobatch.runs import MANIFEST, SIGNATURE_FILES, Run, seal

if TYPE_CHECKING:
    from torch import nn


def report(
    runs: str | Path | Sequence[str | Path],
    out: str | Path | None = None,
    *,
    images: bool | None = None,
    network: nn.Module | None = None,
    signers: Path | None = None,
    identity: str | None = None,
) -> ReportSummary:
    """Write the report of one run, or of several with a comparison; reads what `evaluate` left, trains nothing.

    Every number is computed again from configuration, ledger and rows first (`verification.verify`); a difference is
    refused. Pictures are shown where the test data are public or `images` asks for them. A network that was handed over
    to `train` is handed over again, or what rests on it is reported as not checked.
    """
    runs = [runs] if isinstance(runs, str | Path) else runs
    directories = [Run(Path(run)) for run in runs]
    if not directories:
        raise SettingError("there is no run to report on.", remedy="Give at least one run directory.")
    if out is None and len(directories) > 1:
        raise SettingError("a report on several runs belongs to none of them.", remedy="Say where with --out FILE.")
    target = directories[0].path / "report.html" if out is None else _require_own_place(Path(out))
    inside = out is None
    if inside and any((directories[0].path / name).exists() for name in SIGNATURE_FILES):
        raise SettingError(
            f"{directories[0].path} is signed.",
            why="A new report.html in it would be a file that the signature does not cover.",
            remedy="Write the report elsewhere: --out FILE.",
        )
    with directories[0].held() if inside and directories[0].exists else nullcontext(), as_written(_all_paths(runs)):
        # What a person can mend, a run that was not evaluated, is said before anything is computed.
        facts = [Facts.read(run) for run in directories]
        # PyTorch and the accountants from here on: to compute again, not to be told what is missing.
        from stobatch.training.device import environment
        from stobatch.verification import require_agreement, verify

        asked: dict[str, Any] = {"network": network, "signers": signers, "identity": identity}
        rewritten = ("report.html",) if inside else ()
        checked = [verify(run.path, sample=0, rewritten=rewritten, **asked) for run in directories]
        for one in checked:
            require_agreement(one)
        comparison = compare_runs(facts)
        write_report(directories, target, images=images, provenance=checked)
        if inside and directories[0].has(MANIFEST):
            seal(directories[0], "report", environment("cpu"))
    names = tuple(str(run.path) for run in directories)
    tests = settings_tests(comparison) if comparison else []
    return ReportSummary(report=str(target), runs=names, comparisons=tuple(tests))


def _require_own_place(out: Path) -> Path:
    """Return where a report goes that is no run's own file; raise where it would overwrite something else."""
    if out.suffix != ".html":
        raise SettingError(f"{out} is not the name of a page.", remedy="Give --out a name that ends with .html.")
    if out.exists() and not (out.is_file() and out.read_bytes()[:15].lower() == b"<!doctype html>"):
        raise SettingError(f"{out} exists and is not a page.", remedy="Choose another --out.")
    within = next((folder for folder in out.absolute().parents if Run(folder).exists), None)
    if within is not None:
        raise SettingError(
            f"{out} lies in the run {within}.",
            why="Its manifest lists every file, and would not list this one.",
            remedy="Choose an --out elsewhere; without --out a run's own report.html is written.",
        )
    return out


def _all_paths(runs: Sequence[str | Path]) -> Path:
    """Return all runs of a report, as one path for messages: which of them is damaged is not known."""
    return Path(", ".join(str(run) for run in runs))


@dataclass(frozen=True)
class RunPage:
    """Everything that a page says of one run."""

    name: str
    """Its place on the page."""
    line: str
    opening: Header
    flags: Flags
    audits: Audits | None
    accuracy: Accuracy
    pictures: Pictures
    measuring: Measuring
    provenance: Provenance


def write_report(
    runs: Sequence[Run],
    out: Path,
    *,
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
    several = several_runs(facts, compare_runs(facts)) if len(runs) > 1 else None
    page = render(
        "report.html",
        title=f"{len(runs)} runs compared" if several else facts[0].name,
        eyebrow="stobatch report",
        source="from the run's own files",
        several=several,
        runs=[_run_page(one, f"run-{place}", images) for place, one in enumerate(facts, 1)],
    )
    write_atomically(out, lambda file: file.write(page))
    return out


def _run_page(facts: Facts, name: str, images: bool | None) -> RunPage:
    return RunPage(
        name,
        one_line(facts),
        opening(facts),
        raised_flags(facts),
        audits_of(facts, name),
        measured_accuracy(facts, name),
        pictures_of(facts, images=images),
        measuring(facts, name),
        provenance(facts),
    )
