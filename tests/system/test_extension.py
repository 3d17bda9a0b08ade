"""A package of one's own adds one of each thing by name: trained, certified, attacked, audited and reported."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command_line import call
from support.disturbed import Ended, Server
from support.installed import EXTENSION, install_extension

ROOT = Path(__file__).parents[2]
PACKAGE = EXTENSION / "stobatch_example"
PAGES = {"method": "method.py", "attack": "attack.py", "certificate": "certificate.py", "dataset": "dataset.py"}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """As if the package were installed."""
    site = install_extension(tmp_path_factory.mktemp("site"))
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(site))), "COLUMNS": "200"}


@pytest.fixture(scope="module")
def stobatch_process(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"), environment)
    yield server
    server.close()


@pytest.fixture(scope="module")
def finished(stobatch_process: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plan, train, certify, evaluate, audit, report and verify, through the command line."""
    out = tmp_path_factory.mktemp("runs") / "bars"
    done = stobatch_process("demo", "--recipe", "bars", "--out", out)
    assert done.code == 0, done.err[-3000:]
    assert "lipschitz" in done.out
    assert "proved: ε = 3" in done.out
    return out


def document(run_directory: Path, name: str) -> dict:
    return json.loads((run_directory / f"{name}.json").read_text())


def test_every_name_is_the_packages_own(finished: Path) -> None:
    config = document(finished, "config")["config"]
    assert config["method"]["name"] == "smooth_labels"
    assert config["method"]["expected_batch_size"] == 30
    assert (config["data"]["name"], config["model"]["architecture"]) == ("bars", "tiny_stack")
    assert document(finished, "training")["data"]["public"] is False
    certificates = document(finished, "certificates")
    assert [kind["name"] for kind in certificates["kinds"]] == ["lipschitz"]
    assert certificates["certified_accuracy"]["lipschitz"][0]["value"] > 0, "the certificate proves something"
    (under,) = document(finished, "scores")["under_attack"]
    assert under["attacks"] == ["shrinking_steps", "madry"]
    accuracy = {(row["attack"], row["radius"]): row["value"] for row in under["accuracy"]}
    assert accuracy["shrinking_steps", 0.1] < under["clean_accuracy"]["value"], "the attack finds something"
    report = (finished / "report.html").read_text()
    assert "method smooth_labels · data bars" in report
    assert "lipschitz" in report


def test_the_certificate_holds_under_attack(finished: Path) -> None:
    (finding,) = document(finished, "audit")["findings"]
    assert (finding["instrument"], finding["verdict"]) == ("certificates", "consistent")


def test_its_attack_is_named_on_the_command_line(stobatch_process: Server, finished: Path) -> None:
    def attacked(name: str, *more: str) -> Ended:
        return stobatch_process("attack", finished, "--attack", name, "--radius", "0.1", *more)

    done = attacked("shrinking_steps", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["attacks"] == ["shrinking_steps"]
    done = attacked("shrinking_step")
    assert done.code == 2
    assert "Did you mean shrinking_steps?" in done.err


def test_without_the_package_its_names_are_refused_with_what_there_is(finished: Path) -> None:
    for arguments in (("certify", finished), ("plan", "--recipe", "bars")):
        assert re.search("Nearest: |There are |Use one of ", call(*arguments).refusal())


def test_a_recipe_is_named_by_its_place(stobatch_process: Server) -> None:
    found = [stobatch_process("plan", "--json", "--recipe", name) for name in ("bars", "stobatch_example.recipe:bars")]
    assert found[0].code == 0, found[0].err
    assert found[0].out == found[1].out


@pytest.mark.slow
def test_its_method_passes_the_conformance_suite(environment: dict[str, str]) -> None:
    suite = ROOT / "tests" / "system" / "conformance"
    twins = suite / "test_conformance_access_twins.py"
    wanted = {**environment, "STOBATCH_CONFORMANCE": "bars"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(suite), "--ignore", str(twins)]
    done = subprocess.run(command, env=wanted, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) > 80


@pytest.mark.parametrize("page", PAGES)
def test_the_pages_show_the_package_as_it_is(page: str) -> None:
    text = (ROOT / "docs" / "extend" / f"{page}.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    assert code == (PACKAGE / PAGES[page]).read_text()
    (entry,) = re.findall(r"```toml\n(.*?)```", text, re.S)
    assert entry in (EXTENSION / "pyproject.toml").read_text()
    assert len(text.splitlines()) <= 80, "a page is one screen"
