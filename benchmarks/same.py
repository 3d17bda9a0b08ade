"""Show that a change of structure changed nothing: the same command lines in two source trees, and what they leave.

    python benchmarks/same.py [--base COMMIT] [--only PATTERN] [--keep DIR] [--jobs 2]

Each chain of commands runs in an empty folder, once with the sources of COMMIT and once with those of this tree, with
public seeds. Compared are exit codes, both streams, and every file: names, modes, tensors bit for bit, tables value by
value, JSON key by key. What may differ in any two runs (dates, seconds, secret keys) is listed under VOLATILE; what a
change means to change is listed under INTENDED. Anything else ends with exit code 1. Results of COMMIT are kept in
build/same. The library is only used by its command line, so that modules may move.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import runpy
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from glob import glob
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow.parquet

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / "build" / "same"

INTENDED: list[tuple[str, str, str]] = [
    ("*.html", "line *", "pages come from templates, and the published mechanism is called by that name"),
    ("*.svg", "line *", "the published mechanism is called by that name"),
    ("*/said/*.out", "line *", "tables come from one model, and a guarantee is two lines"),
    (
        "*/said/*.err",
        "line *",
        "progress without a terminal is lines; what the parser refuses is one; nearest names are near",
    ),
    *(("comparison/*", key, "the published mechanism is called by that name")
      for key in ("rows/*/label", "rows/*/name", "rows/*/runs/*", "t_tests/*/first", "t_tests/*/second",
                  "flags/*/row")),
    ("comparison/said/01.out", "runs/*", "and its folder stands elsewhere in the alphabet"),
    ("comparison/work/out/stobatch-eps-3*", "*", "its folder has that name; the chain `published` compares such files"),
    ("comparison/work/out/published-eps-3*", "*", "the same"),
    ("*", "made/*/stobatch", "the version"),
    ("*", "*checked_by/stobatch", "the version"),
    ("*", "*cannot_be_checked/1", "records may have persons, whom nobody else can check either"),
    # Since the base, with a decision or an entry in the changelog each.
    *(("*", key, "the default of machine.memory_mb follows the device")
      for key in ("config/machine/memory_mb", "content_hash", "files/config.json/*")),
    *(("*", key, "slopes of bounds are optimised (decision 0030)")
      for key in ("radius/*", "certified_accuracy/bounds/*", "metadata/content_sha256", "files/records/*")),
    *((f"{chain}/*", f"{kind}*", "norms of first layers are proved by Cholesky: last bits")
      for chain in ("pixeldp", "published", "securesgd*", "sound, hidden noise")
      for kind in ("corrected", "*/corrected", "as compared", "*/as compared", "tight", "*/tight", "published/",
                   "*/published/", "radius_", "*largest_radius/")),
    ("pixeldp/*", "rows", "counts what was attacked"),
    *(("*", key, "that settings were tuned is an objection alone; whose loss and noise it is, is said")
      for key in ("*guarantee/assumptions*", "*guarantees/*/assumptions*", "files/plan.json/*", "files/attack.json/*",
                  "files/federation.json/*")),
    *(("*/said/*", key, "`verify` says what the run guarantees, and which radii it did not compute again")
      for key in ("", "guarantee*", "verification*", "checks/*")),
    *(("*", key, "training.json says who vouches for the ε of its history")
      for key in ("training", "*epsilon_spent_status")),
    ("*/training.json", "", "the same"),
    ("*/private/measurements.json", "", "of trainings with secret seeds time and memory are private"),
    *(("plans/said/*", key, "settings that a search found")
      for key in ("sizes/*", "rows/*/value", "guarantee/assumptions/*")),
    ("listings/said/*", "line *", "modules have moved; help stands in another order and says `published`"),
    ("listings/said/*", "items/*/summary", "a docstring in the imperative"),
    ("listings/said/*", "items/*/file", "modules have moved"),
    ("listings/said/*", "items/*/line", "modules have moved"),
    ("listings/said/*", "items/*/code", "modules have moved"),
]  # fmt: skip
"""What is meant to differ from the base: file, key and reason. `*` stands for anything."""

VOLATILE: list[tuple[str, str, str]] = [
    ("*", "*/date", "when a verb ended"),
    ("*", "*seconds", "how long a verb took"),
    ("*", "*seconds_since_last_start", "how long a training took"),
    ("*", "*peak_memory_mb", "what a training took"),
    ("*", "rows/*/peak_memory_mb/*", "the same over trainings of a comparison"),
    ("*", "rows/*/training_seconds/*", "the same over trainings of a comparison"),
    ("*", "*/commit", "of the sources"),
    ("*/private/ledger.json", "stretches/*/bits", "holds a digest of the sources"),
    ("*/private/commitment_key.json", "key", "drawn at random whatever the seed: it keeps a secret"),
    ("audits/work/*/private/seeds.json", "root", "of a run that is only audited: secret, and nothing is drawn with it"),
    ("*", "*training_commitment", "made with that key"),
    ("*", "*private_files/*", "made with that key"),
    ("*/checkpoints/*", "*config_hash", "its second half is made with that key; the first is in config.json"),
    ("*/complete.json", "parts/*", "digests of files with that hash; the tensors in them are compared"),
    *(("*/manifest.json", f"files/{name}/{key}", "of a file with seconds, dates or commitments, compared by itself")
      for name in ("training.json", "certificates.json", "scores.json", "report.html") for key in ("sha256", "size")),
]  # fmt: skip
"""What differs between any two runs of one tree: file, key and reason."""

MASKED = {
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?Z?": "DATE",
    r"\d:\d\d:\d\d": "DURATION",
    r"last start</dt><dd>[\d.]+ s": "SECONDS",
    r"[\d.]+ ± [\d.]+ s</td><td>[\d.]+ ± [\d.]+ MiB": "SECONDS AND MEMORY",
    r"<td>[0-9a-f]{40}[^<]*": "COMMIT",
    r"key\)</dt><dd><code>[0-9a-f]+": "COMMITMENT",
}
"""The same in texts that have no keys."""


def sets(words: str) -> str:
    """Words such as section.key=value as arguments that change settings."""
    return " ".join(f"--set {shlex.quote(word)}" for word in shlex.split(words))


DATA = sets("data.train_limit=600 data.test_limit=50 training.steps=20 training.monitor_every=10")
ATTACKS = '["fgsm","ifgsm","mim","madry","apgd_ce","apgd_dlr","apgd_t","square"]'
SHORT = sets(f"""
    certification.noise_draws=60 certification.selection_draws=20 evaluation.radii=[0.05,0.2] evaluation.limit=20
    'evaluation.adaptive_attacks={ATTACKS}' evaluation.attack_steps=2 evaluation.adaptive_steps=2 evaluation.restarts=1
    evaluation.queries=5 evaluation.noise_draws=2 evaluation.vote_draws=20 evaluation.vote_limit=10
    evaluation.num_images=2 audit.num_inputs=5 audit.attack_steps=2 audit.restarts=1 audit.judging_draws=100
    audit.release_trials=70""")
SMALL = f"{DATA} {SHORT} --seed 1 --json"
LAYERS = sets("'model.architecture=squash 3, conv 8 7/3, relu, linear'")
STACK = sets("'model.architecture=conv 8 5/3, groupnorm 4, relu, linear' method.smoothing_stddev=0.25")
NARROW = sets("model.last_hidden_size=16")
SGD = sets("method.expected_batch_size=60 method.delta=0.001")
BATCH = sets("method.batch_size=60")
ATTACKED = f"{BATCH} {sets('method.train_attack_steps=1')}"
SOUND = f"--recipe sound.mnist {SMALL} {SGD} {LAYERS}"
PUBLISHED = f"{SMALL} {ATTACKED} {NARROW}"
LONG = f"{SOUND} {sets('training.steps=100')}"
RELEVANCE = sets("method.delta=0.001 method.relevance_steps=3 method.relevance_batch_size=60")
PARTIES = sets("""method.delta=0.001 'method.parties=["north:300:60","east:200:40","south:100:30:10"]'""")
COMPARED = f"{NARROW} {ATTACKED} {SGD} " + sets("""
    training.steps=2 certification.noise_draws=60 certification.selection_draws=20 evaluation.adaptive_steps=1
    evaluation.attack_steps=1 evaluation.queries=5 evaluation.noise_draws=2 evaluation.vote_draws=20
    evaluation.vote_limit=5 evaluation.limit=20 evaluation.num_images=0""")
FEW = sets("training.steps=3")
CERTIFY = "certify run --limit 50 --seed 3 --json"
VOTES = f"{CERTIFY} {sets('evaluation.radii=[0.01,0.05] certification.certificate=votes')}"
EVALUATE = "evaluate run --seed 4 --json"
VERIFY = "verify run --sample 5 --seed 2 --json"

RECIPES = """demo paper.demo paper.mnist paper.cifar10 paper.tiny_imagenet sound.mnist sound.mnist_wide
    sound.mnist_strict sound.mnist_l2 sound.cifar10 sound.cifar10_strict_wide sound.tiny_imagenet federated.demo
    audit.published audit.sound_strict baselines.securesgd baselines.adlm"""
VERBS = """plan train certify attack evaluate audit report where demo compare federate parties doctor shard verify
    sign"""
PLANS = "\n".join(f"plan --recipe {name} --json --seed 1" for name in RECIPES.split())
HELP = "\n".join(f"{verb} --help" for verb in VERBS.split())

COMMANDS = f"""
[sound]
train --out run {SOUND} {sets("canaries.num=40")}
{CERTIFY} --set certification.certificate=bounds
{CERTIFY} --norm l2
attack run --seed 3 --json
attack run --seed 3 --json --norm l2 --attack madry --radius 0.5 --steps 3
{EVALUATE}
audit run --instrument certificates --instrument one_run --seed 5 --json
{VERIFY}
report run --json
verify run --sample 3 --seed 2
certify run --limit 10 --seed 3
evaluate run --limit 5 --seed 4

[sound, votes]
train --out run {SOUND} {sets("method.smoothing_stddev=0.25 method.views_weight=0.5")}
{VOTES}
{VOTES} --set certification.certificate=best
{VOTES} --norm l2
{VOTES} --norm l1
attack run --function vote --attack madry --radius 0.05 --limit 5 --seed 3 --json
audit run --instrument certificates --seed 5 --json
{VERIFY}

[sound, hidden noise]
train --out run --recipe sound.mnist_l2 {SMALL} {SGD} {STACK}
{CERTIFY}
{VOTES} --norm linf --set certification.hidden_stddev=0.1

[sound, Laplace]
train --out run {SOUND} {sets("method.smoothing_stddev=0.25 method.smoothing_noise=laplace method.views_weight=0.5")}
{VOTES} --norm l1
train --out more {SOUND} {sets("method.adversarial_weight=0.3 method.momentum=0.9")}

[sound, trainers]
train --out run {SOUND} {sets("trainers.num=3 trainers.per_step=2")}
train --out shares {SOUND} {sets("trainers.num=3 trainers.per_step=2 trainers.noise=shares")}

[stopped and resumed]
train --out run {LONG}
$ python -m stobatch train --out cut {LONG} --set machine.checkpoint_every=5 &
    until [ -e cut/private/checkpoints/step-00000005 ] || ! kill -0 $!; do sleep 0.01; done;
    kill -TERM $!; wait $!; [ ! -e cut/model.safetensors ]
train --out cut --resume --json
$ cmp run/model.safetensors cut/model.safetensors
train --out run {LONG} --resume --set training.steps=120 # exit 2
train --out run --resume --json

[published]
train --out run --recipe paper.demo {PUBLISHED}
{CERTIFY} --set certification.interval=clopper_pearson
{CERTIFY} --set certification.interval=hoeffding
attack run --protocol published --seed 3 --json
attack run --function vote --attack madry --radius 0.05 --limit 5 --seed 3 --json
{EVALUATE}
{VERIFY}
report run --json
audit run --instrument certificates --seed 5 --json # exit 3
audit run --instrument release --seed 5 --json # exit 1
$ cp -r run other && sed -i 's/steps.: 20/steps": 21/' other/config.json
verify other --sample 0 --seed 2 --json # exit 1

[published, in turn]
train --out run --recipe paper.mnist {PUBLISHED} --set method.label_noise=per_class
train --out other --recipe paper.mnist {PUBLISHED} --set method.schedule=stochastic --set method.trainers_per_step=2

[plain]
train --out run --recipe baselines.plain {SMALL} {NARROW} {BATCH}
{CERTIFY} # exit 2
attack run --seed 3 --json

[vanilla]
train --out run --recipe baselines.vanilla_adversarial {SMALL} {NARROW} {ATTACKED}

[pixeldp]
train --out run --recipe baselines.pixeldp {SMALL} {NARROW} {BATCH}
{VOTES}
{EVALUATE}

[dpsgd]
train --out run --recipe baselines.dpsgd {SMALL} {NARROW} {SGD}

[dp_adversarial]
train --out run --recipe baselines.dp_adversarial {SMALL} {NARROW} {SGD}
train --out squashed --recipe baselines.dp_adversarial_squashed {SMALL} {LAYERS} {SGD}
certify squashed --limit 50 --seed 3 --json

[dp_smoothing]
train --out run --recipe baselines.dp_smoothing {SMALL} {NARROW} {SGD}
{VOTES}
{VOTES} --norm l2

[adlm]
train --out run --recipe baselines.adlm {SMALL} {NARROW} {BATCH} {RELEVANCE}
{VERIFY}

[securesgd]
train --out run --recipe baselines.securesgd {SMALL} {NARROW} {SGD}
{VOTES}
{VERIFY}

[securesgd_agm]
train --out run --recipe baselines.securesgd_agm {SMALL} {NARROW} {SGD}
{VOTES}

[audits]
audit many --recipe audit.published {FEW} --trainings 32 --seed 1 --json
audit steps --recipe audit.sound {FEW} --trainings 32 --seed 1 --json
audit half --recipe audit.half_noise {FEW} --trainings 32 --seed 1 --json
audit shadow --recipe audit.sound {FEW} --instrument membership --set audit.shadow_models=40 --seed 1 --json # exit 3
audit release --recipe audit.published --instrument release --set audit.release_trials=60 --seed 1 # exit 1
train --out clipped --recipe audit.no_clipping --seed 1 --json
train --out shared --recipe audit.shared_noise --seed 1 --json

[federated]
federate --out run --recipe federated.demo {SMALL} {LAYERS} {PARTIES}
parties run --json
parties run.parties/north --json
{CERTIFY}
{EVALUATE}
{VERIFY}
report run --json

[comparison]
compare --out out --methods sound,stobatch --epsilon 3 --radius 0.2 --seeds 1,2 --json {DATA} {COMPARED}
report out/*/*1 --out both.html --json

[shards]
shard --out shards --recipe demo {DATA} --num-shards 3 --seed 4 --json
shard --check shards --json
train --out run {SOUND} --set data.name=shards --set machine.data_root=shards
{VERIFY}

[demo]
demo --out run {SMALL} {SGD} {LAYERS} --set canaries.num=40

[plans]
{PLANS}
plan --recipe paper.mnist
plan --recipe demo --seed 1 --out plan.json

[listings]
where --json
where
where 'Theorem 5' --json
--help
{HELP}

[doctor]
$ python -m stobatch doctor

[mistakes]
train --out run --recipe dmeo # exit 2
train --out run --recipe demo --set training.stepps=3 # exit 2
train --out run --recipe demo --set training.steps=many # exit 2
train --out run --recipe demo --set training.learning_rate=0 # exit 2
train --out run --recipe demo --set training.optimiser=adma # exit 2
train --out run --recipe paper.demo --set method.total_epsilon=0.05 # exit 2
train --out run --recipe paper.demo --set method.batch_size=2500 # exit 2
train --out run --recipe paper.demo --set model.normalisation=batch --seed 1 # exit 2
train --out run --recipe sound.mnist --set data.train_limit=100 # exit 2
train --out run --recipe demo --device quantum # exit 2
train --out run --recipe demo --config x.toml # exit 2
train --out run --config none.toml # exit 2
train --out run --recipe demo --set data.name=shards --set machine.data_root=none # exit 2
train # exit 2
certify nowhere # exit 2
evaluate nowhere # exit 2
audit nowhere # exit 2
verify nowhere # exit 2
report nowhere # exit 2
compare --out out --methods sounds # exit 2
compare --out out --epsilon 0 # exit 2
shard --check none # exit 2
where 'Theorem 55' # exit 2
nonsense # exit 2
"""
"""Chains of command lines of `stobatch` that build on each other. `$` stands before a line of the shell, of which only
the exit code is compared; `# exit N` behind one that does not end with 0, for a chain that fails shows nothing."""
CHAINS = {
    name: lines.replace("\n    ", " ").splitlines()
    for name, lines in re.findall(r"^\[(.*)\]\n((?:.+\n)+)", COMMANDS, re.M)
}

PRELOADED = ("torch", "torch._dynamo", "scipy.stats", "dp_accounting.pld", "pyarrow.dataset", "pyarrow.parquet",
             "safetensors.torch", "mpmath", "pydantic", "typer", "rich.progress", "matplotlib.figure")  # fmt: skip
"""Packages that are loaded once, before each command gets a process of its own: they cost more than most commands."""


# Running.


def serve(tree: str, compiled: str) -> None:
    """Read jobs from standard input and do each in a fork of this process, as `python -m stobatch` would."""
    for name in PRELOADED:
        __import__(name)
    sys.dont_write_bytecode, sys.pycache_prefix = False, compiled
    found = find_spec("stobatch")
    assert found and str(found.origin).startswith(f"{tree}/src/"), f"not of {tree}: {found}"  # noqa: PT018
    walk_on_the_network_itself()
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            os.chdir(job["folder"])
            for stream, path in enumerate((os.devnull, job["out"], job["err"])):
                os.dup2(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), stream)
            sys.argv = ["stobatch", *job["arguments"]]
            code: object = 0
            try:
                runpy.run_module("stobatch", run_name="__main__", alter_sys=True)
            except SystemExit as left:
                code = left.code
            except BaseException:
                sys.excepthook(*sys.exc_info())
                code = 1
            # An interpreter that ends in order touches all that was preloaded: more than a second.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code if isinstance(code, int) else int(code is not None))
        _, status, spent = os.wait4(child, 0)
        print(os.waitstatus_to_exitcode(status), round(spent.ru_utime + spent.ru_stime, 1), flush=True)


def walk_on_the_network_itself() -> None:
    """Let no attack fold a network, where this tree can: its last bits are others, and a training amplifies them."""
    try:
        folding = import_module("stobatch.models.folded")
    except ImportError:  # a tree from before there was folding
        return
    folding.fold = lambda network, **options: None  # type: ignore[attr-defined]


class Runner:
    """Runs chains of commands with the sources of one tree, one command at a time."""

    def __init__(self, tree: Path, compiled: Path) -> None:
        self.tree = tree
        self.seconds: list[tuple[float, str]] = []
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        fixed = {"OMP_NUM_THREADS": "1", "COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb", "LC_ALL": "C.UTF-8"}
        self.environment = {**os.environ, **fixed, "PATH": path, "PYTHONPATH": str(tree / "src")}
        self.server = subprocess.Popen(
            [sys.executable, "-P", __file__, "--serve", str(tree), str(compiled)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self.environment,
        )  # fmt: skip

    def run(self, lines: list[str], folder: Path) -> None:
        """Leave in a folder what the commands leave (`work`) and what they said (`said`); last, where that was."""
        shutil.rmtree(folder, ignore_errors=True)
        work, said = folder / "work", folder / "said"
        work.mkdir(parents=True)
        said.mkdir()
        for number, line in enumerate(lines):
            command = line.partition("# exit ")[0]
            ended = self._shell(command[1:], work) if line.startswith("$") else self._ask(command, work, said, number)
            (said / f"{number:02}.code").write_text(f"{ended}\n")
        (folder / "place.json").write_text(
            json.dumps({"WORK": str(work), "TREE": str(self.tree), "seconds": self.seconds})
        )
        self.seconds = []

    def _shell(self, command: str, work: Path) -> int:
        return subprocess.run(
            ["bash", "-c", command], cwd=work, env=self.environment, capture_output=True, check=False
        ).returncode

    def _ask(self, command: str, work: Path, said: Path, number: int) -> int:
        given = [name for part in shlex.split(command) for name in (sorted(glob(part, root_dir=work)) or [part])]
        out, err = (str(said / f"{number:02}.{end}") for end in ("out", "err"))
        assert self.server.stdin
        assert self.server.stdout
        self.server.stdin.write(json.dumps({"folder": str(work), "out": out, "err": err, "arguments": given}) + "\n")
        self.server.stdin.flush()
        ended, seconds = self.server.stdout.readline().split()
        self.seconds.append((float(seconds), command[:60]))
        return int(ended)

    def close(self) -> None:
        self.server.communicate()


# Comparing.


@dataclass(frozen=True)
class Difference:
    """A place where two folders differ: a file, and a key in it where it has keys."""

    file: str
    key: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}{f' [{self.key}]' if self.key else ''}: {self.text}"


def is_listed(name: str, key: str, listed: list[tuple[str, str, str]]) -> bool:
    return any(fnmatchcase(name, file) and fnmatchcase(key, pattern) for file, pattern, _ in listed)


def compare(base: Path, new: Path, name: str = "") -> Iterator[Difference]:
    """Everything in which two folders that `Runner.run` left differ, but for values that are VOLATILE."""
    places = [json.loads((folder / "place.json").read_text()) for folder in (base, new)]
    entries = [{str(path.relative_to(folder)): path for path in folder.rglob("*")} for folder in (base, new)]
    for file in sorted(entries[0].keys() | entries[1].keys()):
        one, other = (found.get(file) for found in entries)
        known = f"{name}/{file}"
        if file == "place.json":
            continue
        if one is None or other is None:
            yield Difference(known, "", "missing now" if other is None else "was not there")
            continue
        modes = [stat.filemode(path.lstat().st_mode) for path in (one, other)]
        if modes[0] != modes[1]:
            yield Difference(known, "mode", " -> ".join(modes))
        if one.is_file() and other.is_file():
            texts = [dict(content(path, place)) for path, place in zip((one, other), places, strict=True)]
            for text in texts:
                text.update((key, "varies") for key in text if is_listed(known, key, VOLATILE))
            yield from (Difference(known, key, said) for key, said in _differences(*texts))


def _differences(one: dict[str, str], other: dict[str, str]) -> Iterator[tuple[str, str]]:
    for key in sorted(one.keys() | other.keys()):
        a, b = one.get(key, "no such key"), other.get(key, "no such key")
        if a != b:
            start = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            start = max(0, start - 20)
            yield key, f"{a[start : start + 80]!r} -> {b[start : start + 80]!r}"


def content(path: Path, place: dict[str, str]) -> Iterator[tuple[str, str]]:
    """What a file says, as keys and texts that are equal only where the values are."""
    if path.suffix == ".safetensors":
        raw = path.read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8:start])
        yield from ((f"metadata/{key}", value) for key, value in header.pop("__metadata__", {}).items())
        for name, entry in header.items():
            first, last = (start + offset for offset in entry["data_offsets"])
            yield name, f"{entry['dtype']} {entry['shape']} {hashlib.sha256(raw[first:last]).hexdigest()}"
    elif path.suffix == ".parquet":
        table = pyarrow.parquet.read_table(path)
        yield from ((f"metadata/{k.decode()}", v.decode()) for k, v in (table.schema.metadata or {}).items())
        for name in table.column_names:
            yield f"{name}/type", str(table.schema.field(name).type)
            yield from ((f"{name}/{row}", repr(value)) for row, value in enumerate(table[name].to_pylist()))
    else:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            yield "", hashlib.sha256(path.read_bytes()).hexdigest()
            return
        for name in ("WORK", "TREE"):
            text = text.replace(place[name], name)
        try:
            yield from _flat(json.loads(text), "")
        except ValueError:
            for pattern, word in MASKED.items():
                text = re.sub(pattern, word, text)
            yield from ((f"line {number}", line) for number, line in enumerate(text.split("\n"), 1))


def _flat(value: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict | list):
        yield key, f"{type(value).__name__} of {len(value)}"
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for name, part in pairs:
            yield from _flat(part, f"{key}/{name}" if key else str(name))
    else:
        yield key, repr(value)


# Both.


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="HEAD", help="the commit to compare with")
    parser.add_argument("--only", default="*", help="only chains with such names, as in 'sound*'")
    parser.add_argument("--keep", type=Path, help="leave what this tree made in this folder")
    parser.add_argument("--jobs", type=int, default=1, help="chains that run at a time")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(*arguments.serve)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    started = time.monotonic()
    commit = _git("rev-parse", "--verify", f"{arguments.base}^{{commit}}")
    chains = {name: lines for name, lines in CHAINS.items() if fnmatchcase(name, arguments.only)}
    if not chains:
        parser.error(f"no chain is named {arguments.only}; there are {', '.join(CHAINS)}")
    with tempfile.TemporaryDirectory(prefix="same-") as temporary:
        compiled = Path(temporary) / "compiled"
        before = {name: CACHE / commit / _key(name, lines) for name, lines in chains.items()}
        missing = [name for name, folder in before.items() if not (folder / "place.json").exists()]
        if missing:
            tree = Path(temporary).resolve() / "base"
            _git("worktree", "add", "--detach", str(tree), commit)
            try:
                for name, _ in _run(tree, compiled, {name: before[name] for name in missing}, arguments.jobs):
                    print(f"base {commit[:12]}: {name}", flush=True)
            finally:
                _git("worktree", "remove", "--force", str(tree))
        print(f"base {commit[:12]} took {time.monotonic() - started:.0f} s", flush=True)
        place = (arguments.keep or Path(temporary) / "new").resolve()
        unlike, meant, commands = 0, 0, 0
        for name, folder in _run(ROOT, compiled, {name: place / name for name in chains}, arguments.jobs):
            found = [*compare(before[name], folder, name), *surprises(folder, chains[name], name)]
            wrong = [difference for difference in found if not is_listed(difference.file, difference.key, INTENDED)]
            meant, unlike, commands = meant + len(found) - len(wrong), unlike + len(wrong), commands + len(chains[name])
            _print(name, chains[name], wrong)
    verdict = f"{unlike} differences" if unlike else "the same"
    print(f"{verdict}: {commands} commands, {meant} intended differences, {time.monotonic() - started:.0f} s")
    return int(unlike > 0)


def surprises(folder: Path, lines: list[str], name: str) -> Iterator[Difference]:
    """Commands of this tree that did not end as their line says."""
    for number, line in enumerate(lines):
        expected = int(line.partition("# exit ")[2] or 0)
        ended = int((folder / "said" / f"{number:02}.code").read_text())
        if ended != expected:
            said = [folder / "said" / f"{number:02}.{end}" for end in ("err", "out")]
            text = " ".join(file.read_text()[-300:] for file in said if file.exists())
            yield Difference(f"{name}/said/{number:02}.code", "expected", f"{expected}, and it is {ended}: {text}")


def _print(name: str, lines: list[str], differences: list[Difference]) -> None:
    for number, line in [*enumerate(lines), (None, "files")]:
        start = f"{name}/work/" if number is None else f"{name}/said/{number:02}."
        here = [str(difference) for difference in differences if difference.file.startswith(start)]
        more = f"\n    and {len(here) - 5} more" if len(here) > 5 else ""
        print("\n    ".join([f"{'differs' if here else 'same':8}{name}: {line[:100]}", *here[:5]]) + more, flush=True)


def _run(tree: Path, compiled: Path, folders: dict[str, Path], jobs: int) -> Iterator[tuple[str, Path]]:
    """Run chains into folders, by some processes at a time, and name each when it and those before it are done."""
    local = threading.local()
    runners = []

    def start() -> None:
        local.runner = Runner(tree, compiled)
        runners.append(local.runner)

    pool = ThreadPoolExecutor(jobs, initializer=start)
    try:
        done = {name: pool.submit(lambda n, f: local.runner.run(CHAINS[n], f), name, f) for name, f in folders.items()}
        for name, future in done.items():
            future.result()
            yield name, folders[name]
    finally:
        pool.shutdown(cancel_futures=True)
        for runner in runners:
            runner.close()


def _key(name: str, lines: list[str]) -> str:
    """A folder's name that is another where commands, machine or packages are."""
    info = Path("/proc/cpuinfo")
    cpu = re.search("model name.*", info.read_text()) if info.exists() else None
    packages = [importlib.metadata.version(package) for package in ("torch", "numpy", "scipy", "pyarrow")]
    whole = [lines, cpu.group() if cpu else platform.processor(), platform.python_version(), packages]
    return f"{name}-{hashlib.sha256(json.dumps(whole).encode()).hexdigest()[:12]}"


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ).stdout.strip()


if __name__ == "__main__":
    raise SystemExit(main())
