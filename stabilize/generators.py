"""The random generators of a process, in values that a checkpoint can hold."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def state() -> dict[str, Any]:
    """Where the generators of Python, NumPy, torch and its devices stand."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),  # type: ignore[union-attr]
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def restore(saved: dict[str, Any]) -> None:
    """Let them go on from a `state`; the devices' only where there are as many."""
    random.setstate(saved["python"])
    name, keys, *rest = saved["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(saved["torch"])
    if saved["cuda"] and len(saved["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(saved["cuda"])
