"""Looking things up: settings, recipes, the paper, the version; quickly, and without PyTorch."""

from __future__ import annotations

import subprocess
import sys

import pytest

import stobatch

LIGHT = (["--help"], ["--version"], ["settings"], ["settings", "steps"], ["recipes"], ["recipes", "demo"], ["where"])
HEAVY = ("torch", "numpy", "scipy", "pyarrow", "matplotlib", "dp_accounting")


def imports_nothing_heavy(arguments: list[str], first: str = "pass") -> subprocess.CompletedProcess[str]:
    """Run a command line in a process of its own, which fails if something heavy was imported in the end."""
    code = (
        f"{first}\nimport sys; from stobatch.__main__ import main\n"
        "try: main()\nexcept SystemExit as end: assert not end.code, end.code\n"
        f"heavy = sorted(set({HEAVY}) & set(sys.modules)); print(heavy, file=sys.stderr); assert not heavy"
    )
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", LIGHT, ids=" ".join)
def test_an_answer_imports_nothing_heavy(arguments: list[str]) -> None:
    done = imports_nothing_heavy(arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_a_whole_name_is_one_recipe_and_says_what_it_sets(cli) -> None:
    assert [row["name"] for row in cli("recipes", "demo", "--json").json()["recipes"]] == ["demo"]
    assert "training.steps = " in cli("recipes", "demo").out
    assert len(cli("settings", "steps", "--json").json()["settings"]) > 0


def test_the_test_would_notice() -> None:
    """The broken twin: an answer for which one of them is imported."""
    assert "AssertionError" in imports_nothing_heavy(["--version"], first="import numpy").stderr


def test_a_report_says_what_is_missing_before_it_computes_again(tmp_path) -> None:
    """What follows needs PyTorch: each number of the page is computed from weights, ledger and rows."""
    code = (
        "import sys; from stobatch.__main__ import main\n"
        "try: main()\nexcept SystemExit as end: assert end.code == 2, end.code\nassert 'torch' not in sys.modules"
    )
    asked = [sys.executable, "-c", code, "report", str(tmp_path)]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "is not a run" in done.stderr


def test_the_end_of_a_command_looks_for_no_garbage() -> None:
    """A search through all that was imported takes longer than most commands compute."""
    code = (
        "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count() > 1000))\n"
        "from stobatch.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "True"


def test_import_stobatch_is_lazy() -> None:
    code = f"import sys, stobatch, stobatch_recipes; assert not set({HEAVY}) & set(sys.modules), sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_version(cli) -> None:
    assert cli("--version").out == f"stobatch {stobatch.__version__}\n"


def test_a_setting_by_its_whole_or_its_last_name(cli) -> None:
    for asked in ("training.steps", "steps"):
        (row,) = cli("settings", asked, "--json").json()["settings"]
        said = (row["key"], row["type"], row["allowed"], row["default"])
        assert said == ("training.steps", "int", "at least 1", "4002")
    section = cli("settings", "audit", "--json").json()["settings"]
    assert {row["key"].partition(".")[0] for row in section} == {"audit"}
    several = cli("settings", "epsilon", "--json").json()["settings"]
    assert ["published"] in [row["methods"] for row in several]


@pytest.mark.parametrize(("asked", "said"), [("stesp", "Nearest: steps"), ("qqqq", "Run `stobatch settings`")])
def test_a_setting_that_is_not_there(cli, asked: str, said: str) -> None:
    assert said in cli("settings", asked).refusal()


def test_a_recipe_says_what_it_sets(cli) -> None:
    (row,) = cli("recipes", "sound.mnist_strict", "--json").json()["recipes"]
    assert row["privacy"] == "proved ε = 0.2"
    assert row["settings"]["method.epsilon"] == 0.2
    assert "claimed" in cli("recipes", "published").out
    assert "method.epsilon = 0.2" in cli("recipes", "sound.mnist_strict").out
