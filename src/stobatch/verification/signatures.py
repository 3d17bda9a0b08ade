"""Signatures of a manifest with a key outside the run: by `ssh-keygen -Y`, or by minisign where it is installed.

Digests in a manifest show damage and carelessness. Against somebody who may write the whole directory only a signature
helps: whoever signs says that these files are the ones they mean.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from stobatch.errors import RunError, SettingError
from stobatch.files import write_atomically
from stobatch.manifest import MANIFEST, differences
from stobatch.runs import Run
from stobatch.verification.checks import Check, agrees, differs, not_checked

NAMESPACE = "stobatch"
SSH, MINISIGN = "manifest.json.sig", "manifest.json.minisig"
_NAME = "signature"


def sign(run_path: str | Path, key: str | Path) -> Path:
    """Sign a run's manifest; raises unless every file is as it says. Returns the file with the signature."""
    run, key = Run(Path(run_path)), Path(key)
    if not run.has(MANIFEST):
        raise RunError(f"{run.path} has no manifest to sign.", remedy="Train it with this version.")
    for name, how in differences(run):
        raise RunError(f"{run.path / name} {how}.", remedy="Sign what is whole: run the verb that writes it again.")
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
        raise SettingError(f"{key} cannot sign: {_last(done)}.", remedy="Give a private key of ssh-keygen's.")
    write_atomically(signature, lambda out: out.write(done.stdout))
    return signature


def signature_check(run: Run, signers: Path | None, identity: str | None) -> Check:
    """Whether the manifest is signed by somebody whom the reader trusts."""
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
        return differs(_NAME, f"is not one of {who} for this manifest ({_last(done)})", SSH)
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


def _last(done: subprocess.CompletedProcess[bytes]) -> str:
    lines = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
    return lines[-1].strip().rstrip(".") if lines else f"exit code {done.returncode}"
