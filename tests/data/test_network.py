"""A server that is silent, has no address, or refuses (FIELD_REPORTS 4.7)."""

from __future__ import annotations

import http.server
import socket
import threading
from typing import Any

import pytest

from stabilize.data.network import answered


def test_a_silent_server(silent_server: str) -> None:
    with pytest.raises(TimeoutError, match=r"no answer in 0\.3 seconds"):
        answered([silent_server])


def test_a_name_whose_address_never_comes(silent_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operating system would be asked for as long as it likes; no socket is there yet whose time could run out."""
    over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: over.wait(600))
    try:
        with pytest.raises(TimeoutError, match="no answer"):
            answered(["http://name.invalid/"])
    finally:
        over.set()


def test_nobody_there(silent_server: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(OSError, match="refused"):
        answered([f"http://127.0.0.1:{port}"])


class Refusing(http.server.BaseHTTPRequestHandler):
    """There, though it has nothing to give."""

    def do_HEAD(self) -> None:
        self.send_error(403)

    def log_message(self, *_: Any) -> None:
        pass


def test_a_refusal_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    with http.server.HTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        answered([f"http://127.0.0.1:{server.server_port}/nothing"] * 2)
        server.shutdown()
