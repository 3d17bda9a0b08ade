"""Ways to tamper with a finished run, each by name, and what an attacker does who mends the manifest afterwards.

`TAMPERINGS` change files of a copy of the run; some take files from another run of the same settings. An attacker who
may write everything can also put the new digests into the manifest (`mend_manifest`): then only what contradicts itself
is noticed, and the names in `ONLY_SIGNED` need a signature.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

import stobatch
from stobatch.files import CONTENT, content_sha256, sha256_of
from stobatch.runs import Run, public_files
from stobatch.settings import content_hash
from stobatch_recipes import recipe

Tampering = Callable[[Path, Path], None]

SMALL: dict[str, Any] = {
    "data.train_limit": 600,
    "data.test_limit": 60,
    "method.expected_batch_size": 100,
    "model.architecture": "conv 4 5/3, relu, linear",
    "training.steps": 6,
    "training.monitor_every": 2,
    "certification.limit": 40,
    "evaluation.radii": [0.01, 0.05],
    "evaluation.adaptive_attacks": ["fgsm", "madry"],
    "evaluation.protocols": ["published", "adaptive"],
    "evaluation.attack_steps": 2,
    "evaluation.adaptive_steps": 2,
    "evaluation.limit": 50,
    "evaluation.num_images": 2,
    "canaries.num": 200,
    "audit.num_inputs": 10,
    "audit.attack_steps": 2,
    "audit.restarts": 1,
    "machine.threads": 1,
    "machine.checkpoint_every": 3,
    "seed": None,
}


def make_run(out: Path) -> Path:
    """A small run of the sound method with secret seeds, through every verb."""
    stobatch.train(recipe("demo").override_all(SMALL), out, quiet=True)
    stobatch.certify(out, quiet=True)
    stobatch.evaluate(out, quiet=True)
    stobatch.attack(out, quiet=True)
    stobatch.audit(out, quiet=True)
    stobatch.report([out])
    return out


def mend_manifest(run: Path) -> None:
    """What an attacker does who may write everything: digests, sizes and copies of what stands in other files."""
    path = run / "manifest.json"
    if not path.exists():
        return
    try:
        document = json.loads(path.read_bytes())
        entries = document["files"]
    except (ValueError, KeyError, TypeError):
        return
    names = set(public_files(Run(run)))
    document["files"] = {
        name: {"sha256": sha256_of(run / name), "size": (run / name).stat().st_size} for name in sorted(names)
    }
    if document["files"].keys() == entries.keys():
        training = json.loads((run / "training.json").read_bytes())
        document["data"] = training.get("data")
    path.write_text(json.dumps(document))


def edit(file: str, change: Callable[[Any], object]) -> Tampering:
    """Change a JSON document in place."""

    def tamper(run: Path, other: Path) -> None:
        document = json.loads((run / file).read_bytes())
        change(document)
        (run / file).write_text(json.dumps(document, indent=2))

    return tamper


def put(file: str, *path: Any) -> Tampering:
    """Put the last of `path` where the others lead to."""

    def change(document: Any) -> None:
        *keys, last, value = path
        for key in keys:
            document = document[key]
        assert document[last] != value, (file, path)
        document[last] = value

    return edit(file, change)


def drop(file: str, *path: Any) -> Tampering:
    def change(document: Any) -> None:
        *keys, last = path
        for key in keys:
            document = document[key]
        del document[last]

    return edit(file, change)


def rows(verb: str, change: Callable[[dict[str, list[Any]]], object]) -> Tampering:
    """Change the first part of the verb's table; the attacker writes checksums and metadata as they should be."""

    def tamper(run: Path, other: Path) -> None:
        part = next(iter(sorted(run.glob(f"records/{verb}-*/rows-*.parquet"))))
        table = parquet.read_table(part)
        columns = table.to_pydict()
        change(columns)
        changed = pyarrow.table(columns)
        metadata = {**table.schema.metadata, CONTENT.encode(): content_sha256(changed).encode()}
        parquet.write_table(changed.replace_schema_metadata(metadata), part, write_page_checksum=True)

    return tamper


def at(column: str, row: int, value: Any) -> Callable[[dict[str, list[Any]]], object]:
    def change(columns: dict[str, list[Any]]) -> None:
        assert columns[column][row] != value
        columns[column][row] = value

    return change


def each_row(change: Callable[[list[Any]], list[Any]]) -> Callable[[dict[str, list[Any]]], object]:
    def changed(columns: dict[str, list[Any]]) -> None:
        for name, values in columns.items():
            columns[name] = change(values)

    return changed


def at_first(column: str, wanted: Callable[[Any], bool], value: Any) -> Callable[[dict[str, list[Any]]], object]:
    """In the first row where the column is as wanted."""

    def change(columns: dict[str, list[Any]]) -> None:
        columns[column][next(row for row, found in enumerate(columns[column]) if wanted(found))] = value

    return change


def other_answer(column: str, row: int) -> Callable[[dict[str, list[Any]]], object]:
    def change(columns: dict[str, list[Any]]) -> None:
        columns[column][row] = (columns[column][row] + 1) % 10

    return change


def first_right(column: str) -> Callable[[dict[str, list[Any]]], object]:
    """Say that the first wrong answer was right."""

    def change(columns: dict[str, list[Any]]) -> None:
        row = next(r for r, (a, b) in enumerate(zip(columns[column], columns["label"], strict=True)) if a != b)
        columns[column][row] = columns["label"][row]

    return change


def swap(*names: str) -> Tampering:
    """Files of another run of the same settings in place of these."""

    def tamper(run: Path, other: Path) -> None:
        for name in names:
            shutil.copyfile(other / name, run / name)

    return tamper


def swap_rows(verb: str) -> Tampering:
    def tamper(run: Path, other: Path) -> None:
        mine, theirs = (next(iter(sorted(r.glob(f"records/{verb}-*/rows-*.parquet")))) for r in (run, other))
        shutil.copyfile(theirs, mine)

    return tamper


def swap_table(verb: str, *documents: str) -> Tampering:
    """Documents of another run with the folders of rows that belong to them."""

    def tamper(run: Path, other: Path) -> None:
        swap(*documents)(run, other)
        for folder in other.glob(f"records/{verb}-*"):
            shutil.copytree(folder, run / "records" / folder.name, dirs_exist_ok=True)

    return tamper


def file(name: str, change: Callable[[Path], object]) -> Tampering:
    def tamper(run: Path, other: Path) -> None:
        path = next(iter(sorted(run.glob(name))))
        change(path)

    return tamper


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << (bit % 8)
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_in_the_middle(path: Path) -> None:
    flip(path, 8 * (path.stat().st_size // 2) + 3)


def flip_last(path: Path) -> None:
    flip(path, 8 * (path.stat().st_size - 2) + 1)


def another_promise(document: dict[str, Any]) -> None:
    """An edit that mends the hashes of the configuration, too."""
    document["config"]["method"]["epsilon"] = 0.5
    config = stobatch.RunConfig.from_dict(document["config"])
    document["training_hash"] = config.training_hash
    document["content_hash"] = content_hash({"config": document["config"], "dataset": document["dataset"]})


def scale_shares(document: dict[str, Any]) -> None:
    """A share whose value, count and interval fit each other."""
    share = document["certified_accuracy"]["bounds"][0]
    share.update(value=1.0, count=share["total"], low=0.9, high=1.0)


FINDING = ("findings", 0)
BOUND = (*FINDING, "details", "bounds", 0)
TABLE = ("under_attack", 0)

TAMPERINGS: dict[str, Tampering] = {
    # What was promised.
    "config: a smaller ε": put("config.json", "config", "method", "epsilon", 0.5),
    "config: a smaller ε, hashes mended": edit("config.json", another_promise),
    "config: a smaller δ": put("config.json", "config", "method", "delta", 1e-7),
    "config: another clipping norm": put("config.json", "config", "method", "clip_norm", 2.0),
    "config: smaller batches": put("config.json", "config", "method", "expected_batch_size", 10),
    "config: fewer steps": put("config.json", "config", "training", "steps", 3),
    "config: a public seed": put("config.json", "config", "seed", 1),
    "config: more records": put("config.json", "dataset", "num_train", 60000),
    "config: other data": put("config.json", "dataset", "name", "cifar10"),
    "config: another method": put("config.json", "config", "method", "name", "plain"),
    "config: another training hash": put("config.json", "training_hash", "0" * 12),
    "config: another content hash": put("config.json", "content_hash", "0" * 12),
    "config: no data set": drop("config.json", "dataset"),
    "config: of another run, deeper network": edit(
        "config.json", lambda d: d["config"]["model"].update(architecture="conv 8 5/3, relu, linear")
    ),
    "plan: a smaller ε": put("plan.json", "guarantee", "proved_epsilon", 0.1),
    "plan: a smaller δ": put("plan.json", "guarantee", "proved_delta", 1e-9),
    "plan: another status": put("plan.json", "guarantee", "status", "claimed"),
    "plan: no objections left out": put("plan.json", "guarantee", "assumptions", []),
    "plan: more records": put("plan.json", "sizes", "num_examples", 60000),
    "plan: more noise": edit(
        "plan.json", lambda d: next(r for r in d["rows"] if r["name"] == "noise multiplier").update(value=99.0)
    ),
    "plan: a row less": drop("plan.json", "rows", 3),
    # What was done.
    "training: fewer steps": put("training.json", "steps", 3),
    "training: fewer steps counted": put("training.json", "accounted_steps", 3),
    "training: more steps counted": put("training.json", "accounted_steps", 9),
    "training: steps not counted": drop("training.json", "accounted_steps"),
    "training: steps counted as text": put("training.json", "accounted_steps", "six"),
    "training: other weights named": put("training.json", "weights_sha256", "0" * 64),
    "training: no weights named": drop("training.json", "weights_sha256"),
    "training: more records": put("training.json", "data", "training_records", 60000),
    "training: other records": put("training.json", "data", "training_commitment", "0" * 64),
    "training: other test data": put("training.json", "data", "test_sha256", "0" * 64),
    "training: another name of the data": put("training.json", "data", "name", "cifar10"),
    "training: more parameters": put("training.json", "network", "parameters", 10),
    "training: another layer": put("training.json", "network", "layers", 1, "Tanh()"),
    "training: network said to be handed over": put("training.json", "network", "handed_over", True),
    "training: history turned round": edit("training.json", lambda d: d["history"].reverse()),
    "training: history cut": drop("training.json", "history", 2),
    "training: better accuracy on the way": put("training.json", "history", 2, "test_accuracy", 0.99),
    "training: another machine": put("training.json", "device", "cuda:0"),
    "training: private files of another run": put(
        "training.json", "private_files", "canary_scores.safetensors", "0" * 64
    ),
    "ledger: fewer steps": edit("private/ledger.json", lambda d: d.update(done=2)),
    "canary scores of another run": swap("private/canary_scores.safetensors"),
    "pictures of another run": swap("private/images.safetensors"),
    # The model.
    "weights: a bit": file("model.safetensors", flip_last),
    "weights: a bit in the middle": file("model.safetensors", flip_in_the_middle),
    "weights: cut": file("model.safetensors", cut),
    "weights: empty": file("model.safetensors", lambda path: path.write_bytes(b"")),
    "weights: of another run": swap("model.safetensors"),
    "weights and training of another run": swap("model.safetensors", "training.json"),
    "weights: removed": file("model.safetensors", Path.unlink),
    # Certificates.
    "certificates: a larger share": put("certificates.json", "certified_accuracy", "bounds", 0, "value", 0.99),
    "certificates: a larger share that fits": edit("certificates.json", scale_shares),
    "certificates: a larger count": put("certificates.json", "certified_accuracy", "bounds", 1, "count", 39),
    "certificates: a narrower interval": put("certificates.json", "certified_accuracy", "bounds", 0, "low", 0.17),
    "certificates: fewer rows": put("certificates.json", "rows", 20),
    "certificates: right more often": put("certificates.json", "verified_accuracy", "correct", "value", 0.99),
    "certificates: a larger radius": put("certificates.json", "largest_radius", "bounds", 0.9),
    "certificates: another status": put("certificates.json", "kinds", 0, "status", "claimed"),
    "certificates: fails more rarely": put("certificates.json", "kinds", 0, "failure_probability", 0.001),
    "certificates: another source": put("certificates.json", "kinds", 0, "source", "trust me"),
    "certificates: assumes less": put("certificates.json", "kinds", 0, "assumptions", []),
    "certificates: another norm": put("certificates.json", "kinds", 0, "norm", "l2"),
    "certificates: another table": put("certificates.json", "config_hash", "0" * 12),
    "certificates: of other weights": put("certificates.json", "weights_sha256", "0" * 64),
    "certificates: of another training": put("certificates.json", "training_hash", "0" * 12),
    "certificates of another run": swap("certificates.json"),
    "certificates of another run with their rows": swap_table("certify", "certificates.json"),
    "rows: a larger radius": rows("certify", at_first("radius", lambda r: r == 0.0, 0.05)),
    "rows: a radius nobody asked about": rows("certify", at_first("radius", lambda r: r == 0.01, 0.011)),
    "rows: a radius above all": rows("certify", at("radius", 0, 7.0)),
    "rows: a negative radius": rows("certify", at("radius", 0, -0.1)),
    "rows: a radius that is NaN": rows("certify", at("radius", 0, float("nan"))),
    "rows: another label": rows("certify", other_answer("label", 3)),
    "rows: a label out of range": rows("certify", at("label", 3, 17)),
    "rows: another answer": rows("certify", first_right("prediction")),
    "rows: abstains": rows("certify", at("abstain", 2, True)),
    "rows: one twice": rows("certify", each_row(lambda v: [v[0], *v[:-1]])),
    "rows: two exchanged": rows("certify", each_row(lambda v: [v[1], v[0], *v[2:]])),
    "rows: one less": rows("certify", each_row(lambda v: v[:-1])),
    "rows: one more": rows("certify", each_row(lambda v: [*v, v[-1]])),
    "rows: a gap in the index": rows("certify", at("index", 5, 50)),
    "rows: a column less": rows("certify", lambda columns: columns.pop("abstain")),
    "rows of another run": swap_rows("certify"),
    "rows: cut": file("records/certify-*/rows-*.parquet", cut),
    "rows: a bit": file("records/certify-*/rows-*.parquet", lambda path: flip(path, 8 * 120)),
    "rows: part renamed": file(
        "records/certify-*/rows-*.parquet", lambda p: p.rename(p.with_name("rows-00000001.parquet"))
    ),
    "rows: a part more": file(
        "records/certify-*/rows-*.parquet", lambda p: shutil.copyfile(p, p.with_name("rows-00000040.parquet"))
    ),
    # Attacks and evaluation.
    "attack: a larger share": put("attack.json", "accuracy", 0, "value", 0.99),
    "attack: a smaller ε": put("attack.json", "guarantee", "proved_epsilon", 0.1),
    "attack: an attack left out": edit("attack.json", lambda d: d["attacks"].pop()),
    "attack: another protocol": put("attack.json", "protocol", "name", "published"),
    "attacked rows: an answer put right": rows("attack", first_right("madry@0.05")),
    "attacked rows: a clean answer": rows("attack", first_right("prediction")),
    "attacked rows: a point outside its ball": rows("attack", at("madry@0.05/distance", 1, 0.5)),
    "attacked rows: an answer out of range": rows("attack", at("madry@0.05", 0, 10)),
    "attacked rows of another run": swap_rows("attack"),
    "scores: right more often": put("scores.json", "clean_accuracy", "value", 0.99),
    "scores: one class better": put("scores.json", "accuracy_by_class", 0, "value", 0.995),
    "scores: a larger share": put("scores.json", *TABLE, "accuracy", 0, "value", 0.99),
    "scores: a table left out": drop("scores.json", "under_attack", 0),
    "scores: a smaller gap": put("scores.json", "gaps", "single_pass", 0, "gap", "value", -0.5),
    "scores: flags": put("scores.json", "flags", [{"name": "all is well", "refutes": None}]),
    "scores: a smaller ε": put("scores.json", "guarantee", "proved_epsilon", 0.1),
    "scores: refuted": edit(
        "scores.json",
        lambda d: d["guarantee"].update(status="refuted", refuted_epsilon=1.0, refuted_delta=1e-5),
    ),
    "scores: an objection more": put("scores.json", "guarantee", "objections", ["none"]),
    "scores: an assumption less": drop("scores.json", "guarantee", "assumptions", 0),
    "scores: an audit that never was": put("scores.json", "guarantee", "audits", ["consistent: all fine"]),
    "scores: certificates of its own": put(
        "scores.json", "certificates", "certified_accuracy", "bounds", 0, "value", 0.99
    ),
    "scores: no certificates": put("scores.json", "certificates", None),
    "scores: another norm": put("scores.json", "norm", "l2"),
    "scores: another radius of the probe": put("scores.json", "probe", "radius", 0.02),
    "scores: more rows": put("scores.json", "rows", 5000),
    "scores: labels of the pictures": put("scores.json", "images", "labels", [0, 0]),
    "scores: answers to the pictures": put("scores.json", "images", "predictions", "clean", [9, 9]),
    "scores: of other weights": put("scores.json", "weights_sha256", "0" * 64),
    "scores of another run": swap("scores.json"),
    "scores: more steps of the attacks": put("scores.json", "settings", "adaptive_steps", 4000),
    # Audits.
    "audit: another verdict": put("audit.json", "verdict", "refuted"),
    "audit: a finding's verdict": put("audit.json", *FINDING, "verdict", "refuted"),
    "audit: a finding less": drop("audit.json", *FINDING),
    "audit: a bound": put("audit.json", *BOUND, "epsilon_at_least", 0.7),
    "audit of another run": swap("audit.json"),
    "evidence: a bound": put("evidence/one_run.json", *BOUND, "epsilon_at_least", 0.7),
    "evidence: a count": put("evidence/one_run.json", *BOUND, "details", "correct_guesses_of_each", [190, 39, 19]),
    "evidence: a verdict": put("evidence/one_run.json", *FINDING, "verdict", "refuted"),
    "evidence: another claim": put("evidence/one_run.json", *FINDING, "claim", "proved ε = 0.1"),
    "evidence: more confidence": put("evidence/one_run.json", *FINDING, "confidence", 0.9999),
    "evidence: no ball broken": put("evidence/certificates.json", *FINDING, "details", "certified", 4),
    "evidence: a ball broken": put("evidence/certificates.json", *FINDING, "details", "broken", 3),
    "evidence: more balls attacked": put("evidence/certificates.json", *FINDING, "details", "attacked", 5000),
    "evidence: removed": file("evidence/certificates.json", Path.unlink),
    "evidence of another run": swap("evidence/one_run.json"),
    # The manifest, and the page made from all this.
    "manifest: an entry less": drop("manifest.json", "files", "scores.json"),
    "manifest: another digest": put("manifest.json", "files", "scores.json", "sha256", "0" * 64),
    "manifest: another size": put("manifest.json", "files", "scores.json", "size", 1),
    "manifest: another training": put("manifest.json", "training_hash", "0" * 12),
    "manifest: other weights": put("manifest.json", "weights_sha256", "0" * 64),
    "manifest: no files": drop("manifest.json", "files"),
    "manifest: another schema": put("manifest.json", "schema", "stobatch.scores"),
    "manifest: garbage": file("manifest.json", lambda path: path.write_bytes(b"{")),
    "manifest: removed": file("manifest.json", Path.unlink),
    "manifest: another date": put("manifest.json", "made", "train", "date", "2020-01-01T00:00:00Z"),
    "manifest: another version": put("manifest.json", "made", "train", "stobatch", "9.9"),
    "report: edited": file("report.html", lambda p: p.write_text(p.read_text().replace("proved", "guaranteed"))),
}

ONLY_SIGNED = {
    "training: better accuracy on the way": "the weights on the way are gone",
    "training: another machine": "nobody else was there",
    "scores: more steps of the attacks": "attacks are not run again",
    "manifest: another date": "nobody else was there",
    "manifest: another version": "nobody else was there",
    "manifest: another digest": "mending the manifest undoes it",
    "manifest: another size": "mending the manifest undoes it",
    "manifest: an entry less": "mending the manifest undoes it",
    "report: edited": "a report is made again, not read",
}
"""What only a signature shows once the manifest is mended, and why."""

PLAIN_TOO = {"manifest: another date", "manifest: another version"}
"""Changes of the manifest that contradict nothing: without a signature nobody sees them."""
