"""What all nodes of a topology use: changes, records, errors, and the run that drives them."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.core.reference.stores import PlainStore, Store, VersionedStore

Config = dict[str, Any]
Entry = dict[str, Any]


class Refused(Exception):
    """The topology or the record must be refused."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Change:
    """A change that a table forwards; ``latest``: whether it changes the newest version of its key."""

    key: str
    new: str | None
    old: str | None
    timestamp: int
    latest: bool = True


class Record(NamedTuple):
    """A record that a stream forwards."""

    key: str | None
    value: str | None
    timestamp: int


class Run:
    """One run of a topology: its emitted and dropped records, and those that wait in internal topics.

    Groupings and foreign-key joins have internal topics. These are drained, first in first out, after
    each record and before the next one.
    """

    def __init__(self) -> None:
        self.trigger = -1
        self.emitted: list[Entry] = []
        self._dropped = 0
        self._stores: list[Store] = []
        self._waiting: deque[Callable[[], None]] = deque()

    def store(self, table: Config | None) -> Store:
        """The store of a TABLE; without one, a plain store, which keeps the last change of each key."""
        if not table or not table["versioned"]:
            return PlainStore()
        retention, segment = table["history_retention"], table.get("segment_interval")
        if retention < 0 or (segment is not None and segment < 1):
            raise Refused("IllegalArgumentException", "a negative retention or an empty segment")
        store = VersionedStore(retention)
        self._stores.append(store)
        return store

    def emit(self, key: str | None, value: str | None, timestamp: int, **window: int) -> None:
        entry = {"trigger": self.trigger, "key": key, "value": value, "timestamp": timestamp}
        self.emitted.append(entry | window)

    def drop(self) -> None:
        self._dropped += 1

    @property
    def dropped(self) -> int:
        return self._dropped + sum(s.dropped for s in self._stores)

    def later(self, step: Callable[[], None]) -> None:
        """Adds a step that runs after the records that already wait in internal topics."""
        self._waiting.append(step)

    def drain(self) -> None:
        while self._waiting:
            self._waiting.popleft()()


def joined(left: str | None, right: str | None) -> str:
    return f"({'null' if left is None else left},{'null' if right is None else right})"


def number(value: str | None) -> int | None:
    """The integer at the beginning of a value."""
    found = re.match(r"-?[0-9]+", value or "")
    return int(found.group()) if found else None


def head(value: str | None) -> str | None:
    """The part of a value before its first bar."""
    return value.split("|", 1)[0] if value is not None and "|" in value else None


def payload(value: str) -> str:
    return value.split("|", 1)[1]
