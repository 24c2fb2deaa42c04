"""Tables, and the operators from a table to a table: filter, mapValues, aggregation, suppress."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from tests.core.reference.run import (
    Change,
    Config,
    Record,
    Refused,
    Run,
    head,
    number,
    payload,
)
from tests.core.reference.stores import LATEST, NOT_PUT, Row, Store
from tests.core.reference.suppress import Buffer


class Table:
    """A table with its own store; its listeners get changes in the order in which they joined."""

    def __init__(self, run: Run, store: Store | None) -> None:
        self.run = run
        self.store = store
        self.listeners: list[Callable[[Change], None]] = []

    @property
    def versioned(self) -> bool:
        return self.store is not None and self.store.versioned

    @property
    def retention(self) -> int:
        """How far back a versioned table can be read."""
        return self.store.retention if self.store else 0

    def get(self, key: str, as_of: int | None = None) -> Row | None:
        """The latest row of a key or, for a versioned table, the row that was valid at a time."""
        return self.store.get(key, as_of) if self.store else None

    def value(self, key: str) -> str | None:
        row = self.get(key)
        return row and row.value

    def forward(self, change: Change) -> None:
        for listener in self.listeners:
            listener(change)

    def settle(self, change: Change) -> None:
        """Puts a change into the store, if there is one, and forwards it if it is not refused."""
        if self.store is None:
            self.forward(change)
            return
        put = self.store.put(change.key, change.new, change.timestamp)
        if put != NOT_PUT:
            self.forward(Change(change.key, change.new, change.old, change.timestamp, put == LATEST))


class Source(Table):
    """A table of records: those of a topic, of toTable, or of a foreign-key join's results."""

    def __init__(self, run: Run, table: Config | None) -> None:
        super().__init__(run, run.store(table))

    def receive(self, record: Record) -> None:
        if record.key is None:
            self.run.drop()
        else:
            old = self.value(record.key)
            self.settle(Change(record.key, record.value, old, record.timestamp))


class _Derived(Table, ABC):
    """A table that applies a function to each value of another. Without a store, it reads upstream."""

    def __init__(self, run: Run, parent: Table, materialize: Config | None) -> None:
        super().__init__(run, run.store(materialize) if materialize else None)
        self.parent = parent
        parent.listeners.append(self.receive)

    @property
    def versioned(self) -> bool:
        return self.store.versioned if self.store else self.parent.versioned

    @property
    def retention(self) -> int:
        return self.store.retention if self.store else self.parent.retention

    @abstractmethod
    def apply(self, value: str) -> str | None: ...

    def of(self, value: str | None) -> str | None:
        return None if value is None else self.apply(value)

    def get(self, key: str, as_of: int | None = None) -> Row | None:
        if self.store:
            return self.store.get(key, as_of)
        row = self.parent.get(key, as_of)
        value = self.of(row and row.value)
        return None if row is None or value is None else Row(value, row.timestamp)

    def receive(self, change: Change) -> None:
        old = self.value(change.key) if self.store else self.of(change.old)
        new = self.of(change.new)
        if self.forwards(new, old):
            self.settle(Change(change.key, new, old, change.timestamp, change.latest))

    def forwards(self, new: str | None, old: str | None) -> bool:
        return True


class Filter(_Derived):
    """filter and filterNot. Of an unversioned table, they forward no tombstone after a tombstone."""

    def __init__(self, run: Run, parent: Table, step: Config, materialize: Config | None) -> None:
        super().__init__(run, parent, materialize)
        self.bound, self.negate = step["predicate"]["number"], step["negate"]

    def apply(self, value: str) -> str | None:
        found = number(value)
        passes = found is not None and found > self.bound
        return value if passes != self.negate else None

    def forwards(self, new: str | None, old: str | None) -> bool:
        return self.parent.versioned or new is not None or old is not None


class MapValues(_Derived):
    def __init__(self, run: Run, parent: Table, step: Config, materialize: Config | None) -> None:
        super().__init__(run, parent, materialize)
        self.mapper = step["mapper"]

    def apply(self, value: str) -> str:
        if self.mapper == "upper":
            return value.upper()
        return value + self.mapper.removeprefix("append:")


class Aggregate(Table):
    """groupBy(head).aggregate, count and reduce."""

    def __init__(self, run: Run, parent: Table, step: Config, materialize: Config | None) -> None:
        super().__init__(run, run.store(materialize))
        self.parent, self.kind = parent, step["aggregate"]
        self.times: dict[str, int] = {}
        parent.listeners.append(self.receive)

    def receive(self, change: Change) -> None:
        if self.parent.versioned and not change.latest:
            return
        old, new = head(change.old), head(change.new)
        removed = None if old is None else payload(str(change.old))
        added = None if new is None else payload(str(change.new))
        if old is not None and old == new:
            self.run.later(lambda: self.update(old, removed, added, change.timestamp))
            return
        if old is not None:
            self.run.later(lambda: self.update(old, removed, None, change.timestamp))
        if new is not None:
            self.run.later(lambda: self.update(new, None, added, change.timestamp))

    def update(self, group: str, removed: str | None, added: str | None, timestamp: int) -> None:
        row = self.get(group)
        before = row and row.value
        after = before
        if removed is not None and after is not None:
            after = self.change(after, removed, -1)
        if added is not None:
            if after is None:
                start = {"concat": "", "reduce_sum": None, "reduce": None}.get(self.kind, "0")
                after = added if start is None else self.change(start, added, 1)
            else:
                after = self.change(after, added, 1)
        at = self.times[group] = max(timestamp, self.times.get(group, timestamp))
        self.settle(Change(group, after, before, at))

    def change(self, total: str, value: str, sign: int) -> str:
        if self.kind == "concat":
            return f"{total}{'+' if sign > 0 else '-'}{value}"
        by = 1 if self.kind == "count" else number(value) or 0
        return str((number(total) or 0) + sign * by)


class Suppress(Table):
    """suppress(untilTimeLimit). Its rows, and so the old values, are those that it has emitted."""

    def __init__(self, run: Run, parent: Table, suppress: Config) -> None:
        super().__init__(run, run.store(None))
        if parent.versioned:
            raise Refused("TopologyException", "suppress() of a versioned table")
        self.buffer: Buffer[Change] = Buffer(suppress, suppress["duration"], self.let_out)
        parent.listeners.append(self.receive)

    def receive(self, change: Change) -> None:
        self.buffer.put(change.timestamp, change.key.encode(), change.timestamp, change)

    def let_out(self, change: Change) -> None:
        old = self.value(change.key)
        self.settle(Change(change.key, change.new, old, change.timestamp))
