"""sacreBLEU's own test sets, WMT's above all, by name."""

from __future__ import annotations

import hashlib
import os
import socket
from typing import Final

from sacrebleu.dataset import DATASETS

from stabilize.errors import UserError

PREFIX: Final = "sacrebleu:"
"""Before the name of a set, where a path pattern could stand as well."""

PATIENCE: Final = 4.0
"""Seconds that a server may be silent."""

INSTEAD: Final = "local files would do, as corpus/test.{lang}, or that folder from a machine that has been online"


def set_files(name: str, source: str, target: str) -> tuple[str, ...]:
    """The files of a set, the source and each reference; sacreBLEU fetches them where it has not yet.

    Raises:
        UserError: sacreBLEU has no such set, it cannot be reached, or what is there of it is damaged.
    """
    languages = f"{source}-{target}"
    if name not in DATASETS or languages not in DATASETS[name].langpairs:
        having = ", ".join(each for each in sorted(DATASETS) if languages in DATASETS[each].langpairs)
        raise UserError(
            f"{PREFIX}{name}: sacreBLEU has no such test set for {languages}, but {having or 'none at all'};"
            " a path pattern as corpus/test.{lang} would do too"
        )
    dataset = DATASETS[name]
    urls = dataset.data or []
    for url, checksum in zip(urls, dataset.md5 or (), strict=False):
        archive = os.path.join(dataset._rawdir, dataset._get_tarball_filename(url))
        if os.path.exists(archive) and _md5(archive) != checksum:
            raise UserError(f"{archive} is damaged or came in half: remove the folder {dataset._outdir}, or {INSTEAD}")
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(PATIENCE)
    try:
        # Of a set in XML, sacreBLEU's fields come out of a Python set, in each process in another order.
        return (dataset.get_source_file(languages), *sorted(dataset.get_reference_files(languages)))
    except (Exception, SystemExit) as error:  # network, archive, XML; and SystemExit is how sacreBLEU refuses
        raise UserError(
            f"{PREFIX}{name}: {dataset._outdir} does not have it, and {', '.join(urls)} could not be fetched"
            f" ({type(error).__name__}: {error}): {INSTEAD}"
        ) from error
    finally:
        socket.setdefaulttimeout(before)


def _md5(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()
