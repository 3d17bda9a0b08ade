"""Any module as a classifier: its sizes by a public probe, its weights by its own names, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from stobatch.errors import ModelError
from stobatch.models import HandedOver, Layered, hand_over
from stobatch.models.experiments import require_function

SHAPE = (3, 8, 8)


class Two(nn.Module):
    """Convolution, pooling and a linear layer, with a forward of its own; `spoil` makes it misbehave."""

    def __init__(self, spoil: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.spoil, self.conv, self.head = spoil, nn.Conv2d(3, 6, 3, padding=1), nn.Linear(6 * 16, 4)
        self.register_buffer("seen", torch.zeros(()))
        self.kept: list[float] = []

    def forward(self, inputs: Tensor) -> Tensor:
        if self.spoil == "one channel":
            inputs = inputs * torch.tensor([1.0, 1.0, 0.0]).view(3, 1, 1)
        if self.spoil == "left half":
            inputs = inputs * (torch.arange(8) < 4)
        hidden = nn.functional.max_pool2d(torch.relu(self.conv(inputs)), 2)
        scores: Tensor = self.head(hidden.flatten(1))
        if self.spoil == "buffer":
            self.seen += float(inputs.mean())
        if self.spoil == "attribute":
            self.kept.append(float(inputs.mean()))
        if self.spoil == "batch mean above 20" and len(inputs) > 20:
            return scores - 0.1 * scores.mean(0)
        if self.spoil == "scale above 20" and len(inputs) > 20:
            return scores * 2
        if self.spoil == "training" and self.training:
            return scores * 2
        if self.spoil == "random":
            return scores + torch.rand(())
        return scores


def wrapped(module: nn.Module) -> HandedOver:
    found = hand_over(module, SHAPE, 4)
    assert isinstance(found, HandedOver)
    return found


def test_a_module_becomes_a_classifier_that_computes_the_same():
    module = Two()
    network, inputs = wrapped(module), torch.rand(5, *SHAPE)
    assert torch.equal(network(inputs), module(inputs))
    assert (network.num_classes, network.input_shape, network.name) == (4, SHAPE, "Two")


def test_its_state_has_the_modules_own_names_and_goes_both_ways():
    module, network = Two(), wrapped(Two())
    assert network.state_dict().keys() == module.state_dict().keys()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)
    network.load_state_dict(module.state_dict())
    assert torch.equal(network.module.head.weight, module.head.weight)
    module.load_state_dict(copy.deepcopy(network).state_dict())
    with pytest.raises(RuntimeError, match="head"):
        network.load_state_dict({"conv.weight": module.conv.weight})


def test_the_librarys_own_classifiers_stay_as_they_are():
    own = Layered([nn.Flatten(), nn.Linear(192, 4)], SHAPE)
    assert hand_over(own, SHAPE, 4) is own
    again = wrapped(Two())
    assert hand_over(again, SHAPE, 4) is again


class Returns(nn.Module):
    def __init__(self, make) -> None:
        super().__init__()
        self.layer, self.make = nn.Linear(192, 4), make

    def forward(self, inputs: Tensor):
        return self.make(self.layer(inputs.flatten(1)))


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (torch.relu, "is a builtin_function_or_method, not a torch module"),
        (nn.Sequential(nn.Flatten(), nn.LazyLinear(4)), "shapes are still open"),
        (nn.Flatten(), "has no parameters"),
        (nn.Sequential(nn.Linear(5, 4)), r"does not take inputs of shape \(3, 8, 8\)"),
        (nn.Sequential(nn.Flatten(), nn.Linear(192, 3)), r"makes \(2, 3\) of two inputs.*4 classes"),
        (Returns(lambda scores: (scores, scores)), "makes a tuple of two inputs"),
        (Returns(lambda scores: scores.sum(0, keepdim=True)), r"makes \(1, 4\) of two inputs"),
        (Returns(lambda scores: scores / 0), "not numbers"),
        (Returns(lambda scores: scores.long()), "not scores of shape"),
    ],
)
def test_what_does_not_fit_is_refused(module, message):
    with pytest.raises(ModelError, match=message):
        hand_over(module, SHAPE, 4)


@pytest.mark.parametrize("rows", [2, 4, 33])
def test_a_plain_function_passes_every_experiment_and_stays_what_it_was(rows):
    network = wrapped(Two()).eval()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    require_function(network, rows)
    assert not network.training
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ("one channel", "ignores part of its input: channel 2 changes no score"),
        ("left half", "ignores part of its input: column 4 changes no score, nor do 3 others"),
        ("buffer", "changes its 'module.seen'"),
        ("attribute", "changes its 'module.kept'"),
        ("batch mean above 20", "changing one example of a batch changes another"),
        ("scale above 20", "other scores in a batch of 33 than alone"),
        ("training", "other scores in evaluation than in training"),
        ("random", "draws random numbers"),
    ],
)
def test_a_network_that_misbehaves_is_found(spoil, message):
    with pytest.raises(ModelError, match=message):
        require_function(wrapped(Two(spoil)), 33)


def test_what_happens_above_a_size_is_found_at_sizes_between():
    """Of 4, 16, 64 and 100 rows: what happens from 17 to 70 only is found at 64."""

    class Between(Two):
        def forward(self, inputs: Tensor) -> Tensor:
            scores = super().forward(inputs)
            return scores - scores.mean(0) if 17 <= len(inputs) <= 70 else scores

    with pytest.raises(ModelError, match="in batches of 64"):
        require_function(wrapped(Between()), 100)


@pytest.mark.parametrize("layer", [nn.Dropout(), nn.Dropout2d(0.1), nn.AlphaDropout()])
def test_dropout_is_refused_with_the_reason(layer):
    module = nn.Sequential(nn.Conv2d(3, 4, 3), layer, nn.Flatten(), nn.Linear(144, 4))
    with pytest.raises(ModelError, match=r"layer '1' is \w*Dropout.*no seed of the run covers.*dropout='remove'"):
        require_function(wrapped(module), 4)


def test_batch_normalisation_is_refused_by_its_own_name():
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 4))
    with pytest.raises(ModelError, match=r"layer '1' is BatchNorm2d.*models\.fix"):
        require_function(wrapped(module), 4)


def test_a_last_layer_of_zeros_and_a_border_that_a_stride_leaves_out_are_nothing_to_complain_of():
    module = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 4))
    nn.init.zeros_(module[-1].weight)
    nn.init.zeros_(module[-1].bias)
    require_function(wrapped(module), 8)


def test_vectors_are_inputs_too_and_an_ignored_value_is_named():
    network = hand_over(nn.Sequential(nn.Linear(5, 4)), (5,), 4)
    assert isinstance(network, HandedOver)
    require_function(network, 8)

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.layer(inputs[:, :4])

    part = hand_over(Part(), (5,), 4)
    assert isinstance(part, HandedOver)
    with pytest.raises(ModelError, match="value 4 changes no score"):
        require_function(part, 8)
