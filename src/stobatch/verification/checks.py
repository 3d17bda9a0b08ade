"""What a check says: that something agrees, that it differs, or that it could not be checked."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Iterator
from math import isclose
from pathlib import Path
from typing import Any

from stobatch.dp.plan import (
    FOREIGN_METHOD,
    NOISE_ASSUMPTION_OF_PARTIES,
    OLD_NOISE_ASSUMPTION_OF_PARTIES,
    OLD_TUNING_ASSUMPTION,
    SEARCH_OBJECTION,
)
from stobatch.dp.selection import NOT_LOOKED
from stobatch.errors import RunError, SettingError
from stobatch.files import write_atomically
from stobatch.results import Check, Outcome
from stobatch.runs import MANIFEST, PAGE, Run, differences, is_ours, verb_since_page

RELATIVE = 1e-9
"""Floats that differ by less are the same: another release of SciPy may round the last bits of an interval."""


def agrees(name: str, detail: str, file: str = "") -> Check:
    return Check(name=name, outcome=Outcome.AGREES, detail=detail, file=file)


def differs(name: str, detail: str, file: str = "") -> Check:
    return Check(name=name, outcome=Outcome.DIFFERS, detail=detail, file=file)


def not_checked(name: str, detail: str, file: str = "") -> Check:
    return Check(name=name, outcome=Outcome.NOT_CHECKED, detail=detail, file=file)


def compare(name: str, file: str, pairs: Iterable[tuple[str, Any, Any]], detail: str) -> Check:
    """Return the first difference among (what, recorded, computed); else agreement, with the detail."""
    for what, recorded, computed in pairs:
        difference = first_difference(recorded, computed, what)
        if difference:
            return differs(name, difference, file)
    return agrees(name, detail, file)


def first_difference(recorded: Any, computed: Any, where: str) -> str:
    """Return where two documents differ first, and how; nothing where they are the same up to the rounding of floats.

    >>> first_difference({"a": [1, 2.0]}, {"a": [1, 2.5]}, "scores")
    'scores.a[1] is 2.0, computed again it is 2.5'
    """
    return next(_differences(recorded, computed, where), "")


def _differences(recorded: Any, computed: Any, where: str) -> Iterator[str]:
    if isinstance(recorded, dict) and isinstance(computed, dict):
        yield from (f"{where} has no {key}" for key in computed if key not in recorded)
        yield from (f"{where}.{key} should not be there" for key in recorded if key not in computed)
        for key in computed:
            yield from _differences(recorded[key], computed[key], f"{where}.{key}")
    elif isinstance(recorded, list) and isinstance(computed, list):
        recorded = [_in_new_words(entry, computed) for entry in recorded if entry != OLD_TUNING_ASSUMPTION]
        computed = [entry for entry in computed if not _is_added_later(entry) or entry in recorded]
        if len(recorded) != len(computed):
            yield f"{where} has {len(recorded)} entries, computed again it has {len(computed)}"
        for place, (one, other) in enumerate(zip(recorded, computed, strict=False)):
            yield from _differences(one, other, f"{where}[{place}]")
    elif not _same(recorded, computed):
        yield f"{where} is {_short(recorded)}, computed again it is {_short(computed)}"


def _in_new_words(entry: Any, computed: list[Any]) -> Any:
    """Return a line of an older version's guarantee as this version writes it.

    Such files are as they were written, and no reader has to believe them: `verify` ends with the guarantee of today.
    """
    if isinstance(entry, str) and entry.endswith(NOT_LOOKED) and entry not in computed:
        return entry.removesuffix(NOT_LOOKED)
    return NOISE_ASSUMPTION_OF_PARTIES if entry == OLD_NOISE_ASSUMPTION_OF_PARTIES else entry


def _is_added_later(entry: Any) -> bool:
    """Return whether an older version's guarantee may lack a line."""
    return isinstance(entry, str) and entry.startswith((SEARCH_OBJECTION, FOREIGN_METHOD))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, bool) or isinstance(other, bool) or not isinstance(one, (int, float)):
        return type(one) is type(other) and bool(one == other)
    return isinstance(other, (int, float)) and isclose(one, other, rel_tol=RELATIVE, abs_tol=1e-15)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


NAMESPACE = "stobatch"
SSH, MINISIGN = "manifest.json.sig", "manifest.json.minisig"
_NAME = "signature"
_PAGE_NAME = "report"


def sign(run_path: str | Path, key: str | Path) -> Path:
    """Sign a run's manifest; raises unless every file is as it says. Returns the file with the signature."""
    run, key = Run.at(run_path), Path(key)
    if not run.has(MANIFEST):
        raise RunError(f"{run.path} has no manifest to sign.", remedy="Train it with this version.")
    for name, how in differences(run):
        mend = "run the verb that writes it again" if is_ours(name) else "no verb writes it, so move it out of the run"
        raise RunError(f"{run.path / name} {how}.", remedy=f"Sign what is whole: {mend}.")
    if (later := page_check(run)) is not None:
        raise RunError(
            f"{run.path / PAGE} {later.detail}.",
            why="A signature would vouch for it.",
            remedy=f"Write it again: `{run.command('report')}`.",
        )
    if not key.is_file():
        raise SettingError(f"there is no key {key}.", remedy="Make one: `ssh-keygen -t ed25519 -f KEY`.")
    manifest = run.path / "manifest.json"
    if _is_minisign(key):
        signature = run.path / MINISIGN
        _tool(["minisign", "-S", "-s", str(key), "-m", str(manifest), "-x", str(signature)])
        return signature
    signature = run.path / SSH
    done = _tool(["ssh-keygen", "-Y", "sign", "-f", str(key), "-n", NAMESPACE], manifest)
    if done.returncode:
        raise SettingError(f"{key} cannot sign: {_last_line(done)}.", remedy="Give a private key of ssh-keygen's.")
    write_atomically(signature, lambda out: out.write(done.stdout))
    return signature


def page_check(run: Run) -> Check | None:
    """Return a difference where a run's page was written before another verb changed what it rests on."""
    verb = verb_since_page(run)
    if verb is None:
        return None
    return differs(_PAGE_NAME, f"was written before `{verb}` changed the run, and says what the run said then", PAGE)


def signature_check(run: Run, signers: Path | None, identity: str | None) -> Check:
    """Check that the manifest is signed by a key that the reader trusts."""
    manifest, ssh, minisign = (run.path / name for name in ("manifest.json", SSH, MINISIGN))
    if signers is not None and not signers.is_file():
        raise SettingError(f"there is no file {signers}.", remedy="Give ssh-keygen's allowed signers, or a public key.")
    if not (ssh.exists() or minisign.exists()):
        if signers is not None:
            return differs(_NAME, "a signature is asked for, and there is none", "manifest.json")
        return not_checked(_NAME, "self-reported, unsigned: whoever wrote the files vouches for them", "manifest.json")
    if signers is None:
        return not_checked(_NAME, "there is one: check it with --signers FILE --identity WHO", SSH)
    if _is_minisign(signers):
        done = _tool(["minisign", "-V", "-p", str(signers), "-m", str(manifest), "-x", str(minisign)])
        who = signers.name
    else:
        if identity is None:
            raise SettingError("--signers is given without --identity.", remedy="Say who has to have signed.")
        done = _tool(
            ["ssh-keygen", "-Y", "verify", "-f", str(signers), "-I", identity, "-n", NAMESPACE, "-s", str(ssh)],
            manifest,
        )
        who = identity
    if done.returncode:
        return differs(_NAME, f"is not one of {who} for this manifest ({_last_line(done)})", SSH)
    return agrees(_NAME, f"signed by {who}, checked with {signers.name}", SSH)


def _is_minisign(key: Path) -> bool:
    return key.read_bytes()[:200].startswith(b"untrusted comment:")


def _tool(command: list[str], data: Path | None = None) -> subprocess.CompletedProcess[bytes]:
    if shutil.which(command[0]) is None:
        raise SettingError(
            f"{command[0]} is not installed.",
            why="Signatures are made and checked by it.",
            remedy="Install openssh-client." if command[0] == "ssh-keygen" else f"Install {command[0]}.",
        )
    return subprocess.run(command, input=data.read_bytes() if data else None, capture_output=True, check=False)


def _last_line(done: subprocess.CompletedProcess[bytes]) -> str:
    lines = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
    return lines[-1].strip().rstrip(".") if lines else f"exit code {done.returncode}"
