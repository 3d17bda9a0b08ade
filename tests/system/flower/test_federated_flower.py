"""Through Flower the same bits come out, and nothing crosses but questions, noisy answers, counts and refusals."""

from __future__ import annotations

import json
import os
import re
import stat
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.small_federation import STEPS, opened, pictures, started, terms
from torch import Tensor

import stobatch
from stobatch.config import RunConfig
from stobatch.errors import DataError, SettingError
from stobatch.federated import Federation, FederationError, Party, federate
from stobatch.federated.loopback import quiet_environment, through_flower, write_app
from stobatch.training.ledger import Ledger

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
"""Before anything of Flower is imported."""

without_flower = pytest.mark.skipif(
    find_spec("flwr") is None,
    reason="flwr asks for typer<0.21, rich<15 and packaging<26, constraints.txt pins later ones: `make flower-check`",
)


def conversation(federation: Federation, directories: Mapping[str, Path]) -> Any:
    """The real server and client apps, by a grid that delivers within this process. Returns the grid."""
    from flwr.app import Context, RecordDict
    from local_grid import LocalGrid

    from stobatch.federated import flower

    grid = LocalGrid(flower.client_app(), directories.values())
    flower.server_app(lambda _: federation)(grid, Context(1, 0, {}, RecordDict(), {}))
    return grid


def assert_same_run(one: Path, other: Path) -> None:
    ours, theirs = (load_file(run / "model.safetensors") for run in (one, other))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    federations = [json.loads((run / "federation.json").read_text()) for run in (one, other)]
    assert federations[0] == federations[1]


@without_flower
def test_through_flower_the_run_has_the_same_bits(tmp_path: Path) -> None:
    federate(terms(), tmp_path / "here", dataset=pictures(), quiet=True)
    federation, directories = started(tmp_path / "flower")
    conversation(federation, directories)
    assert_same_run(tmp_path / "here", tmp_path / "flower")
    assert stobatch.load(tmp_path / "flower").guarantee == stobatch.load(tmp_path / "here").guarantee


@without_flower
def test_tensors_cross_to_the_bit() -> None:
    from stobatch.federated.flower import pack, unpack

    sent = {"a": torch.randn(3, 2, 2).to(memory_format=torch.contiguous_format), "b": torch.randn(2, 3).T.double()}
    sent["c"] = torch.tensor([0.0, -0.0, 1e-45, torch.inf])
    for name, value in unpack(pack(sent)).items():
        assert value.dtype == sent[name].dtype
        assert value.numpy().tobytes() == sent[name].contiguous().numpy().tobytes()


@without_flower
def test_only_questions_noisy_answers_and_counts_cross(tmp_path: Path) -> None:
    federation, directories = started(tmp_path / "run", terms(seed=None))
    grid = conversation(federation, directories)
    kinds = [tuple(sorted(message.content)) for message in grid.seen]
    assert set(kinds) == {(), ("statement",), ("parameters", "question"), ("answer", "count")}
    # Three statements, and 6 + 6 + 4 rounds.
    assert len(kinds) == 2 * (3 + 16)
    crossed = b"".join(repr(message.content).encode() + raw(message) for message in grid.seen)
    for party in opened(dict(directories)).values():
        assert str(party.root.root).encode() not in crossed
        assert party.run.read("data", private=True)["sha256"].encode() not in crossed
        assert not any(image.numpy().tobytes() in crossed for image in party.train.inputs)


def raw(message: Any) -> bytes:
    arrays = [record for record in message.content.values() if hasattr(record, "to_torch_state_dict")]
    return b"".join(array.numpy().tobytes() for record in arrays for array in record.values())


@without_flower
def test_a_party_whose_rounds_are_spent_is_left_out_and_another_refusal_ends_the_run(tmp_path: Path) -> None:
    federation, directories = started(tmp_path / "run")
    Ledger(STEPS - 1, 1).save(directories["north"])
    conversation(federation, directories)
    received = federation.run.read("federation")["answers_received"]
    assert received == {"north": 0, "east": 6, "south": 4}
    federation, directories = started(tmp_path / "second")
    _, others = started(tmp_path / "other", terms(**{"method.clip_norm": 1.0}))
    with pytest.raises(FederationError, match=r"east has clip_norm=1\.0, the terms say 0\.5"):
        conversation(federation, directories | {"east": others["east"]})
    with pytest.raises(FederationError, match="two parties call themselves north"):
        conversation(federation, directories | {"east": directories["north"]})


@without_flower
def test_a_refusal_says_why_and_a_failure_says_nothing_about_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation, directories = started(tmp_path / "run")

    def parameters(self: Federation) -> dict[str, Tensor]:
        return {"weight": torch.zeros(2)}

    with monkeypatch.context() as patched:
        patched.setattr(Federation, "parameters", parameters)
        with pytest.raises(FederationError, match=r"the parameters that \w+ was sent do not fit its network"):
            conversation(federation, directories)

    def careless(self: Party, step: int) -> None:
        raise DataError("example 17 has label 4.", remedy="Look at it.")

    monkeypatch.setattr(Party, "_compute", careless)
    with pytest.raises(FederationError, match="a party could not compute its answer") as error:
        conversation(federation, directories)
    assert "17" not in str(error.value)
    assert all(Ledger.of(path).accounted == 1 for name, path in directories.items() if name != "south")


@without_flower
def test_absent_parties_are_waited_for_and_then_named(tmp_path: Path) -> None:
    from local_grid import LocalGrid

    from stobatch.federated import flower

    federation, directories = started(tmp_path / "run")
    grid = LocalGrid(flower.client_app(), list(directories.values())[:2])
    with pytest.raises(FederationError, match=r"no word from south\. Start all parties"):
        federation.enrol(flower.FlowerTransport(grid, len(federation.parties), patience=0.1).statements())


def two_rounds() -> RunConfig:
    return terms(**{"method.parties": ["north:40:12", "east:30:8:1"], "training.steps": 2})


@pytest.mark.slow
@without_flower
def test_real_processes_on_loopback_give_the_same_bits(tmp_path: Path) -> None:
    """First with a party that has other settings, which is named and changes nothing; then with the right one."""
    federate(two_rounds(), tmp_path / "here", dataset=pictures(), quiet=True)
    federation, directories = started(tmp_path / "flower", two_rounds())
    _, others = started(tmp_path / "other", two_rounds().override("method.clip_norm", 1.0))
    with pytest.raises(
        FederationError, match=r"ended at step 0\. east has clip_norm=1\.0, the terms say 0\.5\. Weights"
    ):
        through_flower(federation, directories | {"east": others["east"]})
    through_flower(Federation.open(tmp_path / "flower"), directories)
    assert_same_run(tmp_path / "here", tmp_path / "flower")
    log = (tmp_path / "flower" / "flower.log").read_text()
    for party in opened(directories).values():
        assert str(party.root.root) not in log
        assert (party.run.path / "flower.log").exists()


def test_flowers_processes_are_told_to_talk_to_nobody(tmp_path: Path) -> None:
    environment = quiet_environment(tmp_path)
    assert environment["FLWR_TELEMETRY_ENABLED"] == "0"
    assert environment["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert environment["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    assert environment["FLWR_HOME"] == str(tmp_path)


def test_the_app_that_is_sent_to_parties_has_no_code_of_its_own(tmp_path: Path) -> None:
    app = write_app(tmp_path / "app")
    assert sorted(path.name for path in app.iterdir()) == ["pyproject.toml", "stobatch_federation.py"]
    assert (app / "stobatch_federation.py").read_text().startswith("from stobatch.federated.flower import")


@pytest.mark.skipif(find_spec("flwr") is not None, reason="about a machine without Flower")
def test_without_flower_the_way_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"Flower is not installed. Install it: pip install 'stobatch\[flower\]'"):
        federate(terms(), tmp_path / "run", dataset=pictures(), rounds=through_flower, quiet=True)


# Parties that are gone, and those that are not who they say.


class Gone:
    """What a grid does when nodes are killed: from some message on, they are silent or known to be away."""

    def __init__(self, grid: Any, nodes: set[int], after: int) -> None:
        self.grid, self.nodes, self.left = grid, nodes, after

    def get_node_ids(self) -> list[int]:
        return [node for node in self.grid.get_node_ids() if self.left > 0 or node not in self.nodes]

    def send_and_receive(self, messages: list[Any], *, timeout: float | None = None) -> list[Any]:
        self.left -= 1
        alive = [m for m in messages if self.left >= 0 or m.metadata.dst_node_id not in self.nodes]
        return list(self.grid.send_and_receive(alive, timeout=timeout))


@without_flower
def test_a_party_that_is_killed_midway_is_left_out_and_counted_as_if_it_had_answered(tmp_path: Path) -> None:
    from local_grid import LocalGrid

    from stobatch.federated import converse, flower

    federation, directories = started(tmp_path / "run")
    grid = Gone(LocalGrid(flower.client_app(), directories.values()), {101}, after=3)
    model = converse(federation, flower.FlowerTransport(grid, 3))  # type: ignore[arg-type]
    assert model.run.read("federation")["answers_received"] == {"north": 2, "east": 6, "south": 4}
    assert model.run.read("training")["rounds"] == {"north": 6, "east": 6, "south": 4}
    assert Ledger.of(directories["north"]).accounted == 2


@without_flower
def test_a_name_belongs_to_the_node_whose_key_was_registered(tmp_path: Path) -> None:
    from local_grid import LocalGrid

    from stobatch.federated import flower

    _, directories = started(tmp_path / "run")
    grid = LocalGrid(flower.client_app(), directories.values())
    right = dict(zip(directories, (101, 102, 103), strict=True))
    assert set(flower.FlowerTransport(grid, 3, registered=right).statements()) == set(directories)
    swapped = right | {"north": 102, "east": 101}
    with pytest.raises(FederationError, match=r"node \d+ calls itself (north|east), whose key is another node's"):
        flower.FlowerTransport(grid, 3, registered=swapped).statements()
    # A node without a registered key is not even asked.
    two = {name: right[name] for name in ("north", "east")}
    assert set(flower.FlowerTransport(grid, 2, registered=two).statements()) == {"north", "east"}


@without_flower
def test_a_malformed_message_is_one_party_less(tmp_path: Path) -> None:
    from flwr.app import ConfigRecord, RecordDict
    from local_grid import LocalGrid

    from stobatch.federated import flower

    federation, directories = started(tmp_path / "run")
    grid = LocalGrid(flower.client_app(), directories.values())
    post = flower.FlowerTransport(grid, 3)
    federation.enrol(post.statements())

    def mangled(messages: list[Any], *, timeout: float | None = None) -> list[Any]:
        replies = LocalGrid.send_and_receive(grid, messages)
        for reply in replies:
            if reply.metadata.src_node_id == 101:
                reply.content = RecordDict(
                    {"answer": ConfigRecord({"x": 1}), "count": ConfigRecord({"rounds": "many"})}
                )
        return replies

    grid.send_and_receive = mangled  # type: ignore[method-assign]
    said = post.answers(federation.asked(), federation)
    assert isinstance(said["north"], FederationError)
    federation.combine(said)
    assert (federation.step, federation.silent["north"]) == (1, 1)


@pytest.mark.slow
@without_flower
def test_the_server_takes_no_node_without_a_registered_key_and_no_node_takes_another_server(tmp_path: Path) -> None:
    from contextlib import ExitStack

    from stobatch.federated import loopback
    from stobatch.federated.loopback import make_certificates, make_party_key

    home, log = tmp_path / "home", tmp_path / "link.log"
    (home / "other").mkdir(parents=True)
    ours, theirs = make_certificates(home, loopback.HERE), make_certificates(home / "other", loopback.HERE)
    environment, port = quiet_environment(home), loopback._free_port()
    loopback.write_connection(home, f"{loopback.HERE}:{port}", ours.authority)
    known, stranger = tmp_path / "known.key", tmp_path / "stranger.key"
    with ExitStack() as running:
        running.enter_context(
            loopback._running(loopback.superlink_command(loopback.HERE, port, ours), log, environment)
        )
        loopback._wait_for(port, log)
        node = loopback.register(make_party_key(known), environment)
        make_party_key(stranger)
        for name, key, authority in (("good", known, ours), ("stranger", stranger, ours), ("fooled", known, theirs)):
            command = loopback.supernode_command(
                f"{loopback.HERE}:{port}", loopback._free_port(), authority.authority, key, tmp_path / "party"
            )
            with loopback._running(command, tmp_path / f"{name}.log", environment):
                until = time.monotonic() + 60
                heard = f"SuperNode ID: {node}"
                while time.monotonic() < until and heard not in (tmp_path / f"{name}.log").read_text():
                    if name != "good" and re.search("rror|ailed|not found", (tmp_path / f"{name}.log").read_text()):
                        break
                    time.sleep(0.5)
            said = (tmp_path / f"{name}.log").read_text()
            assert (heard in said) is (name == "good"), said[-2000:]
    assert stat.S_IMODE(known.stat().st_mode) == 0o600


@without_flower
def test_flowers_secure_aggregation_has_masks_of_32_bits() -> None:
    """Why it is not offered (docs/federated.md): other seeds, the same mask. If it fails, think again."""
    from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen

    one = bytes(range(32))
    other = bytes([one[0] ^ 255, *one[1:4], one[4] ^ 255, *one[5:]])
    masks = [pseudo_rand_gen(seed, 2**32, [(1000,)])[0] for seed in (one, other)]
    assert one != other
    assert (masks[0] == masks[1]).all()
