"""Three attack libraries on one network: the same logits, the same units, and the same points as this library's own."""

from __future__ import annotations

import copy
import importlib.util
import re
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.pages import ROOT, blocks, run_code
from torch import Tensor, nn

import stobatch
from stobatch.adapters import as_art, as_foolbox, as_torchattacks
from stobatch.attacks import FGSM, IFGSM, MIM, Ball, craft
from stobatch.errors import SettingError
from stobatch.loading import TrainedModel
from stobatch.models import Network
from stobatch.runs import Run
from stobatch.types import UNIT_RANGE, Norm, Radius
from stobatch_recipes import recipe

PAGE = ROOT / "docs" / "other-attack-libraries.md"
SHAPE, CLASSES = (1, 5, 5), 4
SIZE, STEPS = 0.3, 10

Points = Callable[[Network, Tensor, Tensor], Tensor]
"""Attacks a network at inputs in [-1, 1] with these labels; the points are in [-1, 1] again."""

pytestmark = pytest.mark.filterwarnings(
    # foolbox 3.3.4 on import; it works as long as SciPy keeps the old name.
    "ignore:Please import `gaussian_filter` from the `scipy.ndimage` namespace:DeprecationWarning"
)


def needs(name: str) -> pytest.MarkDecorator:
    there = importlib.util.find_spec(name) is not None
    return pytest.mark.skipif(not there, reason=f'{name} is not installed: pip install "stobatch[{name}]"')


LIBRARIES = ("foolbox", "art", "torchattacks")
each_library = pytest.mark.parametrize("library", [pytest.param(name, marks=needs(name)) for name in LIBRARIES])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def examples(count: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Noisy copies of one pattern per class, in [-1, 1]; some pixels lie on the edge of the range."""
    patterns = torch.rand(CLASSES, *SHAPE, generator=generator()) * 2 - 1
    labels = torch.arange(count) % CLASSES
    inputs = patterns[labels] + 0.3 * torch.randn(count, *SHAPE, generator=generator(seed))
    return inputs.clamp(-1, 1), labels


@pytest.fixture(scope="module")
def network() -> Network:
    """A small smooth network with fixed noise in both places, trained until it knows the patterns."""
    torch.manual_seed(0)
    first, last = nn.Linear(25, 20), nn.Linear(16, CLASSES)
    trained = stobatch.from_layers(first, nn.Sequential(nn.Tanh(), nn.Linear(20, 16), nn.Tanh()), last, SHAPE)
    noise = (torch.randn(shape, generator=generator(2)) for shape in (SHAPE, trained.encoder.hidden_shape))
    trained.set_noise(*(0.2 * part for part in noise))
    optimiser = torch.optim.Adam(trained.parameters(), lr=0.01)
    inputs, labels = examples(400)
    for _ in range(60):
        optimiser.zero_grad()
        nn.functional.cross_entropy(trained(inputs), labels).backward()
        optimiser.step()
    return trained


def accuracy(network: Network, inputs: Tensor, labels: Tensor) -> float:
    return float((network(inputs).argmax(1) == labels).float().mean())


def to_unit(inputs: Tensor) -> Tensor:
    return (inputs + 1) / 2


def from_unit(images: Tensor) -> Tensor:
    return 2 * images - 1


def by_foolbox(name: str, size: float, steps: int) -> Points:
    import foolbox

    step = {"rel_stepsize": 1 / steps, "steps": steps}
    attack = {
        "fgsm": foolbox.attacks.LinfFastGradientAttack,
        "ifgsm": lambda: foolbox.attacks.LinfBasicIterativeAttack(**step),
        "mim": lambda: foolbox.attacks.LinfMomentumIterativeFastGradientMethod(**step),
        "l2": lambda: foolbox.attacks.L2BasicIterativeAttack(**step),
    }[name]()
    return lambda network, inputs, labels: attack(as_foolbox(network), inputs, labels, epsilons=size)[0]


def by_art(name: str, size: float, steps: int) -> Points:
    from art.attacks import evasion

    step = {"eps": size, "eps_step": size / steps, "max_iter": steps, "verbose": False}

    def points(network: Network, inputs: Tensor, labels: Tensor) -> Tensor:
        classifier = as_art(network)
        attack = {
            "fgsm": lambda: evasion.FastGradientMethod(classifier, eps=size),
            "ifgsm": lambda: evasion.BasicIterativeMethod(classifier, **step),
            "mim": lambda: evasion.MomentumIterativeMethod(classifier, **step),
            "l2": lambda: evasion.ProjectedGradientDescent(classifier, norm=2, **step),
        }[name]()
        return torch.from_numpy(attack.generate(inputs.numpy(), labels.numpy()))

    return points


def by_torchattacks(name: str, size: float, steps: int) -> Points:
    import torchattacks

    eps = Radius(size, Norm.L2 if name == "l2" else Norm.LINF).to(UNIT_RANGE).size
    step = {"eps": eps, "alpha": eps / steps, "steps": steps}

    def points(network: Network, inputs: Tensor, labels: Tensor) -> Tensor:
        module = as_torchattacks(network)
        attack = {
            "fgsm": lambda: torchattacks.FGSM(module, eps=eps),
            "ifgsm": lambda: torchattacks.BIM(module, **step),
            "mim": lambda: torchattacks.MIFGSM(module, **step),
            "l2": lambda: torchattacks.PGDL2(module, random_start=False, **step),
        }[name]()
        return from_unit(attack(to_unit(inputs), labels))

    return points


BY_LIBRARY = {"foolbox": by_foolbox, "art": by_art, "torchattacks": by_torchattacks}


def logits_through(library: str, model: TrainedModel | nn.Module, inputs: Tensor) -> Tensor:
    if library == "foolbox":
        return as_foolbox(model)(inputs)
    if library == "art":
        return torch.from_numpy(as_art(model, input_shape=SHAPE).predict(inputs.numpy()))
    return as_torchattacks(model)(to_unit(inputs))


@each_library
def test_logits_are_those_of_the_deployed_function(library, network, tmp_path):
    """Noise included: the same network without it says something else."""
    inputs, _ = examples(30)
    config = recipe("paper.demo")
    logits = network(inputs).detach()
    for model in (network, TrainedModel(network, config, stobatch.plan(config), Run(tmp_path))):
        assert torch.allclose(logits_through(library, model, inputs), logits, atol=1e-5)
    assert not torch.allclose(network.scores_of_noisy(inputs), logits, atol=1e-2)


@each_library
def test_the_model_handed_over_is_left_alone(library, network):
    given = copy.deepcopy(network).train()
    given.zero_grad()
    inputs, labels = examples(8)
    BY_LIBRARY[library]("ifgsm", SIZE, 2)(given, inputs, labels)
    assert given.training
    assert all(parameter.requires_grad and parameter.grad is None for parameter in given.parameters())


@each_library
def test_a_module_in_training_mode_is_attacked_in_evaluation_mode(library, network):
    inputs, _ = examples(8)
    forgetful = nn.Sequential(network, nn.Dropout(0.9)).train()
    logits = logits_through(library, forgetful, inputs)
    assert torch.allclose(logits, network(inputs), atol=1e-5)
    assert not logits.requires_grad, "nothing in it asks for a gradient"


@each_library
@pytest.mark.parametrize("name", ["ifgsm", "mim"])
def test_a_real_attack_stays_in_the_ball_and_the_range_and_hurts(library, name, network):
    inputs, labels = examples(200, seed=3)
    attacked = BY_LIBRARY[library](name, 0.6, STEPS)(network, inputs, labels)
    assert float((attacked - inputs).abs().max()) == pytest.approx(0.6, abs=1e-6), "in the units of [-1, 1]"
    assert float(attacked.abs().max()) <= 1 + 1e-6
    assert accuracy(network, inputs, labels) > 0.9
    assert accuracy(network, attacked, labels) < accuracy(network, inputs, labels) - 0.3


SAME = {"fgsm": FGSM(), "ifgsm": IFGSM(STEPS), "mim": MIM(STEPS)}
"""Attacks that draw nothing at random. The momentum attack of foolbox is another one, see below."""


@pytest.mark.parametrize(
    ("library", "name"),
    [
        pytest.param(library, name, marks=needs(library))
        for library in LIBRARIES
        for name in SAME
        if (library, name) != ("foolbox", "mim")
    ],
)
def test_both_find_the_same_points(library, name, network):
    inputs, labels = examples(24, seed=4)
    theirs = BY_LIBRARY[library](name, SIZE, STEPS)(network, inputs, labels)
    ours = craft(network, Ball.around(inputs, Radius(SIZE)), [SAME[name]], generator(), labels=labels)
    assert torch.allclose(theirs, ours, atol=1e-5)


@needs("foolbox")
def test_momentum_in_foolbox_adds_up_signs(network):
    inputs, labels = examples(24, seed=4)
    now, momentum = inputs, torch.zeros_like(inputs)
    for _ in range(STEPS):
        momentum = momentum + gradient(network, now, labels).sign()
        now = (inputs + (now + SIZE / STEPS * momentum.sign() - inputs).clamp(-SIZE, SIZE)).clamp(-1, 1)
    theirs = by_foolbox("mim", SIZE, STEPS)(network, inputs, labels)
    assert torch.allclose(theirs, now, atol=1e-5)
    ours = craft(network, Ball.around(inputs, Radius(SIZE)), [MIM(STEPS)], generator(), labels=labels)
    assert not torch.allclose(theirs, ours, atol=1e-2)


@each_library
@pytest.mark.parametrize("steps", [1, STEPS])
def test_l2_steps_are_as_long_as_asked(library, steps, network):
    """Away from the edge of the range, T steps of length μ/T along the gradient; the ball never has to hold them."""
    inputs, labels = examples(24, seed=5)
    inputs = inputs / 2
    now = inputs
    for _ in range(steps):
        slope = gradient(network, now, labels)
        now = now + SIZE / steps * slope / slope.flatten(1).norm(dim=1).reshape(-1, 1, 1, 1)
    assert float(now.abs().max()) < 1
    theirs = BY_LIBRARY[library]("l2", SIZE, steps)(network, inputs, labels)
    assert torch.allclose(theirs, now, atol=1e-5)
    assert float((theirs - inputs).flatten(1).norm(dim=1).max()) == pytest.approx(SIZE, abs=1e-3)


def gradient(network: Network, inputs: Tensor, labels: Tensor) -> Tensor:
    points = inputs.clone().requires_grad_()
    return torch.autograd.grad(nn.functional.cross_entropy(network(points), labels, reduction="sum"), points)[0]


@needs("art")
def test_art_has_to_know_the_shape_of_an_input():
    with pytest.raises(SettingError, match="shape of one input, which a Flatten does not know"):
        as_art(nn.Flatten())
    classifier = as_art(nn.Flatten(), input_shape=(1, 2, 2))
    assert classifier.input_shape == (1, 2, 2)
    assert np.array_equal(classifier.predict(np.eye(2, dtype=np.float32)[None, None]), [[1, 0, 0, 1]])


@pytest.mark.parametrize(
    ("module", "extra", "adapt"),
    [
        ("foolbox", "foolbox", as_foolbox),
        ("art.estimators.classification", "art", as_art),
        ("torchattacks", "torchattacks", as_torchattacks),
    ],
)
def test_a_missing_library_is_named_with_its_remedy(module, extra, adapt, network, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SettingError, match=rf'{extra} cannot be imported.*pip install "stobatch\[{extra}\]"'):
        adapt(network)


@pytest.fixture(scope="module")
def printed_by_the_page(tmp_path_factory) -> str:
    """What the page prints: its preparation, then the block of every library that is there."""
    preparation, *each = blocks(PAGE)
    there = [block for name, block in zip(LIBRARIES, each, strict=True) if importlib.util.find_spec(name)]
    return run_code([preparation, *there], tmp_path_factory.mktemp("page"))


@pytest.mark.slow
@each_library
def test_the_page_runs_as_written(library, printed_by_the_page):
    assert re.search(rf"^{library}: \d+% survive linf 0.1 over \[0, 1\]$", printed_by_the_page, re.M)
