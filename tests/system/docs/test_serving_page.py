"""What the page on serving says was measured is what the records say, and they say what is promised."""

from __future__ import annotations

import sys

from support.pages import ROOT

sys.path.insert(0, str(ROOT / "docs"))
import make_serving


def test_the_page_is_made_from_the_records() -> None:
    assert make_serving.PAGE.read_text() == make_serving.page()


def test_the_records_show_what_is_promised() -> None:
    load, soak, fuzz, votes = (make_serving.read(name) for name in ("load", "soak", "fuzz", "votes"))
    assert load["largest radius"]["share of the library's batches, by processor time"] >= 0.8
    assert votes["share of the library's draws, by processor time"] >= 0.8
    assert soak["wrong"] == 0
    assert soak["requests"] > 50_000
    assert soak["p99_over_p50"] < 5
    assert soak["memory_mb"]["last third"] < 1.02 * soak["memory_mb"]["first third"]
    assert fuzz["cases"] >= 100_000
    assert fuzz["num_findings"] == 0
