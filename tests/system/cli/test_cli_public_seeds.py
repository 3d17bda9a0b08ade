"""A public seed voids a privacy guarantee: it is asked for with --seed and by nothing else, and every verb says so."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from support.tiny import as_arguments

import stobatch
from stobatch.cli.app import app
from stobatch.dp.guarantee import PrivacyGuarantee
from stobatch.runs import Run
from stobatch.types import Status
from stobatch_recipes import RECIPES, baselines, recipe

VERBS = {command.name or command.callback.__name__: command for command in app.registered_commands if command.callback}
TAKES: dict[str, set[str]] = {
    name: set(inspect.signature(command.callback).parameters)
    for name, command in VERBS.items()
    if command.callback is not None
}
"""The options of every verb."""
ASKS_NOTHING = ("federate", "shard", "budget")
"""A demonstration of its own, and verbs that train nothing."""
SOUND: dict[str, Any] = {
    "data.train_limit": 120,
    "data.test_limit": 30,
    "method.expected_batch_size": 30,
    "method.delta": 1e-3,
    "model.architecture": "squash 3, conv 4 7/5, relu, linear",
    "training.steps": 3,
    "training.learning_rate": 1.0,
    "evaluation.adaptive_attacks": ["fgsm"],
    "evaluation.adaptive_steps": 1,
    "evaluation.num_images": 0,
    "evaluation.limit": 10,
    "machine.threads": 1,
}


def arguments(**more: Any) -> list[str]:
    return ["--recipe", "sound.mnist", *as_arguments({**SOUND, **more})]


# No way to a public seed but --seed.


@pytest.mark.parametrize("name", RECIPES)
def test_no_recipe_carries_a_seed(name: str) -> None:
    assert recipe(name).seed is None


@pytest.mark.parametrize("name", baselines.COMPARED)
def test_no_row_of_a_comparison_carries_a_seed(name: str) -> None:
    assert all(config.seed is None for config in baselines.rows([name], [1.0], 0.2).values())


def asked(verb: str, out: Path) -> list[object]:
    """A call of a verb that names nothing to be trained yet."""
    needed = {"budget": ["--book", out], "pretrain": ["--from-data", "digits"], "figure": ["2"]}.get(verb, [])
    return [verb, *needed, *(["--out", out] if "out" in TAKES[verb] else [])]


@pytest.mark.parametrize("verb", sorted(name for name, options in TAKES.items() if "set_" in options))
def test_a_seed_among_the_settings_is_refused_by_every_verb(cli, tmp_path, verb) -> None:
    what = ["--recipe", "sound.mnist"] if "recipe" in TAKES[verb] else []
    if verb in ("certify", "attack", "evaluate"):
        stobatch.train(recipe("sound.mnist").override_all(SOUND), tmp_path / "out", quiet=True)
    before = sorted(tmp_path.rglob("*"))
    message = cli(*asked(verb, tmp_path / "out"), *what, "--set", "seed=3").refusal()
    assert "seed" in message
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("verb", sorted(name for name, options in TAKES.items() if "config" in options))
def test_a_seed_in_a_file_is_refused_by_every_verb(cli, tmp_path, verb) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(recipe("sound.mnist").replace(seed=3).to_dict()))
    message = cli(*asked(verb, tmp_path / "out"), "--config", file).refusal()
    assert "has a public seed (3), and --seed is not given" in message
    assert "--seed 3" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "verb", sorted(n for n, options in TAKES.items() if "config" in options and n not in ASKS_NOTHING)
)
def test_without_recipe_and_configuration_a_verb_asks_for_one(cli, tmp_path, verb) -> None:
    message = cli(*asked(verb, tmp_path / "out")).refusal()
    assert message.startswith("neither --recipe nor --config is given.")
    assert "sound.mnist" in message
    assert not (tmp_path / "out").exists()


def seeds_of(runs: Path) -> list[int | None]:
    """The seeds of all runs below a folder; one that is secret lies in the owner's folder."""
    found = [Run(file.parent) for file in sorted(runs.rglob("config.json"))]
    assert all(run.has("seeds", private=True) == (run.read("config")["config"]["seed"] is None) for run in found)
    return [run.read("config")["config"]["seed"] for run in found]


def test_every_verb_that_trains_draws_secret_seeds(cli, tmp_path) -> None:
    """Every one that has a --seed of its own, or `compare`; a new one has to be added here."""
    parties = {"method.parties": ["north:600:60", "east:400:40"], "method.delta": 1e-4, "training.steps": 2}
    calls = {
        "train": ["train", *arguments(), "--out", tmp_path / "train"],
        "demo": ["demo", *arguments(**{"audit.num_inputs": 2, "audit.attack_steps": 1}), "--out", tmp_path / "demo"],
        "audit": ["audit", tmp_path / "audit", "--recipe", "audit.sound_strict", "--trainings", "40",
                  "--set", "training.steps=2", "--set", "audit.models_at_once=20"],
        "compare": ["compare", "--out", tmp_path / "compare", "--methods", "sound", "--repeats", 2, "--limit", 10,
                    *arguments(**{"evaluation.attack_steps": 1})[2:]],
        "federate": ["federate", "--out", tmp_path / "federate",
                     *as_arguments(parties)],
    }  # fmt: skip
    trains = {name for name, options in TAKES.items() if options & {"seed", "seeds"} and "set_" in options}
    # A prior is made of public images, and a figure of the paper of public data with seeds that its records name.
    assert trains - {"plan", "shard", "certify", "attack", "evaluate", "pretrain", "figure"} == set(calls)
    for verb, call in calls.items():
        done = cli(*call)
        assert done.code == 0, (verb, done.err)
        found = seeds_of(tmp_path / verb)
        assert found, verb
        assert set(found) == {None}, verb


# What is said of a run whose seed is public.


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained with a public seed. Read only."""
    out = tmp_path_factory.mktemp("public") / "run"
    stobatch.train(recipe("sound.mnist").override_all({**SOUND, "seed": 5}), out, quiet=True)
    return out


def words(text: str) -> str:
    return " ".join(text.replace("│", " ").split())


def test_plan_and_train_say_that_it_is_void_and_what_that_means(cli, tmp_path) -> None:
    for call in (["plan"], ["train", "--out", tmp_path / "run"]):
        done = cli(*call, *arguments(), "--seed", 5)
        assert done.code == 0, done.err
        said = words(done.out)
        assert said.count("VOID: public seed (ε = ") == 1
        assert "would be proved with secret seeds)" in said
        assert said.count("whoever has it can rebuild the noise and take it off") == 1
        assert "proved: ε" not in said


def test_json_has_the_status_its_reason_and_what_secret_seeds_would_give(cli, public, tmp_path) -> None:
    planned = cli("plan", *arguments(), "--seed", 5, "--json").json()["guarantee"]
    trained = cli("train", "--out", public, "--resume", "--json").json()["guarantee"]
    stored = Run(public).read("plan")["guarantee"]
    for found in (planned, trained, stored):
        assert (found["status"], found["void_reason"]) == ("void", "public seed")
        assert found["status_with_secret_seeds"] == "proved"
        assert found["void_epsilon"] == stored["void_epsilon"] > 0
        assert "proved_epsilon" not in found
    secret = cli("plan", *arguments(), "--json").json()["guarantee"]
    assert (secret["status"], secret["proved_epsilon"]) == ("proved", stored["void_epsilon"])


def test_a_seeded_run_of_an_older_version_is_void_when_it_is_loaded(public) -> None:
    """Its plan.json and scores.json say proved; what counts is the seed in its config.json."""
    model = stobatch.load(public)
    assert model.guarantee.status is Status.VOID
    assert model.guarantee.secret_seed_status is model.claim.status is Status.PROVED
    assert PrivacyGuarantee.from_dict(model.guarantee.to_dict()) == model.guarantee


def test_audits_test_the_mechanism_and_the_run_stays_void(cli, tmp_path) -> None:
    run = tmp_path / "run"
    assert cli("train", *arguments(**{"canaries.num": 300}), "--seed", 5, "--out", run, "--json").code == 0
    done = cli("audit", run, "--instrument", "one_run", "--json")
    assert done.code == 0, done.err
    (finding,) = done.json()["findings"]
    assert finding["claim_status"] == "proved"
    assert finding["claim"].startswith("with secret seeds: proved ε = ")
    assert finding["statement"].endswith("is proved for this training with secret seeds")
    assert stobatch.load(run).guarantee.status is Status.VOID
    assert cli("evaluate", run, "--json").json()["guarantee"]["status"] == "void"


def test_a_refutation_outweighs_void(cli, tmp_path) -> None:
    run = tmp_path / "run"
    steps = ["--set", "training.steps=2", "--set", "data.test_limit=20", "--seed", 5]
    assert cli("train", "--recipe", "audit.published", *steps, "--out", run, "--json").code == 0
    assert stobatch.load(run).guarantee.secret_seed_status is Status.CLAIMED
    assert cli("audit", run, "--instrument", "release", "--set", "audit.release_trials=200", "--json").code == 1
    guarantee = stobatch.load(run).guarantee
    assert (guarantee.status, guarantee.secret_seed_status) == (Status.REFUTED, None)


def test_certificates_of_a_seeded_run_are_proved_all_the_same(cli, public, tmp_path) -> None:
    """They are about the trained network, whatever its noise was."""
    summary = cli("certify", public, "--limit", 5, "--json").json()
    assert {kind["status"] for kind in summary["kinds"]} == {"proved"}
    assert "void" not in json.dumps(summary)


def test_a_federation_with_public_seeds_is_void_for_every_party(cli, tmp_path) -> None:
    out = tmp_path / "run"
    changes = {"method.parties": ["north:600:60", "east:400:40"], "method.delta": 1e-4, "training.steps": 2}
    done = cli("federate", "--out", out, *as_arguments(changes), "--seed", 5)
    assert done.code == 0, done.err
    assert "every ε is void: public seed" in words(done.out)
    assert stobatch.load(out).guarantee.status is Status.VOID
    for party in sorted((tmp_path / "run.parties").iterdir()):
        said = Run(party).read("participation")["guarantee"]
        assert (said["status"], said["status_with_secret_seeds"]) == ("void", "proved")
        assert Run(party).read("plan")["guarantee"]["status"] == "void"
    # As an older version wrote it.
    document = Run(out).read("federation")
    old = {key: value for key, value in document["guarantee"].items() if not key.startswith(("void", "status"))}
    old |= {"status": "proved", "proved_epsilon": 1.0, "proved_delta": 1e-5}
    Run(out).write("federation", {**document, "guarantee": old})
    assert cli("parties", out, "--json").json()["guarantee"]["status"] == "void"
