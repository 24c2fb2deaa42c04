"""Training sets: records of a stream, each joined point-in-time with many versioned tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from vt_dagster.columns import RESERVED, TIMESTAMP, VALID_FROM, VALID_TO
from vt_dagster.errors import TopologyError
from vt_dagster.topology.durations import check_duration
from vt_dagster.topology.model import Stream, Table, VersionedTable
from vt_dagster.topology.node import listed, require_name
from vt_dagster.topology.operators.stream_table_join import AsKnown, AtOrBefore, check_match
from vt_dagster.topology.options import Consumer, check_types, require_readable
from vt_dagster.topology.schema import same_types


@dataclass(frozen=True)
class FeatureView:
    """A versioned table in a training set: each row gets the version as of its timestamp.

    Args:
        table: the table.
        key: columns of the spine with the table's key, in its order; None = columns of the same names.
        columns: columns of the table, and ``valid_from``; none = all value columns.
        prefix: prefix of their names in the training set.
        as_known: see ``StreamTableJoin``. The default is ``when_recorded``, so that a row contains
            nothing that was unknown when it was recorded. A duration needs no grace period.
        max_age: an older version gives nulls (a version exactly that old does not).
        at: ``at_or_before`` or ``before`` the row's timestamp. A later version would leak the future
            into the row.
    """

    table: VersionedTable
    key: Sequence[str] | str | None = None
    columns: Sequence[str] = ()
    prefix: str = ""
    as_known: AsKnown = "when_recorded"
    max_age: timedelta | None = None
    at: AtOrBefore = "at_or_before"

    def __post_init__(self) -> None:
        table: Any = self.table
        if not isinstance(table, VersionedTable):
            raise TopologyError(
                f"expected a VersionedTable with the features, got {table!r}; declare it as "
                "VersionedTable with a history_retention"
            )
        check_types(self, f"the features of {table.name}")
        object.__setattr__(self, "key", listed(table.key if self.key is None else self.key))
        object.__setattr__(self, "columns", tuple(self.columns))
        there = self._values
        unknown = [c for c in self.columns if c not in (*there, VALID_FROM)]
        if unknown:
            raise TopologyError(
                f"{table.name}: expected features among {[*there, VALID_FROM]}, got {unknown}; correct "
                "columns"
            )
        require_readable(table.name, Consumer.TRAINING_SET, table)
        check_match(table.name, table, self.as_known, self.max_age, self.at)

    @property
    def of_spine(self) -> tuple[str, ...]:
        """The spine's columns with the table's key."""
        return tuple(self.key or ())

    @property
    def chosen(self) -> tuple[str, ...]:
        """The selected columns of the table."""
        return tuple(self.columns) or tuple(self._values)

    @property
    def _values(self) -> list[str]:
        return [c for c in self.table.value_columns if c.lower() != TIMESTAMP]

    @property
    def named(self) -> list[tuple[str, str]]:
        """The selected columns as (name in the training set, name in the table)."""
        return [(f"{self.prefix}{c}", c) for c in self.chosen]

    def declared(self) -> dict[str, Any]:
        """Returns the declaration for the manifest."""
        return {
            "table": self.table.name,
            "key": list(self.of_spine),
            "columns": list(self.chosen),
            "prefix": self.prefix,
            "as_known": str(self.as_known),
            "max_age": None if self.max_age is None else str(self.max_age),
            "at": self.at,
        }


@dataclass(frozen=True)
class TrainingSet:
    """The declaration of a training set.

    Args:
        name: name of the training set.
        spine: the stream whose records are the rows, duplicates included, tombstones excluded.
        features: the feature views joined to each row.
        matured_after: include only rows with timestamp + this <= the stream time of their partition of
            the spine, so that labels have had this long to arrive.

    Raises:
        TopologyError: a key, column or name does not fit.
    """

    name: str
    spine: Stream
    features: tuple[FeatureView, ...]
    matured_after: timedelta | None = None

    def __post_init__(self) -> None:
        check_types(self, f"{self.name}")
        require_name(self.name, "a training set")
        spine: Any = self.spine
        if not isinstance(spine, Stream) or isinstance(spine, Table):
            raise TopologyError(
                f"{self.name}: expected a Stream as the spine, whose records are the rows, got "
                f"{getattr(spine, 'name', spine)!r}; convert a table with to_stream(name=...)"
            )
        if not self.features:
            raise TopologyError(f"{self.name}: expected features to join, got none; pass FeatureViews")
        if self.matured_after is not None:
            check_duration(self.name, "matured_after", self.matured_after)
        for view in self.features:
            self._check_key(view)
        require_readable(self.name, Consumer.SPINE, spine)
        lowered = [n.lower() for n in self.columns]  # Spark ignores case
        taken = sorted({*lowered[len(self.own) :]} & (RESERVED - {VALID_FROM, VALID_TO}))
        if taken:
            raise TopologyError(
                f"{self.name}: expected features without names of the log's own columns, got {taken}; "
                "set prefix or columns of the feature view"
            )
        twice = sorted({n for n in self.columns if lowered.count(n.lower()) > 1})
        if twice:
            raise TopologyError(
                f"{self.name}: expected each column once, got {twice} more than once; set prefix or "
                "columns of the feature view"
            )

    def _check_key(self, view: FeatureView) -> None:
        fields = {f.name: f.dataType for f in self.spine.schema.fields}
        key = view.of_spine
        unknown = [k for k in key if k not in fields]
        if unknown or not same_types([fields[k] for k in key if k in fields], view.table.key_types):
            own = zip(view.table.key, view.table.key_types, strict=True)
            wanted = [f"{k} {kind.simpleString()}" for k, kind in own]
            raise TopologyError(
                f"{self.name}: expected columns of {self.spine.name!r} that hold the key of "
                f"{view.table.name!r}, {wanted}, got {list(key)}; set key to columns of "
                f"{self.spine.schema.simpleString()}"
            )

    @property
    def own(self) -> list[str]:
        """The spine's columns in the training set."""
        return [*(c for c in self.spine.schema.names if c.lower() != TIMESTAMP), TIMESTAMP]

    @property
    def columns(self) -> list[str]:
        """The columns of the training set, in order."""
        return [*self.own, *(name for view in self.features for name, _ in view.named)]

    @property
    def labels(self) -> list[str]:
        """A name of each feature view: that of its table; with the prefix if there are several views of
        the table, and with its position among the features if that is not unique either."""
        tables = [view.table.name for view in self.features]
        names = [
            view.table.name if tables.count(view.table.name) == 1 else f"{view.prefix}{view.table.name}"
            for view in self.features
        ]
        return [n if names.count(n) == 1 else f"{n}_{i + 1}" for i, n in enumerate(names)]

    @property
    def inputs(self) -> list[Stream]:
        """The spine and the tables, each once."""
        nodes = [self.spine, *(view.table for view in self.features)]
        return list({node.name: node for node in nodes}.values())

    def declared(self) -> dict[str, Any]:
        """Returns the declaration for the manifest."""
        return {
            "spine": self.spine.name,
            "columns": self.columns,
            "matured_after": None if self.matured_after is None else str(self.matured_after),
            "features": [view.declared() for view in self.features],
        }
