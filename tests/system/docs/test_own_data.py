"""The page about one's own data is run as written, and its table is what the accountant says."""

import re
from math import sqrt
from pathlib import Path

import pytest
from support.pages import ROOT, blocks, run_python

from stobatch.dp.accounting import noise_for

PAGE = ROOT / "docs" / "your-own-data.md"


def test_the_main_block_has_twenty_lines() -> None:
    _, main, *_ = blocks(PAGE)
    assert len(main.splitlines()) <= 21, "the title says 20, not counting the blank line after the imports"


@pytest.mark.slow
def test_the_page_runs_as_written(tmp_path: Path) -> None:
    said = run_python(PAGE, tmp_path)
    (epsilon,) = re.findall(r"^proved ε = ([\d.]+), δ = 1e-05 \(add-or-remove-one, per training example", said, re.M)
    assert 1.9 < float(epsilon) <= 2
    (right,) = re.findall(r"^right: (\d+)%$", said, re.M)
    proved = re.findall(r"^right, and proved to stay so at ([\d.]+): (\d+)%$", said, re.M)
    assert [radius for radius, _ in proved] == ["0.1", "0.2"]
    # Half of the labels would be right by chance; the made-up images are easy.
    assert 80 <= int(proved[1][1]) <= int(proved[0][1]) <= int(right)
    (by_votes,) = re.findall(r"^\['l2 0.25: (\d+)%', 'l2 0.5: (\d+)%'\]$", said, re.M)
    assert 80 <= int(by_votes[1]) <= int(by_votes[0])
    assert (tmp_path / "runs" / "mine" / "report.html").exists()


def test_the_table_of_noise_is_the_accountants() -> None:
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", PAGE.read_text(), re.M)
    assert len(rows) == 4
    for batch, steps, passes, *printed in rows:
        size, count = int(batch), int(steps)
        noise = noise_for(1.0, 1e-5, size / 60_000, count)
        assert round(size * count / 60_000) == int(passes)
        expected = (noise, noise / size, noise / size / sqrt(count))
        assert [float(number) for number in printed] == pytest.approx(expected, rel=4e-3)
