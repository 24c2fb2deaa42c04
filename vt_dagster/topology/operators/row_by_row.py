"""What filter and map_values have in common: one row in, one row out."""

from __future__ import annotations

from abc import ABC
from typing import Any

from pyspark.sql.types import StructType

from vt_dagster.errors import TopologyError
from vt_dagster.topology.operators.base import OneInput, make_table, valid_until_of
from vt_dagster.topology.windowing import Window


class RowByRow(OneInput, ABC):
    """What passes on what its input says of a row, unless it is materialized."""

    @property
    def stored(self) -> bool:
        return self.materialized is not None

    @property
    def window(self) -> Window | None:
        return self.source.window

    def _rows(self, schema: StructType, shown: dict[str, Any]) -> Any:
        source, materialized = self.source, self.materialized
        more: dict[str, Any] = {}
        if (column := valid_until_of(source)) is not None:
            kept = self.lineage().get(column) == [(source.name, column)]
            if not kept or (materialized is not None and materialized.history_retention is None):
                raise TopologyError(
                    f"{self.name}: expected a versioned table with the column {column!r}, by which the "
                    f"versions of {source.name!r} end (valid_until), got one without it, or without "
                    "versions; select it as it is, and materialize with a history_retention"
                )
            more["valid_until"] = column
        about = {"inherited": source.retention, **more}
        return make_table(self, source, schema, materialized, shown, **about)
