"""Who is who in a federation: a certificate for the server, and a key of its own for each party.

Flower's SuperLink shows its certificate and asks each SuperNode to sign with the key that was registered for it. The
commands are those of docs/federated.md; both programs come with practically every system.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from stobatch.errors import SettingError

DAYS = "30"
_CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-384", "-nodes")


@dataclass(frozen=True)
class Certificates:
    """A server's certificate and key, and the authority that vouches for it; parties need the authority's alone."""

    authority: Path
    certificate: Path
    key: Path


def make_certificates(folder: Path, host: str) -> Certificates:
    """Make an authority for one federation and a certificate for the address of its server."""
    authority, authority_key = folder / "ca.pem", folder / "ca.key"
    certificate, key, request, names = (folder / f"server.{end}" for end in ("pem", "key", "csr", "names"))
    kind = "IP" if host.replace(".", "").isdecimal() else "DNS"
    names.write_text(f"subjectAltName={kind}:{host}\n")
    _run("openssl", "req", "-x509", *_CURVE, "-days", DAYS, "-subj", "/CN=our federation",
         "-keyout", str(authority_key), "-out", str(authority))  # fmt: skip
    _run("openssl", "req", *_CURVE, "-subj", f"/CN={host}", "-keyout", str(key), "-out", str(request))
    _run("openssl", "x509", "-req", "-in", str(request), "-CA", str(authority), "-CAkey", str(authority_key),
         "-CAcreateserial", "-days", DAYS, "-extfile", str(names), "-out", str(certificate))  # fmt: skip
    return Certificates(authority, certificate, key)


def make_party_key(path: Path) -> Path:
    """Make a party's key where there is none yet; returns the public one, which the server registers."""
    if not path.exists():
        _run("ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-C", "", "-f", str(path))
    return path.with_name(f"{path.name}.pub")


def _run(program: str, *arguments: str) -> None:
    found = shutil.which(program)
    if found is None:
        raise SettingError(f"{program} is not installed.", remedy="Install OpenSSL and OpenSSH, for keys.")
    done = subprocess.run([found, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise SettingError(f"{program} failed: {last}", remedy="See that the folder can be written to.")
