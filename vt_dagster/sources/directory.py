"""The files of a directory, and which of them have been consumed: a name alone does not tell.

A file is known by where it lies, its size and when it was written. One that was only moved or touched
is known by what is in it, so that no record is taken twice; one that is another file although its name
and size are those of a consumed one is seen.
"""

from __future__ import annotations

import hashlib
import posixpath
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from fnmatch import fnmatch
from typing import Any, NamedTuple

from vt_dagster.errors import SourceError
from vt_dagster.storage import delta

_STAMPS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated")
"""Under which names file systems say that a file was written; of two the better one is first."""
_BLOCK, _BLOCKS = 1 << 20, 64
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


class FileInfo(NamedTuple):
    """A file of the directory.

    Args:
        name: in the directory.
        path: for Spark, with its protocol.
        size: in bytes.
        stamp: what its file system says of when it was written, or of what is in it.
    """

    name: str
    path: str
    size: int
    stamp: str = ""


class Consumed(NamedTuple):
    """What is remembered of a consumed file: see :class:`FileInfo`, and a digest of what is in it.

    Args:
        batch: the run that consumed it; 0 = earlier versions of the library did not say.
    """

    size: int
    stamp: str
    digest: str
    batch: int = 0


def files_in(directory: str, pattern: str, what: str) -> list[FileInfo]:
    """The files that are there, by name; links are followed. Does not use Spark.

    Left out is what a writer has not finished: names that begin with ``.`` or ``_``, or end with
    ``._COPYING_`` (Hadoop's copies).

    Args:
        what: is expected there, for messages.

    Raises:
        SourceError: there is no such directory, or no way to reach it.
    """
    try:
        fs, root = delta.filesystem(directory)
    except (ImportError, ValueError) as error:
        raise SourceError(
            f"{directory!r} is on a file system that fsspec cannot reach: {error}; correct the path, "
            "or install what the message names"
        ) from None
    if not fs.isdir(root):
        raise SourceError(
            f"expected a directory {directory!r} with {what}, found none; create it, or "
            "correct the path"
        )
    found: list[FileInfo] = []
    for entry in fs.ls(root, detail=True, refresh=True):
        name = posixpath.basename(entry["name"])
        if name.startswith((".", "_")) or name.endswith("._COPYING_") or not fnmatch(name, pattern):
            continue
        if entry.get("islink"):
            if not fs.exists(entry["name"]):
                continue
            entry = {**fs.info(entry["name"]), "name": entry["name"]}
        if entry["type"] == "file":
            stamp = next((str(entry[s]) for s in _STAMPS if entry.get(s) is not None), "")
            found.append(FileInfo(name, fs.unstrip_protocol(entry["name"]), entry["size"], stamp))
    return sorted(found)


def written_at(files: Sequence[FileInfo]) -> dict[str, int]:
    """When files were last written, by name: epoch microseconds. Does not use Spark."""
    found: dict[str, int] = {}
    for file in files:
        fs, place = delta.filesystem(file.path)
        moment: datetime = fs.modified(place)
        moment = moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
        found[file.name] = (moment - _EPOCH) // timedelta(microseconds=1)
    return found


class Memory:
    """The files that earlier runs consumed.

    Args:
        files: path -> :class:`Consumed`, as it lies beside a commit; earlier versions of the library
            wrote name -> size.
    """

    def __init__(self, files: Mapping[str, Any]) -> None:
        self._by_path: dict[str, Consumed] = {}
        self._by_name: dict[str, list[Consumed]] = {}
        self._sizes: dict[str, int] = {}
        for path, said in files.items():
            if isinstance(said, int):
                self._sizes[path] = said
                continue
            consumed = Consumed(*said)
            self._by_path[path] = consumed
            self._by_name.setdefault(posixpath.basename(path), []).append(consumed)

    def __contains__(self, name: str) -> bool:
        return name in self._by_name or name in self._sizes

    def changed(self, file: FileInfo) -> str | None:
        """How a consumed file is not what it was; None where it is, or was not consumed."""
        before = self._by_path.get(file.path)
        size = self._sizes.get(file.name) if before is None else before.size
        if size is None:
            return None
        if size != file.size:
            return f"{size} bytes then, {file.size} now"
        if before is None or before.stamp == file.stamp or (_is_exact(file) and _same(file, before)):
            return None
        return f"{size} bytes then and now, but written again since"

    def has(self, file: FileInfo) -> bool:
        """Whether a file that has not changed was consumed, from here or from where it lay before."""
        if file.path in self._by_path or file.name in self._sizes:
            return True
        return self._knows_content(file)

    def knows_elsewhere(self, file: FileInfo) -> bool:
        """Whether a consumed file lies elsewhere now, or was touched."""
        before = self._by_path.get(file.path)
        return (before is None or before.stamp != file.stamp) and self._knows_content(file)

    def batch_of(self, file: FileInfo) -> int | None:
        """The run that consumed what is in a file; 0 = not known; None where none did."""
        if file.path in self._by_path:
            return self._by_path[file.path].batch
        if file.name in self._sizes:
            return 0
        return next((one.batch for one in self._by_name.get(file.name, ()) if _same(file, one)), None)

    def _knows_content(self, file: FileInfo) -> bool:
        return any(_same(file, before) for before in self._by_name.get(file.name, ()))


def unconsumed(
    directory: str, there: Sequence[FileInfo], consumed: Mapping[str, Any]
) -> list[FileInfo]:
    """The files that no run has consumed yet.

    Args:
        consumed: see :class:`Memory`.

    Raises:
        SourceError: a consumed file is there with another content.
    """
    memory = Memory(consumed)
    changed = {f.name: said for f in there if (said := memory.changed(f)) is not None}
    if changed:
        name, said = next(iter(changed.items()))
        raise SourceError(
            f"{len(changed)} file(s) in {directory} changed after they were consumed, for "
            f"example {name}: {said}; a file is consumed once, so deliver what is new in a file of "
            "its own and put the old one back"
        )
    return [f for f in there if not memory.has(f)]


def chosen(
    directory: str, new: Sequence[FileInfo], consumed: Mapping[str, Any], only: Sequence[str] | None
) -> list[FileInfo]:
    """Of files that are new those that a run asks for; what it asks for and was consumed is left out.

    Args:
        only: their names; None = all.

    Raises:
        SourceError: it asks for one that is not there.
    """
    if only is None:
        return list(new)
    memory = Memory(consumed)
    missing = sorted(set(only) - {f.name for f in new if f.name in only})
    missing = [name for name in missing if name not in memory]
    if missing:
        raise SourceError(f"{directory}: the run asks for {missing}, which are not there")
    return [f for f in new if f.name in only]


def remembered(
    before: Mapping[str, Any], taken: Sequence[FileInfo], there: Sequence[FileInfo], batch: int
) -> dict[str, Any]:
    """What is remembered after a run that took some files. Reads them once, and those others that are
    there and were moved or touched since they were consumed.

    Args:
        batch: of the run.
    """
    memory = Memory(before)
    batches = {f: memory.batch_of(f) or 0 for f in there if memory.knows_elsewhere(f)}
    batches |= dict.fromkeys(taken, batch)
    return {**before, **{f.path: Consumed(f.size, f.stamp, _digest(f), n) for f, n in batches.items()}}


def require_untouched(directory: str, taken: Sequence[FileInfo], there: Sequence[FileInfo]) -> None:
    """Looks whether files are still what they were when the run took them; those that are gone by now
    had been read.

    Raises:
        SourceError: with some that have changed since.
    """
    now = {f.path: f for f in there}
    changed = [f for f in taken if now.get(f.path, f) != f]
    if changed:
        one = changed[0]
        raise SourceError(
            f"{len(changed)} file(s) in {directory} changed while the run read them, for example "
            f"{one.name}: {one.size} bytes at its start, {now[one.path].size} at its end; nothing was "
            "committed. Write a file under a name that begins with '.' and rename it when it is whole, "
            "then run again"
        )


def _same(file: FileInfo, before: Consumed) -> bool:
    return file.size == before.size and _digest(file) == before.digest


def _is_exact(file: FileInfo) -> bool:
    """Whether the digest tells any change."""
    return file.size <= _BLOCK * _BLOCKS


def _digest(file: FileInfo) -> str:
    """Of all that is in a file, of a large one of blocks all over it; empty where it is gone."""
    fs, local = delta.filesystem(file.path)
    digest = hashlib.blake2b(digest_size=16)
    step = _BLOCK if _is_exact(file) else (file.size - _BLOCK) // (_BLOCKS - 1)
    try:
        with fs.open(local, "rb") as content:
            for number in range(_BLOCKS):
                content.seek(number * step)
                digest.update(content.read(_BLOCK))
    except FileNotFoundError:
        return ""
    return digest.hexdigest()
