"""Layers through which one example reaches another are found, by type and by experiment."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from stobatch.config import ModelConfig
from stobatch.errors import ModelError
from stobatch.models import build, from_layers, mixing_layers, replace_batch_norm, require_per_example, validators


def network(*body: nn.Module):
    return from_layers(nn.Linear(16, 8), nn.Sequential(*body, nn.Linear(8, 6)), nn.Linear(6, 3), (1, 4, 4))


class MeanOverBatch(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values - values.mean(0)


class MaxOverBatch(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values / values.abs().max().clamp(min=1e-6)


class Shuffle(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values.roll(1, dims=0)


class Attention(nn.Module):
    """Examples that look at each other."""

    def forward(self, values: Tensor) -> Tensor:
        return torch.softmax(values @ values.t(), dim=1) @ values


@pytest.mark.parametrize("layer", [MeanOverBatch(), Shuffle(), Attention()], ids=repr)
def test_layers_that_mix_examples_are_refused_by_experiment(layer):
    with pytest.raises(ModelError, match="changing one example of a batch changes another example's output") as caught:
        require_per_example(network(nn.ReLU(), layer))
    assert "Remove that layer" in str(caught.value)


def test_a_maximum_over_the_batch_is_refused_whatever_the_weights():
    missed = []
    for seed in range(8):
        torch.manual_seed(seed)
        try:
            require_per_example(network(nn.ReLU(), MaxOverBatch()))
        except ModelError:
            continue
        missed.append(seed)
    assert not missed


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.AlphaDropout(0.5), nn.RReLU()], ids=repr)
def test_layers_that_draw_random_numbers_are_refused_in_training_only(layer):
    noisy = network(nn.Tanh(), layer)
    with pytest.raises(ModelError, match="draws random numbers"):
        require_per_example(noisy.train())
    require_per_example(noisy.eval())


@pytest.mark.parametrize("layer", [nn.ReLU(), nn.GroupNorm(2, 8), nn.LayerNorm(8), nn.Softmax(dim=1)], ids=repr)
def test_layers_that_work_on_single_examples_pass(layer):
    require_per_example(network(nn.Tanh(), layer))


@pytest.mark.parametrize("normalisation", ["reference", "group", "none"])
def test_the_three_normalisations_pass_and_batch_is_refused(normalisation):
    generator = torch.Generator().manual_seed(0)
    require_per_example(build(ModelConfig(normalisation=normalisation), (1, 28, 28), 10, generator))
    with pytest.raises(ModelError, match=r"layer 'head\.norm' is BatchNorm2d: each output depends on the whole batch"):
        require_per_example(build(ModelConfig(normalisation="batch"), (1, 28, 28), 10, generator))


def test_batch_normalisation_is_refused_even_when_it_is_asleep():
    """In evaluation mode the experiment sees nothing; the type does."""
    asleep = network(nn.BatchNorm1d(8)).eval()
    with pytest.raises(ModelError, match=r"head\.body\.0.*BatchNorm1d.*models\.fix"):
        require_per_example(asleep)


MIXING = [nn.BatchNorm1d(8), nn.BatchNorm2d(8), nn.BatchNorm3d(8), nn.SyncBatchNorm(8), nn.LazyBatchNorm2d()]


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("layer", MIXING, ids=lambda layer: type(layer).__name__)
def test_every_batch_normalisation_is_found(layer):
    assert mixing_layers(nn.Sequential(nn.ReLU(), nn.Sequential(layer))) == ["1.0"]


def test_layers_that_do_not_mix_are_left_alone():
    fine = nn.Sequential(nn.GroupNorm(2, 4), nn.LayerNorm(4), nn.InstanceNorm2d(4), nn.Conv2d(4, 4, 1))
    assert mixing_layers(fine) == []
    assert [type(layer) for layer in replace_batch_norm(fine)] == [type(layer) for layer in fine]


@pytest.mark.parametrize("channels", [1, 2, 3, 6, 8, 12, 30])
def test_replacing_mends_nested_modules_and_leaves_the_original(channels):
    def block() -> nn.Module:
        return nn.Sequential(nn.Conv2d(channels, channels, 1), nn.BatchNorm2d(channels))

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.outer = nn.ModuleDict({"a": block(), "b": nn.ModuleList([block()])})
            self.norm = nn.BatchNorm2d(channels)

        def forward(self, values: Tensor) -> Tensor:
            return self.norm(self.outer["b"][0](self.outer["a"](values)))

    module = Nested()
    assert mixing_layers(module) == ["outer.a.1", "outer.b.0.1", "norm"]
    mended = replace_batch_norm(module)
    assert mixing_layers(mended) == []
    assert len(mixing_layers(module)) == 3, "the original was changed"
    norms = [layer for layer in mended.modules() if isinstance(layer, nn.GroupNorm)]
    assert [norm.num_channels for norm in norms] == [channels] * 3
    values = torch.randn(4, channels, 5, 5)
    other = values.clone()
    other[0] += 1
    assert torch.equal(mended(values)[1:], mended(other)[1:])


def test_a_mended_network_passes():
    body = nn.Sequential(nn.ReLU(), nn.Flatten(1), nn.Linear(4 * 36, 8), nn.ReLU(), nn.Linear(8, 6))
    with_norm = nn.Sequential(nn.BatchNorm2d(4), body)
    make = lambda inner: from_layers(nn.Conv2d(1, 4, 3), inner, nn.Linear(6, 3), (1, 8, 8))  # noqa: E731
    with pytest.raises(ModelError):
        require_per_example(make(with_norm))
    require_per_example(make(replace_batch_norm(with_norm)))


def test_a_lone_batch_norm_is_replaced():
    assert isinstance(replace_batch_norm(nn.BatchNorm2d(8)), nn.GroupNorm)


def test_a_shared_batch_norm_is_replaced_everywhere():
    shared = nn.BatchNorm2d(4)
    assert mixing_layers(replace_batch_norm(nn.Sequential(shared, nn.ReLU(), shared))) == []


def test_replacing_a_batch_norm_over_vectors_keeps_the_values():
    mended = replace_batch_norm(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)))
    out = mended(torch.randn(5, 4))
    assert float((out[0] - out[1]).detach().abs().max()) > 0.1


class AboveFourRows(nn.Module):
    """Mixes only in batches that are larger than the smallest experiment."""

    def forward(self, values: Tensor) -> Tensor:
        return values - values.mean(0) if len(values) > 4 else values


class LastRows(nn.Module):
    """The first rows are left alone; the last half of larger batches is mixed with itself."""

    def forward(self, values: Tensor) -> Tensor:
        half = max(4, len(values) // 2)
        return torch.cat([values[:half], values[half:] - values[half:].mean(0)])


class WhileTraining(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values - values.mean(0) if self.training else values


class WithGradients(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values - values.mean(0) if torch.is_grad_enabled() else values


class UnderAutocast(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values - values.mean(0) if torch.is_autocast_enabled("cpu") else values


@pytest.mark.parametrize("layer", [AboveFourRows(), LastRows()], ids=repr)
def test_mixing_is_found_at_the_size_that_passes(layer):
    require_per_example(network(nn.Tanh()), 64)
    with pytest.raises(ModelError, match="in batches of 64"):
        require_per_example(network(nn.Tanh(), layer), 64)


def test_what_only_large_batches_show_is_not_seen_in_small_ones():
    """Why the size matters."""
    require_per_example(network(nn.Tanh(), AboveFourRows()))


@pytest.mark.parametrize("layer", [WhileTraining(), WithGradients()], ids=repr)
def test_mixing_is_found_in_the_mode_that_training_uses(layer):
    with pytest.raises(ModelError):
        require_per_example(network(nn.Tanh(), layer))
    with torch.no_grad():
        require_per_example(network(nn.Tanh(), layer).eval())


def test_mixing_is_found_in_the_precision_that_training_uses():
    mixing = network(nn.Tanh(), UnderAutocast())
    require_per_example(mixing, 64)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ModelError):
        require_per_example(mixing, 64)
    with torch.autocast("cpu", torch.bfloat16):
        require_per_example(network(nn.Tanh()), 64)


def test_rounding_that_depends_on_the_place_in_memory_is_no_mixing():
    class Rough(nn.Module):
        """The last bit of every value depends on something else than the examples."""

        def forward(self, values: Tensor) -> Tensor:
            return values * (1 + 2.0**-23 * (values.data_ptr() // 64 % 3))

    require_per_example(network(nn.Tanh(), Rough()), 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_one_look_at_all_tensors_finds_those_that_differ_by_a_bit(dtype: torch.dtype) -> None:
    value = torch.tensor([0, 1]).to(dtype)
    pairs = {"same": (value, value.clone()), "other": (value, value.flip(0)), "empty": (value[:0], value[:0])}
    assert validators._differing_at_one_look(pairs) == ["other"]


def test_one_look_compares_bits_not_values() -> None:
    nan, zero = torch.tensor([torch.nan]), torch.tensor([0.0])
    assert validators._differing_at_one_look({"nan": (nan, nan.clone()), "sign": (zero, -zero)}) == ["sign"]
    assert validators._differing_at_one_look({}) == []
