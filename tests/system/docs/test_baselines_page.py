"""The README's baselines: every row and number stands in the records, and the records are of the recipes that ship."""

import importlib.util
import json
from functools import reduce
from operator import getitem
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from support.pages import ROOT, quotes, run_python

from stobatch_recipes import baselines

README = ROOT / "README.md"
Record = dict[str, Any]


def records(name: str) -> list[Record]:
    found: list[Record] = json.loads((ROOT / "results" / f"{name}.json").read_text())
    return found


def table() -> Any:
    spec = importlib.util.spec_from_file_location("make_baselines", ROOT / "docs" / "make_baselines.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_made_of_the_records() -> None:
    lines = list(table().lines())
    assert len(lines) >= 19
    page = README.read_text()
    start = page.index("| method | privacy (in brackets")
    shown = page[start:].split("\n\n", maxsplit=1)[0].splitlines()[2:]
    assert shown == lines
    for line in lines:
        privacy = line.split(" | ")[1]
        assert privacy == "no privacy" or privacy.startswith(("void (proved ε = ", "refuted ε = "))


def test_a_record_with_secret_seeds_would_not_be_void() -> None:
    (record, *_) = [found for found in records("baselines_mnist") if found["status"] == "proved"]
    made = table()
    assert made.privacy(record).startswith("void (proved ε = ")
    assert made.privacy({**record, "seed": None}).startswith("proved ε = ")
    renamed = {"status": "void", "status_with_secret_seeds": "proved", "void_epsilon": record["proved_epsilon"]}
    assert made.privacy({**record, **renamed}) == made.privacy(record)


@pytest.mark.parametrize("record", records("baselines_mnist"), ids=lambda r: f"{r['row']}-{r['seed']}")
def test_no_more_is_proved_than_attacks_left_of_the_same_images(record: Record) -> None:
    for certified in record["certified"].values():
        for under in record["under_attack"].values():
            if certified["status"] == "proved" and certified["test_examples"] == under["test_examples"]:
                for radius, share in certified["accuracy"].items():
                    assert share <= under["accuracy"].get(radius, 1.0)


ALL = records("baselines_mnist") + records("baselines_mnist_radii")


@pytest.mark.parametrize("record", ALL, ids=lambda record: record["row"])
def test_a_record_is_of_the_recipe_that_ships(record: Record) -> None:
    name, _, epsilon = record["row"].partition("-eps-")
    config = baselines.compared(name.replace("-", "_"))(float(epsilon or 1), 0.2).override("seed", record["seed"])
    assert config.training_hash == record["training_hash"]
    assert config.method.name == record["method"]


@pytest.mark.parametrize("record", records("baselines_mnist"), ids=lambda r: f"{r['row']}-{r['seed']}")
def test_a_record_carries_its_status_and_never_more_privacy_than_was_asked_for(record: Record) -> None:
    _, _, asked = record["row"].partition("-eps-")
    budgets = {key: value for key, value in record.items() if key.endswith("_epsilon")}
    if record["status"] == "none":
        assert not budgets
        assert not asked
    else:
        assert list(budgets) == [f"{record['status']}_epsilon"]
        assert 0.99 * float(asked) <= budgets[f"{record['status']}_epsilon"] <= float(asked)
    assert record["status"] in ("none", "proved", "claimed", "refuted", "void")
    assert not any(flag["level"] == "error" for flag in record["flags"]), "a proved certificate was broken"


def each(row: str, *path: str) -> list[float]:
    """In %, by seed."""
    own = [record for record in records("baselines_mnist") if record["row"] == row]
    return [100 * reduce(getitem, path, record) for record in own]  # type: ignore[arg-type]


def mean(row: str, *path: str) -> float:
    return fmean(each(row, *path))


def test_the_seconds_are_those_of_the_records() -> None:
    on_gpu, on_cpu = ([r["training_seconds"] for r in records("baselines_mnist") if r["device"].startswith(kind)]
                      for kind in ("cuda", "cpu"))  # fmt: skip
    assert quotes(README, *(f"{end(each):.0f}" for each in (on_gpu, on_cpu) for end in (min, max)))


def test_what_was_wanted_and_found_is_in_the_records() -> None:
    one, three = mean("dpsgd-eps-1", "clean", "accuracy"), mean("dpsgd-eps-3", "clean", "accuracy")
    assert one >= 96.5
    assert three >= 98
    lowest = [min(each(row, "clean", "accuracy")) for row in ("dpsgd-eps-1", "dpsgd-eps-3")]
    assert quotes(README, f"{one:.1f}", f"{three:.1f}%", f"{lowest[0]:.1f}", f"{lowest[1]:.2f}%")
    seeds = each("dp-adversarial-eps-1", "under_attack", "adaptive", "accuracy", "0.2")
    assert quotes(README, *(f"{share:.1f}" for share in seeds))
    clean = mean("dp-adversarial-eps-1", "clean", "accuracy")
    attacked = mean("dp-adversarial-eps-1", "under_attack", "adaptive", "accuracy", "0.2")
    assert clean >= 97
    assert attacked >= 78
    assert quotes(README, f"{clean:.1f}", f"{attacked:.1f}%")


def test_what_adlm_learns_is_in_the_records() -> None:
    clean = [mean(f"adlm-eps-{epsilon}", "clean", "accuracy") for epsilon in ("0.2", "1")]
    assert quotes(README, f"{clean[0]:.1f}", f"{clean[1]:.1f}%")
    attacked = [mean(f"{name}-eps-0.2", "under_attack", "published", "accuracy", "0.2") for name in ("dpsgd", "adlm")]
    assert quotes(README, f"{attacked[0]:.1f}%", f"{attacked[1]:.1f}%")


def test_the_curve_of_pixeldp_is_in_the_records() -> None:
    (found,) = [record for record in records("baselines_mnist_radii") if record["row"] == "pixeldp"]
    claimed, proved = (found["certified"][rule]["accuracy"] for rule in ("as compared", "tight"))
    assert found["certified"]["as compared"]["status"] == "claimed"
    assert quotes(README, *(f"{100 * claimed[radius]:.1f}%" for radius in ("0.05", "0.1")))
    assert claimed["0.2"] == proved["0.05"] == 0


def test_the_speed_of_clipping_the_papers_networks_is_in_its_record() -> None:
    lines = (ROOT / "benchmarks" / "results" / "2026-11-16-clipping.txt").read_text().splitlines()
    ratios = [json.loads(line)["ratios"] for line in lines if line.startswith("{")]
    plain, formed = ([ratio[name] for ratio in ratios] for name in sorted(ratios[0], reverse=True))
    assert len(ratios) == 3
    assert quotes(README, f"{min(plain):.2f}", f"{max(plain):.2f}", f"{min(formed):.1f}", f"{max(formed):.1f}")


def test_comparing_on_own_data_runs_as_written(tmp_path: Path) -> None:
    *rows, tests = run_python(ROOT / "docs" / "comparing.md", tmp_path).splitlines()
    assert [row.split(",")[0] for row in rows] == [
        f"{name} ε={epsilon} (proved)" for name in ("dpsgd", "dp_adversarial") for epsilon in (1, 8)
    ]
    assert tests.startswith("30 t-tests")
    assert (tmp_path / "runs" / "mine" / "comparison.html").exists()


def test_t_tests_are_quoted_as_they_came_out() -> None:
    tests = records("baselines_mnist_t_tests")
    below = sum(test["p_value"] < 0.05 for test in tests)
    assert quotes(README, f"{below}", f"{len(tests)}", f"{round(len(tests) / 20)}")

    def test_of(first: str, second: str, measure: str, radius: float | None) -> Record:
        wanted = (first, second, measure, radius)
        keys = ("first", "second", "measure", "radius")
        return next(test for test in tests if tuple(test[key] for key in keys) == wanted)

    attacked = test_of("dp-adversarial-eps-1", "dpsgd-eps-1", "adaptive", 0.2)
    clean = test_of("dp-adversarial-eps-1", "dpsgd-eps-1", "clean", None)
    points, chance = 100 * attacked["difference"], attacked["p_value"]
    assert quotes(README, f"{points:.0f}", f"{chance:.1g}", f"{clean['p_value']:.2f}")
    agm = test_of("securesgd-agm-eps-1", "securesgd-eps-1", "clean", None)
    assert quotes(README, f"{100 * agm['difference']:.1f}", f"{agm['p_value']:.1g}")
