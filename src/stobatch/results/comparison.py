"""comparison.json: methods that were trained and measured the same way, a row for each and for each function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import (
    Field,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic_core import CoreSchema

from stobatch.results.accuracy import TTest
from stobatch.results.document import (
    GUARANTEE_SCHEMA,
    Count,
    Document,
    Flag,
    Guarantee,
    Number,
    Part,
    Size,
    Text,
    Whole,
)
from stobatch.results.scores import SanityFlag
from stobatch.types import Norm, Status


class Spread(Part):
    """A number over seeds: mean, standard deviation (of two seeds or more), range, and each."""

    mean: Number
    stddev: Number | None
    min: Number
    max: Number
    per_seed: dict[Text, Number]


class _Attacked(Part):
    protocol: Text
    radius: Size


class AttackedSpread(Spread, _Attacked):
    """Accuracy under the worst attack of a protocol, over seeds."""


class _Certified(Part):
    rule: Text
    status: Status
    source: Text
    norm: Norm
    input_range: Text
    failure_probability: Number | None
    radius: Size
    test_examples: Count


class CertifiedSpread(Spread, _Certified):
    """Certified accuracy of clean inputs by one rule, over the seeds for which it has this status."""


class SeedsGuarantee(Part):
    """The guarantee that some seeds of a row share; an audit may have refuted it for one of them."""

    seeds: tuple[Whole, ...]
    guarantee: Guarantee

    @model_validator(mode="wrap")
    @classmethod
    def _unfold(cls, stored: Any, handler: ModelWrapValidatorHandler[SeedsGuarantee]) -> SeedsGuarantee:
        if isinstance(stored, dict) and "guarantee" not in stored:
            rest = {key: value for key, value in stored.items() if key != "seeds"}
            stored = {"seeds": stored.get("seeds"), "guarantee": rest}
        return handler(stored)

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        seeds = {"type": "array", "items": {"type": "integer"}}
        properties = {"seeds": seeds, **GUARANTEE_SCHEMA["properties"]}
        required = ["seeds", *GUARANTEE_SCHEMA["required"]]
        return {**GUARANTEE_SCHEMA, "description": cls.__doc__, "properties": properties, "required": required}

    @model_serializer(mode="wrap")
    def _fold(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Write the guarantee's keys next to the seeds, as files hold them."""
        content = handler(self)
        return {"seeds": content["seeds"], **content["guarantee"]}


class ComparedRow(Part):
    """One method on one deployed function."""

    name: Text
    label: Text
    method: Text
    function: Text
    guarantees: tuple[SeedsGuarantee, ...]
    test_examples: Count
    clean: Spread
    attacked: tuple[AttackedSpread, ...]
    certified: tuple[CertifiedSpread, ...]
    training_seconds: Spread | None
    peak_memory_mb: Spread | None
    peak_memory_of: tuple[Text, ...]
    devices: tuple[Text, ...]
    runs: dict[Text, Text]
    """By seed, where each run lies."""

    def attacked_at(self, protocol: str, radius: float) -> AttackedSpread | None:
        wanted = (protocol, radius)
        return next((entry for entry in self.attacked if (entry.protocol, entry.radius) == wanted), None)

    def certified_at(self, radius: float) -> list[CertifiedSpread]:
        return [entry for entry in self.certified if entry.radius == radius]


class _OfRow(Part):
    row: Text
    seed: Whole


class ComparedFlag(SanityFlag, _OfRow):
    """A sanity flag of one training of a comparison."""


class ComparedTest(Part):
    """A t-test over seeds between two rows."""

    first: Text
    second: Text
    measure: Text
    """`clean`, or the protocol."""
    radius: Size | None
    t_test: TTest


class SettingsTest(Part):
    """A t-test over seeds between two settings of the runs of a report."""

    first: Text
    second: Text
    protocol: Text
    function: Text
    norm: Norm
    input_range: Text
    radius: Size
    t_test: TTest


class ReportSummary(Document):
    """What `report` wrote, and the t-tests in it."""

    report: Text
    runs: tuple[Text, ...]
    comparisons: tuple[SettingsTest, ...]

    def lines(self) -> list[str]:
        return [self.report, f"{len(self.runs)} runs, {len(self.comparisons)} t-tests"]


class Comparison(Document):
    """What `compare` found: a row for each method and deployed function, and t-tests between them."""

    kind: ClassVar[str] = "comparison"

    norm: Norm
    input_range: Text
    radii: tuple[Size, ...]
    public_seeds: Flag = True
    """Whether the seeds are public; all were before this was written down."""
    seeds: tuple[Whole, ...]
    data: Text
    protocols: dict[Text, Text]
    """What each protocol means."""
    rows: tuple[ComparedRow, ...]
    flags: tuple[ComparedFlag, ...]
    t_tests: tuple[ComparedTest, ...]
    t_tests_below_level: Count = Field(validation_alias="t_tests_below_0.05", serialization_alias="t_tests_below_0.05")
    t_tests_below_level_by_chance: Number = Field(
        validation_alias="t_tests_below_0.05_by_chance", serialization_alias="t_tests_below_0.05_by_chance"
    )

    def named_seeds(self, seeds: Sequence[int]) -> str:
        word = "seed" if self.public_seeds else "training"
        return f"{word}{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"

    def lines(self) -> list[str]:
        lines = [f"{len(self.rows)} rows on {self.data}, {self.named_seeds(self.seeds)}"]
        for row in self.rows:
            lines.append(f"{row.label}: clean {row.clean.mean:.1%}")
            for entry in row.attacked:
                where = f"radius {entry.radius:g} ({self.norm} over {self.input_range})"
                lines.append(f"  {entry.protocol} protocol at {where}: {entry.mean:.1%}")
            for one in row.certified:
                where = f"radius {one.radius:g} ({one.norm} over {one.input_range})"
                lines.append(f"  certified by {one.rule} ({one.status}) at {where}: {one.mean:.1%}")
            lines += [f"  privacy: {one.guarantee}" for one in row.guarantees]
        return lines
