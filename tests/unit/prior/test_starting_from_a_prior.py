"""`train --from`: what is taken, what is refused before anything is read or written, and what a guarantee says."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tamperings import mend_manifest

import stobatch
from stobatch import RunConfig, Status
from stobatch.baselines.plain import PlainConfig
from stobatch.config import DataConfig, EvaluationConfig, MachineConfig, ModelConfig, TrainingConfig, load_config
from stobatch.data import Dataset
from stobatch.data import load as load_data
from stobatch.dp.prior import find_conflict
from stobatch.errors import ModelError, RunError, SettingError, StobatchError
from stobatch.files import read_tensors, serialise_tensors, tensors_sha256
from stobatch.models.layered import build_layered
from stobatch.results import Outcome, PriorCard, PriorSource, Training
from stobatch.results.prior import write_prior
from stobatch.runs import START, Run
from stobatch.sound.settings import SoundConfig
from stobatch.sound.step import DpSgdTrainable

LAYERS = "conv 4 3/2, relu, linear 12, relu, linear"
CONFIG = RunConfig(
    method=SoundConfig(epsilon=3.0, delta=1e-3, batch_size=30, clip_norm=0.5, warm_up=0.0, tuned_on_private_data=False),
    data=DataConfig(name="small_digits", train_limit=120, test_limit=20),
    model=ModelConfig(architecture=LAYERS),
    training=TrainingConfig(steps=3, learning_rate=0.5, optimiser="sgd", monitor_every=3, monitor_examples=20),
    evaluation=EvaluationConfig(radii=(0.05,)),
    machine=MachineConfig(threads=1, checkpoint_every=1),
)
HEAD = {"layers.5.weight", "layers.5.bias"}


def card(**changes: Any) -> PriorCard:
    facts: dict[str, Any] = {
        "name": "shapes",
        "made_by": "a test",
        "architecture": {"architecture": LAYERS},
        "input_shape": (1, 8, 8),
        "num_classes": 10,
        "sources": (PriorSource(name="shapes", what="drawn shapes", licence="CC0-1.0", sha256="ab" * 32, records=50),),
        "may_contain": (),
        "weights_sha256": "",
        "method": "supervised",
        "settings": {},
    }
    return PriorCard(**{**facts, **changes})


def write(
    folder: Path, layers: str = LAYERS, shape: tuple[int, ...] = (1, 8, 8), classes: int = 10, **changes: Any
) -> Path:
    """A prior with weights that no seed of a run gives."""
    network = build_layered(layers, shape, classes, torch.Generator().manual_seed(77))
    write_prior(folder / "shapes", network.state_dict(), card(input_shape=shape, num_classes=classes, **changes))
    return folder / "shapes.safetensors"


def train(prior: Path | None, out: Path, config: RunConfig = CONFIG, **more: Any) -> stobatch.TrainedModel:
    return stobatch.train(config, out, prior=prior, quiet=True, **more)


@pytest.fixture
def frozen() -> RunConfig:
    return CONFIG.override("model.train_only", "head")


def test_training_starts_from_the_weights_of_the_prior(tmp_path: Path, frozen: RunConfig) -> None:
    prior = write(tmp_path)
    model = train(prior, tmp_path / "run", frozen)
    given, _ = read_tensors(prior)
    saved, _ = read_tensors(tmp_path / "run" / "model.safetensors")
    assert {name for name in given if not torch.equal(given[name], saved[name])} == HEAD
    for name in HEAD:
        # Three steps from there, and nowhere near a fresh layer's weights.
        assert (saved[name] - given[name]).norm() < 0.5 * given["layers.5.weight"].norm()
    assert model.guarantee.status is Status.PROVED
    assert model.guarantee.prior is not None
    assert model.guarantee.prior.read == (
        "shapes: drawn shapes (licence: CC0-1.0, 50 records, sha256 abababababababab…)",
    )
    assert any("were trained without the private records" in line for line in model.guarantee.assumptions)
    assert "from the prior shapes" in str(model.guarantee)


def test_the_digest_of_the_start_is_part_of_what_identifies_a_run(tmp_path: Path) -> None:
    prior = write(tmp_path / "one")
    run = tmp_path / "run"
    model = train(prior, run)
    digest = json.loads((tmp_path / "one" / "shapes.card.json").read_text())["weights_sha256"]
    assert model.config.prior.weights_sha256 == digest
    assert model.config.training_hash != CONFIG.training_hash
    assert stobatch.plan(CONFIG, prior=prior).guarantee.to_dict() == model.guarantee.to_dict()
    other = build_layered(LAYERS, (1, 8, 8), 10, torch.Generator().manual_seed(78))
    write_prior(tmp_path / "two" / "shapes", other.state_dict(), card())
    with pytest.raises(RunError, match=r"There prior\.weights_sha256 is"):
        train(tmp_path / "two" / "shapes", run, resume=True)
    with pytest.raises(RunError, match=r"There prior\.name is shapes, here it is None"):
        train(None, run, resume=True)
    with pytest.raises(SettingError, match="the settings start from the prior shapes"):
        train(tmp_path / "two" / "shapes", tmp_path / "again", model.config)


def test_a_run_needs_its_prior_no_more(tmp_path: Path) -> None:
    prior = write(tmp_path)
    first = train(prior, tmp_path / "run")
    for path in (prior, tmp_path / "shapes.card.json"):
        path.unlink()
    assert stobatch.load(tmp_path / "run").weights_sha256 == first.weights_sha256
    assert stobatch.verify(tmp_path / "run", sample=0).verdict is Outcome.AGREES
    # Nor does a copy of it without the weights that it started from.
    (tmp_path / "run" / START).unlink()
    assert stobatch.load(tmp_path / "run").guarantee.prior == first.guarantee.prior
    assert stobatch.verify(tmp_path / "run", sample=0).verdict is Outcome.AGREES


def test_frozen_parts_that_are_not_the_priors_are_found_by_verify(tmp_path: Path, frozen: RunConfig) -> None:
    """The broken twin: somebody saves a run whose frozen layer is not what the run says that it started from."""
    train(write(tmp_path), tmp_path / "run", frozen)
    tensors, metadata = read_tensors(tmp_path / "run" / "model.safetensors")
    tensors["layers.0.weight"][0, 0, 0, 0] += 1e-3
    blob = serialise_tensors(tensors, metadata)
    (tmp_path / "run" / "model.safetensors").write_bytes(blob)
    training = json.loads((tmp_path / "run" / "training.json").read_text())
    (tmp_path / "run" / "training.json").write_text(json.dumps(training | {"weights_sha256": tensors_sha256(blob)}))
    mend_manifest(tmp_path / "run")
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    (tmp_path / "run" / "manifest.json").write_text(json.dumps(manifest | {"weights_sha256": tensors_sha256(blob)}))
    verified = stobatch.verify(tmp_path / "run", sample=0)
    assert [check.name for check in verified.differing] == ["prior"]
    assert "layers.0.weight is not trained, and is not what the prior has" in verified.differing[0].detail


def test_a_killed_training_goes_on_from_the_copy_in_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, prior = CONFIG.replace(seed=4).override("model.adapter_rank", 1), write(tmp_path)
    train(prior, tmp_path / "whole", config)

    def killed(self: DpSgdTrainable, step: int, gradients: Any) -> None:
        if step == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(DpSgdTrainable, "released", killed)
        with pytest.raises(KeyboardInterrupt):
            train(prior, tmp_path / "killed", config)
    prior.unlink()
    started = load_config_of(tmp_path / "killed")
    train(None, tmp_path / "killed", started, resume=True)
    digests = {Training.read(Run(tmp_path / name)).weights_sha256 for name in ("whole", "killed")}
    assert len(digests) == 1


def load_config_of(run: Path) -> RunConfig:
    from stobatch.loading import read_config

    return read_config(Run(run))


@pytest.mark.parametrize("may_contain", ["mnist", "small_digits", "EMNIST", "unknown"])
def test_a_prior_that_may_contain_the_private_records_is_never_proved(may_contain: str, tmp_path: Path) -> None:
    model = train(write(tmp_path, may_contain=(may_contain,)), tmp_path / "run")
    guarantee = model.guarantee
    assert guarantee.status is Status.CLAIMED
    assert "may contain the private records" in guarantee.objections[0]
    assert "NOT a proven guarantee" in str(guarantee)
    assert not any("were trained without" in line for line in guarantee.assumptions)
    assert stobatch.verify(tmp_path / "run", sample=0).verdict is Outcome.AGREES


def test_a_prior_that_was_tuned_on_the_private_data_says_so(tmp_path: Path) -> None:
    guarantee = train(write(tmp_path, tuned_on=("mnist",)), tmp_path / "run").guarantee
    assert guarantee.status is Status.PROVED
    assert guarantee.objections[0].startswith("how the weights that training starts from, shapes, are made was chosen")
    assert guarantee.prior is not None
    assert guarantee.prior.tuned == "somebody looked at mnist, and the private data are small_digits"
    other = train(write(tmp_path / "other", tuned_on=("cifar10",)), tmp_path / "apart").guarantee
    assert not other.objections
    assert stobatch.verify(tmp_path / "run", sample=0).verdict is Outcome.AGREES


def test_tiny_imagenet_from_imagenet_weights_is_refused_as_proved() -> None:
    reason = find_conflict(("ImageNet-1k",), ("tiny_imagenet",))
    assert reason == "they may have seen ImageNet-1k, and the private data are tiny_imagenet"
    for seen, private in (("ILSVRC2012", "tiny_imagenet"), ("80 million tiny images", "cifar10"), ("own", "own")):
        assert find_conflict((seen,), (private,))
    for seen, private in (("imagenet", "cifar10"), ("cifar-100", "cifar10"), ("fashion_mnist", "mnist")):
        assert find_conflict((seen,), (private,)) is None


def test_a_last_layer_for_other_classes_is_drawn_afresh(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = CONFIG.override("model.train_only", "last-2").replace(seed=4)
    model = stobatch.train(config, tmp_path / "run", prior=write(tmp_path, classes=7))
    assert "the last layer is drawn afresh" in capsys.readouterr().err
    assert model.config.prior.new_head
    given, _ = read_tensors(tmp_path / "shapes.safetensors")
    saved, _ = read_tensors(tmp_path / "run" / "model.safetensors")
    assert torch.equal(given["layers.0.weight"], saved["layers.0.weight"])
    assert saved["layers.5.weight"].shape == (10, 12)
    assert model.guarantee.prior is not None
    assert model.guarantee.prior.new_head


def test_a_contrastive_prior_has_no_last_layer_to_take(tmp_path: Path) -> None:
    assert train(write(tmp_path, method="contrastive"), tmp_path / "run").config.prior.new_head


def named(name: str) -> Dataset:
    """The small digits in the opposite colours and under another name, for data that are not here."""
    whole = load_data(CONFIG.data)
    train, test = (replace(part.in_memory(), inputs=-part.in_memory().inputs) for part in (whole.train, whole.test))
    return Dataset(replace(whole.info, name=name), train, test)


def test_a_run_on_other_data_is_a_start(tmp_path: Path) -> None:
    public = CONFIG.replace(method=PlainConfig(batch_size=30), data=DataConfig(name="cifar10"))
    stobatch.train(public, tmp_path / "public", dataset=named("cifar10"), quiet=True)
    model = train(tmp_path / "public", tmp_path / "run")
    prior = model.guarantee.prior
    assert model.guarantee.status is Status.PROVED
    assert prior is not None
    assert (prior.name, prior.may_contain) == ("public", ("cifar10",))
    assert prior.promise == "no privacy guarantee (plain training is not private)"
    assert prior.weights_sha256 == Training.read(Run(tmp_path / "public")).weights_sha256
    # And what that run started from is part of what the next one may contain.
    chained = CONFIG.replace(data=DataConfig(name="tensors"))
    grandchild = stobatch.train(chained, tmp_path / "next", prior=tmp_path / "run", dataset=named("mine"), quiet=True)
    assert grandchild.guarantee.prior is not None
    assert grandchild.guarantee.prior.may_contain == ("small_digits", "cifar10")


@pytest.mark.parametrize("method", ["sound", "plain"])
def test_a_run_on_the_same_data_is_refused(method: str, tmp_path: Path) -> None:
    config = CONFIG if method == "sound" else CONFIG.replace(method=PlainConfig(batch_size=30))
    stobatch.train(config, tmp_path / "first", quiet=True)
    with pytest.raises(SettingError, match="What they tell together is not accounted for"):
        train(tmp_path / "first", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_on_somebodys_own_data_may_contain_anything(tmp_path: Path) -> None:
    own = CONFIG.replace(data=DataConfig(name="tensors"))
    stobatch.train(own, tmp_path / "own", dataset=named("mine"), quiet=True)
    assert train(tmp_path / "own", tmp_path / "run").guarantee.status is Status.CLAIMED


class _Trap:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (Path("unpickled"), "code was run")


def _no_card(folder: Path) -> Path:
    prior = write(folder)
    (folder / "shapes.card.json").unlink()
    return prior


def _other_weights(folder: Path) -> Path:
    prior = write(folder)
    kept = (folder / "shapes.card.json").read_text()
    write(folder, "conv 4 3/2, relu, linear 12, relu, linear *2")
    (folder / "shapes.card.json").write_text(kept)
    return prior


def _pickled(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "weights.pt").write_bytes(pickle.dumps(_Trap()))
    return folder / "weights.pt"


def _pickled_by_torch(folder: Path) -> Path:
    prior = write(folder)
    torch.save({"layers.0.weight": _Trap()}, prior)
    return prior


def _not_numbers(folder: Path) -> Path:
    network = build_layered(LAYERS, (1, 8, 8), 10, torch.Generator().manual_seed(77))
    network.state_dict()["layers.0.weight"][0] = float("nan")
    write_prior(folder / "shapes", network.state_dict(), card())
    return folder / "shapes.safetensors"


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda folder: folder / "nothing", RunError, "there is no prior"),
        (_no_card, RunError, "has no card"),
        (_other_weights, RunError, "holds other weights than"),
        (_pickled, RunError, "is a pickle. Opening it would run the code in it"),
        (_pickled_by_torch, RunError, "is a pickle. Opening it would run the code in it"),
        (_not_numbers, ModelError, "has values in layers.0.weight that are not numbers"),
        (lambda folder: write(folder, shape=(1, 9, 9)), ModelError, "takes inputs of 1x9x9, the data are 1x8x8"),
        (lambda folder: write(folder, f"conv 5{LAYERS[6:]}"), ModelError, "is 5x1x3x3 there, and 4x1x3x3 here"),
        (lambda folder: write(folder, f"{LAYERS} 12, relu, linear"), ModelError, "7.bias is 10 there, and nothing"),
        (lambda folder: write(folder, "conv 4 3/2, relu, linear"), ModelError, "does not fit the network"),
    ],
)  # fmt: skip
def test_what_is_no_start_is_refused_before_data_is_read(
    make: Any, error: type[StobatchError], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("stobatch.training_run.read_data", lambda *_: pytest.fail("data were read"))
    prior = make(tmp_path / "priors")
    for verb in (lambda: train(prior, tmp_path / "run"), lambda: stobatch.plan(CONFIG, prior=prior)):
        with pytest.raises(error) as raised:
            verb()
        assert words in str(raised.value)
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "unpickled").exists()


def test_settings_that_name_a_prior_need_its_weights(tmp_path: Path) -> None:
    config = train(write(tmp_path), tmp_path / "run").config
    (tmp_path / "saved.json").write_text(json.dumps(config.to_dict()))
    again = load_config(tmp_path / "saved.json")
    assert again == config
    with pytest.raises(SettingError, match="start from the prior shapes, which is not here"):
        train(None, tmp_path / "other", again)
    assert not (tmp_path / "other").exists()
    with pytest.raises(SettingError, match="does not say what training starts from"):
        stobatch.plan(CONFIG.override("prior.name", "shapes"))


def test_a_method_whose_analysis_starts_at_random_refuses_a_prior(tmp_path: Path) -> None:
    from stobatch_recipes import recipe

    config = recipe("audit.published")
    with pytest.raises(StobatchError, match=r"does not start from a prior|does not fit"):
        stobatch.plan(config, prior=write(tmp_path))


def test_an_audit_trains_its_models_from_the_prior(tmp_path: Path, frozen: RunConfig) -> None:
    from stobatch.auditing.audit import open_subject
    from stobatch.loading import make_plan
    from stobatch.seeds import Seeds

    prior = write(tmp_path)
    train(prior, tmp_path / "run", frozen)
    audited = open_subject(Run(tmp_path / "run"), dataset=load_data(CONFIG.data), seed=1)
    trainable = audited.fresh(
        make_plan(audited.config, audited.info, None), audited.data().train.in_memory(), Seeds.secret()
    )
    given, _ = read_tensors(prior)
    assert all(torch.equal(given[name], value) for name, value in trainable.network.state_dict().items())
    assert set(trainable.parameters) == HEAD


def test_a_search_refuses_settings_that_name_a_prior_before_it_writes(tmp_path: Path) -> None:
    config = train(write(tmp_path), tmp_path / "run").config
    with pytest.raises(SettingError, match="start from the prior shapes, which is not here"):
        stobatch.tune(config, tmp_path / "search")
    assert not (tmp_path / "search").exists()
