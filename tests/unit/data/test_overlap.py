"""Test records that are training records are found, exactly; the owner hears the number, and nobody else does."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

import stobatch
from stobatch.config import DataConfig
from stobatch.data import Dataset, Examples, ShardedExamples, fashion_mnist, from_tensors, load, write_shards
from stobatch.data.overlap import HARMLESS, count_copies, find_copies, require_apart, statement
from stobatch.errors import DataError
from stobatch.registry import DATA_SETS
from stobatch.seeds import Seeds
from stobatch_recipes import recipe

OWN = DataConfig(name="tensors")


def images(count: int, seed: int, size: int = 3) -> Tensor:
    return torch.rand(count, 1, size, size, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def examples(inputs: Tensor) -> Examples:
    return Examples(inputs, torch.zeros(len(inputs), dtype=torch.int64), num_classes=2)


def with_copies(copies: int, tests: int = 100) -> Dataset:
    """A data set whose first test records are training records."""
    train, test = images(400, 1), images(tests, 2)
    test[:copies] = train[torch.arange(copies) * 3]
    labels = torch.arange(400) % 2
    return from_tensors(train, labels, test, torch.arange(tests) % 2, num_classes=2)


@pytest.mark.parametrize("seed", range(20))
def test_the_fast_search_agrees_with_comparing_every_pair(seed: int) -> None:
    """Values of two kinds on four pixels: many records coincide, in both sets and within each."""
    generator = torch.Generator().manual_seed(seed)
    train, test = (torch.randint(2, (n, 1, 2, 2), generator=generator).float() for n in (9, 30))
    slow = (test[:, None] == train[None]).flatten(2).all(2).any(1)
    assert find_copies(examples(train), examples(test)) == slow.nonzero()[:, 0].tolist()


def test_a_negative_zero_is_a_zero_and_one_bit_is_another_record() -> None:
    train = torch.zeros(1, 1, 2, 2)
    test = torch.stack([-train[0], train[0], train[0] + 1e-45])
    assert find_copies(examples(train), examples(test)) == [0, 1]


def test_labels_do_not_make_another_record() -> None:
    train, test = images(5, 1), images(5, 1)
    relabelled = Examples(test, torch.ones(5, dtype=torch.int64), num_classes=2)
    assert len(find_copies(examples(train), relabelled)) == 5


def test_the_official_splits_have_as_many_copies_as_is_said() -> None:
    counted = {name: DATA_SETS[name].test_copies for name in DATA_SETS}
    assert counted["mnist"] == 0
    for name, said in counted.items():
        if said is not None and (name != "fashion_mnist" or fashion_mnist.PACKAGED.is_dir()):
            data = load(DataConfig(name=name))
            assert len(find_copies(data.train, data.test)) == said, name


def test_sixty_thousand_against_ten_thousand_is_a_matter_of_seconds() -> None:
    """Comparing every pair would take an hour; 30 s leave a slow machine room."""
    train = torch.zeros(60_000, 1, 28, 28)
    train[:, 0, 0, 0] = torch.arange(60_000) / 60_000
    started = time.process_time()
    assert len(find_copies(examples(train), examples(train[::6]))) == 10_000
    assert time.process_time() - started < 30


def test_more_copies_than_chance_explains_are_refused_with_numbers_and_a_remedy() -> None:
    words = r"7 of 100 test records are training records.*Remove them from the training.*data\.allow_overlap=true"
    with pytest.raises(DataError, match=words):
        require_apart(with_copies(7), OWN)
    assert require_apart(with_copies(7), OWN.replace(allow_overlap=True)) == 7
    assert require_apart(with_copies(0), OWN) == 0
    assert require_apart(with_copies(1, HARMLESS), OWN) == 1
    with pytest.raises(DataError, match="2 of 1000"):
        require_apart(with_copies(2, HARMLESS), OWN)


def test_what_is_said_in_public_is_said_of_settings_and_not_of_records() -> None:
    strict, lax = (statement(OWN.replace(allow_overlap=allow), own=True) for allow in (False, True))
    assert "exact copies were looked for" in strict
    assert "may be training records" in lax
    assert "0 test records are training records" in statement(DataConfig(), own=False)
    assert "not counted" in statement(DataConfig(name="cifar10"), own=False)


def test_the_setting_is_no_part_of_what_was_trained() -> None:
    config = recipe("audit.sound")
    assert config.override("data.allow_overlap", True).training_hash == config.training_hash
    assert config.override("data.train_limit", 7).training_hash != config.training_hash


def test_shards_are_counted_when_they_are_written(tmp_path: Path) -> None:
    data = with_copies(7)
    manifest = write_shards(data, tmp_path / "shards", 3, Seeds.reproducible(0))
    assert manifest.test_copies == 7
    whole = load(DataConfig(name="shards"), root=tmp_path / "shards")
    assert isinstance(whole.train, ShardedExamples)
    # A node that holds some of the shards can say so as well.
    (tmp_path / "shards" / "train-00001.inputs.npy").unlink()
    assert count_copies(whole) == 7
    with pytest.raises(DataError, match="7 of 100 test records"):
        require_apart(whole, DataConfig(name="shards"))
    # Other test records were not counted then: the shards are read, and one is not there.
    with pytest.raises(DataError, match="damaged"):
        count_copies(Dataset(whole.info, whole.train, examples(images(100, 9))))


def test_a_run_is_refused_before_anything_is_written_and_what_is_found_stays_private(tmp_path: Path, capsys) -> None:
    small = {"data.name": "tensors", "training.steps": 2, "training.monitor_every": 2, "machine.threads": 1}
    quick = {"evaluation.protocols": ["adaptive"], "evaluation.adaptive_attacks": ["fgsm"], "evaluation.num_images": 0}
    other = {"model.architecture": "linear 4, relu, linear", "method.expected_batch_size": 40, "method.delta": 1e-4}
    config, data = recipe("audit.sound").override_all(small | quick | other), with_copies(37)
    with pytest.raises(DataError, match="37 of 100"):
        stobatch.train(config, tmp_path / "run", dataset=data, quiet=True)
    assert not (tmp_path / "run").exists()
    allowed = config.override("data.allow_overlap", True)
    stobatch.train(allowed, tmp_path / "run", dataset=data)
    assert "37 of 100 test records are training records" in capsys.readouterr().err
    scores = stobatch.evaluate(tmp_path / "run", dataset=data, quiet=True).to_dict()
    assert "may be training records" in scores["test_records"]
    assert json.loads((tmp_path / "run" / "private" / "data.json").read_text())["test_copies"] == 37
    stobatch.report([tmp_path / "run"])
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Accuracies assume: test records may be training records" in page
    for file in (tmp_path / "run").glob("*.json"):
        assert "test_copies" not in file.read_text(), file
        assert "37 of" not in file.read_text(), file
    # Other test records at evaluation are refused; where the owner's key is not there to tell, copies are looked for.
    clean = stobatch.train(config, tmp_path / "clean", dataset=with_copies(0), quiet=True).run.path
    with pytest.raises(DataError, match="not the test records"):
        stobatch.evaluate(clean, dataset=data, quiet=True)
    (clean / "private" / "commitment_key.json").unlink()
    with pytest.raises(DataError, match="37 of 100"):
        stobatch.evaluate(clean, dataset=data, quiet=True)
