"""`stabilize export CHECKPOINT --to TARGET --output FOLDER`: a trained model for another toolkit."""

from __future__ import annotations

from pathlib import Path

from stabilize.commands.weights import load
from stabilize.commands.words import Parser

ABOUT = """Write a trained model and its tokenizer into a new folder, for transformers, for CTranslate2, or as
safetensors. Scales of residuals, and weights that are computed from others, are folded in. What was written is run in
the target's own code, and compared, before it is there. A model that the target cannot express is refused in words;
safetensors takes every model, which stabilize alone reads."""


def write(words: list[str]) -> int:
    """Write the model, and say how near it comes."""
    from stabilize.export import CLOSE, SENTENCES, TARGETS, export

    parser = Parser("export", ABOUT)
    parser.add_argument("checkpoint", type=Path, help="runs/<run id>/checkpoints/last.ckpt, or another")
    parser.add_argument("--to", required=True, choices=TARGETS, help="what reads it")
    parser.add_argument("--output", required=True, type=Path, help="the folder that is made")
    given = parser.parse_args(words)
    task = load(given.checkpoint)
    exported = export(task, given.to, given.output)
    for remark in exported.remarks:
        print(f"note: {remark}; it makes a difference of less than {CLOSE:g}")
    print(
        f"{given.to}: {given.output}; log p of a token differs by at most {exported.difference:.1e} on {SENTENCES} "
        "random sentence pairs"
    )
    return 0
