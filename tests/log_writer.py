"""Logs as runs leave them, written without Spark, for tests of readers that need no Spark."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, write_deltalake

from vt_dagster.storage import delta
from vt_dagster.topology.specification import Specification

EPOCH = datetime(2024, 1, 1, tzinfo=timezone.utc)
MICROS = int(EPOCH.timestamp()) * 1_000_000
_TIME = pa.timestamp("us", "UTC")


def moment(minute: float) -> datetime:
    """Returns the time so many minutes after the epoch of these tests."""
    return EPOCH + timedelta(minutes=minute)


def document(
    name: str,
    batch: int,
    recorded: int,
    next_offset: Mapping[int, int],
    stream_time: Mapping[int, int],
    kind: str = "versioned",
    retention: timedelta = timedelta(days=3650),
    made_by: Specification | None = None,
    logs: Mapping[str, str] | None = None,
    truncation: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns the document of a commit; times are epoch microseconds."""
    shape: dict[str, Any] = {"kind": kind, "key": ["k"], "columns": ["k", "v"]}
    shape["specification"] = None if made_by is None else made_by.model_dump(mode="json")
    if kind == "versioned":
        shape["history_retention"] = retention // timedelta(microseconds=1)
    said = {
        "asset": name,
        "batch": batch,
        "attempt": f"{batch}-a",
        "shape": shape,
        "log": f"log of {posixpath.basename(name)}",
        "logs": dict(logs or {}),
        "inputs": {one: dict(next_offset) for one in logs or ()},
        "taken": {one: {p: (0, end) for p, end in next_offset.items()} for one in logs or ()},
        "recorded_at": recorded,
        "next_offset": dict(next_offset),
        "stream_time": dict(stream_time),
        "truncation": None if truncation is None else dict(truncation),
    }
    return delta.with_format(said)


class LogWriter:
    """A log of one partition with the columns ``k`` and ``v``, run by run.

    Args:
        warehouse: its directory.
        run_id: the id of its runs.
        about: arguments of ``document``.
    """

    def __init__(
        self, warehouse: Path, name: str = "prices", *, run_id: str | None = None, **about: Any
    ) -> None:
        self.run_id = run_id
        self.path, self.name, self.about = warehouse / name / "log", name, about
        self.batch = self.offset = 0
        self.stream_time = -(2**62)
        self.latest: dict[str, float] = {}

    def run(self, records: Sequence[tuple[str, str | None, float]], recorded: float) -> None:
        """Commits a run of records, each a key, a value (None is a tombstone) and a minute.

        Args:
            recorded: the minute at which the run records them.
        """
        rows: list[dict[str, Any]] = []
        for key, value, minute in records:
            rows.append(
                {
                    "k": key,
                    "v": value,
                    "timestamp": moment(minute),
                    "partition": 0,
                    "offset": self.offset,
                    "is_tombstone": value is None,
                    "is_latest": minute >= self.latest.get(key, minute),
                    "recorded_at": moment(recorded),
                }
            )
            self.offset += 1
            self.latest[key] = max(minute, self.latest.get(key, minute))
            self.stream_time = max(self.stream_time, MICROS + round(minute * 60e6))
        self.batch += 1
        said = document(
            self.name,
            self.batch,
            MICROS + round(recorded * 60e6),
            {0: self.offset},
            {0: self.stream_time},
            **self.about,
        )
        said["run_id"] = self.run_id
        types = {"k": pa.string(), "v": pa.string(), "timestamp": _TIME, "partition": pa.int32()}
        more = {"offset": pa.int64(), "is_tombstone": pa.bool_(), "is_latest": pa.bool_()}
        kinds = pa.schema({**types, **more, "recorded_at": _TIME}.items())
        about = CommitProperties(custom_metadata={"userMetadata": json.dumps({"vt_dagster": said})})
        table = pa.Table.from_pylist(rows, kinds)
        write_deltalake(str(self.path), table, mode="append", commit_properties=about)
