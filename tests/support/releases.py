"""What a training releases, taken down by the process itself: for tests and for `benchmarks/reliability`."""

from __future__ import annotations

from typing import Any


def keep_releases(file: str) -> None:
    """A line for every step that was released, with a digest of what was released."""
    from stobatch.training import Trainable
    from stobatch.training.checkpoint import tensors_digest

    real = Trainable.release

    def release(self: Trainable, step: int, *given: Any, **named: Any) -> Any:
        averaged = real(self, step, *given, **named)
        with open(file, "a") as out:
            out.write(f"{step} {tensors_digest(averaged.gradients)}\n")
        return averaged

    Trainable.release = release  # type: ignore[method-assign]
