"""The memory that a piece of work needs."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator

from torch.profiler import ProfilerActivity, profile


def peak(work: Callable[[], object]) -> int:
    """The most bytes that the tensors made by `work` hold at once: weights, gradients, the optimiser's moments, what is
    kept for the backward pass, temporary ones. Those from before do not count.

    As torch's allocator tells its profiler. What the system gives to the process says less of a model: a process never
    gives back what an earlier and larger one took (`kernels.keep_freed_memory` asks for just that), gets it in pages of
    up to 2 MiB, and has hundreds of megabytes of libraries in it. What oneDNN and NumPy take is left out, and what
    other threads than the caller's make, which the profiler does not see.
    """
    gc.collect()  # what an earlier peak has counted, and is freed during this one, would be taken off
    with _silent(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    held = most = 0
    events = recorded.profiler.kineto_results.events()
    changes = [event for event in events if event.name() == "[memory]"]
    for event in sorted(changes, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """What is written to standard error goes nowhere, such as what torch's profiler says of itself, past Python."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
