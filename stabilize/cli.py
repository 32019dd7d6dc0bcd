"""The command `stabilize`. Heavy modules are imported by the verb that needs them, so that help answers at once."""

from __future__ import annotations

import difflib
import importlib
import os
import signal
import sys
import warnings
from collections.abc import Sequence

from stabilize.errors import FULL, TrainingStoppedError, UserError

VERBS = {
    "fit": "train, and where asked test the result",
    "validate": "score a checkpoint on the validation text",
    "test": "translate the test text with a checkpoint and score it",
    "predict": "translate the test text with a checkpoint",
    "translate": "translate lines from standard input with a checkpoint",
    "score": "score translations against references, and compare two systems",
    "prepare": "clean and tokenise a config's text, as fit does where it has not been done",
    "explain": "print what a config's stabiliser is and does, without training",
    "probe": "show what each layer does before training, for many strategies and depths",
    "compare": "carry out a study: a run for each strategy, depth, seed, and one table",
    "average": "average the weights of several checkpoints into one",
    "export": "write a trained model for transformers, CTranslate2, or as safetensors",
    "bench": "measure training, decoding, depth, diagnostics, start-up",
    "report": "write one HTML page from run folders: curves, heat maps, translations, what stands out",
    "dashboard": "build a workspace in Weights & Biases for the runs of a project",
    "strategies": "list the strategies of each axis, and the published bundles",
    "new-strategy": "write a small package with a strategy of your own",
}

OWN = {
    "translate": ("translate", "translate"),
    "score": ("score", "score"),
    "probe": ("probe", "look"),
    "compare": ("compare", "compare"),
    "average": ("average", "write"),
    "export": ("export", "write"),
    "bench": ("bench", "measure"),
    "report": ("report", "write"),
    "dashboard": ("dashboard", "build"),
    "strategies": ("menu", "show"),
    "new-strategy": ("new_strategy", "write"),
}
"""Module and function of the verbs that are not LightningCLI's."""

HELP = """usage: stabilize VERB [options]

Train deep encoder-decoder Transformers; what keeps them stable is a choice in YAML.

verbs:
{verbs}

settings come from configs (-c, again and again) and flags; what is given later wins. Environment variables set none.
stabilize VERB --help tells a verb's options; --debug after any verb shows the traceback of an error.
first run: stabilize fit -c configs/quickstart.yaml"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 0, 2 for what the user can mend, 3 for a training that the spike guard has
    stopped, 1 for the rest, 130 after Ctrl-C.

    141 means that whoever read the output went away, as `head` does.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    formatted_before = warnings.formatwarning
    if not debug:
        warnings.formatwarning = _warning
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except UserError as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2
    except TrainingStoppedError as end:
        print(f"stopped: {end}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        _write_no_more()
        return 128 + signal.SIGPIPE
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # how rich leaves
            return 128 + signal.SIGPIPE
        raise
    except Exception as error:
        if debug:
            raise
        if isinstance(error, OSError) and error.errno in FULL:
            try:
                sys.stdout.flush()
            except OSError:
                _write_no_more()
            print(f"error: the output cannot be written: {error.strerror}; another disk would do", file=sys.stderr)
            return 2
        notes = "".join(f"; {note}" for note in getattr(error, "__notes__", []))
        print(f"error: {type(error).__name__}: {error}{notes}\n(--debug shows the traceback)", file=sys.stderr)
        return 1
    finally:
        warnings.formatwarning = formatted_before


def _warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """A warning as a user reads it: not where in the code it was given."""
    return f"warning: {message}\n"


def _write_no_more() -> None:
    """Let what was printed go nowhere, or the interpreter's last flush fails again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(HELP.format(verbs="\n".join(f"  {verb:<14}{what}" for verb, what in VERBS.items())))
        return 0
    verb = words[0]
    if verb not in VERBS:
        near = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(VERBS)}"
        raise UserError(f"stabilize has no verb {verb}; {hint}")
    module, function = OWN.get(verb, ("training", "run"))
    try:
        carry_out = getattr(importlib.import_module(f"stabilize.commands.{module}"), function)
    except ImportError as error:
        missing = error.name or "a package"
        raise UserError(f"{verb} needs {missing}, which cannot be imported: {error}; pip install {missing}") from error
    return carry_out(words[1:] if verb in OWN else words)


if __name__ == "__main__":  # python stabilize/cli.py
    sys.exit(main())
