"""One or two steps of every architecture with every schedule: finite, moving, bounded."""

from __future__ import annotations

import pytest
import torch

import stobatch
from stobatch.models import affine, build
from stobatch.models import network as normalisation
from stobatch.published.training import Published
from stobatch.seeds import Seeds
from stobatch.training.engines import InProcessEngine
from stobatch_recipes import recipe

SHAPES = {"mnist_cnn": (1, 28, 28), "cifar10_cnn": (3, 28, 28), "resnet18": (3, 32, 32)}
"""Every layer is there for images of half the size, too; the full one is built in the tests of models."""

SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("cifar10_cnn", "resnet18")]


def synthetic(shape: tuple[int, int, int], count: int, classes: int = 3) -> stobatch.Dataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(count + 6, *shape, generator=generator) * 2 - 1
    labels = torch.arange(count + 6) % classes
    return stobatch.from_tensors(inputs[:count], labels[:count], inputs[count:], labels[count:], num_classes=classes)


def settings(architecture: str, **more: object) -> stobatch.RunConfig:
    name = {"mnist_cnn": "paper.mnist", "cifar10_cnn": "paper.cifar10", "resnet18": "paper.tiny_imagenet"}[architecture]
    return recipe(name).override_all(
        {
            "data.name": "tensors",
            "data.augment": False,
            "data.num_classes": None,
            "method.batch_size": 3,
            "method.train_attack_steps": 1,
            "training.steps": 2,
            "training.monitor_every": 1,
            "training.learning_rate": 1e-3,
            "machine.threads": 1,
            "machine.memory_mb": 40,
            "certification.noise_draws": 2,
            "seed": 4,
        }
        | more
    )


@pytest.mark.slow
@pytest.mark.parametrize("architecture", SHAPES)
def test_two_steps_and_a_certificate(architecture, tmp_path, monkeypatch):
    """The recipe's own loss weights, optimiser, split and schedule, on a handful of images."""
    monkeypatch.setattr(normalisation, "NUM_ANCHORS", 4)
    monkeypatch.setattr(affine, "EXACT_SPECTRUM_UP_TO", 1000)  # thousands of inputs: a bound instead, in no time
    data = synthetic(SHAPES[architecture], 12)
    model = stobatch.train(settings(architecture), tmp_path / "run", dataset=data, quiet=True)
    history = model.run.read("training")["history"]
    assert [row["step"] for row in history] == [1, 2]
    with torch.no_grad():
        logits = model.network(data.test.inputs)
    assert logits.shape == (6, 3)
    assert logits.isfinite().all()
    assert model.network.encoder.max_column_norm() <= 1.0
    verdicts = model.predict_verified(data.test.inputs[:1], seeds=Seeds.reproducible(1))
    assert verdicts.corrected_radius[0] >= 0


def prepared(architecture: str, config: stobatch.RunConfig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(normalisation, "NUM_ANCHORS", 4)
    data = synthetic(SHAPES[architecture], 12)
    plan = stobatch.plan(config, dataset=data)
    network = build(config.model, SHAPES[architecture], 3, torch.Generator().manual_seed(2))
    return Published().prepare(config, plan, network, data.train, Seeds.reproducible(4))


@pytest.mark.parametrize("norm", ["reference", "group", "none"])
@pytest.mark.parametrize("architecture", ["mnist_cnn", *SLOW])
def test_gradients_reach_every_parameter_and_are_finite(architecture, norm, monkeypatch):
    # With little noise: the bound on the last hidden layer cuts the gradient of values far beyond it.
    quiet = {"method.total_epsilon": 1e7, "method.label_epsilon": 1e3, "method.budget_split": "fixed_label"}
    config = settings(architecture, **{"model.normalisation": norm, **quiet})
    trainable = prepared(architecture, config, monkeypatch)
    (task,) = trainable.tasks(0)
    gradients = trainable.gradients(task, 0)
    assert gradients.keys() == dict(trainable.network.named_parameters()).keys()
    for name, gradient in gradients.items():
        assert gradient.isfinite().all(), name
    matrices = [name for name, gradient in gradients.items() if gradient.ndim >= 2]
    assert all(gradients[name].any() for name in matrices)
    assert all(parameter.grad is None for parameter in trainable.network.parameters())


@pytest.mark.parametrize("change", [
    {"method.schedule": "iterative"},
    {"method.schedule": "stochastic", "method.trainers_per_step": 2},
    {"method.taylor": "published"},
    {"method.label_noise": "per_class"},
    {"method.label_noise": "penalty"},
    {"method.attack_ensemble": ["mim"]},
    {"method.adversarial_weight": 0.0},
    {"training.optimiser": "sgd"},
    {"training.optimiser": "adam"},
    {"method.encoder_norm_bound": 0.1},
], ids=str)  # fmt: skip
def test_every_variant_trains_and_differs_from_the_default(change, tmp_path):
    data = synthetic((1, 28, 28), 12)
    base = settings("mnist_cnn").override_all({"training.steps": 1, "model.last_hidden_size": 8})
    opposite = {"method.schedule": "stochastic", "training.optimiser": "sgd", "method.encoder_norm_bound": 1.0}
    plain = base.override_all({key: value for key, value in opposite.items() if change.get(key, None) != value})
    if change == {"training.optimiser": "sgd"} or "method.trainers_per_step" in change:
        plain = base
    networks = [
        stobatch.train(config, tmp_path / name, dataset=data, quiet=True).network
        for name, config in (("plain", plain), ("changed", plain.override_all(change)))
    ]
    states = [network.state_dict() for network in networks]
    assert all(value.isfinite().all() for value in states[1].values())
    assert any(not torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize("label_noise", ["shared", "per_class", "penalty"])
def test_the_published_objectives_gradient_is_what_autograd_says(label_noise, monkeypatch):
    """θ2's gradient against autograd through the whole objective, written in one go without chunks."""
    from stobatch.published.losses import taylor_loss

    changes = {"method.batch_size": 6, "method.adversarial_weight": 2.0, "method.label_noise": label_noise}
    config = settings("mnist_cnn", **changes)
    trainable = prepared("mnist_cnn", config, monkeypatch)
    trainable.chunk = 5
    (task,) = trainable.tasks(0)
    ours = trainable.gradients(task, 0)
    network, (noisy, labels) = trainable.network, trainable.noisy(torch.arange(len(trainable.reader.examples)))
    benign, source = trainable.batches[task.benign_batch], trainable.batches[task.adversarial_batch]
    adversarial = trainable.craft(noisy[source], Seeds.reproducible(4).generator("step", 0, "trainer", task.trainer))
    with torch.no_grad():
        h_benign, h_adversarial = network.noisy_hidden(noisy[benign]), network.noisy_hidden(adversarial)
    loss = taylor_loss(network.head(h_benign), labels[benign], "corrected").sum()
    loss = loss + 2.0 * taylor_loss(network.head(h_adversarial), labels[source], "corrected").sum()
    products = network.head.output.weight * trainable.label_noise
    if label_noise == "penalty":  # as the released code has it
        objective = loss / (6 * 3.0) / network.num_classes + products.abs().mean()
    else:
        objective = loss / (6 * 3.0) - products.sum()
    names, parameters = zip(*network.head.named_parameters(), strict=True)
    for name, gradient in zip(names, torch.autograd.grad(objective, parameters), strict=True):
        assert torch.allclose(ours[f"head.{name}"], gradient, rtol=1e-3, atol=1e-4), name


def test_the_average_of_trainers_is_the_mean_of_their_gradients(monkeypatch):
    config = settings("mnist_cnn", **{"method.schedule": "stochastic", "method.trainers_per_step": 2})
    trainable = prepared("mnist_cnn", config, monkeypatch)
    tasks = trainable.tasks(0)
    assert len(tasks) == 2
    average = trainable.release(0, InProcessEngine()).gradients
    parts = [trainable.gradients(task, 0) for task in tasks]
    for name in average:
        assert torch.allclose(average[name], (parts[0][name] + parts[1][name]) / 2, rtol=1e-5, atol=1e-6)


def test_diverged_parameters_are_named(tmp_path):
    from stobatch.errors import ModelError

    config = settings("mnist_cnn").override_all(
        {
            "training.learning_rate": 1e30,
            "training.optimiser": "sgd",
            "training.steps": 6,
            "model.normalisation": "none",
        }
    )
    with pytest.raises(ModelError, match="NaN or infinite") as caught:
        stobatch.train(config, tmp_path / "run", dataset=synthetic((1, 28, 28), 12), quiet=True)
    assert "learning" in caught.value.remedy
    assert not (tmp_path / "run" / "model.safetensors").exists()
