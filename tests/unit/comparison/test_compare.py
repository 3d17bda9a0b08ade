"""Methods side by side: the table says what the runs say, nothing is done twice, and bad input changes nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import pytest
import torch
from compared_runs import NAMES, RADII, files, small
from scipy import stats
from support.small_prior import write_small_prior

import stobatch
from stobatch.comparison import compare as comparing
from stobatch.errors import RunError, SettingError, StobatchError
from stobatch.interrupts import Interrupted
from stobatch.models import build
from stobatch.runs import Run

SEEDS = (1, 2)


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read only."""
    out = tmp_path_factory.mktemp("made") / "comparison"
    torch.set_num_threads(1)
    stobatch.compare(small(), out, seeds=SEEDS, quiet=True)
    return out


@pytest.fixture
def out(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "comparison"))


def document(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "comparison.json").read_text())
    assert found.pop("schema") == "stobatch.comparison"
    assert found.pop("version") == 1
    return found


def records(out: Path, row: dict[str, Any], kind: str) -> dict[str, Any]:
    return {seed: json.loads((out / run / f"{kind}.json").read_text()) for seed, run in row["runs"].items()}


def test_there_is_a_row_for_each_method_and_function(made: Path) -> None:
    found = document(made)
    assert [(row["name"], row["function"]) for row in found["rows"]] == [
        (NAMES[0], "single_pass"), (NAMES[1], "single_pass"), (NAMES[1], "vote"), (NAMES[2], "single_pass"),
    ]  # fmt: skip
    assert (found["norm"], found["input_range"], found["radii"], found["seeds"]) == (
        "linf",
        "[-1, 1]",
        [0.2, 0.05],
        [1, 2],
    )
    assert sorted(path.name for path in made.iterdir() if path.is_dir()) == [
        "published-eps-3", "sound-eps-3", "vanilla-adversarial",
    ]  # fmt: skip


def check_spread(spread: dict[str, Any], values: dict[str, float]) -> None:
    assert spread["per_seed"] == values
    numbers = list(values.values())
    assert (spread["min"], spread["max"]) == (min(numbers), max(numbers))
    assert spread["mean"] == pytest.approx(mean(numbers))
    assert spread["stddev"] == pytest.approx(stdev(numbers))


def test_accuracies_are_those_of_the_runs_own_scores(made: Path) -> None:
    for row in document(made)["rows"]:
        scores = records(made, row, "scores")
        assert set(scores) == {"1", "2"}
        own = {s: [e for e in found["under_attack"] if e["function"] == row["function"]] for s, found in scores.items()}
        check_spread(row["clean"], {seed: entries[0]["clean_accuracy"]["value"] for seed, entries in own.items()})
        assert {(entry["protocol"], entry["radius"]) for entry in row["attacked"]} == {
            (protocol, radius) for protocol in ("published", "adaptive") for radius in RADII
        }
        for entry in row["attacked"]:
            values = {
                seed: next(
                    share["value"]
                    for one in entries
                    if one["protocol"]["name"] == entry["protocol"]
                    for share in one["accuracy"]
                    if (share["attack"], share["radius"]) == ("worst", entry["radius"])
                )
                for seed, entries in own.items()
            }
            check_spread(entry, values)


def test_certified_accuracies_are_of_the_images_that_were_attacked_and_carry_their_status(made: Path) -> None:
    found = {(row["name"], row["function"]): row for row in document(made)["rows"]}
    rules = {key: {(e["rule"], e["status"]) for e in row["certified"]} for key, row in found.items()}
    assert rules == {
        (NAMES[0], "single_pass"): {("bounds", "proved")},
        (NAMES[1], "single_pass"): set(),
        (NAMES[1], "vote"): {("published", "claimed"), ("corrected", "proved")},
        (NAMES[2], "single_pass"): set(),
    }
    for row in found.values():
        for entry in row["certified"]:
            shares = {
                seed: certified_share(made / run, entry["rule"], entry["radius"], row["test_examples"])
                for seed, run in row["runs"].items()
            }
            check_spread(entry, shares)
            assert (entry["norm"], entry["input_range"]) == ("linf", "[-1, 1]")
            assert entry["test_examples"] == row["test_examples"] == (10 if row["function"] == "vote" else 40)


def certified_share(path: Path, rule: str, radius: float, rows: int) -> float:
    """From the rows of `certify`: right, certified by the rule, and not abstaining where that is proved."""
    summary = Run(path).read("certificates")
    assert summary["rows"] == 40
    made_for = {"config_hash": summary["config_hash"], "weights_sha256": summary["weights_sha256"]}
    records = Run(path).records("certify", expected_rows=40, **made_for).read()
    (kind,) = (kind for kind in summary["kinds"] if kind["name"] == rule)
    held = [
        label == prediction and size >= radius and not (abstains and kind["status"] == "proved")
        for label, prediction, size, abstains in zip(
            *(records[name][:rows] for name in ("label", "prediction", kind["column"], "abstain")), strict=True
        )
    ]
    return sum(held) / rows


def test_each_row_has_its_guarantee_under_the_key_of_its_status_alone(made: Path) -> None:
    by_name = {row["name"]: row["guarantees"] for row in document(made)["rows"]}
    for guarantees in by_name.values():
        assert [guarantee["seeds"] for guarantee in guarantees] == [[1, 2]]
    proved, claimed, none = (by_name[name][0] for name in NAMES)
    for guarantee, otherwise in ((proved, "proved"), (claimed, "claimed")):
        assert (guarantee["status"], guarantee["void_reason"]) == ("void", "public seed")
        assert guarantee["status_with_secret_seeds"] == otherwise
    assert 2.9 < proved["void_epsilon"] <= 3
    assert (proved["void_delta"], proved["neighbours"]) == (1e-3, "add-or-remove-one")
    assert claimed["void_epsilon"] == 3
    assert claimed["objections"]
    assert none["status"] == "none"
    assert not [key for key in none if "epsilon" in key]
    assert not [key for key in claimed if "epsilon" in key and not key.startswith("void")]
    labels = [row["label"] for row in document(made)["rows"]]
    assert labels[1] == "published ε=3 (void: public seed), single pass"
    assert labels[3] == "vanilla_adversarial (no privacy), single pass"


def test_seconds_and_memory_are_those_of_the_trainings(made: Path) -> None:
    for row in document(made)["rows"]:
        trainings = records(made, row, "training")
        check_spread(row["training_seconds"], {s: t["seconds_since_last_start"] for s, t in trainings.items()})
        check_spread(row["peak_memory_mb"], {s: t["peak_memory_mb"] for s, t in trainings.items()})
        assert row["peak_memory_of"] == ["process"]
        assert row["test_examples"] == (10 if row["function"] == "vote" else 40)


def test_t_tests_are_those_of_scipy_between_every_two_rows(made: Path) -> None:
    found = document(made)
    measured = {row["label"]: {("clean", None): row["clean"]["per_seed"]} for row in found["rows"]}
    for row in found["rows"]:
        measured[row["label"]] |= {(e["protocol"], e["radius"]): e["per_seed"] for e in row["attacked"]}
    assert len(found["t_tests"]) == 6 * 5
    assert found["t_tests_below_0.05_by_chance"] == 1.5
    assert found["t_tests_below_0.05"] == sum(test["t_test"]["p_value"] < 0.05 for test in found["t_tests"])
    compared = 0
    for test in found["t_tests"]:
        key = (test["measure"], test["radius"])
        first, second = (np.array(list(measured[test[which]][key].values())) for which in ("first", "second"))
        assert test["t_test"]["paired"]
        assert test["t_test"]["difference"] == pytest.approx(first.mean() - second.mean())
        if np.ptp(first - second) > 1e-9:
            compared += 1
            assert test["t_test"]["p_value"] == pytest.approx(stats.ttest_rel(first, second).pvalue)
    assert compared > 5


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained twice with secret seeds. Read only."""
    out = tmp_path_factory.mktemp("secret") / "comparison"
    torch.set_num_threads(1)
    # A row's own seed does not matter.
    rows = {name: config.replace(seed=7) for name, config in small(*NAMES[:2]).items()}
    stobatch.compare(rows, out, repeats=2, quiet=True)
    return out


def test_without_public_seeds_they_are_secret_and_guarantees_hold(secret: Path) -> None:
    found = document(secret)
    assert (found["public_seeds"], found["seeds"]) == (False, [1, 2])
    runs = [secret / run for row in found["rows"] for run in row["runs"].values()]
    assert {run.name for run in runs} == {"secret-1", "secret-2"}
    assert {json.loads((run / "config.json").read_text())["config"]["seed"] for run in runs} == {None}
    roots = {(run / "private" / "seeds.json").read_text() for run in runs}
    assert len(roots) == 4
    assert [row["guarantees"][0]["status"] for row in found["rows"]] == ["proved", "claimed", "claimed"]
    page = (secret / "comparison.html").read_text()
    assert "trainings 1, 2 (secret seeds)" in page
    assert "seed 1" not in page


def test_secret_seeds_pair_with_none_but_two_functions_of_one_model_do(secret: Path) -> None:
    found = document(secret)
    rows = {row["label"]: row for row in found["rows"]}
    assert len(found["t_tests"]) == 3 * 5
    for test in found["t_tests"]:
        one, other = rows[test["first"]], rows[test["second"]]
        assert test["t_test"]["paired"] == (one["name"] == other["name"])


def test_a_second_call_with_secret_seeds_only_reads(secret: Path) -> None:
    before = files(secret)
    stobatch.compare(small(*NAMES[:2]), secret, repeats=2, quiet=True)
    changed = {name for name, found in files(secret).items() if found != before.get(name)}
    assert changed <= {"comparison.json", "comparison.html", "comparison.svg"}


def test_a_second_call_only_reads(out: Path) -> None:
    before = files(out)
    assert stobatch.compare(small(), out, seeds=SEEDS, quiet=True).to_dict() == document(out)
    after = files(out)
    changed = {name for name in after if after[name] != before.get(name)}
    assert changed <= {"comparison.json", "comparison.html", "comparison.svg"}
    assert {name: content for name, (_, content) in after.items()} == {n: c for n, (_, c) in before.items()}


def test_one_seed_gives_no_t_test(out: Path) -> None:
    found = stobatch.compare(small(), out, seeds=(2,), quiet=True).to_dict()
    assert found["t_tests"] == []
    assert found["seeds"] == [2]
    assert {row["clean"]["stddev"] for row in found["rows"]} == {None}


def test_other_radii_measure_again_and_train_nothing(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "train", None)
    rows = small(NAMES[0], NAMES[1], evaluation__radii=[0.1], certification__attack_radius=0.1)
    found = stobatch.compare(rows, out, seeds=(1,), quiet=True).to_dict()
    for row in found["rows"]:
        assert {entry["radius"] for entry in (*row["attacked"], *row["certified"])} == {0.1}
        certificates = records(out, row, "certificates")["1"]
        assert {share["radius"] for shares in certificates["certified_accuracy"].values() for share in shares} == {0.1}
        assert records(out, row, "scores")["1"]["certificates"] == {
            key: value for key, value in certificates.items() if key not in ("schema", "version")
        }


def test_new_certificates_get_new_scores(out: Path) -> None:
    found = stobatch.compare(small(NAMES[0], certification__selection_draws=7), out, seeds=(1,), quiet=True).to_dict()
    scores = records(out, found["rows"][0], "scores")["1"]
    assert scores["certificates"]["settings"]["selection_draws"] == 7


@pytest.mark.parametrize("verb", ["train", "certify", "evaluate"])
def test_an_interrupted_comparison_continues_to_the_same_numbers(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    out, real, calls = tmp_path / "comparison", getattr(comparing, verb), []

    def interrupted(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise Interrupted
        return real(*arguments, **options)

    rows = small(NAMES[0], NAMES[2]) if verb != "certify" else small(NAMES[0])
    with monkeypatch.context() as patch:
        patch.setattr(comparing, verb, interrupted)
        with pytest.raises(Interrupted):
            stobatch.compare(rows, out, seeds=SEEDS, quiet=True)
    assert not (out / "comparison.json").exists()
    kept = files(out / "sound-eps-3" / "seed-1")
    assert "model.safetensors" in kept
    found = stobatch.compare(rows, out, seeds=SEEDS, quiet=True).to_dict()
    assert {name: files(out / "sound-eps-3" / "seed-1")[name] for name in kept} == kept
    whole = {row["label"]: row for row in document(made)["rows"]}
    for row in found["rows"]:
        for part in ("clean", "attacked", "certified", "guarantees"):
            assert row[part] == whole[row["label"]][part]


def test_a_training_that_was_killed_before_its_end_is_finished(made: Path, out: Path) -> None:
    run = out / "published-eps-3" / "seed-1"
    for name in ("model.safetensors", "training.json", "certificates.json", "scores.json"):
        (run / name).unlink()
    stobatch.compare(small(), out, seeds=SEEDS, quiet=True)
    for row, whole in zip(document(out)["rows"], document(made)["rows"], strict=True):
        assert all(row[part] == whole[part] for part in ("clean", "attacked", "certified"))


def test_an_error_is_not_swallowed_and_what_is_done_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = comparing.train

    def failing(config: Any, out: Path, **options: Any) -> Any:
        if config.method.name == "stobatch":
            raise RunError("the disk is full.", remedy="Free some space.")
        return real(config, out, **options)

    monkeypatch.setattr(comparing, "train", failing)
    with pytest.raises(RunError, match="the disk is full"):
        stobatch.compare(small(NAMES[0], NAMES[1]), tmp_path / "out", quiet=True)
    assert (tmp_path / "out" / "sound-eps-3" / "secret-1" / "scores.json").exists()
    assert not (tmp_path / "out" / "comparison.json").exists()


def test_a_directory_with_another_training_is_refused_and_unchanged(out: Path) -> None:
    before = files(out)
    with pytest.raises(RunError, match="never overwrites") as caught:
        stobatch.compare(small(training__steps=4), out, seeds=SEEDS, quiet=True)
    assert all((caught.value.what, caught.value.why, caught.value.remedy))
    assert files(out) == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"configs": {}}, "nothing to compare"),
        ({"configs": {"...": small()[NAMES[0]]}}, "names no folder"),
        ({"configs": dict.fromkeys(("A ε", "a eps"), small()[NAMES[0]])}, "would share the folder"),
        ({"seeds": ()}, "not a set of seeds"),
        ({"seeds": (1, 1)}, "not a set of seeds"),
        ({"seeds": (-1,)}, "not a set of seeds"),
        ({"networks": {"other": None}}, "no row 'other'"),
        ({"device": "tpu9"}, "tpu9"),
        ({"configs": small(NAMES[2], method__batch_size=90)}, "do not fit 120"),
        ({"configs": small(NAMES[1], evaluation__norm="l2")}, "certifies in linf"),
        ({"configs": small(NAMES[0], evaluation__norm="l1", evaluation__radii=[1e6])}, "wider than the whole"),
        ({"configs": small(NAMES[0], evaluation__functions=["vote"])}, "no vote to evaluate"),
        ({"configs": small(NAMES[2], evaluation__functions=["vote"])}, "no vote to evaluate"),
    ],
)
def test_bad_input_leaves_nothing_behind(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(StobatchError, match=said):
        stobatch.compare(**{"configs": small(), "out": tmp_path / "out", "quiet": True, **options})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "changes",
    [{"evaluation.attack_steps": 7}, {"evaluation.radii": [0.2]}, {"data.test_limit": 39}, {"certification.limit": 3}],
    ids=str,
)
def test_rows_that_are_measured_in_different_ways_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    rows = small(NAMES[0], NAMES[2])
    rows[NAMES[2]] = rows[NAMES[2]].override_all(changes)
    with pytest.raises(SettingError, match=f"Give all of them the same {next(iter(changes))}"):
        stobatch.compare(rows, tmp_path / "out", quiet=True)
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_no_place_for_a_comparison(out: Path) -> None:
    run = out / "sound-eps-3" / "seed-1"
    with pytest.raises(RunError, match="is a run"):
        stobatch.compare(small(), run, quiet=True)


def handed_over(shift: int = 0, tested: int = 0) -> stobatch.Dataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.rand(160, 1, 28, 28, generator=generator) * 2 - 1
    labels = torch.arange(160) % 10
    return stobatch.from_tensors(
        inputs[:120], (labels[:120] + shift) % 10, inputs[120:], (labels[120:] + tested) % 10, num_classes=10
    )


def test_data_may_be_handed_over_and_other_data_are_refused(tmp_path: Path) -> None:
    rows, out = small(NAMES[0], data__name="tensors", data__train_limit=None, data__test_limit=None), tmp_path / "out"
    first = stobatch.compare(rows, out, dataset=handed_over(), quiet=True)
    before = files(out)
    for other in (handed_over(shift=1), handed_over(tested=1)):
        with pytest.raises(RunError, match=r"other (test )?data"):
            stobatch.compare(rows, out, dataset=other, quiet=True)
        assert files(out) == before
    assert stobatch.compare(rows, out, dataset=handed_over(), quiet=True) == first


def test_an_audit_of_one_seed_tells_the_seeds_apart(out: Path) -> None:
    run = out / "published-eps-3" / "seed-2"
    finding = {
        "about": "privacy",
        "verdict": "refuted",
        "statement": "told apart",
        "evidence": "evidence/x.json",
        "instrument": "many_runs",
        "claim": "claimed",
        "claim_status": "claimed",
        "threat_model": "all",
        "attack": "any",
        "confidence": 0.95,
        "details": {"claimed_epsilon": 3.0, "claimed_delta": 0.0, "neighbours": "replace-one", "bounds": []},
    }
    training_hash = json.loads((run / "config.json").read_text())["training_hash"]
    written = {"schema": "stobatch.audit", "version": 1, "training_hash": training_hash, "verdict": "refuted"}
    (run / "audit.json").write_text(json.dumps({**written, "findings": [finding]}))
    found = stobatch.compare(small(), out, seeds=SEEDS, quiet=True).to_dict()
    row = next(row for row in found["rows"] if row["name"] == NAMES[1])
    assert [(g["seeds"], g["status"]) for g in row["guarantees"]] == [([1], "void"), ([2], "refuted")]
    assert "void_epsilon" not in row["guarantees"][1]
    assert row["label"] == "published ε=3 (void: public seed / refuted), single pass"


def test_a_row_starts_from_its_prior_and_one_that_cannot_is_refused(tmp_path: Path) -> None:
    config = small(NAMES[0])[NAMES[0]]
    network = build(config.model, (1, 28, 28), 10, torch.Generator().manual_seed(77))
    priors = {"from shapes": write_small_prior(tmp_path / "shapes", network)}
    rows = {"alone": config, "from shapes": config}
    for _ in range(2):  # the second call only reads
        stobatch.compare(rows, tmp_path / "out", priors=priors, quiet=True)
    found = [stobatch.load(tmp_path / "out" / name / "secret-1").guarantee.prior for name in ("alone", "from-shapes")]
    assert found[0] is None
    assert found[1] is not None
    for wrong, said in (({NAMES[1]: priors["from shapes"]}, "does not start from a prior"), ({"x": "y"}, "no row 'x'")):
        with pytest.raises(SettingError, match=said):
            stobatch.compare(small(NAMES[1]), tmp_path / "no", priors=wrong, quiet=True)
    assert not (tmp_path / "no").exists()
