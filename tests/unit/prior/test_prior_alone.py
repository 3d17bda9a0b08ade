"""The prior's own row: what the public weights are worth by themselves stands beside every private number."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from test_starting_from_a_prior import CONFIG, LAYERS, write

import stobatch
from stobatch import RunConfig
from stobatch.loading import model_of_prior
from stobatch.reporting.terminal import certificate_parts, guarantee_card, score_parts, show
from stobatch.results import CertificateSummary, Outcome, Scores
from stobatch.runs import Run

SMALL = CONFIG.override_all(
    {
        "evaluation.radii": [0.05, 0.2],
        "evaluation.attacks": ["fgsm"],
        "evaluation.adaptive_attacks": ["fgsm"],
        "evaluation.adaptive_steps": 2,
        "evaluation.restarts": 1,
        "evaluation.num_images": 0,
    }
)


def measured(config: RunConfig, prior: Path, out: Path) -> tuple[CertificateSummary, Scores]:
    stobatch.train(config, out, prior=prior, quiet=True)
    return stobatch.certify(out, quiet=True), stobatch.evaluate(out, quiet=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read only."""
    folder = tmp_path_factory.mktemp("prior")
    measured(SMALL, write(folder), folder / "run")
    return folder / "run"


def test_the_prior_is_measured_as_if_it_were_the_model(run: Path) -> None:
    certified, scores = CertificateSummary.read(Run(run)), Scores.read(Run(run))
    start = model_of_prior(stobatch.load(run))
    assert start is not None
    assert certified.prior is not None
    assert scores.prior is not None
    data = stobatch.data.load(SMALL.data)
    right = int((start.network(data.test.inputs).argmax(1) == data.test.labels).sum())
    assert scores.prior.clean_accuracy.count == certified.prior.verified_accuracy.correct.count == right
    assert scores.prior.weights_sha256 == start.config.prior.weights_sha256 != scores.weights_sha256
    assert (scores.prior.protocol.name, scores.prior.function) == ("adaptive", "single_pass")
    assert certified.prior.radii() == certified.radii()
    assert scores.certificates == certified


def test_every_page_has_the_row(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    certified, scores = CertificateSummary.read(Run(run)), Scores.read(Run(run))
    for parts in (certificate_parts(certified), score_parts(scores)):
        show(parts)
        printed = " ".join(capsys.readouterr().out.split())
        assert "The prior alone, shapes" in printed
        assert "towards the private records ε = 0" in printed
    assert any("the prior shapes alone (ε = 0)" in line for line in scores.lines())
    show(guarantee_card(scores.guarantee))
    card = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "prior, made from shapes: drawn shapes (licence: CC0-1.0, 50 records, sha256 abababababababab…)" in card
    page = Path(stobatch.report([run], run.parent / "report.html").report).read_text()
    assert "The prior alone" in page
    assert "It starts from" in page


def test_a_report_of_several_runs_has_a_row_for_each_prior(run: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    stobatch.train(SMALL, plain, quiet=True)
    stobatch.evaluate(plain, quiet=True)
    page = Path(stobatch.report([run, plain], tmp_path / "both.html").report).read_text()
    assert page.count("prior of run") == 1


def test_a_prior_that_may_contain_the_records_has_no_epsilon_of_zero(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    certified, scores = measured(SMALL, write(tmp_path, may_contain=("mnist",)), tmp_path / "odd")
    for parts in (certificate_parts(certified), score_parts(scores), guarantee_card(scores.guarantee)):
        show(parts)
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "no ε: it may contain the private records" in printed
    assert "ε = 0" not in printed
    assert "MAY CONTAIN THE PRIVATE RECORDS: they may have seen mnist" in printed
    page = Path(stobatch.report([run, tmp_path / "odd"], tmp_path / "both.html").report).read_text()
    table = page[page.index("prior of odd") :]
    assert "no ε: it may contain the private records" in table[: table.index("</tr>")]


def test_a_prior_without_an_answer_says_why_it_has_no_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    certified, scores = measured(SMALL, write(tmp_path, LAYERS, classes=7), tmp_path / "run")
    assert certified.prior is None
    assert scores.prior is None
    show(score_parts(scores))
    assert "the prior shapes has no row of its own: its last layer was drawn afresh" in capsys.readouterr().out
    assert stobatch.verify(tmp_path / "run", sample=0).verdict is Outcome.AGREES


def test_verify_counts_the_row_again(run: Path) -> None:
    assert stobatch.verify(run, sample=0).verdict is Outcome.AGREES


@pytest.mark.parametrize("document", ["certificates", "scores"])
@pytest.mark.parametrize("how", ["left out", "worse", "another reason"])
def test_a_row_that_is_left_out_or_changed_is_found(document: str, how: str, run: Path, tmp_path: Path) -> None:
    from support.tamperings import mend_manifest

    copy = shutil.copytree(run, tmp_path / "run")
    path = copy / f"{document}.json"
    content = json.loads(path.read_text())
    for holder in (content, *([content["certificates"]] if document == "scores" else [])):
        if how == "left out":
            del holder["prior"]
        elif how == "another reason":
            holder["prior"]["conflict"] = "nobody"
        elif "clean_accuracy" in holder["prior"]:
            holder["prior"]["clean_accuracy"]["count"] -= 1
        else:
            holder["prior"]["verified_accuracy"]["correct"]["count"] -= 1
    path.write_text(json.dumps(content))
    mend_manifest(copy)
    assert stobatch.verify(copy, sample=0).verdict is Outcome.DIFFERS
