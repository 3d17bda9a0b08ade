"""Raw training examples are read where a proof accounts for it, and nowhere else.

What is asked follows from the status of a method's guarantee. A proof by Poisson sampling is held to all of it. A
method that only claims privacy, or has none, may read its examples as often as it likes while it trains: the published
mechanism claims that every reading is of inputs under one fixed draw of noise, which no reading can contradict. Once
training is over nobody reads them.
"""

from __future__ import annotations

from pathlib import Path

import access
from bench import Finished, trained
from watched import SEARCH

from stobatch import RunConfig
from stobatch.dp.plan import Plan
from stobatch.methods import Method


def test_preparing_reads_no_example(proved: Plan, method: Method, config: RunConfig) -> None:
    assert not access.reads_of_preparation(method, config)


def test_each_release_reads_its_sample_and_nothing_else_reads(
    proved: Plan, method: Method, config: RunConfig, tmp_path: Path
) -> None:
    assert not access.unaccounted_reads(method, config, tmp_path / "run")


def test_samples_are_poisson_samples(proved: Plan, method: Method, config: RunConfig, tmp_path: Path) -> None:
    """Twelve samples; a false alarm has probability below 4e-9, and the entry's seed is fixed besides."""
    drawn = trained(method, config, tmp_path).drawn
    assert not access.unlike_poisson(drawn, *access.proof_by_sampling(proved))


def test_a_record_moves_the_releases_that_drew_it_within_bounds(
    proved: Plan, method: Method, config: RunConfig, tmp_path: Path
) -> None:
    assert not access.undue_influence(method, config, tmp_path)


def test_until_a_record_takes_part_nothing_depends_on_it(
    proved: Plan, method: Method, config: RunConfig, tmp_path: Path
) -> None:
    assert not access.early_parameters(method, config, tmp_path)


def test_an_empty_sample_is_released_as_noise(proved: Plan, method: Method, config: RunConfig) -> None:
    assert not access.silent_releases(method, config)


def test_after_training_nobody_reads_training_examples(finished: Finished) -> None:
    """Of any method: certificates, attacks and evaluations are about test examples; copies are searched for before."""
    assert finished.reads["train"], "this check sees nothing"
    after = {verb: reads for verb, reads in finished.reads.items() if verb != "train"}
    afterwards = {verb: [read for read in reads if read.release != SEARCH] for verb, reads in after.items()}
    assert afterwards.keys() >= {"attack", "evaluate"}
    assert not any(afterwards.values())
