"""A party's records, seeds and noiseless sums stay in its own directory."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.small_federation import opened, started, terms

from stobatch.federated import InProcessTransport, Party, converse
from stobatch.training.engines import Gradients


def secrets_of(party: Party, bare: list[Gradients]) -> dict[str, bytes]:
    """Byte strings that would give a party away, wherever they turned up."""
    found = {
        "seed": str(party.root.root).encode(),
        "seed in hex": format(party.root.root, "x").encode(),
        "fingerprint": party.run.read("data", private=True)["sha256"].encode(),
    }
    found |= {f"record {i}": image.numpy().tobytes() for i, image in enumerate(party.train.inputs)}
    found |= {
        f"noiseless {name} of answer {i}": value.contiguous().numpy().tobytes()
        for i, gradients in enumerate(bare)
        for name, value in gradients.items()
        if value.numel() > 3
    }
    return found


def leaks(content: bytes, secrets: dict[str, bytes]) -> list[str]:
    return [name for name, secret in secrets.items() if secret in content]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_nothing_of_a_party_reaches_the_server(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    federation, directories = started(tmp_path / "run", terms(seed=None))
    parties, bare = opened(directories), {name: list[Gradients]() for name in directories}
    real = Party._compute

    def watched(self: Party, step: int) -> Gradients:
        planned, self.trainable.noise_stddev = self.trainable.noise_stddev, 0.0
        bare[self.name].append(real(self, step))
        self.trainable.noise_stddev = planned
        return real(self, step)

    monkeypatch.setattr(Party, "_compute", watched)
    converse(federation, InProcessTransport(parties), quiet=False)
    printed = "".join(capfd.readouterr()).encode()
    server = files(federation.run.path)
    assert "private/federation.safetensors" in server
    for name, party in parties.items():
        secrets = secrets_of(party, bare[name])
        assert len(secrets) > party.plan.num_examples + 6
        assert not leaks(printed, secrets)
        assert not [(file, found) for file, content in server.items() if (found := leaks(content, secrets))]
        # The search finds what is there: the party's own private folder holds records and seed.
        own = files(party.run.path / "private")
        assert leaks(own["examples.safetensors"], secrets)
        assert leaks(own["seeds.json"], secrets) == ["seed"]
        public = {k: v for k, v in files(party.run.path).items() if not k.startswith("private")}
        assert not [(file, found) for file, content in public.items() if (found := leaks(content, secrets))]


def test_the_search_finds_a_server_that_keeps_what_it_should_not_have(tmp_path: Path) -> None:
    """The broken twin: a directory with one image of one party in it."""
    _, directories = started(tmp_path / "run")
    party = Party.open(directories["east"])
    (tmp_path / "run" / "log.txt").write_bytes(b"example: " + party.train.inputs[7].numpy().tobytes())
    secrets = secrets_of(party, [])
    assert [found for content in files(tmp_path / "run").values() if (found := leaks(content, secrets))] == [
        ["record 7"]
    ]


def test_private_things_are_for_the_owner(tmp_path: Path) -> None:
    federation, directories = started(tmp_path / "run")
    converse(federation, InProcessTransport(opened(directories)))
    for path in (*directories.values(), federation.run.path):
        assert stat.S_IMODE((path / "private").stat().st_mode) == 0o700
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in (path / "private").iterdir()}
        assert set(modes.values()) == {0o600}
    assert {"seeds.json", "ledger.json", "examples.safetensors", "data.json", "lock"} <= {
        entry.name for entry in (directories["north"] / "private").iterdir()
    }
    assert load_file(directories["north"] / "private" / "examples.safetensors")["inputs"].shape == (40, 1, 6, 6)


def test_what_a_party_says_of_itself_hides_its_seed(tmp_path: Path) -> None:
    _, directories = started(tmp_path / "run", terms(seed=None))
    party = Party.open(directories["north"])
    said = party.statement()
    assert str(party.root.root) not in str(said.to_dict())
    assert said.seed_mark != Party.open(directories["east"]).statement().seed_mark
