"""A prior is made of public images alone, with the recipe's own losses; the same arguments give the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import stobatch
from stobatch.bounds.boxes import TrainingBox, worst_case_scores
from stobatch.config import DataConfig, RunConfig
from stobatch.data import load
from stobatch.data.sources import Source
from stobatch.errors import DataError, ModelError, SettingError, StobatchError
from stobatch.models import Layered, build_layered
from stobatch.pretraining import images
from stobatch.registry import DATA_SETS
from stobatch.results import PriorCard
from stobatch.results.prior import prior_files, read_prior
from stobatch_recipes import recipe

SMALL = "squash 3, conv 8 7/3, relu, linear"


def small(name: str = "sound.mnist", **changes: object) -> RunConfig:
    return recipe(name).override_all({"model.architecture": SMALL, "machine.threads": 1} | changes)


def quick(config: RunConfig, source: str, out: Path, **options: object) -> PriorCard:
    few = {"steps": 3, "batch_size": 16, "quiet": True} | options
    return stobatch.pretrain(config, source, out, **few)  # type: ignore[arg-type]


def network_of(prior: Path) -> Layered:
    tensors, card = read_prior(prior)
    assert card.architecture is not None
    layers, shape = card.architecture["architecture"], tuple(card.input_shape)
    network = build_layered(layers, shape, card.num_classes, torch.Generator())
    network.load_state_dict(tensors)
    return network


def right(scores: Tensor, labels: Tensor) -> float:
    return float((scores.argmax(1) == labels).float().mean())


def test_the_same_arguments_give_the_same_weights(tmp_path: Path) -> None:
    first, again, other = (
        quick(small(), "fonts", tmp_path / name, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert first.weights_sha256 == again.weights_sha256 != other.weights_sha256
    assert first.name == "a"


def test_a_prior_of_fonts_knows_mnist_and_the_recipe_s_box_makes_it_certifiable(tmp_path: Path) -> None:
    test = load(DataConfig(name="mnist", train_limit=1, test_limit=1000)).test
    certified = {}
    for weight in (0.5, 0.0):
        config = small(**{"method.certified_weight": weight, "method.natural_weight": 0.5})
        card = quick(config, "fonts", tmp_path / f"{weight}", steps=150, batch_size=64, learning_rate=0.01)
        network = network_of(tmp_path / f"{weight}")
        with torch.no_grad():
            assert right(network(test.inputs), test.labels) > 0.6
            worst = worst_case_scores(network.layers, TrainingBox.around(test.inputs, 0.1), test.labels)
        certified[weight] = right(worst, test.labels)
        assert card.method == "supervised"
        assert card.may_contain == ()
        assert card.settings["losses_of"] == config.method.to_dict()
    assert certified[0.5] > certified[0.0] + 0.1


def test_private_data_are_described_and_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> None:
        raise AssertionError("the private data were read")

    monkeypatch.setitem(DATA_SETS, "mnist", Source(DATA_SETS["mnist"].describe, read, can_augment=False))
    quick(small(), "fonts", tmp_path / "prior")
    with pytest.raises(AssertionError, match="were read"):  # the twin: a training reads them
        stobatch.train(small(seed=1), tmp_path / "run", quiet=True)


@pytest.mark.parametrize("source", ["dead-leaves", "generators"])
def test_a_contrastive_loss_trains_all_but_the_last_layer(tmp_path: Path, source: str) -> None:
    config = small("sound.cifar10")
    before = network_with_first_weights(config)
    card = quick(config, source, tmp_path / "prior", steps=2)
    after = network_of(tmp_path / "prior").state_dict()
    last = [name for name in after if name.startswith("layers.4")]
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    assert len(last) == 2
    assert moved == after.keys() - last
    assert (card.method, card.may_contain, card.settings["losses_of"]) == ("contrastive", (), None)


def network_with_first_weights(config: RunConfig) -> dict[str, Tensor]:
    from stobatch import data
    from stobatch.loading import make_network
    from stobatch.seeds import Seeds

    return make_network(config, data.describe(config.data), Seeds.reproducible(0), None).state_dict()


def test_a_contrastive_loss_falls(tmp_path: Path) -> None:
    config = small("sound.cifar10")
    first = quick(config, "dead-leaves", tmp_path / "first", steps=1, batch_size=32)
    last = quick(config, "dead-leaves", tmp_path / "last", steps=60, batch_size=32, learning_rate=0.01)
    assert last.settings["last_loss"] < 0.85 * first.settings["last_loss"]


def test_methods_without_losses_of_their_own_and_networks_of_the_paper(tmp_path: Path) -> None:
    config = recipe("published.mnist").override_all({"model.architecture": "small_cnn", "model.last_hidden_size": 8})
    for source, option in (("fonts", {}), ("generators", {"batch_size": 8})):
        card = quick(config, source, tmp_path / source, **option)
        assert card.architecture == config.model.to_dict()


def test_what_a_method_keeps_in_the_network_is_no_part_of_a_prior(tmp_path: Path) -> None:
    change = {"model.architecture": "small_cnn", "model.last_hidden_size": 8, "data.train_limit": 60}
    config = recipe("baselines.securesgd").override_all(change)
    quick(config, "fonts", tmp_path / "prior")
    tensors, _ = read_prior(tmp_path / "prior")
    assert not [name for name in tensors if "noise" in name]


def test_views_of_a_recipe_with_votes_have_its_noise(tmp_path: Path) -> None:
    config = recipe("sound.mnist_l2").override("model.architecture", "conv 4 5/3, groupnorm 2, relu, linear")
    noisy = quick(config, "generators", tmp_path / "noisy")
    quiet = quick(config.override("method.smoothing_stddev", 1e-3), "generators", tmp_path / "quiet")
    assert noisy.weights_sha256 != quiet.weights_sha256


def test_digits_are_those_of_fonts_and_of_strokes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "_STROKES_PER_DIGIT", 7)
    cards = {name: quick(small(), name, tmp_path / name) for name in ("digits", "fonts", "strokes")}
    fonts, strokes = cards["digits"].sources
    assert (fonts,) == cards["fonts"].sources
    assert (strokes,) == cards["strokes"].sources
    assert strokes.records == 70
    assert {card.tuned_on for card in cards.values()} == {("mnist",)}


def test_digits_at_8x8_are_made_as_those_of_the_data_set(tmp_path: Path) -> None:
    config = small(**{"data.name": "small_digits", "model.architecture": "linear"})
    assert quick(config, "fonts", tmp_path / "prior").input_shape == (1, 8, 8)


def folder_of_images(root: Path, classes: tuple[str, ...]) -> Path:
    for label, name in enumerate(classes or ("",)):
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(3):
            Image.new("RGB", (40, 30), (80 * label, 60 * number, 9)).save(root / name / f"{number}.png")
    return root


def test_the_first_classes_of_a_public_data_set(tmp_path: Path) -> None:
    card = quick(small("sound.cifar10"), "small_digits:4", tmp_path / "prior")
    assert card.num_classes == 4
    (source,) = card.sources
    assert "first 4 classes" in source.what
    whole = load(DataConfig(name="small_digits")).train.in_memory()
    assert source.records == int((whole.labels < 4).sum())


def test_a_folder_says_what_its_owner_says(tmp_path: Path) -> None:
    folder = folder_of_images(tmp_path / "pets", ("cat", "dog"))
    card = quick(small(), str(folder), tmp_path / "a")
    assert (card.method, card.num_classes, card.may_contain) == ("supervised", 2, ("unknown",))
    assert card.sources[0].licence == "not stated"
    assert "nothing is proved towards the data sets named above" in str(card)
    card = quick(small(), str(folder), tmp_path / "b", may_contain=["none"], licence="CC0-1.0", objective="contrastive")
    assert (card.method, card.num_classes, card.may_contain) == ("contrastive", 10, ())
    assert "by its maker's word" in str(card)
    assert "ε" not in str(card)
    assert (card.sources[0].name, card.sources[0].licence, card.sources[0].records) == ("pets", "CC0-1.0", 6)
    plain = folder_of_images(tmp_path / "plain", ())
    assert quick(small(), str(plain), tmp_path / "c").method == "contrastive"
    with pytest.raises(SettingError, match="no labels"):
        quick(small(), str(plain), tmp_path / "d", objective="supervised")


def test_a_network_that_is_handed_over_has_no_architecture(tmp_path: Path) -> None:
    network = build_layered("linear", (1, 28, 28), 10, torch.Generator())
    config = small(**{"data.name": "tensors"})
    assert quick(config, "fonts", tmp_path / "prior", network=network).architecture is None
    module = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    config = small(**{"method.certified_weight": 0.0})
    for objective in ("supervised", "contrastive"):
        quick(config, "fonts", tmp_path / objective, network=module, objective=objective)
        assert set(read_prior(tmp_path / objective)[0]) == {"1.weight", "1.bias"}


def test_a_prior_is_trained_whole_whatever_the_private_training_leaves_alone(tmp_path: Path) -> None:
    whole = quick(small(), "fonts", tmp_path / "whole")
    part = quick(small(**{"model.train_only": "head"}), "fonts", tmp_path / "part")
    assert whole.weights_sha256 == part.weights_sha256
    assert whole.architecture == part.architecture


@pytest.mark.parametrize(
    ("source", "options", "error", "says"),
    [
        ("mnist", {}, SettingError, "is what is to be private"),
        ("small_digits", {}, SettingError, "is what is to be private"),
        ("fontz", {}, SettingError, "neither a public data set nor a folder"),
        ("cifar10:ten", {}, SettingError, "neither a public data set nor a folder"),
        ("image_folder", {}, SettingError, "neither a public data set nor a folder"),
        ("fonts", {"objective": "magic"}, SettingError, "objective=magic"),
        ("generators", {"objective": "supervised"}, SettingError, "no labels"),
        ("fonts", {"steps": 0}, SettingError, "steps=0"),
        ("fonts", {"learning_rate": float("nan")}, SettingError, "learning_rate=nan"),
        ("fonts", {"learning_rate": 1e30}, ModelError, "not a number"),
        ("empty", {}, DataError, "has no images"),
    ],
)
def test_what_cannot_be_made_is_refused_and_nothing_is_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    options: dict[str, object],
    error: type[StobatchError],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(error, match=says):
        quick(small(), source, tmp_path / "out" / "prior", **options)
    assert not (tmp_path / "out").exists()


def test_an_existing_prior_is_left_alone(tmp_path: Path) -> None:
    quick(small(), "fonts", tmp_path / "prior")
    weights = prior_files(tmp_path / "prior")[0]
    before = weights.read_bytes()
    with pytest.raises(StobatchError, match="there already"):
        quick(small(), "fonts", tmp_path / "prior", seed=2)
    assert weights.read_bytes() == before


def test_a_prior_that_cannot_be_written_is_refused_before_it_is_trained(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StobatchError, match="cannot write"):
        quick(small(), "fonts", tmp_path / "file" / "prior", steps=10**9)
