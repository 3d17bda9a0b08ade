"""What `load` gives back is the function that was trained, as a plain module."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.tiny import SETTINGS
from torch import nn

import stobatch
from stobatch import RunConfig, data
from stobatch.models import ReferenceNorm
from stobatch_recipes import recipe


@pytest.fixture(scope="module")
def config() -> RunConfig:
    """The paper's network, which is written out below by hand."""
    own = {"model.architecture": "mnist_cnn", "method.total_epsilon": 200.0, "seed": 1}
    return recipe("paper.demo").override_all({**SETTINGS, **own})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, config: RunConfig) -> Path:
    """Trained, certified and evaluated. Read only."""
    out = tmp_path_factory.mktemp("deployed") / "run"
    stobatch.train(config, out, quiet=True)
    stobatch.certify(out, quiet=True)
    stobatch.evaluate(out, quiet=True)
    return out


def test_the_network_is_a_plain_module_that_gives_logits(undisturbed):
    network = stobatch.load(undisturbed).network
    assert isinstance(network, nn.Module)
    assert not network.training
    assert not any(parameter.requires_grad for parameter in network.parameters())
    inputs = (torch.rand(5, 1, 28, 28) * 2 - 1).requires_grad_()
    logits = network(inputs)
    assert logits.shape == (5, 10)
    (gradient,) = torch.autograd.grad(logits[:, 0].sum(), inputs)
    assert gradient.abs().sum() > 0, "an attack library needs the gradient of the input"


def test_train_and_load_give_the_same_function(config, tmp_path):
    trained = stobatch.train(config, tmp_path / "run", quiet=True)
    loaded = stobatch.load(tmp_path / "run")
    inputs = torch.rand(20, 1, 28, 28) * 2 - 1
    assert torch.equal(trained.network(inputs), loaded.network(inputs))
    assert loaded.guarantee == trained.guarantee
    assert loaded.config.training_hash == config.training_hash


def test_the_network_is_the_head_of_the_encoder_with_noise_at_both_places(undisturbed):
    network = stobatch.load(undisturbed).network
    noise = load_file(undisturbed / "private" / "noise.safetensors")
    weights = load_file(undisturbed / "model.safetensors")
    inputs = torch.rand(7, 1, 28, 28) * 2 - 1
    hidden = nn.functional.conv2d(inputs + noise["input_noise"], weights["encoder.weight"], stride=2, padding=2)
    by_hand = network.head(hidden + noise["hidden_noise"])
    assert torch.allclose(network(inputs), by_hand, rtol=1e-5, atol=1e-5)
    without = network.head(nn.functional.conv2d(inputs, weights["encoder.weight"], stride=2, padding=2))
    assert not torch.allclose(network(inputs), without, rtol=1e-3, atol=1e-3)


def test_the_whole_head_by_hand(undisturbed):
    """Written out layer by layer from the stored weights alone, statistics of the public images included."""
    network = stobatch.load(undisturbed).network
    noise = load_file(undisturbed / "private" / "noise.safetensors")
    w = load_file(undisturbed / "model.safetensors")
    public = torch.rand(64, 1, 28, 28, generator=torch.Generator().manual_seed(0)) * 2 - 1

    def normalised(values: torch.Tensor, reference: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean = reference.mean(0)
        spread = ((reference - mean).square().mean() + 1e-6).sqrt()
        return (values - mean) / spread, (reference - mean) / spread

    def both(layer, *pair: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(layer(values) for values in pair)

    f = nn.functional
    inputs = torch.rand(7, 1, 28, 28) * 2 - 1
    pair = both(lambda x: f.conv2d(x + noise["input_noise"], w["encoder.weight"], stride=2, padding=2), inputs, public)
    pair = normalised(*both(lambda h: h + noise["hidden_noise"], *pair))
    pair = both(lambda h: f.avg_pool2d(h.relu(), 2), *pair)
    conv, dense = ("head.body.2.weight", "head.body.2.bias"), ("head.body.6.weight", "head.body.6.bias")
    pair = both(lambda h: f.conv2d(h, w[conv[0]], w[conv[1]], stride=2, padding=2), *pair)
    pair = both(lambda h: f.linear(h.relu().flatten(1), w[dense[0]], w[dense[1]]), *normalised(*pair))
    last = normalised(*pair)[0].clamp(-1, 1)
    assert torch.allclose(network(inputs), last @ w["head.output.weight"].t(), rtol=1e-4, atol=1e-4)


def test_the_reported_accuracy_is_the_loaded_networks_accuracy(undisturbed, config):
    from stobatch.runs import Run

    network = stobatch.load(undisturbed).network
    test = data.load(config.data).test
    hits = (network(test.inputs).argmax(1) == test.labels).float().mean()
    assert Run(undisturbed).read("training")["history"][-1]["test_accuracy"] == round(float(hits) * 60) / 60
    assert Run(undisturbed).read("scores")["clean_accuracy"]["count"] == round(float(hits) * 60)


def test_the_encoder_keeps_the_bound_that_the_plan_assumes(undisturbed, config):
    network = stobatch.load(undisturbed).network
    columns = network.encoder.weight.flatten(1).abs().sum(1)
    assert float(columns.max()) <= config.method.encoder_norm_bound


def test_loading_does_not_depend_on_what_is_calibrated_before(undisturbed):
    first, second = stobatch.load(undisturbed).network, stobatch.load(undisturbed).network
    norms = [[m for m in network.modules() if isinstance(m, ReferenceNorm)] for network in (first, second)]
    assert len(norms[0]) == 3
    for one, other in zip(*norms, strict=True):
        assert torch.equal(one.mean, other.mean)
        assert float(one.spread) != 1.0, "the statistics were not taken"


def test_predict_verified_agrees_with_certify(undisturbed, config, rows):
    """The Python call on the same inputs with the same seeds gives the table's rows."""
    from stobatch.seeds import Seeds

    model = stobatch.load(undisturbed)
    test = data.load(config.data).test
    generator = Seeds.reproducible(config.seed).generator("certify", 0)
    verdicts = model.verifiers()[0].verify(test.inputs, generator)
    table = rows(undisturbed, "certify")
    assert verdicts.label.tolist() == table["prediction"]
    assert verdicts.corrected_radius.tolist() == table["corrected_radius"]
    free = model.predict_verified(test.inputs[:4], seeds=Seeds.reproducible(3))
    again = model.predict_verified(test.inputs[:4], seeds=Seeds.reproducible(3))
    assert free.corrected_radius.tolist() == again.corrected_radius.tolist()
