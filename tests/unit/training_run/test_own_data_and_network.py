"""The whole flow in Python with a data set and a network of one's own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import stobatch
from stobatch import Dataset, Network, RunConfig
from stobatch.dp.plan import CLASSES_OBJECTION
from stobatch.errors import DataError, ModelError, StobatchError
from stobatch.types import Status
from stobatch_recipes import recipe
from tests.support.small_records import small_config, small_records

SHAPE = (1, 6, 6)


def two_bars(seed: int = 0, count: int = 240) -> Dataset:
    """Bright left or bright right half, with some noise: easy to learn, so that learning can be told from chance."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 2
    inputs = torch.rand(count, *SHAPE, generator=generator) * 0.6 - 0.3
    inputs[labels == 0, :, :, :3] += 0.5
    inputs[labels == 1, :, :, 3:] += 0.5
    cut = count * 3 // 4
    return stobatch.from_tensors(inputs[:cut], labels[:cut], inputs[cut:], labels[cut:], num_classes=2, name="bars")


def make_network(width: int = 12, kind: str = "conv") -> Network:
    torch.manual_seed(3)
    if kind == "dense":
        first: nn.Module = nn.Linear(36, 20)
        body = nn.Sequential(nn.ReLU(), nn.Linear(20, width), nn.Tanh(), nn.Linear(width, 8))
    else:
        first = nn.Conv2d(1, 4, 3, stride=2, padding=1)
        body = nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(36, width), nn.ReLU(), nn.Linear(width, 8))
    return stobatch.from_layers(first, body, nn.Linear(8, 2), SHAPE)


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return recipe("paper.demo").override_all(
        {
            "data.name": "tensors",
            "model.architecture": "custom",
            "model.last_hidden_size": 8,
            "method.batch_size": 30,
            "method.total_epsilon": 2000.0,
            "method.label_epsilon": 1000.0,
            "method.train_attack_steps": 2,
            "method.train_attack_max_radius": 0.1,
            "training.steps": 60,
            "training.learning_rate": 0.02,
            "training.monitor_every": 30,
            "certification.noise_draws": 100,
            "certification.resampling_shrinkage": 1.0,
            "evaluation.radii": [0.02, 0.9],
            "evaluation.attack_steps": 3,
            "evaluation.adaptive_steps": 3,
            "evaluation.vote_limit": 10,
            "evaluation.vote_draws": 20,
            "machine.threads": 1,
            "seed": 1,
        }
    )


@pytest.fixture(scope="module")
def run(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("own") / "run"
    stobatch.train(config, out, dataset=two_bars(), network=make_network(), quiet=True)
    return out


def test_it_learns(run):
    history = json.loads((run / "training.json").read_text())["history"]
    assert [row["step"] for row in history] == [30, 60]
    assert history[-1]["test_accuracy"] > 0.9


def test_the_plan_is_that_of_the_given_sizes(config):
    plan = stobatch.plan(config, dataset=two_bars(), network=make_network())
    # 3 x 3 kernels, 3 x 3 positions, 180 examples in batches of 30.
    assert plan.sizes()["inputs_per_neuron"] == 9
    assert plan.sizes()["neurons_per_map"] == 9
    assert plan.reconstruction_sensitivity == 9 * 11
    assert plan.num_batches == 6
    assert plan.guarantee.epsilon == pytest.approx(2000)


def test_load_certify_evaluate(run):
    data = two_bars()
    model = stobatch.load(run, network=make_network())
    hits = (model.network(data.test.inputs).argmax(1) == data.test.labels).float().mean()
    assert float(hits) > 0.9
    certificates = stobatch.certify(run, dataset=data, network=make_network(), quiet=True).to_dict()
    assert certificates["rows"] == len(data.test) == 60
    assert certificates["verified_accuracy"]["correct"]["value"] > 0.9
    scores = stobatch.evaluate(run, dataset=data, network=make_network(), quiet=True).to_dict()
    assert scores["clean_accuracy"]["value"] == pytest.approx(float(hits))
    adaptive = next(u for u in scores["under_attack"] if u["protocol"]["name"] == "adaptive")
    small, large = (row["value"] for row in adaptive["accuracy"] if row["attack"] == "worst")
    assert small > large, "an attack as large as the bars must win"
    assert scores["certificates"]["config_hash"] == certificates["config_hash"]


def test_the_weights_of_the_given_network_do_not_matter_for_loading(run):
    blank = make_network()
    for parameter in blank.parameters():
        parameter.data.zero_()
    inputs = two_bars().test.inputs
    loaded = stobatch.load(run, network=make_network()).network(inputs)
    assert torch.equal(stobatch.load(run, network=blank).network(inputs), loaded)


def test_a_dense_network_works_too(config, tmp_path):
    short = config.override("training.steps", 20)
    stobatch.train(short, tmp_path / "run", dataset=two_bars(), network=make_network(kind="dense"), quiet=True)
    summary = stobatch.certify(
        tmp_path / "run", dataset=two_bars(), network=make_network(kind="dense"), quiet=True
    ).to_dict()
    assert summary["rows"] == 60
    assert summary["largest_radius"]["corrected"] > 0


def test_resume_gives_the_same_bits_as_one_go(config, run, tmp_path):
    def train(steps: int, *, resume: bool) -> None:
        changed = config.override("machine.checkpoint_every", steps)
        stobatch.train(changed, tmp_path / "run", dataset=two_bars(), network=make_network(), resume=resume, quiet=True)

    train(7, resume=False)
    (tmp_path / "run" / "model.safetensors").unlink()
    train(13, resume=True)
    inputs = two_bars().test.inputs
    one, other = (stobatch.load(folder, network=make_network()).network(inputs) for folder in (run, tmp_path / "run"))
    assert torch.equal(one, other)


def test_what_has_to_be_handed_over_is_asked_for(config, run, tmp_path):
    with pytest.raises(DataError, match="from_tensors"):
        stobatch.certify(run, network=make_network(), quiet=True)
    with pytest.raises(ModelError, match="from_layers"):
        stobatch.load(run)
    with pytest.raises(DataError, match="from_tensors"):
        stobatch.train(config, tmp_path / "run", network=make_network(), quiet=True)
    with pytest.raises(ModelError, match="from_layers"):
        stobatch.train(config, tmp_path / "run", dataset=two_bars(), quiet=True)
    assert not list(tmp_path.iterdir())


def test_a_network_that_does_not_fit_is_refused_before_anything_is_written(config, run, tmp_path):
    wide = stobatch.from_layers(nn.Linear(36, 20), nn.Linear(20, 9), nn.Linear(9, 2), SHAPE)
    with pytest.raises(ModelError, match=r"9 neurons.*model\.last_hidden_size=9"):
        stobatch.train(config, tmp_path / "run", dataset=two_bars(), network=wide, quiet=True)
    classes = stobatch.from_layers(nn.Linear(36, 20), nn.Linear(20, 8), nn.Linear(8, 3), SHAPE)
    with pytest.raises(ModelError, match="to 3 classes"):
        stobatch.train(config, tmp_path / "run", dataset=two_bars(), network=classes, quiet=True)
    shape = stobatch.from_layers(nn.Linear(49, 20), nn.Linear(20, 8), nn.Linear(8, 2), (1, 7, 7))
    with pytest.raises(ModelError, match=r"\(1, 7, 7\)"):
        stobatch.train(config, tmp_path / "run", dataset=two_bars(), network=shape, quiet=True)
    mixing = stobatch.from_layers(
        nn.Linear(36, 20), nn.Sequential(nn.BatchNorm1d(20), nn.Linear(20, 8)), nn.Linear(8, 2), SHAPE
    )
    with pytest.raises(ModelError, match="BatchNorm1d"):
        stobatch.train(config, tmp_path / "run", dataset=two_bars(), network=mixing, quiet=True)
    dropping = stobatch.from_layers(
        nn.Linear(36, 20), nn.Sequential(nn.Dropout(), nn.Linear(20, 8)), nn.Linear(8, 2), SHAPE
    )
    with pytest.raises(ModelError, match="draws random numbers"):
        stobatch.train(config, tmp_path / "run", dataset=two_bars(), network=dropping, quiet=True)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ModelError, match=r"do not fit the network.*head\.body"):
        stobatch.load(run, network=make_network(width=13))


def test_one_network_can_be_trained_twice(config, tmp_path):
    network, short = make_network(), config.override("training.steps", 2)
    stobatch.train(short, tmp_path / "a", dataset=two_bars(), network=network, quiet=True)
    stobatch.train(short, tmp_path / "b", dataset=two_bars(), network=network, quiet=True)


def half_trained(config: RunConfig, out: Path) -> None:
    stobatch.train(config, out, dataset=two_bars(), network=make_network(), quiet=True)
    (out / "model.safetensors").unlink()


def test_resuming_with_another_network_is_refused(config, tmp_path):
    short = config.override("training.steps", 2)
    half_trained(short, tmp_path / "run")
    other = make_network(width=13)
    with pytest.raises(StobatchError):
        stobatch.train(short, tmp_path / "run", dataset=two_bars(), network=other, resume=True, quiet=True)


def test_resuming_with_other_data_is_refused(config, tmp_path):
    short = config.override("training.steps", 2)
    half_trained(short, tmp_path / "run")
    fewer = two_bars(count=200)
    with pytest.raises(StobatchError):
        stobatch.train(short, tmp_path / "run", dataset=fewer, network=make_network(), resume=True, quiet=True)


@pytest.mark.parametrize("verb", [stobatch.certify, stobatch.evaluate])
def test_test_data_of_another_shape_are_refused(run, verb):
    big = stobatch.from_tensors(
        torch.zeros(4, 1, 8, 8), torch.zeros(4).long(), torch.zeros(4, 1, 8, 8), torch.zeros(4).long(), num_classes=2
    )
    with pytest.raises(StobatchError):
        verb(run, dataset=big, network=make_network(), quiet=True)


def test_inputs_outside_the_range_are_refused_by_verified_inference(run):
    model = stobatch.load(run, network=make_network())
    for bad in (torch.full((1, *SHAPE), 1.01), torch.full((1, *SHAPE), float("nan"))):
        with pytest.raises(DataError, match=r"outside \[-1, 1\]"):
            model.predict_verified(bad)


def test_certificates_of_other_data_are_not_compared_with_attacks(run):
    data = two_bars()
    stobatch.certify(run, dataset=data, network=make_network(), quiet=True)
    other = stobatch.from_tensors(
        data.train.inputs, data.train.labels, data.test.inputs.flip(0), data.test.labels.flip(0).contiguous()
    )
    assert not torch.equal(other.test.labels, data.test.labels)
    with pytest.raises(StobatchError, match="not the test records"):
        stobatch.evaluate(run, dataset=other, network=make_network(), quiet=True)


@pytest.mark.parametrize("verb", [stobatch.certify, stobatch.attack, stobatch.evaluate])
def test_training_records_in_place_of_the_test_records_are_refused(run, verb):
    """The data that are handed over have no copies of their own training records, and still are not the run's."""
    data = two_bars()
    swapped = stobatch.from_tensors(
        data.test.inputs, data.test.labels, data.train.inputs, data.train.labels, num_classes=2
    )
    before = sorted(path for path in run.rglob("*") if path.is_file())
    with pytest.raises(DataError, match="not the test records"):
        verb(run, dataset=swapped, network=make_network(), quiet=True)
    assert sorted(path for path in run.rglob("*") if path.is_file()) == before


def test_without_the_owners_key_scores_say_that_the_test_records_were_not_checked(run, tmp_path):
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    (copy / "private" / "commitment_key.json").unlink()
    scores = stobatch.evaluate(copy, dataset=two_bars(), network=make_network(), quiet=True)
    assert "whether they are the run's own was not checked" in scores.test_records


def test_a_number_of_classes_that_nobody_gave_is_objected_to(tmp_path):
    given = small_records()
    train, test = given.train.in_memory(), given.test
    read_off = stobatch.from_tensors(train.inputs, train.labels, test.inputs, test.labels)
    named = stobatch.from_tensors(train.inputs, train.labels, test.inputs, test.labels, class_names=("low", "high"))
    assert read_off.info.num_classes == given.info.num_classes == 2
    for name, data in {"read off": read_off, "given": given, "named": named}.items():
        model = stobatch.train(small_config(), tmp_path / name, dataset=data, quiet=True)
        planned = stobatch.plan(small_config(), dataset=data).guarantee
        for guarantee in (model.guarantee, planned, stobatch.load(tmp_path / name).guarantee):
            assert (CLASSES_OBJECTION in guarantee.objections) == (name == "read off")
            assert guarantee.status is Status.PROVED
        assert ("classes_from_labels" in model.run.read("config")["dataset"]) == (name == "read off")
        assert not stobatch.verify(tmp_path / name, sample=0).differing
    plain = recipe("baselines.plain").override_all({"data.name": "tensors", "method.batch_size": 16, "seed": 1})
    assert stobatch.plan(plain, dataset=read_off).guarantee.objections == ()
