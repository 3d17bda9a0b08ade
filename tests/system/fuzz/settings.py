"""Settings on the command line and in files, and lists of layers."""

from __future__ import annotations

import json
import tomllib
from functools import cache
from math import prod
from pathlib import Path
from random import Random
from typing import Any

import torch

import stobatch
from stobatch.config import RunConfig, load_config
from stobatch.models.layered import MOST_NUMBERS, build_layered
from stobatch.settings import dotted_keys, names_of, parse_assignment
from stobatch_recipes import RECIPES, recipe

from .mutate import HOSTILE_NUMBERS, HOSTILE_TEXTS, as_json, hostile, mutated, mutated_bytes, mutated_text, nudged


@cache
def _recipe(name: str) -> RunConfig:
    return recipe(name)


def _value(config: RunConfig, key: str) -> Any:
    found: Any = config
    for name in key.split("."):
        found = getattr(found, names_of(type(found)).get(name, name))
    return list(found) if isinstance(found, tuple) else found


def _same(read: Any, meant: Any) -> bool:
    """Whether a setting is what was written, where one value stands for a list of one, and 1 for 1.0."""
    plain = list(read) if isinstance(read, tuple) else read
    values = meant if isinstance(meant, list) else [meant]
    nearest = [float(value) if isinstance(value, int) and abs(value) > 2**53 else value for value in values]
    return plain in (meant, [meant]) or plain in (nearest, *nearest[:1])


def require_round_trip(config: RunConfig) -> None:
    text = json.dumps(config.to_dict(), allow_nan=False)
    again = RunConfig.from_dict(json.loads(text))
    assert again == config, "a configuration is not what its own JSON says"
    assert again.training_hash == config.training_hash


def assignments(rng: Random, folder: Path) -> None:
    """`--set KEY=VALUE`."""
    config = _recipe(rng.choice(list(RECIPES)))
    key = rng.choice(dotted_keys(config))
    kind = rng.randrange(6)
    if kind == 0:
        text = as_json(nudged(rng, _value(config, key)))
    elif kind == 1:
        text = as_json(hostile(rng)) if rng.random() < 0.5 else rng.choice(HOSTILE_TEXTS)
    elif kind == 2:
        text = rng.choice(("[", "{", '"', '[{"a":')) * rng.choice((1, 60, 100_000))
    elif kind == 3:
        text = rng.choice(("9" * 4301, "-" + "9" * 5000, "1e400", "-1e400", "NaN", "Infinity", "0." + "0" * 9000 + "1"))
    elif kind == 4:
        text = mutated_text(rng, json.dumps(_value(config, key)))
    else:
        text = json.dumps(_value(config, key))
    if rng.random() < 0.1:
        key = mutated_text(rng, key)
    said, value = parse_assignment(f"{key}={text}")
    changed = config.override(said, value)
    assert _same(_value(changed, said), value), f"{said} is {_value(changed, said)!r} and {value!r} was meant"
    require_round_trip(changed)


def _toml(values: dict[str, Any], name: str = "") -> str:
    lines = [f"[{name}]"] if name else []
    lines += [f"{key} = {_toml_value(value)}" for key, value in values.items() if not isinstance(value, dict)]
    return "\n".join(lines + [_toml(value, key) for key, value in values.items() if isinstance(value, dict)])


def _toml_value(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 2**62:
        return hex(value)
    return as_json(value)


def config_files(rng: Random, folder: Path) -> None:
    """`--config FILE`, as TOML and as JSON."""
    values = _recipe(rng.choice(list(RECIPES))).to_dict()
    values = {k: {n: v for n, v in part.items() if v is not None} if isinstance(part, dict) else part
              for k, part in values.items() if part is not None}  # fmt: skip
    if rng.random() < 0.7:
        values = mutated(rng, values, rng.randrange(1, 4))
    json_wanted = rng.random() < 0.5 or not isinstance(values, dict)
    text = as_json(values) if json_wanted else _toml(values)
    content = text.encode("utf-8", "surrogatepass")
    if rng.random() < 0.3:
        content = mutated_bytes(rng, content, rng.randrange(1, 4))
    path = folder / ("config.json" if json_wanted else "config.toml")
    path.write_bytes(content)
    config = load_config(path)
    meant = json.loads(content) if json_wanted else tomllib.loads(content.decode())
    for section, part in meant.items():
        for name, value in part.items() if isinstance(part, dict) else ():
            read = config.method.name if (section, name) == ("method", "name") else _value(config, f"{section}.{name}")
            assert _same(read, value), f"{section}.{name} is {read!r}, the file says {value!r}"
    require_round_trip(config)


_LAYERS = ("squash 4", "squash 2 -0.5 0.5", "conv 4 3/2", "conv 2 3/1+1", "relu", "tanh", "avgpool 2", "maxpool 2/1")
_INPUT = (1, 8, 8)


def architectures(rng: Random, folder: Path) -> None:
    """`model.architecture` as a list of layers."""
    layers = [rng.choice((*_LAYERS, "groupnorm 2", "linear 5")) for _ in range(rng.randrange(4))]
    layers.append(rng.choice(("linear", "linear *0.5", "linear 10", "relu")))
    if rng.random() < 0.8:
        at = rng.randrange(len(layers))
        words = layers[at].split()
        number = str(
            rng.choice((*HOSTILE_NUMBERS[:-2], 99999999999, 10**6, 1e300, "nan", "-3", "1/0", "3/2/2", "+", "٣"))
        )
        if rng.random() < 0.5:
            words[rng.randrange(len(words))] = number
        else:
            words.append(number)
        layers[at] = " ".join(words)
    text = ", ".join(layers)
    if rng.random() < 0.2:
        text = mutated_text(rng, text)
    network = build_layered(text, _INPUT, 10, torch.Generator().manual_seed(1))
    sizes = [prod(parameter.shape) for parameter in network.parameters()]
    assert sum(sizes) <= len(layers) * MOST_NUMBERS
    assert network(torch.zeros(1, *_INPUT)).shape == (1, 10)


def plans(rng: Random, folder: Path) -> None:
    """A configuration that is accepted can be planned, or is refused in words."""
    config = _recipe(rng.choice(("sound.mnist", "demo", "paper.mnist", "federated.demo", "audit.sound_strict")))
    for _ in range(rng.randrange(1, 4)):
        key = rng.choice([key for key in dotted_keys(config) if not key.startswith(("machine.", "data.name"))])
        said, value = parse_assignment(f"{key}={as_json(nudged(rng, _value(config, key)))}")
        config = config.override(said, value)
    plan = stobatch.plan(config)
    text = json.dumps(plan.to_dict(), allow_nan=False)
    assert json.loads(text)["guarantee"]
