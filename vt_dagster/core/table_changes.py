"""What a join of two tables knows at each moment of a run: the states of both sides.

A run takes the changes of both sides in one order (``ORDER``). The *state* of a key is the struct of
its value columns and timestamp, null where it has no row. In the middle of a run it is what the last
change made it; before its first change, that change's ``old``; without any change, its current row.
So nothing has to be kept from before a run, and ``current`` may be as new as the run's end.

"No row" and "no change seen" must not be mixed up: a state travels in a container, a struct with one
field, which itself is null where a row says nothing about that side.
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

LEFT, RIGHT = "left", "right"
TAKEN = "_taken"
"""Whether a change counts for a join: it is its key's latest, or its table is not versioned."""
EXISTS = "_exists"
_STATE, _ROW = "state", "_row"
_BEHIND = 2**63 - 1
"""The ``_arrival`` of a current row: behind all changes."""


@dataclass(frozen=True)
class TableInput:
    """One side of a join of two tables.

    Args:
        changes: its log rows of this run: ``key columns, value columns, timestamp, partition,
            is_tombstone, is_latest, old`` and ``ORDER``.
        current: its rows at the end of the run or later in no key that the run changes:
            ``key columns, value columns, timestamp, partition``; None = every row is among the changes.
        values: the names of the value columns, without timestamp.
        versioned: whether changes out of order (``is_latest`` false) are dropped.
        horizon: of a row of ``current``, from when on its table remembers; None = all.
    """

    changes: DataFrame
    current: DataFrame | None
    key: Sequence[str]
    values: Sequence[str]
    versioned: bool
    horizon: Column | None = None

    @property
    def state_columns(self) -> list[str]:
        """The fields of a state."""
        return [*self.values, TIMESTAMP]

    def taken(self) -> Column:
        """Whether a change row counts."""
        return F.col(IS_LATEST) if self.versioned else F.lit(True)

    def row_state(self) -> Column:
        """The state that a current row is."""
        return F.struct(*columns(self.state_columns))

    def new_state(self) -> Column:
        """The state that a change row makes."""
        return F.when(~F.col(IS_TOMBSTONE), self.row_state())

    def old_state(self) -> Column:
        """The state that a change row found."""
        fields = [F.col(OLD).getField(c).alias(c) for c in self.state_columns]
        return F.when(F.col(OLD).isNotNull(), F.struct(*fields))


def over_struct(
    rows: DataFrame,
    key: Sequence[str],
    struct: Column,
    fields: Sequence[str],
    added: Mapping[str, Column],
) -> DataFrame:
    """Adds columns that are made of a struct's fields under their own names, besides the key.

    Nothing else is called like them meanwhile: expressions of users name a row's columns.

    Args:
        added: by name, over those columns and ``EXISTS``: whether there is a struct.
    """
    found = rows.select(
        F.struct(*columns(rows.columns)).alias(_ROW),
        *columns(key),
        *[struct.getField(f).alias(f) for f in fields],
        struct.isNotNull().alias(EXISTS),
    )
    return found.select(f"{_ROW}.*", *[c.alias(name) for name, c in added.items()])


def over_old(
    changes: DataFrame, key: Sequence[str], values: Sequence[str], columns: Mapping[str, str]
) -> DataFrame:
    """Adds SQL expressions over the row that each change replaced.

    Args:
        columns: name -> expression over key columns, value columns and ``timestamp``. Where there was
            no row, all but the key are null, and what an expression makes of that means nothing.
    """
    added = {name: F.expr(expression) for name, expression in columns.items()}
    return over_struct(changes, key, F.col(OLD), [*values, TIMESTAMP], added)


def columns(names: Sequence[str]) -> list[Column]:
    """Columns by names that may hold dots."""
    return [F.col(f"`{n}`") for n in names]


def match_names(key: Sequence[str]) -> list[str]:
    """What the columns are called that rows of both sides meet on."""
    return [f"_on{i}" for i in range(len(key))]


def match_columns(key: Sequence[str]) -> list[Column]:
    """A side's key columns under those names."""
    return [c.alias(n) for c, n in zip(columns(key), match_names(key), strict=True)]


def timeline(side: TableInput, name: str, asked: DataFrame) -> DataFrame:
    """All that the run knows about a side's states: its changes, and the current rows asked for.

    Plan: one left-semi join of ``current`` with ``asked``, before anything else; none without it.

    Args:
        name: of the side; ``state_of`` finds its columns by it.
        asked: rows with the ``match_names`` of the side's key; other keys' current rows are not read.

    Returns:
        ``match_names, timestamp, partition, ORDER, _taken`` and two containers: the state that a
        change made (null: it made none) and the state that it found. A current row has the latter
        alone, behind all changes, and no ``_taken``: it is no trigger.
    """
    now, found = _containers(name)
    rows = side.changes.select(
        *match_columns(side.key),
        TIMESTAMP,
        PARTITION,
        *ORDER,
        side.taken().alias(TAKEN),
        F.when(side.taken(), _contain(side.new_state())).alias(now),
        _contain(side.old_state()).alias(found),
    )
    if side.current is None:
        return rows
    touched = side.current.select(
        *match_columns(side.key),
        _contain(side.row_state()).alias(found),
        F.lit(_BEHIND).alias(ARRIVAL),
    ).join(asked.select(*match_names(side.key)), match_names(side.key), "left_semi")
    return union(rows, touched)


def state_of(name: str, by: Sequence[str], order: Sequence[str] = ORDER) -> Column:
    """The state of a side as of a row of the run, the row itself included; null: it has no row.

    Of two sides, both come from one pass over the rows in order. Current rows sort behind all
    changes, so the first state found is a current row's only where the key has no change. That
    look over the whole of a key's rows is made once a key; from each row on it would be quadratic.

    Args:
        by: the columns that rows of both sides meet on.
        order: ``ORDER``, and what may come behind it.
    """
    now, found = _containers(name)
    rows = W.partitionBy(*by).orderBy(*order)
    so_far = rows.rowsBetween(W.unboundedPreceding, W.currentRow)
    whole = rows.rowsBetween(W.unboundedPreceding, W.unboundedFollowing)
    return F.coalesce(
        F.last(now, ignorenulls=True).over(so_far), F.first(found, ignorenulls=True).over(whole)
    ).getField(_STATE)


def comes_from(name: str) -> Column:
    """Whether a row of a run is a change of a side, or a current row of it."""
    return F.col(_containers(name)[1]).isNotNull()


def found_state(name: str) -> Column:
    """The state that a row of a ``timeline`` found: its key's before the change."""
    return F.col(_containers(name)[1]).getField(_STATE)


def result_rows(
    rows: DataFrame, *, key: Mapping[str, Column], select: Sequence[tuple[str, str]]
) -> DataFrame:
    """The rows that a join returns.

    Args:
        rows: ``left, right`` (structs), ``timestamp, partition, is_tombstone, _outcome, ORDER, _turn``.
        key: the left's key columns, which are the result's: every row has them.
        select: the result's (name, SQL expression over ``left.*`` and ``right.*``); values are null
            in tombstones and in rows that are no result.
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
