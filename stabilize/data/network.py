"""Servers that do not answer: nobody waits for them for long."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Final
from urllib.error import HTTPError

PATIENCE: Final = 4.0
"""Seconds in which servers have to say their first word."""


def answered(urls: Iterable[str]) -> None:
    """Wait until the server of each address has said something, be it a refusal.

    The whole of it takes no longer than `PATIENCE`: what cannot be cut short, as the search for the address of a name,
    is left behind in a thread.

    Raises:
        OSError: a server cannot be reached, or is silent.
    """
    outcome: Future[None] = Future()

    def ask() -> None:
        try:
            for url in urls:
                try:
                    urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=PATIENCE).close()
                except HTTPError as refusal:
                    refusal.close()
        except Exception as error:  # of the network, of its names, of its certificates
            outcome.set_exception(error)
        else:
            outcome.set_result(None)

    threading.Thread(target=ask, daemon=True).start()
    try:
        outcome.result(PATIENCE)
    except TimeoutError:
        raise TimeoutError(f"no answer in {PATIENCE:g} seconds") from None
