"""A server on this machine that a test may ask."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest


@pytest.fixture
def silent_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Address of a server that takes every connection and says nothing, whom nobody waits for for long."""
    monkeypatch.setattr("stabilize.data.network.PATIENCE", 0.3)
    monkeypatch.setenv("no_proxy", "*")
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
