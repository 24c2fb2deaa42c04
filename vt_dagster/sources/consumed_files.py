"""The files of a directory, and which of them have been consumed: a name alone does not tell.

A file is known by where it lies, its size and when it was written. One that was only moved or touched
is known by what is in it, so that no record is taken twice; one that is another file although its name
and size are those of a consumed one is seen.
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
"""Under which names file systems say that a file was written; of two the better one is first."""
_BLOCK, _BLOCKS = 1 << 20, 64
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


class FileInfo(NamedTuple):
    """A file of the directory.

    Args:
        name: in the directory, with the sub-directories that it is in.
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


def files_in(directory: str, pattern: str, what: str, recursive: bool = True) -> list[FileInfo]:
    """The files that are there, by name; links are followed. Does not use Spark.

    A name is the path below the directory: ``dt=2026-11-25/part-0.jsonl``. Left out is what a writer
    has not finished: files and directories whose names begin with ``.`` or ``_``, or end with
    ``._COPYING_`` (Hadoop's copies); a directory ``_day=1`` is one of a column, as in Spark. A link to
    a directory that is read anyway is not followed, nor one to a directory above.

    Cost: on a local disk one listing of each directory; elsewhere one listing of the whole prefix.

    Args:
        pattern: that names must match: without ``/`` their last part, at any depth; with ``/`` all of
            it, part by part, where ``**`` is any number of directories.
        what: is expected there, for messages.
        recursive: whether sub-directories are read.

    Raises:
        SourceError: there is no such directory, or no way to reach or to list it.
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
            "right to read it, or leave sub-directories out (recursive=False)"
        ) from None
    return sorted(found)


def matches(name: str, pattern: str) -> bool:
    """Whether the name of a file in a directory matches a pattern, see :func:`files_in`."""
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
    """What lies in a directory, but for what a writer has not finished."""
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
        # What is below (or above) a directory that is read has, or would have, its files twice.
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

    A file that lies elsewhere now is known by its content where the consumed one is gone, and where it
    was moved together with its directory, or into a sub-directory or out of one. A file of the same
    name and content in a directory beside it, as of another day, is another file.

    Args:
        files: path -> :class:`Consumed`, as it lies beside a commit; earlier versions of the library
            wrote name -> size.
        there: the files that are there now.
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
        return self._elsewhere(file) is not None

    def knows_elsewhere(self, file: FileInfo) -> bool:
        """Whether a consumed file lies elsewhere now, or was touched."""
        before = self._by_path.get(file.path)
        if before is not None:
            return before.stamp != file.stamp and _same(file, before)
        return self._elsewhere(file) is not None

    def batch_of(self, file: FileInfo) -> int | None:
        """The run that consumed what is in a file; 0 = not known; None where none did."""
        if file.path in self._by_path:
            return self._by_path[file.path].batch
        if file.name in self._sizes:
            return 0
        before = self._elsewhere(file)
        return None if before is None else self._by_path[before].batch

    def gone(self) -> list[str]:
        """The paths of consumed files that are not there any more, and have not been moved."""
        there = self._there.values()
        left = {*self._by_path} - {*self._there} | {*self._sizes} - {f.name for f in there}
        return sorted(left - {self._elsewhere(file) for file in there})

    def _elsewhere(self, file: FileInfo) -> str | None:
        """The path at which this file was consumed, before it was moved."""
        for path, before in self._by_name.get(posixpath.basename(file.name), ()):
            gone = path != file.path and path not in self._there
            if gone and _was_moved(path, file) and _same(file, before):
                return path
        return None


def _was_moved(path: str, file: FileInfo) -> bool:
    """Whether a file may be one that was consumed from a path, by the directories that both are in."""
    root = file.path.removesuffix(file.name)
    name = path.removeprefix(root)
    if name == path:  # from another directory, whose name nobody knows any more
        return path.endswith("/" + file.name)
    within = file.name.endswith("/" + name) or name.endswith("/" + file.name)
    return within and _parted(name) == _parted(file.name)


def _parted(name: str) -> list[str]:
    return [part for part in name.split("/")[:-1] if "=" in part]


def unconsumed(
    directory: str, there: Sequence[FileInfo], consumed: Mapping[str, Any]
) -> list[FileInfo]:
    """The files that no run has consumed yet.

    Args:
        consumed: see :class:`Memory`.

    Raises:
        SourceError: a consumed file is there with another content.
    """
    memory = Memory(consumed, there)
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
    asked = set(only)
    missing = sorted(asked - {f.name for f in new})
    missing = [name for name in missing if name not in memory]
    if missing:
        raise SourceError(f"{directory}: the run asks for {missing}, which are not there")
    return [f for f in new if f.name in asked]


def remembered(
    before: Mapping[str, Any], taken: Sequence[FileInfo], there: Sequence[FileInfo], batch: int
) -> dict[str, Any]:
    """What is remembered after a run that took some files. Reads them once, and those others that are
    there and were moved or touched since they were consumed.

    Args:
        batch: of the run.
    """
    memory = Memory(before, there)
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
