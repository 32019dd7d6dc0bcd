"""What a checkpoint says of the run that wrote it, and whether this run can go on from it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from torch.optim import Optimizer

from stabilize.errors import UserError

DECODER = "decoder_stabilizer"

PARTIAL = f".{platform.node()}.partial"
"""How the name of a file ends that is being written on this machine."""

PARTS = {"task": dict, "tokenizer": bytes, "state_dict": dict}
"""What makes it a checkpoint of `TranslationTask`."""

OPTIMIZER = "model.optimizer"

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
        partial = place.with_name(f".{place.name}.{os.getpid()}{PARTIAL}")
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
            advice = such_as(_runs(place))
            raise UserError(
                f"the checkpoint {place} cannot be written: {said}; checkpoints of before are whole{advice}"
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


def newest(folders: Iterable[Path], fits: Callable[[dict[str, Any]], bool] = lambda saved: True) -> Path | None:
    """The newest good checkpoint in some folders from which training can go on.

    Damaged ones before it are passed over with a warning.

    Args:
        folders: where checkpoints lie.
        fits: whether a checkpoint will do.
    """
    everything = [path for folder in folders for path in folder.glob("*.ckpt")]
    damaged: list[Path] = []
    for path in sorted(everything, key=_age):
        saved = _parts(path, checked=False)  # others' are not worth the time of a checksum
        if saved is not None and not (is_whole_state(saved) and fits(saved)):
            continue
        if saved is not None and _parts(path) is not None:
            for other in damaged:
                warnings.warn(f"{other} is damaged; {path} is taken", stacklevel=2)
            return path
        damaged.append(path)
    for other in damaged:
        warnings.warn(f"{other} is damaged, and no checkpoint before it will do", stacklevel=2)
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
        raise UserError(f"{key} is {path}, but there is no such file{such_as(_runs(path))}")
    if (saved := _parts(path)) is None:
        raise UserError(f"{key} is {path}, which is damaged or no checkpoint of stabilize{such_as(_runs(path))}")
    return saved


def _parts(path: Path, *, checked: bool = True) -> dict[str, Any] | None:
    """What is in a checkpoint; none where it is damaged, or something else.

    Without `checked` its tensors stay on the disk, and nobody looks whether they are damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive, warnings.catch_warnings(action="ignore"):
            if checked and archive.testzip() is not None:  # torch writes checksums, and does not look at them
                return None
            saved = torch.load(path, map_location="cpu", weights_only=True, mmap=not checked)
    except Exception:  # a damaged file may raise anything, one with code in it is refused by torch
        return None
    parts = saved if isinstance(saved, dict) else {}
    return parts if all(isinstance(parts.get(name), kind) for name, kind in PARTS.items()) else None


def sha256(path: Path) -> str:
    """The hash of a file, by which one knows it again."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def such_as(runs: Path = Path("runs")) -> str:
    """The newest good checkpoint in a folder of runs, as an advice."""
    with warnings.catch_warnings(action="ignore"):
        found = newest(runs.glob("*/checkpoints"))
    return f"; the newest is {found}" if found else f"; a run has its own in {runs}/<run id>/checkpoints"


def _runs(path: Path) -> Path:
    """The folder of runs to which a checkpoint belongs, as far as its path tells."""
    return path.parents[2] if path.parent.name == "checkpoints" and len(path.parents) > 2 else Path("runs")


def clear(folder: Path) -> None:
    """Remove what a process that was killed has left half written, if it was one of this machine."""
    for partial in folder.glob(f".*{PARTIAL}"):
        with contextlib.suppress(OSError, ValueError):
            try:
                os.kill(int(partial.name.removesuffix(PARTIAL).rpartition(".")[2]), 0)  # no signal, a question
            except ProcessLookupError:
                partial.unlink()


def check_model(saved: dict[str, Any], here: dict[str, Any]) -> None:
    """Compare two `TranslationTask.spec`.

    Raises:
        UserError: another stabiliser or shape, each difference by name.
    """
    if saved.get(DECODER) != here[DECODER]:  # none is the encoder's
        saved, here = ({**spec, DECODER: spec.get(DECODER) or spec.get("stabilizer")} for spec in (saved, here))
    unlike = differences(flat(saved, "model"), flat(here, "model"))
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
    before, now = flat(saved, OPTIMIZER), flat(here, OPTIMIZER)
    unlike = differences(before, now)
    if before[OPTIMIZER] != now[OPTIMIZER]:
        raise UserError(f"the checkpoint was written with another optimiser: {unlike[0]}; {ADVICE}")
    if unlike:
        warnings.warn(f"{'; '.join(unlike)}; a run that goes on keeps the checkpoint's", stacklevel=2)


def differences(saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Where two `flat` settings differ, in words."""
    return [
        f"{key} is {saved.get(key)} in the checkpoint and {here.get(key)} here"
        for key in {**saved, **here}
        if saved.get(key) != here.get(key)
    ]


def flat(spec: Any, prefix: str = "") -> dict[str, Any]:
    """`{"placement": {"class_path": "a.B", "init_args": {"x": 1}}}` as `{"placement": "B", "placement.x": 1}`."""
    if not isinstance(spec, dict):
        return {prefix: spec}
    if "class_path" in spec:
        chosen = {prefix: spec["class_path"].rpartition(".")[2]}
        return chosen | flat(spec.get("init_args", {}), prefix)
    return {k: v for name, value in spec.items() for k, v in flat(value, f"{prefix}.{name}".lstrip(".")).items()}
