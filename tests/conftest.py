"""What every test stands on: one thread, one seed, no network, and where the real text lies."""

from __future__ import annotations

import os

# Before torch is imported: two test processes with a thread pool each would fight over the same two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "agg")
os.environ["WANDB_MODE"] = "offline"

import random
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import numpy
import pytest
import torch

from tests.browser import Browser

# The same examples in every run, however slow the machine is.
hypothesis.settings.register_profile("same", deadline=None, derandomize=True)
hypothesis.settings.load_profile("same")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with the real parallel text: STABILIZE_SHARED_DATA, or shared/data beside the checkout."""
    folder = Path(os.environ.get("STABILIZE_SHARED_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real text in {folder}: set STABILIZE_SHARED_DATA to the folder that holds multi30k/")
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One for all tests of a file."""
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="session", autouse=True)
def prepared_text(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What tests prepare is kept among their files."""
    os.environ["STABILIZE_CACHE"] = str(tmp_path_factory.mktemp("prepared"))


@pytest.fixture(autouse=True)
def same_seed() -> None:
    """Every test draws the same numbers, alone or after others."""
    random.seed(1)
    numpy.random.seed(1)
    torch.manual_seed(1)


@pytest.fixture(autouse=True)
def same_signals() -> Iterator[None]:
    """Lightning ignores SIGINT for good once it has stopped a run, and leaves its own handlers behind."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection to another machine is an error here, not a wait."""
    connect = socket.socket.connect

    def connect_to_this_machine(self: socket.socket, address: object) -> None:
        if isinstance(address, tuple) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise ConnectionRefusedError(f"a test asked for {address[0]}; tests stay on this machine")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect_to_this_machine)
