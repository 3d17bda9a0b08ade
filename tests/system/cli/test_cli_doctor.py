"""`stobatch doctor`: the whole of it here, its exit codes, its document, and nothing private in either."""

from __future__ import annotations

import getpass
import socket
from pathlib import Path

import pytest

from stobatch.doctor import Health, checks, examinations

QUICK = ["packages", "disk", "accountant", "data folder"]
CHEAP = [part for name in QUICK for part in ("--only", name)]


def private(tmp_path: Path) -> list[str]:
    """What must not be printed: folders, and names of people and machines where they are not everyday words."""
    names = [name for name in (getpass.getuser(), socket.gethostname()) if len(name) > 6]
    return [str(tmp_path), tmp_path.name, str(Path.home()) + "/", str(Path.cwd()), *names]


@pytest.mark.slow
def test_this_machine_can_train(cli, tmp_path, monkeypatch):
    monkeypatch.delenv("STOBATCH_DATA", raising=False)
    result = cli("doctor", "--out", tmp_path / "runs", "--json")
    document = result.json()
    assert result.code == 0, [check for check in document["checks"] if check["status"] == "broken"]
    assert document["ready"] is document["complete"] is True
    assert [check["name"] for check in document["checks"]] == [one.name for one in examinations(tmp_path)]
    assert result.err == ""
    assert not list(tmp_path.iterdir())
    assert not [word for word in private(tmp_path) if word in result.out]


def test_the_document(cli, tmp_path):
    document = cli("doctor", "--out", tmp_path, "--json", *CHEAP).json()
    assert set(document) == {"complete", "ready", "seconds", "checks"}
    assert document["complete"] is False
    assert [check["name"] for check in document["checks"]] == QUICK
    for check in document["checks"]:
        assert {key: type(value) for key, value in check.items()} == {
            "name": str, "status": str, "said": str, "remedy": str, "seconds": float, "needed": bool
        }  # fmt: skip
        assert check["status"] in set(Health)
    assert document["seconds"] == pytest.approx(sum(check["seconds"] for check in document["checks"]), abs=1e-2)


def test_the_table(cli, tmp_path):
    result = cli("doctor", "--out", tmp_path, *CHEAP)
    assert result.code == 0
    for said in (*QUICK, "tried and measured", "overcounted by", "What was checked works."):
        assert said in result.out
    assert "doctor" in result.err  # the bar


def test_what_training_needs_is_broken(cli, tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    call = ("doctor", "--out", tmp_path / "thesis.tex" / "runs", "--only", "disk", "--only", "accountant")
    text, document = cli(*call), cli(*call, "--json")
    assert text.code == document.code == 2
    disk, accountant = document.json()["checks"]
    assert (disk["status"], accountant["status"]) == ("broken", "ok")
    assert document.json()["ready"] is False
    assert disk["remedy"].startswith("Free some space")
    assert disk["remedy"] in text.out
    assert "Training needs what is broken: disk." in text.out
    for result in (text, document):
        assert not [word for word in private(tmp_path) if word in result.out]


def test_a_wrong_data_folder_is_broken_and_not_named(cli, tmp_path, monkeypatch):
    monkeypatch.setenv("STOBATCH_DATA", str(tmp_path / "patients"))
    result = cli("doctor", "--only", "data folder", "--json")
    assert result.code == 2
    assert "patients" not in result.out
    assert "STOBATCH_DATA" in result.json()["checks"][0]["remedy"]


def test_more_threads_than_cores_do_not_stop_training(cli, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "100000")
    result = cli("doctor", "--only", "cores", "--json")
    assert result.code == 0
    assert result.json()["checks"][0]["status"] == "warning"


def test_an_extra_that_is_missing_does_not_stop_training(cli, monkeypatch):
    monkeypatch.setitem(checks.EXTRAS, "flwr", ("no_such_module", "pip install flwr"))
    result = cli("doctor", "--only", "extra flwr")
    assert result.code == 0
    assert "extra flwr: pip install flwr" in result.out


def test_an_unknown_check_is_refused(cli):
    message = cli("doctor", "--only", "glue", "--json").refusal()
    assert "there is no check 'glue'" in message
    assert "gloo" in message
