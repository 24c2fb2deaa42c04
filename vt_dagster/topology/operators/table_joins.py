"""Joins of two tables: by key, by foreign key, and over their histories.

- Table-table join: the current rows of two tables with the same key.
- Foreign-key join: each row of a table joined with the row of another table that it references.
- History join: two versioned tables with the same key, joined over their whole histories.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

from pyspark.sql.types import StructType

from vt_dagster.errors import TopologyError
from vt_dagster.topology.durations import Duration, pairs
from vt_dagster.topology.expressions import Selection
from vt_dagster.topology.node import Emit
from vt_dagster.topology.operators.base import (
    Join,
    Materialized,
    check_emit,
    check_keys,
    check_kind,
    make_table,
    need_table,
    require_of_versions,
)
from vt_dagster.topology.options import Consumer, require_readable
from vt_dagster.topology.schema import same_types
from vt_dagster.topology.specification import ForeignKeyJoinSpec, HistoryJoinSpec, TableTableJoinSpec

# Table-table join


@dataclass(frozen=True)
class TableTableJoin(Join):
    """Joins the current rows of two tables with the same key, again at each change (KIP-914).

    The result's timestamp is the larger of those of the change and of the other side's row.

    Late: a change that is out of order for its key in a versioned side is dropped and counted; a
    versioned result refuses records older than its history retention. Null key: a table has none.
    Tombstone: emits a tombstone if the kind of join needs the deleted side, again for each repeated
    tombstone; emits nothing if neither side has or had a row. A record that repeats its version
    (``new_version_on``) emits nothing; its timestamp counts for later results of the other side.

    Args:
        kind: ``inner``, ``left`` or ``outer``.
        materialized: None: a plain table; with a history retention: a versioned table.
        monotone_timestamps: True: timestamps of a key's results never decrease, tombstones included;
            False: the timestamps of Kafka Streams; None: True if both sides are versioned.
        emit: ``every_update``, or ``per_run``: only the last update of each key in a run.
    """

    called = ("table_join",)
    consumer: ClassVar[Consumer] = Consumer.TABLE_JOIN
    what: ClassVar[str] = "table-table join"
    kinds: ClassVar[tuple[str, ...]] = ("inner", "left", "outer")

    materialized: Materialized | None = None
    monotone_timestamps: bool | None = None
    emit: Emit = "every_update"

    def __post_init__(self) -> None:
        super().__post_init__()
        need_table(self.name, f"the left side of a {self.what}", self.left)
        need_table(self.name, f"the right side of a {self.what}", self.right)
        check_kind(self.name, self.what, self.kind, self.kinds)
        for side in self.inputs:
            require_readable(self.name, self.consumer, side)
        check_emit(self.name, self.emit)
        object.__setattr__(self, "select", tuple(self.select))
        self._check_match()

    def _check_match(self) -> None:
        """Raises TopologyError if the rows of both sides cannot be matched."""
        check_keys(self.name, self.left, self.right)
        used = self.projection()
        require_of_versions(self.name, self.consumer, self.left, used.columns_of("left"))
        require_of_versions(self.name, self.consumer, self.right, used.columns_of("right"))

    @property
    def monotone(self) -> bool:
        """Whether timestamps of a key's results never decrease."""
        if self.monotone_timestamps is None:
            return self.left.versioned and self.right.versioned
        return self.monotone_timestamps

    @property
    def specification(self) -> TableTableJoinSpec | ForeignKeyJoinSpec | HistoryJoinSpec:
        return TableTableJoinSpec(
            **self._sides, monotone_timestamps=self.monotone_timestamps, emit=self.emit
        )

    @property
    def partitioning(self) -> tuple[Any, ...] | None:
        return self.left.partitioning if self.copartitioned else None

    def result(self, **shown: Any) -> Any:
        schema, inherited = StructType(self.fields()), self._inherited
        return make_table(self, self.left, schema, self.materialized, shown, inherited=inherited)

    @property
    def _inherited(self) -> Duration | None:
        """The history retention of a result that is not materialized."""
        return None

    def describe(self) -> str:
        return (
            f"{self.left.name} and {self.right.name} by their common key ({self.kind}), joined again "
            "at each change of either side."
        )


# Foreign-key join


_SIDE = re.compile(r"(?<![\w.`])(left|right)\s*\.", re.IGNORECASE)
_TEXT = re.compile(r"'[^']*'|\"[^\"]*\"")


@dataclass(frozen=True)
class ForeignKeyJoin(TableTableJoin):
    """Each row of a table joined with the row of another table that it references (KIP-914, KIP-213).

    Changes of both sides trigger: a change of a right row emits one result for each left row that
    references it. The result has the left key.

    Late: a change that is out of order for its key in a versioned side is dropped and counted. Null
    key: a table has none; a left row without a foreign key emits nothing (inner; dropped and counted if
    it had none before either) or is kept unmatched (left). Tombstone: on the left, a tombstone
    if there was a row (inner: with a foreign key); on the right, for each row that references it, a
    tombstone (inner) or the unmatched row (left), again for each repeated tombstone.

    Args:
        kind: ``inner`` or ``left``.
        foreign_key: SQL expressions over the left columns, one per column of the right key. A row with
            a null in any of them references nothing.
    """

    consumer = Consumer.FOREIGN_KEY_JOIN
    what = "foreign-key join"
    kinds = ("inner", "left")

    foreign_key: tuple[str, ...] = ()

    def _check_match(self) -> None:
        if len(self.foreign_key) != len(self.right.key):
            raise TopologyError(
                f"{self.name}: the foreign key {list(self.foreign_key)} must have one expression for "
                f"each key column of {self.right.name!r}, which has {list(self.right.key)}"
            )
        own = Selection(self.name, self.left.name, tuple(self.left.schema.fields))
        for expression in self.foreign_key:
            if not expression.strip():
                raise TopologyError(
                    f"{self.name}: expected the foreign key to be columns of {self.left.name!r} or "
                    f"expressions over them, got {list(self.foreign_key)}; correct it"
                )
            own.check(expression)
            side = _SIDE.search(_TEXT.sub("", expression))
            if side and side[1].lower() not in map(str.lower, self.left.schema.names):
                raise TopologyError(
                    f"{self.name}: the foreign key {expression!r} names a side of the join, but can "
                    f"only use columns of {self.left.name!r}; remove the prefix 'left.' or 'right.'"
                )
        types = [own.type_of(expression) for expression in self.foreign_key]
        if not same_types(types, self.right.key_types):
            theirs = [t.simpleString() for t in self.right.key_types]
            raise TopologyError(
                f"{self.name}: the foreign key {list(self.foreign_key)} has the types "
                f"{[t.simpleString() for t in types]}, but the key of {self.right.name!r} has "
                f"{theirs}; cast it, for example 'cast({self.foreign_key[0]} as {theirs[0]})'"
            )
        self.projection()

    @property
    def partitioning(self) -> tuple[Any, ...]:
        """That of the left side: a result is in the partition of its left row, as in Kafka Streams,
        wherever the right row is."""
        return self.left.partitioning

    @property
    def specification(self) -> ForeignKeyJoinSpec:
        return ForeignKeyJoinSpec(
            **self._sides,
            foreign_key=self.foreign_key,
            monotone_timestamps=self.monotone_timestamps,
            emit=self.emit,
        )

    def describe(self) -> str:
        by = ", ".join(self.foreign_key)
        return f"{self.left.name}, each row with the row of {self.right.name} that {by} references."


# Join of histories


@dataclass(frozen=True)
class HistoryJoin(TableTableJoin):
    """A temporal join of two versioned tables: the result's versions are the intersections of the
    validity intervals of both sides.

    A record of either side changes the table from its timestamp (inclusive) to the next version of its
    key (exclusive). The result is recomputed at each start of a version of either side in that
    interval. Unlike Kafka Streams' table-table join, the final versions depend neither on the order of
    arrival nor on how arrivals are split into runs. A run emits each version once.

    Late: an out-of-order record is processed like any other; the result refuses versions older than its
    history retention, in the stream time of both sides together. Null key: a table has none. Tombstone:
    ends the version of its side; the result has a tombstone from then on if the kind of join needs that
    side.

    Args:
        kind: ``inner``, ``left`` or ``outer``.
        materialized: None: the shorter history retention of the two sides.
    """

    consumer = Consumer.HISTORY_JOIN

    def __post_init__(self) -> None:
        super().__post_init__()
        for side in self.inputs:
            if not side.versioned:
                raise TopologyError(
                    f"{self.name}: history='complete' needs two versioned tables, but {side.name!r} "
                    "keeps only its latest rows; declare it as VersionedTable (for an operator's "
                    "result: materialized=Materialized(history_retention=...)), or remove history"
                )
        if self.materialized is not None and self.materialized.history_retention is None:
            raise TopologyError(
                f"{self.name}: history='complete' needs a versioned result, got a Materialized without "
                "history_retention; set Materialized(history_retention=...), or remove materialized"
            )
        self._check_length()
        if self.monotone_timestamps:
            raise TopologyError(
                f"{self.name}: monotone_timestamps prevents results with earlier timestamps, but "
                "history='complete' emits them for late records; remove one of the two settings"
            )

    def _check_length(self) -> None:
        kept = None if self.materialized is None else self.materialized.history_retention
        if kept is None:
            return
        for side in self.inputs:
            for partition, (wanted, there) in pairs(kept, side.retention):
                if wanted > there:
                    raise TopologyError(
                        f"{self.name}: expected a history_retention of at most {there}{partition}, "
                        f"the history retention of {side.name!r}, got {wanted}: older results would "
                        f"need expired versions; shorten it, or lengthen that of {side.name!r}"
                    )

    @property
    def specification(self) -> HistoryJoinSpec:
        return HistoryJoinSpec(**self._sides, emit=self.emit)

    @property
    def monotone(self) -> bool:
        return False

    @property
    def _inherited(self) -> Duration:
        one, other = (side.history_retention for side in self.inputs)
        both = isinstance(one, timedelta) and isinstance(other, timedelta)
        return min(one, other) if both else one

    def describe(self) -> str:
        return (
            f"{self.left.name} and {self.right.name} by their common key ({self.kind}), over their "
            "whole histories."
        )
