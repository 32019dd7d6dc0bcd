"""The model of a checkpoint, for the verbs that need nothing else."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from stabilize import plugins
from stabilize.errors import UserError

if TYPE_CHECKING:
    from stabilize.task import TranslationTask


def load(path: Path) -> TranslationTask:
    """The task of a checkpoint.

    Raises:
        UserError: there is none, it is damaged, or a strategy of it is not installed.
    """
    from stabilize import checkpoint
    from stabilize.task import TranslationTask

    for group in plugins.GROUPS:
        plugins.load(group)
    sys.path += [str(Path.cwd())] if str(Path.cwd()) not in sys.path else []
    checkpoint.read(path, "checkpoint")
    try:
        return TranslationTask.load_from_checkpoint(path)
    except UserError as error:
        raise UserError(f"checkpoint is {path}: {error}") from error
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"{path} needs a strategy that is not here: {error}; install the package that has it"
        ) from error
    except (KeyError, TypeError, ValueError, RuntimeError) as error:  # a part is missing, or is something else
        raise UserError(
            f"checkpoint is {path}, which is damaged, or of another version of stabilize: {plugins.describe(error)}"
        ) from error
