"""Seeded cases in every run of the tests, the first of the campaign's, and the reproductions that began them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from stobatch.config import load_config
from stobatch.errors import DataError, ModelError, RunError, SettingError
from stobatch.files import read_json
from stobatch.models.layered import build_layered
from stobatch.settings import parse_assignment
from stobatch_recipes import recipe

from .campaign import SURFACES, Outcome, campaign, joined, parts, run

CASES = 25_000
"""The same in every run; `benchmarks/reliability/fuzz.py` makes a million (docs/reliability.md)."""


@pytest.mark.parametrize("surface", SURFACES)
def test_no_traceback_no_hang_no_wrong_answer(surface: str) -> None:
    count = CASES * SURFACES[surface][1] // 1000
    outcome = run(surface, range(count), seed=1)
    assert not outcome.findings, "\n".join(outcome.findings)
    assert outcome.cases == outcome.accepted + outcome.refused == count
    assert outcome.accepted, "no case was near enough to a valid one"


def test_the_shares_are_of_a_thousand() -> None:
    assert sum(share for _, share in SURFACES.values()) == 1000


def test_parts_are_the_whole() -> None:
    """What several processes make is what one makes, case by case."""
    cut = parts(20_000, 7)
    for name, (_, share) in SURFACES.items():
        assert sorted(index for of, indices in cut if of == name for index in indices) == list(range(20 * share))
    pieces = [run("settings", indices, seed=3) for of, indices in parts(1000, 7) if of == "settings"]
    one, many = run("settings", range(280), seed=3).to_dict(), joined(pieces).to_dict()
    assert {**one, "slowest_s": 0} == {**many, "slowest_s": 0}
    assert one["accepted"]
    assert one["refused"]


class TestTwins:
    """Readers with a mistake each, which a surface must notice."""

    def found(self, surface: str, cases: int) -> Outcome:
        return campaign(cases, 7, surface=surface)[surface]

    def test_a_reader_that_lets_an_error_through(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("stobatch.strict_json._require_finite", lambda digits: {}[digits])
        assert self.found("config files", 200).tracebacks

    def test_a_parser_that_takes_a_neighbouring_value(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from stobatch import settings

        build = settings._build

        def next_number(value: object, kind: object) -> object:
            """Take 587 for 586: every recipe has such numbers, so that no list of recipes hides it."""
            is_count = isinstance(value, int) and value > 1
            return build(value + 1 if is_count else value, kind)  # type: ignore[operator]

        monkeypatch.setattr(settings, "_build", next_number)
        assert self.found("config files", 400).findings

    def test_a_manifest_whose_digest_is_not_looked_at(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from stobatch.data import shards as manifest

        monkeypatch.setattr(manifest.Manifest, "read", classmethod(_careless_read))
        assert self.found("shard manifests", 400).wrong

    def test_a_case_that_hangs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import time

        from . import campaign as module

        monkeypatch.setattr(module, "LIMIT_S", 0.05)
        monkeypatch.setitem(SURFACES, "asleep", (lambda rng, folder: time.sleep(60), 0))
        assert run("asleep", range(1), seed=1).hung == 1


def _careless_read(cls: type, folder: Path) -> object:
    from stobatch.data.shards import FILE, KIND

    content = read_json(folder / FILE, KIND)
    content.pop("digest", None)
    try:
        return cls._from_content(folder, content)  # type: ignore[attr-defined]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise RunError("no.", remedy="None.") from None


class TestReproductions:
    """What ended in a traceback, or did not end."""

    @pytest.mark.parametrize(
        "value", ["[" * 100_000, '{"a":' * 100_000, "9" * 4301, "1e400", "NaN", '"\\ud800"', "a\0b"]
    )
    @pytest.mark.parametrize(
        "key", ["training.steps", "training.learning_rate", "machine.data_root", "evaluation.radii"]
    )
    def test_settings(self, key: str, value: str) -> None:
        if key == "machine.data_root" and value[0] in "91N":
            assert recipe("demo").override(*parse_assignment(f"{key}={value}")).machine.data_root == value
            return
        with pytest.raises(SettingError) as caught:
            recipe("demo").override(*parse_assignment(f"{key}={value}"))
        assert str(caught.value).isprintable()

    @pytest.mark.parametrize("name", ["c.toml", "c.json"])
    @pytest.mark.parametrize(
        "text",
        ["x = " + "[" * 100_000, "[" * 100_000, "seed = " + "9" * 5000, "seed = 0x" + "f" * 9000, '{"seed": 1e400}'],
    )
    def test_files(self, tmp_path: Path, name: str, text: str) -> None:
        (tmp_path / name).write_text(text)
        with pytest.raises(SettingError) as caught:
            load_config(tmp_path / name)
        assert len(str(caught.value)) < 10_000

    def test_a_file_that_is_not_text(self, tmp_path: Path) -> None:
        (tmp_path / "c.toml").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(SettingError, match=r"c\.toml is not valid"):
            load_config(tmp_path / "c.toml")

    @pytest.mark.parametrize(
        "layers",
        [
            "conv 99999999999 3, linear",
            "conv 8 3+99999999, linear",
            "linear 200000000, linear",
            "conv 2 3000/1+1500, linear",
        ],
    )
    def test_layers_too_large_for_any_machine(self, layers: str) -> None:
        with pytest.raises(ModelError):
            build_layered(layers, (1, 28, 28), 10, torch.Generator())

    def test_the_paper_networks_too(self) -> None:
        from stobatch.models import build

        config = recipe("paper.mnist").override("model.last_hidden_size", 10**9).model
        with pytest.raises(ModelError, match="weights and values"):
            build(config, (1, 28, 28), 10, torch.Generator())

    @pytest.mark.parametrize(
        "text", ["[" * 100_000, '{"schema": NaN}', '{"a": 1, "a": 2}', '{"schema": "\\ud800"}', "\ufeff{}"]
    )
    def test_documents(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(RunError, match="not valid JSON"):
            read_json(tmp_path / "x.json", "plan")

    def test_a_number_of_classes_that_would_be_counted_out(self) -> None:
        from stobatch import from_tensors

        inputs, labels = torch.zeros(2, 1, 2, 2), torch.tensor([0, 2**40])
        with pytest.raises(DataError, match="number of classes"):
            from_tensors(inputs, labels, inputs, labels)

    def test_the_same_case_twice(self, tmp_path: Path) -> None:
        from .mutate import mutated

        value = recipe("demo").to_dict()
        one, other = (mutated(random.Random("3"), value, 3) for _ in range(2))
        assert repr(one) == repr(other)
