"""`serve`: certified predictions over HTTP."""

from __future__ import annotations

import logging
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from stobatch.cli.app import app
from stobatch.cli.options import Device
from stobatch.errors import SettingError

_PACKAGES = ("uvicorn", "httptools")


@app.command(rich_help_panel="Publish")
def serve(
    runs: Annotated[list[str], typer.Argument(help="Run directories, each served under its own name, or as NAME=RUN.")],
    host: Annotated[str, typer.Option(help="The address to listen at; any but this machine's own needs a token.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any that is free.")] = 8080,
    token_file: Annotated[
        Path | None, typer.Option(help="Clients send its text, as Authorization: Bearer TOKEN.")
    ] = None,
    tls_certificate: Annotated[Path | None, typer.Option(help="Speak HTTPS: the certificate chain, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="The certificate's key, PEM.")] = None,
    body_mb: Annotated[int, typer.Option(min=1, max=1024, help="The largest request.")] = 8,
    queue: Annotated[int, typer.Option(min=1, help="Pictures that may wait; above that clients get 503.")] = 2048,
    per_client: Annotated[int, typer.Option(min=1, help="Requests of one address that are answered at a time.")] = 128,
    allow_void: Annotated[
        bool, typer.Option("--allow-void", help="Serve a run that is void or refuted, too; every answer says so.")
    ] = False,
    threads: Annotated[
        int, typer.Option(min=1, help="Of one operation. More pay for large networks on machines with cores to spare.")
    ] = 1,
    device: Device = None,
) -> None:
    """Answer with certified labels over HTTP: the Open Inference Protocol for programs, and a page for people."""
    absent = [name for name in _PACKAGES if find_spec(name) is None]
    if absent:
        raise SettingError(
            f"serving needs {', '.join(absent)}.", remedy="Install what is missing: pip install 'stobatch[serve]'."
        )
    # Of files that strangers send: they are answered, and need no line of ours each.
    warnings.filterwarnings("ignore", module="PIL")
    logging.getLogger("PIL").setLevel(logging.CRITICAL)
    import stobatch
    from stobatch.serving import Limits
    from stobatch.serving import serve as serve_models
    from stobatch.serving.server import DRAIN_S

    named: dict[str, Path] = {}
    for run in runs:
        name, _, path = run.rpartition("=")
        name = name or Path(path).resolve().name
        if name in named:
            raise SettingError(f"two runs are called {name}.", remedy="Give them names: NAME=RUN.")
        named[name] = Path(path)
    models = {name: stobatch.load(path, device=device, threads=threads) for name, path in named.items()}
    cut_off = serve_models(
        models,
        host=host,
        port=port,
        token_file=token_file,
        tls_certificate=tls_certificate,
        tls_key=tls_key,
        limits=Limits(
            body_bytes=body_mb * 2**20, queue_rows=queue, rows=min(Limits.rows, queue), per_client=per_client
        ),
        allow_void=allow_void,
        on_start=lambda address: print(f"serving {', '.join(named)} at {address}", flush=True),
    )
    answered = f"{cut_off} requests were cut off after {DRAIN_S} s" if cut_off else "what was taken on is answered"
    print(f"stopped; {answered}", flush=True)
