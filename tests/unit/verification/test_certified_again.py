"""Certificates that were made after an audit, with other settings: nothing of them was tested, and nothing differs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.tamperings import edit, mend_manifest

import stobatch
from stobatch.errors import RunError
from stobatch.results import Audit, Outcome, Scores, Verification
from stobatch.runs import Run

TAMPER = edit("evidence/certificates.json", lambda d: d["findings"][0]["details"].update(certified=39))


def certify_fewer(run: Path) -> None:
    stobatch.certify(run, overrides={"certification.limit": 5}, quiet=True)


def unchecked(found: Verification) -> set[tuple[str, str, str]]:
    return {(c.name, c.file, c.detail) for c in found.checks if c.outcome is Outcome.NOT_CHECKED}


def test_an_audit_of_earlier_certificates_is_not_checked(run: Path) -> None:
    certify_fewer(run)
    found = stobatch.verify(run, sample=0)
    assert found.differing == ()
    how = "of other certificates, audit again"
    assert {("evidence", "evidence/certificates.json", how), ("audited certificates", "audit.json", how)} <= unchecked(
        found
    )
    stobatch.audit(run, quiet=True)
    assert not [one for one in unchecked(stobatch.verify(run, sample=0)) if how in one]


def test_a_report_says_that_the_certificates_it_shows_were_not_attacked(run: Path) -> None:
    certify_fewer(run)
    stobatch.evaluate(run, quiet=True)
    page = Path(stobatch.report([run]).report).read_text()
    assert "of other certificates, audit again" in page
    assert "Not tested: certificates by the " in page
    stobatch.audit(run, quiet=True)
    page = Path(stobatch.report([run]).report).read_text()
    assert "of other certificates, audit again" not in page


def test_an_export_says_so_too(run: Path, tmp_path: Path) -> None:
    certify_fewer(run)
    document = stobatch.export(run, tmp_path / "out", to="torchscript")
    assert any("of other certificates, audit again" in line for line in document.not_checked)


def test_a_count_that_was_tampered_with_is_caught_before_and_after(run: Path) -> None:
    TAMPER(run, run)
    edit("audit.json", lambda d: next(f for f in d["findings"] if f["instrument"] == "certificates")["details"].update(
        certified=39))(run, run)  # fmt: skip
    mend_manifest(run)
    (wrong,) = stobatch.verify(run, sample=0).differing
    assert "39 certified balls are counted, the rows hold" in wrong.detail
    with pytest.raises(RunError, match="39 certified balls"):
        stobatch.report([run])
    # Of certificates that are gone it still contradicts its own statement.
    certify_fewer(run)
    (wrong,) = stobatch.verify(run, sample=0).differing
    assert "its statement does not say" in wrong.detail


def test_what_was_refuted_stays_refuted_by_an_audit_of_earlier_certificates(run: Path) -> None:
    audit = Audit.read(Run(run))
    finding = next(one for one in audit.findings if one.instrument == "certificates")
    from stobatch.results import judge_claims
    from stobatch.types import Verdict

    certified = Scores.read(Run(run)).certificates
    assert certified is not None
    of = {verdict: finding.replace(verdict=verdict) for verdict in (Verdict.REFUTED, Verdict.CONSISTENT)}
    judged = {verdict: judge_claims("none", certified.kinds, [one], "others")[0] for verdict, one in of.items()}
    assert judged[Verdict.REFUTED].verdict is Verdict.REFUTED
    assert judged[Verdict.CONSISTENT].verdict is Verdict.NOT_TESTED


def test_an_audit_before_the_first_certificates_is_no_difference(run: Path) -> None:
    for name in ("audit.json", "certificates.json", "evidence/certificates.json"):
        (run / name).unlink()
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["files"] = {
        name: entry
        for name, entry in manifest["files"].items()
        if name not in ("audit.json", "certificates.json", "evidence/certificates.json")
    }
    (run / "manifest.json").write_text(json.dumps(manifest))
    stobatch.audit(run, overrides={"audit.instruments": ["one_run"]}, quiet=True)
    stobatch.certify(run, quiet=True)
    assert stobatch.verify(run, sample=0).differing == ()


def test_an_audit_of_an_older_version_does_not_name_its_certificates(run: Path) -> None:
    """Their dates tell, as long as they are not the same."""

    def forget(document: dict[str, object]) -> None:
        document.pop("certificates", None)
        for finding in document["findings"]:  # type: ignore[attr-defined]
            finding["details"].pop("certificates", None)

    for file in ("audit.json", "evidence/certificates.json"):
        edit(file, forget)(run, run)
    mend_manifest(run)
    assert stobatch.verify(run, sample=0).differing == ()
    certify_fewer(run)
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["made"]["audit"]["date"] = "2020-01-01T00:00:00Z"
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert stobatch.verify(run, sample=0).differing == ()
