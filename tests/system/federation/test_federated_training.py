"""The federation computes what its words say, is a run like any other, and survives a server that dies."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.small_federation import LAYERS, STEPS, ask, flat, opened, pictures, started, terms
from support.small_prior import write_small_prior

import stobatch
from stobatch.errors import SettingError
from stobatch.federated import Answer, Federation, FederationError, InProcessTransport, Party, converse, federate, split
from stobatch.federated.rounds import parties_of
from stobatch.models.layered import build_layered
from stobatch.seeds import Seeds
from stobatch.sound.method import Sound
from stobatch.sound.settings import SoundConfig
from stobatch.training.ledger import Ledger


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("whole") / "run"
    federate(terms(), out, dataset=pictures(), quiet=True)
    return out


@pytest.fixture(scope="module")
def falling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("falling") / "run"
    federate(terms(**FALLING), out, dataset=pictures(), quiet=True)
    return out


FALLING = {"training.schedule": "linear"}


@pytest.mark.parametrize(
    ("fixture", "changes", "rates"),
    [("whole", {}, [0.5] * 6), ("falling", FALLING, [0.5 * (11 - 2 * step) / 12 for step in range(6)])],
)
def test_the_model_is_what_a_loop_written_out_gives(
    request: pytest.FixtureRequest, tmp_path: Path, fixture: str, changes: dict[str, Any], rates: list[float]
) -> None:
    """Public weights, momentum, rates and the moving average, by hand, from the same answers."""
    whole = request.getfixturevalue(fixture)
    federation, directories = started(tmp_path / "run", terms(**changes))
    parties = opened(directories)
    batch = {"north": 12, "east": 8, "south": 6}
    theta = federation.parameters()
    moving = {name: torch.zeros_like(value) for name, value in theta.items()}
    average = {name: value.clone() for name, value in theta.items()}
    for step in range(STEPS):
        # South may take part 4 times in 6 steps: when 4 (t + 1) / 6 passes a whole number.
        names = [name for name in batch if name != "south" or (step + 1) * 4 // 6 > step * 4 // 6]
        answers = {name: parties[name].answer(theta, step, federation.agreed).gradients for name in names}
        decay = min(0.99, (1 + step) / (10 + step))
        for key in theta:
            mean = sum(batch[name] * answers[name][key] for name in names) / sum(batch[name] for name in names)
            moving[key] = 0.5 * moving[key] + mean
            theta[key] = theta[key] - rates[step] * moving[key]
            average[key] = decay * average[key] + (1 - decay) * theta[key]
    trained = load_file(whole / "model.safetensors")
    for key, value in average.items():
        torch.testing.assert_close(trained[key], value, rtol=1e-5, atol=1e-6)


def test_without_noise_and_sampling_the_parties_give_the_clipped_mean_of_all_records(tmp_path: Path) -> None:
    federation, directories = started(
        tmp_path / "run", terms(**{"method.parties": ["north:40:40", "east:30:30", "south:20:20"]})
    )
    data, parties = pictures(), opened(directories)
    for party in parties.values():
        party.trainable.noise_stddev = 0.0
    combined = sum(party.plan.expected_batch_size / 90 * flat(ask(party, federation)) for party in parties.values())
    central = terms().replace(method=SoundConfig(epsilon=3.0, delta=1e-3, clip_norm=0.5, batch_size=90))
    plan = stobatch.plan(central, dataset=data)
    one = Sound().prepare(central, plan, federation.network, data.train, Seeds.reproducible(1))
    one.noise_stddev = 0.0
    (task,) = one.tasks(0)
    torch.testing.assert_close(combined, flat(dict(one.gradients(task, 0))), rtol=1e-4, atol=1e-7)


def test_no_record_is_given_to_two_parties() -> None:
    shares = split(terms(), pictures().train)
    assert {name: len(own) for name, own in shares.items()} == {"north": 40, "east": 30, "south": 20}
    rows = torch.cat([own.inputs.flatten(1) for own in shares.values()])
    assert len(rows.unique(dim=0)) == 90
    with pytest.raises(SettingError, match="the parties want 91 records, the data have 90"):
        split(terms(**{"method.parties": ["north:61", "east:30"]}), pictures().train)


def test_a_federation_is_certified_evaluated_and_reported_like_any_run(whole: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    certificates = stobatch.certify(run, dataset=pictures(), quiet=True).to_dict()
    assert certificates["kinds"][0]["status"] == "proved"
    scores = stobatch.evaluate(run, dataset=pictures(), quiet=True).to_dict()
    assert scores["guarantee"] == stobatch.load(run).guarantee.to_dict()
    page = Path(stobatch.report([run]).report).read_text()
    assert "training example of any one party" in page
    assert "south: 20 records" in page


def test_a_federation_is_not_trained_in_one_place(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="a federation is not trained in one place"):
        stobatch.train(terms(), tmp_path / "run", dataset=pictures(), quiet=True)
    with pytest.raises(SettingError, match="no room for canaries"):
        stobatch.plan(terms(**{"canaries.num": 5}), dataset=pictures())


class Dies(InProcessTransport):
    """A server whose power fails when it has asked in some step and has not combined."""

    at = 2

    def answers(self, names: list[str], federation: Federation) -> dict[str, Answer]:  # type: ignore[override]
        found = super().answers(names, federation)
        if federation.step == self.at:
            raise KeyboardInterrupt
        return found


def test_a_server_that_died_goes_on_and_the_parties_count_what_they_were_asked_twice(tmp_path: Path) -> None:
    federation, directories = started(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        converse(federation, Dies(opened(directories)))
    model = converse(Federation.open(tmp_path / "run"), InProcessTransport(opened(directories)))
    # North and east were asked 7 times and may answer 6; south was asked 5 times and may answer 4. So the last step had
    # nobody left, and the model is that of five.
    training = model.run.read("training")
    assert training["rounds"] == {"north": 6, "east": 6, "south": 4}
    assert model.run.read("federation")["answers_received"] == {"north": 5, "east": 5, "south": 3}
    assert training["steps"] == 5
    assert model.guarantee.epsilon == stobatch.plan(terms(), dataset=pictures()).guarantee.epsilon <= 3.0


def test_without_any_answer_there_is_no_model(tmp_path: Path) -> None:
    federation, directories = started(tmp_path / "run")
    for party in opened(directories).values():
        Ledger(party.plan.steps, 0).save(party.run.path)
    with pytest.raises(FederationError, match="no party has answered, so there is no model"):
        converse(federation, InProcessTransport(opened(directories)))
    assert not federation.run.is_trained


def test_the_same_command_continues_or_returns_what_is_there(whole: Path) -> None:
    again = federate(terms(), whole, dataset=pictures(), resume=True, quiet=True)
    assert again.run.path == whole
    assert Party.open(parties_of(whole) / "north").rounds == STEPS


def test_a_federation_starts_from_a_prior_and_goes_on_without_its_file(tmp_path: Path) -> None:
    network = build_layered(LAYERS, (1, 6, 6), 3, torch.Generator().manual_seed(77))
    prior = write_small_prior(tmp_path / "shapes", network)
    agreed = terms(**{"training.learning_rate": 1e-9})
    model = federate(agreed, tmp_path / "run", dataset=pictures(), prior=prior, quiet=True)
    assert model.plan.claim.started_from(model.plan.prior).prior is not None
    for name, value in network.named_parameters():
        assert torch.allclose(model.network.get_parameter(name), value, atol=1e-5)
    prior.with_suffix(".safetensors").unlink()
    again = Federation.open(tmp_path / "run")
    assert again.done
    with pytest.raises(SettingError, match="gradient of a whole network"):
        federate(agreed.override("model.train_only", "head"), tmp_path / "parts", dataset=pictures(), quiet=True)
    assert not (tmp_path / "parts").exists()
