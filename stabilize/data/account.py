"""What the rules of cleaning met in the text of a run, and what became of it, to be read by people."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from stabilize.data.cleaning import RULES, Met

SPLITS = ("train", "validation", "test")


def summary(account: Mapping[str, Any]) -> str:
    """How many pairs there are, and which tokenizer, on one line."""
    counts = [f"{split} {account[split]['pairs']:,}" for split in SPLITS if split in account]
    tokenizer = account["tokenizer"]
    return f"pairs: {', '.join(counts) or 'none'}; vocabulary {tokenizer['vocabulary']:,} ({tokenizer['hash']})"


def table(account: Mapping[str, Any]) -> Table | None:
    """How often each rule was met in each split, and in which line first; none where the text is clean."""
    splits = {split: account[split]["rules"] for split in SPLITS if split in account}
    met = [rule for rule in RULES if any(rule in rules for rules in splits.values())]
    if not met:
        return None
    shown = Table(box=box.SIMPLE_HEAD, title="pairs with a fault, and the line of the first", title_justify="left")
    for heading in ("", *splits, "in training"):
        shown.add_column(heading, no_wrap=True)
    for rule in met:
        cells = [_cell(rules[rule]) if rule in rules else "" for rules in splits.values()]
        shown.add_row(rule, *cells, splits.get("train", {}).get(rule, {}).get("done", ""))
    return shown


def _cell(met: Mapping[str, Any]) -> str:
    file = f"{Path(met['first_file']).name}:" if "first_file" in met else ""
    return f"{met['pairs']:,} ({file}{met['first_line']:,})"


def in_words(met: Mapping[str, Met]) -> str:
    """What was dropped and why, on one line."""
    dropped = [f"{one.pairs:,} {rule}" for rule, one in met.items() if one.done == "dropped"]
    return ", ".join(dropped) or "there was none"
