"""The commits in the log of an external Delta table. Does not use Spark."""

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
"""The table property that enables the change data feed."""
_MAPPING = "delta.columnMapping.mode"
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint\b.*\.(parquet|json)")


class Added(NamedTuple):
    """A file that a commit added.

    Args:
        path: the file's path for Spark.
        place: the path without the protocol.
        parts: the values of the partition columns, as texts.
    """

    path: str
    place: str
    size: int
    parts: Mapping[str, str | None]


@dataclass(frozen=True)
class Change:
    """The changes of a commit.

    Args:
        time: its time in epoch microseconds, by the writer's clock.
        operation: Delta's name of the operation, for messages.
        added: files with new rows; not those of a compaction.
        removes: whether rows were removed or rewritten; a compaction does neither.
        bytes: the size of all files to read.
        properties: the table's properties, if the commit changed them.
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
        """Whether the commit changed rows."""
        return bool(self.added) or self.removes


class ForeignTable:
    """An external Delta table at its current version.

    Raises:
        SourceError: there is no table, or its log cannot be read.
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
        """The newest version."""
        return self._table.version()

    @property
    def id(self) -> str:
        """The table id; a replaced table has another one."""
        return str(self._table.metadata().id)

    def first_commit(self, until: int) -> int:
        """Returns the first of the gapless commits up to ``until`` (inclusive); ``until + 1`` if there
        is none."""
        first = until + 1
        while first - 1 in self._commits:
            first -= 1
        return first

    def first_state(self) -> int:
        """Returns the oldest readable version after which all commits are available."""
        first = self.first_commit(self.version)
        if first == 0:
            return 0
        return min((v for v in self._checkpoints if v + 1 >= first), default=self.version)

    def at(self, version: int) -> DeltaTable:
        """Returns the table at a version.

        Raises:
            SourceError: the version can no longer be read.
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
        """Returns the table's properties at a version."""
        return self.at(version).metadata().configuration

    def schema(self, version: int) -> StructType:
        """Returns the table's columns at a version."""
        return StructType.fromJson(json.loads(self.at(version).schema().to_json()))

    def parted_by(self, version: int) -> list[str]:
        """Returns the partition columns."""
        return list(self.at(version).metadata().partition_columns)

    def bytes(self, version: int) -> int:
        """Returns the size of all files of a version."""
        told = pa.RecordBatchReader.from_stream(self.at(version).get_add_actions(flatten=True))
        return sum(told.read_all().column("size_bytes").to_pylist())

    def require_plain_files(self, version: int) -> None:
        """Checks that the files have the table's column names.

        Raises:
            SourceError: the table has column mapping.
        """
        if (self.properties(version).get(_MAPPING) or "none") != "none":
            raise SourceError(
                f"{self.path} has column mapping ({_MAPPING}), which mode='append' does not support: "
                "expected mode='changes' or 'snapshots'; use one of them"
            )

    def time(self, version: int) -> int | None:
        """Returns the commit time of a version in epoch microseconds; None if its commit is gone."""
        return self.change(version).time if version in self._commits else None

    def change(self, version: int) -> Change:
        """Returns the changes of one commit.

        Raises:
            SourceError: the commit file is truncated.
        """
        fs, root = delta.filesystem(self.path)
        place = posixpath.join(root, "_delta_log", f"{version:020}.json")
        text = fs.cat_file(place).decode("utf-8")
        try:
            actions: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines() if line]
        except ValueError:
            raise SourceError(
                f"{place} is truncated: expected a whole commit; restore it from a backup and run again"
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
