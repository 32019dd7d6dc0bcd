"""Configs as nobody should write them: real ones, with something wrong in them. The same for the same number."""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from random import Random
from typing import Any

import yaml

from tests.checkout import ROOT

CONFIGS = ROOT / "configs"
QUICKSTART = CONFIGS / "quickstart.yaml"
OTHERS = sorted(path for path in CONFIGS.glob("**/*.yaml") if path != QUICKSTART)

VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 7, 0.5, 1.5, -0.5, 1e-50, 1e30, -1e30, 10**30, -(2**63), 2**31, 65_537),
    *(float("inf"), float("-inf"), float("nan")),
    *("", " ", "~", "null", "yes", "off", "1e3", "1e-3", "1/2", "0x10", "1_000", "1:30", "2001-01-01", "inf", "NaN"),
    *("PreNorm", "PrNorm", "Sum", "Adam", "SGD", "LBFGS", "SparseAdam", "GlobalNorm", "NoSuchThing", "auto", "cpu"),
    *("os.system", "builtins.exec", "torch.nn.Linear", "stabilize.strategies.Residual", "stabilize.cli.main", "a.b.c"),
    *(
        "missing.yaml",
        "/dev/null",
        "../../etc/passwd",
        "=",
        "--model.width",
        "a: b",
        "[1, 2",
        "{",
        "%s",
        "é",
        "\U0001f600",
    ),
    *("x" * 10_000, "line\nline", "tab\t", "nul\0"),
    *([], [1], [1, 2], ["a"], [None], [[]], [[1, 2], [3]], {}, {"a": 1}, {"": 1}, {1: 2}, {None: None}),
    {"class_path": "PreNorm"},
    {"class_path": None},
    {"class_path": ["PreNorm"]},
    {"class_path": "PreNorm", "init_args": [1]},
    {"class_path": "ScaledSum", "init_args": {"sum_scale": "1/sqrt(2)"}},
    {"class_path": "os.system", "init_args": {"command": "touch intruded"}},
    {"class_path": "subprocess.Popen", "init_args": {"args": ["touch", "intruded"]}},
    {"class_path": "Sum", "init_args": {}, "dict_kwargs": {"x": 1}},
    {"init_args": {"value": 1}},
]
"""What is put in a place of any type."""

CLASSES = {
    "placement": ["PreNorm", "PostNorm", "B2T", "SandwichNorm", "PeriNorm", "SubNorm", "NoNorm"],
    "residual": ["Sum", "ScaledSum", "ReZero", "LayerScale", "StochasticDepth", "HyperConnections", "NoResidual"],
    "norm": ["LayerNorm", "RMSNorm", "ScaleNorm", "DynamicTanh"],
    "initialization": ["Xavier", "DepthScaled", "GPT2", "SmallInit"],
    "warmup": ["NoWarmup", "Noam", "InverseSqrt"],
    "clipping": ["NoClipping", "GlobalNorm", "ZClip", "AdaptiveClipping"],
    "optimizer": ["SGD", "AdamW", "RAdam", "Adafactor", "Adagrad", "Rprop", "ASGD", "NAdam", "Muon"],
}
"""What would do in these places."""

LINES = [
    "model: null",
    "model: {}",
    "model: []",
    "<<: {seed_everything: 3}",
    "a: &a [*a]",
    "model: &m {stabilizer: *m}",
    "!!python/object/apply:os.system ['touch intruded']",
    "seed_everything: !!python/object/apply:os.system ['touch intruded']",
    "seed_everything: !!binary aGVsbG8=",
    "? [1, 2]\n: 3",
    "1: 2",
    "null: 1",
    "seed_everything: 2\nseed_everything: 3",
    "trainer: {max_steps: 1, max_steps: 3}",
    "trainer: {callbacks+: [Timer]}",
    "trainer: {callbacks: [Timer, Timer]}",
    "trainer.max_steps: 3",
    "trainer:\n  max_steps: 2\n  <<: {max_epochs: 1, max_steps: 7}",
    "--- \nmodel: {}\n---\nmodel: {}",
    "%YAML 3.0\n---\nmodel: {}",
    "x: " + "[" * 3000,
    "x: " + "[" * 200 + "]" * 200,
    "y: [&l [a, a], &m [*l, *l, *l, *l], &n [*m, *m, *m, *m], &o [*n, *n, *n, *n], &p [*o, *o, *o, *o], "
    "&q [*p, *p, *p, *p], &r [*q, *q, *q, *q], &s [*r, *r, *r, *r], &t [*s, *s, *s, *s], &u [*t, *t, *t, *t]]",
    "config: other.yaml",
    "print_config: true",
    "fit: {seed_everything: 3}",
    "help: true",
    "ckpt_path: [1]",
    "ckpt_path: last",
    "data: ParallelText",
    "data: TranslationData",
    "model: {stabilizer: null}",
    "model: {decoder_stabilizer: {}}",
    "trainer: {logger: [false]}",
    "trainer: {logger: CSVLogger}",
    "trainer: {plugins: [x]}",
    "trainer: {barebones: true}",
    "trainer: {fast_dev_run: true}",
    "trainer: {overfit_batches: 1}",
    "trainer: {gradient_clip_val: 0.5, gradient_clip_algorithm: value}",
    "trainer: {gradient_clip_algorithm: value}",
    "trainer: {gradient_clip_algorithm: foo}",
    "trainer: {precision: 8}",
    "trainer: {limit_train_batches: 0}",
    "trainer: {max_time: 00:00:00:00}",
    "trainer: {profiler: simple}",
    "trainer: {default_root_dir: /proc/1/x}",
    "trainer: {default_root_dir: ''}",
]
"""What is added to the end of a file, or stands in it alone."""

ENVIRONMENT = {
    "PL_FIT__TRAINER__MAX_STEPS": "77",
    "PL_TRAINER__MAX_STEPS": "77",
    "PL_FIT__CONFIG": "missing.yaml",
    "PL_CONFIG": "missing.yaml",
    "STABILIZE_FIT__MODEL__WIDTH": "77",
    "JSONARGPARSE_DEFAULT_ENV": "true",
    "PL_GLOBAL_SEED": "abc",
    "PL_SEED_WORKERS": "x",
    "PL_TRAINER_DEVICES": "3",
    "WANDB_PROJECT": "a/b?",
    "WANDB_MODE": "nonsense",
    "OMP_NUM_THREADS": "x",
    "COLUMNS": "3",
}


@dataclass
class Case:
    """A command line, the files that it names, and the environment."""

    number: int
    what: list[str] = field(default_factory=list)
    """What was done to it."""
    names: set[str] = field(default_factory=set)
    """Keys, values and words that this has to do with."""
    files: dict[str, bytes] = field(default_factory=dict)
    plain: dict[str, bytes] = field(default_factory=dict)
    """The same as they were."""
    flags: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> list[str]:
        """Put the files into a folder; the words after the verb."""
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        return [*(f"--config={name}" for name in self.files), *self.flags]


@functools.cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all nodes."""
    if path:
        yield path
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield from places(value, (*path, key))


def misspelt(random: Random, word: str) -> str:
    """A word with one letter gone, doubled, or in the other case."""
    if not word:
        return "x"
    at = random.randrange(len(word))
    letter = word[at]
    return word[:at] + random.choice(["", letter * 2, letter.swapcase(), "é", " ", "."]) + word[at + 1 :]


def mild(random: Random, key: str, value: Any) -> Any:
    """Another value that may well do."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return type(value)(value * random.choice([0.5, 2, 3, 1.0]))
    return random.choice(CLASSES.get(key, [value]))


def deep(random: Random, value: Any) -> Any:
    """A class within a class within a class."""
    for _ in range(random.choice([3, 30, 90])):
        value = {"class_path": "StochasticDepth", "init_args": {"around": value}}
    return value


def names_of(path: Iterable[Any]) -> set[str]:
    """A key by its last part and by its full name, and the groups, below the first, that it is in."""
    parts = [str(part) for part in path if part not in ("init_args", "class_path", "help")]
    return {*parts[-1:], *(".".join(parts[:end]) for end in range(2, len(parts) + 1))}


def texts_of(value: Any) -> set[str]:
    """A value as it is written, and what is in it."""
    parts = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    return {str(value)}.union(*map(texts_of, parts))


def change_tree(random: Random, tree: Any, made: Case) -> None:
    """Do something wrong to one node."""
    *above, key = path = random.choice([*places(tree)])
    parent = functools.reduce(lambda node, step: node[step], above, tree)
    value = parent.pop(key)
    wrapped = ([value], {"value": value}, {"class_path": value}, str(value))
    unknown = random.choice(["foo", "x.y", "", "class_path", "init_args", "self", "value", "every"])
    kinds: dict[str, Callable[[], tuple[Any, Any]]] = {
        "delete": lambda: (None, None),
        "value": lambda: (key, random.choice(VALUES)),
        "mild": lambda: (key, mild(random, str(key), value)),
        "class": lambda: (key, misspelt(random, str(value))),
        "wrap": lambda: (key, random.choice(wrapped)),
        "deep": lambda: (key, deep(random, value)),
        "misspell": lambda: (misspelt(random, str(key)), value),
        "unknown": lambda: (unknown, random.choice(VALUES)),
        "lift": lambda: (key, tree.setdefault(str(key), value)),
    }
    kind = random.choice([*kinds, *["value", "mild"] * 5])
    made.what.append(f"{kind} at {'.'.join(map(str, path))}")
    name, put = kinds[kind]()
    made.names |= {*names_of(path), *names_of([*above, name]), *texts_of(value), *texts_of(put)}
    if name is not None and isinstance(parent, dict):
        parent[name] = put
    elif name is not None:
        parent.insert(key, put)


def change_text(random: Random, text: str, made: Case) -> bytes:
    """Do something wrong to the characters."""
    lines = text.splitlines(keepends=True)
    at = random.randrange(len(lines))
    kinds: dict[str, Callable[[], bytes]] = {
        "twice": lambda: "".join([*lines[: at + 1], *lines[at:]]).encode(),
        "tab": lambda: "".join([*lines[:at], "\t" + lines[at].lstrip(), *lines[at + 1 :]]).encode(),
        "indent": lambda: "".join([*lines[:at], " " + lines[at], *lines[at + 1 :]]).encode(),
        "outdent": lambda: "".join([*lines[:at], lines[at][1:], *lines[at + 1 :]]).encode(),
        "gone": lambda: "".join([*lines[:at], *lines[at + 1 :]]).encode(),
        "cut": lambda: text[: random.randrange(len(text))].encode(),
        "carriage returns": lambda: text.replace("\n", "\r\n").encode(),
        "utf-16": lambda: text.encode("utf-16"),
        "utf-32": lambda: text.encode("utf-32"),
        "mark": lambda: text.encode("utf-8-sig"),
        "latin-1": lambda: (text + "# é\n").encode("latin-1"),
        "nul": lambda: text.replace(":", "\0:", 1).encode(),
        "junk": lambda: random.randbytes(random.choice([1, 20, 2000])),
        "junk after": lambda: text.encode() + random.randbytes(20),
        "letter": lambda: _with_letter(random, text).encode(),
        "empty": lambda: b"",
        "comment": lambda: b"# nothing\n",
        "line": lambda: (text + random.choice(LINES) + "\n").encode(),
        "alone": lambda: (random.choice(LINES) + "\n").encode(),
    }
    kind = random.choice([*kinds, "line", "line", "line", "alone", "letter", "twice"])
    made.what.append(f"{kind} near line {at + 1}")
    changed = kinds[kind]()
    made.names |= words_between(text, changed.decode(errors="replace"))
    return changed


def words_between(before: str, after: str) -> set[str]:
    """Those of the lines in which two texts differ, and of the ones next to them."""
    old, new = before.splitlines(), after.splitlines()
    changes = [change for change in SequenceMatcher(None, old, new, False).get_opcodes() if change[0] != "equal"]
    near = [line for _, i, j, k, m in changes for line in (*old[max(i - 1, 0) : j + 1], *new[max(k - 1, 0) : m + 1])]
    return {word for line in near for word in re.findall(r"[^\s:,{}\[\]]+", line)}


def _with_letter(random: Random, text: str) -> str:
    at = random.randrange(len(text))
    return text[:at] + random.choice("{}[]:,&*#?|-<>=!%@`'\"\\ \t\n0aé") + text[at + random.randrange(2) :]


def flag(random: Random, keys: list[str], made: Case) -> str:
    key = random.choice(keys)
    key = misspelt(random, key) if random.random() < 0.15 else key
    value = random.choice(VALUES)
    text = value if isinstance(value, str) else dump(value).strip().removesuffix("\n...")
    made.what.append(f"flag {key}")
    made.names |= {*names_of(key.split(".")), text, *texts_of(value)}
    return f"--{key}={text}".replace("\0", "")


def dump(tree: Any) -> str:
    stream = io.StringIO()
    yaml.safe_dump(tree, stream, default_flow_style=None, sort_keys=False, width=10_000, allow_unicode=True)
    return stream.getvalue()


def case(number: int, keys: list[str]) -> Case:
    """A hostile command line.

    Args:
        number: chooses it.
        keys: of `fit`, dotted.
    """
    random = Random(number)
    made = Case(number)
    paths = [QUICKSTART, *random.sample(OTHERS, random.choice([0, 1, 1, 2]))]
    for place, path in enumerate(paths):
        last = place == len(paths) - 1
        made.plain[f"{place}_{path.stem}.yaml"] = content = text_of(path).encode()
        ways = random.choice(["tree", "tree", "tree", "text", "text", "tree flag", "flag", "flags"]) if last else ""
        made.what.append(path.stem)
        if "tree" in ways:
            tree = yaml.safe_load(text_of(path))
            for _ in range(random.choice([1, 1, 2, 3])):
                if not isinstance(tree, dict) or not tree:
                    break
                change_tree(random, tree, made)
            content = dump(tree).encode("utf-8", "surrogatepass")
        if "text" in ways:
            content = change_text(random, text_of(path), made)
        if "flag" in ways:
            made.flags += [flag(random, keys, made) for _ in range(3 if ways == "flags" else 1)]
        made.files[f"{place}_{path.stem}.yaml"] = content
    if random.random() < 0.1:
        name = random.choice([*ENVIRONMENT])
        made.environment[name] = ENVIRONMENT[name]
        made.what.append(f"environment {name}")
        made.names |= {name, ENVIRONMENT[name]}
    return made
