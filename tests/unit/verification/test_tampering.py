"""Every tampering is refused or named: as it is, with a mended manifest, and under a signature."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from pathlib import Path

import pytest
from support.tamperings import ONLY_SIGNED, PLAIN_TOO, TAMPERINGS, flip, mend_manifest

import stobatch
from stobatch.errors import RunError, StobatchError
from stobatch.runs import Run, differences
from stobatch.verification import Verification, conclude, require_agreement

ssh_keygen = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")


def differs(run: Path, sample: int = 0) -> bool:
    """Whether `verify` refuses or names a difference; it never raises anything that a user cannot read."""
    try:
        return bool(stobatch.verify(run, sample=sample, seed=1).differing)
    except StobatchError:
        return True


def test_an_honest_run_agrees_in_every_check(whole: Path) -> None:
    found = stobatch.verify(whole, sample=40, seed=1)
    assert found.differing == ()
    names = {check.name for check in found.checks}
    assert {"second accountant", "sample certified again", "sample answered again", "training data"} <= names
    assert [check.name for check in found.checks if check.outcome == "not checked"] == ["signature"]


def test_there_are_enough_tamperings() -> None:
    assert len(TAMPERINGS) >= 140
    assert len(TAMPERINGS.keys() - ONLY_SIGNED) >= 130
    assert ONLY_SIGNED.keys() <= TAMPERINGS.keys()


@pytest.mark.parametrize("name", TAMPERINGS)
def test_a_tampering_is_noticed_by_verify_and_refused_by_report(
    run: Path, other: Path, tmp_path: Path, name: str
) -> None:
    TAMPERINGS[name](run, other)
    if name in PLAIN_TOO:
        assert not differs(run), "nothing contradicts it: only a signature shows it"
        return
    assert differs(run)
    with pytest.raises(StobatchError):
        stobatch.report([run], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", TAMPERINGS)
def test_a_tampering_with_a_mended_manifest_is_noticed_or_listed(run: Path, other: Path, name: str) -> None:
    """The attacker writes new digests, too: what contradicts rows, weights, plan or ledger is still found."""
    TAMPERINGS[name](run, other)
    mend_manifest(run)
    needs_data = name in ("training: other records", "training: other test data")
    # Rows of the sample are chosen at random: all of them here, so that the test cannot fail by chance.
    assert differs(run, sample=60 if needs_data or name.startswith("rows") else 0) is (name not in ONLY_SIGNED)


def signed(run: Path, folder: Path) -> Path:
    """Sign with a fresh key outside the run; returns the file of allowed signers."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key")], check=True)
    stobatch.sign(run, folder / "key")
    signers = folder / "signers"
    signers.write_text(f"owner@example.org {(folder / 'key.pub').read_text()}")
    return signers


@ssh_keygen
def test_a_signature_catches_everything(whole: Path, other: Path, tmp_path: Path) -> None:
    """Whatever is changed, with a mended manifest or without: the manifest is not the one that was signed."""
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    signers = signed(run, tmp_path)
    found = stobatch.verify(run, sample=0, signers=signers, identity="owner@example.org")
    assert found.differing == ()
    assert "signed by owner@example.org, checked with signers" in [check.detail for check in found.checks]
    manifest = (run / "manifest.json").read_bytes()
    for name in ONLY_SIGNED:
        copy = Path(shutil.copytree(run, tmp_path / "copy"))
        TAMPERINGS[name](copy, other)
        mend_manifest(copy)
        if (copy / "manifest.json").read_bytes() != manifest:
            with pytest.raises(RunError, match=r"manifest\.json\.sig, signature"):
                require_agreement(signature_alone(copy, signers))
        shutil.rmtree(copy)
    someone = stobatch.verify(run, sample=0, signers=signers, identity="eve@example.org")
    assert [check.name for check in someone.differing] == ["signature"]


def signature_alone(run: Path, signers: Path) -> Verification:
    from stobatch.verification.checks import signature_check

    return conclude(Run(run), (signature_check(Run(run), signers, "owner@example.org"),))


@ssh_keygen
def test_a_verb_after_signing_takes_the_signature_off_and_a_report_is_refused(whole: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    signers = signed(run, tmp_path)
    with pytest.raises(StobatchError, match="is signed"):
        stobatch.report([run])
    page = stobatch.report([run], tmp_path / "page.html", signers=signers, identity="owner@example.org").report
    assert "Signed by owner@example.org, checked with signers" in Path(page).read_text()
    stobatch.certify(run, overrides={"certification.limit": 30}, resume=True, quiet=True)
    assert not (run / "manifest.json.sig").exists()
    stobatch.audit(run, resume=True, quiet=True)
    found = stobatch.verify(run, sample=0, signers=signers, identity="owner@example.org")
    assert [check.detail for check in found.differing] == ["a signature is asked for, and there is none"]


@ssh_keygen
def test_what_is_not_whole_is_not_signed(run: Path, tmp_path: Path) -> None:
    TAMPERINGS["scores: a larger share"](run, run)
    with pytest.raises(RunError, match=r"scores\.json has"):
        signed(run, tmp_path)


def test_a_file_of_ones_own_is_to_be_moved_out_before_signing(run: Path, tmp_path: Path) -> None:
    (run / "p.csv").write_text("label\n")
    with pytest.raises(RunError, match=r"p\.csv is not in the manifest.*no verb writes it, so move it out of the run"):
        stobatch.sign(run, tmp_path / "key")


def test_a_missing_tool_and_a_missing_key_are_said(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StobatchError, match="there is no key"):
        stobatch.sign(run, tmp_path / "nothing")
    (tmp_path / "key").write_text("-----BEGIN OPENSSH PRIVATE KEY-----")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StobatchError, match=r"ssh-keygen is not installed.*Install openssh-client"):
        stobatch.sign(run, tmp_path / "key")


def test_a_thousand_flipped_bits_are_noticed(run: Path) -> None:
    """Five hundred in the weights and five hundred in rows, at places drawn once; the manifest tells them all."""
    places = random.Random(20)
    model, tables = run / "model.safetensors", sorted(run.glob("records/*/rows-*.parquet"))
    for count in range(1000):
        path = model if count % 2 else places.choice(tables)
        bit = places.randrange(8 * path.stat().st_size)
        flip(path, bit)
        named = [name for name, _ in differences(Run(run))]
        assert named == [path.relative_to(run).as_posix()], bit
        flip(path, bit)
    assert list(differences(Run(run))) == []


def test_numbers_of_a_run_without_its_manifest_are_still_computed_again(run: Path) -> None:
    (run / "manifest.json").unlink()
    found = stobatch.verify(run, sample=0)
    assert [check.name for check in found.differing] == ["manifest", "identity"]
    document = json.loads((run / "scores.json").read_text())
    document["guarantee"]["proved_epsilon"] = 0.1
    (run / "scores.json").write_text(json.dumps(document))
    assert "guarantee" in [check.name for check in stobatch.verify(run, sample=0).differing]
