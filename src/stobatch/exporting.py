"""`export`: the deployed network of a run as a file that others load without stobatch, with a model card beside it.

**Guarantee.** What is left in the folder has been loaded back and gave the network's labels on public probes. Nothing
of the private folder is in it, unless a public seed has given it away. It is not certified: certificates are about
the arithmetic of the run.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import logging
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stobatch.config import RunConfig
from stobatch.errors import ModelError, RunError, SettingError
from stobatch.files import PRIVATE, read_tensors, write_folder
from stobatch.loading import TrainedModel, load, require_weights
from stobatch.models import Classifier
from stobatch.prediction import picture_rule
from stobatch.reporting.model_card import model_card
from stobatch.results import (
    Audit,
    CertificateSummary,
    Exported,
    ProbeCheck,
    SanityFlag,
    Scores,
    Source,
    StartedRun,
    Training,
    judge_claims,
    untested,
)
from stobatch.runs import Run, require_unchanged, source
from stobatch.types import Status

CARD = "README.md"
PROBE_SEED = 0
RANDOM_INPUTS = 256
CORNERS = 65
_ROWS = 64
"""Inputs of one pass; the last pass has a single one, so that both sizes of batch are compared."""

Scorer = Callable[[Tensor], Tensor]


def export(run: str | Path, out: str | Path, *, to: str, network: nn.Module | None = None) -> Exported:
    """Write the deployed network as torchscript, pt2 (torch.export) or onnx into a new folder, with a model card.

    The file is loaded back first: another label than the network's on a public probe refuses it, and nothing is left. A
    network of your own has to be handed over again, as to `load`.
    """
    form, folder = _require_form(to), Path(out)
    if folder.exists() or folder.is_symlink():
        raise RunError(f"{folder} is already there.", why="Nothing is overwritten.", remedy="Choose another --out.")
    training = _require_network(Run.at(run), network)
    model = load(run, network=network, device="cpu")
    require_unchanged(model.run, ())
    _require_nothing_private(model)
    with _quiet():
        blob = form.save(_trace(model.network))
        check = _compare(model.network, form.load(blob), form.file)
    document = _describe(model, training, to, blob, check, folder)
    write_folder(folder, {form.file: blob, CARD: model_card(document).encode()})
    return document


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep to itself what torch says of its own next versions and of packages that nobody needs here."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _require_network(run: Run, network: nn.Module | None) -> Training:
    run.require_trained()
    training = Training.read(run)
    if network is None and training.network is not None and training.network.handed_over:
        raise RunError(
            f"the network of {run.path} was handed over in Python.",
            why="Its weights alone do not say what is computed with them.",
            remedy=f"Export it there: stobatch.export({str(run.path)!r}, ..., network=...).",
        )
    return training


def _require_nothing_private(model: TrainedModel) -> None:
    """Refuse a network that carries tensors of the private folder, unless a public seed has given them away."""
    if model.plan.public_seeds:
        return
    public = model.network.state_dict().keys()
    carried = [buffer for name, buffer in model.network.named_buffers() if name not in public]
    files = (model.run.path / PRIVATE).glob("*.safetensors")
    kept = (tensor for file in files for tensor in read_tensors(file)[0].values())
    if any(torch.equal(tensor.to(one), one) for tensor in kept for one in carried if one.shape == tensor.shape):
        raise RunError(
            f"the deployed network of {model.run.path} carries noise that is private.",
            why="What the run says of privacy needs that noise secret, and a file would hand it to everybody.",
            remedy="Answer with `stobatch predict` instead, or export a run of another method, or one with a public "
            "--seed: its guarantee is void already.",
        )


# Formats.


@dataclass(frozen=True)
class Form:
    """A format: its file's name, how it is written and loaded back, and what it needs."""

    file: str
    save: Callable[[Any], bytes]
    load: Callable[[bytes], Scorer]
    packages: tuple[str, ...] = ()
    missing: Callable[[], str] = lambda: ""
    """What this version of torch does not have."""


def _trace(network: Classifier) -> Any:
    """Return the network as a graph of torch's own operators, without a path of this machine in it.

    All formats are made from this one: it has no Python in it, such as the gradient that `Squash` shows to attackers.
    """
    example = torch.zeros(2, *network.input_shape, dtype=network.dtype)
    try:
        with torch.no_grad():
            batch = {0: torch.export.Dim("batch")}
            program = torch.export.export(network, (example,), dynamic_shapes=(batch,), strict=False)
    except Exception as error:  # tracing a network of somebody's own raises nearly anything
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ModelError(
            f"torch.export cannot follow this network: {reason}",
            remedy="Write its `forward` with torch functions alone, without branches on the values of its inputs.",
        ) from error
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)
    return program


def _save_torchscript(program: Any) -> bytes:
    with torch.no_grad():
        traced = torch.jit.trace(program.module(), program.example_inputs[0], check_trace=False)  # type: ignore[no-untyped-call]
    written, clean = io.BytesIO(), io.BytesIO()
    torch.jit.save(traced, written)
    with zipfile.ZipFile(written) as found, zipfile.ZipFile(clean, "w") as kept:
        for item in found.infolist():
            # The names of source files, of this machine's folders.
            if not item.filename.endswith(".debug_pkl"):
                kept.writestr(zipfile.ZipInfo(item.filename), found.read(item))
    return clean.getvalue()


def _load_torchscript(blob: bytes) -> Scorer:
    loaded: Scorer = torch.jit.load(io.BytesIO(blob), map_location="cpu")  # type: ignore[no-untyped-call]
    return loaded


def _save_pt2(program: Any) -> bytes:
    written = io.BytesIO()
    torch.export.save(program, written)
    return written.getvalue()


def _load_pt2(blob: bytes) -> Scorer:
    loaded: Scorer = torch.export.load(io.BytesIO(blob)).module()
    return loaded


def _save_onnx(program: Any) -> bytes:
    names: dict[str, Any] = {"input_names": ["inputs"], "output_names": ["scores"]}
    written: Any = torch.onnx.export(program, dynamo=True, verbose=False, **names)
    model = written.model_proto
    for part in (model.graph, *model.functions):
        for node in part.node:
            node.ClearField("metadata_props")
            node.ClearField("doc_string")
    blob: bytes = model.SerializeToString()
    return blob


def _load_onnx(blob: bytes) -> Scorer:
    import onnxruntime

    session = onnxruntime.InferenceSession(blob, providers=["CPUExecutionProvider"])
    return lambda inputs: torch.from_numpy(session.run(None, {"inputs": inputs.numpy()})[0])


def _without_dynamo() -> str:
    return "" if "dynamo" in inspect.signature(torch.onnx.export).parameters else "torch.onnx.export(dynamo=True)"


def _without_jit() -> str:
    return "" if hasattr(getattr(torch, "jit", None), "trace") else "torch.jit"


FORMS = {
    "torchscript": Form("model.pt", _save_torchscript, _load_torchscript, missing=_without_jit),
    "pt2": Form("model.pt2", _save_pt2, _load_pt2),
    "onnx": Form("model.onnx", _save_onnx, _load_onnx, ("onnx", "onnxscript", "onnxruntime"), _without_dynamo),
}


def _require_form(to: str) -> Form:
    """Return a format by its name, once everything that it needs is there."""
    if to not in FORMS:
        raise SettingError(f"there is no format '{to}'.", remedy=f"Use one of {', '.join(FORMS)}.")
    form = FORMS[to]
    absent = [name for name in form.packages if name not in sys.modules and find_spec(name) is None]
    if absent:
        raise SettingError(
            f"{to} needs {', '.join(absent)}, which {'are' if len(absent) > 1 else 'is'} not installed.",
            remedy="Install them: pip install 'stobatch[export]'.",
        )
    if lacking := ("" if find_spec("torch.export") else "torch.export") or form.missing():
        raise SettingError(
            f"torch {torch.__version__} has no {lacking}, which {to} is written with.",
            remedy="Use another version of torch, or another format.",
        )
    return form


# The check.


def probes(shape: tuple[int, ...]) -> Tensor:
    """Return public inputs from a fixed seed: uniform ones, then corners of the range from all -1 to all 1."""
    generator = torch.Generator().manual_seed(PROBE_SEED)
    uniform = torch.rand(RANDOM_INPUTS, *shape, generator=generator) * 2 - 1
    # The share of ones grows from 0 to 1, so that dark and bright pictures are among them.
    share = torch.linspace(0, 1, CORNERS).view(-1, *[1] * len(shape))
    corners = torch.where(torch.rand(CORNERS, *shape, generator=generator) < share, 1.0, -1.0)
    return torch.cat([uniform, corners])


@torch.no_grad()
def _compare(network: Classifier, loaded: Scorer, file: str) -> ProbeCheck:
    inputs = probes(network.input_shape).to(network.dtype)
    own, others = (
        torch.cat([scorer(part.clone()) for part in torch.split(inputs, _ROWS)]).double()
        for scorer in (network, loaded)
    )
    if not bool(own.isfinite().all()):
        raise ModelError("the network returned scores that are NaN or infinite.", remedy="Train it again.")
    largest = float((own - others).abs().max()) if own.shape == others.shape else float("inf")
    differing = int((own.argmax(1) != others.argmax(1)).sum()) if own.shape == others.shape else len(inputs)
    if differing or not largest < float("inf"):
        raise ModelError(
            f"{file}, loaded back, gives another label than the network on {differing} of {len(inputs)} probes.",
            why=f"Scores differ by up to {largest:.3g}. Nothing was written.",
            remedy="Try another format; a network of your own must compute the same while it is traced.",
        )
    return ProbeCheck(
        random_inputs=RANDOM_INPUTS,
        corners=CORNERS,
        seed=PROBE_SEED,
        labels_seen=len(set(own.argmax(1).tolist())),
        largest_difference=largest,
        largest_score=float(own.abs().max()),
    )


# What is known.


def _describe(
    model: TrainedModel, training: Training, to: str, blob: bytes, check: ProbeCheck, folder: Path
) -> Exported:
    certificates, scores = CertificateSummary.read_if_there(model.run), Scores.read_if_there(model.run)
    for found, name, verb in ((certificates, "certificates.json", "certify"), (scores, "scores.json", "evaluate")):
        if found is not None:
            require_weights(model, found.weights_sha256, name, verb)
    flags = scores.flags if scores else ()
    if certificates is not None:
        certificates = _with_refuted(certificates, model.refuted_kinds(), flags)
    started = StartedRun.read(model.run)
    return Exported(
        folder=str(folder),
        file=FORMS[to].file,
        format=to,
        file_sha256=hashlib.sha256(blob).hexdigest(),
        bytes=len(blob),
        method=started.method,
        training_hash=started.training_hash,
        weights_sha256=model.weights_sha256,
        dataset=started.dataset,
        pictures=_describe_pictures(model.config, started.dataset.input_shape),
        dtype=str(model.network.dtype).removeprefix("torch."),
        torch=torch.__version__,
        made_by=Source(**source()),
        check=check,
        test_accuracy=training.test_accuracy,
        test_examples=training.test_examples,
        guarantee=model.guarantee,
        votes=_certifies_votes(model, certificates),
        certificates=certificates,
        flags=flags,
        not_checked=tuple(_not_checked(model, certificates, scores)),
    )


def _certifies_votes(model: TrainedModel, certificates: CertificateSummary | None) -> bool:
    if certificates is not None:
        return any(kind.function == "vote" for kind in certificates.kinds)
    return model.certifies and any(kind.function == "vote" for kind in model.verifier.kinds)


def _with_refuted(
    certificates: CertificateSummary, names: frozenset[str], flags: tuple[SanityFlag, ...]
) -> CertificateSummary:
    """Return certificates with the kinds that an audit broke refuted, and all of a status that an attack broke."""
    broken = {flag.refutes for flag in flags} - {None}
    kinds = (
        kind.replace(status=Status.REFUTED) if kind.name in names or kind.status in broken else kind
        for kind in certificates.kinds
    )
    return certificates.replace(kinds=tuple(kinds))


def _describe_pictures(config: RunConfig, shape: tuple[int, int, int]) -> str:
    """Say how `predict` makes an input of a picture."""
    channels, height, width = shape
    rule, size = picture_rule(config), f"{height}x{width} (height x width)"
    sizes = f"another size than {size} is refused"
    if rule.resize:
        done = "scaled to cover it, and the middle cut out" if rule.crop else "stretched to it"
        sizes = f"another size than {size} is {done} (bilinear, Pillow's)"
    colours = "grey is turned into colour"
    if channels == 1:
        colours = "colour is turned grey (Pillow's mode L)" if rule.recolour else "colour is refused"
    return f"a byte p becomes p / 127.5 - 1 (of 16 bits: p / 32767.5 - 1); {sizes}; {colours}; transparency is refused"


def _not_checked(model: TrainedModel, certificates: CertificateSummary | None, scores: Scores | None) -> list[str]:
    audit = Audit.read_if_there(model.run)
    lines = ["The file was compared on the probes alone: no proof that it computes the same elsewhere was made."]
    lines += ["Nobody computed the run's own numbers again for this card: `stobatch verify RUN` does."]
    if certificates is None:
        lines.append("Certificates: none were made.")
    if scores is None:
        lines.append("Accuracy under attack: not measured.")
    if audit is None:
        lines.append("Audits of privacy and certificates: none were made.")
    else:
        kinds, made_by = (certificates.kinds, certificates.config_hash) if certificates else ((), None)
        claims = judge_claims(model.claim.status, kinds, audit.findings, made_by)
        lines += [f"Audits: not tested: {line}" for line in untested(claims)]
    return lines
