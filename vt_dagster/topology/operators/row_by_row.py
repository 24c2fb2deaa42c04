"""What filter and map_values have in common: one row in, one row out."""

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
    """What passes on what its input says of a row, unless it is materialized."""

    @property
    def stored(self) -> bool:
        return self.materialized is not None

    @property
    def window(self) -> Window | None:
        return self.source.window

    @property
    def condition(self) -> str:
        """The SQL condition that decides which rows pass; empty = all do."""
        return ""

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
        if (columns := new_version_on_of(source)) is not None:
            self._check_repeats(columns)
            more["new_version_on"] = columns
        about = {"inherited": source.retention, **more}
        return make_table(self, source, schema, materialized, shown, **about)

    def _check_repeats(self, columns: Sequence[str]) -> None:
        """Refuses a result in which the records that repeat a version could differ from it.

        Args:
            columns: by which versions of the source begin.
        """
        source, materialized, lineage = self.source, self.materialized, self.lineage()
        lost = [c for c in columns if lineage.get(c) != [(source.name, c)]]
        if lost or (materialized is not None and materialized.history_retention is None):
            raise TopologyError(
                f"{self.name}: expected a versioned table with the columns {list(columns)}, by which "
                f"versions of {source.name!r} begin (new_version_on), got one without "
                f"{lost or 'versions'}; select them as they are, and materialize with a "
                "history_retention"
            )
        # Wherever the text has the name, also where it means something else.
        others = [c for c in source.schema.names if c not in (*columns, *source.key)]
        named = [
            c
            for c in dict.fromkeys((*others, TIMESTAMP))
            if re.search(rf"(?<!\w){re.escape(c)}(?!\w)", self.condition, re.IGNORECASE)
        ]
        if named:
            raise TopologyError(
                f"{self.name}: expected a condition over {[*source.key, *columns]}, which are the same "
                f"in all records of a version of {source.name!r} (new_version_on), got one over "
                f"{named}: {self.condition!r}; name those in new_version_on too, or filter what is "
                "joined with it"
            )
