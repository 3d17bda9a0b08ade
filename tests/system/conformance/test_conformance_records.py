"""Every method leaves the same records: one list of files, of keys and of columns, and nothing private among them."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from bench import Finished, train_of
from safetensors.torch import load_file
from torch import Tensor

from stobatch import RunConfig, Status
from stobatch.dp.plan import Plan

HEAD = {"schema", "version"}
KEYS = {
    "config": {"training_hash", "content_hash", "config", "dataset"},
    "plan": {"guarantee", "sizes", "rows"},
    "training": {
        *("steps", "device", "processes", "torch"),
        *("test_accuracy", "test_examples", "history_of", "history"),
        *("weights_sha256", "data", "network", "private_files"),
    },
    "manifest": {"training_hash", "weights_sha256", "data", "made", "files"},
    "attack": {
        *("training_hash", "weights_sha256", "settings", "guarantee", "protocol", "function", "attacks", "rows"),
        *("records", "clean_accuracy", "accuracy", "certified_at_attacked"),
    },
    "scores": {
        *("training_hash", "weights_sha256", "settings", "rows", "norm", "input_range", "guarantee"),
        *("clean_accuracy", "accuracy_by_class", "under_attack", "gaps", "same_images", "flags"),
        *("lowest_input", "probe", "test_records"),
        *("images", "certificates"),
    },
    "certificates": {
        *("config_hash", "training_hash", "weights_sha256", "settings", "rows", "seconds", "kinds"),
        *("verified_accuracy", "certified_accuracy", "largest_radius", "chosen"),
    },
}
"""What stands in each public document. A method may add to what its training says of itself, and to nothing else."""
MAY_ADD = {"training"}
COLUMNS = {
    "certify": {"index", "label", "prediction", "abstain"},
    "attack": {"index", "label", "prediction", "fgsm@0.05", "fgsm@0.05/distance"},
    "probe": {"index", "label", "one_step", "usual_steps", "more_steps", "widest"},
}
"""What every table has, one row per test example; of attacks, those on a single pass."""
GUARANTEE = {"status", "neighbours", "unit", "source", "assumptions", "objections", "audits"}
OWN_PRIVATE = {
    *("seeds.json", "data.json", "measurements.json", "commitment_key.json"),
    *("checkpoints", "images.safetensors"),
}


def documents(run: Path) -> dict[str, dict[str, Any]]:
    return {file.stem: json.loads(file.read_text()) for file in run.glob("*.json")}


def public_files(run: Path) -> list[Path]:
    return [file for file in run.rglob("*") if file.is_file() and "private" not in file.relative_to(run).parts]


def tables(run: Path) -> dict[str, list[pyarrow.Table]]:
    """By verb."""
    found: dict[str, list[pyarrow.Table]] = {}
    for part in run.glob("records/*/rows-*.parquet"):
        found.setdefault(part.parent.name.partition("-")[0], []).append(pyarrow.parquet.read_table(part))
    return found


def test_the_same_files(finished: Finished) -> None:
    certified = {"certificates.json", "records/certify"} if finished.certifies else set()
    names = set()
    for file in public_files(finished.path):
        name = file.relative_to(finished.path)
        names.add(f"records/{name.parts[1].partition('-')[0]}" if name.parts[0] == "records" else str(name))
    assert names == {
        *(f"{kind}.json" for kind in KEYS.keys() - {"certificates"}),
        *("model.safetensors", "records/attack", "records/probe"),
        *certified,
    }
    assert {file.name for file in (finished.path / "private").iterdir()} >= OWN_PRIVATE


def test_the_same_keys(finished: Finished) -> None:
    for kind, document in documents(finished.path).items():
        assert document["schema"] == f"stobatch.{kind}"
        missing, more = (KEYS[kind] | HEAD) - document.keys(), document.keys() - KEYS[kind] - HEAD
        assert not missing, (kind, missing)
        assert not more or kind in MAY_ADD, (kind, more)


def test_what_a_training_says(finished: Finished, config: RunConfig, plan: Plan) -> None:
    training = documents(finished.path)["training"]
    assert training["steps"] == config.training.steps
    assert not [key for key in training if "seconds" in key or "memory" in key], "they depend on the samples"
    assert [row["step"] for row in training["history"]] == [6, 12]
    for row in training["history"]:
        assert 0 <= row["test_accuracy"] <= 1
        assert len(row) == 3, "the step, the accuracy on test examples, and one public number of the method's choice"
    assert 0 <= training["test_accuracy"] <= 1
    assert training["test_examples"] == min(config.training.monitor_examples, config.data.test_limit or 10_000)
    if plan.guarantee.status is Status.PROVED:
        assert training["accounted_steps"] == config.training.steps


def test_the_same_columns(finished: Finished, config: RunConfig) -> None:
    found = tables(finished.path)
    for verb, wanted in COLUMNS.items():
        if verb != "certify" or finished.certifies:
            assert any(set(table.column_names) >= wanted for table in found[verb]), verb
    tests = config.data.test_limit
    assert tests is not None
    for table in (table for each in found.values() for table in each):
        assert {"index", "label"} <= set(table.column_names)
        assert table["index"].to_pylist() == list(range(len(table)))
        assert len(table) in (tests, config.evaluation.vote_limit)
        nested = [field.name for field in table.schema if pyarrow.types.is_nested(field.type)]
        assert not nested, "a cell is one number; pixels have no place in a table"


def guarantees(value: Any) -> Iterator[dict[str, Any]]:
    """Every guarantee in a document, wherever it stands."""
    if isinstance(value, dict):
        if value.keys() >= {"status", "neighbours"}:
            yield value
        for inner in value.values():
            yield from guarantees(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from guarantees(inner)


def mislabelled(guarantee: dict[str, Any]) -> list[str]:
    """Keys of a written guarantee that are not its own: above all an ε that does not say whose it is."""
    status = guarantee["status"]
    budget = set() if status == Status.NONE else {f"{status}_epsilon", f"{status}_delta"}
    return sorted((guarantee.keys() - HEAD) ^ (GUARANTEE | budget))


def test_no_epsilon_without_its_status(finished: Finished, plan: Plan) -> None:
    for kind, document in documents(finished.path).items():
        for guarantee in guarantees(document):
            assert guarantee["status"] == plan.guarantee.status
            assert not mislabelled(guarantee), kind
        bare = [key for key in document if key in ("epsilon", "delta")]
        assert not bare, kind
    assert {kind for kind, document in documents(finished.path).items() if list(guarantees(document))} == {
        *("plan", "attack", "scores")
    }


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"status": "proved", "epsilon": 1.0}, ["epsilon", "proved_delta", "proved_epsilon"]),
        ({"status": "none", "none_epsilon": 1.0}, ["none_epsilon"]),
        ({"status": "claimed", "proved_epsilon": 1.0, "proved_delta": 0.0}, None),
    ],
)
def test_budgets_with_another_label_are_caught(change: dict[str, Any], said: list[str] | None) -> None:
    found = mislabelled({**dict.fromkeys(GUARANTEE, ""), **change})
    assert found
    assert said is None or found == said


def test_private_things_are_for_their_owner(finished: Finished) -> None:
    private = finished.path / "private"
    for path in (private, *private.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def hidden_in(public: Tensor, private: Tensor) -> bool:
    """Whether the first private values stand in a row in the public ones, up to their sign and a common scale."""
    wanted, values = private.flatten().double()[:8], public.flatten().double()
    if min(len(wanted), len(values)) < 8:
        return False
    windows = values.unfold(0, 8, 1)
    alike = torch.nn.functional.cosine_similarity(windows, wanted[None], dim=1, eps=1e-300)
    return bool((alike.abs() > 1 - 1e-9).any())


def test_the_search_finds_what_is_hidden() -> None:
    public, private = torch.randn(300), torch.randn(40)
    assert not hidden_in(public, private)
    public[100:140] = -0.01 * private
    assert hidden_in(public, private)


def test_nothing_public_holds_the_seed_the_noise_or_training_pixels(finished: Finished, config: RunConfig) -> None:
    train, contents = train_of(config), {file: file.read_bytes() for file in public_files(finished.path)}
    root = int(json.loads((finished.path / "private" / "seeds.json").read_text())["root"])
    secrets = [str(root).encode(), f"{root:x}".encode(), root.to_bytes(16, "little"), root.to_bytes(16, "big")]
    secrets.append(train.fingerprint().encode())
    # Some rows of pixels in the middle of an image, as floats and as bytes: blank borders say nothing.
    middle = train.inputs[:, :, 2:6].contiguous()
    as_bytes = ((middle + 1) * 127.5).round().to(torch.uint8)
    secrets += [image.numpy().tobytes() for kind in (middle, as_bytes) for image in kind]
    noise = [value for file in (finished.path / "private").glob("*.safetensors") for value in load_file(file).values()]
    secrets += [value.flatten()[:4].numpy().tobytes() for value in noise if value.is_floating_point()]
    drawn = [number for value in noise if value.is_floating_point() for number in value.flatten()[:20].tolist()]
    secrets += [repr(number).encode() for number in drawn if number]
    for file, content in contents.items():
        assert not any(secret in content for secret in secrets), file
    for name, weight in load_file(finished.path / "model.safetensors").items():
        assert not any(hidden_in(weight, private) for private in noise), name
