"""Table-table join: the current rows of two tables with the same key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pyspark.sql.types import StructField, StructType

from vt_dagster.topology.node import Emit
from vt_dagster.topology.operators.base import (
    Materialized,
    check_emit,
    make_table,
    need_each_record,
    need_table,
)
from vt_dagster.topology.operators.join import Join, check_keys, check_kind


@dataclass(frozen=True)
class TableTableJoin(Join):
    """Joins the current rows of two tables with the same key, again at each change (KIP-914).

    The result's timestamp is the larger of those of the change and of the other side's row.

    Late: a change that is out of order for its key in a versioned side is dropped and counted; a
    versioned result refuses records older than its history retention. Null key: a table has none.
    Tombstone: emits a tombstone if the kind of join needs the deleted side, again for each repeated
    tombstone; emits nothing if neither side has or had a row.

    Args:
        kind: ``inner``, ``left`` or ``outer``.
        materialized: None: a plain table; with a history retention: a versioned table.
        monotone_timestamps: True: timestamps of a key's results never decrease, tombstones included;
            False: the timestamps of Kafka Streams; None: True if both sides are versioned.
        emit: ``every_update``, or ``per_run``: only the last update of each key in a run.
    """

    called = ("table_join",)

    materialized: Materialized | None = None
    monotone_timestamps: bool | None = None
    emit: Emit = "every_update"

    def __post_init__(self) -> None:
        need_table(self.name, "the left side of a table-table join", self.left)
        need_table(self.name, "the right side of a table-table join", self.right)
        check_kind(self.name, "table-table join", self.kind, ("inner", "left", "outer"))
        need_each_record(self.name, "a table-table join", self.left)
        need_each_record(self.name, "a table-table join", self.right)
        check_emit(self.name, self.emit)
        object.__setattr__(self, "select", tuple(self.select))
        check_keys(self.name, self.left, self.right)
        self.projection()

    @property
    def monotone(self) -> bool:
        """Whether timestamps of a key's results never decrease."""
        if self.monotone_timestamps is None:
            return self.left.versioned and self.right.versioned
        return self.monotone_timestamps

    @property
    def partitioning(self) -> tuple[Any, ...] | None:
        return self.left.partitioning if self.copartitioned else None

    def result(self, **shown: Any) -> Any:
        fields = self.projection().fields()
        if self.kind == "outer":
            fields = [StructField(f.name, f.dataType, True) for f in fields]
        return self.made(StructType(fields), shown)

    def made(self, schema: StructType, shown: dict[str, Any]) -> Any:
        """Makes the result table."""
        return make_table(self, self.left, schema, self.materialized, shown)

    def describe(self) -> str:
        return (
            f"{self.left.name} and {self.right.name} by their common key ({self.kind}), joined again "
            "at each change of either side."
        )
