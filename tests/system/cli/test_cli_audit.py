"""`stobatch audit` from beginning to end: what it finds, what it keeps, what it refuses, and what later verbs say."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
from support.tiny import as_arguments

import stobatch
from stobatch import RunConfig
from stobatch.types import Status
from stobatch_recipes import recipe

pytestmark = pytest.mark.usefixtures("try_each_network_once")

RELEASES = ["--recipe", "audit.published", "--instrument", "release", "--set", "audit.release_trials=200"]
SHORT = {"audit.models_at_once": 16, "training.steps": 2}
STRICT = ["--recipe", "audit.sound_strict", "--trainings", "40", *as_arguments(SHORT)]
"""ε = 0.2 can be refuted by 30 trainings, were the attacker never wrong."""
QUICK = {
    "data.test_limit": 20,
    "training.steps": 6,
    "training.monitor_every": 6,
    "evaluation.radii": [0.1],
    "evaluation.protocols": ["adaptive"],
    "evaluation.functions": ["single_pass"],
    "evaluation.adaptive_attacks": ["fgsm"],
    "evaluation.num_images": 0,
    "machine.threads": 1,
}


def files(run: Path) -> dict[str, bytes]:
    return {str(file.relative_to(run)): file.read_bytes() for file in run.rglob("*") if file.is_file()}


# Verdicts.


def test_a_refuted_claim_ends_with_one(cli, tmp_path):
    done = cli("audit", tmp_path / "run", *RELEASES, "--seed", "1", "--json")
    assert done.code == 1, done.err
    document = done.json()
    assert document["verdict"] == "refuted"
    assert [finding["details"]["release"] for finding in document["findings"]] == [
        *("perturbed inputs", "label coefficients", "a step on θ1")
    ]
    for finding in document["findings"]:
        assert finding["verdict"] == "refuted"
        assert finding["details"]["right"] == 200
        assert finding["evidence"] == "evidence/release.json"
    assert done.err == ""


def test_a_claim_that_survives_ends_with_zero_and_is_not_called_proved_by_it(cli, tmp_path):
    run = tmp_path / "run"
    done = cli("audit", run, *STRICT, "--seed", "1", "--json")
    assert done.code == 0, done.err
    assert done.json()["verdict"] == "consistent"
    said = cli("audit", run, *STRICT, "--seed", "1", "--resume")
    assert said.code == 0, said.err
    assert "CONSISTENT" in said.out
    assert "That proves nothing" in said.out
    assert "REFUTED" not in said.out


def test_a_refutation_is_printed_with_all_that_it_rests_on(cli, tmp_path):
    done = cli("audit", "--out", tmp_path / "run", *RELEASES)
    assert done.code == 1
    words = " ".join(done.out.replace("│", " ").split())
    for part in (
        "REFUTED",
        "200 of 200 told apart",
        "where 0.2 is claimed",
        "claim: claimed ε = 0.2",
        "attacker: the attacker sees perturbed inputs of one batch",
        "the difference of two perturbed inputs, in which the noise cancels",
        "false-alarm rate: at most 0.0167; evidence: evidence/release.json",
        "3 of 3 findings refute a claim.",
    ):
        assert part in words, part


def test_what_is_printed_as_json_is_what_is_kept(cli, tmp_path):
    run = tmp_path / "run"
    document = cli("audit", run, *STRICT, "--seed", "1", "--json").json()
    kept = json.loads((run / "audit.json").read_text())
    assert {key: value for key, value in kept.items() if key not in ("schema", "version")} == document
    evidence = json.loads((run / "evidence" / "many_runs.json").read_text())
    assert evidence["findings"] == document["findings"]
    assert evidence["settings"]["trainings"] == 40
    assert evidence["seed"] == 1
    (finding,) = document["findings"]
    assert finding["details"]["trainings"] == 40
    # No training's own score leaves the private folder.
    assert "score" not in (run / "evidence" / "many_runs.json").read_text()


def test_instruments_add_up_and_replace_what_they_found_before(cli, tmp_path):
    run = tmp_path / "run"
    many = ["--instrument", "many_runs", "--trainings", "32", "--set", "training.steps=2"]
    base = ["--recipe", "audit.published", "--set", "training.steps=2"]
    first = cli("audit", run, *base, "--instrument", "release", "--set", "audit.release_trials=100", "--json").json()
    assert {finding["instrument"] for finding in first["findings"]} == {"release"}
    both = cli("audit", run, *base, *many, "--resume", "--json")
    assert both.code == 1, "what was refuted before stays refuted"
    found = [finding["instrument"] for finding in both.json()["findings"]]
    assert found == ["release", "release", "release", "many_runs"]
    again = cli("audit", run, "--instrument", "release", "--set", "audit.release_trials=60", "--json").json()
    assert sorted(finding["instrument"] for finding in again["findings"]) == ["many_runs", *["release"] * 3]
    assert {f["details"]["trials"] for f in again["findings"] if f["instrument"] == "release"} == {60}


def test_certificates_of_nothing_are_not_tested(cli, tmp_path):
    """A radius that no bound reaches: certified nowhere, so no attack can break anything."""
    run = tmp_path / "run"
    stobatch.train(recipe("audit.sound").override_all(QUICK), run, quiet=True)
    assert cli("certify", run, "--set", "evaluation.radii=[1.9]", "--json").code == 0
    done = cli("audit", run, "--instrument", "certificates", "--json")
    assert done.code == 3, done.err
    document = done.json()
    assert document["verdict"] == "not tested"
    assert [finding["verdict"] for finding in document["findings"]] == ["not tested"]
    assert [(claim["about"], claim["verdict"]) for claim in document["claims"]] == [
        ("privacy", "not tested"),
        (document["findings"][0]["about"], "not tested"),
    ]
    words = " ".join(cli("audit", run, "--instrument", "certificates").out.split())
    assert "NOT TESTED: no claim of this run was tested." in words
    assert "not tested: privacy (no instrument was used on it)" in words
    assert "(no input has a certified ball)" in words
    assert "CONSISTENT" not in words
    # Once something is tested, the rest is still named.
    many = ["--instrument", "many_runs", "--trainings", "32", "--set", "audit.models_at_once=16"]
    partly = cli("audit", run, *many, "--json")
    assert partly.code == 0, partly.err
    assert partly.json()["verdict"] == "partly tested"
    assert [claim["verdict"] for claim in partly.json()["claims"]] == ["consistent", "not tested"]


# Interrupted.


def parts(run: Path) -> dict[str, int]:
    return {file.name: file.stat().st_mtime_ns for file in run.glob("private/records/audit-*/rows-*.parquet")}


def test_an_interrupted_audit_keeps_its_parts_and_ends_the_same(cli, tmp_path, monkeypatch):
    from stobatch.auditing import many_runs

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    expected = cli("audit", whole, *STRICT, "--seed", "1", "--json").json()
    asked: list[int] = []
    real = many_runs.Trials.rows

    stops = [32]  # in the last part

    def rows(self, start, count, tick):
        asked.append(start)
        if start in stops:
            signal.raise_signal(signal.SIGTERM)
        return real(self, start, count, tick)

    monkeypatch.setattr(many_runs.Trials, "rows", rows)
    stopped = cli("audit", cut, *STRICT, "--seed", "1", "--json")
    stops.clear()
    assert stopped.code == 130
    assert stopped.out == ""
    assert "--resume" in stopped.err
    assert not (cut / "audit.json").exists()
    kept = parts(cut)
    assert sorted(kept) == ["rows-00000000.parquet", "rows-00000016.parquet"]
    asked.clear()
    resumed = cli("audit", cut, "--resume", "--seed", "1", "--json")
    assert resumed.code == 0, resumed.err
    assert asked == [32], "a part that was there was made again"
    assert {name: written for name, written in parts(cut).items() if name in kept} == kept
    assert resumed.json() == expected
    assert files(cut)["audit.json"] == files(whole)["audit.json"]


def test_a_part_of_other_settings_is_not_taken_over(cli, tmp_path):
    run = tmp_path / "run"
    cli("audit", run, *STRICT, "--seed", "1", "--json")
    before = parts(run)
    other = cli("audit", run, *STRICT, "--seed", "2", "--resume", "--json")
    assert other.code in (0, 1)
    assert len(list((run / "private" / "records").iterdir())) == 2
    assert all(parts(run)[name] >= written for name, written in before.items())


def test_what_an_audit_measured_is_for_the_owner(cli, tmp_path):
    run = tmp_path / "run"
    cli("audit", run, *STRICT, "--seed", "5", "--json")
    private = run / "private"
    assert (private / "seeds.json").exists(), "the draws of an audit may be public, the seeds of the run are not"
    for path in (private, *private.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path


# Refusals.

RECIPES: dict[str, tuple[list[str], list[str]]] = {
    "too few trainings": (
        ["--recipe", "audit.published", "--instrument", "many_runs", "--trainings", "20"],
        ["10 trials per side can never show an epsilon above", "Use at least 26 trials, 13 per side,"],
    ),
    "too few for any claim": (
        ["--recipe", "audit.sound", "--trainings", "4"],
        ["2 trials per side can never show an epsilon above 0", "Use at least 26 trials, 13 per side,"],
    ),
    "too few releases": (
        [*RELEASES[:4], "--set", "audit.release_trials=10"],
        ["5 trials per side can never show", "Use at least 34 trials, 17 per side, to be able to refute epsilon=0.2"],
    ),
    "other neighbours": (
        ["--recipe", "audit.sound", "--set", "audit.neighbours=replace-one"],
        ["the claim is about add-or-remove-one neighbours, you ask about replace-one", "Leave audit.neighbours unset"],
    ),
    "other neighbours of the published mechanism": (
        [*RELEASES, "--set", "audit.neighbours=add-or-remove-one"],
        ["the claim is about replace-one neighbours, you ask about add-or-remove-one"],
    ),
    "a gradient canary in the trained model": (
        ["--recipe", "audit.sound", "--set", "audit.view=final"],
        ["a gradient canary pulls there and back", "audit.view=steps, or audit.canary=input"],
    ),
    "steps that no proof speaks about": (
        ["--recipe", "audit.published", "--instrument", "many_runs", "--set", "audit.view=steps"],
        ["proof says nothing about single steps", "audit.view=final"],
    ),
    "unknown instrument": (
        ["--recipe", "audit.sound", "--instrument", "many_run"],
        ["instruments=many_run is not allowed", "Did you mean many_runs?"],
    ),
    "unknown recipe": (["--recipe", "audit.sonud"], ["no recipe 'audit.sonud'", "audit.sound"]),
    "unknown setting": (["--recipe", "audit.sound", "--set", "audit.traniings=9"], ["Nearest: trainings"]),
    "too sure": (["--recipe", "audit.sound", "--confidence", "1"], ["confidence=1", "below 1"]),
    "releases of a method without any": (
        ["--recipe", "audit.sound", "--instrument", "release"],
        ["names no release of its own", "audit.instruments=many_runs"],
    ),
    "one run that was never trained": (
        ["--recipe", "audit.sound", "--instrument", "one_run"],
        ["is not trained", "audit.instruments=many_runs"],
    ),
    "certificates that were never trained": (
        ["--recipe", "audit.sound", "--instrument", "certificates"],
        ["is not trained"],
    ),
    "no run and no recipe": ([], ["is not a run", "--recipe audit.published"]),
    "no such device": (["--recipe", "audit.sound", "--device", "quantum"], ["device 'quantum' cannot be used"]),
}


@pytest.mark.parametrize(("given", "said"), RECIPES.values(), ids=RECIPES)
def test_a_wrong_call_is_refused_in_one_line_and_leaves_nothing(cli, tmp_path, given, said):
    message = cli("audit", tmp_path / "sub" / "run", "--json", *given).refusal()
    for part in said:
        assert part in message
    assert not list(tmp_path.iterdir())


def test_two_run_directories_are_one_too_many(cli, tmp_path):
    assert "no run directory, or two" in cli("audit", tmp_path / "a", "--out", tmp_path / "b", *STRICT).refusal()


@pytest.fixture(scope="module")
def sound_run(tmp_path_factory) -> Path:
    """Trained without canaries, not certified. Read only."""
    out = tmp_path_factory.mktemp("sound") / "run"
    stobatch.train(recipe("audit.sound").override_all(QUICK), out, quiet=True)
    return out


@pytest.fixture(scope="module")
def vanilla_run(tmp_path_factory) -> Path:
    """Trained by a method that promises nothing. Read only."""
    out = tmp_path_factory.mktemp("vanilla") / "run"
    changes = {key: value for key, value in QUICK.items() if not key.startswith("evaluation")}
    method = {"name": "vanilla_adversarial", "batch_size": 9, "train_attack_steps": 1}
    document = recipe("audit.published").override_all(changes).to_dict()
    stobatch.train(RunConfig.from_dict({**document, "method": method}), out, quiet=True)
    return out


OF_A_RUN: dict[str, tuple[list[str], list[str]]] = {
    "no canaries": (["--instrument", "one_run"], ["was trained without canaries", "--set canaries.num=1000"]),
    "not certified": (["--instrument", "certificates"], ["is not certified", "stobatch certify"]),
    "nothing that fits": (
        ["--set", "audit.instruments=null"],
        ["nothing that can be audited", "audit.instruments=many_runs"],
    ),
    "too few trainings": (["--trainings", "10"], ["Use at least 26 trials, 13 per side,"]),
    "other neighbours": (["--set", "audit.neighbours=replace-one"], ["you ask about replace-one"]),
    "the run's own settings": (["--set", "method.epsilon=9"], ["'method.epsilon' belongs to the training of this run"]),
    "canaries afterwards": (["--set", "canaries.num=300"], ["'canaries.num' belongs to the training of this run"]),
}


@pytest.mark.parametrize(("given", "said"), OF_A_RUN.values(), ids=OF_A_RUN)
def test_a_wrong_call_changes_nothing_in_a_run(cli, sound_run, given, said):
    before = files(sound_run)
    message = cli("audit", sound_run, "--json", *given).refusal()
    for part in said:
        assert part in message
    assert files(sound_run) == before


@pytest.mark.parametrize("instrument", ["many_runs", "one_run"])
def test_a_method_that_claims_nothing_cannot_be_refuted(cli, vanilla_run, instrument):
    before = files(vanilla_run)
    message = cli("audit", vanilla_run, "--instrument", instrument, "--json").refusal()
    assert "claims no privacy" in message
    assert "membership" in message
    assert files(vanilla_run) == before


def test_a_recipe_is_not_audited_into_another_run(cli, sound_run):
    before = files(sound_run)
    assert "was started with other settings" in cli("audit", sound_run, *STRICT, "--resume").refusal()
    assert files(sound_run) == before


def test_too_few_canaries_for_the_claim_are_named(cli, tmp_path):
    run = tmp_path / "run"
    changes = {**QUICK, "canaries.num": 4}
    assert cli("train", "--recipe", "audit.sound", "--out", run, "--json", *as_arguments(changes)).code == 0
    before = files(run)
    message = cli("audit", run, "--instrument", "one_run", "--json").refusal()
    assert "4 canaries can never show an epsilon above" in message
    assert "Use at least" in message
    assert files(run) == before


@pytest.mark.parametrize("kind", ["gradient", "input"])
def test_canaries_are_audited_where_their_secrets_are(cli, tmp_path, kind):
    """Of input canaries a copy without private/ would draw others, and find nothing."""
    run, copy = tmp_path / "run", tmp_path / "copy"
    changes = {**QUICK, "canaries.num": 300, "canaries.kind": kind}
    assert cli("train", "--recipe", "audit.sound", "--out", run, "--json", *as_arguments(changes)).code == 0
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("private"))
    message = cli("audit", copy, "--instrument", "one_run", "--json").refusal()
    assert "a secret of its owner, who does not publish private/" in message
    assert "Audit where the owner keeps the run" in message
    assert "Train first" not in message


# Afterwards.


def said_by(cli, run: Path) -> dict[str, str]:
    """What later verbs print for people, as one line of words."""
    printed = {"train": cli("train", "--out", run, "--resume"), "evaluate": cli("evaluate", run, "--resume")}
    assert all(result.code == 0 for result in printed.values()), printed
    return {verb: " ".join(result.out.replace("│", " ").split()) for verb, result in printed.items()}


def trained(cli, run: Path, name: str, canaries: int) -> None:
    changes = {**QUICK, "training.steps": 12, "canaries.num": canaries}
    done = cli("train", "--recipe", f"audit.{name}", "--out", run, "--json", *as_arguments(changes))
    assert done.code == 0, done.err


def test_a_guarantee_that_was_refuted_says_so_from_then_on(cli, tmp_path):
    run = tmp_path / "run"
    trained(cli, run, "shared_noise", 300)
    assert stobatch.load(run).guarantee.status is Status.CLAIMED
    assert all("REFUTED" not in words for words in said_by(cli, run).values())
    audit = cli("audit", run, "--instrument", "one_run", "--json")
    assert audit.code == 1, audit.err
    (finding,) = audit.json()["findings"]
    guarantee = stobatch.load(run).guarantee
    assert guarantee.status is Status.REFUTED
    assert str(guarantee).startswith("REFUTED ε = ")
    assert guarantee.audits == (f"refuted: {finding['statement']} (evidence/one_run.json)",)
    for verb, words in said_by(cli, run).items():
        assert "REFUTED" in words, verb
        assert "300 gradient canaries in the training itself" in words, verb
    for verb in (["train", "--out", run, "--resume"], ["evaluate", run, "--resume"]):
        said = cli(*verb, "--json").json()["guarantee"]
        assert said["status"] == "refuted"
        assert not [key for key in said if key.startswith(("claimed", "proved"))]
        assert said["refuted_epsilon"] == guarantee.epsilon
    # The claim that an audit holds itself against is still the method's own.
    assert stobatch.load(run).claim.status is Status.CLAIMED
    assert cli("audit", run, "--instrument", "one_run", "--json").json()["findings"] == [finding]


def test_a_guarantee_that_survived_is_what_it_was(cli, tmp_path):
    run = tmp_path / "run"
    trained(cli, run, "sound", 300)
    before = stobatch.load(run).guarantee
    audit = cli("audit", run, "--instrument", "one_run", "--json")
    assert audit.code == 0, audit.err
    after = stobatch.load(run).guarantee
    assert after.status is before.status is Status.PROVED
    assert (after.epsilon, after.delta, str(after)) == (before.epsilon, before.delta, str(before))
    (line,) = after.audits
    assert line.startswith("consistent: 300 gradient canaries")
    for verb, words in said_by(cli, run).items():
        assert f"proved: ε = {before.epsilon:g}, δ = 1e-05" in words, verb
        assert "1 audit: `stobatch guarantee" in words, verb
        assert "REFUTED" not in words, verb
    assert "audit, consistent: 300 gradient canaries" in " ".join(cli("guarantee", run).out.replace("│", " ").split())


def test_the_published_claim_is_refuted_for_a_trained_run_too(cli, tmp_path):
    run = tmp_path / "run"
    assert cli("train", "--recipe", "audit.published", "--out", run, "--json", *as_arguments(QUICK)).code == 0
    assert stobatch.load(run).guarantee.status is Status.CLAIMED
    done = cli("audit", run, "--instrument", "release", "--set", "audit.release_trials=200", "--json")
    assert done.code == 1, done.err
    assert stobatch.load(run).guarantee.status is Status.REFUTED
    for verb, words in said_by(cli, run).items():
        assert "REFUTED: ε = 0.2" in words, verb


def test_an_audit_before_the_training_counts_for_it(cli, tmp_path):
    """The claim is about the settings; what refuted them refutes the model that is trained with them."""
    run = tmp_path / "run"
    quick = as_arguments({**QUICK, "training.steps": 2})
    assert cli("audit", run, *RELEASES, *quick, "--json").code == 1
    assert cli("train", "--out", run, "--resume", "--json").code == 0
    assert stobatch.load(run).guarantee.status is Status.REFUTED
