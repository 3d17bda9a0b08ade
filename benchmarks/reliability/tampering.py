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
sys.path.insert(0, str(ROOT / "tests" / "verification"))

from tamperings import ONLY_SIGNED, TAMPERINGS, flip, make_run, mend_manifest  # noqa: E402

import stobatch  # noqa: E402
from stobatch.errors import StobatchError  # noqa: E402
from stobatch.files import write_json  # noqa: E402
from stobatch.manifest import source  # noqa: E402

WHO = "owner@example.org"
BITS = 1000


def named_by_verify(run: Path, **signature: Any) -> bool:
    try:
        return bool(stobatch.verify(run, sample=60, seed=1, **signature).differing)
    except StobatchError:
        return True


def refused_by_report(run: Path, page: Path, **signature: Any) -> bool:
    try:
        stobatch.report([run], page, images=None, **signature)
    except StobatchError:
        return True
    return False


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole, other = make_run(folder / "run"), make_run(folder / "other")
        assert not named_by_verify(whole)
        document = {**source(), "tamperings": _tampered(folder, whole, other), "flipped_bits": _flipped(folder, whole)}
    out = ROOT / "results" / "reliability" / "tampering.json"
    write_json(out, "tampering", document)
    print(json.dumps({key: value for key, value in document.items() if key != "each"}, indent=2))


def _tampered(folder: Path, whole: Path, other: Path) -> dict[str, Any]:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key")], check=True)
    signed = Path(shutil.copytree(whole, folder / "signed"))
    stobatch.sign(signed, folder / "key")
    (folder / "signers").write_text(f"{WHO} {(folder / 'key.pub').read_text()}")
    signature = {"signers": folder / "signers", "identity": WHO}
    assert not named_by_verify(signed, **signature)
    attackers: dict[str, tuple[Path, bool, dict[str, Any]]] = {
        "manifest left alone": (whole, False, {}),
        "manifest mended": (whole, True, {}),
        "manifest mended, signature asked for": (signed, True, signature),
    }
    found: dict[str, Any] = {"ways": len(TAMPERINGS), "only_by_signature": ONLY_SIGNED}
    for attacker, (start, mends, asked) in attackers.items():
        missed: dict[str, list[str]] = {"verify": [], "report": []}
        for name, tamper in TAMPERINGS.items():
            copy = Path(shutil.copytree(start, folder / "copy"))
            tamper(copy, other)
            if mends:
                mend_manifest(copy)
            undone = all((copy / p).read_bytes() == (start / p).read_bytes() for p in ("manifest.json", "report.html")
                         if (copy / p).exists()) and mends and name.startswith("manifest")  # fmt: skip
            if not undone and not named_by_verify(copy, **asked):
                missed["verify"].append(name)
            if not undone and not refused_by_report(copy, folder / "page.html", **asked):
                missed["report"].append(name)
            shutil.rmtree(copy)
        found[attacker] = {
            "named_by_verify": len(TAMPERINGS) - len(missed["verify"]),
            "refused_by_report": len(TAMPERINGS) - len(missed["report"]),
            "missed": missed,
        }
    return found


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
