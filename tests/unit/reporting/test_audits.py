"""Audits in the report: a refuted claim is refuted everywhere, and a survived attack proves nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from made_runs import (
    audit,
    audit_of_everything,
    guarantee,
    make,
    of_certificates,
    of_many_runs,
    of_membership,
    of_release,
    scores,
)
from pages import Page, page

from stobatch.errors import RunError
from stobatch.runs import Run

OVERVIEW = "One row for each finding"
CLAIMS = "Every claim of this run"


def audited(path: Path, *findings: dict[str, Any], found: dict[str, Any] | None = None) -> Run:
    run = make(path, found)
    run.write("audit", audit(*findings))
    return run


def card(found: Page) -> str:
    """The words of the guarantee card."""
    return found.prose.split("Privacy towards the training data", 1)[1].split("Sanity flags", 1)[0]


def test_a_run_that_was_never_audited_says_so_with_the_command(path):
    found = page(make(path))
    assert "audits" not in scores()["guarantee"]
    assert "Nothing was audited yet. To do so: stobatch audit RUN" in card(found)
    assert OVERVIEW not in found.prose
    assert "No claim of this run was tested." in found.prose
    assert [row[1] for row in found.table(CLAIMS)[1:]] == ["not tested"] * 3


@pytest.mark.parametrize(("status", "instrument"), [("proved", "many_runs"), ("none", "membership")])
def test_an_audit_of_certificates_alone_is_none_of_privacy(path, status, instrument):
    run = audited(path, of_certificates("consistent"), found={**scores(), "guarantee": guarantee(status)})
    assert "Only certificates were audited so far, not this." in card(page(run))
    assert f"stobatch audit RUN --instrument {instrument}" in card(page(run))


@pytest.mark.parametrize("status", ["claimed", "proved"])
def test_a_refutation_is_on_the_card_whatever_was_claimed(path, status):
    found = page(audited(path, of_release("refuted"), found={**scores(), "guarantee": guarantee(status)}))
    assert card(found).strip().startswith("REFUTED: ε = 1.25 An audit or a counterexample shows that this does not")
    assert "Audits refuted: what release found about privacy (evidence/release.json)" in card(found)
    assert "card refuted" in found.classes()
    assert not {"card claimed", "card proved"} & found.classes()
    assert "proved: ε" not in found.prose
    assert "Budgets (ε) in it: refuted." in found.prose


@pytest.mark.parametrize(
    ("status", "words"),
    [("claimed", "CLAIMED, NOT PROVED: ε"), ("proved", "proved: ε")],
)
def test_a_survived_attack_changes_no_status(path, status, words):
    found = page(audited(path, of_membership("consistent"), found={**scores(), "guarantee": guarantee(status)}))
    assert card(found).strip().startswith(words)
    assert "Audits consistent: what membership found about privacy (evidence/membership.json)" in card(found)
    assert "Nothing was refuted here." in found.prose
    assert "Attacks that fail prove nothing" in found.prose


def test_a_refuted_claim_is_refuted_in_the_comparison_and_its_fold(path):
    runs = [audited(path, of_many_runs("refuted")), make(path.with_name("other"))]
    found = page(*runs)
    rows = found.table("Accuracy on the single pass")[1:]
    assert [row[2] for row in rows] == ["1.25 refuted", "1.25 claimed, not proved"]
    assert "my-run · REFUTED: ε = 1.25 · clean 97.5%" in found.prose
    assert "other · CLAIMED, NOT PROVED: ε = 1.25 · clean 97.5%" in found.prose
    assert "ε (refuted / claimed, not proved)" in found.prose
    assert len([table for table in found.tables if OVERVIEW in table["caption"]]) == 1


def test_no_epsilon_is_shown_without_a_status(path):
    run = make(path)
    run.write("audit", audit_of_everything())
    prose = page(run).prose
    for place in re.finditer(r"1\.25", prose):
        assert re.search("refuted|claimed", prose[place.start() - 40 : place.end() + 40], re.IGNORECASE)


def test_a_broken_kind_of_certificate_is_refuted_wherever_it_is_shown(path):
    findings = of_certificates("refuted", broken=7), of_certificates("consistent", "published")
    run = audited(path, *findings)
    found = page(run)
    for words in (
        "certified, corrected rule refuted",
        "certified, published rule claimed, not proved",
        "Certified at the attacked input, corrected rule refuted",
        "certified, corrected rule (refuted)",
        "Refuted here: certificates by the corrected rule.",
    ):
        assert words in found.prose
    assert "chip proved" not in found.classes()
    assert found.table("What vouches for each certified radius")[2][0] == "corrected refuted"
    assert page(run, make(path.with_name("other"))).table("Accuracy on the single pass")[1][10].endswith("refuted")
    assert "CLAIMED, NOT PROVED: ε = 1.25" in card(found)


def test_what_was_found_about_privacy_is_not_about_a_kind_of_that_name(path):
    found = scores()
    found["certificates"]["kinds"][1]["name"] = "privacy"
    for summary in ("certified_accuracy", "largest_radius"):
        found["certificates"][summary]["privacy"] = found["certificates"][summary].pop("corrected")
    assert "certified, privacy rule proved" in page(audited(path, of_release("refuted"), found=found)).prose


def test_a_broken_certificate_no_longer_leads(path):
    found = scores()
    found["under_attack"] = [e for e in found["under_attack"] if e["protocol"]["name"] == "adaptive"]
    found["gaps"] = {"single_pass": [], "vote": []}
    for kind in found["certificates"]["kinds"]:
        kind |= {"function": "single_pass", "status": "proved"}
    leads = "proved to stay so, whatever the attack"
    assert leads in page(make(path.with_name("before"), found)).prose
    broken = [of_certificates("refuted", kind, broken=1) for kind in ("published", "corrected")]
    prose = page(audited(path, *broken, found=found)).prose
    assert leads not in prose
    assert "proved to stay right" not in prose


def test_every_finding_is_a_row(path):
    findings = of_release("refuted"), of_many_runs("consistent", 1.1), of_certificates("refuted", broken=7)
    rows = page(audited(path, *findings, of_certificates("consistent", "unheard of"))).table(OVERVIEW)[1:]
    assert rows == [
        ["one release: perturbed inputs", "privacy", "refuted", "ε ≥ 4.91 δ = 0, 95% confidence",
         "ε = 1.25 δ = 0, replace-one refuted", "5%", "evidence/release.json"],
        ["many trainings", "privacy", "consistent",
         "ε ≥ 0.55 δ = 0, 95% confidence ε ≥ 1.1 δ = 0, 95% confidence, under an assumption",
         "ε = 1.25 δ = 0, replace-one refuted", "5%", "evidence/many_runs.json"],
        ["attacks inside certified balls", "certificates by the corrected rule", "refuted",
         "7 of 50 balls broken 140 certified", "refuted", "5%", "evidence/certificates.json"],
        ["attacks inside certified balls", "certificates by the unheard of rule", "consistent",
         "0 of 50 balls broken 140 certified", "–", "5%", "evidence/certificates.json"],
    ]  # fmt: skip


@pytest.mark.parametrize(("claimed", "held"), [(1.25, "ε = 1.25"), (2.5, "ε = 2.5")])
def test_membership_is_held_against_the_epsilon_for_replacing(path, claimed, held):
    found = page(audited(path, of_membership("consistent", claimed=claimed)))
    assert found.table(OVERVIEW)[1][4] == f"{held} δ = 1e-05, replace-one claimed, not proved"
    assert f"most that {held} allows (claimed, not proved)" in found.prose
    assert found.table("Members found at thresholds")[1] == ["0.01", "4.4% [4.0, 5.0]", "1.1% [0.9, 1.3]"]


def test_a_claim_that_nothing_tested_is_named_beside_those_that_were(path):
    found = page(audited(path, of_membership("consistent"), of_certificates("consistent", attacked=0)))
    assert found.table(CLAIMS)[1:] == [
        ["privacy", "consistent", ""],
        ["certificates by the published rule", "not tested", "no instrument was used on it"],
        ["certificates by the corrected rule", "not tested", "no input has a certified ball"],
    ]
    assert "Nothing was refuted here. Not tested: certificates by the published rule (no instrument" in found.prose
    assert [row[2] for row in found.table(OVERVIEW)[1:]] == ["consistent", "not tested"]
    assert "chip not-tested" in found.classes()


def test_where_nothing_is_claimed_membership_has_no_ceiling(path):
    none = {**scores(), "guarantee": guarantee("none")}
    found = page(audited(path, of_membership("consistent", claimed=None), found=none))
    assert "No claim of this run was tested." in found.prose
    assert "Audits not tested: what membership found about privacy" in card(found)
    assert found.table(OVERVIEW)[1][4] == "nothing is claimed"
    assert "most that" not in found.prose
    assert "ceiling" not in found.prose
    assert "ε of the guarantee" not in found.prose


def test_every_finding_tells_its_threat_model_attack_statement_and_numbers(path):
    run = make(path)
    run.write("audit", audit_of_everything())
    found = page(run)
    for one in run.read("audit")["findings"]:
        for key in ("statement", "claim", "threat_model", "attack"):
            assert one[key] in found.prose
    assert "told apart rightly 1,999" in found.prose
    assert "false positives 11; true positives 160; direction without" in found.prose
    assert "the noise is as its proof says" in found.prose
    assert "its interval 0.848, 0.858" in found.prose
    assert "broken by madry 0" in found.prose


def test_the_figures_are_those_of_the_findings(path):
    everything = page(audited(path, *audit_of_everything()["findings"])).prose
    release = page(audited(path.with_name("release"), of_release("refuted"))).prose
    certificates = page(audited(path.with_name("certificates"), of_certificates("consistent"))).prose
    bars, histogram, curve = "ε of the guarantee (refuted)", "models trained on its neighbour", "true-positive rate"
    assert all(words in everything for words in (bars, histogram, curve, "Faint bars hold under an assumption"))
    assert bars in release
    assert not any(words in release for words in (histogram, curve, "Faint"))
    assert not any(words in certificates for words in ("ε of the guarantee", histogram, curve))


def test_audits_come_after_the_flags(path):
    prose = page(audited(path, of_release("consistent", 0.5))).prose
    assert prose.index("Sanity flags") < prose.index(OVERVIEW) < prose.index("Accuracy against radius")


def test_hostile_findings_are_only_words(path):
    hostile = "</text><script>$alert(1)</script><b onclick=alert(2)>"
    one = of_release("refuted")
    one |= dict.fromkeys(("statement", "claim", "threat_model", "attack", "evidence"), hostile)
    one["details"] |= {"release": hostile, "source": hostile}
    one["details"]["bounds"][0] |= {"name": hostile, "assumes": hostile}
    strange = {**of_many_runs("consistent"), "instrument": hostile}
    runs = [audited(path, one, strange, of_certificates("refuted", hostile)), make(path.with_name("calm"))]
    for text in (page(runs[0]).text, page(*runs).text):
        assert "<script" not in text
        assert "<b onclick" not in text
        assert "&lt;script&gt;$alert(1)" in text


def test_an_audit_of_another_training_is_refused_with_the_command(path):
    run = make(path)
    run.write("audit", {**audit(of_release("refuted")), "training_hash": "f" * 12})
    words = r"audit\.json is of configuration f{12}, the run is 0123456789ab\..*audit again: `stobatch audit .*my-run`"
    with pytest.raises(RunError, match=words):
        page(run)
