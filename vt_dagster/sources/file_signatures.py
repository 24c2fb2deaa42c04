"""The kind of a file by its first bytes (magic numbers), not its name. Does not use Spark."""

from __future__ import annotations

import bz2
import gzip
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from vt_dagster.sources.consumed_files import FileInfo
from vt_dagster.storage import delta

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
    if head.startswith(b"BZh") and head[4:10] in (b"1AY&SY", b"\x17rE8P\x90"):
        return BZIP2
    if head.startswith(_PARQUET.start) and (tail[-4:] in (b"PAR1", b"PARE") or _control(head[4:6])):
        return _PARQUET
    if head.startswith(_ORC.start) and (tail[-4:-1] == b"ORC" or _control(head[3:5])):
        return _ORC
    if head[257:262] == _TAR:
        return Known("a tar archive", _TAR)
    return None


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
    said = next((s for s in (".gz", ".bz2", *_UNREAD) if lowered.endswith(s)), None)
    wanted = "CSV" if format == "csv" else "JSON lines"
    if found is None:
        if said in (".gz", ".bz2"):
            return (
                f"expected a {'gzip' if said == '.gz' else 'bzip2'} file, as its name says, got "
                f"another content: name it without {said}, or compress it"
            )
        if said in _UNREAD:
            return (
                f"expected {wanted}, plain or compressed with gzip or bzip2, got a name that ends with "
                f"{said}: deliver it under another name, or compress it with gzip (.gz)"
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


__all__ = [
    "HEAD",
    "Known",
    "byte_order",
    "chunks_of",
    "ends_of",
    "fault_of_bytes",
    "is_compressed",
    "known",
]
