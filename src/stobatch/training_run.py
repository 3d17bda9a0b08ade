"""`plan` and `train`. Everything that can be checked is checked before anything is written."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from stobatch import data
from stobatch.book import Booking, cost_of
from stobatch.bounds.certifier import why_unbounded
from stobatch.config import RunConfig, require_config
from stobatch.data import Dataset, DatasetInfo, Examples, TrainingExamples, require_dataset
from stobatch.data.overlap import is_own, require_apart
from stobatch.data.sources import hold_out, is_public
from stobatch.dp.canaries import CANARY_SCORES, draw_run_canaries, replace_by_canaries
from stobatch.dp.clipping import Batch, bytes_per_example, clipped_sum_mixed, clipper_for, parameters_without_rule
from stobatch.dp.mixing import FEW_ROWS
from stobatch.dp.plan import DpSgdPlan, Plan
from stobatch.errors import BudgetError, ModelError, RunError, SettingError
from stobatch.evaluation.tables import data_root, read_data
from stobatch.files import PRIVATE, serialise_tensors, tensors_sha256, write_atomically, write_tensors
from stobatch.loading import (
    TrainedModel,
    describe_network,
    load,
    make_network,
    make_plan,
    name_network,
    plain_network,
    seeds_of,
)
from stobatch.methods import method_of
from stobatch.models import Classifier, HandedOver, budget_mb, low_rank, rows_in_memory
from stobatch.models.experiments import require_function
from stobatch.models.handed_over import public_points
from stobatch.models.low_rank import as_deployed
from stobatch.models.parts import choose_parts
from stobatch.models.validators import SavedState
from stobatch.prior import require_unseen, take_prior
from stobatch.processes import attempt, first_on_its_node
from stobatch.results import DataDigests, HistoryRow, NetworkFacts, Training
from stobatch.runs import MANIFEST, START, Run, commit, make_key, seal
from stobatch.seeds import Seeds
from stobatch.settings import content_hash
from stobatch.sound.settings import DpSgdSettings
from stobatch.training import Trainable
from stobatch.training import train as run_training
from stobatch.training.checkpoint import TrainingState, tensors_digest
from stobatch.training.device import PeakMemory, environment, use_device
from stobatch.training.engines import Engine
from stobatch.training.engines.distributed import REMEDIES, engine_for, placed
from stobatch.training.ledger import Ledger
from stobatch.training.observer import Callback, CallingBack, Observer, TensorBoardLog
from stobatch.training.trainable import EPSILON_SPENT, Monitored, parameter_precision
from stobatch.types import Neighbours

_MOST_ROWS = 512
"""Of the largest public batch; methods repeat the experiments at the size that they pass, where they pass it."""


def plan(
    config: RunConfig,
    *,
    dataset: Dataset | None = None,
    network: nn.Module | None = None,
    prior: str | Path | None = None,
) -> Plan:
    """Return every number that privacy depends on, before any data is read.

    A network of your own, any `nn.Module`, is tried out on public points first, and the plan says how it will be
    clipped and which certificates it can have. `prior` is what training would start from, as in `train`.
    """
    require_config(config)
    require_dataset(dataset)
    config = name_network(config, network)
    info = (
        data.without_held_out(dataset.info, config.data) if dataset else data.describe(config.data, data_root(config))
    )
    if prior is not None:
        config, _ = take_prior(config, info, prior, network)
    the_plan = make_plan(config, info, network)
    given = None if network is None else plain_network(config, info, Seeds.reproducible(0), network)
    if given is not None:
        choose_parts(given, config.model, torch.Generator())
    return replace(the_plan, network=_describe_prospects(config, given)) if isinstance(given, HandedOver) else the_plan


def _describe_prospects(config: RunConfig, network: HandedOver) -> tuple[str, ...]:
    """Try a network on public points; return how it will be clipped and certified, or raise where none can train it."""
    batch = getattr(config.method, "batch_size", _MOST_ROWS)
    require_function(network, min(batch, rows_in_memory(network, budget_mb(config.machine) // 8, most=_MOST_ROWS)))
    trained = sum(p.numel() for p in network.parameters() if p.requires_grad)
    held = sum(p.numel() for p in network.parameters()) - trained
    sizes = f"network: {network.name}, {trained:,} values to train" + (f", {held:,} held fixed" if held else "")
    clipped = (_clipping_words(network),) if isinstance(config.method, DpSgdSettings) else ()
    return sizes, *clipped, _certificate_words(config, network)


def _clipping_words(network: HandedOver) -> str:
    probe = public_points(network, FEW_ROWS), torch.arange(FEW_ROWS, device=network.device) % network.num_classes
    try:
        way = clipper_for(network, _cross_entropy, probe)
    except (RuntimeError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())[:160].rstrip(".")
        raise ModelError(
            f"no example's gradient can be formed in your {network.name}: {reason}.",
            why="DP-SGD clips every example's gradient, and torch.func forms it where one pass does not.",
            remedy="Let its forward not branch on values, and change no tensor in place.",
        ) from None
    if not (formed := bytes_per_example(network, way)):
        return "clipping: in one backward pass, no example's gradient is formed"
    left_over = [f"'{name.removeprefix('module.')}'" for name in parameters_without_rule(network)]
    named = ", ".join(left_over[:4]) + (", ..." if len(left_over) > 4 else "")
    cost = f"{formed:,} bytes for each example that passes at once"
    if way is clipped_sum_mixed:
        return f"clipping: in one backward pass, and in a second that forms gradients of {named}, {cost}"
    why = f"no layer that one pass can clip holds {named}" if left_over else "a weight is used outside of its layer"
    return f"clipping: every example's gradient is formed, {cost}: {why}"


def _cross_entropy(network: nn.Module, batch: Batch) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(network(inputs), labels, reduction="none")


def _certificate_words(config: RunConfig, network: HandedOver) -> str:
    ways = method_of(config).certificates
    if "bounds" not in ways:
        return f"certificates: method {config.method.title} has none for a network of your own"
    unbounded = why_unbounded(as_deployed(network)).rstrip(".")
    noise = config.method.noise if isinstance(config.method, DpSgdSettings) else None
    votes = f"votes under {noise}" if noise is not None else ""
    if not unbounded:
        return f"certificates: bounds, of forward as torch.fx follows it{f'; or {votes}' if votes else ''}"
    without = "votes need method.smoothing_stddev, which is 0"
    return f"certificates: {votes or 'none, ' + without}; {unbounded}"


def train(
    config: RunConfig,
    out: str | Path,
    *,
    dataset: Dataset | None = None,
    network: nn.Module | None = None,
    prior: str | Path | None = None,
    resume: bool = False,
    quiet: bool = False,
    callback: Callback | None = None,
    log: str | None = None,
) -> TrainedModel:
    """Train a model into a run directory, or continue one that was interrupted.

    `network` is any `nn.Module` from inputs in [-1, 1] to one score per class; its sizes are found by a public probe,
    and a copy of it is trained. Without one the configuration says what is built. `prior` is what training starts from
    instead of random weights: a finished run on other data, or a safetensors file with its card next to it.

    Under torchrun every process calls this with the same arguments; one of them writes and shows progress.
    `callback` is told every `training.monitor_every` steps what may be seen of the training, and with
    `log="tensorboard"` it is written for TensorBoard into the run's private folder (docs/watching.md).
    """
    require_config(config)
    require_dataset(dataset)
    if config.search.settings:
        raise SettingError(
            "search.settings are not for one training.",
            why="What a search costs is paid by all of its candidates together.",
            remedy="Run `stobatch tune`, or leave search.settings unset.",
        )
    _require_log(log)
    config = name_network(config.replace(machine=placed(config.machine)), network)
    run, start = Run.at(out), None
    if prior is not None or config.prior.name is not None:
        info = dataset.info if dataset else data.describe(config.data, data_root(config))
        config, start = take_prior(config, info, prior, network, run)
    with engine_for(config) as engine:
        # Agents of torchrun count for themselves: one that is new to the group has replaced no other.
        replaced = max(int(count) for count in engine.exchange("replaced", str(attempt())))
        resume = resume or replaced > 0
        observers = _observers(run, callback, log)
        return _train(
            engine, config, run, dataset, network, start, prior=prior, resume=resume, quiet=quiet, observers=observers
        )


def _observers(run: Run, callback: Callback | None, log: str | None) -> tuple[Observer, ...]:
    observers: tuple[Observer, ...] = (CallingBack(callback),) if callback is not None else ()
    return (*observers, TensorBoardLog(run.path / PRIVATE / "tensorboard")) if log else observers


def _require_log(log: str | None) -> None:
    if log not in (None, "tensorboard"):
        raise SettingError(f"there is no log '{log}'.", remedy="Use tensorboard, or a callback in Python.")


def train_candidate(
    config: RunConfig,
    out: Path,
    seeds: Seeds,
    *,
    dataset: Dataset | None,
    network: nn.Module | None,
    start: Mapping[str, Tensor] | None,
) -> TrainedModel:
    """Train one candidate of a search, or continue it, with seeds that the search has drawn for it.

    The search has entered all of its candidates in the owner's book. Nothing is printed: whoever counts lines would
    learn how many candidates there are.
    """
    config, run = name_network(config, network), Run(out)
    with engine_for(config) as engine:
        return _train(engine, config, run, dataset, network, start, resume=True, quiet=True, observers=(), seeds=seeds)


def _train(
    engine: Engine,
    config: RunConfig,
    run: Run,
    dataset: Dataset | None,
    network: nn.Module | None,
    start: Mapping[str, Tensor] | None,
    *,
    prior: str | Path | None = None,
    resume: bool,
    quiet: bool,
    observers: tuple[Observer, ...],
    seeds: Seeds | None = None,
) -> TrainedModel:
    run.require_new(config, resume=resume)
    the_plan = plan(config, dataset=dataset, network=network)
    booking = None if config.search.settings else _book(config, the_plan, run, dataset)
    if engine.leads and not quiet:
        for line in the_plan.network:
            print(f"stobatch: {line}", file=sys.stderr)
    device = use_device(config.machine)
    seeds, given = _common_seeds(engine, seeds or seeds_of(config, run)), dataset is not None
    own = given or is_own(config.data)
    dataset = hold_out(dataset, config.data, seeds)[0] if dataset else _read_data(engine, config, seeds, quiet)
    copies = _compare_records(dataset, config, prior, own=own)
    if engine.leads and not quiet:
        _warn_owner(config, copies, len(dataset.test))
    net = make_network(config, dataset.info, seeds, network, start)
    net = net.to(device, parameter_precision(config.machine.precision))
    trainable = _add_canaries(config, the_plan, dataset, net, seeds)
    saved = SavedState(net, trainable.released_state) if trainable.claims_privacy else None
    trainable.check_data(engine.arrange(len(trainable.tasks(0))))
    trained_on = dataset.train.fingerprint()
    if run.has("data", private=True) and run.read("data", private=True).get("sha256") != trained_on:
        raise RunError(f"{run.path} was started with other training data.", remedy="Hand over the same data to resume.")
    first, size_at_start = tensors_digest(dict(net.named_parameters())), _size(net)
    # A digest of private data confirms guesses; one that is mixed with the seeds does not.
    mixed = f"{seeds.child('training data', trained_on).root:064x}"[:12]
    engine.require_equal("start", {"training data": mixed, "first parameters": first}, REMEDIES)
    _require_budget(engine, booking, dataset.train)
    # Nothing is written before everything above has passed, in every process.
    with run.held() if engine.leads else nullcontext():
        # A finished run is sealed: to write its settings again, with another machine's, would break the seal.
        if engine.leads and not run.is_trained:
            write_start(run, config, dataset.info, the_plan, seeds, start)
            run.write("data", {"sha256": trained_on, "test_copies": copies}, private=True)
            trainable.save_private(run.path, config.training_hash)
            observers += _enter(booking, the_plan, run, dataset.train)
        _require_one_directory(engine, run)
        engine.open_log(run.path)
        if not run.is_trained:
            started, memory = time.monotonic(), PeakMemory.begin(device)
            state = run_training(
                trainable, config, engine, run.path, dataset.test, resume=resume, quiet=quiet, observers=observers
            )
            if engine.leads:
                spent = keep_measurements(run, seeds, time.monotonic() - started, **memory.to_dict())
                if not config.search.settings:
                    _warn_if_diverged(size_at_start, _size(net))
                merge = partial(_merge_adapters, net, saved, the_plan, handed_over=network is not None)
                facts = {"data": described_data(run, dataset, given), "processes": engine.processes}
                _write_end(run, config, trainable, merge, state, dataset.test, spent | facts, the_plan)
            engine.note("done")
            if engine.leads:
                _settle(booking, the_plan, run)
                seal(run, "train", environment(device))
            engine.exchange("trained", "")
        elif engine.leads and not run.has(MANIFEST):
            # Killed after the model and before its manifest.
            seal(run, "train", environment(device))
    trained = load(run.path, network=network, device=str(device), threads=config.machine.threads)
    return replace(trained, config=trained.config.replace(machine=config.machine))


def _compare_records(dataset: Dataset, config: RunConfig, prior: str | Path | None, *, own: bool) -> int | None:
    """Refuse training records that the start has seen, or that are test records; return how many of these there are."""
    if prior is not None:
        require_unseen(prior, dataset.train)
    return require_apart(dataset, config.data) if own else None


def _warn_owner(config: RunConfig, copies: int | None, num_test: int) -> None:
    """Say what the data's owner, and no one else, should know before the training."""
    lines = []
    if copies:
        lines += [f"{copies} of {num_test} test records are training records. This is for the data's owner alone."]
    if config.prior.new_head:
        lines += [f"the last layer is drawn afresh: the prior {config.prior.name} has one for other classes, or none."]
    for line in lines:
        print(f"stobatch: {line}", file=sys.stderr)


def _book(config: RunConfig, the_plan: Plan, run: Run, dataset: Dataset | None) -> Booking | None:
    """Return the booking of an unfinished training, if its owner keeps a book.

    One that is known to exceed the limit is refused before data are read.
    """
    booking = None if run.is_trained else Booking.of(config, the_plan, run)
    if booking is not None and dataset is None:
        booking.require_allowed()
    return booking


def _require_budget(engine: Engine, booking: Booking | None, records: TrainingExamples) -> None:
    """Let the process that leads ask the book about these records, and every process hear its answer."""
    if booking is None:
        return
    refusal: BudgetError | None = None
    if engine.leads:
        try:
            booking.require_allowed(records)
        except BudgetError as error:
            refusal = error
    answer = engine.exchange("budget", "refused" if refusal else "")[0]
    if refusal is not None:
        raise refusal
    if answer:
        raise BudgetError("the budget book refuses this training.", remedy="See what its first process says.")


def _enter(booking: Booking | None, the_plan: Plan, run: Run, records: TrainingExamples) -> tuple[Observer, ...]:
    """Enter a training in its book, before its first step."""
    if booking is None:
        return ()
    booking.enter(run, records)
    return (_Amending(booking, the_plan, run),)


def _settle(booking: Booking | None, the_plan: Plan, run: Run) -> None:
    if booking is not None:
        booking.settle(cost_of(the_plan, Ledger.of(run.path).accounted or None))


@dataclass(frozen=True)
class _Amending(Observer):
    """Tells the book where a crash makes more steps necessary than were planned, before they are made."""

    booking: Booking
    plan: Plan
    run: Run

    def begin(self, first: int, last: int) -> None:
        ledger = Ledger.of(self.run.path)
        if isinstance(self.plan, DpSgdPlan):
            counted = ledger.accounted + self.plan.steps - last
            if counted > self.plan.most_steps:
                self.booking.amend(cost_of(self.plan, counted))


def _size(network: Classifier) -> float:
    """Return the length of all parameters as one vector."""
    return float(torch.stack([p.detach().double().norm() for p in network.parameters()]).norm())


_DIVERGED = 1000
"""How many times as long parameters become in no training that learns something."""


def _warn_if_diverged(before: float, after: float) -> None:
    # Parameters that start at 0 have no size to compare with.
    if before and not after <= _DIVERGED * before:
        print(
            f"stobatch: the training has diverged: its parameters are {after / before:.2g} times as large as at the "
            "start. Its privacy holds, its accuracy is luck. Lower training.learning_rate.",
            file=sys.stderr,
        )


def _write_end(
    run: Run,
    config: RunConfig,
    trainable: Trainable,
    merge: Callable[[], NetworkFacts],
    state: TrainingState,
    held_out: Examples,
    spent: dict[str, Any],
    the_plan: Plan,
) -> None:
    """Write what a training leaves; the model comes last but for the manifest, since it says that all is there."""
    kept, described = trainable.finish(run.path), merge()
    monitored = Monitored.of(held_out, config, trainable.network)
    with trainable.keeping_state():
        measured = monitored.saved(trainable.network)
    if carried := trainable.extra_state():
        path = run.path / PRIVATE / CANARY_SCORES
        write_tensors(path, carried, {"config_hash": config.training_hash}, private=True)
    model = serialise_tensors(trainable.network.state_dict(), {"config_hash": config.training_hash})
    private = sorted((run.path / PRIVATE).glob("*.safetensors"))
    Training(
        **kept,
        steps=state.step,
        **spent,
        network=described,
        device=str(trainable.network.device),
        torch=torch.__version__,
        **measured,
        **_describe_history(trainable, the_plan),
        weights_sha256=tensors_sha256(model),
        private_files={path.name: commit(run, path.read_bytes()) for path in private},
        history=tuple(
            HistoryRow.model_validate({"step": int(step), "test_accuracy": accuracy, trainable.monitored: monitored})
            for step, accuracy, monitored in state.history
        ),
    ).write(run)
    write_atomically(run.model_file, lambda out: out.write(model))


def _describe_history(trainable: Trainable, the_plan: Plan) -> dict[str, Any]:
    """Return whose accuracies the history has, and who vouches for its ε where it has one."""
    whose = {"history_of": trainable.history_of}
    if trainable.monitored != EPSILON_SPENT:
        return whose
    return whose | {"epsilon_spent_status": the_plan.guarantee.status}


def _merge_adapters(
    network: Classifier, saved: SavedState | None, the_plan: Plan, *, handed_over: bool
) -> NetworkFacts:
    """Make the network that is deployed of the one that was trained, whose fixed parts have to be as they were."""
    if saved is not None:
        saved.require_same()
    if the_plan.parts is not None:
        low_rank.merge(network)
        network.calibrate()
    return describe_network(network, handed_over=handed_over, parts=the_plan.parts)


def keep_measurements(run: Run, seeds: Seeds, seconds: float, **memory: Any) -> dict[str, Any]:
    """Write how long a training took, and how much memory, for the owner; return what others may see of it.

    Both depend on how large the samples were, which no ε covers. Where the seeds are public so are the samples.
    """
    measured = {"seconds_since_last_start": round(seconds, 1), **memory}
    if seeds.public:
        return measured
    run.write("measurements", measured, private=True)
    return {}


def described_data(run: Run, dataset: Dataset, given: bool) -> DataDigests:
    """Return the data of a run for its manifest: sizes, and digests that confirm no guess about anything private."""
    train, test = dataset.train.fingerprint(), dataset.test.fingerprint()
    public = not given and is_public(dataset.info.name)
    digest = {"test_sha256": test} if public else {"test_commitment": commit(run, "test data", test)}
    return DataDigests(
        name=dataset.info.name,
        public=public,
        training_records=dataset.info.num_train,
        test_records=len(dataset.test),
        training_commitment=commit(run, "training data", train),
        **digest,
    )


def _common_seeds(engine: Engine, own: Seeds) -> Seeds:
    """Return those of the process that leads: secret ones are drawn once."""
    return own if own.public else Seeds(engine.common_root(own.root), public=False)


def _read_data(engine: Engine, config: RunConfig, seeds: Seeds, quiet: bool) -> Dataset:
    """Read the data, on one process of each node first, since reading may fetch and unpack."""
    dataset = read_data(config, seeds, quiet or not engine.leads) if first_on_its_node() else None
    engine.exchange("data are there", "")
    return dataset or read_data(config, seeds, quiet=True)


def _require_one_directory(engine: Engine, run: Run) -> None:
    engine.exchange("run directory", "written")
    for rank, seen in enumerate(engine.exchange("run directory seen", str(run.exists))):
        if seen != "True":
            raise RunError(
                f"process {rank} does not see {run.path}.",
                why="Checkpoints are written by all processes, and read by all.",
                remedy="Put --out on a file system that all nodes share.",
            )


def write_start(
    run: Run,
    config: RunConfig,
    info: DatasetInfo,
    the_plan: Plan,
    seeds: Seeds,
    start: Mapping[str, Tensor] | None = None,
) -> None:
    """Write the files that make a directory a run.

    They are its settings, its plan, the public weights that it starts from, if any, and for the owner its secret seeds.
    """
    content = {"config": config.to_dict(), "dataset": info.to_dict()}
    if not run.exists:
        # Before the files that make it a run: one that an older version started has no key and never gets one.
        make_key(run)
    if start is not None:
        write_tensors(run.path / START, start, {"stobatch": "prior"}, private=False)
    run.write("config", {"training_hash": config.training_hash, "content_hash": content_hash(content), **content})
    run.write("plan", the_plan.to_dict())
    if not seeds.public:
        run.write("seeds", {"root": str(seeds.root)}, private=True)


def _add_canaries(config: RunConfig, the_plan: Plan, dataset: Dataset, network: Classifier, seeds: Seeds) -> Trainable:
    """Return the method bound to its data; canaries are added to them, or replace some to keep their number."""
    method, train = method_of(config), dataset.train
    if not config.canaries.num:
        return method.prepare(config, the_plan, network, train, seeds)
    canaries = draw_run_canaries(config, dataset.info, network, the_plan.parts, seeds)
    if config.canaries.kind == "input" and the_plan.guarantee.neighbours is Neighbours.REPLACE_ONE:
        return method.prepare(config, the_plan, network, replace_by_canaries(train.in_memory(), canaries), seeds)
    trainable = method.prepare(config, the_plan, network, train, seeds)
    trainable.add_canaries(canaries)
    return trainable
