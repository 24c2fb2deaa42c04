"""The stores of tables: versions by timestamp, or one row per key."""

from __future__ import annotations

from typing import Any, NamedTuple

NOT_PUT = -9223372036854775808
LATEST = -1


class Row(NamedTuple):
    """A live value and the timestamp of its record."""

    value: str
    timestamp: int


class VersionedStore:
    """The values of each key by timestamp. None is a tombstone, which is a version like others."""

    versioned = True

    def __init__(self, retention: int) -> None:
        self.retention = retention
        self.time = -1
        self.dropped = 0
        self.versions: dict[str, dict[int, str | None]] = {}

    def put(self, key: str, value: str | None, timestamp: int) -> int:
        """Returns LATEST, the timestamp of the next newer version, or NOT_PUT if the record is late."""
        if timestamp < self.time - self.retention:
            self.dropped += 1
            return NOT_PUT
        self.time = max(self.time, timestamp)
        own = self.versions.setdefault(key, {})
        own[timestamp] = value
        return min((t for t in own if t > timestamp), default=LATEST)

    def get(self, key: str, as_of: int | None = None) -> Row | None:
        own = self.versions.get(key, {})
        times = [t for t in own if as_of is None or t <= as_of]
        if not times:
            return None
        at = max(times)
        value = own[at]
        forgotten = as_of is not None and as_of < self.time - self.retention and at != max(own)
        return None if forgotten or value is None else Row(value, at)

    def delete(self, key: str, timestamp: int) -> Row | None:
        found = None if timestamp < self.time - self.retention else self.get(key, timestamp)
        self.put(key, None, timestamp)
        return found

    def content(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for key in sorted(self.versions, key=str.encode):
            times = sorted(self.versions[key])
            for at, end in zip(times, [*times[1:], None], strict=True):
                value = self.versions[key][at]
                if value is not None and (end is None or end - 1 >= self.time - self.retention):
                    rows.append({"key": key, "value": value, "valid_from": at, "valid_to": end})
        return rows


class PlainStore:
    """One row per key: that of the last record to arrive, whatever its timestamp."""

    versioned = False
    retention = 0
    dropped = 0

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}

    def put(self, key: str, value: str | None, timestamp: int) -> int:
        self.rows.pop(key, None)
        if value is not None:
            self.rows[key] = Row(value, timestamp)
        return LATEST

    def get(self, key: str, as_of: int | None = None) -> Row | None:
        return self.rows.get(key)

    def content(self) -> list[dict[str, Any]]:
        return [
            {"key": key, "value": row.value, "valid_from": row.timestamp, "valid_to": None}
            for key, row in sorted(self.rows.items(), key=lambda item: item[0].encode())
        ]


Store = VersionedStore | PlainStore
