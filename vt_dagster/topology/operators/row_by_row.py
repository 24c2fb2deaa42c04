"""What filter and map_values have in common: one row in, one row out."""

from __future__ import annotations

from abc import ABC
from typing import Any

from pyspark.sql.types import StructType

from vt_dagster.topology.operators.base import OneInput, make_table
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
        source = self.source
        return make_table(self, source, schema, self.materialized, shown, inherited=source.retention)
