"""A search: its winner is a run that pays for all candidates, secrets stay secret, kills draw nothing again."""

from __future__ import annotations

import json
import re
import shutil
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_prior import write_small_prior
from support.tamperings import mend_manifest

import stobatch
from stobatch import progress
from stobatch.book import Book
from stobatch.config import RunConfig
from stobatch.data import Dataset, Examples, hold_out, person_codes
from stobatch.dp.noise import COARSEST
from stobatch.dp.plan import SEARCH_OBJECTION, TUNING_OBJECTION, DpSgdPlan
from stobatch.dp.selection import Search as SearchCost
from stobatch.errors import BudgetError, DataError, RunError, SettingError
from stobatch.models.layered import build_layered
from stobatch.results import Candidates, Outcome, Search
from stobatch.runs import Run, public_files, seal
from stobatch.seeds import Seeds
from stobatch.sound.search import combinations
from stobatch.training.device import environment
from stobatch.training.ledger import Ledger
from stobatch.tuning.candidate import Candidate, Score, count_right, noisy_count
from stobatch.tuning.search import best_of, draw_candidates, tune
from tests.support.small_records import small_config, small_records

SEARCHED = ["training.learning_rate=0.1,1,4", "training.steps=2,4"]
FEW: dict[str, Any] = {
    "search__law": "negative_binomial",
    "search__mean": 2.0,
    "search__score_noise": 8.0,
    "search__candidate_epsilon": 0.5,
    "method__epsilon": 2.0,
    "data__held_out": 20,
}


def search_config(**changes: Any) -> RunConfig:
    return small_config(**{"search__settings": SEARCHED} | FEW | changes)


def records() -> Dataset:
    return small_records(0, 200)


def seeds_with(number: int, config: RunConfig) -> int:
    """Return a root that draws so many candidates."""
    return next(
        root for root in range(1000) if len(draw_candidates(config, Seeds(root, public=False), Path("x"))) == number
    )


@pytest.fixture
def draws_three(monkeypatch: pytest.MonkeyPatch) -> None:
    root = seeds_with(3, search_config())
    monkeypatch.setattr(Seeds, "secret", classmethod(lambda cls: cls(root, public=False)))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("search") / "out"
    tune(search_config(), out, dataset=records(), quiet=True)
    return out


def test_the_winner_is_a_run_that_pays_for_the_search(finished: Path):
    model = stobatch.load(finished / "winner")
    plan = model.plan
    assert isinstance(plan, DpSgdPlan)
    guarantee = model.guarantee
    assert plan.curve.epsilon(plan.delta) < 0.6 < guarantee.epsilon <= 2.0
    assert guarantee.objections == (SEARCH_OBJECTION,)
    assert not any("without looking at the private data" in line for line in guarantee.assumptions)
    assert any("best of a random number" in line for line in guarantee.assumptions)
    assert stobatch.plan(small_config(), dataset=records()).guarantee.objections == (TUNING_OBJECTION,)
    assert len(Examples.in_memory(records().train)) - plan.num_examples == 20


def test_where_nothing_was_chosen_by_looking_a_search_has_no_objection_and_assumes_so():
    untuned = search_config(method__tuned_on_private_data=False)
    guarantee = stobatch.plan(untuned, dataset=records()).guarantee
    assert not guarantee.objections
    assert any("like all other settings, without looking at the private data" in line for line in guarantee.assumptions)


def test_a_winner_of_an_older_version_is_still_verified(finished: Path, tmp_path: Path):
    """Such files lack the objection, and assume that nothing was chosen by looking."""
    run = tmp_path / "winner"
    shutil.copytree(finished / "winner", run)
    document = json.loads((run / "plan.json").read_text())
    assumptions = document["guarantee"]["assumptions"]
    document["guarantee"]["objections"].remove(SEARCH_OBJECTION)
    place = next(place for place, line in enumerate(assumptions) if line.endswith("before the data were read"))
    assumptions[place] += ", like all other settings, without looking at the private data"
    (run / "plan.json").write_text(json.dumps(document))
    mend_manifest(run)
    checked = stobatch.verify(run, dataset=records(), sample=0)
    assert not checked.differing
    assert checked.guarantee is not None
    assert checked.guarantee.objections == (SEARCH_OBJECTION,)


def test_the_search_and_its_winner_say_one_epsilon_whatever_stands_outside_of_the_list(tmp_path: Path):
    config = search_config(training__steps=400)
    found = tune(config, tmp_path / "out", dataset=records(), quiet=True)
    assert found.guarantee.epsilon == stobatch.load(tmp_path / "out" / "winner").guarantee.epsilon <= 2.0


def test_assumptions_are_those_of_the_winner_and_before_of_a_candidate_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = search_config(method__clip_norm=0.3, search__settings=["method.clip_norm=0.5,2"])
    root = next(
        root for root in range(1000)
        if {one.settings["method.clip_norm"] for one in draw_candidates(config, Seeds(root, public=False), tmp_path)}
        == {2}
    )  # fmt: skip
    monkeypatch.setattr(Seeds, "secret", classmethod(lambda cls: cls(root, public=False)))
    begun: list[Search] = []
    monkeypatch.setattr(
        "stobatch.tuning.search.best_of", lambda scores: begun.append(Search.read(Run(tmp_path / "out"))) or 0
    )
    found = tune(config, tmp_path / "out", dataset=records(), quiet=True)
    assert found.guarantee == stobatch.load(tmp_path / "out" / "winner").guarantee
    assert any("clipped to norm 2 " in line for line in found.guarantee.assumptions)
    assert found.guarantee_of == "the winner"
    assert any("clipped to norm 0.5 " in line for line in begun[0].guarantee.assumptions)
    assert "a candidate with method.clip_norm=0.5:" in str(begun[0].guarantee_of)
    assert str(found.one_candidate).startswith("proved ε = 0.5 by itself")
    older = {key: value for key, value in found.to_dict().items() if key not in ("one_candidate", "guarantee_of")}
    assert Search.from_dict(older).to_dict() == older


def test_the_winner_is_verified(finished: Path):
    verified = stobatch.verify(finished / "winner", dataset=records())
    assert verified.verdict is Outcome.AGREES
    (second,) = (check for check in verified.checks if check.name == "second accountant")
    assert second.outcome is Outcome.AGREES
    assert "for the search" in second.detail


def test_a_winner_that_says_less_than_the_search_cost_is_found(finished: Path, tmp_path: Path):
    """As somebody would write it who forgets the search: the plan of one training, sealed again."""
    shutil.copytree(finished / "winner", tmp_path / "winner")
    run = Run(tmp_path / "winner")
    model = stobatch.load(run.path)
    assert isinstance(model.plan, DpSgdPlan)
    alone = replace(model.plan, searched=None, given_noise_multiplier=model.plan.noise_multiplier)
    assert alone.claim.epsilon < model.claim.epsilon / 1.5
    run.write("plan", alone.to_dict())
    seal(run, "train", environment(torch.device("cpu")))
    (check,) = (check for check in stobatch.verify(run.path, sample=0).checks if check.name == "plan")
    assert check.outcome is Outcome.DIFFERS


def test_what_is_published_has_no_time_within_the_day(finished: Path):
    """When the winner was trained, and how long that took, tells how many candidates there were before and after it."""
    files = (finished / "winner", *(finished / "winner").rglob("*"), finished / "search.json")
    assert {path.stat().st_mtime_ns % (24 * 3600 * 10**9) for path in files} == {0}
    winner = Run(finished / "winner")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", winner.read("manifest")["made"]["train"]["date"])
    assert not {key for key in winner.read("training") if "seconds" in key or "memory" in key}
    for name in public_files(winner):
        assert not re.search(rb"T\d\d:\d\d:\d\d", (winner.path / name).read_bytes()), name


def test_what_is_private_stays_private(finished: Path):
    assert {path.name for path in finished.iterdir()} == {"private", "search.json", "winner"}
    assert stat.S_IMODE((finished / "private").stat().st_mode) == 0o700
    modes = {stat.S_IMODE(p.stat().st_mode) for p in (finished / "private").iterdir() if p.is_file()}
    assert modes == {0o600}
    table = Candidates.from_dict(Run(finished).read("candidates", private=True))
    assert sum(row.won for row in table.rows) == 1
    # The public file is the same whatever the number of candidates is.
    keys = "training_hash config one_candidate guarantee_of guarantee finished winner"
    assert " ".join(Run(finished).read("search")) == keys


@pytest.mark.parametrize("rate", ["0.1,1", "1e15,2e15"], ids=["learns", "diverges"])
def test_what_is_printed_is_the_same_for_one_candidate_and_for_three(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], rate: str
):
    monkeypatch.setattr(progress, "LINE_EVERY_S", 1e6)
    config, printed = search_config(search__settings=[f"training.learning_rate={rate}"]), []
    for number in (1, 3):
        root = seeds_with(number, config)
        monkeypatch.setattr(Seeds, "secret", classmethod(lambda cls, root=root: cls(root, public=False)))
        found = tune(config, tmp_path / str(number), dataset=records())
        assert found.winner is not None
        printed.append(capfd.readouterr())
    assert printed[0] == printed[1] == ("", "")


def test_a_second_call_reads_and_trains_nothing(finished: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Candidate, "finish", lambda *_, **__: pytest.fail("trained again"))
    with pytest.raises(RunError, match="already holds a search"):
        tune(search_config(), finished, dataset=records(), quiet=True)
    again = tune(search_config(), finished, dataset=records(), quiet=True, resume=True)
    assert again.winner is not None
    with pytest.raises(RunError, match="other settings"):
        tune(search_config(search__mean=3.0), finished, dataset=records(), quiet=True, resume=True)


def test_a_killed_search_goes_on_with_the_same_candidates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draws_three: None
):
    whole = tune(search_config(), tmp_path / "whole", dataset=records(), quiet=True)
    finish, calls = Candidate.finish, []

    def killed(self: Candidate, *given: Any, **named: Any) -> Score:
        calls.append(self.number)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return finish(self, *given, **named)

    monkeypatch.setattr(Candidate, "finish", killed)
    with pytest.raises(KeyboardInterrupt):
        tune(search_config(), tmp_path / "cut", dataset=records(), quiet=True)
    assert not (tmp_path / "cut" / "winner").exists()
    # New secrets would be another search.
    monkeypatch.setattr(Seeds, "secret", classmethod(lambda cls: pytest.fail("drawn again")))
    resumed = tune(search_config(), tmp_path / "cut", dataset=records(), quiet=True, resume=True)
    assert resumed == whole
    weights = [(tmp_path / name / "winner" / "model.safetensors").read_bytes() for name in ("whole", "cut")]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_candidates_in_processes_of_their_own_are_the_same(tmp_path: Path, draws_three: None):
    one = tune(search_config(), tmp_path / "one", dataset=records(), quiet=True)
    two = tune(search_config(), tmp_path / "two", dataset=records(), quiet=True, workers=2)
    assert one == two


def test_lost_secrets_are_not_drawn_again(finished: Path, tmp_path: Path):
    shutil.copytree(finished, tmp_path / "copy")
    (tmp_path / "copy" / "private" / "seeds.json").unlink()
    with pytest.raises(RunError, match="another search"):
        tune(search_config(), tmp_path / "copy", dataset=records(), quiet=True, resume=True)


def test_diverged_candidates_count_and_cannot_win(tmp_path: Path, draws_three: None):
    # Noise for so small a budget takes float32 to its end in a step.
    loud = {"search__settings": ["training.learning_rate=2e38,3e38"], "search__candidate_epsilon": 0.01}
    found = tune(search_config(**loud), tmp_path / "out", dataset=records(), quiet=True)
    assert found.finished
    assert found.winner is None
    table = Candidates.from_dict(Run(tmp_path / "out").read("candidates", private=True))
    assert len(table.rows) == 3
    assert all("NaN or infinite" in row.failure for row in table.rows)


def test_a_search_of_no_candidates_releases_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = search_config(search__law="poisson", search__mean=2.0)
    root = seeds_with(0, config)
    monkeypatch.setattr(Seeds, "secret", classmethod(lambda cls: cls(root, public=False)))
    found = tune(config, tmp_path / "out", dataset=records(), quiet=True)
    assert found.winner is None
    assert not (tmp_path / "out" / "winner").exists()


def test_a_candidate_with_more_steps_than_are_paid_for_cannot_win(tmp_path: Path):
    config = search_config()
    candidate = Candidate.draw(1, config, Seeds(3, public=False), tmp_path)
    assert candidate.finish(records(), None).noisy is not None
    (tmp_path / "1" / "private" / "score.json").unlink()
    ledger = Ledger.of(candidate.run.path)
    replace(ledger, done=ledger.done + 1).save(candidate.run.path)
    again = candidate._measure_score(_reloaded(candidate), records())
    assert again.noisy is None
    assert "pays for" in again.failure


def _reloaded(candidate: Candidate) -> stobatch.TrainedModel:
    training = candidate.run.read("training")
    candidate.run.write("training", {**training, "accounted_steps": Ledger.of(candidate.run.path).accounted})
    return stobatch.load(candidate.run.path)


def owned(count: int = 200) -> Dataset:
    """The same records, of 80 persons with one to four of them."""
    plain = small_records(0, count)
    owners = torch.arange(80).repeat_interleave(1 + torch.arange(80) % 4)[:count]
    groups = person_codes(owners, count)
    info = replace(plain.info, num_persons=80)
    return replace(plain, info=info, train=replace(plain.train.in_memory(), groups=groups))


def test_persons_are_held_out_whole_and_the_winner_is_about_persons(tmp_path: Path):
    data, config = owned(), search_config()
    kept, held = hold_out(data, config.data, Seeds(5, public=False))
    assert held is not None
    assert held.persons is not None
    assert kept.train.persons is not None
    assert (len(kept.train.persons), len(held.persons)) == (60, 20)
    assert len(kept.train) + len(held) == 200
    inputs = {tuple(one.flatten().tolist()) for one in held.inputs}
    groups = data.train.in_memory().groups
    assert groups is not None
    of_held = {int(g) for g, one in zip(groups, data.train.in_memory().inputs, strict=True)
               if tuple(one.flatten().tolist()) in inputs}  # fmt: skip
    assert len(of_held) == 20, "a person has records on both sides"

    tune(config, tmp_path / "out", dataset=data, quiet=True)
    model = stobatch.load(tmp_path / "out" / "winner")
    assert isinstance(model.plan, DpSgdPlan)
    assert (model.guarantee.unit, model.plan.num_persons) == ("person", 60)
    assert any("a person is held out or trained on" in line for line in model.guarantee.assumptions)
    assert stobatch.verify(tmp_path / "out" / "winner", dataset=data).verdict is Outcome.AGREES
    # How many records are left after a secret draw is in no file that is published.
    assert Run(tmp_path / "out" / "winner").read("config")["dataset"]["num_train"] == 200


def test_a_person_moves_a_score_by_one_at_most_and_records_counted_one_by_one_do_not():
    config, data = search_config(), owned().train.in_memory()
    network = build_layered("linear", (1, 4, 4), 2, torch.Generator().manual_seed(0))
    model = stobatch.TrainedModel(network, config, stobatch.plan(config, dataset=owned()), Run(Path("none")))
    assert data.groups is not None
    whole, moved, one_by_one = count_right(model, data), [], []
    for person in range(80):
        left = data.take((data.groups != person).nonzero().flatten())
        moved.append(whole - count_right(model, left))
        plain = [replace(part, groups=None) for part in (data, left)]
        one_by_one.append(count_right(model, plain[0]) - count_right(model, plain[1]))
    assert min(moved) >= 0
    assert max(moved) == 1.0
    assert max(one_by_one) > 1, "the twin that forgets persons"
    assert whole == round(whole / COARSEST) * COARSEST


def test_a_search_starts_from_a_prior_and_goes_on_from_its_copy(tmp_path: Path, draws_three: None):
    network = build_layered("linear", (1, 4, 4), 2, torch.Generator().manual_seed(9))
    prior = write_small_prior(tmp_path / "shapes", network)
    config = search_config(search__settings=["training.learning_rate=1e-9,2e-9"])
    tune(config, tmp_path / "out", dataset=records(), prior=prior, quiet=True)
    model = stobatch.load(tmp_path / "out" / "winner")
    assert model.guarantee.prior is not None
    assert model.guarantee.status is stobatch.Status.PROVED
    for name, value in model.network.state_dict().items():
        assert torch.allclose(value, network.state_dict()[name], atol=1e-6)
    (tmp_path / "shapes.safetensors").unlink()
    shutil.rmtree(tmp_path / "out" / "winner")
    (tmp_path / "out" / "search.json").write_text(
        (tmp_path / "out" / "search.json").read_text().replace('"finished": true', '"finished": false')
    )
    again = tune(model.config.override_all({"training.learning_rate": config.training.learning_rate}),
                 tmp_path / "out", dataset=records(), resume=True, quiet=True)  # fmt: skip
    assert again.winner is not None
    wider = search_config(search__settings=["model.architecture=linear,linear 3"])
    with pytest.raises(SettingError, match="cannot be searched from a prior"):
        tune(wider, tmp_path / "other", dataset=records(), prior=tmp_path / "out" / "winner", quiet=True)


def test_a_search_is_one_entry_of_the_book(tmp_path: Path, draws_three: None):
    config = search_config(machine__book=str(tmp_path / "book"))
    tune(config, tmp_path / "out", dataset=records(), quiet=True)
    (entry,) = Book.open(tmp_path / "book").entries.values()
    assert entry.settled
    assert isinstance(entry.cost, SearchCost)
    assert entry.method.startswith("search")
    assert Book.open(tmp_path / "book").shares()[0].count == 200, "held-out records are read, too"
    Book.open(tmp_path / "book").set_limit(1.6, 1e-3)
    with pytest.raises(BudgetError, match="more than the limit"):
        tune(config, tmp_path / "again", dataset=records(), quiet=True)
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"search__settings": ["training.steps=4"]}, "nothing to search"),
        ({"search__settings": ["method.epsilon=1,2"]}, "cannot be searched"),
        ({"search__settings": ["data.train_limit=10,20"]}, "cannot be searched"),
        ({"search__settings": ["training.steps=4,4"]}, "a value twice"),
        ({"search__settings": ["training.steps=4,-1"]}, "steps=-1 is not allowed"),
        ({"search__settings": [f"training.steps={','.join(map(str, range(1, 1100)))}"]}, "more than 1000"),
        ({"data__held_out": 0}, "nothing to score"),
        ({"data__held_out": 200}, "leaves nothing"),
        ({"seed": 3}, "public seed"),
        ({"search__candidate_epsilon": 1.9}, "makes the search cost"),
        ({"search__candidate_epsilon": None, "search__score_noise": 1.0}, "scores of a search alone"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_read_or_written(
    tmp_path: Path, changes: dict[str, Any], words: str
):
    with pytest.raises((SettingError, DataError), match=words):
        tune(search_config(**changes), tmp_path / "out", dataset=records(), quiet=True)
    assert not (tmp_path / "out").exists()


def test_one_training_is_no_search(tmp_path: Path):
    with pytest.raises(SettingError, match="not for one training"):
        stobatch.train(search_config(), tmp_path / "out", dataset=records(), quiet=True)


def test_without_a_search_settings_have_the_hash_and_the_text_they_had():
    config = small_config()
    assert "search" not in config.to_dict()
    assert "held_out" not in config.to_dict()["data"]
    assert RunConfig.from_dict(search_config().to_dict()) == search_config()


def test_every_combination_is_as_likely():
    """Counts of 6 kinds in 3,000 draws; each leaves its range with probability 2 exp(-2·3000·0.06²) < 1e-9."""
    config, known = search_config(), list(combinations(search_config()))
    seeds = Seeds.secret()
    drawn = [Candidate.draw(number, config, seeds, Path("x")).settings for number in range(3000)]
    shares = [drawn.count(one) / len(drawn) for one in known]
    assert len(known) == 6
    assert all(abs(share - 1 / 6) < 0.06 for share in shares)


def test_held_out_records_are_the_rest_and_other_records_do_not_move_them():
    data, config, seeds = records(), search_config().data, Seeds(5, public=False)
    kept, held = hold_out(data, config, seeds)
    assert held is not None
    together = torch.cat([kept.train.in_memory().inputs, held.inputs])
    assert len(together) == 200
    assert torch.equal(together.unique(dim=0), data.train.in_memory().inputs.unique(dim=0))
    own = data.train.in_memory()
    changed = Examples(own.inputs.clone(), own.labels, 2)
    changed.inputs[17] = 0.0
    _, other = hold_out(Dataset(data.info, changed, data.test), config, seeds)
    assert other is not None
    assert int((other.inputs != held.inputs).flatten(1).any(1).sum()) <= 1


@pytest.mark.parametrize("score", ["accuracy", "certified"])
def test_a_record_moves_a_score_by_one_at_most(finished: Path, score: str):
    model = stobatch.load(finished / "winner")
    model = replace(model, config=model.config.override("search.score", score))
    some = records().train.in_memory().take(slice(20))
    whole = count_right(model, some)
    for place in range(len(some)):
        rest = torch.tensor([other for other in range(len(some)) if other != place])
        assert whole - count_right(model, some.take(rest)) in (0, 1)


def test_scores_have_noise_of_their_own():
    drawn = {noisy_count(7, 8.0, Seeds(root, public=False)) for root in range(20)}
    assert len(drawn) == 20
    assert noisy_count(7, 8.0, Seeds(1, public=False)) == noisy_count(7, 8.0, Seeds(1, public=False))


def test_the_best_is_the_first_of_the_largest_and_failures_are_last():
    assert best_of([Score(1.0), Score(3.0), Score(None, "diverged"), Score(3.0)]) == 1
    assert best_of([Score(None, "diverged")]) is None
    assert best_of([]) is None
