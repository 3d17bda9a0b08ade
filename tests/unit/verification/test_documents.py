"""Every document of a real run reads back as it was written; damage is refused in one line, old documents load."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

import stobatch
from stobatch.config import INSTRUMENTS
from stobatch.errors import RunError
from stobatch.results import (
    DOCUMENTS,
    Attack,
    Audit,
    CertificateSummary,
    Document,
    Evidence,
    NetworkFacts,
    PlanDocument,
    ReportSummary,
    Scores,
    StartedRun,
    Training,
    Verification,
)
from stobatch.runs import Run
from stobatch.types import Status
from stobatch.verification.documents import _on_any_machine

FILES = ("config", "plan", "training", "manifest", "certificates", "attack", "scores", "audit")


def content(file: Path) -> dict[str, Any]:
    found = json.loads(file.read_text())
    return {key: value for key, value in found.items() if key not in ("schema", "version")}


def documents(run: Path) -> dict[Path, Document]:
    """Every public document of a run, by its file."""
    found: dict[Path, Document] = {run / f"{name}.json": DOCUMENTS[name].read(Run(run)) for name in FILES}
    for name in INSTRUMENTS:
        if evidence := Evidence.read_of(Run(run), name):
            found[run / f"evidence/{name}.json"] = evidence
    return found


def test_every_document_is_written_as_it_was_read(whole: Path) -> None:
    found = documents(whole)
    assert len(found) > len(FILES), "at least one instrument left evidence"
    for file, document in found.items():
        assert json.dumps(document.to_dict()) == json.dumps(content(file)), file
        assert type(document).from_dict(document.to_dict()) == document
        assert document.replace() == document


def test_writing_what_was_read_changes_no_byte(run: Path) -> None:
    for file, document in documents(run).items():
        before = file.read_bytes()
        if isinstance(document, Evidence):
            document.write_of(Run(run), file.stem)
        else:
            document.write(Run(run))
        assert file.read_bytes() == before, file


def test_what_verbs_return_reads_back(whole: Path, tmp_path: Path) -> None:
    checked, written = stobatch.verify(whole, sample=0), stobatch.report([whole], tmp_path / "page.html")
    assert Verification.from_dict(json.loads(checked.to_json())) == checked
    assert ReportSummary.from_dict(json.loads(written.to_json())) == written


def test_a_document_cannot_be_changed(whole: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        Scores.read(Run(whole)).rows = 3  # type: ignore[misc]


def test_a_person_sees_every_epsilon_and_radius_with_its_status_and_unit(whole: Path) -> None:
    scores, certified = Scores.read(Run(whole)), CertificateSummary.read(Run(whole))
    for shown in (repr(scores), scores._repr_html_()):
        assert str(scores.guarantee).partition(" (")[0] in shown
        assert "(linf over [-1, 1])" in shown
        assert shown.count("proved") >= 1 + len(certified.kinds)
    assert "<script>" not in certified.replace(kinds=(certified.kinds[0].replace(source="<script>"),))._repr_html_()
    for document in documents(whole).values():
        assert len(repr(document)) < 5000


DAMAGES: dict[str, tuple[type[Document], Callable[[dict[str, Any]], object], str]] = {
    "a key is missing": (Scores, lambda d: d["under_attack"][0]["accuracy"][1].pop("radius"),
                         r"under_attack\[0\]\.accuracy\[1\]\.radius is missing"),
    "a key that nothing writes": (Training, lambda d: d.update(proved_epsilon=0.1),
                                  "proved_epsilon is nothing that it may hold"),
    "a number as text": (Training, lambda d: d.update(steps="12"), "steps is wrong"),
    "a flag as a number": (Training, lambda d: d["network"].update(handed_over=1), r"network\.handed_over is wrong"),
    "a count below nothing": (CertificateSummary, lambda d: d.update(rows=-1), "rows is wrong"),
    "an unknown status": (CertificateSummary, lambda d: d["kinds"][0].update(status="certain"),
                          r"kinds\[0\]\.status is wrong"),
    "an unknown verdict": (Audit, lambda d: d.update(verdict="fine"), "verdict is wrong"),
    "a detail of a finding": (Audit, lambda d: d["findings"][0]["details"].update(broken="none"),
                              r"findings\[0\]\.details\.broken is"),
    "a list as a number": (Attack, lambda d: d.update(attacks=3), "attacks is wrong"),
    "a guarantee without its epsilon": (Scores, lambda d: d["guarantee"].pop("proved_epsilon"),
                                        "guarantee is wrong .*has no proved_epsilon"),
    "a guarantee with two": (Scores, lambda d: d["guarantee"].update(claimed_epsilon=0.1),
                             "guarantee is wrong .*nothing writes claimed_epsilon"),
    "an epsilon as text": (PlanDocument, lambda d: d["guarantee"].update(proved_epsilon="1"),
                           "its budget is not two numbers"),
    "a data set without its classes": (StartedRun, lambda d: d["dataset"].pop("num_classes"),
                                       r"dataset\.num_classes is missing"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_document_is_refused_in_one_line(whole: Path, name: str) -> None:
    kind, damage, words = DAMAGES[name]
    found = content(whole / f"{kind.kind}.json")
    damage(found)
    with pytest.raises(RunError, match=words) as caught:
        kind.from_dict(found, whole / f"{kind.kind}.json")
    message = str(caught.value)
    assert message.startswith(f"{whole / kind.kind}.json does not hold what stobatch writes.")
    assert "\n" not in message
    assert "Restore it" in caught.value.remedy


STRANGE: tuple[Any, ...] = (None, True, -1, 0.5, 1e300, "", "proved", [], [None], {}, {"value": 1})


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in a document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield (*path, key)
        yield from places(part, (*path, key))


def changed(document: dict[str, Any], random: Random) -> dict[str, Any]:
    """A document with one value exchanged, removed, or added to."""
    copy: Any = json.loads(json.dumps(document))
    *path, last = random.choice(list(places(copy)))
    holder = copy
    for key in path:
        holder = holder[key]
    turn = random.randrange(4)
    if turn == 0:
        del holder[last]
    elif turn == 1 and isinstance(holder, dict):
        holder["strange"] = random.choice(STRANGE)
    else:
        holder[last] = random.choice(STRANGE)
    return dict(copy)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_read_is_what_the_file_says_or_it_is_refused(whole: Path, seed: int) -> None:
    """No value is lost, turned into another or made up, whatever was done to a file; and nothing else is raised."""
    random, refusals, read = Random(seed), list[tuple[Path, str]](), 0
    for file, document in documents(whole).items():
        for _ in range(60):
            edited = changed(content(file), random)
            try:
                found = type(document).from_dict(edited, file)
            except RunError as error:
                refusals.append((file, str(error)))
            else:
                assert found.to_dict() == edited
                assert repr(found)
                read += 1
    assert len(refusals) > read > 0
    for file, message in refusals:
        assert message.startswith(f"{file} does not hold what stobatch writes.")
        assert "\n" not in message


OLDER: dict[type[Document], tuple[str, ...]] = {
    Training: ("weights_sha256", "private_files", "data", "network", "test_accuracy", "test_examples", "history_of",
               "processes", "peak_memory_mb", "peak_memory_of", "accounted_steps"),
    CertificateSummary: ("weights_sha256", "chosen"),
    Scores: ("weights_sha256", "test_records", "accuracy_by_class", "same_images", "probe", "lowest_input"),
    Attack: ("weights_sha256",),
    Audit: ("weights_sha256", "claims"),
}  # fmt: skip
"""Keys that older versions did not write."""


@pytest.mark.parametrize("kind", OLDER)
def test_an_old_document_loads_and_is_not_embellished(whole: Path, kind: type[Document]) -> None:
    found = {key: value for key, value in content(whole / f"{kind.kind}.json").items() if key not in OLDER[kind]}
    document = kind.from_dict(found)
    assert document.to_dict() == found
    assert kind.from_dict(document.to_dict()) == document


def test_a_null_is_no_absent_key(whole: Path) -> None:
    """Who nulls the digest of the weights or the count of steps has not made an old run of a new one."""
    for key in ("weights_sha256", "accounted_steps"):
        with pytest.raises(RunError, match=f"{key} is wrong"):
            Training.from_dict({**content(whole / "training.json"), key: None})


def test_no_guarantee_keeps_what_audits_found() -> None:
    """A method that promises nothing is audited all the same, and its document says so when it is read back."""
    from stobatch.dp.guarantee import PrivacyGuarantee
    from stobatch.results import Finding

    finding = Finding.model_validate(
        {"instrument": "release", "about": "privacy", "claim": "none", "claim_status": "none",
         "verdict": "consistent", "statement": "ε ≥ 3", "threat_model": "", "attack": "", "confidence": 0.95,
         "details": {"claimed_epsilon": 1.0, "claimed_delta": 0.0, "neighbours": "replace-one", "bounds": []},
         "evidence": "evidence/release.json"}
    )  # fmt: skip
    audited = PrivacyGuarantee.none("plain training").audited([finding])
    assert audited.audits
    assert PrivacyGuarantee.from_dict(audited.to_dict()) == audited
    assert audited.status is Status.NONE


def test_what_versions_of_torch_call_a_layer_is_no_difference() -> None:
    """A run trained where GroupNorm did not name its shift yet is of one piece here; another layer is not."""
    named, before, other = (
        NetworkFacts(handed_over=False, layers=(f"GroupNorm({size}, eps=1e-05, affine=True{rest})",), parameters=16)
        for size, rest in (("4, 8", ", bias=True"), ("4, 8", ""), ("2, 8", ""))
    )
    assert _on_any_machine(named) == _on_any_machine(before) != _on_any_machine(other)
