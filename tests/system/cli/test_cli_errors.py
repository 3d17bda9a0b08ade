"""What a user can get wrong: one line that says what to do, exit code 2, and nothing written."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

WRONG = {
    "unknown recipe": (["--recipe", "dmeo"], ["no recipe 'dmeo'", "Nearest: demo"]),
    "unknown key": (["--set", "training.stepps=3"], ["no setting 'stepps'", "Nearest: steps"]),
    "unknown section": (["--set", "trainin.steps=3"], ["no setting 'trainin'", "training"]),
    "section as key": (["--set", "training=3"], ["'training' is a section", "training.steps"]),
    "key below a value": (["--set", "seed.low=3"], ["no setting 'seed.low'"]),
    "not an assignment": (["--set", "training.steps"], ["'training.steps' is not a setting", "--set key=value"]),
    "wrong type": (["--set", "training.steps=many"], ["steps='many'", "type int"]),
    "out of range": (["--set", "training.learning_rate=0"], ["learning_rate=0", "above 0"]),
    "no such choice": (["--set", "training.optimiser=adma"], ["optimiser=adma", "adam, sgd", "Did you mean adam?"]),
    "negative seed": (["--seed", "-1"], ["seed=-1", "at least 0"]),
    "impossible budget": (["--set", "method.total_epsilon=0.05"], ["leaves -0.05", "above 0.1", "label_epsilon"]),
    "budget at its edge": (["--set", "method.total_epsilon=0.1"], ["leaves 0 for the encoder"]),
    "uneven ensemble": (["--set", "method.batch_size=2500"], ["not a multiple of the 3 attacks", "Use 2499 or 2502."]),
    "uneven pair": (
        ["--set", 'method.attack_ensemble=["ifgsm", "mim"]', "--set", "method.batch_size=31"],
        ["not a multiple of the 2 attacks", "Use 30 or 32."],
    ),
    "less than an ensemble": (["--set", "method.batch_size=2"], ["Use 3."]),
    "batch larger than data": (["--set", "method.batch_size=123"], ["0 whole batches", "method.batch_size"]),
    "only one batch": (["--set", "method.batch_size=63"], ["1 whole batches", "half of the training examples"]),
    "one batch in turn": (
        ["--set", "method.batch_size=63", "--set", "method.schedule=iterative"],
        ["1 whole batches", "half of the training examples"],
    ),
    "too many trainers": (["--set", "method.trainers_per_step=3"], ["more than the 2 trainers", "trainers_per_step"]),
    "data from Python": (["--set", "data.name=tensors"], ["handed over in Python", "from_tensors"]),
    "network from Python": (["--set", "model.architecture=custom"], ["handed over in Python", "from_layers"]),
    "recipe and file": (["--recipe", "paper.demo", "--config", "x.toml"], ["both --recipe and --config"]),
    "no such file": (["--config", "none.toml"], ["cannot read none.toml", "No such file"]),
    "half a character": (["--config", "\ud800.toml"], ["'\\ud800.toml' cannot be written", "system's encoding"]),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("verb", ["plan", "train"])
def test_a_wrong_call_is_refused_in_one_line_and_leaves_nothing(cli, tiny, tmp_path, monkeypatch, verb, name):
    monkeypatch.chdir(tmp_path)
    arguments, said = WRONG[name]
    given = arguments if "--config" in arguments else [*tiny, *arguments]
    message = cli(verb, "--out", tmp_path / "sub" / "out", "--json", *given).refusal()
    for part in said:
        assert part in message
    assert not list(tmp_path.iterdir())


def test_resuming_what_was_never_begun_says_so(cli, tmp_path):
    message = cli("train", "--resume", "--out", tmp_path / "r").refusal()
    assert message.startswith(f"{tmp_path / 'r'} is not a run, so there is nothing to resume.")
    assert not (tmp_path / "r").exists()


TRAIN_ONLY = [
    pytest.param(
        ["--set", "model.normalisation=batch"],
        ["head.norm", "BatchNorm2d", "each output depends on the whole batch", "reference or group"],
        id="batch normalisation",
    ),
    pytest.param(["--device", "quantum"], ["device 'quantum' cannot be used", "--device cpu"], id="no such device"),
    pytest.param(["--device", "cpu:x"], ["device 'cpu:x' cannot be used", "--device cpu"], id="no such number"),
    pytest.param(["--device", "cuda:99"], ["device 'cuda:99' cannot be used", "--device cpu"], id="absent device"),
    pytest.param(
        ["--device", "meta"],
        ["device 'meta' cannot be used"],
        id="a device without numbers",
    ),
]


@pytest.mark.parametrize(("arguments", "said"), TRAIN_ONLY)
def test_training_is_refused_before_anything_is_written(cli, tiny, tmp_path, arguments, said):
    message = cli("train", "--out", tmp_path / "out", "--json", *tiny, *arguments).refusal()
    for part in said:
        assert part in message
    assert not list(tmp_path.iterdir())


def test_demo_refuses_the_same_way(cli, tiny, tmp_path):
    message = cli("demo", "--out", tmp_path / "out", "--json", *tiny, "--set", "method.batch_size=31").refusal()
    assert "Use 30 or 33." in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("key", ["method.attack_ensemble", "evaluation.attacks"])
def test_an_empty_list_of_attacks_is_refused(cli, tiny, tmp_path, key):
    assert key.partition(".")[2] in cli("demo", "--out", tmp_path / "out", *tiny, "--set", f"{key}=[]").refusal()


BROKEN_FILES = {
    "toml": ("mine.toml", "steps = = 3", "is not valid"),
    "json": ("mine.json", "{", "is not valid"),
    "unknown method": ("mine.toml", '[method]\nname = "stobatsh"', "method.name=published"),
    "unknown key in a file": (
        "mine.toml",
        '[method]\nname = "published"\n[training]\nstesp = 3',
        "Nearest: steps",
    ),
}


@pytest.mark.parametrize("name", BROKEN_FILES)
def test_a_broken_configuration_file_is_refused(cli, tmp_path, name):
    file, content, said = BROKEN_FILES[name]
    (tmp_path / file).write_text(content)
    assert said in cli("plan", "--config", tmp_path / file).refusal()


def test_a_configuration_without_a_method_is_refused(cli, tmp_path):
    (tmp_path / "mine.toml").write_text("seed = 1\n")
    assert "method" in cli("plan", "--config", tmp_path / "mine.toml").refusal()


def test_a_configuration_that_is_no_table_is_refused(cli, tmp_path):
    (tmp_path / "mine.json").write_text("[1]")
    cli("plan", "--config", tmp_path / "mine.json").refusal()


def test_an_item_that_does_not_exist_lists_its_nearest_names(cli):
    message = cli("where", "Theorem 55").refusal()
    assert "'Theorem 55' is not a numbered item" in message
    assert "Nearest: Theorem 5" in message
    assert "stobatch where" in cli("where", "nonsense").refusal()


@pytest.mark.parametrize("verb", ["certify", "evaluate"])
def test_a_directory_that_is_no_trained_run_is_refused(cli, tmp_path, finished_run, verb):
    assert "stobatch train" in cli(verb, tmp_path / "nowhere").refusal()
    assert not (tmp_path / "nowhere").exists()
    half = tmp_path / "half"
    shutil.copytree(finished_run, half)
    (half / "model.safetensors").unlink()
    message = cli(verb, half).refusal()
    assert "not trained to the end" in message
    assert f"stobatch train --out {half} --resume" in message


@pytest.mark.parametrize("verb", ["certify", "evaluate"])
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--limit", "0"], "limit=0 is not allowed"),
        (["--set", "certification.noise_draws=0"], "noise_draws=0 is not allowed"),
        (["--set", "evaluation.radii=[3]"], "radii=3.0 is not allowed"),
        (["--device", "quantum"], "device 'quantum'"),
    ],
)
def test_wrong_settings_of_later_verbs_change_no_file(cli, finished_run, verb, arguments, said):
    before = {file: file.read_bytes() for file in finished_run.rglob("*") if file.is_file()}
    assert said in cli(verb, finished_run, *arguments).refusal()
    assert before == {file: file.read_bytes() for file in finished_run.rglob("*") if file.is_file()}


@pytest.mark.parametrize("verb", ["certify", "evaluate"])
def test_a_trained_model_cannot_be_given_other_training_settings(cli, tmp_path, finished_run, verb):
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    cli(verb, run, "--json", "--set", "method.total_epsilon=0.2").refusal()


def test_a_folder_with_something_else_in_it_is_refused(cli, tiny, tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    message = cli("train", "--out", tmp_path, *tiny).refusal()
    assert "is not a run" in message
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]
    message = cli("train", "--out", tmp_path / "thesis.tex", *tiny).refusal()
    assert "is not a run" in message
    message = cli("train", "--out", tmp_path / "thesis.tex" / "run", *tiny).refusal()
    assert "cannot write" in message
    assert (tmp_path / "thesis.tex").read_text() == "precious"


@pytest.mark.slow
def test_the_installed_program_and_the_module_are_the_command_line(tmp_path):
    """The real processes: nothing of the test's own process can hide a traceback, or an exit code."""
    program, module = [str(Path(sys.executable).with_name("stobatch"))], [sys.executable, "-m", "stobatch"]
    done = subprocess.run(
        [*module, "train", "--recipe", "paper.demo", "--out", f"{tmp_path}/x", "--set", "method.batch_size=2500"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "stobatch: batch_size=2500 is not a multiple of the 3 attacks. Algorithm 1 gives each attack an equal "
        "share. Use 2499 or 2502.\n"
    )
    assert not (tmp_path / "x").exists()
    done = subprocess.run([*program, "where", "Theorem 5", "--json"], capture_output=True, text=True, check=True)
    assert "Theorem 5" in json.dumps(json.loads(done.stdout))
    assert done.stderr == ""


def test_the_command_line_waits_for_pytorch_only_where_it_is_needed():
    """In a process of its own; a configuration that is read first of all finds its method nevertheless."""
    program = (
        "import sys, stobatch.cli; from stobatch import Radius, StobatchError; assert 'torch' not in sys.modules\n"
        "from stobatch.config import MethodConfig; print(type(MethodConfig.from_dict({'name': 'federated'})).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "FederatedConfig\n"


def test_without_arguments_the_verbs_are_listed(cli):
    result = cli()
    assert result.code in (0, 2)
    for verb in ("plan", "train", "certify", "evaluate", "where", "demo"):
        assert verb in result.out + result.err
        assert cli(verb, "--help").code == 0


@pytest.mark.parametrize("as_json", [[], ["--json"]], ids=["text", "json"])
def test_a_full_standard_output_is_one_line(monkeypatch, capfd, as_json):
    from stobatch.cli.app import main

    monkeypatch.setattr(sys, "argv", ["stobatch", "plan", "--recipe", "demo", *as_json])
    with Path("/dev/full").open("w", buffering=1) as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as left:
            main()
    assert left.value.code == 2
    assert "No space left on device" in capfd.readouterr().err


def test_certificates_are_not_read_in_another_norm(cli, finished_run):
    """The published mechanism certifies in l-infinity; a radius in l2 must not be compared with that."""
    message = cli("certify", finished_run, "--norm", "l2", "--radius", "1.0").refusal()
    assert "certifies in linf, radii in l2 are asked about" in message
