"""The rules of the house that a reader relies on, read off the source: who imports whom, what is called how."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import checkout
from tests.checkout import ROOT

# Which other parts of the package each part may import. Everybody may import errors and tokens; only __main__
# imports cli.
MAY_IMPORT: dict[str, set[str]] = {
    "__init__": set(),
    "errors": set(),
    "tokens": set(),
    "plugins": set(),
    "kernels": set(),
    "generators": set(),
    "slurm": set(),
    "gradients": {"stats"},
    "precision": set(),
    "stats": set(),
    "findings": set(),
    "loss": {"kernels"},
    "metrics": set(),
    "data": set(),
    "strategies": {"gradients", "stats", "kernels"},
    "model": {"strategies", "stats", "kernels"},
    "card": {"model", "strategies"},
    "report": {"card", "findings", "strategies"},
    "study": {"findings", "metrics", "report"},
    "decoding": {"model"},
    "evaluation": {"metrics", "data"},
    "probe": {"model", "strategies", "stats"},
    "callbacks": {"findings", "generators", "gradients", "precision", "slurm", "stats"},
    "checkpoint": set(),
    "task": {
        *("checkpoint", "data", "decoding", "evaluation", "generators", "gradients", "loss", "metrics", "model"),
        *("precision", "sharding", "strategies", "stats"),
    },
    "sharding": {"model", "stats"},
    "averaging": {"checkpoint"},
    "export": {"data", "model", "strategies", "task"},
}
MAY_IMPORT["commands"] = set(MAY_IMPORT)
MAY_IMPORT["cli"] = {"commands"}
MAY_IMPORT["__main__"] = {"cli"}


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).glob("**/*.py"))


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


def own_imports(path: Path) -> Iterator[tuple[str, str]]:
    """Each name that a file imports from this package, as (module, name); the name is empty for a whole module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{label(path)}:{node.lineno} imports relatively; imports are absolute here"
            imported = [(str(node.module), alias.name) for alias in node.names]
        else:
            continue
        for module, name in imported:
            if module == "stabilize":
                yield f"stabilize.{name}", ""
            elif module.startswith("stabilize."):
                yield module, name


def strategy_names() -> set[str]:
    """What a user picks: the classes of stabilize/strategies that descend from the base class of an axis."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sources("stabilize/strategies")]
    classes = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    own = {node.name for node in classes} - {"Strategy", "Part"}  # the parents of the axes' base classes
    return {node.name for node in classes if own & {ast.unparse(base) for base in node.bases}}


def breaches(importer: str, path: Path) -> list[str]:
    """The imports in ``path``, a file of the part ``importer``, that run upwards."""
    allowed = MAY_IMPORT[importer] | {importer, "errors", "tokens"}
    return [module for module, _ in own_imports(path) if module.split(".")[1] not in allowed]


@pytest.mark.parametrize("path", sources("stabilize") + sources("callbacks"), ids=label)
def test_imports_run_one_way(path: Path) -> None:
    folder, *rest = path.relative_to(ROOT).with_suffix("").parts
    importer = "callbacks" if folder == "callbacks" else rest[0]
    assert importer in MAY_IMPORT, f"say in MAY_IMPORT what stabilize/{importer} stands on"
    assert not breaches(importer, path)


def test_an_upward_import_is_noticed(tmp_path: Path) -> None:
    upward = tmp_path / "upward.py"
    upward.write_text("import torch\nfrom stabilize import task\nimport stabilize.cli\nfrom stabilize.stats import x\n")
    assert breaches("model", upward) == ["stabilize.task", "stabilize.cli"]


@pytest.mark.parametrize("path", sources("stabilize/model"), ids=label)
def test_the_model_knows_no_strategy_by_name(path: Path) -> None:
    strategies = strategy_names()
    assert {"PreNorm", "B2T", "Sum", "RMSNorm"} <= strategies
    assert not strategies & {name for module, name in own_imports(path) if module.startswith("stabilize.strategies")}
    source = path.read_text(encoding="utf-8")
    constants = {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)}
    assert not strategies & constants, "a strategy is asked for what it does, not for its name"
    assert not re.search(r"\bplacement\s*==|__name__\s*==", source)


@pytest.mark.parametrize("path", [path for path in sources("callbacks") if path.name != "__init__.py"], ids=label)
def test_a_callbacks_file_is_called_like_its_class(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    in_snake_case = [re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower() for name in classes]
    assert in_snake_case in ([path.stem], [])  # none: functions that callbacks share


def test_no_file_names_the_machine_it_was_written_on() -> None:
    named = re.compile(rf"(?<![\w.*])/(?:{'|'.join(['work', 'root'])})\b|\b(?:pypi\.or[g]|registry\.npmj[s])")
    found = []
    for name in checkout.files():
        path = ROOT / name
        if path.is_file() and not path.is_symlink():
            lines = path.read_bytes().decode("utf-8", errors="replace").splitlines()
            found += [f"{name}:{number}: {line}" for number, line in enumerate(lines, start=1) if named.search(line)]
    assert not found
