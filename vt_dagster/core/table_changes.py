"""The current row of each side of a table join, as of each record of a run.

A run processes the changes of both sides in one order (``ORDER``). The *state* of a key is the struct
of its value columns and timestamp, null if it has no row. During a run it is the result of the last
change; before the key's first change, that change's ``old``; without any change, its current row. No
state from before the run is needed, and ``current`` may be as new as the run's end.

"No row" and "no change yet" must be distinguished: a state is wrapped in a container, a struct with one
field. The container is null if a row contains no information about that side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as W
from pyspark.sql import functions as F

from vt_dagster.columns import (
    ARRIVAL,
    IS_LATEST,
    IS_TOMBSTONE,
    OLD,
    ORDER,
    OUTCOME,
    PARTITION,
    TIMESTAMP,
    TURN,
)
from vt_dagster.core.arrival_order import Outcome, union
from vt_dagster.core.versioned_table import repeats_version

LEFT, RIGHT = "left", "right"
TAKEN = "_taken"
"""Whether a change counts for a join: it is its key's latest, or its table is not versioned."""
REPEATS = "_repeats"
"""Whether a change repeats its key's version; null for a current row."""
EXISTS = "_exists"
_STATE, _ROW = "state", "_row"
_BEHIND = 2**63 - 1
"""The ``_arrival`` of a current row: larger than that of any change."""


@dataclass(frozen=True)
class TableInput:
    """One side of a join of two tables.

    Args:
        changes: its log rows of this run: ``key columns, value columns, timestamp, partition,
            is_tombstone, is_latest, old`` and ``ORDER``.
        current: its rows at the end of the run; table-table and foreign-key joins use those of keys
            without a change:
            ``key columns, value columns, timestamp, partition``; None = the run has all changes of the
            table, from the first one on, so no key had a row before.
        values: the names of the value columns, without timestamp.
        versioned: whether out-of-order changes (``is_latest`` false) are dropped.
        horizon: for a row of ``current``, the time from which on its table retains history; None = all.
        new_version_on: see ``VersionedTable``: a change that repeats its version gives no result.
    """

    changes: DataFrame
    current: DataFrame | None
    key: Sequence[str]
    values: Sequence[str]
    versioned: bool
    horizon: Column | None = None
    new_version_on: Sequence[str] | None = None

    @property
    def state_columns(self) -> list[str]:
        """The fields of a state."""
        return [*self.values, TIMESTAMP]

    def taken(self) -> Column:
        """Returns whether a change row counts."""
        return F.col(IS_LATEST) if self.versioned else F.lit(True)

    def repeats(self) -> Column:
        """Returns whether a change row repeats its key's version."""
        on = self.new_version_on
        return F.lit(False) if on is None else repeats_version(on)

    def row_state(self) -> Column:
        """Returns the state of a current row."""
        return F.struct(*columns(self.state_columns))

    def new_state(self) -> Column:
        """Returns the state after a change row."""
        return F.when(~F.col(IS_TOMBSTONE), self.row_state())

    def existed(self) -> Column:
        """Returns whether a change row replaced a row. Reads no value of that row."""
        return F.col(OLD).getField(TIMESTAMP).isNotNull()

    def old_state(self) -> Column:
        """Returns the state before a change row."""
        fields = [F.col(OLD).getField(c).alias(c) for c in self.state_columns]
        return F.when(F.col(OLD).isNotNull(), F.struct(*fields))


def over_struct(
    rows: DataFrame,
    key: Sequence[str],
    struct: Column,
    fields: Sequence[str],
    added: Mapping[str, Column],
    exists: Column | None = None,
) -> DataFrame:
    """Adds columns computed from a struct's fields under their own names, and the key.

    No other column has these names during the computation, because user expressions use a row's names.

    Args:
        added: by name, an expression over those columns and ``EXISTS``: whether the struct is not null.
        exists: gives the same without reading all of the struct; None = the struct itself is read.
    """
    found = rows.select(
        F.struct(*columns(rows.columns)).alias(_ROW),
        *columns(key),
        *[struct.getField(f).alias(f) for f in fields],
        (struct.isNotNull() if exists is None else exists).alias(EXISTS),
    )
    return found.select(f"{_ROW}.*", *[c.alias(name) for name, c in added.items()])


def over_old(
    changes: DataFrame, key: Sequence[str], values: Sequence[str], columns: Mapping[str, str]
) -> DataFrame:
    """Adds SQL expressions over the row that each change replaced.

    Args:
        columns: name -> expression over key columns, value columns and ``timestamp``. Without a
            previous row all but the key are null, and the result of an expression is meaningless.
    """
    added = {name: F.expr(expression) for name, expression in columns.items()}
    return over_struct(changes, key, F.col(OLD), [*values, TIMESTAMP], added)


def columns(names: Sequence[str]) -> list[Column]:
    """Returns columns by names that may contain dots."""
    return [F.col(f"`{n}`") for n in names]


def match_names(key: Sequence[str]) -> list[str]:
    """Returns the common names of the key columns by which both sides are joined."""
    return [f"_on{i}" for i in range(len(key))]


def match_columns(key: Sequence[str]) -> list[Column]:
    """Returns a side's key columns under ``match_names``."""
    return [c.alias(n) for c, n in zip(columns(key), match_names(key), strict=True)]


def timeline(side: TableInput, name: str, requests: DataFrame) -> DataFrame:
    """Returns all states of a side that the run knows: its changes, and the requested current rows.

    Plan: one left-semi join of ``current`` with ``requests``, before anything else; none without it.

    Args:
        name: of the side; ``state_of`` derives its columns from it.
        requests: rows with the ``match_names`` of the side's key; current rows of other keys are not
            read.

    Returns:
        ``match_names, timestamp, partition, ORDER, _taken, _repeats`` and two containers: the state
        after a change (null: the change does not count) and the state before it, without values if
        ``current`` is None. A current row has only the latter, after all changes, and no ``_taken``: it
        does not trigger.
    """
    now, found = _containers(name)
    nothing = F.when(side.existed(), F.lit(True))
    rows = side.changes.select(
        *match_columns(side.key),
        TIMESTAMP,
        PARTITION,
        *ORDER,
        side.taken().alias(TAKEN),
        side.repeats().alias(REPEATS),
        F.when(side.taken(), _contain(side.new_state())).alias(now),
        _contain(nothing if side.current is None else side.old_state()).alias(found),
    )
    if side.current is None:
        return rows
    touched = side.current.select(
        *match_columns(side.key),
        _contain(side.row_state()).alias(found),
        F.lit(_BEHIND).alias(ARRIVAL),
    ).join(requests.select(*match_names(side.key)), match_names(side.key), "left_semi")
    return union(rows, touched)


def state_of(side: TableInput, name: str, by: Sequence[str], order: Sequence[str] = ORDER) -> Column:
    """Returns the state of a side as of a row of the run, including the row itself; null = no row.

    The states of both sides come from one pass over the rows in order. Current rows sort after all
    changes, so the first "before" state is that of a current row only if the key has no change. The
    frame over all rows of a key is computed once per key; a frame that starts at each row would be
    quadratic.

    Args:
        by: the columns by which both sides are joined.
        order: ``ORDER``, possibly followed by further columns.
    """
    now, found = _containers(name)
    rows = W.partitionBy(*by).orderBy(*order)
    so_far = rows.rowsBetween(W.unboundedPreceding, W.currentRow)
    whole = rows.rowsBetween(W.unboundedPreceding, W.unboundedFollowing)
    state = F.last(now, ignorenulls=True).over(so_far)
    if side.current is not None:
        state = F.coalesce(state, F.first(found, ignorenulls=True).over(whole))
    return state.getField(_STATE)


def comes_from(name: str) -> Column:
    """Returns whether a row of a run is a change or a current row of this side."""
    return F.col(_containers(name)[1]).isNotNull()


def found_state(name: str) -> Column:
    """Returns the state of a side before the change in a row of its ``timeline``; for a current row,
    that row's state. Null = no row before, or a row of the other side."""
    return F.col(_containers(name)[1]).getField(_STATE)


def result_rows(
    rows: DataFrame, *, key: Mapping[str, Column], select: Sequence[tuple[str, str]]
) -> DataFrame:
    """Returns the result rows of a join.

    Args:
        rows: ``left, right`` (structs), ``timestamp, partition, is_tombstone, _outcome, ORDER, _turn``.
        key: the left's key columns, which are the result's: every row has them.
        select: the result's (name, SQL expression over ``left.*`` and ``right.*``); values are null
            in tombstones and in rows without a result.
    """
    has_value = (F.col(OUTCOME) == Outcome.APPLIED) & ~F.col(IS_TOMBSTONE)
    return rows.select(
        *[
            (key[name] if name in key else F.when(has_value, F.expr(sql))).alias(name)
            for name, sql in select
        ],
        TIMESTAMP,
        PARTITION,
        IS_TOMBSTONE,
        OUTCOME,
        *ORDER,
        TURN,
    )


def _containers(name: str) -> tuple[str, str]:
    return f"_{name}_now", f"_{name}_found"


def _contain(state: Column) -> Column:
    return F.struct(state.alias(_STATE))
