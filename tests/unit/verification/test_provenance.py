"""Manifests, commitments and private pictures: what is written, what is never written, and what a kill leaves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load
from support.tamperings import SMALL, mend_manifest, rows

import stobatch
from stobatch import data
from stobatch.cli.app import main
from stobatch.dp.plan import OLD_TUNING_ASSUMPTION, TUNING_OBJECTION
from stobatch.errors import RunError, SettingError, StobatchError
from stobatch.evaluation import tables
from stobatch.files import PRIVATE, Records, serialise_tensors, tensors_sha256
from stobatch.runs import Run, differences, public_files, seal
from stobatch_recipes import recipe


def read(run: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / f"{name}.json").read_text())
    return found


def test_every_public_file_stands_in_the_manifest(whole: Path) -> None:
    manifest = read(whole, "manifest")
    assert manifest["files"].keys() == set(public_files(Run(whole)))
    assert not any(name.startswith(PRIVATE) for name in manifest["files"])
    assert set(manifest["made"]) == {"train", "certify", "evaluate", "attack", "audit", "report"}
    made = manifest["made"]["train"]
    assert {"date", "stobatch", "commit", "python", "torch", "numpy", "platform", "cpu", "device"} <= made.keys()
    assert manifest["weights_sha256"] == tensors_sha256((whole / "model.safetensors").read_bytes())


def test_no_plain_digest_of_private_data_is_published(whole: Path) -> None:
    """A plain digest confirms a guess; what is published of the training data needs the owner's key."""
    fingerprint = json.loads((whole / "private" / "data.json").read_text())["sha256"]
    public = "".join((whole / name).read_text(errors="replace") for name in public_files(Run(whole)))
    assert fingerprint not in public
    assert fingerprint[:12] not in public
    key = json.loads((whole / "private" / "commitment_key.json").read_text())["key"]
    assert key not in public
    mode = (whole / "private" / "commitment_key.json").stat().st_mode
    assert mode & 0o077 == 0


def test_weights_are_named_wherever_they_are_spoken_about(whole: Path) -> None:
    weights = read(whole, "training")["weights_sha256"]
    documents = ("certificates", "attack", "scores", "audit", "evidence/one_run", "evidence/certificates")
    assert {read(whole, name)["weights_sha256"] for name in documents} == {weights}


def test_pictures_and_points_that_broke_a_certificate_are_private(whole: Path) -> None:
    assert (whole / "private" / "images.safetensors").exists()
    assert not list(whole.glob("*images*"))
    assert not [name for name in public_files(Run(whole)) if name.startswith("evidence") and name.endswith("tensors")]


def test_a_report_of_private_test_images_leaves_them_out_unless_asked(run: Path, tmp_path: Path) -> None:
    page = Path(stobatch.report([run], tmp_path / "public.html").report).read_text()
    assert "data:image/png" in page
    document = read(run, "scores")
    document["images"]["public"] = False
    (run / "scores.json").write_text(json.dumps(document))
    mend_manifest(run)
    page = Path(stobatch.report([run], tmp_path / "private.html").report).read_text()
    assert "data:image/png" not in page
    assert "stobatch report RUN --images" in page
    assert "data:image/png" in Path(stobatch.report([run], tmp_path / "asked.html", images=True).report).read_text()
    shutil.rmtree(run / "private")
    document["images"]["public"] = True
    (run / "scores.json").write_text(json.dumps(document))
    mend_manifest(run)
    page = Path(stobatch.report([run], tmp_path / "shared.html").report).read_text()
    assert "This copy of the run holds no pictures" in page


def test_the_report_says_where_it_comes_from(whole: Path) -> None:
    page, manifest = (whole / "report.html").read_text(), read(whole, "manifest")
    assert "Self-reported, unsigned; every number was computed again" in page
    for text in (
        manifest["made"]["train"]["date"],
        manifest["weights_sha256"],
        manifest["data"]["training_commitment"],
        "2,674 parameters in 4 layers",
        "Accuracy by class",
        "audit by many runs: not made",
        "that the noise and the samples of the training were drawn as its plan says",
    ):
        assert text in page, text


def test_a_kill_between_a_document_and_its_manifest_is_named_and_mended(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tables, "seal", killed)
        with pytest.raises(KeyboardInterrupt):
            stobatch.certify(run, overrides={"certification.limit": 30}, quiet=True)
    named = {check.file for check in stobatch.verify(run, sample=0).differing}
    assert "certificates.json" in named
    with pytest.raises(RunError, match=r"certificates\.json .*`stobatch certify .*--resume`"):
        stobatch.evaluate(run, quiet=True)
    stobatch.certify(run, overrides={"certification.limit": 30}, resume=True, quiet=True)
    stobatch.evaluate(run, resume=True, quiet=True)
    stobatch.audit(run, resume=True, quiet=True)
    assert stobatch.verify(run, sample=0).differing == ()


@pytest.mark.parametrize("again", ["train", "certify"])
def test_a_training_killed_before_its_manifest_gets_one(run: Path, tmp_path: Path, again: str) -> None:
    for name in [*public_files(Run(run))]:
        if name.split(".")[0] not in ("config", "plan", "training", "model"):
            (run / name).unlink()
    (run / "manifest.json").unlink()
    assert [check.name for check in stobatch.verify(run, sample=0).differing] == ["manifest", "identity"]
    if again == "train":
        stobatch.train(recipe("demo").override_all(SMALL), run, resume=True, quiet=True)
    else:
        stobatch.certify(run, quiet=True)
    assert stobatch.verify(run, sample=0).differing == ()


def test_a_verb_does_not_build_on_what_was_changed(run: Path) -> None:
    rows("certify", lambda columns: columns["radius"].__setitem__(0, 0.05 - columns["radius"][0]))(run, run)
    with pytest.raises(RunError, match=r"has another SHA-256|bytes, the manifest says"):
        stobatch.evaluate(run, resume=True, quiet=True)
    with pytest.raises(RunError, match=r"has another SHA-256|bytes, the manifest says"):
        stobatch.certify(run, resume=True, quiet=True)


FOREIGN = {
    "canary scores": ("private/canary_scores.safetensors", stobatch.load),
    "certificates": ("certificates.json", lambda run: stobatch.evaluate(run, quiet=True)),
    "certificates for an audit": ("certificates.json", lambda run: stobatch.audit(run, quiet=True)),
    "weights": ("model.safetensors", stobatch.load),
    "training": ("training.json", stobatch.load),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_files_of_another_run_of_the_same_settings_are_never_applied(run: Path, other: Path, name: str) -> None:
    file, use = FOREIGN[name]
    shutil.copyfile(other / file, run / file)
    mend_manifest(run)
    with pytest.raises(StobatchError):
        use(run)


def test_checkpoints_of_another_run_of_the_same_settings_are_never_applied(run: Path, other: Path) -> None:
    (run / "model.safetensors").unlink()
    shutil.rmtree(run / "private" / "checkpoints")
    shutil.copytree(other / "private" / "checkpoints", run / "private" / "checkpoints")
    with pytest.raises(RunError, match="belongs to configuration"):
        stobatch.train(recipe("demo").override_all(SMALL), run, resume=True, quiet=True)


def test_a_run_that_has_its_objection_among_its_assumptions_too_is_still_verified(run: Path) -> None:
    """As older versions wrote it."""
    for name in ("plan", "scores", "attack"):
        document = read(run, name)
        assert TUNING_OBJECTION in document["guarantee"]["objections"]
        document["guarantee"]["assumptions"].append(OLD_TUNING_ASSUMPTION)
        (run / f"{name}.json").write_text(json.dumps(document))
    mend_manifest(run)
    assert not stobatch.verify(run, sample=0).differing


def test_a_run_of_an_older_version_loads_and_is_called_not_verifiable(run: Path, tmp_path: Path) -> None:
    (run / "manifest.json").unlink()
    for name, fields in (("training", ("weights_sha256", "data", "network", "private_files")),
                         ("certificates", ("weights_sha256",)), ("scores", ("weights_sha256",)),
                         ("audit", ("weights_sha256",))):  # fmt: skip
        document = read(run, name)
        for field in fields:
            del document[field]
        if name == "scores":
            document["certificates"] = Run(run).read("certificates")
            document["images"] = None
        (run / f"{name}.json").write_text(json.dumps(document))
    assert stobatch.load(run).guarantee.epsilon < 1
    found = stobatch.verify(run, sample=0)
    assert [check.name for check in found.differing] == ["manifest"]
    page = Path(stobatch.report([run]).report).read_text()
    assert "no manifest: an older version made this run, and it cannot be verified" in page
    document = read(run, "scores")
    document["guarantee"]["proved_epsilon"] = 0.1
    (run / "scores.json").write_text(json.dumps(document))
    with pytest.raises(RunError, match=r"guarantee\.epsilon is 0\.1"):
        stobatch.report([run])


def test_a_part_that_is_no_part_of_the_table_is_refused(tmp_path: Path) -> None:
    table = Records(tmp_path, config_hash="abc", expected_rows=4, resume_command="stobatch certify RUN --resume")
    table.write(0, {"index": [0, 1], "label": [3, 4]})
    table.write(2, {"index": [2, 3], "label": [3, 9]})
    assert table.read()["label"] == [3, 4, 3, 9]
    with pytest.raises(RunError, match=r"rows-00000002\.parquet has a row whose label is 9\..*certify RUN --resume"):
        table.read(lambda column: (0, 8) if column == "label" else None)
    (tmp_path / "rows-copy.parquet").write_bytes(b"")
    with pytest.raises(RunError, match="is not a part of the table"):
        table.read()


@pytest.mark.parametrize("index", [[0, 2], [1, 0], [0, 0], [0, 1, 2]])
def test_rows_that_are_not_numbered_in_order_are_refused(tmp_path: Path, index: list[int]) -> None:
    table = Records(tmp_path, config_hash="abc", expected_rows=2, resume_command="stobatch certify RUN --resume")
    table.write(0, {"index": index})
    with pytest.raises(RunError, match=r"rows-00000000\.parquet|has 3 of 2 rows"):
        table.read()


def test_page_checksums_are_written_and_asked_for(tmp_path: Path) -> None:
    table = Records(tmp_path, config_hash="abc", expected_rows=400, resume_command="stobatch certify RUN --resume")
    table.write(0, {"index": list(range(400)), "label": [row % 7 for row in range(400)]})
    part = tmp_path / "rows-00000000.parquet"
    content = bytearray(part.read_bytes())
    content[200] ^= 4
    part.write_bytes(content)
    assert not table.has(0)
    with pytest.raises(RunError, match=r"rows-00000000\.parquet is damaged.*--resume"):
        table.read()


def test_weights_have_one_digest_whatever_the_order_and_the_metadata() -> None:
    from safetensors.torch import save

    one = save({"a": torch.arange(3.0), "b": torch.ones(2)}, {"x": "1"})
    two = save({"b": torch.ones(2), "a": torch.arange(3.0)}, {"x": "2"})
    assert tensors_sha256(one) == tensors_sha256(two)
    for changed in ({"a": torch.arange(3.0), "c": torch.ones(2)}, {"a": torch.arange(3.0), "b": torch.ones(1, 2)}):
        assert tensors_sha256(save(changed)) != tensors_sha256(one)


def test_the_same_tensors_and_metadata_are_the_same_bytes() -> None:
    metadata = {name: name for name in "abcdefgh"}
    written = {serialise_tensors({"w": torch.ones(3), "é": torch.zeros(2)}, metadata) for _ in range(20)}
    assert len(written) == 1
    assert set(load(written.pop())) == {"w", "é"}


def test_verify_by_command(whole: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def call(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["stobatch", "verify", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        return int(left.value.code or 0), capsys.readouterr().out

    code, out = call(str(whole), "--sample", "3", "--json")
    assert code == 0
    assert json.loads(out)["verdict"] == "agrees"
    code, out = call(str(whole), "--sample", "0")
    assert (code, "Everything that was checked agrees" in out, "No file can show" in out) == (0, True, True)
    assert call(str(whole / "nothing"))[0] == 2
    assert call(str(whole), "--signers", str(whole / "nothing"), "--identity", "x")[0] == 2


def test_test_data_of_ones_own_are_handed_over_again(tmp_path: Path) -> None:
    """Private test data: a commitment that the owner opens, and that nobody else can test a guess against."""
    embedded = data.load(recipe("demo").override_all(SMALL).data)
    own = stobatch.from_tensors(
        embedded.train.in_memory().inputs, embedded.train.in_memory().labels, embedded.test.inputs,
        embedded.test.labels, num_classes=10, name="mine",
    )  # fmt: skip
    config = recipe("demo").override_all(SMALL | {"data.name": "tensors", "canaries.num": 0, "data.test_limit": None,
                                                  "data.train_limit": None})  # fmt: skip
    run = tmp_path / "run"
    stobatch.train(config, run, dataset=own, quiet=True)
    stobatch.certify(run, dataset=own, quiet=True)
    assert "test_sha256" not in read(run, "training")["data"]
    outcomes = {check.name: check for check in stobatch.verify(run, dataset=own, sample=5).checks}
    assert outcomes["test data"].outcome == "agrees"
    assert outcomes["training data"].outcome == "agrees"
    assert outcomes["sample certified again"].outcome == "agrees"
    without = {check.name: check for check in stobatch.verify(run, sample=5).checks}
    assert without["sample"].outcome == "not checked"
    fewer = stobatch.from_tensors(
        own.train.in_memory().inputs, own.train.in_memory().labels, own.test.inputs.flip(0), own.test.labels.flip(0),
        num_classes=10, name="mine",
    )  # fmt: skip
    assert {c.name for c in stobatch.verify(run, dataset=fewer, sample=5).differing} >= {"test data"}
    assert list(differences(Run(run))) == []


def test_a_file_that_was_removed_is_missed_until_its_verb_writes_it_again(run: Path) -> None:
    (run / "certificates.json").unlink()
    seal(Run(run), "report", {})
    assert "certificates.json" in dict(differences(Run(run)))
    stobatch.certify(run, quiet=True)
    assert "certificates.json" not in dict(differences(Run(run)))


@pytest.mark.parametrize("name", ["run/private/seeds.json", "run/other.html", "notes.txt", "page.html"])
def test_a_report_overwrites_nothing_that_is_not_a_report(run: Path, tmp_path: Path, name: str) -> None:
    for file in ("notes.txt", "page.html"):
        (tmp_path / file).write_text("mine")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(SettingError):
        stobatch.report(run, tmp_path / name)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_report_replaces_an_older_one(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    stobatch.report(run, page)
    written = page.read_text()
    page.write_text(f"{written}<p>of an older report</p>")
    stobatch.report(run, page)
    assert page.read_text() == written


def test_a_changed_training_is_restored_or_made_elsewhere(run: Path) -> None:
    training = run / "training.json"
    training.write_text(training.read_text().replace("5", "6", 1))
    with pytest.raises(StobatchError, match="train again with another --out"):
        stobatch.certify(run, quiet=True)
