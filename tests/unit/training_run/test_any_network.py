"""The whole flow with a module of one's own: plan, train, load, certify, evaluate, attack, predict, verify, export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import stobatch
from stobatch import Dataset, RunConfig
from stobatch.errors import ModelError, StobatchError
from stobatch.models import HandedOver
from stobatch_recipes import recipe

SHAPE = (1, 6, 6)


def two_bars(count: int = 240) -> Dataset:
    """Bright left or bright right half, with some noise: easy to learn, so that learning can be told from chance."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % 2
    inputs = torch.rand(count, *SHAPE, generator=generator) * 0.6 - 0.3
    inputs[labels == 0, :, :, :3] += 0.5
    inputs[labels == 1, :, :, 3:] += 0.5
    cut = count * 3 // 4
    return stobatch.from_tensors(inputs[:cut], labels[:cut], inputs[cut:], labels[cut:], num_classes=2, name="bars")


class Residual(nn.Module):
    """A small residual network, with everything that bounds follow."""

    def __init__(self, pool: type[nn.Module] = nn.MaxPool2d, side: int = 6, classes: int = 2) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.stem, self.pool = nn.Conv2d(1, 4, 3, padding=1), pool(2)
        self.first, self.second = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(side * side, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        values = torch.relu(self.stem(inputs))
        values = torch.relu(values + self.second(torch.relu(self.first(values))))
        scores: Tensor = self.head(self.pool(values).flatten(1))
        return scores


class Gated(nn.Module):
    """What bounds cannot follow, with a scale that no layer holds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer, self.gate, self.head = nn.Linear(36, 8), nn.Linear(36, 8), nn.Linear(8, 2)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, inputs: Tensor) -> Tensor:
        values = inputs.flatten(1)
        scores: Tensor = self.head(self.layer(values) * torch.sigmoid(self.gate(values))) * self.scale
        return scores


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return recipe("sound.mnist").override_all(
        {
            "data.name": "tensors",
            "method.batch_size": 60,
            "method.epsilon": 20.0,
            "method.delta": 1e-4,
            "method.radius": 0.1,
            "training.steps": 40,
            "training.learning_rate": 0.5,
            "training.monitor_every": 40,
            "evaluation.radii": [0.02, 0.1, 0.9],
            "evaluation.attack_steps": 3,
            "evaluation.adaptive_steps": 3,
            "evaluation.protocols": ["adaptive"],
            "machine.threads": 1,
            "seed": 1,
        }
    )


@pytest.fixture(scope="module")
def voting(config: RunConfig) -> RunConfig:
    return config.override_all(
        {
            "method.certified_weight": 0.0,
            "method.natural_weight": 0.0,
            "method.views_weight": 1.0,
            "method.smoothing_stddev": 0.25,
            "certification.noise_draws": 200,
            "evaluation.vote_limit": 8,
            "evaluation.vote_draws": 20,
            "evaluation.norm": "l2",
            "evaluation.radii": [0.1],
        }
    )


@pytest.fixture(scope="module")
def run(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out: Path = tmp_path_factory.mktemp("any network") / "run"
    stobatch.train(config, out, dataset=two_bars(), network=Residual(), quiet=True)
    return out


def test_the_plan_says_how_it_is_clipped_and_certified(config, voting):
    followed = stobatch.plan(config, dataset=two_bars(), network=Residual()).network
    assert followed[0] == "network: Residual, 410 values to train"
    assert followed[1] == "clipping: in one backward pass, no example's gradient is formed"
    assert followed[2] == "certificates: bounds, of forward as torch.fx follows it"
    other = stobatch.plan(voting, dataset=two_bars(), network=Gated()).network
    assert "in a second that forms gradients of 'scale', 4 bytes for each example" in other[1]
    assert other[2].startswith("certificates: votes under GaussianNoise(stddev=0.25); there are no bounds for a Gated")
    assert "'sigmoid'" in other[2]


def test_a_network_without_certificates_is_told_so_before_training(config):
    clean = config.override_all({"method.certified_weight": 0.0, "method.natural_weight": 1.0})
    lines = stobatch.plan(clean, dataset=two_bars(), network=Gated()).network
    assert lines[2].startswith(
        "certificates: none, votes need method.smoothing_stddev, which is 0; there are no bounds for a Gated"
    )
    plain = recipe("baselines.plain").override_all({"data.name": "tensors", "method.batch_size": 60, "seed": 1})
    assert stobatch.plan(plain, dataset=two_bars(), network=Gated()).network[1].startswith("certificates: method plain")


def test_the_certified_loss_of_what_bounds_cannot_follow_is_refused_before_anything_is_written(config, tmp_path):
    with pytest.raises(ModelError, match=r"certified loss does not support.*a Gated.*'sigmoid'.*certified_weight=0"):
        stobatch.train(config, tmp_path / "run", dataset=two_bars(), network=Gated(), quiet=True)
    assert not list(tmp_path.iterdir())


class CentredOnBatch(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs - inputs.mean(0, keepdim=True)


@pytest.mark.parametrize(
    ("layer", "remedy"),
    [
        (nn.BatchNorm2d(4), r"BatchNorm2d.*whole batch.*stobatch\.models\.fix\(module\)"),
        (nn.Dropout(0.5), r"Dropout.*dropout='remove'"),
        (CentredOnBatch(), "changes another example's output"),
    ],
)
def test_what_mixes_examples_is_told_before_what_bounds_cannot_follow(config, tmp_path, layer, remedy):
    network = nn.Sequential(nn.Conv2d(1, 4, 3), layer, nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    with pytest.raises(ModelError, match=remedy):
        stobatch.train(config, tmp_path / "run", dataset=two_bars(), network=network, quiet=True)


def test_a_residual_network_is_trained_and_certified_by_bounds(run):
    data = two_bars()
    summary = stobatch.certify(run, dataset=data, network=Residual(), quiet=True).to_dict()
    assert summary["kinds"][0]["name"] == "bounds"
    scores = stobatch.evaluate(run, dataset=data, network=Residual(), quiet=True).to_dict()
    assert scores["clean_accuracy"]["value"] > 0.9
    certified = {row["radius"]: row["value"] for row in scores["certificates"]["certified_accuracy"]["bounds"]}
    assert certified[0.02] > 0.9
    assert certified[0.9] == 0
    attacked = stobatch.attack(run, dataset=data, network=Residual(), quiet=True)
    assert attacked.rows


def test_the_run_says_that_its_network_was_handed_over(run):
    started, training = (json.loads((run / f"{name}.json").read_text()) for name in ("config", "training"))
    assert started["config"]["model"]["architecture"] == "custom"
    assert training["network"]["handed_over"]
    assert len(training["network"]["probe"]) == 4
    assert json.loads((run / "plan.json").read_text())["network"][2].startswith("certificates: bounds")


def test_it_has_to_be_handed_over_again(run):
    with pytest.raises(ModelError, match="holds the weights of a network of your own, and not its code"):
        stobatch.load(run)
    model = stobatch.load(run, network=Residual())
    assert isinstance(model.network, HandedOver)
    answers = model.predict(two_bars().test.inputs[:3])
    assert [row.label for row in answers.rows] == [0, 1, 0]
    assert all(row.radius > 0.02 for row in answers.rows)


def test_a_module_that_the_weights_fit_and_that_computes_something_else_is_refused(run):
    with pytest.raises(ModelError, match="another function than the one trained"):
        stobatch.load(run, network=Residual(nn.AvgPool2d))


def test_weights_of_a_run_fit_the_module_itself(run):
    from safetensors.torch import load_file

    module = Residual()
    module.load_state_dict(load_file(run / "model.safetensors"))
    inputs = two_bars().test.inputs
    assert torch.equal(module(inputs), stobatch.load(run, network=Residual()).network(inputs))


def test_it_is_verified_and_exported_like_any_other(run, tmp_path):
    found = stobatch.verify(run, dataset=two_bars(), network=Residual())
    assert not [check for check in found.checks if str(check.outcome) == "differs"]
    exported = stobatch.export(run, tmp_path / "out", to="torchscript", network=Residual())
    assert exported.lines()


def test_a_run_that_was_interrupted_goes_on_with_the_same_bits(config, run, tmp_path):
    changed = config.override("machine.checkpoint_every", 15)
    for resume in (False, True):
        stobatch.train(changed, tmp_path / "run", dataset=two_bars(), network=Residual(), resume=resume, quiet=True)
        if not resume:
            (tmp_path / "run" / "model.safetensors").unlink()
    one, other = (stobatch.load(folder, network=Residual()).network for folder in (run, tmp_path / "run"))
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())


def test_what_bounds_cannot_follow_is_certified_by_votes(voting, tmp_path):
    data, out = two_bars(), tmp_path / "run"
    stobatch.train(voting, out, dataset=data, network=Gated(), quiet=True)
    summary = stobatch.certify(out, dataset=data, network=Gated(), quiet=True).to_dict()
    assert summary["kinds"][0]["name"] == "votes"
    scores = stobatch.evaluate(out, dataset=data, network=Gated(), quiet=True).to_dict()
    assert scores["clean_accuracy"]["value"] > 0.9
    with pytest.raises(ModelError, match="'sigmoid'"):
        stobatch.certify(
            out, dataset=data, network=Gated(), overrides={"certification.certificate": "bounds"}, quiet=True
        )


@pytest.mark.parametrize("method", ["baselines.dpsgd", "baselines.plain"])
def test_other_methods_train_it_too(method, tmp_path):
    short = {"data.name": "tensors", "method.batch_size": 60, "training.steps": 3, "machine.threads": 1, "seed": 1}
    budget = {"method.epsilon": 20.0, "method.delta": 1e-4} if method == "baselines.dpsgd" else {}
    config = recipe(method).override_all(short | budget)
    model = stobatch.train(config, tmp_path / "run", dataset=two_bars(), network=Residual(), quiet=True)
    assert isinstance(model.network, HandedOver)


def test_adapters_are_merged_into_it_so_bounds_follow_what_is_deployed(config, tmp_path):
    adapted = config.override_all({"model.adapter_rank": 1, "training.steps": 5})
    lines = stobatch.plan(adapted, dataset=two_bars(), network=Residual()).network
    assert lines[0] == "network: Residual, 167 values to train, 336 held fixed"
    assert lines[2].startswith("certificates: bounds")
    model = stobatch.train(adapted, tmp_path / "run", dataset=two_bars(), network=Residual(), quiet=True)
    assert [kind.name for way in model.verifiers() for kind in way.kinds] == ["bounds"]


def test_a_method_that_needs_two_parts_says_so_before_anything_is_written(tmp_path):
    config = recipe("paper.demo").override_all({"data.name": "tensors", "method.batch_size": 30, "seed": 1})
    with pytest.raises(ModelError, match=r"cannot train a Residual.*from_layers"):
        stobatch.train(config, tmp_path / "run", dataset=two_bars(), network=Residual(), quiet=True)
    assert not list(tmp_path.iterdir())


class Spoilt(Residual):
    """One that misbehaves in some way, by name."""

    def __init__(self, how: str) -> None:
        super().__init__(side=28, classes=10)
        self.how = how
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.how == "ignores half":
            inputs = inputs * (torch.arange(28) < 14)
        scores = super().forward(inputs)
        if self.how == "writes a buffer":
            self.seen += 1
        if self.how == "mixes above 50 rows" and len(inputs) > 50:
            scores = scores - scores.mean(0)
        if self.how == "differs in evaluation" and self.training:
            scores = scores * 2
        if self.how == "branches on values" and bool(scores.sum() > 1e9):
            scores = -scores
        return scores


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("ignores half", "ignores part of its input"),
        ("writes a buffer", "'module.seen'"),
        ("mixes above 50 rows", "changes another example's output, in batches of 60"),
        ("differs in evaluation", "other scores in evaluation"),
        ("branches on values", "no example's gradient can be formed"),
    ],
)
def test_bad_networks_are_refused_before_data_is_read(how, message, voting, tmp_path, monkeypatch):
    from stobatch import training_run

    monkeypatch.setattr(training_run, "read_data", lambda *_: pytest.fail("data were read"))
    config = voting.override_all({"data.name": "mnist", "method.delta": 1e-5})
    with pytest.raises(StobatchError, match=message):
        stobatch.train(config, tmp_path / "run", network=Spoilt(how), quiet=True)
    assert not list(tmp_path.iterdir())
