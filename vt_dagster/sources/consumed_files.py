"""The files of a directory, and which of them were consumed.

A name alone does not identify a file. A file is identified by path, size and modification time. A file
that was moved or touched is identified by a digest of its content, so that no record is consumed twice,
and a replaced file of the same name and size is detected.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from vt_dagster.errors import SourceError
from vt_dagster.storage import delta

_STAMPS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated")
"""Keys under which file systems store a version or modification time; the more exact ones first."""
_BLOCK, _BLOCKS = 1 << 20, 64
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


class FileInfo(NamedTuple):
    """A file of the directory.

    Args:
        name: the path below the directory.
        path: the full path for Spark, with protocol.
        size: in bytes.
        stamp: the file system's modification time or ETag.
    """

    name: str
    path: str
    size: int
    stamp: str = ""


class Consumed(NamedTuple):
    """The stored state of a consumed file: size and stamp, see :class:`FileInfo`, and a content digest.

    Args:
        batch: the batch that consumed it; 0 = unknown (written by an earlier version of the library).
    """

    size: int
    stamp: str
    digest: str
    batch: int = 0


def files_in(directory: str, pattern: str, what: str, recursive: bool = True) -> list[FileInfo]:
    """Returns the files in a directory, by name; links are followed. Does not use Spark.

    A name is the path below the directory: ``dt=2026-11-25/part-0.jsonl``. Unfinished files are
    skipped: files and directories whose names begin with ``.`` or ``_``, or end with ``._COPYING_``
    (Hadoop's copies). A directory such as ``_day=1`` is a column, as in Spark. Links to a directory
    that is read anyway, or to a parent directory, are not followed.

    Cost: one listing per directory on a local disk; elsewhere one listing of the whole prefix.

    Args:
        pattern: without ``/`` it matches the last part of a name, at any depth; with ``/`` the whole
            name, part by part, where ``**`` matches any number of directories.
        what: the expected content, for messages.
        recursive: whether sub-directories are read.

    Raises:
        SourceError: the directory does not exist, or cannot be reached or listed.
    """
    try:
        fs, root = delta.filesystem(directory)
    except (ImportError, ValueError) as error:
        raise SourceError(
            f"{directory!r} is on a file system that fsspec cannot reach: {error}; correct the path, "
            "or install the package that the error names"
        ) from None
    if not fs.isdir(root):
        raise SourceError(
            f"expected a directory {directory!r} with {what}, found none; create it, or "
            "correct the path"
        )
    root, found = root.rstrip("/"), list[FileInfo]()
    try:
        for entry in _entries(fs, root, recursive):
            name = entry["name"].rstrip("/").removeprefix(root).lstrip("/")
            if not matches(name, pattern):
                continue
            if entry.get("islink"):
                if not fs.exists(entry["name"]):
                    continue
                entry = {**fs.info(entry["name"]), "name": entry["name"]}
            if entry["type"] == "file":
                stamp = next((str(entry[s]) for s in _STAMPS if entry.get(s) is not None), "")
                found.append(FileInfo(name, fs.unstrip_protocol(entry["name"]), entry["size"], stamp))
    except PermissionError as error:
        raise SourceError(
            f"a directory in {directory!r} cannot be listed: {error}; give the user of the run the "
            "right to read it, or set recursive=False to skip sub-directories"
        ) from None
    return sorted(found)


def matches(name: str, pattern: str) -> bool:
    """Returns whether a file's name matches a pattern, see :func:`files_in`."""
    parts = name.split("/")
    if "/" not in pattern:
        return fnmatch(parts[-1], pattern)
    return _match(parts, pattern.strip("/").split("/"))


def _match(parts: Sequence[str], patterns: Sequence[str]) -> bool:
    if not patterns:
        return not parts
    if patterns[0] == "**":
        return any(_match(parts[start:], patterns[1:]) for start in range(len(parts) + 1))
    return bool(parts) and fnmatch(parts[0], patterns[0]) and _match(parts[1:], patterns[1:])


def _entries(fs: Any, root: str, recursive: bool) -> Iterator[dict[str, Any]]:
    """Yields the entries of a directory without unfinished files."""
    if "file" in (fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,)):
        yield from _local_entries(fs, root, recursive, {os.path.realpath(root)})
    elif not recursive:
        for entry in fs.ls(root, detail=True, refresh=True):
            if not _is_hidden(posixpath.basename(entry["name"].rstrip("/")), entry["type"]):
                yield entry
    else:
        fs.invalidate_cache()
        for name, entry in fs.find(root, detail=True).items():
            *above, last = name.removeprefix(root).strip("/").split("/")
            if not _is_hidden(last, "file") and not any(_is_hidden(a, "directory") for a in above):
                yield entry


def _local_entries(fs: Any, place: str, recursive: bool, seen: set[str]) -> Iterator[dict[str, Any]]:
    linked = list[str]()
    for entry in fs.ls(place, detail=True, refresh=True):
        path = entry["name"].rstrip("/")
        is_directory = entry["type"] == "directory" or (entry.get("islink") and Path(path).is_dir())
        if _is_hidden(posixpath.basename(path), "directory" if is_directory else "file"):
            continue
        if not is_directory:
            yield entry
        elif recursive and entry.get("islink"):
            linked.append(path)
        elif recursive:
            seen.add(os.path.realpath(path))
            yield from _local_entries(fs, path, True, seen)
    for path in sorted(linked):
        target = os.path.realpath(path)
        # A link into a directory that is read, or to a parent of one, would yield files twice.
        if not any(target == s or _is_below(target, s) or _is_below(s, target) for s in seen):
            seen.add(target)
            yield from _local_entries(fs, path, True, seen)


def _is_below(place: str, directory: str) -> bool:
    return place.startswith(directory.rstrip("/") + "/")


def _is_hidden(name: str, kind: str) -> bool:
    if name.startswith("_") and kind == "directory" and "=" in name:
        return False
    return name.startswith((".", "_")) or name.endswith("._COPYING_")


def written_at(files: Sequence[FileInfo]) -> dict[str, int]:
    """Returns the modification times of files in epoch microseconds, by name. Does not use Spark."""
    found: dict[str, int] = {}
    for file in files:
        fs, place = delta.filesystem(file.path)
        moment: datetime = fs.modified(place)
        moment = moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
        found[file.name] = (moment - _EPOCH) // timedelta(microseconds=1)
    return found


class Memory:
    """The files consumed by earlier runs.

    A moved file is recognized by its content if the consumed path is gone, and if the file was moved
    with its directory, into a sub-directory or out of one. A file of the same name and content in a
    sibling directory, such as that of another day, is another file.

    Args:
        files: path -> :class:`Consumed`, as stored beside a commit; earlier versions of the library
            stored name -> size.
        there: the present files.
    """

    def __init__(self, files: Mapping[str, Any], there: Sequence[FileInfo] = ()) -> None:
        self._by_path: dict[str, Consumed] = {}
        self._by_name: dict[str, list[tuple[str, Consumed]]] = {}
        self._sizes: dict[str, int] = {}
        self._there = {f.path: f for f in there}
        for path, said in files.items():
            if isinstance(said, int):
                self._sizes[path] = said
                continue
            consumed = Consumed(*said)
            self._by_path[path] = consumed
            self._by_name.setdefault(posixpath.basename(path), []).append((path, consumed))

    def __contains__(self, name: str) -> bool:
        paths = [path for path, _ in self._by_name.get(posixpath.basename(name), ())]
        return name in self._sizes or any(path.endswith("/" + name) for path in paths)

    def changed(self, file: FileInfo) -> str | None:
        """Returns how a consumed file has changed; None if it has not, or was not consumed."""
        before = self._by_path.get(file.path)
        size = self._sizes.get(file.name) if before is None else before.size
        if size is None:
            return None
        if size != file.size:
            return f"{size} bytes then, {file.size} now"
        if before is None or before.stamp == file.stamp or (_is_exact(file) and _same(file, before)):
            return None
        return f"{size} bytes then and now, but rewritten since"

    def has(self, file: FileInfo) -> bool:
        """Returns whether an unchanged file was consumed, under its path or an earlier one."""
        if file.path in self._by_path or file.name in self._sizes:
            return True
        return self._elsewhere(file) is not None

    def knows_elsewhere(self, file: FileInfo) -> bool:
        """Returns whether a consumed file was moved or touched."""
        before = self._by_path.get(file.path)
        if before is not None:
            return before.stamp != file.stamp and _same(file, before)
        return self._elsewhere(file) is not None

    def batch_of(self, file: FileInfo) -> int | None:
        """Returns the batch that consumed a file; 0 = unknown; None = not consumed."""
        if file.path in self._by_path:
            return self._by_path[file.path].batch
        if file.name in self._sizes:
            return 0
        before = self._elsewhere(file)
        return None if before is None else self._by_path[before].batch

    def gone(self) -> list[str]:
        """Returns the paths of consumed files that were removed, not moved."""
        there = self._there.values()
        left = {*self._by_path} - {*self._there} | {*self._sizes} - {f.name for f in there}
        return sorted(left - {self._elsewhere(file) for file in there})

    def _elsewhere(self, file: FileInfo) -> str | None:
        """Returns the earlier path under which a moved file was consumed; None = not consumed."""
        for path, before in self._by_name.get(posixpath.basename(file.name), ()):
            gone = path != file.path and path not in self._there
            if gone and _was_moved(path, file) and _same(file, before):
                return path
        return None


def _was_moved(path: str, file: FileInfo) -> bool:
    """Returns whether a file may have been moved from a consumed path, by their directories."""
    root = file.path.removesuffix(file.name)
    name = path.removeprefix(root)
    if name == path:  # from another source directory, whose path is not stored
        return path.endswith("/" + file.name)
    within = file.name.endswith("/" + name) or name.endswith("/" + file.name)
    return within and _parted(name) == _parted(file.name)


def _parted(name: str) -> list[str]:
    return [part for part in name.split("/")[:-1] if "=" in part]


def unconsumed(
    directory: str, there: Sequence[FileInfo], consumed: Mapping[str, Any]
) -> list[FileInfo]:
    """Returns the files that no run has consumed.

    Args:
        consumed: see :class:`Memory`.

    Raises:
        SourceError: the content of a consumed file has changed.
    """
    memory = Memory(consumed, there)
    changed = {f.name: said for f in there if (said := memory.changed(f)) is not None}
    if changed:
        name, said = next(iter(changed.items()))
        raise SourceError(
            f"{len(changed)} file(s) in {directory} changed after they were consumed, for "
            f"example {name}: {said}; a file is consumed once, so deliver new records in a new file "
            "and put the old one back"
        )
    return [f for f in there if not memory.has(f)]


def chosen(
    directory: str, new: Sequence[FileInfo], consumed: Mapping[str, Any], only: Sequence[str] | None
) -> list[FileInfo]:
    """Returns the new files that a run requests; requested files that were consumed are skipped.

    Args:
        only: the requested names; None = all.

    Raises:
        SourceError: a requested file does not exist.
    """
    if only is None:
        return list(new)
    memory = Memory(consumed)
    asked = set(only)
    missing = sorted(asked - {f.name for f in new})
    missing = [name for name in missing if name not in memory]
    if missing:
        raise SourceError(
            f"{directory}: expected the files {missing} of the run config, which do not exist; correct "
            "the names"
        )
    return [f for f in new if f.name in asked]


def remembered(
    before: Mapping[str, Any], taken: Sequence[FileInfo], there: Sequence[FileInfo], batch: int
) -> dict[str, Any]:
    """Returns the consumed state after a run. Reads the run's files once, and files that were moved or
    touched since they were consumed.

    Args:
        batch: the batch of the run.
    """
    memory = Memory(before, there)
    batches = {f: memory.batch_of(f) or 0 for f in there if memory.knows_elsewhere(f)}
    batches |= dict.fromkeys(taken, batch)
    return {**before, **{f.path: Consumed(f.size, f.stamp, _digest(f), n) for f, n in batches.items()}}


def require_untouched(directory: str, taken: Sequence[FileInfo], there: Sequence[FileInfo]) -> None:
    """Checks that files have not changed since the run pinned them. Removed files pass: they had been
    read.

    Raises:
        SourceError: a file has changed.
    """
    now = {f.path: f for f in there}
    changed = [f for f in taken if now.get(f.path, f) != f]
    if changed:
        one = changed[0]
        raise SourceError(
            f"{len(changed)} file(s) in {directory} changed while the run read them, for example "
            f"{one.name}: {one.size} bytes at its start, {now[one.path].size} at its end; nothing was "
            "committed. Write a file under a name that begins with '.' and rename it when complete, "
            "then run again"
        )


def _same(file: FileInfo, before: Consumed) -> bool:
    return file.size == before.size and _digest(file) == before.digest


def _is_exact(file: FileInfo) -> bool:
    """Returns whether the digest covers the whole file."""
    return file.size <= _BLOCK * _BLOCKS


def _digest(file: FileInfo) -> str:
    """Returns a digest of a file's content, for a large file of evenly spaced blocks; empty if gone."""
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
