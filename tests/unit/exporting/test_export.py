"""Exported networks: the deployed labels without stobatch, and a card that lets nobody mistake a claim for a proof."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.command_line import call
from support.tiny import SETTINGS
from torch import Tensor, nn

import stobatch
from stobatch.config import ModelConfig
from stobatch.errors import ModelError, RunError, SettingError
from stobatch.exporting import CORNERS, FORMS, RANDOM_INPUTS, _compare, _trace, _with_refuted, probes
from stobatch.loading import TrainedModel
from stobatch.models import Classifier, Layered, build
from stobatch.reporting.model_card import model_card
from stobatch.results import CertificateSummary, Exported, SanityFlag
from stobatch.types import Status
from stobatch_recipes import recipe

pytestmark = pytest.mark.slow
"""Exporting compiles, and checks in processes of their own."""

ONNX = ("onnx", "onnxscript", "onnxruntime")
needs_onnx = pytest.mark.skipif(
    not all(map(find_spec, ONNX)), reason="onnx, onnxscript and onnxruntime are not installed: stobatch[export]"
)
FORMATS = ["torchscript", "pt2", pytest.param("onnx", marks=needs_onnx)]
SMALL = {"data.train_limit": 400, "data.test_limit": 60, "method.batch_size": 100, "training.steps": 8}
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def model(runs: Path) -> TrainedModel:
    config = recipe("demo").override_all({**SMALL, "method.epsilon": 50.0, "evaluation.radii": [0.05, 0.2]})
    trained = stobatch.train(config, runs / "sound", quiet=True)
    stobatch.certify(trained.run.path, quiet=True)
    return trained


@pytest.fixture(scope="module")
def published(runs: Path) -> TrainedModel:
    """With a public seed: its fixed noise is no secret."""
    config = recipe("published.demo").override_all({**SETTINGS, "seed": 5})
    trained = stobatch.train(config, runs / "published", quiet=True)
    stobatch.certify(trained.run.path, quiet=True)
    return trained


@pytest.fixture(scope="module")
def voting(runs: Path) -> TrainedModel:
    draws = {"certification.noise_draws": 200, "certification.selection_draws": 20}
    config = recipe("sound.mnist_l2").override_all({**SMALL, **draws, "training.steps": 3})
    return stobatch.train(config, runs / "votes", quiet=True)


@dataclass(frozen=True)
class Elsewhere:
    """An exported run, pictures in two batches, and the labels that a process without stobatch found for them."""

    trained: TrainedModel
    document: Exported
    batches: list[Tensor]
    labels: list[Tensor]


@pytest.fixture(scope="module")
def elsewhere(runs: Path, model: TrainedModel, published: TrainedModel) -> dict[tuple[str, str], Elsewhere]:
    """Everything exported and labelled by one process that has no stobatch, with the code that the cards give."""
    inputs = torch.rand(300, 1, 28, 28, generator=torch.Generator().manual_seed(9)) * 2 - 1
    batches = [inputs, inputs[:1]]
    torch.save(batches, runs / "inputs.pt")
    formats = [to for to in FORMS if to != "onnx" or all(map(find_spec, ONNX))]
    documents = {
        (which, to): stobatch.export(trained.run.path, runs / f"{which}-{to}", to=to)
        for which, trained in (("model", model), ("published", published))
        for to in formats
    }
    asked = [(document.folder, *_snippet(document)) for document in documents.values()]
    code = (
        "import os, sys, torch, warnings\nsys.modules['stobatch'] = None\nwarnings.simplefilter('ignore')\nfound = []\n"
        f"batches = torch.load({str(runs / 'inputs.pt')!r})\n"
        f"for folder, as_numpy, snippet in {asked!r}:\n"
        "    os.chdir(folder)\n    labels = []\n"
        "    for given in batches:\n"
        "        names = {'inputs': given.numpy() if as_numpy else given}\n        exec(snippet, names)\n"
        "        labels.append(torch.as_tensor(names['scores']).argmax(1))\n"
        "    found.append(labels)\n"
        f"torch.save(found, {str(runs / 'labels.pt')!r})"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    found: list[list[Tensor]] = torch.load(runs / "labels.pt")
    trained = {"model": model, "published": published}
    return {
        (which, to): Elsewhere(trained[which], document, batches, labels)
        for ((which, to), document), labels in zip(documents.items(), found, strict=True)
    }


def _snippet(document: Exported) -> tuple[bool, str]:
    """Whether the card's code takes arrays, and that code."""
    card = (Path(document.folder) / "README.md").read_text()
    (snippet,) = (block.split("```")[0] for block in card.split("```python\n")[1:])
    return document.format == "onnx", snippet


def front_matter(document: Exported) -> dict[str, Any]:
    """Read without a YAML reader: every line is `key: JSON`, and what follows # is for people."""
    _, front, _ = (Path(document.folder) / "README.md").read_text().split("---\n", 2)
    rows = (line.partition(": ") for line in front.splitlines())
    return {key: json.loads(value.split(" # ")[0]) for key, _, value in rows}


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize(("which", "rounding"), [("model", 1e-5), ("published", 1e-3)])
def test_a_process_without_stobatch_gets_the_deployed_labels(
    elsewhere: dict[tuple[str, str], Elsewhere], which: str, rounding: float, to: str
) -> None:
    """The published noise is far larger than what it is added to, and taken off again: more is rounded away."""
    found = elsewhere[which, to]
    trained, document, folder = found.trained, found.document, Path(found.document.folder)
    for given, labels in zip(found.batches, found.labels, strict=True):
        with torch.no_grad():
            assert torch.equal(labels, trained.network(given).argmax(1))
    assert {file.name for file in folder.iterdir()} == {FORMS[to].file, "README.md"}
    blob = (folder / FORMS[to].file).read_bytes()
    assert document.file_sha256 == hashlib.sha256(blob).hexdigest()
    assert len(blob) == document.bytes
    assert document.weights_sha256 == trained.weights_sha256
    assert document.check.largest_difference < rounding * document.check.largest_score


@pytest.mark.parametrize("to", FORMATS)
def test_nothing_of_the_owner_is_inside(elsewhere: dict[tuple[str, str], Elsewhere], to: str) -> None:
    """No folder of this machine, no seed, no private tensor, no commitment key, no training image."""
    model, document = elsewhere["model", to].trained, elsewhere["model", to].document
    blob = b"".join(file.read_bytes() for file in sorted(Path(document.folder).iterdir()))
    private = [file for file in (model.run.path / "private").rglob("*") if file.is_file()]
    secrets = [str(value).encode() for file in private if file.suffix == ".json" for value in leaves(file)]
    assert secrets
    places = [str(place).encode() for place in (ROOT, model.run.path, document.folder, Path(torch.__file__).parents[1])]
    images = stobatch.data.load(model.config.data).train.inputs[:50]
    pictures = [image.numpy().tobytes() for image in images]
    weights = {tensor.numpy().tobytes() for tensor in load_file(model.run.model_file).values()}
    kept = (load_file(file) for file in private if file.suffix == ".safetensors")
    tensors = {tensor.numpy().tobytes() for one in kept for tensor in one.values() if tensor.numel() > 4}
    assert tensors - weights, "a checkpoint holds the weights, which are public, and more"
    found = [secret[:80] for secret in (*secrets, *places, *pictures, *(tensors - weights)) if secret in blob]
    assert not found
    assert any(tensor in blob for tensor in weights), "the search would find what is there"


def leaves(file: Path) -> Iterator[object]:
    """Values in a JSON file that are long enough to be found in something by intent alone."""
    waiting = [json.loads(file.read_text())]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict | list):
            waiting += one.values() if isinstance(one, dict) else one
        elif len(str(one)) >= 16 and not str(one).startswith("stobatch."):
            yield one


def test_noise_that_is_private_is_not_exported(runs: Path, published: TrainedModel, tmp_path: Path) -> None:
    trained = stobatch.train(recipe("published.demo").override_all(SETTINGS), runs / "secret", quiet=True)
    with pytest.raises(RunError, match="carries noise that is private"):
        stobatch.export(trained.run.path, tmp_path / "out", to="pt2")
    assert not list(tmp_path.iterdir())
    stobatch.export(published.run.path, tmp_path / "out", to="pt2")
    noise = load_file(published.run.path / "private" / "noise.safetensors")["hidden_noise"]
    assert noise.numpy().tobytes() in (tmp_path / "out" / "model.pt2").read_bytes(), "what is refused would be inside"


def test_the_card_says_what_is_proved_and_of_what(elsewhere: dict[tuple[str, str], Elsewhere]) -> None:
    model, document = elsewhere["model", "pt2"].trained, elsewhere["model", "pt2"].document
    card = (Path(document.folder) / "README.md").read_text()
    assert card == model_card(document)
    for words in (
        "**proved: ε = ",
        "add-or-remove-one neighbours, per training example",
        "[N, 1, 28, 28]",
        "every value in [-1, 1]",
        "p / 127.5 - 1",
        "| bounds | proved | single pass | 0.05 (l∞ over [-1, 1]) |",
        "They do NOT hold for this file.",
        f"{RANDOM_INPUTS} random inputs and {CORNERS} corners",
        "Audits of privacy and certificates: none were made.",
        "Accuracy under attack: not measured.",
        document.file_sha256,
        document.weights_sha256,
        f"written by stobatch {document.made_by.stobatch}",
    ):
        assert words in card, words
    for line in (*model.guarantee.assumptions, *model.guarantee.objections):
        assert line.split("<")[0] in card
    front = front_matter(document)
    assert front["library_name"] == "pytorch"
    assert front["license"] is None
    assert front["privacy"] == model.guarantee.to_dict()
    metrics = front["model-index"][0]["results"][0]["metrics"]
    assert {metric["args"]["status"] for metric in metrics} == {"measured", "proved"}
    assert Exported.from_dict(document.to_dict()) == document


def test_a_public_seed_is_void_and_a_claim_is_no_proof(published: TrainedModel, runs: Path, tmp_path: Path) -> None:
    void = stobatch.export(published.run.path, tmp_path / "void", to="pt2")
    card = (tmp_path / "void" / "README.md").read_text()
    assert "**VOID: public seed (" in card
    assert front_matter(void)["privacy"]["status"] == "void"
    assert "| published | CLAIMED, NOT PROVED | vote |" in card
    assert "| corrected | proved | vote |" in card
    assert "one pass without that noise, and not the vote" in card
    stobatch.audit(
        published.run.path, overrides={"audit.instruments": ["release"], "audit.release_trials": 100}, quiet=True
    )
    refuted = stobatch.export(published.run.path, tmp_path / "refuted", to="pt2")
    assert refuted.guarantee.status is Status.REFUTED
    assert "**REFUTED: ε = " in (tmp_path / "refuted" / "README.md").read_text()
    assert "refuted_epsilon" in front_matter(refuted)["privacy"]
    settings = {key: value for key, value in SETTINGS.items() if key != "method.train_attack_steps"}
    config = recipe("baselines.adlm").override_all(
        {**settings, "method.relevance_steps": 1, "method.relevance_batch_size": 30}
    )
    claimed = stobatch.train(config, runs / "adlm", quiet=True)
    document = stobatch.export(claimed.run.path, tmp_path / "claimed", to="pt2")
    assert "**CLAIMED, NOT PROVED: ε = " in (tmp_path / "claimed" / "README.md").read_text()
    assert front_matter(document)["privacy"]["status"] == "claimed"


def test_certificates_that_were_broken_are_refuted(published: TrainedModel) -> None:
    """By an audit, which names the kind; or by an attack of `evaluate`, which names the status."""
    certified = CertificateSummary.read(published.run)
    plain = {kind.name: kind.status for kind in certified.kinds}
    assert plain == {"published": Status.CLAIMED, "corrected": Status.PROVED}
    words = dict.fromkeys(("name", "level", "raised_if", "explanation", "remedy", "evidence"), "words")
    for names, flags, broken in (
        (frozenset({"published"}), (), {"published"}),
        (frozenset(), (SanityFlag(**words, refutes=Status.PROVED),), {"corrected"}),
        (frozenset(), (SanityFlag(**words),), set()),
    ):
        shown = {kind.name: kind.status for kind in _with_refuted(certified, names, flags).kinds}
        assert shown == plain | dict.fromkeys(broken, Status.REFUTED)


def test_every_budget_on_a_card_has_its_status(published: TrainedModel, model: TrainedModel, tmp_path: Path) -> None:
    """Of the front matter and of the headline; elsewhere the words are those of the guarantee."""
    for name, trained in (("a", published), ("b", model)):
        document = stobatch.export(trained.run.path, tmp_path / name, to="pt2")
        words = json.dumps(front_matter(document))
        status = str(document.guarantee.status)
        assert words.count("epsilon") == words.count(f"{status}_epsilon") == 1
        assert str(document).count("ε = ") == 1
        (line,) = (line for line in str(document).splitlines() if "ε = " in line)
        assert status in line.lower()


def test_a_vote_is_not_the_file_even_before_it_is_certified(voting: TrainedModel, tmp_path: Path) -> None:
    document = stobatch.export(voting.run.path, tmp_path / "out", to="pt2")
    assert document.votes
    assert document.certificates is None
    assert "one pass without that noise, and not the vote" in (tmp_path / "out" / "README.md").read_text()


def test_tags_are_what_is_proved_and_nothing_else(
    own: Path, published: TrainedModel, model: TrainedModel, tmp_path: Path
) -> None:
    """People filter models by tags: a void or refuted run, or one without certificates, must not be found by them."""
    properties = {"differential-privacy", "certified-robustness"}
    found = {}
    for name, run, network in (
        ("proved", model.run.path, None),
        ("void", published.run.path, None),
        ("own", own, _Own),
    ):
        document = stobatch.export(run, tmp_path / name, to="pt2", network=network(True) if network else None)
        found[name] = properties & set(front_matter(document)["tags"])
    assert found == {"proved": properties, "void": {"certified-robustness"}, "own": {"differential-privacy"}}
    assert (
        "Nothing is certified, neither for the run nor for this file." in (tmp_path / "own" / "README.md").read_text()
    )


def test_names_of_classes_are_text_alone(model: TrainedModel, tmp_path: Path) -> None:
    document = stobatch.export(model.run.path, tmp_path / "out", to="pt2")
    names = ("a\n---\nlicense: mit", "<b>|x", *map(str, range(2, 10)))
    card = model_card(document.replace(dataset=document.dataset.replace(class_names=names)))
    assert card.count("\n---\n") == 1
    assert r"0 = a --- license: mit, 1 = \<b\>\|x, 2 = 2" in card


class _Own(Classifier):
    """A network that shows something else to whoever traces it."""

    def __init__(self, honest: bool) -> None:
        super().__init__()
        self.input_shape, self.honest = (1, 28, 28), honest
        self.last = nn.Linear(784, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.last(inputs.flatten(1))
        return -scores if torch.compiler.is_compiling() and not self.honest else scores

    @property
    def num_classes(self) -> int:
        return self.last.out_features


@pytest.fixture(scope="module")
def own(runs: Path) -> Path:
    config = recipe("baselines.dpsgd").override_all({**SMALL, "training.steps": 2})
    return stobatch.train(config, runs / "own", network=_Own(True), quiet=True).run.path


def test_a_network_that_is_exported_as_another_is_refused(own: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"another label than the network on 321 of {RANDOM_INPUTS + CORNERS} probes"):
        stobatch.export(own, tmp_path / "out", to="pt2", network=_Own(False))
    assert not list(tmp_path.iterdir())
    stobatch.export(own, tmp_path / "out", to="pt2", network=_Own(True))
    with pytest.raises(RunError, match=r"network=\.\.\."):
        stobatch.export(own, tmp_path / "other", to="pt2")


def test_a_network_that_branches_on_values_is_refused_in_one_line(own: Path, tmp_path: Path) -> None:
    class Branching(_Own):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs) if inputs.sum() > 0 else super().forward(-inputs)

    with pytest.raises(ModelError, match="cannot follow this network") as refused:
        stobatch.export(own, tmp_path / "out", to="pt2", network=Branching(True))
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_one_changed_label_and_scores_that_are_no_numbers_are_found() -> None:
    network = Layered([nn.Flatten(), nn.Linear(16, 3)], (1, 4, 4))
    inputs = probes((1, 4, 4))
    assert inputs.min() == -1
    assert inputs.max() == 1
    assert bool((inputs[-1] == 1).all())

    def altered(part: Tensor) -> Tensor:
        scores: Tensor = network(part)
        if len(part) == 1:
            scores = scores.flip(1) if scores.argmax(1) != 1 else scores.roll(1, 1)
        return scores

    assert _compare(network, network, "file").largest_difference == 0
    for broken, count in ((altered, 1), (lambda part: network(part) * torch.nan, None)):
        with pytest.raises(ModelError, match=f"on {count} of" if count else "another label"):
            _compare(network, broken, "file")


def test_what_cannot_be_written_is_said_before_anything_is(
    model: TrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = model.run.path
    (tmp_path / "there").mkdir()
    assert "already there" in call("export", run, "--to", "pt2", "--out", tmp_path / "there").refusal()
    assert "torchscript, pt2, onnx" in call("export", run, "--to", "tf", "--out", tmp_path / "new").refusal()
    assert "is not a run" in call("export", tmp_path, "--to", "pt2", "--out", tmp_path / "new").refusal()
    monkeypatch.setattr("stobatch.exporting.find_spec", lambda name: None if name in ONNX else find_spec(name))
    for name in ONNX:
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(SettingError, match=r"onnx, onnxscript, onnxruntime, .* pip install 'stobatch\[export\]'"):
        stobatch.export(run, tmp_path / "new", to="onnx")
    monkeypatch.delattr(torch.jit, "trace")
    with pytest.raises(SettingError, match=r"has no torch\.jit, which torchscript is written with"):
        stobatch.export(run, tmp_path / "new", to="torchscript")
    assert [file.name for file in tmp_path.iterdir()] == ["there"]


def test_files_that_were_changed_are_not_put_on_a_card(runs: Path, model: TrainedModel, tmp_path: Path) -> None:
    file = model.run.path / "certificates.json"
    before = file.read_text()
    file.write_text(before.replace('"proved"', '"claimed"', 1))
    try:
        with pytest.raises(RunError, match=r"certificates\.json"):
            stobatch.export(model.run.path, tmp_path / "out", to="pt2")
    finally:
        file.write_text(before)
    assert not list(tmp_path.iterdir())


def test_the_verb(model: TrainedModel, tmp_path: Path) -> None:
    done = call("export", model.run.path, "--to", "torchscript", "--out", tmp_path / "a")
    assert done.code == 0, done.err
    assert "differ by at most" in done.out
    assert "do NOT hold for this file" in done.out
    printed = call("export", model.run.path, "--to", "torchscript", "--out", tmp_path / "b", "--json").json()
    assert Exported.from_dict(printed).folder == str(tmp_path / "b")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("to", [to for to in FORMATS if to != "onnx"])
def test_scattering_is_exported_for_batches_of_any_size(to: str) -> None:
    """A size that tracing had taken for a constant would fail on every other batch."""
    model = ModelConfig(architecture="scatter 2, groupnorm 3, relu, linear")
    network = build(model, (1, 28, 28), 10, torch.Generator().manual_seed(0)).eval().requires_grad_(False)
    inputs = torch.rand(5, 1, 28, 28, generator=torch.Generator().manual_seed(1)) * 2 - 1
    scores = FORMS[to].load(FORMS[to].save(_trace(network)))(inputs)
    torch.testing.assert_close(scores, network(inputs), rtol=1e-5, atol=1e-5)
