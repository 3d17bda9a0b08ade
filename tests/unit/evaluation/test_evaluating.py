"""`attack`, `evaluate` and `report` on a tiny run: what they write, what they refuse, and every number once more."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from samples import evaluate_as, seeded
from scipy import stats
from torch import nn

import stobatch
from stobatch import RunConfig, StobatchError, data, from_layers, from_tensors
from stobatch.attacks import ATTACKS
from stobatch.data import Dataset
from stobatch.evaluation.statistics import paired_difference
from stobatch.models import Network
from stobatch.reporting import report as html

Row = dict[str, Any]


def read(run: Path, name: str) -> dict[str, Any]:
    return json.loads((run / f"{name}.json").read_text())


def rows_of(folder: Path) -> list[Row]:
    return [row for part in sorted(folder.glob("*.parquet")) for row in pyarrow.parquet.read_table(part).to_pylist()]


def tables(run: Path) -> dict[tuple[str, str], list[Row]]:
    """The four tables, told apart by their columns: only votes abstain, only a white-box single pass has gradients."""
    found = {}
    for folder in run.glob("records/attack-*"):
        rows = rows_of(folder)
        function = "vote" if "abstain" in rows[0] else "single_pass"
        adaptive = "gradient" in rows[0] or any(":" in name for name in rows[0])
        found["adaptive" if adaptive else "published", function] = rows
    return found


# Every number from the records alone.


def share(flags: list[bool]) -> dict[str, Any]:
    count, total = sum(flags), len(flags)
    interval = stats.binomtest(count, total).proportion_ci(0.95, method="exact")
    return {
        "value": count / total,
        "count": count,
        "total": total,
        "low": pytest.approx(interval.low, abs=1e-9),
        "high": pytest.approx(interval.high, abs=1e-9),
    }


def right(row: Row, names: list[str], radius: float) -> bool:
    return all(row[f"{name}@{radius:g}"] == row["label"] for name in names)


def sound(row: Row, names: list[str], radius: float, rule: str) -> bool:
    return right(row, names, radius) and all(
        row[f"{name}@{radius:g}/{rule}"] >= radius and not row[f"{name}@{radius:g}/abstain"] for name in names
    )


def attacks_in(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(name.partition("@")[0] for name in rows[0] if "@" in name))


def radii_in(rows: list[Row]) -> list[float]:
    return sorted({float(name.partition("@")[2]) for name in rows[0] if "@" in name and "/" not in name})


def expected_scores(rows: list[Row], protocol: str, function: str, rule: str | None = None) -> list[dict[str, Any]]:
    attacks = attacks_in(rows)
    return [
        {
            "protocol": protocol,
            "function": function,
            "attack": attack,
            "radius": radius,
            "norm": "linf",
            "input_range": "[-1, 1]",
            **share([sound(row, names, radius, rule) if rule else right(row, names, radius) for row in rows]),
        }
        for radius in radii_in(rows)
        for attack, names in [*((attack, [attack]) for attack in attacks), ("worst", attacks)]
    ]


def test_every_accuracy_can_be_recomputed_from_the_records(evaluated: Path) -> None:
    scores, found = read(evaluated, "scores"), tables(evaluated)
    assert {(entry["protocol"]["name"], entry["function"]) for entry in scores["under_attack"]} == set(found)
    assert len(found) == 4
    for entry in scores["under_attack"]:
        protocol, function = entry["protocol"]["name"], entry["function"]
        rows = found[protocol, function]
        assert entry["rows"] == len(rows) == (10 if function == "vote" else 40)
        assert entry["attacks"] == attacks_in(rows)
        assert entry["clean_accuracy"] == share([row["prediction"] == row["label"] for row in rows])
        assert entry["accuracy"] == expected_scores(rows, protocol, function)
        rules = ("published", "corrected") if function == "vote" else ()
        assert entry["certified_at_attacked"] == {
            rule: expected_scores(rows, protocol, function, rule) for rule in rules
        }
    first = found["published", "single_pass"]
    assert scores["rows"] == len(first)
    assert scores["clean_accuracy"] == share([row["prediction"] == row["label"] for row in first])


def test_every_gap_can_be_recomputed_from_the_records(evaluated: Path) -> None:
    scores, found = read(evaluated, "scores"), tables(evaluated)
    assert set(scores["gaps"]) == {"single_pass", "vote"}
    values = []
    for function, gaps in scores["gaps"].items():
        published, adaptive = found["published", function], found["adaptive", function]
        assert [gap["radius"] for gap in gaps] == radii_in(published)
        for gap in gaps:
            flags = [[right(row, attacks_in(rows), gap["radius"]) for row in rows] for rows in (published, adaptive)]
            assert (gap["published"], gap["adaptive"]) == tuple(share(one) for one in flags)
            differences = np.array(flags[0], dtype=int) - np.array(flags[1], dtype=int)
            value = differences.mean()
            assert gap["gap"] == pytest.approx(paired_difference(differences > 0, differences < 0).to_dict())
            assert gap["gap"]["value"] == pytest.approx(value)
            values.append(value)
    assert max(values) > 0, "a gap of 0 everywhere would show little"


def test_every_certified_number_can_be_recomputed_from_the_records(evaluated: Path) -> None:
    certificates = read(evaluated, "scores")["certificates"]
    (folder,) = evaluated.glob("records/certify-*")
    rows = rows_of(folder)
    correct = [row["prediction"] == row["label"] for row in rows]
    assert certificates["rows"] == len(rows)
    assert certificates["verified_accuracy"] == {
        "correct": share(correct),
        "correct_without_abstaining": share([a and not row["abstain"] for a, row in zip(correct, rows, strict=True)]),
        "abstained": share([row["abstain"] for row in rows]),
    }
    columns = {"published": "published_largest_attack", "corrected": "corrected_radius"}
    for kind, column in columns.items():
        assert certificates["largest_radius"][kind] == max(row[column] for row in rows)
        assert certificates["certified_accuracy"][kind] == [
            {"radius": radius, **share([a and row[column] >= radius for a, row in zip(correct, rows, strict=True)])}
            for radius in (0.0005, 0.2)
        ]


def test_what_stands_side_by_side_is_of_the_same_images(evaluated: Path) -> None:
    """The vote was attacked on 10 images and certified on 40: the first 10 are common."""
    scores, found = read(evaluated, "scores"), tables(evaluated)
    (folder,) = evaluated.glob("records/certify-*")
    certified, columns = rows_of(folder), {"published": "published_largest_attack", "corrected": "corrected_radius"}
    assert [block["function"] for block in scores["same_images"]] == ["single_pass", "vote"]
    for block in scores["same_images"]:
        function, rows = block["function"], block["rows"]
        assert rows == {"single_pass": 40, "vote": 10}[function]
        clean = found["published", function][:rows]
        assert block["clean_accuracy"] == share([row["prediction"] == row["label"] for row in clean])
        for protocol in ("published", "adaptive"):
            own = found[protocol, function][:rows]
            assert block["attacked"][protocol] == [
                {"radius": radius, **share([right(row, attacks_in(own), radius) for row in own])}
                for radius in radii_in(own)
            ]
        assert block["gaps"] == scores["gaps"][function]
        assert block["certified"] == {
            kind: [
                {"radius": r, **share([a["prediction"] == a["label"] and a[column] >= r for a in certified[:rows]])}
                for r in (0.0005, 0.2)
            ]
            for kind, column in (columns.items() if function == "vote" else ())
        }
    whole = scores["certificates"]["certified_accuracy"]["corrected"][0]
    assert scores["same_images"][1]["certified"]["corrected"][0]["total"] < whole["total"]


def test_fewer_certified_than_attacked_images_limit_both(run: Path) -> None:
    stobatch.certify(run, overrides={"certification.limit": 6}, quiet=True)
    scores = stobatch.evaluate(run, quiet=True).to_dict()
    (block,) = [block for block in scores["same_images"] if block["function"] == "vote"]
    assert block["rows"] == 6
    shares = [*block["attacked"]["adaptive"], *block["certified"]["corrected"], block["clean_accuracy"]]
    assert {one["total"] for one in shares} == {6}


def test_the_flags_numbers_can_be_recomputed_from_the_records(run: Path, config: RunConfig) -> None:
    """Of a network that is all too sure: many of its gradients vanish."""
    network = stobatch.load(run).network
    assert isinstance(network, Network)
    network.head.output.weight.data.mul_(300)
    shutil.rmtree(run / "records")
    for name in ("certificates", "scores"):
        (run / f"{name}.json").unlink()
    evaluate_as(network, config, run)
    evidence = {flag["name"]: flag["evidence"] for flag in read(run, "scores")["flags"]}
    rows = tables(run)["adaptive", "single_pass"]
    none = sum(row["gradient"] == 0 for row in rows)
    assert evidence["zero gradients"].startswith(f"{100 * none / len(rows):.1f}%")
    (folder,) = run.glob("records/probe-*")
    probe = rows_of(folder)
    counts = [sum(row[name] != row["label"] for row in probe) for name in ("one_step", "usual_steps", "more_steps")]
    assert [
        int(number) for number in re.findall(r"(?:breaks|usual|4x) (\d+)", evidence["more steps do not help"])
    ] == counts


def test_the_loop_catches_a_changed_record(run: Path) -> None:
    """The broken twin: one answer of one attack."""
    found = tables(run)["adaptive", "single_pass"]
    row = next(row for row in found if right(row, ["fgsm"], 0.0005))
    row["fgsm@0.0005"] += 1
    entry = next(
        e for e in read(run, "scores")["under_attack"] if (e["protocol"]["name"], e["function"])
        == ("adaptive", "single_pass")
    )  # fmt: skip
    assert entry["accuracy"] != expected_scores(found, "adaptive", "single_pass")


def numbers(document: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Where a share stands: every object with a value, a count and a total."""
    if isinstance(document, dict):
        if {"value", "count", "total"} <= document.keys():
            yield path
        for key, value in document.items():
            yield from numbers(value, (*path, key))
    elif isinstance(document, list):
        for value in document:
            yield from numbers(value, path)


def test_no_share_stands_where_the_loops_above_do_not_look(evaluated: Path) -> None:
    assert set(numbers(read(evaluated, "scores"))) == {
        ("clean_accuracy",),
        ("accuracy_by_class",),  # tests/unit/verification computes it again from the rows
        ("under_attack", "clean_accuracy"),
        ("under_attack", "accuracy"),
        *(("under_attack", "certified_at_attacked", rule) for rule in ("published", "corrected")),
        *(("gaps", function, side) for function in ("single_pass", "vote") for side in ("published", "adaptive")),
        *(("certificates", "certified_accuracy", rule) for rule in ("published", "corrected")),
        ("same_images", "clean_accuracy"),
        *(("same_images", part, name) for part in ("attacked", "gaps") for name in ("published", "adaptive")),
        *(("same_images", "certified", rule) for rule in ("published", "corrected")),
        *(
            ("certificates", "verified_accuracy", name)
            for name in ("correct", "correct_without_abstaining", "abstained")
        ),
    }


def test_every_score_carries_protocol_function_norm_and_range(evaluated: Path) -> None:
    for entry in read(evaluated, "scores")["under_attack"]:
        assert entry["protocol"]["meaning"]
        for row in [*entry["accuracy"], *(r for rows in entry["certified_at_attacked"].values() for r in rows)]:
            assert (row["protocol"], row["function"]) == (entry["protocol"]["name"], entry["function"])
            assert (row["norm"], row["input_range"]) == ("linf", "[-1, 1]")
            assert row["radius"] in (0.0005, 0.2)


def test_distances_are_within_their_radius_and_images_are_kept(evaluated: Path) -> None:
    for rows in tables(evaluated).values():
        for row in rows:
            for name, value in row.items():
                if name.endswith("/distance"):
                    assert 0 <= value <= float(name.partition("@")[2].removesuffix("/distance"))
    with safe_open(evaluated / "private" / "images.safetensors", framework="np") as pixels:
        clean, moved = (pixels.get_tensor(name).astype(int) for name in ("clean", "0.2"))
    assert clean.shape == (2, 1, 28, 28)
    assert 0 < np.abs(clean - moved).max() <= np.ceil(0.2 / 2 * 255) + 1


def test_evaluating_again_gives_the_same_scores_and_another_seed_others(run: Path) -> None:
    before = read(run, "scores")
    assert stobatch.evaluate(run, quiet=True).to_dict() == {
        k: v for k, v in before.items() if k not in ("schema", "version")
    }
    assert stobatch.evaluate(run, quiet=True, seed=5).to_dict()["under_attack"] != before["under_attack"]


# What is refused, and that nothing is left behind.


def listing(run: Path) -> dict[str, int]:
    return {str(file.relative_to(run)): file.stat().st_mtime_ns for file in run.rglob("*")}


def own_data(config: RunConfig) -> Dataset:
    """A copy of the run's own data that may be spoilt."""
    whole = data.load(config.data)
    parts = [(part.inputs.clone(), part.labels.clone()) for part in (whole.train, whole.test)]
    return from_tensors(*parts[0], *parts[1], num_classes=10)


VERBS = {
    "evaluate": stobatch.evaluate,
    "adaptive": stobatch.attack,
    "published": lambda run, **given: stobatch.attack(run, protocol="published", **given),
    "vote": lambda run, **given: stobatch.attack(run, function="vote", **given),
}
every_verb = pytest.mark.parametrize("verb", VERBS)


@every_verb
@pytest.mark.parametrize("spoilt", ["NaN", "label", "wide"])
def test_spoilt_data_are_refused_and_no_file_is_touched(run: Path, config: RunConfig, verb: str, spoilt: str) -> None:
    given = own_data(config)
    if spoilt == "label":
        given.test.labels[3] = 10
    else:
        given.test.inputs[3, 0, 5, 5] = torch.nan if spoilt == "NaN" else 255.0
    before = listing(run)
    with pytest.raises(StobatchError):
        VERBS[verb](run, dataset=given, quiet=True, seed=9)
    assert listing(run) == before


def spoil(file: Path, name: str) -> None:
    """One number of a stored tensor is none any more; the rest of the file stays."""
    with safe_open(file, framework="pt") as stored:
        tensors, marks = {key: stored.get_tensor(key) for key in stored.keys()}, stored.metadata()  # noqa: SIM118
    tensors[name].view(-1)[0] = torch.nan
    save_file(tensors, file, marks)


@every_verb
@pytest.mark.parametrize(
    ("file", "name"),
    [("model.safetensors", "encoder.weight"), ("private/noise.safetensors", "hidden_noise")],
    ids=["weights", "noise"],
)
def test_a_network_that_returns_no_numbers_is_refused_and_no_file_is_touched(
    run: Path, verb: str, file: str, name: str
) -> None:
    """The noise is not part of the copy that the published protocol attacks: only the deployed function shows it."""
    spoil(run / file, name)
    before = listing(run)
    with pytest.raises(StobatchError, match="not"):
        VERBS[verb](run, quiet=True, seed=9)
    assert listing(run) == before


@every_verb
@pytest.mark.parametrize(
    "overrides",
    [
        {"evaluation.radii": [2.5]},
        {"evaluation.radii": [8.0, 16.0]},
        {"evaluation.norm": "l2", "evaluation.radii": [57.0]},
        {"evaluation.norm": "l1", "evaluation.radii": [1600.0]},
        {"evaluation.radii": [-0.1]},
        {"evaluation.norm": "l0"},
        {"training.steps": 3},
    ],
    ids=str,
)
def test_other_units_are_refused_and_no_file_is_touched(run: Path, verb: str, overrides: dict[str, Any]) -> None:
    before = listing(run)
    with pytest.raises(StobatchError):
        VERBS[verb](run, overrides=overrides, quiet=True)
    assert listing(run) == before


@pytest.mark.parametrize(("given", "said"), [({"protocol": "honest"}, "honest"), ({"function": "both"}, "both")])
def test_an_unknown_protocol_or_function_is_refused(run: Path, given: dict[str, str], said: str) -> None:
    before = listing(run)
    with pytest.raises(StobatchError, match=f"no '{said}' to attack"):
        stobatch.attack(run, quiet=True, **given)
    assert listing(run) == before


def test_data_of_another_shape_are_refused(run: Path) -> None:
    other = from_tensors(torch.zeros(4, 1, 14, 14), torch.arange(4), torch.zeros(4, 1, 14, 14), torch.arange(4))
    before = listing(run)
    with pytest.raises(StobatchError, match="the model takes"):
        stobatch.evaluate(run, dataset=other, quiet=True)
    assert listing(run) == before


def test_damaged_certificates_are_found_before_anything_is_attacked(run: Path) -> None:
    (part,) = run.glob("records/certify-*/*.parquet")
    part.write_bytes(part.read_bytes()[:100])
    before = listing(run)
    with pytest.raises(StobatchError, match="stobatch certify"):
        stobatch.evaluate(run, quiet=True, seed=9)
    assert listing(run) == before


# Every attack in every norm.


SIZES = {"linf": [0.1, 0.3], "l2": [1.0, 5.0], "l1": [10.0, 60.0]}


@pytest.mark.parametrize("norm", SIZES)
@pytest.mark.parametrize("function", ["single_pass", "vote"])
def test_every_attack_runs_in_every_norm(run: Path, norm: str, function: str) -> None:
    """Radii and norm in this order, too: 60 in l1 is fine although the run's own norm would not have it."""
    chosen = "adaptive_attacks" if function == "single_pass" else "vote_attacks"
    overrides = {
        "evaluation.radii": SIZES[norm],
        "evaluation.norm": norm,
        f"evaluation.{chosen}": sorted(ATTACKS),
        "evaluation.limit": 4,
        "evaluation.vote_draws": 5,
        "evaluation.noise_draws": 1,
    }
    found = stobatch.attack(run, function=function, overrides=overrides, quiet=True).to_dict()
    victims = [""] if function == "single_pass" else [":score", ":vote"]
    assert set(found["attacks"]) == {name + victim for name in ATTACKS for victim in victims}
    assert found["rows"] == 4
    assert {row["norm"] for row in found["accuracy"]} == {norm}
    assert {row["radius"] for row in found["accuracy"]} == set(SIZES[norm])
    assert read(run, "attack")["accuracy"] == found["accuracy"]


# Methods without a vote.


def test_a_model_without_a_vote_is_evaluated_on_its_single_pass(config: RunConfig, tmp_path: Path) -> None:
    plain = {key: value for key, value in config.to_dict().items() if key != "method"}
    method = {"name": "vanilla_adversarial", "batch_size": 60, "train_attack_steps": 1}
    run = tmp_path / "vanilla"
    stobatch.train(RunConfig.from_dict({**plain, "method": method}), run, quiet=True)
    scores = stobatch.evaluate(run, quiet=True).to_dict()
    assert [(e["protocol"]["name"], e["function"]) for e in scores["under_attack"]] == [
        ("published", "single_pass"),
        ("adaptive", "single_pass"),
    ]
    assert set(scores["gaps"]) == {"single_pass"}
    assert scores["certificates"] is None
    before = listing(run)
    for refused in (
        lambda: stobatch.evaluate(run, overrides={"evaluation.functions": ["vote"]}, quiet=True),
        lambda: stobatch.attack(run, function="vote", quiet=True),
    ):
        with pytest.raises(StobatchError, match="vote"):
            refused()
    assert listing(run) == before
    assert Path(stobatch.report([run]).report).stat().st_size > 10_000


# A model of one's own that hides its gradients.


class Steps(nn.Module):
    """Hidden values in steps of a half: their gradient is zero wherever it is defined."""

    def __init__(self, wide: float) -> None:
        super().__init__()
        self.wide = wide

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return (values / self.wide).round() * self.wide if self.wide else values


def flagged(config: RunConfig, out: Path, wide: float) -> set[str]:
    """The flags of a model that tells bright images from dark ones, through such steps or without them."""
    bright = (torch.arange(120) % 2) * 0.8 - 0.4
    images = (bright[:, None, None, None] + 0.1 * torch.randn(120, 1, 4, 4, generator=seeded())).clamp(-1, 1)
    labels = (bright > 0).long()
    first, middle, last = nn.Linear(16, 1), nn.Linear(1, 2), nn.Linear(2, 2)
    for layer, weight in ((first, [[1 / 16] * 16]), (middle, [[-2.0], [2.0]]), (last, [[2.0, 0.0], [0.0, 2.0]])):
        layer.weight.data = torch.tensor(weight)
    middle.bias.data.zero_()
    network = from_layers(first, nn.Sequential(Steps(wide), middle), last, (1, 4, 4))
    plain = {key: value for key, value in config.to_dict().items() if key not in ("method", "model")}
    changes = {
        "method": {"name": "vanilla_adversarial", "batch_size": 30},
        "model": {"architecture": "custom", "last_hidden_size": 2},
        "evaluation": {"radii": [1.0], "adaptive_attacks": ["fgsm", "ifgsm"], "adaptive_steps": 5, "restarts": 1},
    }
    settings = RunConfig.from_dict({**plain, **changes}).override_all(
        {"data.name": "tensors", "data.allow_overlap": True, "training.learning_rate": 1e-9}
    )
    given = {"dataset": from_tensors(images, labels, images, labels), "network": network, "quiet": True}
    stobatch.train(settings, out, **given)
    scores = stobatch.evaluate(out, **given).to_dict()
    assert scores["clean_accuracy"]["value"] == 1
    return {flag["name"] for flag in scores["flags"]}


def test_a_model_that_hides_its_gradients_is_flagged_and_its_open_twin_is_not(
    config: RunConfig, tmp_path: Path
) -> None:
    hidden, open_ = (flagged(config, tmp_path / f"{wide}", wide) for wide in (0.5, 0.0))
    assert {"more steps do not help", "zero gradients"} <= hidden
    assert open_ == set()


# Several runs and seeds in one report.


def edited(source: Path, out: Path, *, epsilon: float, seed: int | None, shift: float, norm: str = "linf") -> Path:
    """A run as another seed might have left it: its worst accuracies moved by so much."""
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("records", "private"))
    config, scores = read(out, "config"), read(out, "scores")
    config["config"]["seed"], config["config"]["method"]["total_epsilon"] = seed, epsilon
    scores["norm"] = norm
    for entry in scores["under_attack"]:
        for row in entry["accuracy"]:
            row["value"], row["norm"] = 0.5 + shift + row["radius"], norm
    for block in scores["same_images"]:
        for row in (row for rows in block["attacked"].values() for row in rows):
            row["value"] = 0.5 + shift + row["radius"]
    for name, document in (("config", config), ("scores", scores)):
        (out / f"{name}.json").write_text(json.dumps(document))
    return out


@pytest.fixture
def unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write no pages, which takes a while."""
    monkeypatch.setattr(html, "write_report", lambda runs, out, **options: None)
    monkeypatch.setattr("stobatch.verification.require_agreement", lambda verification: None)


SHIFTS = {1.0: (0.01, 0.03, 0.02), 2.0: (0.06, 0.11, 0.09)}


def seeds_of(source: Path, out: Path, seeds: dict[float, tuple[int | None, ...]]) -> list[Path]:
    return [
        edited(source, out / f"{epsilon:g}-{place}", epsilon=epsilon, seed=seed, shift=shift)
        for epsilon, chosen in seeds.items()
        for place, (seed, shift) in enumerate(zip(chosen, SHIFTS[epsilon], strict=True))
    ]


@pytest.mark.parametrize(
    ("seeds", "paired"),
    [
        ({1.0: (1, 2, 3), 2.0: (1, 2, 3)}, True),
        ({1.0: (1, 2, 3), 2.0: (4, 5, 6)}, False),
        ({1.0: (None, None, None), 2.0: (None, None, None)}, False),
        ({1.0: (1, None, 2), 2.0: (1, None, 2)}, False),
    ],
    ids=["same seeds", "other seeds", "secret seeds", "one of them secret"],
)
@pytest.mark.usefixtures("unwritten")
def test_settings_with_several_seeds_are_compared(
    evaluated: Path, tmp_path: Path, seeds: dict[float, tuple[int | None, ...]], paired: bool
) -> None:
    """Secret seeds are nobody's pair, and none is taken for another."""
    document = stobatch.report(seeds_of(evaluated, tmp_path, seeds), tmp_path / "all.html").to_dict()
    test = stats.ttest_rel if paired else lambda a, b: stats.ttest_ind(a, b, equal_var=False)
    expected = test(*SHIFTS.values())
    assert len(document["comparisons"]) == 8, "two protocols, two functions, two radii"
    for comparison in document["comparisons"]:
        found = comparison["t_test"]
        assert found["paired"] == paired
        assert found["num_seeds"] == [3, 3]
        assert found["difference"] == pytest.approx(0.02 - 0.26 / 3)
        assert found["p_value"] == pytest.approx(expected.pvalue)
        assert (comparison["norm"], comparison["input_range"]) == ("linf", "[-1, 1]")


def test_the_tests_stand_in_the_report(evaluated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs are edited by hand, which a report would refuse."""
    monkeypatch.setattr("stobatch.verification.require_agreement", lambda verification: None)
    runs = seeds_of(evaluated, tmp_path, {1.0: (1, 2, 3), 2.0: (1, 2, 3)})
    runs = [run for run in runs if not run.name.endswith("-2")]
    assert len(stobatch.report(runs, tmp_path / "all.html", images=False).comparisons) == 8
    assert "Two-tailed t-tests over seeds" in (tmp_path / "all.html").read_text()


@pytest.mark.usefixtures("unwritten")
def test_a_single_seed_each_is_shown_without_a_test(evaluated: Path, tmp_path: Path) -> None:
    runs = [edited(evaluated, tmp_path / str(epsilon), epsilon=epsilon, seed=1, shift=0.0) for epsilon in (1.0, 2.0)]
    assert stobatch.report(runs, tmp_path / "all.html", images=False).comparisons == ()


@pytest.mark.usefixtures("unwritten")
def test_scores_in_other_norms_are_not_compared(evaluated: Path, tmp_path: Path) -> None:
    runs = [
        edited(evaluated, tmp_path / f"{norm}-{seed}", epsilon=epsilon, seed=seed, shift=0.01 * seed, norm=norm)
        for epsilon, norm in ((1.0, "linf"), (2.0, "l2"))
        for seed in (1, 2)
    ]
    assert stobatch.report(runs, tmp_path / "all.html", images=False).comparisons == ()


def test_a_vote_that_is_evaluated_alone_counts_the_rows_that_were_attacked(run: Path) -> None:
    """The vote is attacked on 10 of 40 images: that is all the document speaks of, and `verify` counts them again."""
    stobatch.evaluate(run, overrides={"evaluation.functions": ["vote"]}, quiet=True)
    assert read(run, "scores")["rows"] == 10
    checks = [check for check in stobatch.verify(run, sample=0).checks if check.name == "evaluation"]
    assert [str(check.outcome) for check in checks] == ["agrees"]
