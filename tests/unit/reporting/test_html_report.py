"""The HTML report: self-contained, true to the records, and clear about what is only claimed."""

from __future__ import annotations

import re
import stat
from pathlib import Path
from typing import Any

import pytest
from made_runs import ATTACKS, RADII, audit_of_everything, config, guarantee, make, same_images, scores
from pages import page, shown

from stobatch.errors import RunError
from stobatch.evaluation import sanity
from stobatch.reporting import report
from stobatch.reporting.header import CHECKS
from stobatch.reporting.page import LIGHT
from stobatch.reporting.report import write_report
from stobatch.reporting.terminal import STATUS_STYLES
from stobatch.runs import Run
from stobatch.types import Status


def audited(path: Path) -> Run:
    run = make(path)
    run.write("audit", audit_of_everything())
    return run


@pytest.mark.parametrize("made", [make, audited])
def test_the_page_asks_for_nothing_outside_itself(path, made):
    found = page(made(path))
    assert "http:" not in found.text
    assert "https:" not in found.text
    policy = [a["content"] for tag, a in found.elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]
    for tag, attributes in found.elements:
        assert tag not in ("script", "link", "iframe", "object", "embed", "base")
        for key in ("src", "href", "xlink:href"):
            assert attributes.get(key, "#").startswith(("#", "data:image/png;base64,"))
    assert all(address.startswith("#") for address in re.findall(r"url\(['\"]?([^)]*)", found.text))
    assert "@import" not in found.text


def test_every_id_is_unique_and_every_reference_has_one(path):
    runs = [audited(path.with_name(name)) for name in ("a", "b")]
    found = page(*runs)
    ids = [attributes["id"] for _, attributes in found.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', found.text)) <= set(ids)


def test_the_top_says_who_the_run_is_and_what_the_gap_is(path):
    found = page(make(path))
    for words in ("my-run", "0123456789ab", "stobatch", "seed secret", "97.5%"):
        assert words in found.prose
    assert "At radius 0.2 (l∞ over [-1, 1]) on the single pass" in found.prose
    assert "right on 74.5% of 200 test images when attacked as published, and on 58.5%" in found.prose
    assert "flatters the model by 16.0 points (95% interval 11.0 to 21.0)" in found.prose


@pytest.mark.parametrize(
    ("gap", "words"),
    [
        ({"value": 0.01, "low": -0.02, "high": 0.04}, "1.0 points (95% interval -2.0 to 4.0), which may be chance"),
        (
            {"value": -0.2, "low": -0.3, "high": -0.1},
            "the published attacks do better by 20.0 points (95% interval 10.0 to",
        ),
    ],
)
def test_a_gap_that_is_none_is_not_called_one(path, gap, words):
    found = scores()
    found["gaps"]["single_pass"][1]["gap"] = gap
    assert words in page(make(path, found)).prose


@pytest.mark.parametrize("function", ["single_pass", "vote"])
@pytest.mark.parametrize("protocol", ["published", "adaptive"])
def test_every_attack_and_radius_stands_in_a_table_as_in_the_records(path, protocol, function):
    run = make(path)
    table = page(run).table(f"Accuracy under attack on the {function.replace('_', ' ')}, {protocol} protocol")
    entry = next(
        e for e in run.read("scores")["under_attack"] if (e["protocol"]["name"], e["function"]) == (protocol, function)
    )
    check_by_attack(table, entry["accuracy"], protocol)


@pytest.mark.parametrize(("rule", "status"), [("published", "claimed, not proved"), ("corrected", "proved")])
@pytest.mark.parametrize("protocol", ["published", "adaptive"])
def test_certified_at_the_attacked_input_has_its_own_tables(path, protocol, rule, status):
    run = make(path)
    found = page(run)
    table = found.table(f"Certified at the attacked input, {rule} rule {status}, vote, {protocol} protocol")
    entry = next(
        e for e in run.read("scores")["under_attack"] if (e["protocol"]["name"], e["function"]) == (protocol, "vote")
    )
    check_by_attack(table, entry["certified_at_attacked"][rule], protocol)
    assert "not that the clean image is safe" in found.prose


def check_by_attack(table: list[list[str]], records: list[dict[str, Any]], protocol: str) -> None:
    columns = [*ATTACKS[protocol], "worst"]
    assert table[0] == ["radius", *columns]
    expected = {(row["radius"], row["attack"]): shown(row) for row in records}
    for radius, row in zip(RADII, table[1:], strict=True):
        assert row == [f"{radius:g}", *(expected[radius, attack] for attack in columns)]


def test_the_overview_has_both_protocols_the_gap_and_what_is_certified_for_clean_inputs(path):
    run = make(path)
    found, recorded = page(run), run.read("scores")
    captions = [table for table in found.tables if table["caption"].startswith("All numbers are of the same 200")]
    headings, *rows = captions[1]["rows"]
    assert headings[4:] == ["certified, published rule claimed, not proved", "certified, corrected rule proved"]
    certified = recorded["certificates"]["certified_accuracy"]
    for place, row in enumerate(rows):
        gap = recorded["gaps"]["vote"][place]
        assert row[1:3] == [shown(gap["published"]), shown(gap["adaptive"])]
        assert row[3].startswith(f"{100 * gap['gap']['value']:.1f} points")
        assert row[4:] == [shown(certified[rule][place]) for rule in ("published", "corrected")]


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ("claimed", "CLAIMED, NOT PROVED: ε = 1.25"),
        ("proved", "proved: ε = 1.25"),
        ("refuted", "REFUTED: ε = 1.25"),
        ("void", "VOID: public seed (ε = 1.25 would be proved with secret seeds)"),
        ("none", "NO PRIVACY GUARANTEE"),
    ],
)
def test_the_guarantee_wears_its_status(path, status, words):
    found = page(make(path, {**scores(), "guarantee": guarantee(status)}))
    assert words in found.prose
    assert f"card {status}" in found.classes()
    assert not {f"card {other}" for other in Status if other != status} & found.classes()


@pytest.mark.parametrize("status", ["claimed", "proved"])
def test_a_public_seed_voids_the_guarantee_of_an_old_run_too(path, status):
    found = page(make(path, {**scores(), "guarantee": guarantee(status)}, config(seed=1)))
    assert f"VOID: public seed (ε = 1.25 would be {status} with secret seeds)" in found.prose
    assert "whoever has it can rebuild the noise and take it off" in found.prose
    assert "card void" in found.classes()
    assert "card proved" not in found.classes()


def test_void_is_amber() -> None:
    red, green, blue = (int(LIGHT["void"][place : place + 2], 16) for place in (1, 3, 5))
    assert red > green > blue
    assert STATUS_STYLES["void"] == "yellow"


def test_the_privacy_of_a_run_says_nothing_about_its_certificates(path):
    found = page(make(path, settings=config(seed=1)))
    assert "certified, corrected rule proved" in found.prose


def test_what_stands_side_by_side_is_of_the_images_that_all_have(path):
    found = {**scores(), "same_images": [same_images("single_pass", 150), same_images("vote", 50)]}
    seen = page(make(path, found))
    block = found["same_images"][1]
    (overview,) = [table for table in seen.tables if table["caption"].startswith("All numbers are of the same 50 test")]
    assert "clean accuracy 93.5%" in overview["caption"]
    for place, row in enumerate(overview["rows"][1:]):
        assert row[1:3] == [shown(block["attacked"][name][place]) for name in ("published", "adaptive")]
        assert row[4:] == [shown(block["certified"]["corrected"][place])]
    assert overview["rows"][0][4:] == ["certified, corrected rule proved"]
    above = seen.prose[: seen.prose.index("Privacy towards")]
    assert set(re.findall(r"\d+ test images", above)) == {"150 test images"}


def test_certificates_of_other_images_do_not_stand_beside_attacks(path):
    """Scores of an older version, whose certificates are of more images than its attacks."""
    old = {key: value for key, value in scores().items() if key != "same_images"}
    old["certificates"] = {**old["certificates"], "rows": 1000}
    seen = page(make(path, old))
    overview = [table for table in seen.tables if table["caption"].startswith("All numbers are of the same 200")][1]
    assert overview["rows"][0] == ["radius", "published protocol", "adaptive protocol", "gap"]
    rows = seen.table("Certified accuracy of clean inputs, 1000 test images.")
    sources = ["published rule where published comes from claimed, not proved"]
    assert rows[0][1:] == [*sources, "corrected rule where corrected comes from proved"]
    assert [row[2] for row in rows[1:]] == [
        shown(row) for row in old["certificates"]["certified_accuracy"]["corrected"]
    ]
    assert "certified, corrected rule (proved)" not in seen.text


def test_no_epsilon_is_shown_without_the_word_claimed(path):
    for found in (page(make(path)), page(make(path), make(path.with_name("other")))):
        for place in re.finditer(r"1\.25", found.prose):
            assert "claimed" in found.prose[place.start() - 40 : place.end() + 40].lower()
    assert "ε (claimed, not proved)" in found.prose


def test_certified_curves_are_drawn_by_status(path):
    found = scores()
    found["certificates"]["kinds"][0]["status"] = "refuted"
    text = page(make(path.with_name("refuted"), found)).text
    assert re.search(r"stroke-dasharray: [^;]*; stroke-dashoffset: 0; stroke: var\(--refuted\)", text)
    assert "certified, published rule (refuted)" in text
    text = page(make(path)).text
    assert re.search(r"stroke-dasharray: [^;]*; stroke-dashoffset: 0; stroke: var\(--claimed\)", text)
    assert not re.search(r"stroke-dasharray: [^;]*; stroke-dashoffset: 0; stroke: var\(--proved\)", text)
    assert "certified, published rule (claimed, not proved)" in text
    assert "certified, corrected rule (proved)" in text
    assert "radius, l∞ over [-1, 1]" in text


def test_a_hostile_name_is_only_words(tmp_path):
    name = "<script>alert(1)<&\"'>"
    found = scores()
    found["guarantee"]["objections"] = ["</ul><img src=x onerror=alert(2)>"]
    found["flags"][0] = {**found["flags"][0], "evidence": "<b onclick=alert(3)>"}
    settings = config()
    settings["config"]["method"]["name"] = "</text><script>$alert(4)"
    runs = [make(tmp_path / name, found, settings), make(tmp_path / "calm")]
    for text in (page(runs[0]).text, page(*runs).text):
        assert "<script" not in text
        assert "<img src=x" not in text
        assert "<b onclick" not in text
        assert "&lt;script&gt;alert(1)&lt;&amp;&#34;&#39;&gt;" in text


def test_errors_come_before_warnings_and_flags_say_everything(path):
    found = scores()
    error = {**found["flags"][0], "name": "a certified input was broken inside its radius", "level": "error"}
    found["flags"].append(error)
    prose = page(make(path, found)).prose
    assert prose.index("error: a certified input") < prose.index("warning: zero gradients")
    for key in ("evidence", "raised_if", "explanation", "remedy"):
        assert found["flags"][0][key] in prose


def test_without_flags_the_page_says_what_was_checked(path):
    prose = page(make(path, {**scores(), "flags": []})).prose
    assert "No flag was raised. Checked: more steps do not help;" in prose
    found = {**scores(("single_pass",)), "flags": [], "certificates": None}
    prose = page(make(path.with_name("bare"), found)).prose
    assert "Not checked in this evaluation: a certified input was broken inside its radius (needs" in prose


def test_the_checks_are_those_of_the_evaluation():
    assert list(CHECKS) == [rule.name for rule in sanity.RULES]


def test_a_run_without_certificates_votes_pictures_or_privacy_renders(path):
    found = {**scores(("single_pass",)), "certificates": None, "images": None, "guarantee": guarantee("none")}
    run = make(path, found)
    for kind in ("plan", "training"):
        (path / f"{kind}.json").unlink()
    prose = page(run).prose
    assert "no certificates to compare with" in prose
    assert "kept no pictures" in prose
    assert "NO PRIVACY GUARANTEE" in prose
    assert "certified, " not in prose


def test_votes_without_certificates_do_not_pass_for_proved_ones(path):
    prose = page(make(path, {**scores(), "certificates": None})).prose
    assert "Certified at the attacked input, corrected rule status not recorded" in prose
    assert " proved " not in prose.replace("not proved", "").split("Certified at the attacked input", 1)[1]


def test_one_protocol_alone_says_what_is_missing(path):
    for protocol, missing in (("published", "adaptive"), ("adaptive", "published")):
        found = scores()
        found["under_attack"] = [e for e in found["under_attack"] if e["protocol"]["name"] == protocol]
        found["gaps"] = {"single_pass": [], "vote": []}
        prose = page(make(path.with_name(protocol), found)).prose
        assert f"The {missing} protocol was not run, so the gap between them is unknown." in prose


def test_a_proved_certificate_of_the_attacked_function_leads(path):
    """Where no attack can change an answer, that is the news; a claimed certificate does not get there."""
    for status, leads in (("proved", True), ("claimed", False)):
        found = scores()
        found["under_attack"] = [e for e in found["under_attack"] if e["protocol"]["name"] == "adaptive"]
        found["gaps"] = {"single_pass": [], "vote": []}
        for kind in found["certificates"]["kinds"]:
            kind |= {"function": "single_pass", "status": status}
        prose = page(make(path.with_name(status), found)).prose
        assert ("proved to stay so, whatever the attack" in prose) is leads
        assert ("The published protocol was not run" in prose) is not leads


def test_certificates_in_other_units_get_their_own_axis_and_table(path):
    found = {**scores(), "norm": "l2"}
    seen = page(make(path, found))
    assert "radius, l2 over [-1, 1]" in seen.text
    assert "radius, l∞ over [-1, 1]" in seen.text
    rows = seen.table("Certified accuracy of clean inputs, 200 test images. Radius l∞")
    recorded = found["certificates"]["certified_accuracy"]["corrected"]
    assert rows[0][2] == "corrected rule where corrected comes from proved"
    assert [row[2] for row in rows[1:]] == [shown(row) for row in recorded]
    overview = next(table for table in seen.tables if table["caption"].startswith("All numbers"))
    assert not any("certified" in heading for heading in overview["rows"][0])


def test_certificates_made_after_the_evaluation_are_pointed_out(path):
    run = make(path)
    assert "certified since" not in page(run).prose
    run.write("certificates", {**run.read("certificates"), "rows": 100})
    assert "certified since" in page(run).prose


def test_how_it_was_measured_is_told(path):
    prose = page(make(path)).prose
    for words in ("what published means", "what adaptive means", "4,002", "cuda", "324.1 s", "training step"):
        assert words in prose
    assert "gradient steps, adaptive protocol 40" in prose
    assert "noise draws per gradient step on the vote as many as gradients need to agree" in prose
    assert "batch size m 2,499 Appendix P" in prose


def test_the_same_files_give_the_same_bytes(path):
    runs = [make(path), audited(path.with_name("other"))]
    first, second = (write_report(runs, path.with_name(name)).read_bytes() for name in ("1.html", "2.html"))
    assert first == second
    assert len(first) < 1_500_000


def test_a_run_that_was_not_evaluated_is_refused_with_the_command(tmp_path):
    run = Run(tmp_path / "run")
    with pytest.raises(RunError, match="is not a run"):
        page(run)
    run.write("config", config())
    with pytest.raises(RunError, match=r"has no scores yet\. Evaluate it first: `stobatch evaluate .*run`\."):
        page(run)
    run.write("scores", {"training_hash": "0123456789ab", "attacked_accuracy": []})
    with pytest.raises(RunError, match=r"another version of stobatch\. Evaluate again"):
        page(run)
    with pytest.raises(RunError, match="no run to report on"):
        write_report([], tmp_path / "report.html")


def test_scores_of_another_configuration_are_refused(path):
    run = make(path)
    run.write("config", {**config(), "training_hash": "f" * 12})
    with pytest.raises(RunError, match=r"is of configuration 0123456789ab, the run is ffffffffffff"):
        page(run)


def test_the_file_can_be_read_by_others_and_a_failed_write_leaves_the_old_one(path, monkeypatch):
    out = path.parent / "new" / "report.html"
    run = make(path)
    before = write_report([run], out).read_bytes()
    assert stat.S_IMODE(out.stat().st_mode) == 0o644

    def full_disk(path: Path, write: Any) -> None:
        from stobatch.files import write_atomically

        def half(file: Any) -> None:
            file.write(b"<!doc")
            raise OSError(28, "No space left on device")

        write_atomically(path, half)

    monkeypatch.setattr(report, "write_atomically", full_disk)
    with pytest.raises(RunError, match="No space left on device"):
        write_report([run], out)
    assert out.read_bytes() == before
    assert [file.name for file in out.parent.iterdir()] == ["report.html"]


def test_nothing_private_is_opened(path, monkeypatch):
    run = audited(path)
    run.write("noise", {}, private=True)
    opened = []
    original = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: opened.append(self) or original(self))
    page(run)
    assert opened
    assert not any("private" in file.parts for file in opened)


@pytest.mark.parametrize(
    ("method", "radius"),
    [
        ({"name": "sound", "radius": 0.5}, 0.6),
        ({"name": "sound", "radius": 0.05}, 0.05),
        ({"name": "sound", "radius": 0.06}, 0.2),
        ({"name": "sound", "radius": 1.5}, 0.6),
        ({"name": "vanilla", "train_attack_radius": 0.15}, 0.2),
        ({"name": "plain"}, 0.2),
    ],
)
def test_the_headline_is_at_the_radius_trained_for(path, method, radius):
    settings = config()
    settings["config"]["method"] = method
    assert f"At radius {radius:g} (l∞ over [-1, 1]) on the single pass" in page(make(path, settings=settings)).prose


def test_a_radius_trained_for_in_another_unit_leads_nowhere(path):
    settings = config()
    settings["config"]["method"] = {"name": "sound", "radius": 0.6}
    assert "At radius 0.2 (l2 over [-1, 1])" in page(make(path, {**scores(), "norm": "l2"}, settings)).prose


def without_noise() -> dict[str, Any]:
    found = scores(("single_pass",))
    found["settings"] |= {"vote_draws": 300}
    for kind in found["certificates"]["kinds"]:
        kind["function"] = "single_pass"
    for entry in found["under_attack"]:
        entry["protocol"]["meaning"] = "attacks on it, in expectation over its fresh noise, with restarts"
    return found


def test_nothing_is_said_about_noise_where_there_is_none(path):
    quiet, noisy = page(make(path, without_noise())).prose, page(make(path.with_name("noisy"))).prose
    assert "attacks on it, with restarts" in quiet
    assert "which has no noise" in quiet
    for words in ("fresh noise", "fixed noise", "draws"):
        assert words not in quiet
    assert "with its fixed noise" in noisy
    bare = {**without_noise(), "certificates": None}
    assert "with its fixed noise where it has any" in page(make(path.with_name("bare"), bare)).prose


def test_no_table_has_an_empty_column(path):
    runs = [make(path), audited(path.with_name("audited")), make(path.with_name("quiet"), without_noise())]
    for found in map(page, runs):
        assert found.tables
        for table in found.tables:
            for column in list(zip(*table["rows"][1:], strict=True))[1:]:
                assert {cell.strip() for cell in column} - {"", "–"}, table["caption"]


def test_the_guarantee_is_two_lines_what_speaks_against_it_and_a_fold(path):
    found = scores()
    found["guarantee"]["objections"] = ["one draw of noise is shared", "labels are bare"]
    text = page(make(path, found)).text
    card = text[text.index('<section class="card claimed">') :].partition("</section>")[0]
    shown, fold = card.split("<details>")
    assert "CLAIMED, NOT PROVED: ε = 1.25" in shown
    assert "must not be relied on as a guarantee" in shown
    assert "Against it: one draw of noise is shared (and 1 more)" in shown
    assert "the bound is enforced" not in shown
    assert "In full: 1 assumption, 2 objections, 0 audits" in fold
    for words in ("the bound is enforced", "labels are bare", "replace-one neighbours, per training tuple"):
        assert words in fold
