"""`stabilize new-strategy AXIS NAME`: a small package with a strategy of one's own, working as it stands."""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from string import Template
from typing import NamedTuple

from stabilize import plugins
from stabilize.commands.menu import MENU, key, known
from stabilize.commands.words import Parser
from stabilize.errors import UserError
from stabilize.strategies import AXES, Part
from stabilize.strategies.menu import menu

OURS = "stabilize-nmt"
"""The distribution that every package needs."""

USAGE = """Write a small package that brings a strategy of your own: the class, its entry point and a test. What is
written is an example that works; put your own equation in its place."""

PROJECT = Template("""[project]
name = "$distribution"
version = "0.1"
dependencies = ["stabilize-nmt"]

[project.entry-points."stabilize.strategies"]
$name = "$module:$name"

[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[tool.setuptools]
py-modules = ["$module"]

[tool.pytest.ini_options]
pythonpath = ["."]
""")

READ_ME = Template("""# $distribution

`$name`, a strategy for `$key` of stabilize.

```bash
pip install -e .
pytest
stabilize strategies $axis $name
stabilize fit -c configs/quickstart.yaml --$key $name
```
""")

STRATEGY = Template('''"""`$name`, a strategy for `$key`."""

from __future__ import annotations

$imports


class $name($base):
    """$sentence

        $equation

    Paper: none, this is an example; here stand the authors, year, arXiv:0000.00000

    Args:
        $argument: $meaning
    """

    def __init__(self, $option) -> None:$start
        self.$argument = $argument
$methods''')

TEST = Template('''"""`$name` trains five updates on the corpus that comes with stabilize."""

from __future__ import annotations

import math
from pathlib import Path

from lightning.pytorch import Trainer, seed_everything
from stabilize.data import SyntheticCorpus
from stabilize.strategies import Stabilizer
from stabilize.task import TranslationTask

import $module


def test_it_trains(tmp_path: Path) -> None:
    seed_everything(1)
    sizes = {"encoder_layers": 2, "decoder_layers": 2, "width": 16, "heads": 2, "hidden": 32}
    task = TranslationTask($chosen, **sizes)
    data = SyntheticCorpus(train_pairs=200, validation_pairs=4, test_pairs=0, vocabulary=60, batch_tokens=96)
    trainer = Trainer(
        accelerator="cpu",
        max_steps=5,
        default_root_dir=tmp_path,
        logger=False,
        log_every_n_steps=1,
        limit_val_batches=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task, data)
    assert trainer.global_step == 5
    assert math.isfinite(trainer.callback_metrics["train/nll"])
''')


class Example(NamedTuple):
    """What is an axis's own in the package written for it: a method with one option."""

    sentence: str
    equation: str
    option: str
    """As it stands in the signature, with its default."""
    meaning: str
    imports: str
    methods: str


EXAMPLES = {
    "placement": Example(
        sentence="Normalise what a branch gives before it joins the stream.",
        equation="x <- x ⊕ norm(f(x));  at the end of the stack x <- norm(x)",
        option="final_norm: bool = True",
        meaning="normalise the end of the stack too.",
        imports="""\
from collections.abc import Callable

from stabilize.strategies import Placement, Site, Step, Stream
from torch import Tensor, nn""",
        methods="""
    def slots(self, site: Site, norm: Callable[..., nn.Module]) -> dict[str, nn.Module]:
        if site.role == "final":
            return {"norm": norm(site)} if self.final_norm else {}
        return {"out": norm(site)}

    def sublayer(self, stream: Stream, step: Step) -> Stream:
        return step.write(stream, step.out(step(step.read(stream))))

    def leave(self, stream: Stream, end: Step) -> Tensor:
        return end.norm(end.end(stream))
""",
    ),
    "residual": Example(
        sentence="The branch is multiplied by a gain before it joins the stream.",
        equation="x ⊕ f = x + gain f",
        option="gain: float = 0.5",
        meaning="multiplies the branch.",
        imports="""\
from stabilize.strategies import Residual
from torch import Tensor""",
        methods="""
    def write(self, stream: Tensor, branch: Tensor) -> Tensor:
        return stream + self.gain * branch
""",
    ),
    "norm": Example(
        sentence="Scale each position by its mean power, then gain.",
        equation="y = g x / (mean(|x|^power) + epsilon)^(1/power)",
        option="power: float = 1.0",
        meaning="1 is the mean absolute value, 2 the root mean square.",
        imports="""\
import torch
from stabilize.strategies import Norm, Site
from torch import Tensor, nn""",
        methods="""
    def build(self, site: Site, *, width: int | None = None, epsilon: float) -> None:  # type: ignore[override]
        super().build(site, width=width, epsilon=epsilon)
        self.gain = nn.Parameter(torch.ones(self.width))

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        mean = (x.float().abs() ** self.power).mean(-1, keepdim=True)
        return (self.gain * x.float() / (mean + self.epsilon) ** (1 / self.power)).to(x.dtype)
""",
    ),
    "epsilon": Example(
        sentence="Epsilon grows with the layer.",
        equation="epsilon_l = value (1 + l)",
        option="value: float = 1e-3",
        meaning="epsilon at the embedding, where l = 0.",
        imports="from stabilize.strategies import Epsilon, Site",
        methods="""
    def at(self, site: Site, precision: str) -> float:
        return self.value * (1 + site.layer)
""",
    ),
    "initialization": Example(
        sentence="What a branch ends with is drawn smaller in deeper stacks.",
        equation="gain = layers^-exponent for the last matrix of each branch, else 1",
        option="exponent: float = 0.5",
        meaning="how fast the gain falls with depth.",
        imports="""\
from stabilize.strategies import Initialization, Site
from stabilize.strategies.initialization import Role""",
        methods="""
    def gain(self, site: Site, role: Role) -> float:
        return site.layers**-self.exponent if role in ("output", "feed_forward_out") else 1.0
""",
    ),
    "attention": Example(
        sentence="Divide the logits by a temperature.",
        equation="softmax(q k^T / (temperature sqrt(d_head))) v",
        option="temperature: float = 2.0",
        meaning="above 1 the weights are more even.",
        imports="""\
from stabilize import kernels
from stabilize.strategies import AttentionStabilizer
from torch import Tensor""",
        methods="""
    def logits(self, query: Tensor, key: Tensor, carried: Tensor | None) -> Tensor:
        return kernels.logits(query, key) / self.temperature
""",
    ),
    "warmup": Example(
        sentence="Rise with the square of the update number, then stay.",
        equation="factor(t) = min(1, (t / w)^2)",
        option="updates: int = 4000",
        meaning="w, the update that has the full learning rate.",
        imports="from stabilize.strategies import Warmup",
        methods="""
    def factor(self, update: int) -> float:
        return min(1.0, (update / self.updates) ** 2)
""",
    ),
    "clipping": Example(
        sentence="Cut off every entry of a gradient at a value.",
        equation="g <- min(max(g, -value), value)",
        option="value: float = 1e-3",
        meaning="the largest entry left.",
        imports="""\
from stabilize.strategies import Clipping, Gradients
from torch.nn.utils import clip_grad_value_""",
        methods="""
    def clip(self, gradients: Gradients) -> None:
        clip_grad_value_(gradients.parameters, self.value)
""",
    ),
}


def write(words: list[str]) -> int:
    """Write the package that the words ask for."""
    parser = Parser("new-strategy", USAGE)
    parser.add_argument("axis", metavar="AXIS", help=", ".join(MENU))
    parser.add_argument("name", metavar="NAME", help="what the class is called, such as HalvedSum")
    parser.add_argument("--folder", metavar="DIR", type=Path, help="where to write it, a folder that is not there yet")
    chosen = parser.parse_args(words)
    axis, name = known(chosen.axis, MENU, "axis"), _free(chosen.name)
    files = package(axis, name)
    folder = chosen.folder or Path(_distribution(name))
    try:
        folder.mkdir(parents=True)
        for file, text in files.items():
            (folder / file).write_text(text, encoding="utf-8")
    except FileExistsError as error:
        raise UserError(f"the folder {folder} is there already; --folder names another one") from error
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}; --folder names another folder") from error
    print(f"wrote {folder}: {', '.join(files)}")
    print(f"next: pip install -e {folder} && stabilize fit -c configs/quickstart.yaml --{key(axis)} {name}")
    return 0


def package(axis: str, name: str) -> dict[str, str]:
    """The files of a package that brings `name` to an axis of the menu: text by file name."""
    example, base, distribution = EXAMPLES[axis], MENU[axis], _distribution(name)
    module = distribution.replace("-", "_")
    chosen = f"{axis}={module}.{name}()"
    values = example._asdict() | {
        "axis": axis,
        "name": name,
        "base": base.__name__,
        "key": key(axis),
        "distribution": distribution,
        "module": module,
        "start": "\n        super().__init__()" if issubclass(base, Part) else "",
        "argument": example.option.partition(":")[0],
        "chosen": f"Stabilizer({chosen})" if axis in AXES else f"Stabilizer(), {chosen}",
    }
    files = {"pyproject.toml": PROJECT, "README.md": READ_ME, f"{module}.py": STRATEGY, f"test_{module}.py": TEST}
    return {file: template.substitute(values) for file, template in files.items()}


def _distribution(name: str) -> str:
    """What the package of a class is called; the hyphens keep its folder from being taken for the module."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z0-9])(?=[A-Z][a-z])", "-", name)
    return f"stabilize-{words.lower()}"


def _free(name: str) -> str:
    """The name of a class, unless it is none or another class has it.

    Raises:
        UserError: so it is.
    """
    if not re.fullmatch(r"[A-Z][A-Za-z0-9]*", name) or keyword.iskeyword(name):
        raise UserError(f"NAME is {name}; a class is called by a capital letter, then letters and digits: HalvedSum")
    plugins.load("stabilize.strategies")
    taken = {each.__name__: each for base in MENU.values() for each in (base, *menu(base))}
    if _distribution(name) == OURS:
        raise UserError(f"NAME is {name}, whose package would be called {OURS} like the one it needs; another would do")
    if name in taken:
        raise UserError(f"NAME is {name}, which is taken by {taken[name].__module__}.{name}; give it another name")
    return name
