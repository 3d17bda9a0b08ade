"""What proofs and code say of audits is what the records say, and the paper map lists what is registered."""

import json
import re

import pytest
from support.pages import ROOT

from stobatch import paper

GUARANTEES = ROOT / "docs" / "guarantees"


def finding(name: str, instrument: str) -> dict:
    records = {record["name"]: record for record in json.loads((ROOT / "results" / "audits.json").read_text())}
    (found,) = [found for found in records[name]["findings"] if found["instrument"] == instrument]
    return found


@pytest.mark.parametrize(
    "page",
    [
        GUARANTEES / "published-privacy.md",
        GUARANTEES / "audits.md",
        ROOT / "src" / "stobatch" / "published" / "plan.py",
    ],
    ids=lambda page: page.name,
)
def test_the_published_mechanisms_audit_is_quoted(page) -> None:
    found = finding("audit-published", "many_runs")["details"]["bounds"][0]["epsilon_at_least"]
    assert found > 5
    assert f"ε >= {found:.2f}" in page.read_text()


def test_membership_is_quoted() -> None:
    details = finding("audit-published_members", "membership")["details"]
    words = " ".join((GUARANTEES / "audits.md").read_text().split())
    assert f"AUROC of {details['auroc']:.3f} and show ε >= {details['bounds'][0]['epsilon_at_least']:.1f}" in words


def test_the_paper_map_lists_exactly_what_is_registered() -> None:
    listed = dict(re.findall(r"^\| ([A-Z][^|]+?) \| `([^`]+)`", (ROOT / "docs" / "paper-map.md").read_text(), re.M))
    assert listed == {name: item.code for name, item in paper.items().items()}


def test_every_numbered_item_of_the_paper_is_registered() -> None:
    wanted = ["Definition 1", "Corollary 1"]
    wanted += [f"Lemma {n}" for n in range(1, 6)] + [f"Theorem {n}" for n in range(1, 6)]
    wanted += [f"Algorithm {n}" for n in range(1, 5)] + [f"Eq. {n}" for n in range(1, 44)]
    wanted += [f"Appendix {letter}" for letter in "BCNOP"]
    assert [name for name in wanted if name not in paper.items()] == []
