"""What the log of a Delta table that somebody else writes says of its commits. Does not use Spark."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import unquote

import pyarrow as pa
from deltalake import DeltaTable
from pyspark.sql.types import StructType

from vt_dagster.errors import SourceError, StorageError
from vt_dagster.spark.jars import one_line
from vt_dagster.storage import delta

FEED = "delta.enableChangeDataFeed"
"""The table property that switches its change data feed on."""
_MAPPING = "delta.columnMapping.mode"
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint\b.*\.(parquet|json)")


class Added(NamedTuple):
    """A file that a commit added.

    Args:
        path: where it is, for Spark.
        place: the same without the protocol.
        parts: what the columns are that part the table, as texts.
    """

    path: str
    place: str
    size: int
    parts: Mapping[str, str | None]


@dataclass(frozen=True)
class Change:
    """What a commit did.

    Args:
        time: when, epoch microseconds, by its writer's clock.
        operation: in Delta's word, for messages.
        added: files with new rows; not those of a compaction.
        removes: whether rows are gone, or were rewritten; a compaction does neither.
        bytes: of all that is read of it.
        properties: of the table, where it changed them.
    """

    version: int
    time: int
    operation: str
    added: tuple[Added, ...]
    removes: bool
    bytes: int
    properties: Mapping[str, str] | None

    @property
    def changes_rows(self) -> bool:
        """Whether it changed any."""
        return bool(self.added) or self.removes


class ForeignTable:
    """A Delta table that somebody else writes, as of now.

    Raises:
        SourceError: there is none, or its log cannot be read.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            table = delta.open_table(path)
        except (StorageError, ImportError, ValueError, OSError) as error:
            raise SourceError(
                f"expected a Delta table that can be read in {path!r}, got: {one_line(error)}; correct "
                "the path, or restore its _delta_log"
            ) from None
        if table is None:
            raise SourceError(
                f"expected a Delta table in {path!r}, found none; correct the path, or run again when "
                "it has been written"
            )
        self._table = table
        names = delta.log_files(path)
        self._commits = {int(m[1]) for n in names if (m := delta.COMMIT_FILE.fullmatch(n))}
        self._checkpoints = {int(m[1]) for n in names if (m := _CHECKPOINT.fullmatch(n))}

    @property
    def version(self) -> int:
        """The newest."""
        return self._table.version()

    @property
    def id(self) -> str:
        """Another table in its place has another one."""
        return str(self._table.metadata().id)

    def first_commit(self, until: int) -> int:
        """The first of the commits up to a version (inclusive) that are there without a gap; one after
        it where there is none."""
        first = until + 1
        while first - 1 in self._commits:
            first -= 1
        return first

    def first_state(self) -> int:
        """The oldest version that can be read as a whole, and from which on all commits are there."""
        first = self.first_commit(self.version)
        if first == 0:
            return 0
        return min((v for v in self._checkpoints if v + 1 >= first), default=self.version)

    def at(self, version: int) -> DeltaTable:
        """The table as of a version.

        Raises:
            SourceError: it cannot be read any more.
        """
        if version == self.version:
            return self._table
        try:
            found = delta.open_table(self.path, version)
        except StorageError as error:
            raise SourceError(
                f"expected version {version} of {self.path}, got: {one_line(error)}; run again"
            ) from None
        assert found is not None
        return found

    def properties(self, version: int) -> Mapping[str, str | None]:
        """Those of the table as of a version."""
        return self.at(version).metadata().configuration

    def schema(self, version: int) -> StructType:
        """Its columns as of a version."""
        return StructType.fromJson(json.loads(self.at(version).schema().to_json()))

    def parted_by(self, version: int) -> list[str]:
        """The columns that part it."""
        return list(self.at(version).metadata().partition_columns)

    def bytes(self, version: int) -> int:
        """Of all files of a version."""
        told = pa.RecordBatchReader.from_stream(self.at(version).get_add_actions(flatten=True))
        return sum(told.read_all().column("size_bytes").to_pylist())

    def require_plain_files(self, version: int) -> None:
        """Its files must say what is in them.

        Raises:
            SourceError: they have other names for columns than the table.
        """
        if (self.properties(version).get(_MAPPING) or "none") != "none":
            raise SourceError(
                f"{self.path} maps its columns to other names ({_MAPPING}), by which mode='append' "
                "reads no files: expected mode='changes' or 'snapshots'; use one of them"
            )

    def time(self, version: int) -> int | None:
        """When a version was committed, epoch microseconds; None where its commit is not there."""
        return self.change(version).time if version in self._commits else None

    def change(self, version: int) -> Change:
        """What one commit did.

        Raises:
            SourceError: its file is cut off.
        """
        fs, root = delta.filesystem(self.path)
        place = posixpath.join(root, "_delta_log", f"{version:020}.json")
        text = fs.cat_file(place).decode("utf-8")
        try:
            actions: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines() if line]
        except ValueError:
            raise SourceError(
                f"{place} is cut off: expected a whole commit; restore it from a backup and run again"
            ) from None
        info: dict[str, Any] = next((a["commitInfo"] for a in actions if "commitInfo" in a), {})
        stamp = info.get("inCommitTimestamp") or info.get("timestamp")
        time = int(stamp) * 1000 if stamp else int(fs.modified(place).timestamp() * 1_000_000)
        adds = [a["add"] for a in actions if a.get("add", {}).get("dataChange")]
        removes = [a["remove"] for a in actions if a.get("remove", {}).get("dataChange")]
        feed = [a["cdc"] for a in actions if "cdc" in a]
        told = next((a["metaData"]["configuration"] for a in actions if "metaData" in a), None)
        return Change(
            version,
            time,
            str(info.get("operation", "a commit")),
            tuple(self._added(a) for a in adds),
            bool(removes),
            sum(int(a.get("size") or 0) for a in (feed or [*adds, *removes])),
            told,
        )

    def _added(self, add: Mapping[str, Any]) -> Added:
        name = unquote(add["path"])
        path = name if "://" in name or name.startswith("/") else posixpath.join(self.path, name)
        place = "/" + delta.filesystem(path)[1].lstrip("/")
        return Added(path, place, add["size"], add["partitionValues"])
