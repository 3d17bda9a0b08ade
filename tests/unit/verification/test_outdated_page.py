"""A page that was written before a verb changed the run is not left beside what the run says now."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.command_line import call

import stobatch
from stobatch import runs
from stobatch.errors import RunError, StobatchError
from stobatch.files import write_json
from stobatch.results import Verification
from stobatch.runs import Run, entries


def audit_with_more(run: Path) -> None:
    """Audit other balls, so that the evidence changes."""
    stobatch.audit(run, overrides={"audit.instruments": ["certificates"], "audit.num_inputs": 5}, quiet=True)


def differing(found: Verification) -> list[tuple[str, str]]:
    return [(check.name, check.file) for check in found.differing]


def test_an_audit_that_changes_the_run_takes_the_page_away(run: Path, tmp_path: Path) -> None:
    audit_with_more(run)
    assert not (run / "report.html").exists()
    assert "report.html" not in entries(Run(run))
    assert stobatch.verify(run, sample=0).differing == ()
    stobatch.report([run])
    assert stobatch.verify(run, sample=0).differing == ()


def test_the_command_says_that_the_page_is_gone(run: Path) -> None:
    said = call("audit", run, "--instrument", "certificates", "--set", "audit.num_inputs=5").err
    assert f"{run / 'report.html'} was removed" in said
    assert f"`stobatch report {run}`" in said


def test_a_verb_that_changes_nothing_leaves_the_page(run: Path) -> None:
    before = (run / "report.html").read_bytes()
    stobatch.audit(run, resume=True, quiet=True)
    assert (run / "report.html").read_bytes() == before


@pytest.mark.parametrize("moment", ["before the page is gone", "before the manifest is written"])
def test_after_a_kill_nothing_vouches_for_the_older_page(
    run: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Kill(BaseException):
        pass

    def kill(*_: object) -> None:
        raise Kill

    name = "evaluation.tables.seal" if moment == "before the page is gone" else "runs._date"
    with monkeypatch.context() as patch:
        patch.setattr(f"stobatch.{name}", kill)
        with pytest.raises(Kill):
            audit_with_more(run)
    assert ("files", "audit.json") in differing(stobatch.verify(run, sample=0))
    with pytest.raises(RunError):
        stobatch.sign(run, run / "key")
    audit_with_more(run)
    assert not (run / "report.html").exists()
    assert stobatch.verify(run, sample=0).differing == ()


def older_page(run: Path) -> None:
    """Leave what an older version left: a page that is listed, and an audit after it."""
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["made"]["audit"]["date"] = "2999-01-01T00:00:00Z"
    (run / "manifest.json").write_text(json.dumps(manifest))


def test_an_older_page_beside_a_newer_audit_is_a_difference_and_not_signed(run: Path, tmp_path: Path) -> None:
    older_page(run)
    found = stobatch.verify(run, sample=0)
    assert differing(found) == [("report", "report.html")]
    assert "written before `audit` changed the run" in found.differing[0].detail
    (tmp_path / "key").write_text("no key")
    with pytest.raises(RunError, match=r"written before `audit`.*stobatch report"):
        stobatch.sign(run, tmp_path / "key")
    # No page is read for another page.
    stobatch.report([run], tmp_path / "elsewhere.html")
    stobatch.report([run])


def test_dates_that_name_the_day_alone_are_compared_by_the_day(run: Path) -> None:
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["made"]["report"]["date"] = manifest["made"]["report"]["date"][:10]
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert runs.verb_since_page(Run(run)) is None


def test_a_manifest_without_verbs_is_an_error_with_a_remedy(run: Path) -> None:
    content = json.loads((run / "manifest.json").read_text())
    content["made"] = ["audit"]
    write_json(run / "manifest.json", "manifest", {k: v for k, v in content.items() if k not in ("schema", "version")})
    with pytest.raises(StobatchError, match="has no list of verbs"):
        runs.verb_since_page(Run(run))
