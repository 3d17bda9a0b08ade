"""Names that other packages add: found without an import, refused in one line, never at the cost of another name."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.installed import lay_out

from stobatch.errors import SettingError
from stobatch.registry import ARCHITECTURES, ATTACKS, CERTIFICATES, DATA_SETS, METHODS, Names, Registry, read_location
from stobatch_recipes import RECIPES, recipe

KINDS = {"method": METHODS, "attack": ATTACKS, "certificate": CERTIFICATES, "data set": DATA_SETS,
         "architecture": ARCHITECTURES, "recipe": RECIPES}  # fmt: skip
GROUP = "stobatch.tried"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "strange_module.py").write_text("def tool():\n    return 1\n\nnumber = 3\n")
    (tmp_path / "broken_module.py").write_text("raise RuntimeError('first line\\nsecond line')\n")
    (tmp_path / "leaving_module.py").write_text("import sys\nsys.exit(7)\n")
    return tmp_path


def tools() -> Registry:
    return Registry("tool", GROUP, {"own": "stobatch.registry:read_location"}, aliases={"old": "own"})


def refusal(registry: Registry, name: str) -> str:
    with pytest.raises(SettingError) as caught:
        registry.require(name)
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.what
    assert caught.value.remedy
    return message


@pytest.mark.parametrize("kind", KINDS)
def test_every_built_in_name_leads_to_what_it_says(kind: str) -> None:
    registry = KINDS[kind]
    assert registry.kind == kind
    assert registry.group == f"stobatch.{kind.replace(' ', '_')}s"
    for name in registry:
        value = registry.require(name)
        kinds = tuple(read_location(place) for place in registry.of)
        assert not kinds or isinstance(value, kinds), name
        assert registry.of or callable(value), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_misspelt_name_has_its_nearest_names(kind: str) -> None:
    registry = KINDS[kind]
    name = next(iter(registry))
    message = refusal(registry, name + "x")
    assert message.startswith(f"there is no {kind} '{name}x'.")
    assert name in message.split("Nearest: ")[1]


def test_a_package_adds_a_name_and_takes_none(site: Path, caplog: pytest.LogCaptureFixture) -> None:
    lay_out(site, "stranger", {GROUP: {"new": "strange_module:tool", "own": "strange_module:tool"}})
    registry = tools()
    assert list(registry) == ["own", "new"]
    assert registry["new"]() == 1
    assert registry.provider("new") == "the package stranger"
    assert registry.provider("own") is registry.provider("old") is None, "a taken name stays the library's own"
    with caplog.at_level(logging.WARNING, "stobatch"):
        assert registry["own"].__name__ == "read_location"
    (line,) = caplog.messages
    assert "\n" not in line
    assert all(part in line for part in ("tool 'own' of the package stranger", "built-in", "another name"))


def test_an_alias_is_accepted_and_never_listed_or_taken(site: Path) -> None:
    lay_out(site, "stranger", {GROUP: {"old": "strange_module:tool"}})
    registry = tools()
    assert registry["old"] is registry["own"]
    assert "old" in registry
    assert list(registry) == ["own"]
    assert registry.nearest("olt") == ["own"]
    registry["old"] = 5
    assert registry["own"] == 5


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("no_such_module:tool", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("broken_module:tool", "RuntimeError: first line second line"),
        ("leaving_module:tool", "SystemExit: 7"),
        ("strange_module:absent", "AttributeError"),
        ("strange_module:number", "is of type int, not a function"),
        ("not a place", "not a place fails with"),
    ],
)
def test_a_broken_entry_point_says_so_in_one_line_and_harms_no_other(site: Path, place: str, said: str) -> None:
    lay_out(site, "stranger", {GROUP: {"bad": place, "good": "strange_module:tool"}})
    registry = tools()
    assert "bad" in registry
    message = refusal(registry, "bad")
    assert "the tool 'bad' of the package stranger cannot be used." in message
    assert said in message
    assert message.endswith("Mend the package stranger, or uninstall it.")
    assert registry.require("good")() == 1
    assert registry.require("own").__name__ == "read_location"
    assert list(registry) == ["own", "bad", "good"]


def test_two_packages_with_one_name_are_refused(site: Path) -> None:
    for name in ("stranger", "passer-by"):
        lay_out(site, name, {GROUP: {"both": "strange_module:tool", name[:4]: "strange_module:tool"}})
    registry = tools()
    message = refusal(registry, "both")
    assert "2 packages with a tool 'both'" in message
    assert "stranger" in message
    assert "passer-by" in message
    assert registry["stra"]() == registry["pass"]() == 1


@pytest.mark.parametrize("kind", sorted(kind for kind, registry in KINDS.items() if registry.of))
def test_the_wrong_type_is_refused(kind: str, site: Path) -> None:
    registry = KINDS[kind]
    lay_out(site, "stranger", {registry.group: {"odd": "strange_module:number"}})
    fresh = Registry(kind, registry.group, {}, of=registry.of)
    assert "is of type int, not a " in refusal(fresh, "odd")


def test_names_of_a_setting_are_words_and_a_registry() -> None:
    names = Names("best", registry=CERTIFICATES)
    assert list(names) == ["best", *CERTIFICATES]
    assert len(names) == 1 + len(CERTIFICATES)
    assert "best" in names
    assert "votes" in names
    assert "worst" not in names


def test_checking_names_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from stobatch.config import CertificationConfig, DataConfig, EvaluationConfig, ModelConfig\n"
        "DataConfig(name='cifar10'); ModelConfig(architecture='resnet18'); CertificationConfig(certificate='votes')\n"
        "EvaluationConfig(adaptive_attacks=('apgd_t', 'square'))\n"
        "from stobatch_recipes import RECIPES; assert 'published.mnist' in RECIPES\n"
        "for wrong in (lambda: DataConfig(name='mnst'), lambda: ModelConfig(architecture='resnet')):\n"
        "    try: wrong()\n"
        "    except Exception as error: print(error)\n"
        "assert not {'torch', 'numpy', 'scipy'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Did you mean mnist?" in done.stdout
    assert "model.architecture=resnet18" in done.stdout


def test_a_name_that_is_built_in_asks_for_no_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise AssertionError("the installed packages were listed")

    monkeypatch.setattr("stobatch.registry.entry_points", refuse)
    fresh = Registry("attack", "stobatch.attacks", {"fgsm": "stobatch.attacks.pgd:fgsm"})
    started = time.perf_counter()
    assert "fgsm" in fresh
    assert time.perf_counter() - started < 1
    with pytest.raises(AssertionError, match="were listed"):
        _ = "fgsn" in fresh


def test_a_recipe_of_ones_own_is_named_by_its_place(site: Path) -> None:
    (site / "my_recipes.py").write_text(
        "from stobatch_recipes import recipe\n"
        "def mine():\n    return recipe('demo').override('training.steps', 7)\n"
        "def nothing():\n    return None\n"
        "def demanding(steps):\n    return mine()\n"
        "constant = 3\n"
    )
    assert recipe("my_recipes:mine").training.steps == 7
    for place, said in {
        "my_recipes:nothing": "returns NoneType",
        "my_recipes:demanding": "missing 1 required positional argument",
        "my_recipes:constant": "is not a function",
        "my_recipes:absent": "AttributeError",
        "my_absent_recipes:mine": "No module named 'my_absent_recipes'",
        ":": "cannot be read",
    }.items():
        with pytest.raises(SettingError, match="recipe") as caught:
            recipe(place)
        assert said in str(caught.value), place
        assert "\n" not in str(caught.value)
        assert caught.value.remedy
