"""A package of one's own adds one of each thing by name: trained, certified, attacked, audited and reported."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.command_line import Result, call
from support.installed import EXTENSION, install_extension

ROOT = Path(__file__).parents[2]
PACKAGE = EXTENSION / "stobatch_example"
PAGES = {"method": "method.py", "attack": "attack.py", "certificate": "certificate.py", "dataset": "dataset.py"}


@dataclass(frozen=True)
class Installed:
    """What one process gave in which the package is installed: a finished run, other calls, the conformance suite."""

    run: Path
    calls: dict[str, Result]
    suite: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Plan, train, certify, evaluate, audit, report and verify, through the command line; and all that is asked."""
    folder = tmp_path_factory.mktemp("installed")
    site, run, out = install_extension(folder / "site"), folder / "bars", folder / "calls.json"
    attack = ["attack", str(run), "--radius", "0.1", "--attack"]
    conformance = ROOT / "tests" / "system" / "conformance"
    asked = {
        "calls": {
            "demo": ["demo", "--recipe", "bars", "--out", str(run)],
            "attack": [*attack, "shrinking_steps", "--json"],
            "misspelt": [*attack, "shrinking_step"],
            "report": ["report", str(run)],
            "named": ["plan", "--json", "--recipe", "bars"],
            "placed": ["plan", "--json", "--recipe", "stobatch_example.recipe:bars"],
        },
        "suite": [
            *("-p", "no:cacheprovider", str(conformance)),
            *("--ignore", str(conformance / "test_conformance_access_twins.py")),
        ],
        "out": str(out),
    }
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(site))),
        "STOBATCH_CONFORMANCE": "bars",
    }
    command = [sys.executable, str(ROOT / "tests" / "support" / "with_extension.py")]
    suite = subprocess.run(
        command, input=json.dumps(asked), env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert out.exists(), suite.stderr
    return Installed(run, {name: Result(**found) for name, found in json.loads(out.read_text()).items()}, suite)


@pytest.fixture(scope="module")
def finished(installed: Installed) -> Path:
    done = installed.calls["demo"]
    assert done.code == 0, done.err[-3000:]
    assert "lipschitz" in done.out
    assert "proved: ε = 3" in done.out
    assert "every radius is computed again by the code of the package stobatch-example" in done.out
    return installed.run


def document(run_directory: Path, name: str) -> dict:
    return json.loads((run_directory / f"{name}.json").read_text())


def test_every_name_is_the_packages_own(finished: Path) -> None:
    config = document(finished, "config")["config"]
    assert config["method"]["name"] == "smooth_labels"
    assert config["method"]["expected_batch_size"] == 30
    assert (config["data"]["name"], config["model"]["architecture"]) == ("bars", "tiny_stack")
    assert any(
        line.startswith(
            "the method and its loss are those of the package stobatch-example, which stobatch did not check"
        )
        for line in document(finished, "plan")["guarantee"]["assumptions"]
    )
    assert document(finished, "training")["data"]["public"] is False
    certificates = document(finished, "certificates")
    (kind,) = certificates["kinds"]
    assert kind["name"] == "lipschitz"
    assert kind["source"].endswith("by the package stobatch-example, not checked by stobatch")
    assert certificates["certified_accuracy"]["lipschitz"][0]["value"] > 0, "the certificate proves something"
    (under,) = document(finished, "scores")["under_attack"]
    assert under["attacks"] == ["shrinking_steps", "madry"]
    accuracy = {(row["attack"], row["radius"]): row["value"] for row in under["accuracy"]}
    assert accuracy["shrinking_steps", 0.5] < under["clean_accuracy"]["value"], "the attack finds something"
    report = (finished / "report.html").read_text()
    assert "method smooth_labels · data bars" in report
    assert "lipschitz" in report


def test_the_certificate_holds_under_attack(finished: Path) -> None:
    (finding,) = document(finished, "audit")["findings"]
    assert (finding["instrument"], finding["verdict"]) == ("certificates", "consistent")


def test_its_attack_is_named_on_the_command_line(installed: Installed) -> None:
    done = installed.calls["attack"]
    assert done.code == 0, done.err
    assert done.json()["attacks"] == ["shrinking_steps"]
    assert "Did you mean shrinking_steps?" in installed.calls["misspelt"].refusal()


def test_without_the_package_its_names_are_refused_with_what_there_is(finished: Path) -> None:
    for arguments in (("certify", finished), ("plan", "--recipe", "bars")):
        assert re.search("Nearest: |There are |Use one of ", call(*arguments).refusal())


def test_a_recipe_is_named_by_its_place(installed: Installed) -> None:
    assert installed.calls["named"].code == 0, installed.calls["named"].err
    assert installed.calls["named"].out == installed.calls["placed"].out


@pytest.mark.slow
def test_its_method_passes_the_conformance_suite(installed: Installed) -> None:
    assert installed.suite.returncode == 0, installed.suite.stdout[-3000:]
    assert int(re.findall(r"(\d+) passed", installed.suite.stdout)[-1]) > 80


@pytest.mark.parametrize("page", PAGES)
def test_the_pages_show_the_package_as_it_is(page: str) -> None:
    text = (ROOT / "docs" / "extend" / f"{page}.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    assert code == (PACKAGE / PAGES[page]).read_text()
    (entry,) = re.findall(r"```toml\n(.*?)```", text, re.S)
    assert entry in (EXTENSION / "pyproject.toml").read_text()
    assert len(text.splitlines()) <= 80, "a page is one screen"
