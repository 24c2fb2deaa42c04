"""Base of filter and map_values: one row in, one row out."""

from __future__ import annotations

import re
from abc import ABC
from collections.abc import Sequence
from typing import Any

from pyspark.sql.types import StructType

from vt_dagster.columns import TIMESTAMP
from vt_dagster.errors import TopologyError
from vt_dagster.topology.operators.base import (
    OneInput,
    make_table,
    new_version_on_of,
    valid_until_of,
)
from vt_dagster.topology.windows import Window


class RowByRow(OneInput, ABC):
    """A stateless operator: without ``materialized`` it uses the versions of its input."""

    @property
    def stored(self) -> bool:
        return self.materialized is not None

    @property
    def window(self) -> Window | None:
        return self.source.window

    @property
    def condition(self) -> str:
        """SQL condition of the rows that pass; empty = all."""
        return ""

    def _rows(self, schema: StructType, shown: dict[str, Any]) -> Any:
        source, materialized = self.source, self.materialized
        more: dict[str, Any] = {}
        if (column := valid_until_of(source)) is not None:
            kept = self.lineage().get(column) == [(source.name, column)]
            if not kept or (materialized is not None and materialized.history_retention is None):
                raise TopologyError(
                    f"{self.name}: expected a versioned result with the column {column!r}, the "
                    f"valid_until of {source.name!r}, got one without the column or without versions; "
                    "select the column unchanged, and materialize with a history_retention"
                )
            more["valid_until"] = column
        if (columns := new_version_on_of(source)) is not None:
            self._check_repeats(columns)
            more["new_version_on"] = columns
        about = {"inherited": source.retention, **more}
        return make_table(self, source, schema, materialized, shown, **about)

    def _check_repeats(self, columns: Sequence[str]) -> None:
        """Raises TopologyError if a record without a version could differ from its version.

        Args:
            columns: ``new_version_on`` of the source.
        """
        source, materialized, lineage = self.source, self.materialized, self.lineage()
        lost = [c for c in columns if lineage.get(c) != [(source.name, c)]]
        if lost or (materialized is not None and materialized.history_retention is None):
            raise TopologyError(
                f"{self.name}: expected a versioned result with the columns {list(columns)}, the "
                f"new_version_on of {source.name!r}, got one without {lost or 'versions'}; select the "
                "columns unchanged, and materialize with a history_retention"
            )
        # A textual match: it may refuse a condition that has the name in another meaning, never the
        # reverse.
        others = [c for c in source.schema.names if c not in (*columns, *source.key)]
        named = [
            c
            for c in dict.fromkeys((*others, TIMESTAMP))
            if re.search(rf"(?<!\w){re.escape(c)}(?!\w)", self.condition, re.IGNORECASE)
        ]
        if named:
            raise TopologyError(
                f"{self.name}: expected a condition over {[*source.key, *columns]}, the columns that "
                f"are equal in all records of a version of {source.name!r} (new_version_on), got one "
                f"over {named}: {self.condition!r}; add them to new_version_on, or filter after a join"
            )
