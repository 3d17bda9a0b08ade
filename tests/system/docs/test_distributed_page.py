"""The page on many processes: its commands run as written, its numbers are those of the record."""

from __future__ import annotations

import importlib.util
import json
import re
import statistics
import sys
from pathlib import Path
from types import ModuleType

import pytest
from support.page_blocks import blocks_of
from support.pages import ROOT, run_shell

PAGE = (ROOT / "docs" / "distributed.md").read_text()
RECORD = json.loads((ROOT / "benchmarks" / "distributed" / "measured.json").read_text())


def model() -> ModuleType:
    path = ROOT / "benchmarks" / "distributed" / "model.py"
    spec = importlib.util.spec_from_file_location("scaling_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["scaling_model"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_commands_run_as_written_and_give_the_same_bits(tmp_path: Path) -> None:
    commands = [block.code for block in blocks_of(ROOT / "docs" / "distributed.md") if block.mark == "run by"]
    assert len(commands) == 2
    doctor, *others = "".join(commands).splitlines()
    assert doctor == "stobatch doctor --only gloo", "which test_doctor_processes.py runs"
    said = run_shell("\n".join(others), tmp_path)
    assert "differ" not in said
    assert said.count("proved") >= 3
    one, two = (json.loads((tmp_path / "runs" / name / "plan.json").read_text()) for name in ("one", "two"))
    assert one == two
    assert json.loads((tmp_path / "runs" / "two" / "training.json").read_text())["processes"] == 2


def test_measured_steps_and_the_model_are_those_of_the_record() -> None:
    scaling = model()
    wire, strong = scaling.Wire.fitted(RECORD["all_reduce"]), RECORD["strong"]
    alone, size = statistics.median(strong["1"]["seconds"]), strong["2"]["message_bytes"]
    repeated = statistics.median(scaling.once(strong[w]) for w in strong if w != "1")
    rows = re.findall(r"^\| (\d+) \| ([\d.]+) s \| ([\d.]+) s \| (\d+)% \|", PAGE, re.M)
    assert [int(row[0]) for row in rows] == [1, 2, 4, 8, 16]
    for processes, measured, modelled, efficiency in rows:
        n, seconds = int(processes), statistics.median(strong[processes]["seconds"])
        assert float(measured) == pytest.approx(seconds, abs=0.051)
        expected = (alone - repeated) / n + repeated + wire.seconds(size, n)
        assert float(modelled) == pytest.approx(expected, abs=0.051)
        assert float(efficiency) == pytest.approx(100 * alone / n / seconds, abs=0.51)
    assert f"{wire.bandwidth / 1e9:.1f} GB/s" in PAGE


def test_steps_on_many_gpus_are_those_of_the_model() -> None:
    import numpy as np

    scaling = model()
    assumed = scaling.Wire(20e-6, 20e9)
    exact, rounded = (RECORD["strong"]["2"][name] for name in ("message_bytes", "gradient_bytes"))

    def step(precision: str, devices: int, size: int) -> float:
        found = sorted(
            (row["batch"], statistics.median(row["seconds"])) for row in RECORD["gpu"] if row["precision"] == precision
        )
        batches, seconds = zip(*found, strict=True)
        return 1e3 * (np.interp(scaling.TOTAL / devices, batches, seconds) + assumed.seconds(size, devices))

    rows = re.findall(r"^\| (\d+) \| ([\d,]+) ms(?:, ([\d.]+)x)? \| (?:(\d+)%)? ?\| (\d+) ms \|", PAGE, re.M)
    assert [int(row[0]) for row in rows] == [1, 8, 32, 128]
    for devices, plain, faster, _, mixed in rows:
        expected = step("float32", int(devices), exact)
        assert float(plain.replace(",", "")) == pytest.approx(expected, abs=0.51)
        assert float(mixed) == pytest.approx(step("bfloat16", int(devices), rounded), abs=0.51)
        if faster:
            assert float(faster) == pytest.approx(step("float32", 1, exact) / expected, rel=0.03)


def test_the_throughput_is_that_of_the_record() -> None:
    record = (ROOT / "benchmarks" / "results" / "2026-11-15-distributed.txt").read_text()
    published, sound = (
        re.search(rf"^{name}.*per core ([\d.]+) \(rounds ([\d., ]+)\)", record, re.M) for name in ("published", "sound")
    )
    assert published is not None
    assert sound is not None
    rounds = sorted(float(value) for value in published[2].split(", "))
    assert f"do {published[1]} of twice the work of one (rounds {rounds[0]:.2f} to {rounds[-1]:.2f})" in PAGE
    assert f"network: {sound[1]} (" in PAGE


def test_the_recipes_gave_the_same_numbers_in_one_and_two_processes() -> None:
    record = json.loads((ROOT / "results" / "distributed_mnist.json").read_text())
    assert [row["recipe"] for row in record] == ["paper.mnist", "sound.mnist"]
    for row, steps in zip(record, re.findall(r"the first (\d+)\s+and (\d+) steps", PAGE)[0], strict=True):
        two, one = row["runs"]
        assert (two["processes"], one["processes"]) == (2, 1)
        assert f"training.steps={steps}" in row["changes"]
        assert all(one[key] == two[key] for key in ("parameters_sha256", "test_accuracy", "epsilon", "status"))
        assert row["the_same"]
