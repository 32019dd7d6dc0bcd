"""Choosing another strategy forgets the previous one: A, then B, is B chosen alone, with every argument
(FIELD_REPORTS 2.11)."""

from __future__ import annotations

import importlib
import inspect
import itertools
import typing
from pathlib import Path
from typing import Any, Literal

import jsonargparse._typehints
import pytest
import yaml

from stabilize.commands import training
from stabilize.strategies import AXES, Clipping, HyperConnections, ScaledSum, Strategy, Sum
from stabilize.strategies.menu import menu
from tests.commands import plugin_strategies
from tests.commands.parsing import fit_parser

BASES = {
    **{f"model.stabilizer.{axis}": base for axis, base in AXES.items()},
    "model.clipping": Clipping,
}
HOUSE = ("stabilize.", plugin_strategies.__name__)


def strategies(base: type[Strategy]) -> list[type[Strategy]]:
    return [strategy for strategy in menu(base) if strategy.__module__.startswith(HOUSE)]


SINGLE = [
    pytest.param(key, strategy, id=f"{key.rpartition('.')[2]}-{strategy.__name__}")
    for key, base in BASES.items()
    for strategy in strategies(base)
]
PAIRS = [
    pytest.param(key, first, second, id=f"{key.rpartition('.')[2]}-{first.__name__}-{second.__name__}")
    for key, base in BASES.items()
    for first, second in itertools.permutations(strategies(base), 2)
]
INNER = [Sum, ScaledSum, HyperConnections, plugin_strategies.Halved, plugin_strategies.AroundToo]


@pytest.fixture(autouse=True)
def as_in_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """`stabilize.commands.training.run` does the same before it builds the parser."""
    name = "discard_init_args_on_class_path_change"
    monkeypatch.setattr(jsonargparse._typehints, name, training.keep_no_arguments_of_another_class)


def other_value(parameter: inspect.Parameter) -> Any:
    """A value for an argument that is not its default."""
    default = parameter.default
    kinds = (parameter.annotation, *typing.get_args(parameter.annotation))
    words = [word for kind in kinds if typing.get_origin(kind) is Literal for word in typing.get_args(kind)]
    if isinstance(default, Strategy):
        return {"class_path": spec_of(ScaledSum)["class_path"], "init_args": {"sum_scale": 0.25}}
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return default * 2
    if list[float] in typing.get_args(parameter.annotation):
        return [2e-5, 1e-5]
    return next((word for word in words if word != default), 100_000)


def spec_of(strategy: type[Strategy], **arguments: Any) -> dict[str, Any]:
    return {"class_path": f"{strategy.__module__}.{strategy.__name__}", "init_args": arguments}


def changed(strategy: type[Strategy]) -> dict[str, Any]:
    """YAML that chooses a strategy and gives every argument another value than its default."""
    parameters = inspect.signature(strategy, eval_str=True).parameters
    return spec_of(strategy, **{name: other_value(parameter) for name, parameter in parameters.items()})


def plain(value: Any) -> Any:
    """A resolved strategy as (class, arguments), whatever path the class is named by."""
    if not (hasattr(value, "get") and value.get("class_path")):
        return value
    module, _, name = value["class_path"].rpartition(".")
    arguments = dict(value.get("init_args") or {})
    return getattr(importlib.import_module(module), name), {name: plain(one) for name, one in arguments.items()}


def nested(tree: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys as groups within groups."""
    groups: dict[str, Any] = {}
    for key, value in tree.items():
        *path, last = key.split(".")
        group = groups
        for name in path:
            group = group.setdefault(name, {})
        group[last] = value
    return groups


def places(key: str) -> list[str]:
    """A key of the stabiliser, and the same in the decoder's own."""
    return list(dict.fromkeys((key, key.replace("model.stabilizer.", "model.decoder_stabilizer."))))


def file(path: Path, key: str, value: Any) -> str:
    """A flag that reads a YAML file with `value` in the places of `key`."""
    path.write_text(yaml.safe_dump(nested(dict.fromkeys(places(key), value))))
    return f"--config={path}"


def flags(key: str, value: Any) -> list[str]:
    return [f"--{place}={value}" for place in places(key)]


def resolved(key: str, *words: str) -> list[Any]:
    """What stands in the places of `key` after all `words`."""
    config = fit_parser().parse_args(list(words)).as_dict()
    found = []
    for place in places(key):
        value = config
        for name in place.split("."):
            value = value[name]
        found.append(plain(value))
    return found


def alone(key: str, strategy: type[Strategy]) -> list[Any]:
    return [plain(strategy().spec())] * len(places(key))


def test_the_function_that_decides_it_is_there() -> None:
    decides = jsonargparse._typehints.discard_init_args_on_class_path_change
    assert decides is training.keep_no_arguments_of_another_class
    # Both of jsonargparse's ways come to it by this name: a file after a file, and a flag after a file.
    for way in (jsonargparse._typehints.adapt_class_type, jsonargparse._typehints.ActionTypeHint):
        assert " discard_init_args_on_class_path_change(" in inspect.getsource(way)


@pytest.mark.parametrize(("key", "strategy"), SINGLE)
def test_a_strategy_takes_its_arguments_and_follows_the_default(
    key: str, strategy: type[Strategy], tmp_path: Path
) -> None:
    chosen = changed(strategy)
    assert resolved(key, file(tmp_path / "first.yaml", key, chosen)) == [plain(chosen)] * len(places(key))
    assert resolved(key, *flags(key, spec_of(strategy)["class_path"])) == alone(key, strategy)


@pytest.mark.parametrize(("key", "first", "second"), PAIRS)
def test_the_second_is_as_if_chosen_alone(
    key: str, first: type[Strategy], second: type[Strategy], tmp_path: Path
) -> None:
    before = file(tmp_path / "first.yaml", key, changed(first))
    name = spec_of(second)["class_path"]
    assert resolved(key, before, file(tmp_path / "second.yaml", key, name)) == alone(key, second)
    assert resolved(key, before, *flags(key, name)) == alone(key, second)


@pytest.mark.parametrize(
    ("first", "second"),
    [pytest.param(*pair, id="-".join(one.__name__ for one in pair)) for pair in itertools.permutations(INNER, 2)],
)
def test_so_is_one_within_another(first: type[Strategy], second: type[Strategy], tmp_path: Path) -> None:
    key = "model.stabilizer.residual"
    outer = spec_of(plugin_strategies.Around)
    before = file(tmp_path / "first.yaml", key, outer | {"init_args": {"around": changed(first), "rate": 0.5}})
    name = spec_of(second)["class_path"]
    expected = [(plugin_strategies.Around, {"around": one, "rate": 0.5}) for one in alone(key, second)]
    inner = file(tmp_path / "second.yaml", key, outer | {"init_args": {"around": name}})
    assert resolved(key, before, inner) == expected
    assert resolved(key, before, *flags(f"{key}.around", name)) == expected
