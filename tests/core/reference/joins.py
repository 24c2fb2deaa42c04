"""Joins of tables by key and by foreign key, and of a stream with a table."""

from __future__ import annotations

from collections.abc import Callable

from tests.core.reference.run import Change, Config, Record, Refused, Run, head, joined
from tests.core.reference.stores import Row
from tests.core.reference.tables import Source, Table


class TableJoin(Table):
    """inner, left and outer join of two tables by key. Without a store, it is read from its sides."""

    def __init__(
        self, run: Run, left: Table, right: Table, kind: str, materialize: Config | None
    ) -> None:
        super().__init__(run, run.store(materialize) if materialize else None)
        self.left, self.right = left, right
        self.needs_left, self.needs_right = kind != "outer", kind == "inner"
        left.listeners.append(self.left_changed)
        right.listeners.append(self.right_changed)

    def get(self, key: str, as_of: int | None = None) -> Row | None:
        if self.store:
            return self.store.get(key, as_of)
        left, right = self.left.get(key), self.right.get(key)
        value = self.result(left and left.value, right and right.value)
        if value is None:
            return None
        return Row(value, max(r.timestamp for r in (left, right) if r is not None))

    def result(self, left: str | None, right: str | None) -> str | None:
        if left is None and (right is None or self.needs_left):
            return None
        return None if right is None and self.needs_right else joined(left, right)

    def left_changed(self, change: Change) -> None:
        sides = self.left, self.right
        self.changed(change, *sides, self.needs_right, lambda mine, other: self.result(mine, other))

    def right_changed(self, change: Change) -> None:
        sides = self.right, self.left
        self.changed(change, *sides, self.needs_left, lambda mine, other: self.result(other, mine))

    def changed(
        self,
        change: Change,
        this: Table,
        that: Table,
        needs_that: bool,
        result: Callable[[str | None, str | None], str | None],
    ) -> None:
        if this.versioned and not change.latest:
            self.run.drop()
            return
        row = that.get(change.key)
        other = row and row.value
        if other is None and (needs_that or (change.new is None and change.old is None)):
            return
        at = change.timestamp if row is None else max(change.timestamp, row.timestamp)
        new, old = result(change.new, other), result(change.old, other)
        self.settle(Change(change.key, new, old, at))


class ForeignKeyJoin(Source):
    """inner and left join of a left table with the right row whose key is the head of the left value.

    A left change subscribes to the right key of its value, and gets an answer. A right change sends
    an answer to every subscription. An answer is joined with the current left row. If that row is no
    longer the one that subscribed, the answer is dropped.
    """

    def __init__(
        self, run: Run, left: Table, right: Table, kind: str, materialize: Config | None
    ) -> None:
        super().__init__(run, materialize)
        self.left, self.right, self.is_left_join = left, right, kind == "left"
        self.subscriptions: dict[str, dict[str, str]] = {}
        left.listeners.append(self.left_changed)
        right.listeners.append(self.right_changed)

    def left_changed(self, change: Change) -> None:
        if self.left.versioned and not change.latest:
            self.run.drop()
            return
        key, at, value = change.key, change.timestamp, change.new
        before, after = head(change.old), head(value)
        if self.is_left_join:
            if value is None and change.old is None:
                return
            if before is not None and before != after:
                self.run.later(lambda: self.unsubscribe(before, key))
            self.run.later(lambda: self.subscribe(after, key, value, at, always=True))
            return
        if after is None:
            if before is not None:
                self.run.later(lambda: self.unsubscribe(before, key))
                self.run.later(lambda: self.answer(key, value, None, self.latest(before, at)))
            elif value is not None or change.old is not None:
                self.run.drop()
            return
        moved = before is not None and before != after
        if moved:
            self.run.later(lambda: self.unsubscribe(before, key))
        self.run.later(lambda: self.subscribe(after, key, value, at, always=moved))

    def latest(self, foreign: str | None, timestamp: int) -> int:
        """The larger of a timestamp and that of the right row, if there is one."""
        row = None if foreign is None else self.right.get(foreign)
        return timestamp if row is None else max(timestamp, row.timestamp)

    def unsubscribe(self, foreign: str | None, key: str) -> None:
        self.subscriptions.get(foreign or "", {}).pop(key, None)

    def subscribe(
        self, foreign: str | None, key: str, value: str | None, timestamp: int, always: bool
    ) -> None:
        if foreign is not None:
            self.subscriptions.setdefault(foreign, {})[key] = str(value)
        right = None if foreign is None else self.right.value(foreign)
        if right is not None or always:
            at = self.latest(foreign, timestamp)
            self.run.later(lambda: self.answer(key, value, right, at))

    def right_changed(self, change: Change) -> None:
        if self.right.versioned and not change.latest:
            self.run.drop()
            return
        asked = self.subscriptions.get(change.key, {})
        for key in sorted(asked, key=str.encode):
            self.run.later(
                lambda key=key, value=asked[key]: self.answer(key, value, change.new, change.timestamp)
            )

    def answer(self, key: str, asked: str | None, right: str | None, timestamp: int) -> None:
        left = self.left.value(key)
        if left != asked:
            self.run.drop()
            return
        empty = left is None or (right is None and not self.is_left_join)
        self.receive(Record(key, None if empty else joined(left, right), timestamp))


class Stream:
    """A stream of records and its listeners."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[Record], None]] = []

    def receive(self, record: Record) -> None:
        for listener in self.listeners:
            listener(record)


class StreamTableJoin(Stream):
    """inner and left join of a stream with a table, at once or after a grace period."""

    def __init__(self, run: Run, stream: Stream, table: Table, kind: str, grace: int | None) -> None:
        super().__init__()
        if grace is not None and not table.versioned:
            raise Refused("IllegalArgumentException", "a grace period needs a versioned table")
        if grace is not None and not 0 <= grace <= table.retention:
            raise Refused("IllegalArgumentException", "the table forgets within the grace period")
        self.run, self.table, self.inner, self.grace = run, table, kind == "inner", grace
        self.time = -1
        self.arrived = 0
        self.buffer: list[tuple[int, bytes, int, Record]] = []
        stream.listeners.append(self.take)

    def take(self, record: Record) -> None:
        if record.value is None or (record.key is None and self.inner):
            self.run.drop()
        elif self.grace is None or record.key is None or record.timestamp < self.time - self.grace:
            self.join(record)
        else:
            self.time = max(self.time, record.timestamp)
            self.arrived += 1
            self.buffer.append((record.timestamp, record.key.encode(), self.arrived, record))
            for entry in sorted(e for e in self.buffer if e[0] <= self.time - self.grace):
                self.buffer.remove(entry)
                self.join(entry[3])

    def join(self, record: Record) -> None:
        key, value, timestamp = record
        row = None if key is None else self.table.get(key, timestamp)
        if row is not None or not self.inner:
            self.receive(Record(key, joined(value, row and row.value), timestamp))
