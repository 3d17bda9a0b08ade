"""What happens to one process of several: given as plain data, arranged inside that process before it starts.

Accidents (a kill at a step, a full disk, a clock that is wrong) are what an operator may see; twins are programs with
one mistake each, which the tests must notice.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Accident = dict[str, Any]


def arrange(accident: Accident) -> None:
    """Arrange everything that is asked for; a name that is not known is a mistake of the test."""
    unknown = accident.keys() - ARRANGED.keys()
    if unknown:
        raise ValueError(f"no such accident: {unknown}")
    for name, value in accident.items():
        ARRANGED[name](value)


# Accidents.


def arguments(more: list[str]) -> None:
    """Given after the others, and so outdoing them."""
    sys.argv += more


def leave_a_sleeper(seconds: float) -> None:
    """A process that outlives its parent, in a session of its own."""
    if os.fork() == 0:
        os.setsid()
        time.sleep(seconds)
        os._exit(0)


def other_weights(yes: bool) -> None:
    """A network whose first weight is another one."""
    from stobatch import training_run as training

    real = training.make_network

    def make_network(*given: Any) -> Any:
        network = real(*given)
        next(network.parameters()).data.view(-1)[0] += 1e-6
        return network

    training.make_network = make_network


def other_labels(yes: bool) -> None:
    """Data in which one label is another one."""
    from stobatch import training_run as training

    real = training.read_data

    def read_data(*given: Any, **named: Any) -> Any:
        dataset = real(*given, **named)
        dataset.train.labels[7] = (dataset.train.labels[7] + 1) % 10
        return dataset

    training.read_data = read_data


def environment(values: dict[str, str]) -> None:
    os.environ.update(values)


def clock_ahead(seconds: float) -> None:
    real = time.time
    time.time = lambda: real() + seconds


def other_code(digest: str) -> None:
    from stobatch.training.engines import distributed as launch

    launch.code_digest = lambda: digest  # type: ignore[assignment]


def other_torch(version: str) -> None:
    import torch

    torch.__version__ = version


def largest_file(limit: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def _at_step(step: int, happen: Callable[[], object]) -> None:
    """Let something happen as this process begins its part of a step, once."""
    from stobatch.training import Trainable

    real, done = Trainable.release, list[bool]()

    def release(self: Trainable, at: int, *given: Any, **named: Any) -> Any:
        if at == step and not done:
            done.append(True)
            happen()
        return real(self, at, *given, **named)

    Trainable.release = release  # type: ignore[method-assign]


def signal_at_step(what: list[int]) -> None:
    """A signal to itself: [signal, step]."""
    number, step = what
    _at_step(step, lambda: os.kill(os.getpid(), number))


def sleep_at_step(what: list[float]) -> None:
    """A step that takes long: [seconds, step]."""
    seconds, step = what
    _at_step(int(step), lambda: time.sleep(seconds))


def alter_at_step(what: list[Any]) -> None:
    """One byte of a file: [file, step]."""
    file, step = Path(what[0]), what[1]

    def alter() -> None:
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)

    _at_step(step, alter)


def drift_at_step(step: int) -> None:
    """One bit of one parameter, as failing memory would flip it.

    Every process then adds the same update, which is rounded: it could swallow the last bit of a small weight. The
    highest bit of the mantissa moves the largest weight by a quarter of it or more, which no rounding takes back.
    """
    import torch

    from stobatch.training import Trainable

    real = Trainable.release

    def release(self: Trainable, at: int, *given: Any, **named: Any) -> Any:
        if at == step:
            first = next(iter(self.parameters.values())).data.view(-1)
            first.view(torch.int32)[first.abs().argmax()] ^= 1 << 22
        return real(self, at, *given, **named)

    Trainable.release = release  # type: ignore[method-assign]


def slow_step(seconds: float) -> None:
    from stobatch.training import Trainable

    real = Trainable.release

    def release(self: Trainable, at: int, *given: Any, **named: Any) -> Any:
        time.sleep(seconds)
        return real(self, at, *given, **named)

    Trainable.release = release  # type: ignore[method-assign]


def kill_at_fsync(what: list[Any]) -> None:
    """A kill while a file is written, or (1) just after it took its place: [part of its temporary name, 0 or 1, n-th].

    Every file is flushed once before it takes its place, and its folder once afterwards.
    """
    name, after, number = what
    real, seen, taken = os.fsync, [0], [False]

    def fsync(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if taken[0] and after:
            os.kill(os.getpid(), signal.SIGKILL)
        if os.path.isfile(path) and name in path:
            if seen[0] == number:
                if not after:
                    os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
                    os.kill(os.getpid(), signal.SIGKILL)
                taken[0] = True
            seen[0] += 1
        real(descriptor)

    os.fsync = fsync


# Twins.


def plain_sums(yes: bool) -> None:
    """Gradients are added in float32 as they come."""
    from stobatch.training.exact_sum import ExactSum

    def add(self: ExactSum, part: Any) -> None:
        for name, value in part.items():
            kept = self._coarse[name]
            kept.copy_((kept.float() + value.detach().reshape(-1).float()).double())

    ExactSum.add = add  # type: ignore[method-assign]


def noise_of(who: str) -> None:
    """Every device of a trainer adds its noise, or none does."""
    from stobatch.training.engines.base import DeviceRank

    DeviceRank.first = property(lambda self: who == "everyone")  # type: ignore[assignment, method-assign]


def one_seed_for_all(yes: bool) -> None:
    """Every trainer draws the noise of the first one."""
    from stobatch.sound.step import DpSgdTrainable

    def noise(self: DpSgdTrainable, step: int, trainer: int) -> Any:
        return self.seeds.stream(*self._path(step, 0), "noise")

    DpSgdTrainable._noise = noise  # type: ignore[method-assign]


def overlapping_holdings(records: int) -> None:
    """The last so many records of every trainer belong to the next one as well."""
    from stobatch.sound import step as dpsgd_trainable

    real = dpsgd_trainable.holdings

    def holdings(shards: Any, num_trainers: int) -> Any:
        owned = real(shards, num_trainers)
        return [owned[0], *((range(own[0].start - records, own[0].stop), *own[1:]) for own in owned[1:])]

    dpsgd_trainable.holdings = holdings


def other_rate(times: float) -> None:
    """Samples are drawn at another rate than planned."""
    from stobatch.sound import step as dpsgd_trainable

    real = dpsgd_trainable.poisson_sample
    dpsgd_trainable.poisson_sample = lambda count, rate, generator: real(count, rate * times, generator)


# Instruments.


def without_examples(yes: bool) -> None:
    """Examples add nothing, so that a release is its noise."""
    import torch

    from stobatch.sound.step import DpSgdTrainable

    def clipped(self: DpSgdTrainable, *given: Any) -> Any:
        return {name: torch.zeros_like(parameter) for name, parameter in self.parameters.items()}

    DpSgdTrainable._clipped = clipped  # type: ignore[method-assign]


def record(folder: str) -> None:
    """Keep, per process, what it hands to the sum of a step and what every step released."""
    import torch

    from stobatch.training import Trainable
    from stobatch.training.engines import Gradients

    parts, releases = list[Any](), list[Any]()
    real_parts, real_release = Trainable._parts_of, Trainable.release

    def parts_of(self: Trainable, step: int, task: Any, share: Any) -> Iterator[Gradients]:
        own: dict[str, Any] = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in self.parameters.items()}
        for part in real_parts(self, step, task, share):
            for name, value in part.items():
                own[name] += value.double()
            yield part
        parts.append((step, task.trainer, share.device, torch.cat([value.flatten() for value in own.values()])))

    def release(self: Trainable, step: int, *given: Any, **named: Any) -> Any:
        averaged = real_release(self, step, *given, **named)
        releases.append(torch.cat([value.flatten() for value in averaged.gradients.values()]))
        rank = os.environ.get("RANK", "0")
        torch.save({"parts": parts, "releases": releases}, f"{folder}/recorded-{rank}.pt")
        return averaged

    Trainable._parts_of, Trainable.release = parts_of, release  # type: ignore[method-assign]


def record_samples(folder: str) -> None:
    """A line for every piece that this process read: step, trainer, and the positions of the examples."""
    from stobatch.sound.step import DpSgdTrainable
    from stobatch.training.trainable import Reader

    real_fetch, real_parts, now = Reader.fetch, DpSgdTrainable.parts, [-1, -1]

    def parts(self: DpSgdTrainable, task: Any, step: int, share: Any) -> Iterator[Any]:
        now[:] = [step, task.trainer]
        yield from real_parts(self, task, step, share)

    def fetch(self: Reader, rows: Any) -> Any:
        with open(f"{folder}/samples-{os.environ['RANK']}.txt", "a") as out:
            out.write(" ".join(map(str, [*now, *rows.tolist()])) + "\n")
        return real_fetch(self, rows)

    DpSgdTrainable.parts, Reader.fetch = parts, fetch  # type: ignore[method-assign]


def count_steps(file: str) -> None:
    """A line for every step that was released to this process, with its number."""
    from stobatch.training import Trainable

    real = Trainable.release

    def release(self: Trainable, at: int, *given: Any, **named: Any) -> Any:
        averaged = real(self, at, *given, **named)
        with open(file, "a") as out:
            out.write(f"{at}\n")
        return averaged

    Trainable.release = release  # type: ignore[method-assign]


def keep_releases(file: str) -> None:
    from support.releases import keep_releases as keep

    keep(file)


ARRANGED: dict[str, Callable[[Any], None]] = {
    function.__name__: function
    for function in (
        *(arguments, leave_a_sleeper, other_weights, other_labels),
        *(
            environment,
            clock_ahead,
            other_code,
            other_torch,
            largest_file,
            signal_at_step,
            sleep_at_step,
            alter_at_step,
            drift_at_step,
            slow_step,
            kill_at_fsync,
        ),
        *(plain_sums, noise_of, one_seed_for_all, overlapping_holdings, other_rate),
        *(without_examples, record, record_samples, count_steps, keep_releases),
    )
}
