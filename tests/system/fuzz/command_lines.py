"""Whole command lines, in this process: every verb that ends without training."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path
from random import Random

from stobatch.cli.app import main

from .mutate import HOSTILE_TEXTS, mutated_text

_CALLS: tuple[tuple[str, ...], ...] = (
    ("plan", "--recipe", "none", "--seed", "1", "--json"),
    ("plan", "--recipe", "demo", "--config", "FILE"),
    ("plan", "--recipe", "demo", "--set", "training.steps=0"),
    ("train", "--recipe", "demo", "--set", "method.epsilon=-1", "--seed", "1", "--out", "RUN"),
    ("train", "--out", "RUN", "--resume"),
    ("certify", "RUN", "--radius", "0.1", "--norm", "linf", "--limit", "3"),
    ("attack", "RUN", "--protocol", "adaptive", "--steps", "3", "--attack", "madry"),
    ("evaluate", "RUN", "--recipe", "demo", "--limit", "5", "--seed", "4"),
    ("audit", "RUN", "--instrument", "release", "--confidence", "0.9", "--trainings", "10"),
    ("report", "RUN", "RUN", "--out", "FILE"),
    ("compare", "--out", "RUN", "--methods", "sund,dpsgd", "--epsilon", "1", "--seeds", "1,2"),
    ("figure", "2", "--records", "RUN", "--out", "RUN"),
    ("budget", "--book", "RUN", "--delta", "0", "--json"),
    ("tune", "--recipe", "demo", "--try", "training.steps=5", "--held-out", "10", "--out", "RUN"),
    ("shard", "--check", "RUN"),
    ("federate", "--out", "RUN", "--set", 'method.parties=["north:0"]'),
    ("parties", "RUN"),
    ("guarantee", "RUN"),
    ("where", "Theorem 99", "--json"),
    ("doctor", "--only", "nothing"),
    ("nothing", "--json"),
    ("--version",),
)


def _run_directory(rng: Random, folder: Path) -> Path:
    """Nothing, a file, an empty folder, or a folder that looks like a run until it is read."""
    run = folder / "a-run"
    kind = rng.randrange(4)
    if run.is_dir():
        for file in run.iterdir():
            file.unlink()
        run.rmdir()
    run.unlink(missing_ok=True)
    if kind == 1:
        run.write_text("a file")
    elif kind >= 2:
        run.mkdir()
        if kind == 3:
            for name in ("config.json", "model.safetensors", "scores.json", "federation.json"):
                (run / name).write_text(rng.choice(HOSTILE_TEXTS[13:]))
    return run


def command_lines(rng: Random, folder: Path) -> None:
    """Exit code 0 or 2, one line for the user, no traceback; standard output only when all is well."""
    run = _run_directory(rng, folder)
    words = [{"RUN": str(run), "FILE": str(folder / "file")}.get(word, word) for word in rng.choice(_CALLS)]
    for _ in range(rng.randrange(3)):
        at = rng.randrange(len(words))
        kind = rng.randrange(3)
        if kind == 0 and len(words) > 1:
            words.pop(at)
        elif kind == 1:
            words.insert(at, rng.choice((*HOSTILE_TEXTS, "--json", "--resume", "--seed", "--out", "--help")))
        elif at > 0:
            # The verb and what says where to write stay: a case must not write into the working directory.
            words[at] = mutated_text(rng, words[at])
    words = [word.replace("\0", "") for word in words]
    if _may_work(words):
        return
    code, err = _called(words, folder)
    assert "Traceback" not in err, err
    assert code in (0, 2), (code, words, err)
    if code == 2 and not err.startswith(("Usage:", "╭─ Error")):
        assert err.startswith("stobatch: "), (words, err)
        assert err.count("\n") == 1, (words, err)


def _may_work(words: list[str]) -> bool:
    """Whether a call might get as far as real work, which is not what is looked at here."""
    verb = next((word for word in words if not word.startswith("-")), "")
    refused = {"train": "method.epsilon=-1", "compare": "sund,dpsgd", "doctor": "nothing", "federate": "north:0"}
    if verb in ("demo", "shard") and "--check" not in words:
        return True
    return verb in refused and not any(refused[verb] in word for word in words) and "--help" not in words


def _called(words: list[str], folder: Path) -> tuple[int, str]:
    err = io.StringIO()
    before, where, code = sys.argv, os.getcwd(), 0
    sys.argv = ["stobatch", *words]
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
            main()
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 0 if left.code is None else 1
    finally:
        sys.argv = before
        os.chdir(where)
    return code, err.getvalue()
