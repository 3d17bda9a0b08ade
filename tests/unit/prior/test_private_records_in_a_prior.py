"""A prior that was made from private records is refused, whatever its card says, before anything is written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import stobatch
from stobatch.config import RunConfig
from stobatch.data import Dataset, Examples, person_codes
from stobatch.data.overlap import count_seen, digest_records
from stobatch.errors import RunError, SettingError
from stobatch.federated.rounds import federate
from stobatch.loading import fresh_network
from stobatch.pretraining.pretrain import pretrain
from stobatch.results import PriorCard, PriorSource
from stobatch.results.prior import read_card, records_file, write_prior
from stobatch.seeds import Seeds
from stobatch.tuning.search import tune
from stobatch_recipes import recipe
from tests.support.small_records import small_config, small_records

NETWORK = "linear"


def draw(folder: Path, numbers: Sequence[int], *, test: Sequence[int] = ()) -> Path:
    """Write pictures of two classes, the same of the same number."""
    for part, wanted in (("train", numbers), ("test", test)):
        for number in wanted:
            path = folder / part / ("even" if number % 2 == 0 else "odd") / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            generator = torch.Generator().manual_seed(number)
            values = torch.randint(256, (8, 8), generator=generator).to(torch.uint8)
            Image.fromarray(values.numpy()).save(path)
    return folder


def settings(photos: Path) -> RunConfig:
    own = {"data.name": "image_folder", "machine.data_root": str(photos), "model.architecture": NETWORK}
    small = {"method.batch_size": 10, "method.delta": 1e-3, "training.steps": 2, "canaries.num": 0}
    return recipe("demo").override_all({**own, **small, "method.warm_up": 0.0, "machine.threads": 1})


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return draw(tmp_path / "photos", range(40), test=range(100, 110))


def made_from(folder: Path, config: RunConfig, out: Path, **more: Any) -> Path:
    pretrain(config, str(folder), out, steps=1, batch_size=8, may_contain=("none",), quiet=True, **more)
    return out


def test_a_prior_from_the_private_folder_is_refused_before_anything_is_written(tmp_path: Path, photos: Path) -> None:
    prior = made_from(photos, settings(photos), tmp_path / "pri" / "photos")
    with pytest.raises(SettingError, match="was made from the private training records") as refusal:
        stobatch.train(settings(photos), tmp_path / "run", prior=prior, quiet=True)
    assert "--from-data digits" in refusal.value.remedy
    assert not (tmp_path / "run").exists()
    # The whole digest is enough: a card that came without the records' digests.
    records_file(prior).unlink()
    with pytest.raises(SettingError, match="was made from the private training records"):
        stobatch.train(settings(photos), tmp_path / "run", prior=prior, quiet=True)


def test_a_card_that_admits_it_is_refused_too(tmp_path: Path, photos: Path) -> None:
    """Its guarantee would be claimed only; but the digest of private records would be in the run's public files."""
    prior = tmp_path / "prior"
    pretrain(settings(photos), str(photos), prior, steps=1, batch_size=8, quiet=True)
    assert read_card(prior).may_contain == ("unknown",)
    with pytest.raises(SettingError, match="was made from the private training records"):
        stobatch.train(settings(photos), tmp_path / "run", prior=prior, quiet=True)


@pytest.mark.parametrize(("numbers", "seen"), [(range(39, 80), 1), (range(20, 60), 20), (range(60), 40)])
def test_some_of_the_records_are_found(tmp_path: Path, photos: Path, numbers: range, seen: int) -> None:
    others = draw(tmp_path / "others", numbers)
    prior = made_from(others, settings(photos), tmp_path / "prior")
    with pytest.raises(SettingError, match=f"was made from {seen} of the 40 private training records"):
        stobatch.train(settings(photos), tmp_path / "run", prior=prior, quiet=True)
    assert not (tmp_path / "run").exists()
    assert "digests" not in (tmp_path / "prior.card.json").read_text()


def test_a_limit_hides_nothing(tmp_path: Path, photos: Path) -> None:
    prior = made_from(photos, settings(photos), tmp_path / "prior")
    limited = settings(photos).override("data.train_limit", 30)
    with pytest.raises(SettingError, match="was made from 30 of the 30 private training records"):
        stobatch.train(limited, tmp_path / "run", prior=prior, quiet=True)


def test_other_pictures_are_a_start_and_their_digests_are_in_no_run(tmp_path: Path, photos: Path) -> None:
    others = draw(tmp_path / "others", range(50, 90))
    prior = made_from(others, settings(photos), tmp_path / "prior")
    model = stobatch.train(settings(photos), tmp_path / "run", prior=prior, quiet=True)
    assert model.guarantee.status is stobatch.Status.PROVED
    assert records_file(prior).exists()
    assert not list((tmp_path / "run").rglob("*records.safetensors"))
    private = json.loads((tmp_path / "run" / "private" / "data.json").read_text())["sha256"]
    for file in (tmp_path / "run").glob("*.json"):
        assert private[:16] not in file.read_text()


def own_prior(folder: Path, config: RunConfig, dataset: Dataset, given: Examples | None, digest: str | None) -> Path:
    network = fresh_network(config, dataset.info, Seeds.reproducible(3), None)
    source = PriorSource(name="mine", what="records", licence="none", sha256=digest, records=None)
    card = PriorCard(
        name="mine", made_by="a test", architecture=None, input_shape=dataset.info.input_shape, num_classes=2,
        sources=(source,), may_contain=(), weights_sha256="", method="other", settings={},
    )  # fmt: skip
    records = None if given is None else digest_records(given.inputs)
    write_prior(folder / "mine", network.state_dict(), card, records)
    return folder / "mine"


Verb = Callable[[RunConfig, Path, Dataset, Path], object]
VERBS: dict[str, Verb] = {
    "train": lambda config, out, dataset, prior: stobatch.train(config, out, dataset=dataset, prior=prior, quiet=True),
    "tune": lambda config, out, dataset, prior: tune(
        config.override_all({"search.settings": ["training.learning_rate=0.1,1"], "data.held_out": 4}),
        out, dataset=dataset, prior=prior, quiet=True,
    ),
    "compare": lambda config, out, dataset, prior: stobatch.compare(
        {"row": config}, out, priors={"row": prior}, dataset=dataset, quiet=True
    ),
}  # fmt: skip


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_that_trains_looks_at_the_records(tmp_path: Path, verb: str) -> None:
    dataset, config = small_records(0, 64), small_config()
    prior = own_prior(tmp_path, config, dataset, small_records(60, 64).train.in_memory(), None)
    with pytest.raises(SettingError, match="mine was made from 4 of the 64 private training records"):
        VERBS[verb](config, tmp_path / "out", dataset, prior)
    # A comparison has noted its test data by then.
    assert {path.name for path in (tmp_path / "out").rglob("*") if path.is_file()} <= {"test_data.json"}


def test_a_federation_of_records_in_one_place_looks_at_them(tmp_path: Path) -> None:
    terms = recipe("federated.demo").override_all({"data.train_limit": 300, "data.test_limit": 20})
    dataset = stobatch.data.load(terms.data)
    network = fresh_network(terms, dataset.info, Seeds.reproducible(3), None)
    source = PriorSource(name="mine", what="records", licence="none", sha256=None, records=None)
    card = PriorCard(
        name="mine", made_by="a test", architecture=None, input_shape=dataset.info.input_shape, num_classes=10,
        sources=(source,), may_contain=(), weights_sha256="", method="other", settings={},
    )  # fmt: skip
    write_prior(tmp_path / "mine", network.state_dict(), card, digest_records(dataset.train.in_memory().inputs[:3]))
    with pytest.raises(SettingError, match="mine was made from 3 of the 300 private training records"):
        federate(terms, tmp_path / "out", prior=tmp_path / "mine", quiet=True)
    assert not (tmp_path / "out").exists()


def test_persons_do_not_hide_a_digest(tmp_path: Path) -> None:
    dataset, config = small_records(), small_config()
    prior = own_prior(tmp_path, config, dataset, None, dataset.train.fingerprint().upper())
    train = replace(dataset.train.in_memory(), groups=person_codes(range(64), 64))
    persons = Dataset(replace(dataset.info, num_persons=64), train, dataset.test)
    with pytest.raises(SettingError, match="mine was made from the private training records"):
        stobatch.train(config, tmp_path / "run", dataset=persons, prior=prior, quiet=True)


def test_a_run_on_the_same_records_without_a_name_is_refused(tmp_path: Path) -> None:
    """Its private folder has the digest, where it is still there."""
    stobatch.train(small_config(), tmp_path / "first", dataset=small_records(), quiet=True)
    with pytest.raises(SettingError, match="first was made from the private training records"):
        stobatch.train(small_config(), tmp_path / "run", dataset=small_records(), prior=tmp_path / "first", quiet=True)
    shutil.rmtree(tmp_path / "first" / "private")
    model = stobatch.train(
        small_config(), tmp_path / "run", dataset=small_records(), prior=tmp_path / "first", quiet=True
    )
    assert model.guarantee.status is stobatch.Status.CLAIMED


def test_digests_of_another_prior_are_refused(tmp_path: Path) -> None:
    dataset, config = small_records(), small_config()
    prior = own_prior(tmp_path, config, dataset, small_records(200).train.in_memory(), None)
    other = tmp_path / "other"
    other.mkdir()
    network = fresh_network(config, dataset.info, Seeds.reproducible(4), None)
    write_prior(other / "mine", network.state_dict(), read_card(prior), digest_records(torch.zeros(1, 1, 4, 4)))
    records_file(other / "mine").replace(records_file(prior))
    with pytest.raises(RunError, match="is not of the weights"):
        stobatch.train(config, tmp_path / "run", dataset=dataset, prior=prior, quiet=True)


def test_digests_tell_no_order_and_count_a_record_as_often_as_it_is_private() -> None:
    inputs = small_records().train.in_memory().inputs
    digests = digest_records(torch.cat([inputs[:8], inputs[:4]]))
    assert digests.equal(digest_records(inputs[:8].flip(0)))
    twice = small_records().train.in_memory().take(torch.tensor([0, 0, 1, 20]))
    assert count_seen(twice, digests) == 3
