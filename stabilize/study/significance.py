"""Whether strategies translate differently, by sacreBLEU's paired tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from stabilize.metrics import compare, corpus_scores
from stabilize.study.table import Line, Row, at_best, lines

Translated = tuple[list[str], list[str]]
"""Lines of a test, and the reference of each."""


def compared(
    rows: Sequence[Row], keys: Sequence[str], folders: Mapping[str, Path], tell: Callable[[str], None] = lambda _: None
) -> list[dict[str, str]]:
    """Each strategy against the one with the highest BLEU, where all else is the same, such as the depth.

    Of each strategy, at its best learning rate, the lines of all seeds one after the other; those with a seed that did
    not train, or that has no translations, are left out.

    Args:
        rows: of results.csv.
        keys: of the grid, without the seed.
        folders: run folder by name of the run.
        tell: is told what is being compared.
    """
    others = [key for key in keys if key not in ("strategy", "learning_rate")]
    found: list[dict[str, str]] = []
    places: dict[tuple[str, ...], list[tuple[Line, Translated]]] = {}
    for line in at_best(lines(rows, keys)):
        text = None if line.failed else _translated(line, folders)
        if text is not None:
            places.setdefault(tuple(line.values[key] for key in others), []).append((line, text))
    for systems in places.values():
        systems.sort(key=lambda system: -system[0].mean("test_bleu"))
        references = {tuple(reference) for _, (_, reference) in systems}
        if len(systems) < 2 or len(references) > 1:
            continue  # nothing to compare, or not the same text
        tell(f"{len(systems)} systems are compared, {len(found)} have been")
        by_score = compare(corpus_scores(["bleu"]), [text for _, (text, _) in systems], [[*references.pop()]])
        result = by_score["bleu"]
        for number, (line, _) in enumerate(systems):
            mean, half = result.intervals[number]
            found.append(
                {
                    **line.values,
                    "bleu": repr(result.scores[number]),
                    "bootstrap_mean": repr(mean),
                    "bootstrap_half_width": repr(half),
                    "p_bootstrap": repr(result.bootstrap[number - 1]) if number else "",
                    "p_randomization": repr(result.randomization[number - 1]) if number else "",
                    "signature": " ".join(result.signatures),
                }
            )
    return found


def _translated(line: Line, folders: Mapping[str, Path]) -> Translated | None:
    """The test lines of all seeds; none where a run has none."""
    texts: list[list[str]] = [[], []]
    for row in line.rows:
        for text, name in zip(texts, ("test.txt", "test.reference.txt"), strict=True):
            try:
                text += (folders[row["run"]] / "translations" / name).read_text(encoding="utf-8").split("\n")[:-1]
            except (OSError, KeyError):
                return None
    return (texts[0], texts[1]) if texts[0] and len(texts[0]) == len(texts[1]) else None
