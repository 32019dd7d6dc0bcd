"""`stabilize bench TOPIC`: how fast the parts of a run are, one module a topic."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from stabilize.errors import UserError, known

TOPICS = {
    "train": "fit's tokens a second, against the machine's products and a bare loop",
    "decode": "sentences a second of greedy and beam search",
    "depth": "step time and memory of a layer, from shallow to deep",
    "diagnostics": "what each callback of a run costs",
    "startup": "seconds until help, the menu and the first update",
}
"""What is measured, each by the module of its name."""

HELP = """usage: stabilize bench TOPIC -c CONFIG [options]

Measure, in rounds in which everything that is compared has its turn.

topics:
{topics}

stabilize bench TOPIC --help tells a topic's options"""


def measure(words: Sequence[str]) -> int:
    """Carry out `stabilize bench TOPIC`."""
    if words and words[0] in ("-h", "--help"):
        print(HELP.format(topics="\n".join(f"  {topic:<13}{what}" for topic, what in TOPICS.items())))
        return 0
    if not words or words[0].startswith("-"):
        raise UserError(f"bench needs to be told what to measure, {', '.join(TOPICS)}; stabilize bench train -c CONFIG")
    topic, *rest = words
    known(topic, TOPICS, "benchmark")
    return importlib.import_module(f"stabilize.commands.bench.{topic}").measure(rest)
