"""What is wrong with a command line or the files it names, in the user's words.

jsonargparse takes some mistakes for something else, and of others tells which of its attempts failed. Here the words
are read before it, in their order, and at every key the parser is asked which names, classes and types it knows; the
first word that is none of them is the mistake.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import itertools
import traceback
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

import yaml
from jsonargparse import ArgumentParser, Namespace
from jsonargparse._typehints import ActionTypeHint
from torch import Tensor

from stabilize import plugins
from stabilize.commands import strict_yaml
from stabilize.errors import UserError

CONFIG = ("-c", "--config")
SPEC = ("class_path", "init_args", "dict_kwargs")
"""The keys by which YAML chooses a class and gives it arguments."""
EMPTY = inspect.Parameter.empty


def check(parser: ArgumentParser, words: Sequence[str]) -> None:
    """Refuse the first mistake in `words`, options for `parser`.

    Raises:
        UserError: there is one.
    """
    try:
        _Reading(parser).read(words)
    except UserError:
        raise
    except Exception:  # a foreign type may be beyond this reading; then jsonargparse has the word
        pass


def check_numbers(tree: Any, key: str = "") -> None:
    """Refuse what is no number, and numbers of the model or the data that float32 or a counter does not hold.

    Args:
        tree: a config that has been parsed, or what stands in it at `key`.

    Raises:
        UserError: there is one.
    """
    if isinstance(tree, list | tuple):
        for place, item in enumerate(tree):
            check_numbers(item, f"{key}[{place}]")
    elif isinstance(tree, dict):
        for name, value in tree.items():
            check_numbers(value, key if name in SPEC else f"{key}.{name}".lstrip("."))
    elif isinstance(tree, int | float):
        computed_with = key.startswith(("model.", "data."))
        if tree != tree or (computed_with and not _holds(tree)):
            raise UserError(f"{key} is {tree}, which is beyond the numbers that can be computed with")


def _holds(number: float) -> bool:
    if isinstance(number, int):
        return abs(number) < 2**63
    return number == 0 or 1.2e-38 < abs(number) < 3.4e38  # NaN is neither


def class_named(parser: ArgumentParser, key: str, name: str) -> type | None:
    """The class that `name` means as a value of `key`; none where the key takes no class.

    Raises:
        UserError: there is no such key or class.
    """
    reading = _Reading(parser)
    reading.read([f"--{key}={name}"])
    return reading.chosen[key].owner if key in reading.chosen else None


def made(key: str, kind: type, make: Callable[[dict[str, Any]], Any], arguments: dict[str, Any]) -> Any:
    """What `make` gives for the arguments of a class, which stand below `key` in a config.

    Raises:
        UserError: it fails, and does not with the defaults in place of one argument or two, which are named.
    """
    try:
        return make(arguments)
    except Exception as error:
        defaults = {name: parameter.default for name, parameter in inspect.signature(kind).parameters.items()}
        chosen = {name: value for name, value in arguments.items() if value is not defaults[name]}
        for names in itertools.chain.from_iterable(itertools.combinations(chosen, size) for size in (1, 2)):
            with contextlib.suppress(Exception):
                make(arguments | {name: defaults[name] for name in names})
                break
        else:
            raise
        named = " and ".join(f"{key}.{name} is {_shown(chosen[name])}" for name in names)
        raise UserError(f"{named}: {one_line(error)}") from error


def class_being_made(error: BaseException) -> str | None:
    """The class in whose `__init__` an error arose."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == "__init__"]
    return type(frames[-1].f_locals[frames[-1].f_code.co_varnames[0]]).__name__ if frames else None


def cause_in(error: BaseException | None) -> UserError | None:
    """The UserError that `error` came from; jsonargparse wraps what a class raises where a type is optional."""
    while error is not None and not isinstance(error, UserError):
        error = error.__cause__ or error.__context__
    return error


def one_line(error: BaseException) -> str:
    """What a library's error says, on one line, cut where it is long."""
    return _cut(" ".join(str(error).split()), 500) or type(error).__name__


def read_config(path: str) -> Any:
    """The content of a config, or of a file that stands for a part of one.

    Raises:
        UserError: it cannot be read, is no YAML, or will not do.
    """
    beside = [str(other) for other in sorted(Path(path).parent.glob("*.y*ml"))] if "\0" not in path else []
    return strict_yaml.read(path, "the config ", _nearest(path, beside))


class _Key(NamedTuple):
    """What the parser knows of a key."""

    type: Any
    default: Any


class _Choice(NamedTuple):
    """The class chosen at a key, and the parser of its arguments."""

    owner: type
    parser: ArgumentParser
    bases: list[type]
    """What else could have been chosen descends from these."""


class _Reading:
    """One reading of the words; remembers which keys were given, and which class was chosen at which of them."""

    def __init__(self, parser: ArgumentParser) -> None:
        self.parser = parser
        self.given: set[str] = set()
        self.chosen: dict[str, _Choice] = {}
        self.listed: list[str] = []
        """The places that are taken in lists of classes."""
        self.source = ""

    def read(self, words: Sequence[str]) -> None:
        """Stop at the first mistake in `words`.

        Raises:
            UserError: the mistake.
        """
        for option, value in options(words):
            if not option:
                like = f"-c {value}" if _is_file(value) else "--key value"
                raise UserError(f"{value} stands alone, without what it is for; {like} would do")
            if option in CONFIG and not value:
                raise UserError(f"{option} needs the path of a config after it")
            if option in CONFIG:
                tree = read_config(value)
                self.source = f" (in {value})"
                if not isinstance(tree, dict):
                    content = "empty" if tree is None else _shown(tree)
                    raise UserError(f"the config {value} has no keys, but is {content}")
                self._keys(self.parser, "", _nested(tree))
            else:
                self.source = ""
                self._keys(self.parser, "", _nested({option.lstrip("-").removesuffix(".help"): value}))
        for key, (owner, parser, _) in self.chosen.items():
            parameters = inspect.signature(owner).parameters
            needed = [name for name in _keys_of(parser) if name in parameters and parameters[name].default is EMPTY]
            missing = [f"{key}.{name}" for name in needed if f"{key}.{name}" not in self.given]
            if missing:
                raise UserError(f"{owner.__name__} cannot do without {' and '.join(missing)}")

    def _keys(self, parser: ArgumentParser, prefix: str, tree: dict[str, Any], group: str = "") -> None:
        """Check what is given below `group` of `parser`, whose own keys stand at `prefix`."""
        known = _keys_of(parser)
        for name, value in tree.items():
            inner = group + name.removesuffix("+")
            key = prefix + inner
            if inner in known:
                self.given.add(key)
                if name.endswith("+"):
                    self._items(key, known[inner].type, value if isinstance(value, list) else [value])
                else:
                    self._value(key, *known[inner], value)
            elif not any(other.startswith(f"{inner}.") for other in known):
                self._stop(key, value, self._advice(prefix, group, inner, known))
            else:
                content = _content(value)
                if not isinstance(content, dict):
                    below = _nearest("", self._siblings(prefix, f"{inner}.", known))
                    self._stop(key, value, f"this is a group of keys{below}")
                self._keys(parser, prefix, _nested(content), f"{inner}.")

    def _value(self, key: str, kind: Any, default: Any, value: Any) -> None:
        """Check what is given for `key`, which takes values of type `kind`."""
        bases = _bases(kind)
        content = _content(value) if bases else value
        if isinstance(content, list) and _item(kind):
            self._forget(f"{key}[")
            self._items(key, kind, content)
        elif isinstance(content, dict) and bases:
            self._class_and_arguments(key, kind, default, content)
        elif isinstance(value, str) and bases and not _fits(kind, value):
            self._choose(key, kind, value)
        elif not _fits(kind, value):
            self._stop(key, value, _expected(kind, value))
        elif isinstance(value, str) and bases and (found := self._find(key, bases, value)):
            self._remember(key, found, kind)

    def _items(self, key: str, kind: Any, items: Sequence[Any]) -> None:
        """Check what comes after those that stand in the list at `key`."""
        for item in items:
            place = f"{key}[{self._length(key)}]"
            self.listed.append(place)
            self._value(place, _item(kind) or kind, None, item)

    def _length(self, key: str) -> int:
        return sum(place.startswith(f"{key}[") and place.endswith("]") for place in self.listed)

    def _class_and_arguments(self, key: str, kind: Any, default: Any, value: dict[str, Any]) -> None:
        """Check a class with its arguments, or arguments for the class that is chosen already."""
        if "class_path" in value:
            self._choose(key, kind, value["class_path"])
        elif self._length(key):  # what follows a list on the command line is for its last
            key = f"{key}[{self._length(key) - 1}]"
        if key not in self.chosen:
            self._remember(key, _class_of(default) or _bases(kind)[0], kind)
        owner, parser, _ = self.chosen[key]
        arguments = value
        if not value.keys().isdisjoint(SPEC):
            for name in value.keys() - set(SPEC):
                self._stop(f"{key}.{name}", value[name], f"beside {' and '.join(SPEC[:2])} it has no place")
            arguments = value.get("init_args") or {}
        if not isinstance(arguments, dict):
            self._stop(f"{key}.init_args", arguments, f"the arguments of {owner.__name__} by name would do")
        self._keys(parser, f"{key}.", _nested(arguments))

    def _choose(self, key: str, kind: Any, name: Any) -> None:
        """Remember the class that `name` means."""
        bases = _bases(kind)
        found = self._find(key, bases, name) if isinstance(name, str) else None
        if found is None:
            kinds = " or ".join(base.__name__ for base in bases)
            cause = plugins.cause_of_absence(str(name))
            if cause is not None:
                self._stop(key, name, f"the plug-in that brings this {kinds} is broken, {plugins.describe(cause)}")
            names = [known.__name__ for base in bases for known in _subclasses(base)]
            self._stop(key, name, f"no {kinds} is called so{_nearest(str(name), names)}")
        self._remember(key, found, kind)

    def _remember(self, key: str, owner: type, kind: Any) -> None:
        """`owner` is chosen at `key`; what was said of another class there counts no longer."""
        if key in self.chosen and self.chosen[key].owner is not owner:
            self._forget(f"{key}.")
        self.chosen[key] = _Choice(owner, _parser_of(owner, kind), _bases(kind))

    def _forget(self, start: str) -> None:
        """Nothing was said of the keys that start so."""
        self.given = {key for key in self.given if not key.startswith(start)}
        self.chosen = {key: choice for key, choice in self.chosen.items() if not key.startswith(start)}
        self.listed = [place for place in self.listed if not place.startswith(start)]

    def _find(self, key: str, bases: list[type], name: str) -> type | None:
        """The subclass of `bases` called `name`, bare or with its module before it."""
        module, _, bare = name.rpartition(".")
        if not module:
            return next((known for base in bases for known in _subclasses(base) if known.__name__ == bare), None)
        try:
            found = getattr(importlib.import_module(module), bare, None)
        except Exception as cause:  # a foreign module may raise anything
            if isinstance(cause, ModuleNotFoundError) and f"{module}.".startswith(f"{cause.name}."):
                return None
            self._stop(key, name, f"{module} cannot be imported, {plugins.describe(cause)}")
        if not (isinstance(found, type) and issubclass(found, tuple(bases))):
            return None
        if inspect.isabstract(found):
            names = [known.__name__ for known in _subclasses(found)]
            self._stop(key, name, f"{bare} is only what others descend from{_nearest('', names)}")
        return found

    def _advice(self, prefix: str, group: str, inner: str, known: dict[str, _Key]) -> str:
        """What could be meant by `inner`, which is not among the keys `known` of the parser at `prefix`."""
        name = inner.removeprefix(group)
        siblings = self._siblings(prefix, group, known)
        elsewhere = [other for other in self._everywhere() if f".{other}".endswith((f".{inner}", f".{name}"))]
        if elsewhere and not prefix:
            return f"there is no such key at this level{_nearest(name, elsewhere)}"
        near = _nearest(name, [*siblings, *(f"{prefix}{word}" for word in SPEC if prefix)], few=0)
        if near:
            return f"there is no such key{near}"
        if not prefix:
            return f"there is no such key{_nearest(name, siblings)}"
        owner, _, bases = self.chosen[prefix.removesuffix(".")]
        relatives = {other: None for base in bases for other in _subclasses(base)}
        takers = [other.__name__ for other in relatives if name in inspect.signature(other).parameters]
        others = f"; it belongs to {', '.join(takers[:5])}" if takers else ""
        return f"{owner.__name__} has no such argument{others}{_nearest(name, siblings)}"

    @staticmethod
    def _siblings(prefix: str, group: str, known: dict[str, _Key]) -> list[str]:
        """The keys and groups right below `group`."""
        below = [other.removeprefix(group) for other in _with_groups(known) if other.startswith(group)]
        return [prefix + group + other for other in below if "." not in other]

    def _everywhere(self) -> Iterator[str]:
        """Every key of the command, with the arguments of the classes chosen so far."""
        known = _keys_of(self.parser)
        yield from _with_groups(known)
        for key, (kind, default) in known.items():
            owner = _class_of(default)
            if key in self.chosen:
                yield from (f"{key}.{name}" for name in _keys_of(self.chosen[key].parser))
            elif owner is not None:
                yield from (f"{key}.{name}" for name in _keys_of(_parser_of(owner, kind)))

    def _stop(self, key: str, value: Any, why: str) -> NoReturn:
        raise UserError(f"{key} is {_shown(value)}{self.source}: {why}")


def options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The options of a command line with their values; a word that is neither has an empty option."""
    rest = iter(words)
    for word in rest:
        option, equals, value = word.partition("=")
        if word.startswith("-c") and len(option) > 2:  # the path right after the letter
            yield "-c", word[2:]
        elif not word.startswith("-"):
            yield "", word
        elif not option.startswith("--print_"):
            yield option, value if equals else next(rest, "")


def _is_file(value: Any) -> bool:
    """Whether `value` names a YAML file that holds what belongs in its place."""
    return isinstance(value, str) and value.endswith((".yaml", ".yml"))


def _content(value: Any) -> Any:
    """What stands for a group, a class or a list of them: in the file that `value` names, or written into it."""
    if _is_file(value):
        return read_config(value)
    try:
        content = strict_yaml.load(value) if isinstance(value, str) else value
    except yaml.YAMLError:
        return value
    return content if isinstance(content, dict | list) else value


def _nested(tree: dict[str, Any]) -> dict[str, Any]:
    """`tree` with its dotted keys as groups within groups."""
    nested: dict[str, Any] = {}
    for key, value in tree.items():
        first, _, rest = str(key).partition(".")
        nested[first] = {**nested.get(first, {}), **_nested({rest: value})} if rest else value
    return nested


def _keys_of(parser: ArgumentParser) -> dict[str, _Key]:
    """The keys of `parser` that take a value, groups as dots."""
    return {a.dest: _Key(a._typehint, a.default) for a in parser._actions if isinstance(a, ActionTypeHint)}


def _with_groups(keys: Iterable[str]) -> list[str]:
    """`keys` and the groups they are in."""
    parts = [key.split(".") for key in keys]
    return list(dict.fromkeys(".".join(part[: depth + 1]) for part in parts for depth in range(len(part))))


def _parser_of(owner: type, kind: Any) -> ArgumentParser:
    """A parser of the arguments of `owner`, without those that a callable of type `kind` gets later."""
    parser = ArgumentParser(exit_on_error=False)
    later = len(typing.get_args(kind)[0]) if typing.get_origin(kind) is Callable else 0
    parser.add_class_arguments(owner, skip={later} if later else set(), fail_untyped=False)
    return parser


def _bases(kind: Any) -> list[type]:
    """The classes whose subclasses a value of type `kind` can name."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is Callable:
        return _bases(parts[-1])
    if origin is not None:
        inner = () if origin in (Literal, tuple, dict) else parts
        return list(dict.fromkeys(base for part in inner for base in _bases(part)))
    plain = (
        not isinstance(kind, type) or kind in (Any, Tensor) or kind.__module__ in ("builtins", "datetime", "pathlib")
    )
    return [] if plain else [kind]


def _item(kind: Any) -> Any:
    """The type of what stands in a list of classes, where a value of type `kind` can be one; else none."""
    for part in (kind, *typing.get_args(kind)):
        origin, arguments = typing.get_origin(part), typing.get_args(part)
        if isinstance(origin, type) and issubclass(origin, Iterable) and _bases(part):
            return arguments[0]
    return None


def _subclasses(base: type) -> list[type]:
    """`base` and what descends from it, as far as it is imported, without what nobody can make."""
    children: list[type] = base.__subclasses__()
    found = [] if inspect.isabstract(base) or base.__name__.startswith("_") else [base]
    return list(dict.fromkeys(found + [deeper for child in children for deeper in _subclasses(child)]))


def _class_of(default: Any) -> type | None:
    """The class that a default chooses, if it does."""
    if not isinstance(default, dict | Namespace) or "class_path" not in default:
        return None
    module, _, name = default["class_path"].rpartition(".")
    return getattr(importlib.import_module(module), name)


def _fits(kind: Any, value: Any) -> bool:
    """Whether `value` is of type `kind`; jsonargparse takes null for any."""
    if value is None:
        return kind in (None, Any) or "null" in _names(kind)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=kind)
    try:
        parser.parse_object({"value": value})
    except Exception:  # a foreign type may raise anything
        return False
    return True


def _expected(kind: Any, value: Any) -> str:
    """What would do where `value` does not."""
    names = dict.fromkeys(_names(kind))
    return f"expected {' or '.join(names)}{_nearest(str(value), names, few=0)}"


def _names(kind: Any) -> Iterator[str]:
    """The types and values that `kind` allows."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        yield from (str(part) for part in parts)
    elif origin in (typing.Union, types.UnionType):
        for part in parts:
            yield from _names(part)
    elif isinstance(origin, type) and issubclass(origin, Iterable) and not issubclass(origin, Mapping) and parts:
        items = dict.fromkeys(name for part in parts if part is not ... for name in _names(part))
        count = f"{len(parts)} " if origin is tuple and ... not in parts else ""
        yield f"a list of {count}{', '.join(items)}"
    elif kind is type(None):
        yield "null"
    else:
        yield str(kind) if origin else kind.__name__


def _nearest(name: str, names: Iterable[str], few: int = 16) -> str:
    """Which of `names` could be meant by `name`; all of them where none is like it and they are few."""
    last = {other: _last(other) for other in names}
    alike = difflib.get_close_matches(_last(name), set(last.values()))
    near = [other for like in alike for other in last if last[other] == like]
    if near:
        return f"; nearest: {', '.join(near[:5])}"
    return f"; there are: {', '.join(last)}" if 0 < len(last) <= few else ""


def _last(name: str) -> str:
    """The part of a dotted name, or of a file's path, by which others are told from it."""
    return (Path(name).stem if _is_file(name) else name.rpartition(".")[2]).lower()


def _shown(value: Any) -> str:
    """`value` as YAML on one line, cut where it is long."""
    try:
        text = yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("...\n").strip()
    except yaml.YAMLError:  # an object
        text = type(value).__name__
    text = " ".join((value if isinstance(value, str) and value else text).split())
    return _cut(text, 60)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."
