"""What `predict` answers: a label for each picture, and how far no change of it can alter the label."""

from __future__ import annotations

from stobatch.results.certificates import Kind
from stobatch.results.document import Count, Document, Flag, Number, Part, Size, Text


class Prediction(Part):
    """The answer for one picture, or why there is none."""

    name: Text
    """Its file, or its place among those handed over."""
    label: Count | None = None
    class_name: Text | None = None
    abstains: Flag = False
    """Whether no label could be proved; the label is then only the likeliest."""
    scores: tuple[Number, ...] = ()
    """The network's own, without noise; softmax makes shares of them."""
    radius: Size | None = None
    """Proved or claimed, as the kind of certificate says; in its norm over [-1, 1]."""
    radius_of_255: Size | None = None
    """The same on pixels from 0 to 255."""
    is_safe: Flag | None = None
    """Whether the label holds at the radius asked about; none where no radius was."""
    error: Text | None = None
    """Why there is no answer."""

    def line(self, kind: Kind | None) -> str:
        """Say it in one line; no radius without who vouches for it."""
        if self.error is not None:
            return f"{self.name}: {self.error}"
        if self.abstains:
            return f"{self.name}: abstains, no label could be proved"
        held, safe = "", ""
        if self.radius is not None:
            status = f"{kind.status}, {kind.norm}" if kind else "of no certificate"
            size = f" within {self.radius:.4g} ({status}; {self.radius_of_255:.3g} of 255)"
            held = size if self.radius else ", within no radius"
        if self.is_safe is not None:
            safe = f", {'holds' if self.is_safe else 'NOT shown to hold'} at the radius asked about"
        return f"{self.name}: {self.class_name}{held}{safe}"


class Predictions(Document):
    """Answers for pictures, with what they rest on."""

    run: Text
    weights_sha256: Text
    class_names: tuple[Text, ...]
    certificate: Kind | None
    """What the radii mean and who vouches for them; none where this model has no certificate."""
    asked_radius: Size | None
    rows: tuple[Prediction, ...]

    def meaning(self) -> str:
        """Return one line on what the radii mean."""
        kind = self.certificate
        if kind is None:
            return "this model has no certificate: labels, and no radius"
        often = (
            f", each wrong with probability at most {kind.failure_probability:g}" if kind.failure_probability else ""
        )
        return (
            f"radii are {kind.status} ({kind.source}), {kind.norm} over {kind.input_range}, of the "
            f"{kind.function.replace('_', ' ')}{often}"
        )

    def lines(self) -> list[str]:
        shown = [f"  {row.line(self.certificate)}" for row in self.rows[:20]]
        shown += ["  ..."] if len(self.rows) > 20 else []
        return [f"{len(self.rows):,} pictures, model {self.weights_sha256[:12]}", self.meaning(), *shown]
