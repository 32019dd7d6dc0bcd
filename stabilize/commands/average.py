"""`stabilize average RUN [...] --last N | --best N --output FILE`: the mean of checkpoints as a checkpoint."""

from __future__ import annotations

from pathlib import Path

from stabilize.commands.words import Parser
from stabilize.errors import UserError

ABOUT = """Write the mean of several checkpoints as a checkpoint of weights alone, which test, predict and export take.
Of run folders, or of files, the newest (--last), those with the best value of checkpoint.monitor (--best), or all. What
it is a mean of stands in the file."""


def write(words: list[str]) -> int:
    """Write the mean, and say of what."""
    parser = Parser("average", ABOUT)
    parser.add_argument("checkpoints", nargs="+", type=Path, help="run folders, or files")
    parser.add_argument("--last", type=int, default=0, help="average the newest N")
    parser.add_argument("--best", type=int, default=0, help="average the N with the best score")
    parser.add_argument("--output", type=Path, required=True, help="the file that is made, such as average.ckpt")
    given = parser.parse_args(words)
    from stabilize import averaging

    which = averaging.Which(last=given.last, best=given.best)
    if not which.count and any(place.is_dir() for place in given.checkpoints):
        raise UserError("average: of a run folder, which checkpoints? --last 5 or --best 5 would do")
    if given.output.exists():
        raise UserError(f"--output {given.output} is there already; give the name of a new file")
    candidates = averaging.found(given.checkpoints)
    chosen = averaging.choose(candidates, which)
    if len(chosen) < which.count:
        there = ", ".join(one.path.name for one in candidates)
        raise UserError(
            f"average is {which}, but there are {len(chosen)} to choose from: {there}; a run keeps more with "
            f"--checkpoint.{which.kept_by} {which.count}"
        )
    averaging.write(chosen, which, given.output)
    for one in chosen:
        score = "" if one.monitor is None else f", {one.monitor} {one.score:.4f}"
        print(f"{one.path}: update {one.update:,}{score}")
    print(f"average of {len(chosen)}: {given.output}")
    return 0
