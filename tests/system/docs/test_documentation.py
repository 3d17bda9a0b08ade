"""The documentation is run: tutorial blocks in order, links, the paper map, and the README's numbers."""

import json
import re
from pathlib import Path

import pytest
from support.pages import ROOT, blocks, quotes, run_python

import stobatch
from stobatch import paper
from stobatch.evaluation.sanity import RULES
from stobatch.seeds import Seeds
from stobatch_recipes import recipe

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.slow
def test_the_tutorial_runs_as_written(tmp_path: Path) -> None:
    said = run_python(ROOT / "docs" / "tutorial.md", tmp_path)
    assert "NOT a proven guarantee" in said
    assert "corrected: proved" in said


def test_the_attacking_page_runs_and_lists_every_flag(tmp_path: Path) -> None:
    page = ROOT / "docs" / "attacking.md"
    assert "still right:" in run_python(page, tmp_path)
    listed = re.findall(r"^\| (?:\*\*)?([^|*]+?)(?:\*\* \(error\))? \| ([^|]+) \|$", page.read_text(), re.M)
    assert dict(listed).items() >= {rule.name: rule.raised_if for rule in RULES}.items()


def test_the_auditing_page_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Secret as far as the library knows: whether a true claim survives must not hang on luck.
    monkeypatch.setattr(Seeds, "secret", classmethod(lambda cls: cls(7, public=False)))
    said = run_python(ROOT / "docs" / "auditing.md", tmp_path)
    planted, status, verdict, statement = said.splitlines()
    assert planted.startswith("consistent | 2000 gradient canaries in the training itself: ε ≥ ")
    assert (status, verdict) == ("proved", "refuted")
    assert statement.startswith("perturbed inputs (Lemma 3): 2000 of 2000 told apart")


def audits() -> dict[str, dict]:
    return {record["name"]: record for record in json.loads((ROOT / "results" / "audits.json").read_text())}


@pytest.mark.parametrize(
    "name", ["published", "sound", "sound_1", "sound_strict", "half_noise", "shared_noise", "no_clipping"]
)
def test_the_readme_quotes_the_audits_and_the_recipes_are_those_of_the_records(name: str) -> None:
    record = audits()[f"audit-{name}"]
    assert record["config_hash"] == recipe(f"audit.{name}").training_hash
    (finding,) = [finding for finding in record["findings"] if finding["instrument"] == "many_runs"]
    found = max(bound["epsilon_at_least"] for bound in finding["details"]["bounds"])
    (row,) = re.findall(rf"^\| `audit\.{name}` \|.*$", README.read_text(), re.M)
    assert f"ε >= {found:.3g}" in row
    assert row.endswith(f"| {finding['verdict']} |")
    # What the issue of privacy is about: the claim of the paper falls, the proof stands, the controls are caught.
    assert (finding["verdict"] == "consistent") is name.startswith("sound")


def test_pages_quote_the_published_mechanisms_audit() -> None:
    (finding,) = [f for f in audits()["audit-published"]["findings"] if f["instrument"] == "many_runs"]
    found = f"{finding['details']['bounds'][0]['epsilon_at_least']:.2f}"
    assert float(found) > 5
    for page in (
        ROOT / "README.md",
        ROOT / "docs" / "guarantees.md",
        ROOT / "src" / "stobatch" / "published" / "plan.py",
    ):
        assert f"ε >= {found}" in page.read_text(), page


def test_pages_quote_membership_and_the_audit_of_one_training() -> None:
    (finding,) = audits()["audit-published_members"]["findings"]
    found = finding["details"]["bounds"][0]["epsilon_at_least"]
    words = " ".join((ROOT / "docs" / "guarantees.md").read_text().split())
    assert f"with an AUROC of {finding['details']['auroc']:.3f} and show ε >= {found:.1f}" in words
    record = json.loads((ROOT / "results" / "one_run_h200.json").read_text())
    without, with_ = (
        sorted(one["seconds"] for one in record["trainings"] if one["canaries"] == num) for num in (0, 5000)
    )
    found = record["one_run"]["bounds"]["one_run_poisson"]
    assert quotes(README, *(str(seconds) for each in (with_, without) for seconds in each[:2]), f"{found:.2f}")


def test_guarantees_quote_the_power_of_the_instruments() -> None:
    page = (ROOT / "docs" / "guarantees.md").read_text()
    words = {
        "audit.half_noise": "half the noise",
        "audit.shared_noise": "shared noise",
        "audit.no_clipping": "no clipping",
        "audit.sound": "sound, ε = 3",
    }
    lines = [json.loads(line) for line in (ROOT / "results" / "audit_power.jsonl").read_text().splitlines()]
    for line in (line for line in lines if "recipe" in line):
        cost = f"{line['canaries']:,} canaries" if "canaries" in line else f"{line['trainings']} trainings"
        row = f"| {words[line['recipe']]} | {line['instrument']} | {cost} | {line['refuted']} of {line['audits']} |"
        assert row in page
    certificates = [line for line in lines if line["instrument"] == "certificates"]
    assert len(certificates) == 4
    assert all(line["refuted"] == line["audits"] and not line["correct_twins_refuted"] for line in certificates)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_paper_map_lists_exactly_what_is_registered() -> None:
    listed = dict(re.findall(r"^\| ([A-Z][^|]+?) \| `([^`]+)`", (ROOT / "docs" / "paper-map.md").read_text(), re.M))
    assert listed == {name: item.code for name, item in paper.items().items()}


def test_every_numbered_item_of_the_paper_is_registered() -> None:
    wanted = ["Definition 1", "Corollary 1"]
    wanted += [f"Lemma {n}" for n in range(1, 6)] + [f"Theorem {n}" for n in range(1, 6)]
    wanted += [f"Algorithm {n}" for n in range(1, 5)] + [f"Eq. {n}" for n in range(1, 44)]
    wanted += [f"Appendix {letter}" for letter in "BCNOP"]
    assert [name for name in wanted if name not in paper.items()] == []


def test_the_readme_quotes_its_records() -> None:
    readme = README.read_text()
    rows = {row[1]: row for row in re.findall(r"^\| ([\d.]+) \| `(\w+)` \| (.+) \|$", readme, re.M)}
    records = json.loads((ROOT / "results" / "paper_mnist.json").read_text())
    assert len(rows) == len(records) == 3
    for record in records:
        epsilon, _, cells = rows[record["training_hash"]]
        numbers = [float(n) for n in re.findall(r"\d+\.\d", cells)]
        measured = [record["clean"]]
        for protocol in ("published", "adaptive"):
            (under,) = (
                u for u in record["under_attack"] if (u["protocol"], u["function"]) == (protocol, "single_pass")
            )
            measured += [under["accuracy"]["worst"][radius] for radius in ("0.1", "0.2", "0.4", "0.6")]
        measured += [record["verified"], record["abstained"]]
        measured += [record["certified"][rule]["0.05"] for rule in ("published", "corrected")]
        assert float(epsilon) == pytest.approx(record["claimed_epsilon"])
        assert numbers == [round(100 * value + 1e-9, 1) for value in measured]


def test_the_readme_tells_of_gap_and_seeds_what_the_records_say() -> None:
    records = json.loads((ROOT / "results" / "paper_mnist.json").read_text())

    def worst(record: dict, protocol: str, function: str) -> dict[str, float]:
        (under,) = (u for u in record["under_attack"] if (u["protocol"], u["function"]) == (protocol, function))
        return {"clean": 100 * under["clean"]} | {r: 100 * v for r, v in under["accuracy"]["worst"].items()}

    one, two = records[1], records[2]
    shown = [worst(one, protocol, "single_pass")["0.4"] for protocol in ("published", "adaptive")]
    assert quotes(README, f"{shown[0]:.1f}%", f"{shown[1]:.1f}%")
    votes = {protocol: worst(two, protocol, "vote") for protocol in ("published", "adaptive")}
    falls = (votes["published"]["clean"], votes["published"]["0.2"], votes["adaptive"]["0.2"])
    assert quotes(README, *(f"{share:.1f}%" for share in falls))

    seeds = [*records, *json.loads((ROOT / "results" / "paper_mnist_seeds.json").read_text())]
    clean = {e: sorted(100 * r["clean"] for r in seeds if r["claimed_epsilon"] == e) for e in (0.2, 2.0)}
    assert all(len(values) == 3 for values in clean.values())
    assert quotes(README, *(f"{clean[epsilon][end]:.1f}" for epsilon in (0.2, 2.0) for end in (0, -1)))
    tests = json.loads((ROOT / "results" / "paper_mnist_t_tests.json").read_text())["comparisons"]
    smallest = min(tests, key=lambda test: test["t_test"]["p_value"])
    assert (smallest["protocol"], smallest["radius"]) == ("published", 0.2)
    points, chance = 100 * smallest["t_test"]["difference"], smallest["t_test"]["p_value"]
    assert quotes(README, f"{points:.1f}", f"{chance:.4f}", f"{len(tests)}")
    assert min(t["t_test"]["p_value"] for t in tests if t["protocol"] == "adaptive") > 0.07


TABLES = {
    "| recipe | ε: void (proved with secret seeds) |": "sound_mnist",
    "| | ε: void (proved with secret seeds) |": "sound_cifar10",
    "| method | privacy (in brackets: with secret seeds) |": "baselines_mnist",
    "| ε: void (claimed, not proved, with secret seeds) |": "paper_mnist",
}


@pytest.mark.parametrize("heading", TABLES)
def test_tables_of_runs_with_public_seeds_say_that_their_privacy_is_void(heading: str) -> None:
    records = json.loads((ROOT / "results" / f"{TABLES[heading]}.json").read_text())
    assert all(record["seed"] is not None for record in records), "with secret seeds a row would not be void"
    before, found, _ = README.read_text().partition(heading)
    section = " ".join(before[before.rindex("\n## ") :].split()).lower()
    assert "experiment with public seeds; a release would draw its own" in section
    assert found, "the table has this heading"


def test_the_snippet_of_the_readme_is_proved_as_it_says() -> None:
    (block,) = blocks(README)
    (said,) = re.findall(r"print\(stobatch.plan\(config\).guarantee\)  # (.*), \.\.\.\)", block)
    config = recipe("demo").override("method.epsilon", 2.0)
    assert str(stobatch.plan(config).guarantee).startswith(said)
    assert said.startswith("proved ε = ")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_sets_a_public_seed_in_python(page: Path) -> None:
    for block in blocks(page):
        assert not re.search(r"[\"']seed[\"']|\bseeds?=", block), block


RADII = ("0.05", "0.2", "0.4", "0.6")


@pytest.mark.parametrize("name", ["sound.mnist", "sound.mnist_wide", "sound.mnist_strict"])
def test_the_readme_quotes_the_sound_records_and_the_recipes_are_those_of_the_records(name: str) -> None:
    (row,) = re.findall(rf"^\| `{re.escape(name)}` \| (.+) \|$", README.read_text(), re.M)
    epsilon, clean, *certified, wanted = (cell.strip(" *") for cell in row.split("|"))
    hashes = {recipe(name).override("seed", seed).training_hash: seed for seed in (1, 2, 3)}
    records = json.loads((ROOT / "results" / "sound_mnist.json").read_text())
    found = [record for record in records if record["config_hash"] in hashes]
    assert sorted(record["seed"] for record in found) == sorted(hashes.values()) == [1, 2, 3]
    for record in found:
        assert record["seed"] == hashes[record["config_hash"]]
        assert record.get("status_with_secret_seeds", record["status"]) == "proved"
        assert (record["delta"], record["test_examples"]) == (1e-5, 10_000)
        assert float(epsilon) - 0.001 <= record["epsilon"] <= float(epsilon)
        assert record["certificate"]["failure_probability"] == 0.0
        assert record["accounted_steps"] == record["steps"]
        assert not (record["attacked"] or {}).get("broken_certificates")
    assert any(record["attacked"] for record in found), "no falsifier was run"
    means = [sum(r["clean"] for r in found) / 3, *[sum(r["certified"][k] for r in found) / 3 for k in RADII]]
    assert [clean, *certified] == [f"{100 * mean + 1e-9:.1f}%" for mean in means]
    assert "%" in wanted


def test_the_readme_says_what_the_falsifier_left() -> None:
    records = json.loads((ROOT / "results" / "sound_mnist.json").read_text())
    (record,) = [r for r in records if r["config_hash"] == recipe("sound.mnist").override("seed", 1).training_hash]
    left, proved = (
        [f"{100 * shares[radius] + 1e-9:.1f}%" for radius in ("0.05", "0.2")]
        for shares in (record["attacked"]["accuracy"], record["certified"])
    )
    assert quotes(README, *left, *proved)
    assert record["attacked"]["test_examples"] == 10_000


@pytest.mark.parametrize(
    ("file", "names"),
    [
        ("sound_mnist_l2", ["sound.mnist_l2"]),
        ("sound_cifar10", [f"sound.cifar10{more}" for more in ("", "_wide", "_strict", "_strict_wide")]),
    ],
)
def test_the_readme_quotes_what_falls_short(file: str, names: list[str]) -> None:
    readme = README.read_text()
    records = json.loads((ROOT / "results" / f"{file}.json").read_text())
    rows = re.findall(r"^\| (.+?) \| ([\d.]+) \| (.+?) \| (.+?) \| .+ \|$", readme, re.M)
    for name in names:
        # One row for the l2 model with both of its radii, one for each ε of CIFAR-10 with a model for each radius.
        hashes = {recipe(name).override("seed", seed).training_hash for seed in (1, 2, 3)}
        found = [record for record in records if record["config_hash"] in hashes]
        assert {record["config_hash"] for record in found} == hashes
        first = found[0]
        kind = "sound.mnist_l2" if first["smoothing_stddev"] else "CIFAR-10"
        (row,) = (r for r in rows if kind in r[0] and float(r[1]) == round(first["epsilon"]))
        aimed = [radius for radius in first["certified"] if float(radius) >= first["train_radius"]]
        means = [sum(r["clean"] for r in found) / 3, *[sum(r["certified"][k] for r in found) / 3 for k in aimed]]
        shown = [f"{100 * mean + 1e-9:.1f}%" for mean in means]
        assert shown[0] in row[2].split(" and ")
        assert set(shown[1:] if kind == "sound.mnist_l2" else shown[1:2]) <= set(row[3].split(" and "))
        for record in found:
            assert (
                record.get("status_with_secret_seeds", record["status"]) == record["certificate"]["status"] == "proved"
            )
            assert not (record["attacked"] or {}).get("broken_certificates")
    assert len(records) == 3 * len(names)


def test_the_readme_quotes_its_benchmarks() -> None:
    readme = README.read_text()
    records = re.findall(r"\]\((benchmarks/results/[^)]+)\)", readme)
    text = "\n".join((ROOT / record).read_text() for record in records)
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    ratios = {name: value for line in lines for name, value in line["ratios"].items()}
    (long_attack,) = (line["steps"] for line in lines if line["benchmark"] == "long attack")
    assert quotes(README, f"{long_attack['2000']['seconds']:.1f}")
    assert long_attack["2000"]["peak_mib"] <= long_attack["20"]["peak_mib"]
    for kind in ("over_ours", "batch_cut_over_ours", "over_ours_all_broken"):
        shown = " / ".join(f"{ratios[f'{attack}_fastest_peer_{kind}']:.1f}" for attack in ("ifgsm", "mim", "pgd"))
        assert f"| {shown} |" in readme
    assert f"| {ratios['ensemble_over_bare']} |" in readme
    assert f"| {ratios['naive_over_ours']:.1f} |" in readme
    assert f"| {ratios['art_over_ours']:.1f} / {ratios['art_large_batches_over_ours']:.1f} |" in readme
    assert f"| {ratios['naive_over_ours_noise_given']:.1f} |" in readme
    assert ratios["votes_identical"] == 1.0
    assert f"| {ratios['time_ours_over_plain']} / {ratios['time_ours_over_plain_cut']} |" in readme
    assert f"| {ratios['opacus_ghost_over_ours']} / {ratios['opacus_default_over_ours']} |" in readme
    cut = f"{ratios['opacus_ghost_cut_over_ours']} / {ratios['opacus_default_cut_over_ours']}"
    assert f"| {cut} |" in readme
    assert f"| {ratios['memory_ours_over_plain']} |" in readme
    assert f"| {ratios['canaries_over_none']} |" in readme
    assert ratios["canaries_over_none"] <= 1.2
    assert f"| {ratios['one_by_one_over_side_by_side']} |" in readme
    spent = [ratios[f"{method}_seconds_of_1000"] for method in ("published", "sound")]
    assert quotes(README, *map(str, spent))
