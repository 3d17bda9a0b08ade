"""Tamper with a run in every listed way, flip a thousand bits, and count what `verify` and `report` notice.

    python benchmarks/reliability/tampering.py

Writes results/reliability/tampering.json. Three kinds of attacker: one who changes files, one who writes new digests
into the manifest as well, and one who does so although the manifest was signed (ssh-keygen). A few minutes on one core.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from support.tamperings import ONLY_SIGNED, TAMPERINGS, flip, make_run, mend_manifest  # noqa: E402

import stobatch  # noqa: E402
from stobatch.errors import StobatchError  # noqa: E402
from stobatch.files import write_json  # noqa: E402
from stobatch.runs import Run, source  # noqa: E402
from stobatch.verification import is_old  # noqa: E402

WHO = "owner@example.org"
BITS = 1000


def noticed(run: Path, page: Path, **signature: Any) -> tuple[bool, bool]:
    """Whether `verify` names a difference, with a sample of all rows, and whether `report` refuses to write a page.

    A report makes the checks of `verify` without a sample. Where they name a difference, both are settled; elsewhere
    both are run in earnest.
    """
    try:
        found = stobatch.verify(run, sample=0, seed=1, **signature)
        if found.differing and not is_old(Run(run)):
            return True, True
        named = bool(found.differing) or bool(stobatch.verify(run, sample=60, seed=1, **signature).differing)
    except StobatchError:
        named = True
    try:
        stobatch.report([run], page, **signature)
    except StobatchError:
        return named, True
    return named, False


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole, other = make_run(folder / "run"), make_run(folder / "other")
        assert noticed(whole, folder / "page.html") == (False, False)
        document = {**source(), "tamperings": _tampered(folder, whole, other), "flipped_bits": _flipped(folder, whole)}
    out = ROOT / "results" / "reliability" / "tampering.json"
    write_json(out, "tampering", document)
    print(json.dumps(document, indent=2))


def _tampered(folder: Path, whole: Path, other: Path) -> dict[str, Any]:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key")], check=True)
    signed = Path(shutil.copytree(whole, folder / "signed"))
    stobatch.sign(signed, folder / "key")
    (folder / "signers").write_text(f"{WHO} {(folder / 'key.pub').read_text()}")
    signature = {"signers": folder / "signers", "identity": WHO}
    assert noticed(signed, folder / "page.html", **signature) == (False, False)
    found: dict[str, Any] = {"ways": len(TAMPERINGS), "only_by_signature": ONLY_SIGNED}
    missed = dict.fromkeys(TAMPERINGS, (False, False))
    for attacker, start, mends, asked in (
        ("manifest left alone", whole, False, {}),
        ("manifest mended", whole, True, {}),
        ("manifest mended, signature asked for", signed, True, signature),
    ):
        # A signature only adds a check: what was noticed with a mended manifest is noticed again.
        names = [name for name in TAMPERINGS if not asked or not all(missed[name])]
        results = {name: _one(folder, start, other, name, mends, asked) for name in names}
        missed = {name: results.get(name, (True, True)) for name in TAMPERINGS}
        found[attacker] = {
            "named_by_verify": sum(named for named, _ in missed.values()),
            "refused_by_report": sum(refused for _, refused in missed.values()),
            "missed_by_verify": [name for name, (named, _) in missed.items() if not named],
            "missed_by_report": [name for name, (_, refused) in missed.items() if not refused],
        }
    return found


def _one(folder: Path, start: Path, other: Path, name: str, mends: bool, asked: dict[str, Any]) -> tuple[bool, bool]:
    copy = Path(shutil.copytree(start, folder / "copy"))
    TAMPERINGS[name](copy, other)
    if mends:
        mend_manifest(copy)
    result = noticed(copy, folder / "page.html", **asked)
    shutil.rmtree(copy)
    return result


def _flipped(folder: Path, whole: Path) -> dict[str, int]:
    """Half of them in the weights, half in rows; `verify` by the manifest."""
    run, places, noticed = Path(shutil.copytree(whole, folder / "flipped")), random.Random(20), 0
    files = [run / "model.safetensors", *sorted(run.glob("records/*/rows-*.parquet"))]
    for count in range(BITS):
        path = files[0] if count % 2 else places.choice(files[1:])
        bit = places.randrange(8 * path.stat().st_size)
        flip(path, bit)
        noticed += bool(stobatch.verify(run, sample=0).differing)
        flip(path, bit)
    return {"flipped": BITS, "noticed": noticed}


if __name__ == "__main__":
    main()
