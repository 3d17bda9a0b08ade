"""Every verb from beginning to end on the small recipe."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file

from stobatch import paper
from stobatch.runs import Run

DATE = re.compile(r"\d{4}-\d\d-\d\d(T\d\d:\d\d:\d\dZ)?")


def without_clock(document: dict[str, Any]) -> dict[str, Any]:
    """A document without what a clock writes."""
    clocks = ("seconds", "date", "sha256", "size")  # a digest of seconds is a clock, too
    rest = {key: value for key, value in document.items() if not key.startswith(clocks)}
    return {key: without_clock(value) if isinstance(value, dict) else value for key, value in rest.items()}


PAPER_NETWORK = ["--set", "model.architecture=mnist_cnn"]


def test_plan_prints_every_number_with_its_place_in_the_paper(cli, tiny):
    text = cli("plan", *tiny, *PAPER_NETWORK)
    assert text.code == 0
    assert text.err == ""
    for cell in ("Δ_R", "4,950", "d(β + 2)", "Lemma 2", "γ_x", "165", "Δ_L2", "Theorem 4", "claimed in total"):
        assert cell in text.out


def test_plan_as_json_is_one_document_with_the_same_numbers(cli, tiny):
    result = cli("plan", "--json", *tiny, *PAPER_NETWORK)
    document = result.json()
    assert result.err == ""
    rows = {row["symbol"]: row["value"] for row in document["rows"]}
    # By hand: d = 25, beta = 14^2, m = 30, |h| = 16.
    assert rows["Δ_R"] == 25 * (14**2 + 2)
    assert rows["γ_x"] == pytest.approx(4950 / 30)
    assert rows["Δ_L2"] == 32
    assert rows["N/m"] == 4
    assert rows["ε1"] * (1 + 30 / 4950 + 15 / 4950) + rows["ε2"] == pytest.approx(1.0)
    assert document["guarantee"]["claimed_epsilon"] == pytest.approx(1.0)


def test_plan_writes_the_plan_where_it_is_asked_to(cli, tiny, tmp_path):
    file = tmp_path / "plans" / "plan.json"
    printed = cli("plan", "--json", "--out", file, *tiny).json()
    written = json.loads(file.read_text())
    assert written.pop("schema") == "stobatch.plan"
    assert written.pop("version") == 1
    assert written == printed


@pytest.mark.parametrize("name", ["paper.mnist", "paper.cifar10"])
def test_every_recipe_can_be_planned_without_its_data(cli, name):
    assert cli("plan", "--recipe", name, "--json").json()["guarantee"]["status"] == "claimed"


def test_train_writes_a_run_and_reports_it(cli, tiny, tmp_path):
    result = cli("train", "--out", tmp_path / "run", "--seed", 5, "--json", *tiny)
    document = result.json()
    assert result.err == ""
    assert document["run"] == str(tmp_path / "run")
    assert document["training"]["steps"] == 4
    assert [row["step"] for row in document["training"]["history"]] == [2, 4]
    config = Run(tmp_path / "run").read("config")
    assert config["config"]["seed"] == 5
    assert config["config"]["training"]["steps"] == 4
    assert config["training_hash"] == document["training_hash"]
    for file in ("config.json", "plan.json", "training.json", "model.safetensors", "private/noise.safetensors"):
        assert (tmp_path / "run" / file).is_file()


def test_train_shows_progress_on_standard_error_only(cli, tiny, tmp_path):
    result = cli("train", "--out", tmp_path / "run", *tiny)
    assert result.code == 0
    assert "4 of 4" in result.err
    assert "4 of 4" not in result.out
    assert "trained" in result.out
    assert "of 60 held-out test images" in result.out


def test_another_seed_is_another_model_and_the_same_seed_the_same(cli, tiny, tmp_path):
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        assert cli("train", "--out", tmp_path / name, "--seed", seed, "--json", *tiny).code == 0
    a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert not any(torch.equal(a[key], c[key]) for key in a if a[key].ndim >= 2)


def test_train_resume_alone_keeps_the_settings_of_the_run(cli, tiny, tmp_path):
    out = tmp_path / "run"
    first = cli("train", "--out", out, "--seed", 5, "--json", *tiny).json()
    before = load_file(out / "model.safetensors")
    (out / "model.safetensors").unlink()
    again = cli("train", "--out", out, "--resume", "--json").json()
    assert again["training_hash"] == first["training_hash"]
    assert again["training"]["history"] == first["training"]["history"]
    after = load_file(out / "model.safetensors")
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_a_run_is_not_overwritten_without_resume(cli, tiny, finished_run):
    message = cli("train", "--out", finished_run, *tiny).refusal()
    assert "already holds this run" in message
    assert "--resume" in message


def test_other_settings_do_not_touch_a_run(cli, tiny, finished_run):
    before = {file: file.read_bytes() for file in finished_run.rglob("*") if file.is_file()}
    message = cli("train", "--out", finished_run, "--resume", *tiny, "--set", "training.steps=5").refusal()
    assert "was started with other settings" in message
    message = cli("train", "--out", finished_run, "--recipe", "paper.demo", "--resume").refusal()
    assert "Choose another --out" in message
    assert before == {file: file.read_bytes() for file in finished_run.rglob("*") if file.is_file()}


def toml(values: dict[str, Any]) -> str:
    lines, sections = [], []
    for key, value in values.items():
        if isinstance(value, dict):
            sections += ["", f"[{key}]", toml(value)]
        elif value is not None:
            lines.append(f"{key} = {json.dumps(value)}")
    return "\n".join(lines + sections)


@pytest.mark.parametrize("suffix", ["toml", "json"])
def test_a_configuration_file_gives_the_same_plan_as_the_recipe(cli, tiny, tmp_path, finished_run, suffix):
    values = Run(finished_run).read("config")["config"]
    file = tmp_path / f"mine.{suffix}"
    file.write_text(toml(values) if suffix == "toml" else json.dumps(values))
    assert cli("plan", "--config", file, "--json").json() == cli("plan", "--json", *tiny).json()
    overridden = cli("plan", "--config", file, "--json", "--set", "method.total_epsilon=3").json()
    assert overridden["guarantee"]["claimed_epsilon"] == pytest.approx(3.0)


def test_train_takes_a_configuration_file_and_a_seed(cli, tmp_path, finished_run):
    values = Run(finished_run).read("config")["config"]
    file = tmp_path / "mine.toml"
    file.write_text(toml(values | {"seed": 3}))
    assert "--seed 3" in cli("train", "--config", file, "--out", tmp_path / "a", "--json").refusal()
    assert cli("train", "--config", file, "--seed", 4, "--out", tmp_path / "b", "--json").code == 0
    assert Run(tmp_path / "b").read("config")["config"]["seed"] == 4


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    """A trained run without certificates or scores."""
    copy = tmp_path / "run"
    shutil.copytree(finished_run, copy, ignore=shutil.ignore_patterns("records", "certificates.json", "scores.json"))
    return copy


def test_certify_writes_a_row_per_test_example(cli, run):
    result = cli("certify", run, "--json")
    document = result.json()
    assert result.err == ""
    assert document["rows"] == 60
    assert document["settings"]["noise_draws"] == 50
    parts = list((run / "records").glob("certify-*/rows-*.parquet"))
    assert len(parts) == 1
    rows = pyarrow.parquet.read_table(parts[0]).to_pydict()
    assert rows["index"] == list(range(60))
    right = sum(a == b for a, b in zip(rows["prediction"], rows["label"], strict=True))
    assert document["verified_accuracy"]["correct"]["count"] == right
    robust = sum(
        a == b and r >= 0.2 for a, b, r in zip(rows["prediction"], rows["label"], rows["corrected_radius"], strict=True)
    )
    assert document["certified_accuracy"]["corrected"][1]["count"] == robust
    assert Run(run).read("certificates") == document


def test_certify_shows_a_table_and_progress_apart(cli, run):
    result = cli("certify", run)
    assert result.code == 0
    assert "60 of 60" in result.err
    assert "60 of 60" not in result.out
    assert "l∞ over [-1, 1]" in result.out
    assert "claimed" in result.out
    assert "proved" in result.out


def test_limit_and_set_change_what_is_certified_and_not_the_model(cli, run):
    small = cli("certify", run, "--limit", 7, "--json").json()
    other = cli("certify", run, "--limit", 7, "--set", "certification.noise_draws=30", "--json").json()
    assert small["rows"] == other["rows"] == 7
    assert other["settings"]["noise_draws"] == 30
    assert small["config_hash"] != other["config_hash"]
    assert small["training_hash"] == other["training_hash"] == Run(run).read("config")["training_hash"]
    assert len(list((run / "records").glob("certify-*"))) == 2


FOLDERS = {"certify": "certify", "evaluate": "attack"}


def test_certify_and_evaluate_are_repeatable_and_resume_reads_what_is_there(cli, run):
    for verb in ("certify", "evaluate"):
        first = cli(verb, run, "--json").json()
        part = next((run / "records").glob(f"{FOLDERS[verb]}-*/rows-*.parquet"))
        rows, written = pyarrow.parquet.read_table(part), part.stat().st_mtime_ns
        resumed = cli(verb, run, "--resume", "--json").json()
        assert part.stat().st_mtime_ns == written
        repeated = cli(verb, run, "--json").json()
        assert part.stat().st_mtime_ns > written
        assert pyarrow.parquet.read_table(part).equals(rows)
        assert without_clock(first) == without_clock(resumed) == without_clock(repeated)


def test_evaluate_reports_attacks_beside_certificates(cli, run):
    alone = cli("evaluate", run, "--json").json()
    assert alone["certificates"] is None
    cli("certify", run, "--json")
    result = cli("evaluate", run, "--limit", 20, "--json")
    document = result.json()
    assert result.err == ""
    assert document["rows"] == 20
    assert document["certificates"] == Run(run).read("certificates")
    tables = [(under["protocol"]["name"], under["function"]) for under in document["under_attack"]]
    assert tables == [(p, f) for f in ("single_pass", "vote") for p in ("published", "adaptive")]
    for under in document["under_attack"]:
        assert under["rows"] == (20 if under["function"] == "single_pass" else 10)
        for radius in (0.05, 0.2):
            counts = {row["attack"]: row["count"] for row in under["accuracy"] if row["radius"] == radius}
            assert set(counts) == {*under["attacks"], "worst"}
            assert counts["worst"] <= min(counts.values())
        for row in under["accuracy"]:
            assert (row["norm"], row["input_range"]) == ("linf", "[-1, 1]")
            assert (row["protocol"], row["function"]) == (under["protocol"]["name"], under["function"])
    for gap in document["gaps"]["single_pass"]:
        assert gap["gap"]["value"] == pytest.approx(gap["published"]["value"] - gap["adaptive"]["value"])
    text = cli("evaluate", run, "--limit", 20)
    assert "published protocol" in text.out
    assert "adaptive protocol" in text.out
    assert "20 of 20" in text.err
    assert "Certified accuracy" in text.out


def test_demo_writes_a_report_says_where_and_resumes_to_the_same_result(cli, tiny, finished_run):
    # The first evaluation knew no audit yet: from the second on, scores quote what it found.
    result = cli("demo", "--out", finished_run, *tiny)
    assert result.code == 0
    assert f"report: {finished_run / 'report.html'}" in result.out
    scores, page = Run(finished_run).read("scores"), (finished_run / "report.html").read_text()
    for under in scores["under_attack"]:
        for row in under["accuracy"]:
            assert f"{100 * row['value']:.1f}" in page
    before = {
        file.relative_to(finished_run): (file.read_bytes(), file.stat().st_mtime_ns)
        for file in finished_run.rglob("*")
        if file.is_file()
    }
    result = cli("demo", "--out", finished_run, "--json", *tiny)
    assert result.err == ""
    assert result.json()["rows"] == 60
    for name, (content, written) in before.items():
        file = finished_run / name
        if name.suffix == ".json":
            assert without_clock(json.loads(file.read_bytes())) == without_clock(json.loads(content)), name
        elif name.name == "report.html":
            assert DATE.sub("", file.read_text()) == DATE.sub("", content.decode()), name
        else:
            assert file.read_bytes() == content, name
        if name.suffix == ".parquet" or name.name == "model.safetensors" or "checkpoints" in name.parts:
            assert file.stat().st_mtime_ns == written, f"{name} was made again"


def test_where_finds_a_theorem_in_the_code(cli):
    result = cli("where", "Theorem 5")
    assert result.code == 0
    (item,) = cli("where", "Theorem 5", "--json").json()["items"]
    source = Path(paper.__file__).parent.parent / item["file"]
    line = source.read_text().splitlines()[item["line"] - 1]
    assert item["code"].endswith("published_robustness_epsilon")
    assert line.startswith("@implements") or "def published_robustness_epsilon" in line
    assert f"src/{item['file']}:{item['line']}" in result.out
    assert item["verdict"] in " ".join(result.out.split())


@pytest.mark.parametrize(
    ("asked", "found"), [("theorem  5", "Theorem 5"), ("equation 13", "Eq. 13"), ("thm. 4", "Theorem 4")]
)
def test_where_reads_names_as_people_write_them(cli, asked, found):
    assert [item["name"] for item in cli("where", asked, "--json").json()["items"]] == [found]


def test_where_alone_lists_everything(cli):
    names = [item["name"] for item in cli("where", "--json").json()["items"]]
    expected = {f"Theorem {n}" for n in range(1, 6)} | {f"Lemma {n}" for n in range(1, 6)}
    assert expected | {"Algorithm 1", "Algorithm 3", "Algorithm 4", "Corollary 1", "Definition 1"} <= set(names)
    assert len(names) == len(set(names))
    text = cli("where").out
    assert all(f"{name}: src/stobatch/" in text for name in names)


def test_the_data_may_have_moved_since_the_training(cli, tiny, tmp_path):
    """A run trained on one machine is certified on another: the data root is no part of what was trained."""
    from PIL import Image

    for part, count in (("train", 60), ("test", 6)):
        for index in range(count):
            folder = tmp_path / "here" / part / "ab"[index % 2]
            folder.mkdir(parents=True, exist_ok=True)
            # No test image is a training image: they are darker by one to six.
            shade = 40 + 150 * (index % 2) - (part == "test") * (1 + index)
            Image.new("L", (28, 28), shade).save(folder / f"{index}.png")
    images = ["--set", "data.name=image_folder", "--set", "data.train_limit=60", "--set", "data.test_limit=6"]
    here = ["--set", f"machine.data_root={tmp_path / 'here'}"]
    trained = cli("train", "--out", tmp_path / "run", *tiny, *images, *here)
    assert trained.code == 0, trained.err
    (tmp_path / "here").rename(tmp_path / "there")
    assert cli("certify", tmp_path / "run").code == 2
    for verb in ("certify", "evaluate"):
        done = cli(verb, tmp_path / "run", "--set", f"machine.data_root={tmp_path / 'there'}", "--json")
        assert done.code == 0, done.err
        assert done.json()["rows"] == 6
