"""Whatever does not fit gets one clear sentence: what is wrong, why, and what to do."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_federation import ask, opened, pictures, started, terms

from stobatch.errors import RunError, SettingError, StobatchError
from stobatch.federated import Answer, Federation, FederationError, InProcessTransport, Party, Refused, converse
from stobatch.training.ledger import Ledger


def said(error: pytest.ExceptionInfo[StobatchError]) -> str:
    assert "\n" not in str(error.value)
    assert error.value.remedy.endswith(".")
    return str(error.value)


@pytest.mark.parametrize(
    ("parties", "words"),
    [
        (["north"], "'north' is not a party"),
        (["north:0"], "'north:0' is not a party"),
        (["north:10:x"], "'north:10:x' is not a party"),
        (["../north:10"], "'../north:10' is not a party"),
        (["north:10:5:3:1"], "'north:10:5:3:1' is not a party"),
        (["north:10", "north:20"], "a party is named twice"),
        (["north:40:12:7"], "north takes part in 7 rounds of 6"),
        (["north:40:12:7"], "Write north:40:12:6 there, or set training.steps=7"),
        (["north:40:12:7"], "method.parties has"),
        (["north:10:12"], "batch_size=12 does not fit 10"),
        ([], "parties is empty"),
    ],
)
def test_terms_that_cannot_be(parties: list[str], words: str) -> None:
    import stobatch

    def plan() -> None:
        stobatch.plan(terms(**{"method.parties": parties}), dataset=pictures())

    with pytest.raises(SettingError) as error:
        plan()
    assert words in said(error)


DIFFERENT: dict[str, tuple[dict[str, Any], str]] = {
    "clip norm": ({"method.clip_norm": 1.0}, "east has clip_norm=1.0, the terms say 0.5"),
    "batch size": ({"method.parties": ["north:40:12", "east:30:9", "south:20:6:4"]}, "east has expected_batch_size=9"),
    "cap": ({"method.parties": ["north:40:12", "east:30:8:5", "south:20:6:4"]}, "east has steps=5, the terms say 6"),
    "budget": ({"method.epsilon": 5.0}, "east has target_epsilon=5.0, the terms say 3.0"),
    "noise": ({"method.noise_multiplier": 50.0}, "east agreed to terms"),
    "delta": ({"method.delta": 1e-4}, "east has delta=0.0001, the terms say 0.001"),
    "losses": ({"method.radius": 0.1}, "east agreed to terms"),
    "network": ({"model.architecture": "conv 2 3/2, relu, linear"}, "east agreed to terms"),
    "schedule": ({"method.ramp": 0.1}, "east agreed to terms"),
    "learning rate": ({"training.schedule": "linear"}, "east agreed to terms"),
}


@pytest.mark.parametrize(("changes", "words"), DIFFERENT.values(), ids=DIFFERENT)
def test_a_party_with_other_settings_is_not_enrolled(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    federation, directories = started(tmp_path / "run")
    _, others = started(tmp_path / "other", terms(**changes))
    with pytest.raises(FederationError) as error:
        converse(federation, InProcessTransport(opened(directories | {"east": others["east"]})))
    assert words in said(error)
    assert all(Ledger.of(path).accounted == 0 for path in directories.values())


def test_a_party_refuses_what_it_did_not_agree_to_and_counts_nothing(tmp_path: Path) -> None:
    federation, directories = started(tmp_path / "run")
    other, _ = started(tmp_path / "other", terms(**{"model.architecture": "conv 2 3/2, relu, linear"}))
    north, fine = Party.open(directories["north"]), federation.parameters()
    endless = {name: torch.full_like(value, torch.nan) for name, value in fine.items()}
    missing = dict(list(fine.items())[1:])
    for parameters, step, agreed, words in (
        (fine, 0, other.agreed, "north agreed to terms"),
        (fine, 6, federation.agreed, "step 6 is none of the 6 agreed on"),
        (fine, -1, federation.agreed, "step -1 is none of the 6"),
        (other.parameters(), 0, federation.agreed, "do not fit its network"),
        (missing, 0, federation.agreed, "do not fit its network"),
        (endless, 0, federation.agreed, "scores are NaN or infinite"),
    ):
        with pytest.raises(Refused) as error:
            north.answer(parameters, step, agreed)
        assert words in said(error)
    assert north.rounds == 0
    assert ask(north, federation)


def test_an_answer_that_does_not_fit_is_named(tmp_path: Path) -> None:
    federation, directories = started(tmp_path / "run")
    parties = opened(directories)
    federation.enrol(InProcessTransport(parties).statements())
    good = ask(parties["north"], federation)
    broken = {name: value * torch.nan for name, value in good.items()}
    for answers, words in (
        ({"north": Answer({"weight": torch.zeros(3)}, 1)}, "the answer of north does not fit the network"),
        ({"north": Answer(broken, 1)}, "the answer of north is not made of numbers"),
        ({"south": Answer(good, 1)}, "south was not asked in step 0"),
    ):
        with pytest.raises(FederationError) as error:
            federation.combine(answers)
        assert words in said(error)
    assert federation.step == 0


def test_strangers_and_absentees_are_named(tmp_path: Path) -> None:
    federation, directories = started(tmp_path / "run")
    statements = InProcessTransport(opened(directories)).statements()
    with pytest.raises(FederationError) as error:
        federation.enrol({name: said for name, said in statements.items() if name != "east"})
    assert "no word from east" in said(error)
    with pytest.raises(FederationError) as error:
        federation.enrol(statements | {"west": statements["east"]})
    assert "is not a party of this federation" in said(error)


def test_a_copied_directory_is_refused(tmp_path: Path) -> None:
    """The usual way to two parties with one seed: an image of a machine that was made after the party."""
    federation, directories = started(tmp_path / "run")
    shutil.copy(directories["north"] / "private" / "seeds.json", directories["east"] / "private" / "seeds.json")
    with pytest.raises(FederationError) as error:
        converse(federation, InProcessTransport(opened(directories)))
    assert "east and north have the same seeds" in said(error)


def test_records_are_what_the_party_was_started_with(tmp_path: Path) -> None:
    _, directories = started(tmp_path / "run")
    data, agreed = pictures(), terms()
    with pytest.raises(StobatchError) as error:
        Party.found(tmp_path / "west", agreed, data.info, "north", data.train.take(slice(39)))
    assert "the records of north are not what the terms say" in said(error)
    assert not (tmp_path / "west").exists()
    with pytest.raises(RunError) as run_error:
        Party.found(directories["north"], agreed, data.info, "north", data.train.take(slice(40)), resume=True)
    assert "was started with other records" in said(run_error)
    shutil.copy(*(directories[name] / "private" / "examples.safetensors" for name in ("east", "north")))
    with pytest.raises(RunError) as run_error:
        Party.open(directories["north"])
    assert "were changed" in said(run_error)


def test_directories_that_are_something_else(tmp_path: Path) -> None:
    federation, directories = started(tmp_path / "run")
    for act, words in (
        (lambda: Party.open(federation.run.path), "is not a party"),
        (lambda: started(tmp_path / "run"), "already holds this run"),
        (lambda: started(tmp_path / "run", terms(**{"training.steps": 7})), "was started with other settings"),
        (lambda: Party.found(directories["north"], terms(), pictures().info, "west", pictures().train), "'west' is no"),
    ):
        with pytest.raises(StobatchError) as error:
            act()
        assert words in said(error)
    assert Federation.open(tmp_path / "run").step == 0
