"""Every declared setting against its own declaration: just outside is refused and explained, just inside passes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from inspect import isabstract
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from stobatch.config import MethodConfig, RunConfig, TrainersConfig, load_config
from stobatch.errors import SettingError
from stobatch.registry import ARCHITECTURES, METHODS
from stobatch.settings import Setting, Settings, declared, dotted_keys, parse_assignment
from stobatch_recipes import RECIPES, recipe

for method in METHODS.values():
    assert method.config_class.name  # loaded, and its settings with it


def sections(base: type[Settings] = Settings) -> Iterator[type[Settings]]:
    for child in base.__subclasses__():
        if child is not MethodConfig and not isabstract(child):
            yield child
        yield from sections(child)


def example(kind: type[Settings]) -> Settings:
    if kind is TrainersConfig:
        return TrainersConfig(num=9)  # room for more than one in a step
    return recipe("demo") if kind is RunConfig else kind()


FIELDS = [
    pytest.param(kind, field, id=f"{kind.__name__}.{field.name}")
    for kind in sections()
    for field in declared(kind).values()
]
LIMITED = [
    pytest.param(kind, field, word, bound, id=f"{kind.__name__}.{field.name} {word} {bound:g}")
    for kind in sections()
    for field in declared(kind).values()
    for word, bound in field.limits.items()
]
CHOSEN = [
    pytest.param(kind, field, id=f"{kind.__name__}.{field.name}")
    for kind in sections()
    for field in declared(kind).values()
    if field.choices
]


def test_the_fuzz_sees_every_section():
    names = {kind.__name__ for kind in sections()}
    assert names >= {
        *("DataConfig", "ModelConfig", "TrainingConfig", "CertificationConfig", "EvaluationConfig"),
        *("MachineConfig", "PublishedConfig", "RunConfig", "TrainersConfig"),
        *(method.config_class.__name__ for method in METHODS.values()),
    }
    assert len(LIMITED) >= 25
    assert len(CHOSEN) >= 10


@pytest.mark.parametrize("kind", [pytest.param(kind, id=kind.__name__) for kind in sections()])
def test_every_setting_is_documented_and_every_number_has_a_range(kind):
    for name in kind.model_fields:
        if isinstance(getattr(example(kind), name), Settings):
            continue
        field = declared(kind)[name]
        assert field.doc, f"{name} has no meaning"
        if field.kind in (int, float):
            assert field.limits, f"{name} takes any number"


def refused(section: Settings, field: Setting, value: Any) -> str:
    with pytest.raises(SettingError) as caught:
        section.replace(**{field.name: value})
    message = str(caught.value)
    assert message.startswith(f"{field.name}=")
    assert "\n" not in message
    return message


@pytest.mark.parametrize(("kind", "field", "word", "bound"), LIMITED)
def test_just_outside_is_refused_and_just_inside_passes(kind, field, word, bound):
    section, whole = example(kind), field.kind is int
    below, above = (bound - 1, bound + 1) if whole else (math.nextafter(bound, -1e9), math.nextafter(bound, 1e9))
    outside = {"at least": [below], "above": [bound, below], "at most": [above], "below": [bound, above]}[word]
    inside = {"at least": [bound, above], "above": [above], "at most": [bound, below], "below": [below]}[word]
    others = {w: b for w, b in field.limits.items() if w != word}
    for value in outside:
        message = refused(section, field, value)
        assert f"{word} {bound:g}" in message, "the allowed values are not said"
        assert all(f"{w} {b:g}" in message for w, b in others.items())
    for value in inside:
        changed = getattr(section.replace(**{field.name: value}), field.name)
        assert changed in (value, (value,))


@pytest.mark.parametrize(("kind", "field", "word", "bound"), LIMITED)
def test_numbers_that_are_none_are_refused(kind, field, word, bound):
    for value in (math.nan, math.inf, -math.inf):
        refused(example(kind), field, value)


@pytest.mark.parametrize("key", ["training.steps", "training.learning_rate", "seed"])
def test_a_huge_whole_number_is_refused(key):
    recipe("demo").override(key, 2**64)
    for value in (2**64 + 1, 10**400, 1 << 20000):
        with pytest.raises(SettingError, match="bits"):
            recipe("demo").override(key, value)


@pytest.mark.parametrize(("kind", "field"), CHOSEN)
def test_only_the_listed_choices_pass(kind, field):
    section, choices = example(kind), list(field.choices)
    for choice in choices:
        assert getattr(section.replace(**{field.name: choice}), field.name) in (choice, (choice,))
    for wrong in ("", choices[0] + "x", choices[0].upper(), " " + choices[0]):
        message = refused(section, field, wrong)
        assert "one of " + ", ".join(choices) in message
    assert f"Did you mean {choices[0]}?" in refused(section, field, choices[0] + "x")


@pytest.mark.parametrize(("kind", "field"), FIELDS)
def test_wrong_types_are_refused(kind, field):
    section, wanted = example(kind), field.kind
    wrong: dict[Any, list[Any]] = {
        int: ["3", 2.5, True, {}],
        float: ["3", True, {}],
        str: [3, True, {}],
        bool: [1, "true", {}],
    }
    for value in wrong[wanted]:
        assert field.name in refused(section, field, value)


@pytest.mark.parametrize(("kind", "field"), FIELDS)
def test_none_passes_exactly_where_it_is_declared(kind, field):
    if field.may_be_unset:
        assert getattr(example(kind).replace(**{field.name: None}), field.name) is None
    else:
        refused(example(kind), field, None)


def toml(values: dict[str, Any], name: str = "") -> str:
    lines = [f"[{name}]"] if name else []
    lines += [f"{k} = {json.dumps(v)}" for k, v in values.items() if v is not None and not isinstance(v, dict)]
    return "\n".join(lines + [toml(v, k) for k, v in values.items() if isinstance(v, dict)])


def value_of(field: Setting) -> st.SearchStrategy[Any]:
    """Any allowed value of a setting."""
    limits, choices, wanted = field.limits, field.choices, field.kind
    one: st.SearchStrategy[Any]
    if field.name == "architecture":
        choices = (*ARCHITECTURES, "linear", "squash 4, conv 8 5/2+1, relu, linear *0.5")
    if field.name == "size":
        choices = ("8x8", "64x48")
    if field.name == "classes":
        choices = ("cat", "a dog", "7", "größer")
    if choices:
        one = st.sampled_from(list(choices))
    elif wanted is int:
        one = st.integers(int(limits["at least"]), int(limits.get("at most", 10**9)))
    elif wanted is float:
        # How wide a radius may be depends on the norm; 2 is allowed in all of them.
        widest = 2.0 if field.name == "radii" else 1e6
        low, high = limits.get("at least", limits.get("above")), limits.get("at most", limits.get("below", widest))
        one = st.floats(low, high, exclude_min="above" in limits, exclude_max="below" in limits)
    else:
        one = {bool: st.booleans(), str: st.text(st.characters(codec="ascii", exclude_categories=["C"]))}[wanted]
    if field.is_list:
        one = st.lists(one, min_size=2 if field.name == "classes" else 1, max_size=4, unique=True).map(tuple)
    return st.none() | one if field.may_be_unset else one


def section_of(kind: type[Settings]) -> st.SearchStrategy[Settings]:
    values = {name: value_of(field) for name, field in declared(kind).items()}
    if kind is TrainersConfig:
        # No more of them take part in a step than there are.
        pairs = st.tuples(values.pop("num"), values.pop("per_step")).map(sorted)
        return st.builds(lambda pair, **rest: TrainersConfig(num=pair[1], per_step=pair[0], **rest), pairs, **values)
    return st.builds(kind, **values)


@st.composite
def configs(draw: st.DrawFn) -> RunConfig:
    default = recipe("demo")
    parts = {name: draw(section_of(type(getattr(default, name)))) for name in RunConfig.model_fields if name != "seed"}
    return RunConfig(**parts, seed=draw(st.none() | st.integers(0, 2**64)))


few = settings(max_examples=30)
"""Each example draws every setting there is."""


@few
@given(configs())
def test_round_trip_through_json(config):
    text = json.dumps(config.to_dict())
    back = RunConfig.from_dict(json.loads(text))
    assert back == config
    assert back.training_hash == config.training_hash


@few
@given(config=configs())
def test_round_trip_through_toml(tmp_path_factory, config):
    if config.seed is not None and config.seed >= 2**63:
        config = config.override("seed", 7)
    file = tmp_path_factory.mktemp("toml") / "c.toml"
    file.write_text(toml(config.to_dict()))
    loaded = load_config(file)
    # TOML has no null: a setting that is unset in the file keeps its default.
    defaults = RunConfig(method=type(config.method)()).to_dict()
    wanted = {
        name: {k: defaults.get(name, {}).get(k) if v is None else v for k, v in part.items()}
        if isinstance(part, dict)
        else part
        for name, part in config.to_dict().items()
    }
    assert loaded.to_dict() == wanted


@few
@given(configs())
def test_every_key_can_be_overridden_with_what_it_has(config):
    again = recipe("demo")
    for key in dotted_keys(config):
        value: Any = config
        for name in key.split("."):
            value = getattr(value, name)
        text = f"{key}={json.dumps(value)}"
        again = again.override(*parse_assignment(text))
    assert again == config


def changed(config: RunConfig, key: str) -> RunConfig:
    """The configuration with one key set to something else that is allowed."""
    section: Any = config
    *path, name = key.split(".")
    for part in path:
        section = getattr(section, part)
    present, field = getattr(section, name), declared(type(section))[name]
    candidates: list[Any] = list(field.choices or [])
    candidates += {
        int: [17, 19, 230],
        float: [0.5, 0.25, 1.25, 0.75],
        bool: [True, False],
        str: ["cpu:0", "linear", "8x8", ("cat", "dog")],
    }[field.kind]
    for value in candidates:
        if present in (value, (value,)):
            continue
        try:
            return config.override(key, value)
        except SettingError:
            continue
    raise AssertionError(f"no other value for {key}")


HASHED = ("method", "data", "model", "training", "canaries", "trainers", "search", "prior")


@pytest.mark.parametrize("key", dotted_keys(recipe("demo")))
def test_the_training_hash_sees_what_changes_the_model_and_nothing_else(key):
    config = recipe("demo").override_all({"trainers.num": 30, "search.settings": ["training.steps=1,2"]})
    other = changed(config, key)
    assert other != config
    if key.partition(".")[0] in (*HASHED, "seed") and key != "data.allow_overlap":
        assert other.training_hash != config.training_hash
    else:
        assert key.partition(".")[0] in ("data", "machine", "certification", "evaluation", "audit")
        assert other.training_hash == config.training_hash


def test_without_canaries_their_kind_does_not_matter():
    config = recipe("sound.mnist")
    assert config.override("canaries.kind", "input").training_hash == config.training_hash
    assert config.override("canaries.num", 10).training_hash != config.training_hash


def test_with_one_trainer_nothing_else_about_trainers_matters():
    config = recipe("sound.mnist")
    assert config.trainers.num == 1
    assert config.override("trainers.noise", "shares").training_hash == config.training_hash
    assert config.override("trainers.num", 2).training_hash != config.training_hash


def test_more_trainers_in_a_step_than_there_are_are_refused():
    with pytest.raises(SettingError, match=r"trainers\.per_step=3 is more than the 2 trainers"):
        recipe("sound.mnist").override_all({"trainers.num": 2, "trainers.per_step": 3})


@pytest.mark.parametrize("keys", [("num", "per_step"), ("per_step", "num")])
def test_trainers_may_be_set_in_any_order(keys):
    values = {"num": 6, "per_step": 3}
    made = recipe("sound.mnist").override_all({f"trainers.{key}": values[key] for key in keys})
    assert (made.trainers.num, made.trainers.per_step) == (6, 3)


def test_another_method_name_would_be_another_hash():
    config = recipe("demo").to_dict()
    assert config["method"]["name"] == "sound"
    hashes = {recipe(name).training_hash for name in RECIPES}
    assert len(hashes) == len(RECIPES)


def test_hashes_do_not_depend_on_how_a_number_is_written():
    one, other = (recipe("demo").override("method.epsilon", value) for value in (2, 2.0))
    assert one == other
    assert one.training_hash == other.training_hash


def test_settings_cannot_be_changed_in_place():
    config = recipe("demo")
    with pytest.raises(ValidationError, match="frozen"):
        config.training.steps = 3
    config.override("training.steps", 3)
    assert config == recipe("demo")


def test_unknown_keys_list_their_nearest_names():
    with pytest.raises(SettingError, match=r"no setting 'stesp'.*steps"):
        recipe("demo").override("training.stesp", 3)
    with pytest.raises(SettingError, match=r"no setting 'steps'.*training\.steps"):
        recipe("demo").override("steps", 3)
    values = recipe("demo").to_dict()
    values["training"]["learningrate"] = values["training"].pop("learning_rate")
    with pytest.raises(SettingError, match="learning_rate"):
        RunConfig.from_dict(values)
    with pytest.raises(SettingError, match="Run `stobatch settings`"):
        recipe("demo").override("qqqq", 3)
    for name in ("stobach", "publishd"):
        values["method"] = {"name": name}
        with pytest.raises(SettingError, match=r"method\.name=published"):
            RunConfig.from_dict(values)


@pytest.mark.parametrize("text", ["", "=3", "training.steps", "  "])
def test_what_is_not_an_assignment_is_refused(text):
    with pytest.raises(SettingError, match="--set key=value"):
        parse_assignment(text)
