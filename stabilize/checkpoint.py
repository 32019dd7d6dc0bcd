"""What a checkpoint says of the run that wrote it, and whether this run can go on from it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from torch.optim import Optimizer

from stabilize.errors import UserError

DECODER = "decoder_stabilizer"

PARTS = {"task": dict, "tokenizer": bytes, "state_dict": dict}
"""What makes it a checkpoint of `TranslationTask`."""

ADVICE = "give the one it was made with"


class DurableFiles(TorchCheckpointIO):
    """A checkpoint on this machine is there whole or not at all, whenever the process, or the machine, goes down.

    It is written beside its place, brought to the disk, and only then given its name. Each part has a checksum, by
    which `read` knows a file that has been damaged since.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write the file.

        Raises:
            UserError: it cannot be written; what was there before is untouched.
        """
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        place = Path(path)
        partial = place.with_name(f".{place.name}.{os.getpid()}.partial")
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(place)
            _to_disk(place.parent)
        except (OSError, RuntimeError) as error:
            behind = error.__context__ or error  # torch's own writer says RuntimeError where the disk is full
            said = getattr(behind, "strerror", None) or str(error).splitlines()[0]
            raise UserError(
                f"the checkpoint {place} cannot be written: {said}; checkpoints of before are whole{such_as()}"
            ) from error
        finally:
            with contextlib.suppress(OSError):
                partial.unlink()


def _to_disk(folder: Path) -> None:
    """Bring the names in a folder to the disk, where the system knows how."""
    with contextlib.suppress(OSError):
        directory = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def newest(
    folder: Path, beside: Path | None = None, runs: str = "*", of: Mapping[str, Any] | None = None
) -> Path | None:
    """The newest good checkpoint of the runs in `folder` from which training can go on.

    Damaged ones are passed over with a warning.

    Args:
        folder: of all runs.
        beside: where checkpoints lie too.
        runs: which of them, a pattern.
        of: what the checkpoint has to say of its run; none: any.
    """
    everything = [*folder.glob(f"{runs}/checkpoints/*.ckpt"), *(beside.glob("*.ckpt") if beside else ())]
    for path in sorted(everything, key=_age):
        try:
            saved = read(path)
        except UserError:
            warnings.warn(f"{path} is damaged; the one before it is taken", stacklevel=2)
            continue
        if is_whole_state(saved) and (of is None or of.items() <= saved.get("run", {}).items()):
            return path
    return None


def is_whole_state(saved: dict[str, Any]) -> bool:
    """Whether there is more than weights."""
    return "optimizer_states" in saved


def _age(path: Path) -> float:
    try:
        return -path.stat().st_mtime_ns
    except OSError:  # gone meanwhile, or a link to what is gone
        return 0.0


def read(path: Path, key: str = "ckpt_path") -> dict[str, Any]:
    """A checkpoint of `TranslationTask`, read without running code of whoever wrote it.

    Args:
        path: of the file.
        key: what the user calls it.

    Raises:
        UserError: there is none, or it is damaged or something else.
    """
    if not path.is_file():
        raise UserError(f"{key} is {path}, but there is no such file{such_as()}")
    try:
        with zipfile.ZipFile(path) as archive, warnings.catch_warnings(action="ignore"):
            whole = archive.testzip() is None  # torch writes checksums, and does not look at them
            saved = torch.load(path, map_location="cpu", weights_only=True) if whole else None
    except Exception:  # a damaged file may raise anything, one with code in it is refused by torch
        saved = None
    parts = saved if isinstance(saved, dict) else {}
    if not all(isinstance(parts.get(name), kind) for name, kind in PARTS.items()):
        raise UserError(f"{key} is {path}, which is damaged or no checkpoint of stabilize{such_as()}")
    return parts


def sha256(path: Path) -> str:
    """The hash of a file, by which one knows it again."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def such_as() -> str:
    """The newest checkpoint below ./runs, as an advice."""
    found = min(Path("runs").glob("*/checkpoints/*.ckpt"), key=_age, default=None)
    return f"; the newest is {found}" if found else "; a run has its own in runs/<run id>/checkpoints"


def check_model(saved: dict[str, Any], here: dict[str, Any]) -> None:
    """Compare two `TranslationTask.spec`.

    Raises:
        UserError: another stabiliser or shape, each difference by name.
    """
    if saved.get(DECODER) != here[DECODER]:  # none is the encoder's
        saved, here = ({**spec, DECODER: spec.get(DECODER) or spec.get("stabilizer")} for spec in (saved, here))
    unlike = _differences("model", _flat(saved), _flat(here))
    if unlike:
        raise UserError(f"the checkpoint is of another model: {'; '.join(unlike)}; {ADVICE}")


def settings(optimizer: Optimizer) -> dict[str, Any]:
    """An optimiser's class and settings in plain values."""
    return {"class_path": f"{type(optimizer).__module__}.{type(optimizer).__name__}", "init_args": optimizer.defaults}


def check_optimizer(saved: dict[str, Any], here: dict[str, Any]) -> None:
    """Compare two `settings`; other values in the same class are told, for the checkpoint's go on.

    Raises:
        UserError: another class, whose state is of no use here.
    """
    before, now = _flat(saved, "optimizer"), _flat(here, "optimizer")
    unlike = _differences("model", before, now)
    if before["optimizer"] != now["optimizer"]:
        raise UserError(f"the checkpoint was written with another optimiser: {unlike[0]}; {ADVICE}")
    if unlike:
        warnings.warn(f"{'; '.join(unlike)}; a run that goes on keeps the checkpoint's", stacklevel=2)


def _differences(group: str, saved: dict[str, Any], here: dict[str, Any]) -> list[str]:
    return [
        f"{group}.{key} is {saved.get(key)} in the checkpoint and {here.get(key)} here"
        for key in {**saved, **here}
        if saved.get(key) != here.get(key)
    ]


def _flat(spec: Any, prefix: str = "") -> dict[str, Any]:
    """`{"placement": {"class_path": "a.B", "init_args": {"x": 1}}}` as `{"placement": "B", "placement.x": 1}`."""
    if not isinstance(spec, dict):
        return {prefix: spec}
    if "class_path" in spec:
        chosen = {prefix: spec["class_path"].rpartition(".")[2]}
        return chosen | _flat(spec["init_args"], prefix)
    return {k: v for name, value in spec.items() for k, v in _flat(value, f"{prefix}.{name}".lstrip(".")).items()}
