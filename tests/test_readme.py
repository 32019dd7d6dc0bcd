"""Every command in README.md is run: each ```bash block stands under a comment that says how.

    <!-- test: run -->              as it stands
    <!-- test: shorten FLAGS -->    two updates and one batch of every evaluation in place of a whole training; FLAGS,
                                    if any, are added too: --data.init_args.train_pairs=400 --model.width=16
    <!-- test: parse -->            only read: `stabilize fit … --print_config`
    <!-- test: by PATH -->          the file PATH has these very lines
    <!-- test: by PATH::NAME -->    the test NAME in the file PATH covers it: that file has each of its words

A block is one script, run in a folder that looks like the checkout and has its own runs/.
"""

from __future__ import annotations

import os
import re
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

from stabilize.cli import main
from tests import checkout
from tests.checkout import ROOT

README = ROOT / "README.md"

SHORT = " ".join(
    f"--trainer.{flag}"
    for flag in ("max_steps=2", "limit_val_batches=1", "limit_test_batches=1", "limit_predict_batches=1")
)

# What `stabilize` means in a block: a function of the shell that adds flags to the verbs that run a trainer, or that
# only says what it is asked, to be carried out in this process (to start one takes longer than to read a config).
COMMANDS = {
    "run": "",
    "shorten": f"""stabilize() {{
        case $1 in fit | validate | test | predict) set -- "$@" {SHORT} $FLAGS ;; esac
        command stabilize "$@"
    }}""",
    "parse": """stabilize() { printf '%s\\0' "$@" --print_config ''; }""",
}


@dataclass(frozen=True)
class Block:
    """One fenced block of shell commands: the line it starts at, what the comment above says, and the commands."""

    line: int
    mark: str
    script: str

    def __str__(self) -> str:
        return f"line {self.line}, {self.mark or 'unmarked'}"


def blocks(text: str) -> list[Block]:
    """The ```bash blocks of a page in Markdown."""
    fenced = r"(?:^<!-- test: (?P<mark>[^\n]+?) -->\n+)?^```(?:bash|sh|shell|console)\n(?P<script>.*?)^```$"
    return [
        Block(text.count("\n", 0, found.start("script")), found["mark"] or "", found["script"])
        for found in re.finditer(fenced, text, re.MULTILINE | re.DOTALL)
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder like the checkout, beside the same shared/ folder, if there is one."""
    if (ROOT.parent / "shared").is_dir():
        (tmp_path / "shared").symlink_to(ROOT.parent / "shared")
    copy = tmp_path / "checkout"
    copy.mkdir()
    for name in {Path(name).parts[0] for name in checkout.files()}:
        (copy / name).symlink_to(ROOT / name)
    return copy


def run(block: Block, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a block by bash; any command of it that fails ends it."""
    mode, _, flags = block.mark.partition(" ")
    assert mode in COMMANDS, "a comment above the block has to say how it is tested; see tests/test_readme.py"
    path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", f"set -euo pipefail\n{COMMANDS[mode]}\n{block.script}"],
        cwd=folder,
        env={**os.environ, "PATH": path, "FLAGS": flags},
        capture_output=True,
        text=True,
    )


def said(script: str) -> list[str]:
    """The verbs and the options of a script's commands, those of other tools than ours and W&B's left out."""
    commands = [line.split("#")[0].split() for line in script.replace("\\\n", " ").splitlines()]
    ours = [rest for first, *rest in filter(None, commands) if first in ("stabilize", "wandb")]
    return [word for words in ours for word in words if re.fullmatch(r"--\w[\w.-]*|[a-z]+", word)]


@pytest.mark.parametrize("block", blocks(README.read_text(encoding="utf-8")), ids=str)
def test_a_command_of_the_readme_does_what_it_says(block: Block, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if block.mark.startswith("by "):
        path, _, test = block.mark.removeprefix("by ").partition("::")
        source = (ROOT / path).read_text(encoding="utf-8")
        if test:
            assert f"def {test}(" in source
            assert [word for word in said(block.script) if word not in source] == []
        else:
            assert set(block.script.splitlines()) <= {line.strip() for line in source.splitlines()}
    else:
        result = run(block, folder)
        assert result.returncode == 0, result.stdout + result.stderr
        for command in result.stdout.split("\0\0") if block.mark == "parse" else ():
            monkeypatch.chdir(folder)
            if command:
                with pytest.raises(SystemExit) as end:
                    main(command.split("\0"))
                assert end.value.code == 0, command


PAGE = """
```bash
first
```

<!-- test: shorten -->
```bash
stabilize fit -c "a b.yaml" \\
    --seed_everything=1   # a comment
stabilize strategies placement
```

```yaml
not: a command
```
"""


def test_blocks_are_found_with_their_marks() -> None:
    first, second = blocks(PAGE)
    assert (first.line, first.mark, first.script) == (2, "", "first\n")
    assert (second.line, second.mark) == (7, "shorten")
    with pytest.raises(AssertionError, match="has to say how"):
        run(first, Path())


@pytest.mark.parametrize(
    ("mark", "added"),
    [
        ("run", []),
        ("shorten", SHORT.split()),
        ("shorten --a=1 --b=2", [*SHORT.split(), "--a=1", "--b=2"]),
    ],
)
def test_only_a_trainers_verbs_are_shortened(mark: str, added: list[str], tmp_path: Path) -> None:
    """A stand-in for the command writes down what it is given, one argument a line."""
    (tmp_path / "stabilize").write_text('#!/bin/sh\nprintf "%s\\n" "$@" ""\n')
    (tmp_path / "stabilize").chmod(0o755)
    block = Block(7, mark, f'PATH="{tmp_path}:$PATH"\n{blocks(PAGE)[1].script}')
    fit = ["fit", "-c", "a b.yaml", "--seed_everything=1", *added]
    assert run(block, tmp_path).stdout.splitlines() == [*fit, "", "strategies", "placement", ""]


def test_a_block_fails_with_its_first_command_that_fails(tmp_path: Path) -> None:
    assert run(Block(1, "run", "false\ntrue\n"), tmp_path).returncode == 1
    assert run(Block(1, "run", "false | true\n"), tmp_path).returncode == 1


def test_the_plug_in_of_the_readme_trains(folder: Path, tmp_path: Path) -> None:
    """Its two files, installed beside the package, are found by name."""
    text = README.read_text(encoding="utf-8")
    (source,) = re.findall(r'^```python\n("""my_strategies.py""".*?)^```$', text, re.MULTILINE | re.DOTALL)
    (project,) = re.findall(r"^```toml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    package, site = tmp_path / "package", tmp_path / "site"
    package.mkdir()
    (package / "my_strategies.py").write_text(source, encoding="utf-8")
    (package / "pyproject.toml").write_text(project, encoding="utf-8")
    small = "--data.init_args.train_pairs=300 --data.init_args.baselines=false --model.encoder_layers=1"
    script = f"""
        python -m pip install --quiet --no-deps --no-build-isolation --target {site} {package}
        export PYTHONPATH={site}
        stabilize strategies residual | grep -A 1 Halved
        stabilize fit -c configs/quickstart.yaml --model.stabilizer.placement PreNorm {small} \
            --model.decoder_layers=1 --model.stabilizer.residual Halved --model.stabilizer.residual.share 0.25
        grep -A 2 my_strategies.Halved runs/*/config.yaml | grep 'share: 0.25'
    """
    result = run(Block(0, "shorten", script), folder)
    assert result.returncode == 0, result.stdout + result.stderr
