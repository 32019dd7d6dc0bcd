"""sacreBLEU's own test sets, WMT's above all, by name."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
import socket
from pathlib import Path
from typing import Final

import sacrebleu
from sacrebleu.dataset import DATASETS
from sacrebleu.dataset.base import Dataset
from sacrebleu.dataset.wmt_xml import WMTXMLDataset
from sacrebleu.utils import extract_tarball

from stabilize.data.cache import Cache, key, write
from stabilize.data.network import PATIENCE, answered
from stabilize.errors import UserError

PREFIX: Final = "sacrebleu:"
"""Before the name of a set, where a path pattern could stand as well."""

INSTEAD: Final = "local files would do, as corpus/test.{lang}, or that folder from a machine that has been online"


def set_files(name: str, source: str, target: str, cache: Cache) -> tuple[str, ...]:
    """The files of a set, the source and each reference, the references in the order of their names.

    They are made anew from the archive in sacreBLEU's folder, whose checksum sacreBLEU knows; it fetches the archive
    where it has not yet. Text that lies in that folder may have been cut short, and is taken only where it lies there
    alone.

    Raises:
        UserError: sacreBLEU has no such set, it cannot be reached, or its archive is damaged.
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
    archives = [Path(dataset._rawdir, dataset._get_tarball_filename(url)) for url in urls]
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(PATIENCE)
    try:
        if not all(archive.exists() and archive.stat().st_size for archive in archives):
            if _has_text(dataset, languages):
                return _files(dataset, languages)
            answered(urls)
            dataset.maybe_download()
    except (Exception, SystemExit) as error:  # network, archive; and SystemExit is how sacreBLEU refuses
        raise UserError(
            f"{PREFIX}{name}: {dataset._outdir} does not have it, and {', '.join(urls)} could not be fetched"
            f" ({type(error).__name__}: {error}): {INSTEAD}"
        ) from error
    finally:
        socket.setdefaulttimeout(before)
    facts = [sacrebleu.__version__, name, languages, dataset.md5]
    folder = cache.made(f"sacrebleu/{key(facts)}", lambda folder: _unpack(dataset, languages, archives, folder))
    return tuple(str(folder / file) for file in json.loads((folder / "files.json").read_text(encoding="utf-8")))


def _has_text(dataset: Dataset, languages: str) -> bool:
    """Whether sacreBLEU can do without an archive, which its sets in XML never can."""
    if isinstance(dataset, WMTXMLDataset):
        return False
    return all(os.path.exists(dataset._get_txt_file_path(languages, field)) for field in dataset.fieldnames(languages))


def _files(dataset: Dataset, languages: str) -> tuple[str, ...]:
    # Of a set in XML, sacreBLEU's fields come out of a Python set, in each process in another order.
    return (dataset.get_source_file(languages), *sorted(dataset.get_reference_files(languages)))


def _unpack(dataset: Dataset, languages: str, archives: list[Path], folder: Path) -> None:
    """Write the text of a set, as sacreBLEU does, into another folder than its own."""
    shutil.rmtree(folder, ignore_errors=True)
    elsewhere = copy.copy(dataset)
    elsewhere._outdir, elsewhere._rawdir = str(folder), str(folder / "raw")
    (folder / "raw").mkdir(parents=True)
    for archive, checksum in zip(archives, dataset.md5 or (), strict=True):
        if _md5(archive) != checksum:
            raise UserError(f"{archive} is damaged or came in half: remove the folder {dataset._outdir}, or {INSTEAD}")
        extract_tarball(shutil.copy(archive, elsewhere._rawdir), elsewhere._rawdir)
    elsewhere.process_to_text(languages)
    files = [Path(file).name for file in _files(elsewhere, languages)]
    shutil.rmtree(elsewhere._rawdir)
    for path in folder.iterdir():
        if path.name not in files:
            path.unlink()
    write(folder / "files.json", files)


def _md5(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()
