"""The versioned store and the stream-table join once more, one record at a time, without Spark.

Written from ``tests/conformance/FORMAT.md`` 4.1, 4.4, 4.5, 4.9 and 7 alone; it shares nothing with
the operators. :func:`complete` fills in what a scenario expects.
"""

from __future__ import annotations

from typing import Any

NOT_PUT = -9223372036854775808
Entry = dict[str, Any]


class Store:
    """A versioned store: for each key its values by timestamp; None is a tombstone."""

    def __init__(self, retention: int) -> None:
        self.retention = retention
        self.time = -1
        self.dropped = 0
        self.versions: dict[str, dict[int, str | None]] = {}

    def put(self, key: str, value: str | None, timestamp: int) -> int:
        if timestamp < self.time - self.retention:
            self.dropped += 1
            return NOT_PUT
        self.time = max(self.time, timestamp)
        own = self.versions.setdefault(key, {})
        own[timestamp] = value
        return min((t for t in own if t > timestamp), default=-1)

    def get(self, key: str, as_of: int | None = None) -> Entry | None:
        own = self.versions.get(key, {})
        times = [t for t in own if as_of is None or t <= as_of]
        if not times:
            return None
        at = max(times)
        forgotten = as_of is not None and as_of < self.time - self.retention and at != max(own)
        if forgotten or own[at] is None:
            return None
        return {"value": own[at], "timestamp": at, "valid_to": None}

    def delete(self, key: str, timestamp: int) -> Entry | None:
        found = None if timestamp < self.time - self.retention else self.get(key, timestamp)
        self.put(key, None, timestamp)
        return found

    def content(self) -> list[Entry]:
        rows: list[Entry] = []
        for key in sorted(self.versions, key=str.encode):
            times = sorted(self.versions[key])
            for at, end in zip(times, [*times[1:], None], strict=True):
                value = self.versions[key][at]
                if value is not None and (end is None or end - 1 >= self.time - self.retention):
                    rows.append({"key": key, "value": value, "valid_from": at, "valid_to": end})
        return rows


class PlainStore:
    """An unversioned table: the last record to arrive counts."""

    def __init__(self) -> None:
        self.rows: dict[str, tuple[str, int]] = {}
        self.dropped = 0

    def put(self, key: str, value: str | None, timestamp: int) -> None:
        self.rows.pop(key, None)
        if value is not None:
            self.rows[key] = (value, timestamp)

    def get(self, key: str, as_of: int | None = None) -> Entry | None:
        return {"value": self.rows[key][0]} if key in self.rows else None

    def content(self) -> list[Entry]:
        return [
            {"key": k, "value": v, "valid_from": at, "valid_to": None}
            for k, (v, at) in sorted(self.rows.items(), key=lambda row: row[0].encode())
        ]


def _run_store(scenario: Entry) -> Entry:
    store = Store(scenario["config"]["history_retention"])
    expected: list[Any] = []
    for call in scenario["records"]:
        if call["call"] == "put":
            expected.append({"valid_to": store.put(call["key"], call["value"], call["timestamp"])})
        elif call["call"] == "delete":
            expected.append(store.delete(call["key"], call["timestamp"]))
        else:
            expected.append(store.get(call["key"], call.get("as_of")))
    return _filled(expected, store, store.dropped)


def _run_join(scenario: Entry) -> Entry:
    config = scenario["config"]
    kind, grace = config["kind"], config["grace"]
    table = config["table"]
    store = Store(table["history_retention"]) if table["versioned"] else PlainStore()
    buffer: list[tuple[int, bytes, int, Entry]] = []
    expected: list[Entry] = []
    time, dropped = -1, 0

    def emit(trigger: int, record: Entry) -> None:
        key = record["key"]
        found = None if key is None else store.get(key, record["timestamp"])
        if found is None and kind == "inner":
            return
        right = "null" if found is None else found["value"]
        value = f"({record['value']},{right})"
        expected.append(
            {"trigger": trigger, "key": key, "value": value, "timestamp": record["timestamp"]}
        )

    for i, record in enumerate(scenario["records"]):
        key, value, timestamp = record["key"], record["value"], record["timestamp"]
        if record["input"] == "table":
            if key is None:
                dropped += 1
            else:
                store.put(key, value, timestamp)
        elif value is None or (key is None and kind == "inner"):
            dropped += 1
        elif key is None or grace is None or timestamp < time - grace:
            emit(i, record)
        else:
            time = max(time, timestamp)
            buffer.append((timestamp, key.encode(), i, record))
            for entry in sorted(e for e in buffer if e[0] <= time - grace):
                buffer.remove(entry)
                emit(i, entry[3])
    return _filled(expected, store, dropped + store.dropped)


def _filled(expected: list[Any], store: Store | PlainStore, dropped: int) -> Entry:
    return {
        "expected": expected,
        "final_store": store.content(),
        "metrics": {"dropped_records": dropped},
    }


def complete(scenario: Entry) -> Entry:
    """The scenario with ``expected``, ``final_store`` and ``metrics`` as this model has them."""
    run = _run_store if scenario["operator"] == "versioned_store" else _run_join
    return scenario | run(scenario)
