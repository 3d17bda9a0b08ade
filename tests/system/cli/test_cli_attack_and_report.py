"""`stobatch attack` and `stobatch report`: their options, their refusals, and exit codes of refuted certificates."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet
import pytest

from stobatch.files import CONTENT, content_sha256, sha256_of


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished_run, tmp_path / "run"))


def listing(folder: Path) -> dict[str, tuple[int, bytes]]:
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): (file.stat().st_mtime_ns, file.read_bytes()) for file in files}


def written(run: Path) -> dict[str, Any]:
    document = json.loads((run / "attack.json").read_text())
    assert document.pop("schema") == "stobatch.attack"
    assert document.pop("version") == 1
    return document


def measured(document: dict[str, Any]) -> set[tuple[str, float, str]]:
    return {(row["attack"], row["radius"], row["norm"]) for row in document["accuracy"]}


def test_attack_prints_one_document_which_is_the_file_it_writes(cli, run):
    result = cli("attack", run, "--json")
    assert result.code == 0
    assert result.err == ""
    document = result.json()
    assert document == written(run)
    assert document["protocol"]["name"] == "adaptive"
    assert document["function"] == "single_pass"
    assert measured(document) == {(a, r, "linf") for a in ("fgsm", "madry", "worst") for r in (0.05, 0.2)}


def test_attack_prints_a_table_for_people_with_who_vouches(cli, run):
    result = cli("attack", run, "--attack", "fgsm", "--radius", 0.07)
    assert result.code == 0
    assert "REFUTED" in result.out  # by the audit at the end of the demo that made the run
    for cell in ("fgsm", "0.07", "adaptive"):
        assert cell in result.out


def test_attacks_and_radii_may_be_repeated(cli, run):
    arguments = ["--attack", "fgsm", "--attack", "mim", "--radius", 0.3, "--radius", 0.1]
    document = cli("attack", run, "--json", *arguments).json()
    assert measured(document) == {(a, r, "linf") for a in ("fgsm", "mim", "worst") for r in (0.1, 0.3)}
    assert [row["radius"] for row in document["accuracy"]] == [0.1] * 3 + [0.3] * 3


@pytest.mark.parametrize(("norm", "radius"), [("linf", 0.5), ("l2", 5.0), ("l1", 100.0)])
@pytest.mark.parametrize("turned", [False, True], ids=["radius first", "norm first"])
def test_a_radius_is_in_the_norm_that_comes_with_it_in_either_order(cli, run, norm, radius, turned):
    given = [["--radius", radius], ["--norm", norm]]
    arguments = [part for pair in (reversed(given) if turned else given) for part in pair]
    document = cli("attack", run, "--json", "--attack", "fgsm", *arguments).json()
    assert measured(document) == {("fgsm", radius, norm), ("worst", radius, norm)}


def test_settings_that_only_fit_together_are_set_in_either_order(cli, run):
    pairs = ["evaluation.norm=l2", "evaluation.radii=[5.0]"]
    for first, second in (pairs, pairs[::-1]):
        document = cli("attack", run, "--json", "--attack", "fgsm", "--set", first, "--set", second).json()
        assert measured(document) == {("fgsm", 5.0, "l2"), ("worst", 5.0, "l2")}


def test_steps_belong_to_the_protocol(cli, run):
    adaptive = cli("attack", run, "--json", "--steps", 7, "--attack", "ifgsm").json()["settings"]
    assert (adaptive["adaptive_steps"], adaptive["attack_steps"]) == (7, 2)
    published = cli("attack", run, "--json", "--steps", 7, "--protocol", "published").json()["settings"]
    assert (published["adaptive_steps"], published["attack_steps"]) == (2, 7)


def test_the_published_protocol_takes_the_papers_attacks(cli, run):
    document = cli("attack", run, "--json", "--protocol", "published", "--attack", "mim").json()
    assert document["protocol"]["name"] == "published"
    assert "without noise" in document["protocol"]["meaning"]
    assert measured(document) == {(a, r, "linf") for a in ("mim", "worst") for r in (0.05, 0.2)}


def test_the_vote_is_attacked_through_both_of_its_smooth_forms(cli, run):
    document = cli("attack", run, "--json", "--function", "vote", "--attack", "ifgsm", "--limit", 4).json()
    assert document["function"] == "vote"
    assert document["attacks"] == ["ifgsm:score", "ifgsm:vote"]
    assert document["rows"] == 4
    assert set(document["certified_at_attacked"]) == {"published", "corrected"}


def test_a_limit_takes_the_first_examples(cli, run):
    whole, few = (cli("attack", run, "--json", "--attack", "fgsm", *limit).json() for limit in ([], ["--limit", 7]))
    assert (whole["rows"], few["rows"]) == (60, 7)
    tables = [pyarrow.parquet.read_table(file) for file in run.glob("records/attack-*/*.parquet")]
    labels = {len(table): table["label"].to_pylist() for table in tables}
    assert labels[7] == labels[60][:7]


@pytest.fixture
def three_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from stobatch.evaluation import tables

    monkeypatch.setattr(tables, "CPU_TILE", 20)


@pytest.mark.usefixtures("three_parts")
def test_resuming_keeps_finished_parts_and_starting_again_does_not(cli, run):
    arguments = ["--json", "--attack", "madry", "--radius", 0.15]
    before = set(run.glob("records/attack-*"))
    first = cli("attack", run, *arguments).json()
    (folder,) = set(run.glob("records/attack-*")) - before
    parts = sorted(folder.iterdir())
    assert len(parts) == 3
    parts[1].unlink()
    times = {part: part.stat().st_mtime_ns for part in (parts[0], parts[2])}
    assert cli("attack", run, *arguments, "--resume").json() == first
    assert {part: part.stat().st_mtime_ns for part in times} == times
    assert parts[1].exists()
    assert cli("attack", run, *arguments).json() == first
    assert all(part.stat().st_mtime_ns != times[part] for part in times)


WRONG = {
    "unknown attack": (["--attack", "cw"], ["adaptive_attacks=cw", "Use one of fgsm"]),
    "not of the paper": (["--attack", "square", "--protocol", "published"], ["attacks=square", "fgsm, ifgsm"]),
    "unknown norm": (["--norm", "l3"], ["norm=l3", "linf, l2, l1"]),
    "no radius": (["--radius", "0"], ["radii=0", "above 0"]),
    "not a number": (["--radius", "nan"], ["radii=nan"]),
    "endless": (["--radius", "inf"], ["radii=inf"]),
    "endless in l2": (["--norm", "l2", "--radius", "inf"], ["radii=inf"]),
    "pixels": (["--radius", "8"], ["radii=8.0", "[-1, 1]"]),
    "wider than the range": (["--norm", "l2", "--radius", "60"], ["radius of 60 in l2", "wider than the whole"]),
    "no steps": (["--steps", "0"], ["adaptive_steps=0", "at least 1"]),
    "no published steps": (["--steps", "0", "--protocol", "published"], ["attack_steps=0", "at least 1"]),
    "empty norm": (["--norm", ""], ["norm=", "linf, l2, l1"]),
    "unknown protocol": (["--protocol", "honest"], ["no 'honest' to attack", "published, adaptive"]),
    "unknown function": (["--function", "logits"], ["no 'logits' to attack", "single_pass, vote"]),
    "no examples": (["--limit", "0"], ["limit=0"]),
    "a setting of training": (["--set", "training.steps=9"], ["'training.steps' belongs to the training"]),
    "unknown setting": (["--set", "evaluation.radius=1"], ["no setting 'radius'", "radii"]),
    "no device": (["--device", "quantum"], ["device 'quantum'"]),
    "unknown recipe": (["--recipe", "dmeo"], ["no recipe 'dmeo'"]),
    "two runs": (["--out", "elsewhere"], ["no run directory, or two"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_attack_is_refused_in_one_line_and_changes_no_file(cli, run, name):
    arguments, said = WRONG[name]
    before = listing(run)
    message = cli("attack", run, "--json", *arguments).refusal()
    for part in said:
        assert part in message
    assert listing(run) == before


def test_no_run_is_refused(cli, tmp_path):
    assert "stobatch train" in cli("attack", tmp_path / "nowhere").refusal()
    assert not list(tmp_path.iterdir())


# Reports.


def test_report_writes_into_the_run_and_says_where(cli, run):
    (run / "report.html").unlink()
    result = cli("report", run)
    assert result.code == 0
    assert result.out.split() == ["report:", str(run / "report.html")]
    page = (run / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    document = cli("report", run, "--json").json()
    assert document == {"report": str(run / "report.html"), "runs": [str(run)], "comparisons": []}
    assert (run / "report.html").read_text() == page, "the same files give the same bytes"


def test_report_writes_where_it_is_asked_to(cli, run, tmp_path):
    before = listing(run)
    assert cli("report", run, "--out", tmp_path / "sub" / "mine.html").code == 0
    assert (tmp_path / "sub" / "mine.html").stat().st_size > 10_000
    assert listing(run) == before


def test_pictures_can_be_left_out(cli, run, tmp_path):
    pages = []
    for arguments in ([], ["--no-images"]):
        out = tmp_path / f"{len(arguments)}.html"
        assert cli("report", run, "--out", out, *arguments).code == 0
        pages.append(out.read_text())
    with_pictures, without = (page.count("data:image/png") for page in pages)
    assert with_pictures > without == 0


def test_several_runs_need_a_place_for_their_report(cli, run, tmp_path):
    other = shutil.copytree(run, tmp_path / "other")
    before = listing(tmp_path)
    assert "--out FILE" in cli("report", run, other).refusal()
    assert listing(tmp_path) == before
    result = cli("report", run, other, "--out", tmp_path / "both.html", "--json")
    assert result.json()["runs"] == [str(run), str(other)]
    assert "2 runs compared" in (tmp_path / "both.html").read_text()


@pytest.mark.parametrize("several", [False, True], ids=["alone", "among others"])
def test_a_run_without_scores_says_how_to_get_them(cli, run, tmp_path, several):
    half = shutil.copytree(run, tmp_path / "half", ignore=shutil.ignore_patterns("scores.json"))
    before = listing(tmp_path)
    others = [run] if several else []
    message = cli("report", *others, half, "--out", tmp_path / "all.html").refusal()
    assert f"stobatch evaluate {half}" in message
    assert listing(tmp_path) == before


def test_a_report_that_cannot_be_written_is_one_line(cli, run, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder.html").mkdir()
    before = listing(tmp_path)
    refused = {tmp_path / "file" / "report.html": "cannot write", tmp_path / "folder.html": "is not a page"}
    for place, reason in refused.items():
        message = cli("report", run, "--out", place).refusal()
        assert reason in message
        assert str(place) in message
    assert listing(tmp_path) == before


def test_a_folder_that_is_no_run_has_no_report(cli, tmp_path):
    assert "is not a run" in cli("report", tmp_path).refusal()
    assert not list(tmp_path.iterdir())


# A proved certificate that is refuted stops a pipeline; a claimed one does not.


def forge(run: Path, change: Callable[[dict[str, list[Any]], list[dict[str, Any]]], None]) -> None:
    """Rewrite the certificates that `certify` left, given the vote's answers under attack."""
    (file,) = run.glob("records/certify-*/rows-*.parquet")
    tables = (pyarrow.parquet.read_table(part) for part in run.glob("records/attack-*/*.parquet"))
    attacked = next(table for table in tables if "madry:vote@0.05" in table.column_names)
    stored = pyarrow.parquet.read_table(file)
    columns = stored.to_pydict()
    change(columns, attacked.to_pylist())
    forged = arrow.table(columns)
    metadata = {**stored.schema.metadata, CONTENT.encode(): content_sha256(forged).encode()}
    pyarrow.parquet.write_table(forged.replace_schema_metadata(metadata), file)
    # As if `certify` itself had written them.
    manifest, name = json.loads((run / "manifest.json").read_text()), file.relative_to(run).as_posix()
    manifest["files"][name] = {"sha256": sha256_of(file), "size": file.stat().st_size}
    (run / "manifest.json").write_text(json.dumps(manifest))


def far_too_large(column: str) -> Callable[[dict[str, list[Any]], list[dict[str, Any]]], None]:
    """A label that the attacked vote, sure of itself, does not give, certified for a radius of 1."""

    def change(columns: dict[str, list[Any]], attacked: list[dict[str, Any]]) -> None:
        sure = [row for row, answer in enumerate(attacked) if not answer["madry:vote@0.05/abstain"]]
        assert len(sure) >= 6, "too few answers to refute anything"
        for name in ("corrected_radius", "published_largest_attack"):
            columns[name] = [0.0] * len(columns[name])
        for row in sure:
            columns["prediction"][row] = (attacked[row]["madry:vote@0.05"] + 1) % 10
            columns[column][row], columns["abstain"][row] = 1.0, False

    return change


@pytest.mark.parametrize(
    ("column", "status", "code"),
    [("corrected_radius", "proved", 1), ("published_largest_attack", "claimed", 0)],
)
def test_a_refuted_certificate_is_an_error_and_stops_only_if_it_was_proved(cli, run, column, status, code):
    assert cli("evaluate", run, "--resume", "--json").code == 0
    forge(run, far_too_large(column))
    result = cli("evaluate", run, "--resume", "--json")
    assert result.code == code
    errors = [flag for flag in result.json()["flags"] if flag["level"] == "error"]
    assert errors
    assert all(f"({status})" in flag["evidence"] for flag in errors)
    assert json.loads((run / "scores.json").read_text())["flags"] == result.json()["flags"], "the finding is kept"
    spoken = cli("evaluate", run, "--resume")
    assert spoken.code == code
    assert "Traceback" not in spoken.err


def test_radii_that_nothing_reaches_are_not_refuted(cli, run):
    """The twin: the same labels, certified for less than any attack tries."""

    def change(columns: dict[str, list[Any]], attacked: list[dict[str, Any]]) -> None:
        far_too_large("corrected_radius")(columns, attacked)
        columns["corrected_radius"] = [min(size, 0.049) for size in columns["corrected_radius"]]

    forge(run, change)
    result = cli("evaluate", run, "--resume", "--json")
    assert result.code == 0
    assert not [flag for flag in result.json()["flags"] if flag["level"] == "error"]
