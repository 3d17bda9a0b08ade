"""The sound method's certificates from end to end: what they say, which is chosen, and what attacks make of them."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import stobatch
from stobatch.bounds import linear as linear_bounds
from stobatch.bounds.certifier import BoxCertifier
from stobatch.bounds.linear import Box, Clamp
from stobatch.cli.app import main
from stobatch.data import Dataset
from stobatch.errors import ModelError
from stobatch.models import Classifier, build
from stobatch.models.layered import Layered, Squash, build_layered
from stobatch.sound.method import Sound
from stobatch.sound.verifiers import BoundsVerifier, VotesVerifier, best_of
from stobatch.types import PAPER_RANGE, Norm, Radius, Status
from stobatch.verifier import CertificateKind, Verifier
from stobatch.votes.counting import VoteSettings
from stobatch.votes.noise import GaussianNoise, HiddenGaussian
from stobatch_recipes import recipe

RADII = [0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.9]
COMMON: dict[str, Any] = {
    "method.epsilon": 30.0,
    "method.delta": 1e-4,
    "method.views_weight": 0.3,
    "method.num_views": 1,
    "method.warm_up": 0.1,
    "method.ramp": 0.3,
    "method.average_decay": 0.8,
    "training.monitor_every": 30,
    "certification.noise_draws": 300,
    "certification.selection_draws": 20,
    "certification.failure_probability": 0.01,
    "evaluation.adaptive_steps": 10,
    "evaluation.restarts": 1,
    "evaluation.queries": 30,
    "evaluation.num_images": 0,
    "evaluation.vote_draws": 100,
    "evaluation.vote_limit": 10,
    "evaluation.noise_draws": 2,
    "evaluation.vote_attacks": ["madry"],
    "machine.threads": 1,
    "seed": 4,
}
DIGITS: dict[str, Any] = {
    **COMMON,
    "data.train_limit": 400,
    "data.test_limit": 40,
    "method.expected_batch_size": 200,
    "method.radius": 0.15,
    "method.smoothing_stddev": 0.25,
    "model.architecture": "squash 2 0 0.4, conv 6 7/3, relu, linear",
    "training.steps": 60,
    "training.learning_rate": 2.0,
    "evaluation.radii": RADII,
    "evaluation.adaptive_attacks": ["ifgsm", "apgd_ce", "apgd_t", "square"],
}
BARS: dict[str, Any] = {
    **COMMON,
    "data.name": "tensors",
    "method.expected_batch_size": 60,
    "method.radius": 0.1,
    "method.smoothing_stddev": 0.4,
    "model.architecture": "conv 4 3/2, relu, linear",
    "training.steps": 30,
    "training.learning_rate": 1.0,
    "evaluation.radii": [0.05, 0.1, 0.2],
    "evaluation.adaptive_attacks": ["apgd_ce"],
}


def bars() -> Dataset:
    """Bright left or bright right half, with some noise."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(240) % 2
    inputs = torch.rand(240, 1, 6, 6, generator=generator) * 0.6 - 0.3
    inputs[labels == 0, :, :, :3] += 0.5
    inputs[labels == 1, :, :, 3:] += 0.5
    return stobatch.from_tensors(inputs[:200], labels[:200], inputs[200:], labels[200:], num_classes=2)


@pytest.fixture(scope="module")
def digits_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("digits") / "run"
    stobatch.train(recipe("sound.mnist").override_all(DIGITS), out, quiet=True)
    return out


@pytest.fixture
def digits(digits_once: Path, tmp_path: Path) -> Path:
    """A small network trained with certified and smoothed losses; a copy of its own for every test."""
    return Path(shutil.copytree(digits_once, tmp_path / "digits"))


@pytest.fixture(scope="module")
def bars_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("bars") / "run"
    stobatch.train(recipe("sound.mnist").override_all(BARS), out, dataset=bars(), quiet=True)
    return out


@pytest.fixture
def bars_run(bars_once: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bars_once, tmp_path / "bars"))


def network(layers: str = "squash 2 0 0.4, conv 3 3/2, relu, linear", seed: int = 0) -> Layered:
    return build_layered(layers, (1, 6, 6), 3, torch.Generator().manual_seed(seed)).requires_grad_(False)


def pictures(count: int = 12, seed: int = 1) -> Tensor:
    return torch.rand(count, 1, 6, 6, generator=torch.Generator().manual_seed(seed)) * 2 - 1


# Bounds.


def bounds(norm: Norm = Norm.LINF, radii: Sequence[float] = (0.2, 0.01, 0.05, 0.01)) -> BoundsVerifier:
    net = network()
    return BoundsVerifier(net, norm, radii, 64)


@pytest.mark.parametrize("norm", Norm)
def test_bounds_are_certain_and_about_the_network_itself(norm: Norm) -> None:
    verifier = bounds(norm)
    (kind,) = verifier.kinds
    assert (kind.name, kind.status, kind.failure_probability) == ("bounds", Status.PROVED, 0.0)
    assert (kind.function, kind.column, kind.unit) == ("single_pass", "radius", Radius(1.0, norm, PAPER_RANGE))
    assert ("the ball lies inside" in kind.source) == (norm is not Norm.LINF)
    assert "TF32" in kind.assumptions[0]
    assert verifier.function == "single_pass"
    assert verifier.samples() == {}
    assert verifier.with_draws(7) is verifier


def test_a_bound_is_the_largest_given_radius_that_holds() -> None:
    verifier, inputs = bounds(), pictures(60)
    found = verifier.verify(inputs, torch.Generator())
    columns = found.columns()
    assert columns.keys() == {"label", "abstain", "radius"}
    assert not columns["abstain"].any()
    assert np.array_equal(found.label, verifier.network(inputs).argmax(1).numpy())
    margins = np.stack([verifier.certifier.margins(inputs, size).numpy() > 0 for size in (0.01, 0.05, 0.2)])
    sizes = np.array([0.0, 0.01, 0.05, 0.2])
    assert np.array_equal(columns["radius"], sizes[np.cumprod(margins, 0).sum(0)])
    assert len(set(columns["radius"])) >= 3, "the inputs should differ"


def test_an_l2_ball_is_certified_as_the_box_around_it() -> None:
    inputs = pictures(30)
    sizes = [bounds(norm).verify(inputs, torch.Generator()).radius for norm in Norm]
    assert all(np.array_equal(sizes[0], other) for other in sizes)


# Squashes with thresholds.


def outside_the_box(slope: float, thresholds: tuple[float, ...], seed: int) -> bool:
    """Whether float32 returns a value that the bounds of a box deny: corners, their neighbours and random points."""
    generator = torch.Generator().manual_seed(seed)
    ends = (torch.rand(2, 200, 2, 3, 3, generator=generator) * 2 - 1).sort(0).values
    # Some boxes around the places where a map leaves its clamp.
    for place, threshold in enumerate(thresholds):
        ends[:, place] = threshold + torch.tensor([-1.0, 1.0]).view(2, 1, 1, 1) * (0.9 + 0.2 * ends[1, place]) / slope
        # And points next to the threshold, where its own rounding is all that is left of the difference.
        ends[:, place + 100] = threshold + 1e-6 * ends[0, place + 100]
    ends = ends.clamp(-1, 1)
    low, high = ends
    box = Clamp(slope, thresholds).forward(Box(low.double(), high.double())).after
    layer, mixed = Squash(slope, *thresholds), torch.rand(low.shape, generator=generator)
    points = [low, high, *(low + (high - low) * share for share in (mixed, mixed**4, 1 - mixed**4))]
    points += [torch.nextafter(low, high), torch.nextafter(high, low)]
    for point in points:
        value = layer(torch.minimum(torch.maximum(point, low), high)).double()
        if bool(((value < box.low) | (value > box.high)).any()):
            return True
    return False


SQUASHES = [(3.0, (0.0,)), (2.0, (0.0, 0.4)), (0.7, (-0.3, 0.1, 0.3)), (8.1, (0.1, 1 / 3)), (1e4, (0.123456789,))]


@pytest.mark.parametrize(("slope", "thresholds"), SQUASHES)
def test_squashed_boxes_hold_what_float32_returns(slope: float, thresholds: tuple[float, ...]) -> None:
    assert not any(outside_the_box(slope, thresholds, seed) for seed in range(10))


@pytest.mark.parametrize(("slope", "thresholds"), [case for case in SQUASHES if case[0] in (0.7, 8.1, 1e4)])
def test_squashes_without_room_for_rounding_are_caught(
    slope: float, thresholds: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_bounds, "FLOAT32_UNIT", 0.0)
    assert any(outside_the_box(slope, thresholds, seed) for seed in range(10))


def test_forgetting_that_thresholds_are_rounded_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def relative(self: Clamp, end: Tensor, threshold: float, way: int) -> Tensor:
        shifted = end - threshold
        return self.slope * (shifted + way * 5 * linear_bounds.FLOAT32_UNIT * shifted.abs())

    monkeypatch.setattr(Clamp, "_end", relative)
    assert outside_the_box(8.1, (0.1, 1 / 3), 0)


@pytest.mark.parametrize("method", ["interval", "linear"])
def test_no_point_of_the_ball_gets_below_the_bound_behind_thresholds(method: Any) -> None:
    for seed, radius in ((0, 0.0), (1, 0.05), (2, 0.3), (3, 1.0)):
        net, inputs = network("squash 2 -0.3 0 0.4, conv 3 3/2, relu, linear", seed), pictures(6, seed)
        certifier = BoxCertifier(net.layers, method)
        margins, labels = certifier.margins(inputs, radius), certifier.predict(inputs)
        draws = torch.rand(300, *inputs.shape, generator=torch.Generator().manual_seed(seed))
        low, high = (inputs - radius).clamp(-1, 1), (inputs + radius).clamp(-1, 1)
        for points in (low + (high - low) * draws, torch.where(draws < 0.5, low, high)):
            scores = net(points.flatten(0, 1)).double().unflatten(0, (300, 6))
            of_label = scores.gather(2, labels.expand(300, 6)[..., None])
            others = scores.scatter(2, labels.expand(300, 6)[..., None], -torch.inf).amax(2)
            assert (of_label[..., 0] - others >= margins).all()


@pytest.mark.parametrize("layer", [Squash(-1.0), Squash(2.0, 2.5), Squash(1e31)], ids=repr)
def test_squashes_outside_of_what_was_proved_are_refused(layer: Squash) -> None:
    with pytest.raises(ModelError, match="slope"):
        BoxCertifier(nn.Sequential(layer, nn.Linear(2, 2)))


# Votes.


def votes(norm: Norm = Norm.L2, *, stop_early: bool = True, stddev: float = 0.2, net: Layered | None = None) -> Any:
    net = net or network()
    settings = VoteSettings(failure_probability=0.01, selection_draws=20, draws=400)
    return VotesVerifier(net, net, GaussianNoise(stddev), norm, (0.1, 0.3), settings, stop_early=stop_early)


@pytest.mark.parametrize("norm", Norm)
def test_votes_say_how_often_they_may_fail_and_what_has_to_be_deployed(norm: Norm) -> None:
    verifier = votes(norm)
    (kind,) = verifier.kinds
    assert (kind.name, kind.status, kind.failure_probability) == ("votes", Status.PROVED, 0.01)
    assert (kind.function, kind.column, kind.unit) == ("vote", f"radius_{norm}", Radius(1.0, norm, PAPER_RANGE))
    columns = verifier.verify(pictures(), torch.Generator().manual_seed(0)).columns()
    assert {"label", "abstain", kind.column, "draws"} <= columns.keys()
    assert all(len(column) == 12 for column in columns.values())
    assert (columns[kind.column] > 0).any()
    assert not columns[kind.column][columns["abstain"]].any()


def test_votes_follow_their_generator_and_stop_when_all_is_decided() -> None:
    inputs = pictures(30)
    patient, hasty = votes(stop_early=False), votes()
    first, again, other = (patient.verify(inputs, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert np.array_equal(first.top_lower, again.top_lower)
    assert not np.array_equal(first.top_lower, other.top_lower)
    assert (first.draws == 400).all()
    stopped = hasty.verify(inputs, torch.Generator().manual_seed(1))
    assert stopped.draws.mean() < 400
    assert stopped.draws.max() <= 400
    fewer = patient.with_draws(50)
    assert (fewer.verify(inputs, torch.Generator()).draws == 50).all()
    assert (fewer.norm, fewer.radii, fewer.stop_early) == (patient.norm, patient.radii, False)


def hidden_votes(net: Layered) -> VotesVerifier:
    first = net.layers[0]
    assert isinstance(first, nn.Conv2d)
    noise = HiddenGaussian.behind(first, net.input_shape, at_input=0.2, at_hidden=0.3)
    settings = VoteSettings(failure_probability=0.01, selection_draws=20, draws=400)
    return VotesVerifier(net, net.layers[1:], noise, Norm.L2, (0.1, 0.3), settings, stop_early=False)


@pytest.mark.parametrize("hidden", [False, True])
def test_what_is_attacked_is_the_mean_over_the_votes_own_noise_and_can_be_differentiated(hidden: bool) -> None:
    net = network("conv 3 3/2, relu, linear")
    verifier = hidden_votes(net) if hidden else votes(net=net)
    points = pictures(4).requires_grad_()
    scores = verifier.samples()["score"](50, torch.Generator().manual_seed(3))(points)
    shifts = verifier.noise.draw((50, 1, 6, 6), torch.Generator().manual_seed(3))
    expected = torch.stack(
        [verifier.behind_noise(verifier.noise.noise_free(points) + shift).softmax(1) for shift in shifts]
    ).mean(0)
    assert torch.allclose(scores.exp(), expected, atol=1e-5)
    (gradient,) = torch.autograd.grad(scores[:, 0].sum(), points)
    assert (gradient.flatten(1).norm(dim=1) > 0).all()


def test_noise_in_the_hidden_layer_hides_more() -> None:
    """The same classifier behind noise at the input alone, and in both places."""
    net = network("conv 3 3/2, relu, linear")
    both, alone = hidden_votes(net), votes(net=net)
    assert both.noise.factors(Norm.L2, 36).per_deviation > alone.noise.factors(Norm.L2, 36).per_deviation
    points = pictures(3)
    assert torch.allclose(both.behind_noise(both.noise.noise_free(points)), net(points), atol=1e-5)


# The best of both.


@dataclass
class Fake(Verifier):
    """Proves the radii that it is given."""

    name: str
    sizes: list[float]
    status: Status = Status.PROVED

    def __post_init__(self) -> None:
        self.asked: list[Tensor] = []

    @property
    def kinds(self) -> tuple[CertificateKind, ...]:
        unit = Radius(1.0, Norm.LINF, PAPER_RANGE)
        return (CertificateKind(self.name, self.status, "", unit, 0.0, column="size"),)

    def verify(self, inputs: Tensor, generator: torch.Generator) -> Any:
        self.asked.append(inputs)
        sizes = np.array(self.sizes)

        class Found:
            def columns(self) -> dict[str, NDArray[Any]]:
                return {"size": sizes}

        return Found()


def test_the_verifier_with_the_larger_mean_radius_is_chosen_and_recorded() -> None:
    weak, strong = Fake("weak", [0.0, 0.9]), Fake("strong", [0.5, 0.5])
    inputs = torch.zeros(150, 1, 2, 2)
    for order in ([weak, strong], [strong, weak]):
        best, said = best_of(order, inputs, [0.5, 0.9])
        assert best is strong
        assert said is not None
        assert said.certificate == "strong"
        assert said.mean_radius == {"weak": 0.45, "strong": 0.5}
        assert "first 100 inputs, without their labels" in said.compared_on
    assert all(len(asked) == 100 for asked in (*weak.asked, *strong.asked))


def test_radii_between_the_given_ones_count_as_the_smaller_one() -> None:
    """Votes know every radius, bounds only those asked about; what lies between must not decide."""
    votes, bounds = Fake("votes", [0.29, 0.29]), Fake("bounds", [0.2, 0.3])
    best, said = best_of([votes, bounds], torch.zeros(2, 1, 2, 2), [0.3, 0.2])
    assert best is bounds
    assert said is not None
    assert said.mean_radius == {"votes": 0.2, "bounds": 0.25}


def test_a_single_verifier_is_chosen_without_a_comparison() -> None:
    only = Fake("only", [0.0])
    assert best_of([only], torch.zeros(3, 1, 2, 2), [0.1]) == (only, None)
    assert not only.asked


# Which ways a trained network has.


def ways(layers: str, **changes: Any) -> tuple[Verifier, ...]:
    config = recipe("sound.mnist").override_all({**BARS, "model.architecture": layers, **changes})
    net: Classifier = build(config.model, (1, 12, 12), 3, torch.Generator().manual_seed(0))
    plan = stobatch.plan(config, dataset=bars())
    return Sound().verifiers(config, plan, net)


VOTES = {"certification.certificate": "votes"}
BOUNDS = {"certification.certificate": "bounds"}
HIDDEN = {"certification.hidden_stddev": 0.2}


@pytest.mark.parametrize(
    ("layers", "changes", "names"),
    [
        ("conv 2 3, relu, linear", {}, ["bounds", "votes"]),
        ("conv 2 3, relu, linear", VOTES, ["votes"]),
        ("conv 2 3, relu, linear", BOUNDS, ["bounds"]),
        ("conv 2 3, relu, linear", {"method.smoothing_stddev": 0.0, "method.views_weight": 0.0}, ["bounds"]),
        ("conv 2 3, groupnorm 1, relu, linear", {"method.certified_weight": 0.0}, ["votes"]),
        ("mnist_cnn", {"method.certified_weight": 0.0}, ["votes"]),
    ],
)
def test_every_verifier_that_fits_is_offered(layers: str, changes: dict[str, Any], names: list[str]) -> None:
    found = ways(layers, **changes)
    assert [way.kinds[0].name for way in found] == names
    assert all(way.radii == (0.05, 0.1, 0.2) for way in found)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("layers", "changes", "message"),
    [
        (
            "conv 2 3, relu, linear",
            {**VOTES, "method.smoothing_stddev": 0.0, "method.views_weight": 0.0},
            "kind 'votes'",
        ),
        ("conv 2 3, groupnorm 1, relu, linear", {**BOUNDS, "method.certified_weight": 0.0}, "GroupNorm"),
        ("mnist_cnn", {**BOUNDS, "method.certified_weight": 0.0}, "kind 'bounds'"),
        ("squash 2, conv 2 3, relu, linear", HIDDEN, "start with conv or linear"),
        ("conv 2 3, relu, linear", {**HIDDEN, "method.smoothing_noise": "laplace"}, "Gaussian noise"),
        ("mnist_cnn", {**HIDDEN, "method.certified_weight": 0.0}, "start with conv or linear"),
    ],
)
def test_a_verifier_that_does_not_fit_is_refused(layers: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        ways(layers, **changes)
    assert caught.value.remedy


# The verbs.


def records(run: Path, verb: str) -> dict[str, NDArray[Any]]:
    import pyarrow.parquet

    (folder,) = run.glob(f"records/{verb}-*")
    columns = [pyarrow.parquet.read_table(part).to_pydict() for part in sorted(folder.iterdir())]
    return {name: np.concatenate([np.asarray(part[name]) for part in columns]) for name in columns[0]}


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("certificate", ["bounds", "votes", "best"])
def test_certify(digits: Path, norm: str, certificate: str) -> None:
    asked = {"evaluation.norm": norm, "certification.certificate": certificate, "evaluation.radii": [0.02, 0.1, 0.4]}
    summary = stobatch.certify(digits, overrides=asked, quiet=True).to_dict()
    (kind,) = summary["kinds"]
    chosen = summary["chosen"]
    if certificate == "best":
        # In l-infinity votes lose a factor √784; in l2 bounds have to prove a box that is that much too large.
        assert kind["name"] == chosen["certificate"] == {"linf": "bounds", "l2": "votes"}[norm]
        assert chosen["mean_radius"].keys() == {"bounds", "votes"}
    else:
        assert chosen is None
        assert kind["name"] == certificate
    assert (kind["status"], kind["norm"], kind["input_range"]) == ("proved", norm, "[-1, 1]")
    rows = records(digits, "certify")
    held = (rows["label"] == rows["prediction"]) & ~rows["abstain"]
    for entry in summary["certified_accuracy"][kind["name"]]:
        assert entry["value"] == pytest.approx((held & (rows[kind["column"]] >= entry["radius"])).mean())
    assert summary["verified_accuracy"]["correct"]["value"] > 0.5
    assert summary["certified_accuracy"][kind["name"]][0]["value"] > (0.5 if kind["name"] == "bounds" else -1)
    assert rows[kind["column"]].max() == summary["largest_radius"][kind["name"]] > 0


def test_certify_and_attack_with_noise_in_the_hidden_layer(bars_run: Path) -> None:
    asked = {**VOTES, **HIDDEN, "evaluation.norm": "l2", "evaluation.functions": ["vote"]}
    plain = stobatch.certify(
        bars_run, overrides={**asked, "certification.hidden_stddev": 0.0}, dataset=bars(), quiet=True
    )
    both = stobatch.certify(bars_run, overrides=asked, dataset=bars(), quiet=True).to_dict()
    assert both["kinds"][0]["status"] == "proved"
    assert both["largest_radius"]["votes"] > plain.largest_radius["votes"] > 0
    scores = stobatch.evaluate(bars_run, overrides=asked, dataset=bars(), quiet=True).to_dict()
    assert scores["under_attack"][0]["function"] == "vote"
    assert not [flag for flag in scores["flags"] if flag["refutes"]]


def run_cli(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["stobatch", *map(str, arguments)])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(SystemExit) as left:
        main()
    return int(left.value.code or 0)


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_no_attack_breaks_a_bound(digits: Path, norm: str) -> None:
    sizes = RADII if norm == "linf" else [0.1, 0.3, 0.6]
    asked = {**BOUNDS, "evaluation.norm": norm, "evaluation.radii": sizes}
    certified = stobatch.certify(digits, overrides=asked, quiet=True).to_dict()
    scores = stobatch.evaluate(
        digits, overrides={"evaluation.norm": norm, "evaluation.radii": sizes}, quiet=True
    ).to_dict()
    assert certified["certified_accuracy"]["bounds"][1]["value"] > 0.5
    assert not [flag for flag in scores["flags"] if flag["refutes"]]
    worst = {e["radius"]: e["value"] for e in scores["under_attack"][0]["accuracy"] if e["attack"] == "worst"}
    for entry in certified["certified_accuracy"]["bounds"]:
        assert entry["value"] <= worst[entry["radius"]]
    # The attacks are no toys: at the largest radius they break most of what was right.
    assert norm == "l2" or worst[0.9] < 0.5 * scores["clean_accuracy"]["value"]


def test_the_command_line_passes_a_run_whose_bounds_hold(
    digits: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stobatch.certify(digits, overrides=BOUNDS, quiet=True)
    assert run_cli(monkeypatch, "evaluate", digits, "--json") == 0
    assert not any(flag["refutes"] for flag in json.loads(capsys.readouterr().out)["flags"])


def test_a_bound_of_twice_the_radius_is_refuted_and_stops_the_pipeline(
    digits: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = BoxCertifier.certified_at
    with monkeypatch.context() as broken:
        broken.setattr(
            BoxCertifier, "certified_at", lambda self, inputs, radii: honest(self, inputs, [r / 2 for r in radii])
        )
        stobatch.certify(digits, overrides=BOUNDS, quiet=True)
    capsys.readouterr()
    assert run_cli(monkeypatch, "evaluate", digits, "--json") == 1
    (flag,) = [flag for flag in json.loads(capsys.readouterr().out)["flags"] if flag["refutes"]]
    assert (flag["level"], flag["refutes"]) == ("error", "proved")
    assert "bounds certificates (proved), single_pass" in flag["evidence"]


def test_attacks_on_the_vote_do_not_break_it(digits: Path) -> None:
    asked = {**VOTES, "evaluation.norm": "l2", "evaluation.radii": [0.1, 0.4], "evaluation.functions": ["vote"]}
    certified = stobatch.certify(digits, overrides=asked, quiet=True).to_dict()
    assert certified["certified_accuracy"]["votes"][1]["value"] > 0.3
    scores = stobatch.evaluate(digits, overrides=asked, quiet=True).to_dict()
    assert scores["under_attack"][0]["function"] == "vote"
    assert not [flag for flag in scores["flags"] if flag["refutes"]]


def test_a_vote_that_claims_far_too_much_is_refuted(digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Certificates for ten times the noise that was drawn."""
    asked = {**VOTES, "evaluation.norm": "l2", "evaluation.radii": [4.0], "evaluation.functions": ["vote"]}
    asked |= {"certification.stop_early": False, "evaluation.vote_limit": 30, "evaluation.adaptive_steps": 20}
    honest = GaussianNoise.factors
    with monkeypatch.context() as broken:
        broken.setattr(GaussianNoise, "factors", lambda self, norm, d: honest(GaussianNoise(10 * self.stddev), norm, d))
        stobatch.certify(digits, overrides=asked, quiet=True)
    scores = stobatch.evaluate(digits, overrides=asked, quiet=True).to_dict()
    assert [flag["refutes"] for flag in scores["flags"] if flag["refutes"]] == ["proved"]
