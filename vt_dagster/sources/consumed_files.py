"""The files of a directory, which of them were consumed, and how a changed file is recognized.

A name alone does not identify a file. A file is identified by path, size and modification time. A file
that was moved or touched is identified by a digest of its content, so that no record is consumed twice,
and a replaced file of the same name and size is detected.

The kind of a file is told by its first bytes (magic numbers), not by its name. Does not use Spark.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import os
import posixpath
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from vt_dagster.errors import SourceError, counted
from vt_dagster.storage import delta
from vt_dagster.topology.durations import epoch_micros

# Consumed files


_STAMPS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated")
"""Keys under which file systems store a version or modification time; the more exact ones first."""
_BLOCK, _BLOCKS = 1 << 20, 64


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

    @property
    def place(self) -> str:
        """The path by which a file is recognized, whether its directory is given as s3:// or s3a://."""
        return delta.location(self.path)


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
        SourceError: the directory does not exist, or cannot be reached or listed; it has a table of
            Delta Lake, Hudi or Iceberg with Parquet files that match.
    """
    with delta.listing_source(directory):
        fs, root = delta.filesystem(directory)
        entries = _all_entries(fs, root, directory, recursive) if fs.isdir(root) else None
    if entries is None:
        raise SourceError(
            f"expected a directory {directory!r} with {what}, found none; create it, or "
            "correct the path"
        )
    root, found, tables = root.rstrip("/"), list[FileInfo](), dict[str, str]()
    local = delta.is_local(fs)
    for entry in entries:
        name = entry["name"].rstrip("/").removeprefix(root).lstrip("/")
        tables |= _table_of(name)
        if not matches(name, pattern):
            continue
        if entry.get("islink"):
            if not fs.exists(entry["name"]):
                continue
            entry = {**fs.info(entry["name"]), "name": entry["name"]}
        if entry["type"] == "file":
            stamp = next((str(entry[s]) for s in _STAMPS if entry.get(s) is not None), "")
            # An object store keeps the scheme that was given: it is the one that Spark knows.
            path = fs.unstrip_protocol(entry["name"]) if local else f"{directory.rstrip('/')}/{name}"
            found.append(FileInfo(name, path, entry["size"], stamp))
    _require_no_table(directory, tables, [f.name for f in found if f.name.endswith(".parquet")])
    return sorted(found)


_ICEBERG = re.compile(r"(v\d+|\d{5,}-[0-9a-f-]{36})(\.gz)?\.metadata\.json")
_LOGS = {"_delta_log": "a Delta table", ".hoodie": "a Hudi table"}
"""The directory beside the files of a table, by which it is recognized."""


def _table_of(name: str) -> dict[str, str]:
    """Returns the kind of the table that a name belongs to, by the table's directory; empty = none is
    known."""
    parts = name.split("/")
    if parts[-2:-1] == ["metadata"] and _ICEBERG.fullmatch(parts[-1]):
        return {"/".join(parts[:-2]): "an Iceberg table"}
    return {"/".join(parts[:place]): _LOGS[part] for place, part in enumerate(parts) if part in _LOGS}


def _require_no_table(directory: str, tables: Mapping[str, str], names: Sequence[str]) -> None:
    for place, kind in tables.items():
        if any(place in ("", *_above(name)) for name in names):
            where = f"{place!r} in {directory!r}" if place else repr(directory)
            reader = "a DeltaSource" if "Delta" in kind else "a function that returns a DataFrame"
            raise SourceError(
                f"{where} is {kind}, expected files: those of a table also have rows that it has "
                f"deleted or replaced. Read it with {reader}, or leave it out by the source's pattern"
            )


def _above(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[:place]) for place in range(1, len(parts))]


def _all_entries(fs: Any, root: str, directory: str, recursive: bool) -> list[dict[str, Any]]:
    try:
        return [*_entries(fs, root.rstrip("/"), recursive)]
    except PermissionError as error:
        raise SourceError(
            f"a directory in {directory!r} cannot be listed: {error}; give the user of the run the "
            "right to read it, or set recursive=False to skip sub-directories"
        ) from None


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
    """Yields the entries of a directory without unfinished files, and the logs of tables as
    directories."""
    if delta.is_local(fs):
        yield from _local_entries(fs, root, recursive, {os.path.realpath(root)})
    elif not recursive:
        for entry in fs.ls(root, detail=True, refresh=True):
            name = posixpath.basename(entry["name"].rstrip("/"))
            if name in _LOGS or not _is_hidden(name, entry["type"]):
                yield entry
    else:
        fs.invalidate_cache()
        for name, entry in fs.find(root, detail=True).items():
            *above, last = name.removeprefix(root).strip("/").split("/")
            if _LOGS.keys() & {*above}:
                yield {**entry, "type": "directory"}
            elif not _is_hidden(last, "file") and not any(_is_hidden(a, "directory") for a in above):
                yield entry


def _local_entries(fs: Any, place: str, recursive: bool, seen: set[str]) -> Iterator[dict[str, Any]]:
    linked = list[str]()
    for entry in fs.ls(place, detail=True, refresh=True):
        path = entry["name"].rstrip("/")
        is_directory = entry["type"] == "directory" or (entry.get("islink") and Path(path).is_dir())
        if posixpath.basename(path) in _LOGS:
            yield entry
        elif _is_hidden(posixpath.basename(path), "directory" if is_directory else "file"):
            continue
        elif not is_directory:
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
    places = {file.name: delta.filesystem(file.path) for file in files}
    with delta.listing_source(posixpath.dirname(files[0].path) if files else ""):
        return {name: epoch_micros(fs.modified(place)) for name, (fs, place) in places.items()}


class Memory:
    """The files consumed by earlier runs.

    A moved file is recognized by its content if the consumed path is gone, and if the file was moved
    with its directory, into a sub-directory or out of one. A file of the same name and content in a
    sibling directory, such as that of another day, is another file.

    Args:
        files: path -> :class:`Consumed`, as stored beside a commit; earlier versions of the library
            stored name -> size. Values that are mappings are entries of other kinds of sources, and are
            ignored.
        there: the files that exist now.
    """

    def __init__(self, files: Mapping[str, Any], there: Sequence[FileInfo] = ()) -> None:
        self._by_path: dict[str, Consumed] = {}
        self._by_name: dict[str, list[tuple[str, Consumed]]] = {}
        self._sizes: dict[str, int] = {}
        self.there = there
        self._there = {f.place for f in there}
        for given, entry in files.items():
            path = delta.location(given)
            if isinstance(entry, Mapping):
                continue
            if isinstance(entry, int):
                self._sizes[path] = entry
                continue
            consumed = Consumed(*entry)
            self._by_path[path] = consumed
            self._by_name.setdefault(posixpath.basename(path), []).append((path, consumed))

    def __contains__(self, name: str) -> bool:
        paths = [path for path, _ in self._by_name.get(posixpath.basename(name), ())]
        return name in self._sizes or any(path.endswith("/" + name) for path in paths)

    def changed(self, file: FileInfo) -> str | None:
        """Returns how a consumed file has changed; None if it has not, or was not consumed."""
        before = self._by_path.get(file.place)
        size = self._sizes.get(file.name) if before is None else before.size
        if size is None:
            return None
        if size != file.size:
            return f"{size} bytes then, {file.size} now"
        if (
            before is None
            or before.stamp == file.stamp
            or (_is_exact(file) and _unchanged(file, before))
        ):
            return None
        return f"{size} bytes then and now, but rewritten since"

    def has(self, file: FileInfo) -> bool:
        """Returns whether an unchanged file was consumed, under its path or an earlier one."""
        if file.place in self._by_path or file.name in self._sizes:
            return True
        return self._elsewhere(file) is not None

    def knows_elsewhere(self, file: FileInfo) -> bool:
        """Returns whether a consumed file was moved or touched."""
        before = self._by_path.get(file.place)
        if before is not None:
            return before.stamp != file.stamp and _unchanged(file, before)
        return self._elsewhere(file) is not None

    def batch_of(self, file: FileInfo) -> int | None:
        """Returns the batch that consumed a file; 0 = unknown; None = not consumed."""
        if file.place in self._by_path:
            return self._by_path[file.place].batch
        if file.name in self._sizes:
            return 0
        before = self._elsewhere(file)
        return None if before is None else self._by_path[before].batch

    def gone(self) -> list[str]:
        """Returns the paths of consumed files that were removed, not moved."""
        left = {*self._by_path} - self._there | {*self._sizes} - {f.name for f in self.there}
        return sorted(left.difference(*map(self._earlier, self.there)))

    def other_directory(self) -> str | None:
        """Returns the directory of the file that was consumed last, if none was consumed from this
        one."""
        there, paths = self.there, self._by_path
        roots = tuple({f.place.removesuffix(f.name) for f in there})
        if not paths or any(p.startswith(roots) for p in paths) or any(map(self.has, there)):
            return None
        last = max(paths, key=lambda path: paths[path].batch)
        return posixpath.dirname(last).removeprefix("file://")

    def _elsewhere(self, file: FileInfo) -> str | None:
        """Returns the earlier path under which a moved file was consumed; None = not consumed."""
        return next(self._earlier(file), None)

    def _earlier(self, file: FileInfo) -> Iterator[str]:
        """Yields the earlier paths of a moved file: several if it was moved more than once."""
        for path, before in self._by_name.get(posixpath.basename(file.name), ()):
            gone = path != file.place and path not in self._there
            if gone and _was_moved(path, file) and _unchanged(file, before):
                yield path


def _was_moved(path: str, file: FileInfo) -> bool:
    """Returns whether a file may have been moved from a consumed path, by their directories."""
    root = file.place.removesuffix(file.name)
    name = path.removeprefix(root)
    if name == path:  # from another source directory, whose path is not stored
        return path.endswith("/" + file.name)
    within = file.name.endswith("/" + name) or name.endswith("/" + file.name)
    return within and _parted(name) == _parted(file.name)


def _parted(name: str) -> list[str]:
    return [part for part in name.split("/")[:-1] if "=" in part]


def unconsumed(directory: str, memory: Memory) -> list[FileInfo]:
    """Returns the files that exist now and that no run has consumed.

    Raises:
        SourceError: the content of a consumed file has changed.
    """
    there = memory.there
    changed = {f.name: change for f in there if (change := memory.changed(f)) is not None}
    if changed:
        name, change = next(iter(changed.items()))
        raise SourceError(
            f"{counted(len(changed), 'consumed file')} in {directory} changed later, for "
            f"example {name}: {change}; a file is consumed once, so deliver new records in a new file "
            "and put the old one back"
        )
    return [f for f in there if not memory.has(f)]


def chosen(
    directory: str, new: Sequence[FileInfo], memory: Memory, only: Sequence[str] | None
) -> list[FileInfo]:
    """Returns the new files that a run requests; requested files that were consumed are skipped.

    Args:
        only: the requested names; None = all.

    Raises:
        SourceError: a requested file does not exist.
    """
    if only is None:
        return list(new)
    requested = set(only)
    missing = sorted(requested - {f.name for f in new})
    missing = [name for name in missing if name not in memory]
    if missing:
        raise SourceError(
            f"{directory}: expected the files {missing} of the run config, which do not exist; put "
            "them back, correct the names, or run without them in the config"
        )
    return [f for f in new if f.name in requested]


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
    return {**before, **{f.place: Consumed(f.size, f.stamp, _digest(f), n) for f, n in batches.items()}}


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
            f"{counted(len(changed), 'file')} in {directory} changed while the run was reading, for "
            f"example {one.name}: {one.size} bytes at its start, {now[one.path].size} at its end; "
            "nothing was committed. Write a file under a name that begins with '.' and rename it when "
            "complete, then run again"
        )


def _unchanged(file: FileInfo, before: Consumed) -> bool:
    return file.size == before.size and _digest(file) == before.digest


def _is_exact(file: FileInfo) -> bool:
    """Returns whether the digest covers the whole file."""
    return file.size <= _BLOCK * _BLOCKS


def stamp_of(files: Sequence[FileInfo]) -> str:
    """Returns a digest of the names, sizes and modification times of files. Does not read them."""
    about = [(f.name, f.size, f.stamp) for f in files]
    return hashlib.blake2b(repr(about).encode(), digest_size=16).hexdigest()


def digest_of(files: Sequence[FileInfo]) -> str:
    """Returns a digest of the contents of files. If the files are many or large, it covers only evenly
    spaced blocks of each."""
    blocks = max(2, _BLOCKS // max(1, len(files)))
    found = [_digest(file, blocks) for file in files]
    return hashlib.blake2b(" ".join(found).encode(), digest_size=16).hexdigest()


def _digest(file: FileInfo, blocks: int = _BLOCKS) -> str:
    """Returns a digest of a file's content, for a large file only of evenly spaced blocks; empty if the
    file is gone."""
    fs, local = delta.filesystem(file.path)
    digest = hashlib.blake2b(digest_size=16)
    step = _BLOCK if file.size <= _BLOCK * blocks else (file.size - _BLOCK) // (blocks - 1)
    try:
        with fs.open(local, "rb") as content:
            for number in range(blocks):
                content.seek(number * step)
                digest.update(content.read(_BLOCK))
    except FileNotFoundError:
        return ""
    return digest.hexdigest()


# File signatures


HEAD = 512
"""Number of first bytes that identify a file."""
_TAIL = 8
_CHUNK = 1 << 20


class Known(NamedTuple):
    """The signature of a kind of file.

    Args:
        name: of the kind, for messages.
        start: the first bytes.
        suffix: the file extension with which Spark decompresses such files; None = it does not.
    """

    name: str
    start: bytes
    suffix: str | None = None


GZIP = Known("a gzip file", b"\x1f\x8b", ".gz")
BZIP2 = Known("a bzip2 file", b"BZh", ".bz2")
ZLIB = Known("a zlib file", b"x", ".deflate")
_COMPRESSED = (
    GZIP,
    Known("an xz file", b"\xfd7zXZ\x00"),
    Known("an LZMA file", b"\x5d\x00\x00\x80\x00"),
    Known("a zstd file", b"\x28\xb5\x2f\xfd"),
    Known("a zip archive", b"PK\x03\x04"),
    Known("a zip archive", b"PK\x05\x06"),
    Known("an lz4 file", b"\x04\x22\x4d\x18"),
    Known("an lz4 file", b"\x02\x21\x4c\x18"),
    Known("a snappy file", b"\xff\x06\x00\x00sNaPpY"),
    Known("a 7z archive", b"7z\xbc\xaf\x27\x1c"),
    Known("a rar archive", b"Rar!\x1a\x07"),
    Known("a file of compress (.Z)", b"\x1f\x9d"),
    Known("an lzop file", b"\x89LZO\x00\r\n\x1a\n"),
)
_BINARY = (
    Known("an Avro file", b"Obj\x01"),
    Known("a Microsoft Office file", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"),
    Known("a PDF file", b"%PDF-"),
    Known("an SQLite database", b"SQLite format 3\x00"),
)
_PARQUET, _ORC, _TAR = Known("a Parquet file", b"PAR1"), Known("an ORC file", b"ORC"), b"ustar"
_BYTE_ORDER = (
    Known("UTF-32", b"\xff\xfe\x00\x00"),
    Known("UTF-32", b"\x00\x00\xfe\xff"),
    Known("UTF-16LE", b"\xff\xfe"),
    Known("UTF-16BE", b"\xfe\xff"),
)
_UNREAD = (".zst", ".zstd", ".lz4", ".snappy", ".xz", ".zip", ".7z", ".lzo", ".br")
"""File extensions of compressions that Spark does not reliably read: for some it picks a codec by name,
and returns no rows if the content does not match."""


def known(head: bytes, tail: bytes = b"") -> Known | None:
    """Returns the known binary kind of a file; None = text or unknown.

    Args:
        head: its first ``HEAD`` bytes; ``tail``: its last bytes.
    """
    for one in (*_COMPRESSED, *_BINARY):
        if head.startswith(one.start):
            return one
    # These signatures are letters, as in a text: the bytes after them decide.
    if head.startswith(ZLIB.start) and _is_zlib(head):
        return ZLIB
    if head.startswith(b"BZh") and head[4:10] in (b"1AY&SY", b"\x17rE8P\x90"):
        return BZIP2
    if head.startswith(_PARQUET.start) and (tail[-4:] in (b"PAR1", b"PARE") or _control(head[4:6])):
        return _PARQUET
    if head.startswith(_ORC.start) and (tail[-4:-1] == b"ORC" or _control(head[3:5])):
        return _ORC
    if head[257:262] == _TAR:
        return Known("a tar archive", _TAR)
    return None


def _is_zlib(head: bytes) -> bool:
    """Returns whether a file's first bytes are a zlib stream, which may also begin with letters."""
    stream = zlib.decompressobj()
    try:
        stream.decompress(head)
    except zlib.error:
        return False
    # Of a text that begins with such letters, repeated lines may be readable codes too.
    return stream.eof or (len(head) == HEAD and _control(head))


def byte_order(head: bytes) -> str | None:
    """Returns the encoding of a file's byte order mark; None = no mark, or UTF-8's."""
    return next((one.name for one in _BYTE_ORDER if head.startswith(one.start)), None)


def ends_of(file: FileInfo) -> tuple[bytes, bytes]:
    """Returns the first and the last bytes of a file, as stored.

    Raises:
        OSError: the file cannot be read, or is gone.
    """
    fs, place = delta.filesystem(file.path)
    with fs.open(place, "rb") as content:
        head = content.read(HEAD)
        content.seek(max(0, file.size - _TAIL))
        return head, content.read(_TAIL)


def chunks_of(file: FileInfo) -> Iterator[bytes]:
    """Yields the content of a file, decompressed by its file extension.

    Raises:
        OSError, EOFError, zlib.error: the file is truncated, or not in that format.
    """
    fs, place = delta.filesystem(file.path)
    name = file.name.lower()
    with fs.open(place, "rb") as raw:
        if name.endswith(".deflate"):
            yield from _inflated(raw)
            return
        content: Any = raw
        if name.endswith(".gz"):
            content = gzip.GzipFile(fileobj=raw)
        elif name.endswith(".bz2"):
            content = bz2.BZ2File(raw)
        while chunk := content.read(_CHUNK):
            yield chunk


def _inflated(raw: Any) -> Iterator[bytes]:
    stream = zlib.decompressobj()
    some = False
    while chunk := raw.read(_CHUNK):
        some = True
        yield stream.decompress(chunk)
    if some and not stream.eof:
        raise EOFError("the compressed file ends before its end-of-stream marker")


def is_compressed(name: str) -> bool:
    """Returns whether a name has the extension of a supported compression."""
    return name.lower().endswith((".gz", ".bz2", ".deflate"))


def fault_of_bytes(name: str, found: Known | None, format: str) -> str | None:
    """Returns the fault of a file of lines, by its name and kind; None = no fault."""
    lowered = name.lower()
    suffix = next((s for s in (".gz", ".bz2", *_UNREAD) if lowered.endswith(s)), None)
    wanted = "CSV" if format == "csv" else "JSON lines"
    if found is None:
        if suffix in (".gz", ".bz2"):
            return (
                f"expected a {'gzip' if suffix == '.gz' else 'bzip2'} file, as its name says, got "
                f"another content: name it without {suffix}, or compress it"
            )
        if suffix in _UNREAD:
            return (
                f"expected {wanted}, plain or compressed with gzip or bzip2, got a name that ends with "
                f"{suffix}: deliver it under another name, or compress it with gzip (.gz)"
            )
        return None
    if found.suffix is None:
        if found in _COMPRESSED:
            return (
                f"expected {wanted}, plain or compressed with gzip or bzip2, got {found.name}: "
                "decompress it, or compress it with gzip (.gz)"
            )
        return f"expected {wanted}, got {found.name}: correct the source's format, or the file"
    if lowered.endswith(found.suffix):
        return None
    return (
        f"expected a name that ends with {found.suffix}, which Spark needs to decompress, got "
        f"{found.name} under another name: rename it"
    )


def _control(some: bytes) -> bool:
    return any(byte < 0x20 and byte not in b"\t\n\r" for byte in some)
