"""Base of the aggregates: a group key, and a result with that key."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql.types import StructField, StructType

from vt_dagster.topology.node import Emit
from vt_dagster.topology.operators.base import Materialized, OneInput, check_not_time, make_table
from vt_dagster.topology.projection import Selection


@dataclass(frozen=True)
class Aggregate(OneInput, ABC):
    """Aggregates rows by a key, which may differ from the input's key.

    Args:
        group_key: key columns as ``column`` or ``expression as name``.
        partitions: number of partitions of a result with a new key; None = that of the input.
        partition_by: SQL expression for the partition of a result with a new key; None = hash of
            the key.
    """

    group_key: tuple[str, ...] = field(default=(), kw_only=True)
    emit: Emit = field(default="every_update", kw_only=True)
    partitions: int | None = field(default=None, kw_only=True)
    partition_by: str | None = field(default=None, kw_only=True)

    @property
    def partitioning(self) -> tuple[Any, ...] | None:
        return None if self.group_key else super().partitioning

    def keys(self) -> Selection:
        """The key columns, without ``window_start`` and ``window_end``."""
        fields = tuple(self.source.schema.fields)
        chosen = self.group_key or tuple(self.source.key)
        return Selection(self.name, self.source.name, fields, chosen)

    def _grouped(
        self,
        keys: Sequence[StructField],
        values: Sequence[StructField],
        materialized: Materialized | None,
        shown: dict[str, Any],
    ) -> Any:
        check_not_time(self.name, [f.name for f in values])
        about: dict[str, Any] = {"key": [k.name for k in keys]}
        if self.group_key:
            about["partitions"] = self.partitions or self.source.partitions
            about["partition_by"] = self.partition_by
        schema = StructType([*keys, *values])
        return make_table(self, self.source, schema, materialized, shown, **about)

    def _lineage(self, aggregates: tuple[tuple[str, str], ...]) -> dict[str, list[tuple[str, str]]]:
        keys = self.keys()
        return keys.lineage() | {c: keys.mentioned(e) for c, e in aggregates}
