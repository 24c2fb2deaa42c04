"""What the topologies of scenarios are made of: each scenario is a partition and a part of keys."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta, timezone
from typing import Any

from pyspark.sql.types import IntegerType, StringType, StructField, StructType, TimestampType

from vt_dagster.conformance.scenario import Entry
from vt_dagster.topology.model import Stream

_SCHEMA = StructType(
    [
        StructField("scenario", IntegerType()),
        StructField("key", StringType()),
        StructField("value", StringType()),
        StructField("timestamp", TimestampType()),
    ]
)
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def ms(value: int) -> timedelta:
    return timedelta(milliseconds=value)


def millis(moment: datetime | None) -> int | None:
    return None if moment is None else (moment - _EPOCH) // timedelta(milliseconds=1)


def source(kind: type[Stream], name: str, **more: Any) -> Any:
    about = {"schema": _SCHEMA, "tombstone": "value is null"}
    return kind(name, key=("scenario", "key"), **{**about, **more})


def with_index() -> StructType:
    """The columns of a source, and one for the number of the record."""
    return StructType([*_SCHEMA.fields, StructField("index", IntegerType())])


def record_of(number: int, record: Mapping[str, Any]) -> Entry:
    return {
        "scenario": number,
        "partition": number,
        "key": record["key"],
        "value": record.get("value"),
        "timestamp": record["timestamp"],
    }


def by_scenario(rows: Iterable[Entry]) -> dict[int, list[Entry]]:
    found: dict[int, list[Entry]] = defaultdict(list)
    for row in rows:
        found[row["scenario"]].append(row)
    return found


def text(value: Any) -> str | None:
    return None if value is None else str(value)


def final_store(rows: Iterable[Entry]) -> list[Entry]:
    """A view's rows as a scenario's final store has them: no tombstones, times as numbers."""
    return [
        {
            "key": row["key"],
            "value": text(row["value"]),
            "valid_from": millis(row.get("valid_from", row["timestamp"])),
            "valid_to": millis(row.get("valid_to")),
        }
        for row in rows
        if not row["is_tombstone"]
    ]
