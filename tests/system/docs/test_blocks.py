"""Every command and every line of Python on a page is run, or says why not."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from support.page_blocks import COMMAND, LANGUAGES, OTHER_LANGUAGES, Block, blocks_of, misread, run_blocks
from support.pages import ROOT, blocks

import stobatch
from stobatch.config import DataConfig
from stobatch.data import load
from stobatch.evaluation.sanity import RULES
from stobatch.seeds import Seeds
from stobatch_recipes import recipe

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted(DOCS.rglob("*.md"))]
BLOCKS = [block for page in PAGES for block in blocks_of(page)]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_says_what_it_is(block: Block) -> None:
    assert block.language in LANGUAGES + OTHER_LANGUAGES
    if block.language not in LANGUAGES:
        hidden = [line for line in block.code.splitlines() if COMMAND.match(line)]
        assert not hidden, "commands are in a block of `sh`, where they are run or say why not"
    if block.mark == "run by":
        (test,) = (ROOT / "tests").rglob(block.words)
        assert block.page.stem in test.read_text() or block.page.parent.name in test.read_text()
    if block.mark == "not run":
        assert len(block.words) > 8, "a reason"


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language in ("sh", "bash")], ids=str)
def test_the_program_understands_every_command(block: Block) -> None:
    assert not [command for command in block.commands if misread(command)]


def test_a_command_that_the_program_would_refuse_is_found() -> None:
    assert misread("stobatch trian --out x") == "verb trian"
    assert misread("stobatch train --outt x") == "option --outt of train"
    assert misread("torchrun -m stobatch train --set method.epsilom=1") == "setting method.epsilom=1"
    assert misread("stobatch train --recipe demo --set 'method.epsilon=1' --out RUN  # --nothing") is None


def test_a_block_that_fails_or_hides_is_found(tmp_path: Path) -> None:
    text = "```python\nassert 0\n```\n\n<!-- not run: for hours -->\n```sh\nfalse\n```\n\n```\nstobatch train\n```\n"
    page = tmp_path / "page.md"
    page.write_text(text)
    failing, excused, hidden = blocks_of(page)
    assert (failing.mark, excused.mark, excused.words) == ("", "not run", "for hours")
    assert COMMAND.match(hidden.code)
    with pytest.raises(AssertionError):
        run_blocks(page, tmp_path)
    page.write_text(text.partition("\n\n")[2])
    assert run_blocks(page, tmp_path) == ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_sets_a_public_seed_in_python(page: Path) -> None:
    for block in blocks(page):
        assert not re.search(r"[\"']seed[\"']|\bseeds?=", block), block


def make_photos(folder: Path) -> None:
    """Write digits as the files that the README speaks of, a third as many."""
    data = load(DataConfig())
    for part, examples, count in (("train", data.train, 1000), ("test", data.test, 100)):
        for number in range(count):
            place = folder / "photos" / part / str(int(examples.labels[number]))
            place.mkdir(parents=True, exist_ok=True)
            pixels = ((examples.inputs[number, 0] + 1) * 127.5).round().byte().numpy()
            Image.fromarray(pixels).save(place / f"{number}.png")


def make_published_run(folder: Path) -> None:
    """Train the published mechanism a little, as RUN: one pass and a vote."""
    small = {"data.train_limit": 300, "data.test_limit": 6, "method.batch_size": 99, "training.steps": 1}
    few = {"evaluation.vote_limit": 2, "evaluation.vote_draws": 20, "evaluation.adaptive_attacks": ["fgsm"]}
    stobatch.train(recipe("published.demo").override_all(small | few), folder / "RUN", quiet=True)


def make_run_with_canaries(folder: Path) -> None:
    """Train and certify the demo a little, as RUN."""
    small = {"data.train_limit": 600, "data.test_limit": 20, "method.batch_size": 100, "training.steps": 2}
    few = {"canaries.num": 400, "audit.num_inputs": 5, "audit.attack_steps": 5, "evaluation.radii": [0.2]}
    stobatch.train(recipe("demo").override_all(small | few), folder / "RUN", quiet=True)
    stobatch.certify(folder / "RUN", quiet=True)


def check_readme(said: str) -> None:
    """The output that the README shows: the plan to the digit, accuracies as far as secret noise allows."""
    shown = next(block.code for block in blocks_of(ROOT / "README.md") if block.language == "text")
    (plan, *rows), (shown_plan, *shown_rows) = said.splitlines(), shown.splitlines()
    assert plan.partition(", δ")[2] == shown_plan.partition(", δ")[2]
    assert plan.startswith("proved ε = 2.99")
    assert [row.rpartition(" ")[0] for row in rows] == [row.rpartition(" ")[0] for row in shown_rows]
    # A third of the README's images: trainings had 60 to 80% at 0.2, guessing gives 10%.
    assert all(40 < int(row.rpartition(" ")[2].rstrip("%")) <= 100 for row in rows)


def check_tutorial(said: str) -> None:
    for words in ("proved ε = 0.99", "privacy - not tested", "bounds - consistent", "report.html", "agrees"):
        assert words in said, words


def check_published_tutorial(said: str) -> None:
    assert "NOT a proven guarantee" in said
    assert "corrected: proved" in said


def check_attacking(said: str) -> None:
    assert "still right:" in said
    listed = re.findall(
        r"^\| (?:\*\*)?([^|*]+?)(?:\*\* \(error\))? \| ([^|]+) \|$", (DOCS / "attacking.md").read_text(), re.M
    )
    assert dict(listed).items() >= {rule.name: rule.raised_if for rule in RULES}.items()


def check_auditing(said: str) -> None:
    planted, status, verdict, statement = said.splitlines()[-4:]
    assert planted.startswith("consistent | 1000 gradient canaries in the training itself: ε ≥ ")
    assert (status, verdict) == ("proved", "refuted")
    assert statement.startswith("perturbed inputs (Lemma 3): 2000 of 2000 told apart")


def check_comparing(said: str) -> None:
    *rows, tests = said.splitlines()
    assert [row.split(",")[0] for row in rows] == [f"{name} ε=8 (proved)" for name in ("dpsgd", "dp_adversarial")]
    assert tests.startswith("5 t-tests")


def check_own_data(said: str) -> None:
    (epsilon,) = re.findall(r"^proved ε = ([\d.]+), δ = 1e-05 \(add-or-remove-one, per training example", said, re.M)
    assert 1.9 < float(epsilon) <= 2
    (right,) = re.findall(r"^right: (\d+)%$", said, re.M)
    proved = re.findall(r"^right, and proved to stay so at ([\d.]+): (\d+)%$", said, re.M)
    assert [radius for radius, _ in proved] == ["0.1", "0.2"]
    # Half of the labels would be right by chance; the made-up images are easy.
    assert 80 <= int(proved[1][1]) <= int(proved[0][1]) <= int(right)
    (by_votes,) = re.findall(r"^\['l2 0.25: (\d+)%', 'l2 0.5: (\d+)%'\]$", said, re.M)
    assert 80 <= int(by_votes[1]) <= int(by_votes[0])


def check_budget(said: str) -> None:
    assert "limit: none" not in said
    (after,) = re.findall(r"proved ε = ([\d.]+) with what was spent", " ".join(said.split()))
    # 1, 0.5 and once more 1: below the sum, above the largest two.
    assert 1.2 < float(after) < 2.5


def check_networks(said: str) -> None:
    for block in blocks_of(ROOT / "docs/networks.md"):
        if block.language == "text":
            assert block.code in said
    proved = re.findall(r"^right, and proved to stay so at ([\d.]+): (\d+)%$", said, re.M)
    assert [radius for radius, _ in proved] == ["0.05", "0.1"]
    # Half of the labels would be right by chance; the made-up images are easy.
    assert 80 <= int(proved[1][1]) <= int(proved[0][1])


def check_tuning(said: str) -> None:
    words = " ".join(said.split())
    assert "the best of a random number of trainings" in words
    assert "hyper-parameters were chosen on the private data" not in words
    assert "second accountant finds" in words
    assert "differs" not in words


def check_persons(said: str) -> None:
    (epsilon,) = re.findall(r"^proved ε = ([\d.]+), δ = 0.0001 \(add-or-remove-one, per person", said, re.M)
    assert 1.9 < float(epsilon) <= 2
    (right,) = re.findall(r"^right: (\d+)%$", said, re.M)
    # Half of the labels would be right by chance; the made-up images are easy.
    assert int(right) >= 80


def check_watching(said: str) -> None:
    seen = re.findall(
        r"^(\d) of 4 \{'learning_rate': [\d.]+, 'test_accuracy': [\d.]+, 'epsilon_spent': [\d.]+\}$", said, re.M
    )
    assert seen == ["2", "4"]


def check_figures(said: str) -> None:
    assert "Figure 4 (smoke: no result): " in said
    words = " ".join(said.replace("│", " ").split())
    assert "not begun 0 of 14" in words
    assert "void; with secret seeds" in words or "void; with secret" in words


CHECKS: dict[str, Callable[[str], None]] = {
    "README.md": check_readme,
    "docs/tutorial.md": check_tutorial,
    "docs/tutorial-published.md": check_published_tutorial,
    "docs/attacking.md": check_attacking,
    "docs/auditing.md": check_auditing,
    "docs/comparing.md": check_comparing,
    "docs/figures.md": check_figures,
    "docs/budget.md": check_budget,
    "docs/tuning.md": check_tuning,
    "docs/watching.md": check_watching,
    "docs/your-own-data.md": check_own_data,
    "docs/networks.md": check_networks,
    "docs/persons.md": check_persons,
}
PREPARATIONS: dict[str, Callable[[Path], None]] = {
    "README.md": make_photos,
    "docs/attacking.md": make_published_run,
    "docs/auditing.md": make_run_with_canaries,
}


def test_every_page_with_a_block_to_run_is_run() -> None:
    runs = {
        str(block.page.relative_to(ROOT))
        for block in BLOCKS
        if block.language in LANGUAGES and block.mark in ("", "run with")
    }
    assert runs == set(CHECKS)


@pytest.mark.slow
@pytest.mark.parametrize("page", CHECKS)
def test_a_page_runs_as_written(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page == "docs/auditing.md":
        # Secret as far as the library knows: whether a true claim survives must not hang on luck.
        monkeypatch.setattr(Seeds, "secret", classmethod(lambda cls: cls(7, public=False)))
    PREPARATIONS.get(page, lambda folder: None)(tmp_path)
    CHECKS[page](run_blocks(ROOT / page, tmp_path))
