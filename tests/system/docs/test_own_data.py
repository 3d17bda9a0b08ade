"""The page about one's own data keeps its title's promise, and its table is what the accountant says."""

import re
from math import sqrt

import pytest
from support.pages import ROOT, blocks

from stobatch.dp.accounting import noise_for

PAGE = ROOT / "docs" / "your-own-data.md"


def test_the_main_block_has_twenty_lines() -> None:
    _, main, *_ = blocks(PAGE)
    assert len(main.splitlines()) <= 21, "the title says 20, not counting the blank line after the imports"


def test_the_table_of_noise_is_the_accountants() -> None:
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", PAGE.read_text(), re.M)
    assert len(rows) == 4
    for batch, steps, passes, *printed in rows:
        size, count = int(batch), int(steps)
        noise = noise_for(1.0, 1e-5, size / 60_000, count)
        assert round(size * count / 60_000) == int(passes)
        expected = (noise, noise / size, noise / size / sqrt(count))
        assert [float(number) for number in printed] == pytest.approx(expected, rel=4e-3)
