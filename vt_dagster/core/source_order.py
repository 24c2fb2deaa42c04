"""Source order: a table can follow the order of its source instead of the order of timestamps.

Offsets, Delta versions and snapshots give the order of events at the source; timestamps give the times
at which rows were valid. The two may disagree: a deletion has the time of a snapshot, a commit or a
message, a row its own. A record that arrives after a newer version of its key is therefore valid from
its own time on, and **again from that version's time on**, where it replaces that version. The second
interval is a row of the log, directly after the record, so consumers and folds of the log need no rule
of their own.

A table *follows* its source's order if the source defines the content of the table: snapshots, versions
and change feeds of Delta tables, Debezium. For other topics, only a deletion without a stated time
yields to later records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as W
from pyspark.sql import functions as F

from vt_dagster.columns import IS_LATEST, IS_TOMBSTONE, OUTCOME, PROPAGATED_FROM, TIMESTAMP, VALID_FROM
from vt_dagster.core.arrival_order import Outcome
from vt_dagster.core.log_columns import comparable, partial_columns
from vt_dagster.core.plain_table import BEFORE, NEWEST, with_row_before
from vt_dagster.core.source_records import RESTATES, START, time_of
from vt_dagster.topology.model import Stream, VersionedTable

SO_FAR = "_so_far"
"""The time of the key's newest version before a record."""
LAST = "_last"
"""The largest time of a key in the log."""
_SEEN = "_seen"
_YIELDS, _OWN, _HELD_OWN, _ASSUMED = "_yields", "_own", "_held_own", "_assumed"
_PLACE, _GONE, _AHEAD, _SINCE = "_place", "_gone", "_ahead", "_since"


def follows_source(node: Stream) -> bool:
    """Returns whether a table holds the last record of a key in source order, whatever its time.

    It does if the source defines the content of the table and each record is a whole row.
    """
    table = isinstance(node, VersionedTable) and not node.has_partial_updates
    return table and getattr(node.source, "orders_changes", False)


def deletions_yield(node: Stream) -> bool:
    """Returns whether deletions without a stated time yield to later records with an earlier time.

    They do if the source also sends records that have a time of their own.
    """
    if not isinstance(node, VersionedTable) or node.has_partial_updates or node.deleted_at is not None:
        return False
    own_time = node.timestamp != TIMESTAMP or TIMESTAMP in node.schema.names
    return own_time and getattr(node.source, "assumes_deletions", False) and not follows_source(node)


def may_restate(node: Stream) -> bool:
    """Returns whether the source of a table may repeat a row that the table has already. Such a record
    has the outcome ``nothing_new``."""
    return follows_source(node) and getattr(node.source, "restates", False)


def has_derived_rows(node: Stream) -> bool:
    """Returns whether the log of a table has added rows besides the source's records, each directly
    after its record, by ``core.partial_updates`` or by this module."""
    return bool(partial_columns(node)) or follows_source(node) or deletions_yield(node)


@dataclass(frozen=True)
class SourceOrder:
    """The effect of the source's order on the records of a table.

    Args:
        follows: whether the table follows it; otherwise only deletions without a stated time yield.
        starts: whether the table has an initial snapshot, in this run or another one.
        own_time: returns the stated time of records or versions; null = none is stated.
        keeps_own_time: whether the log keeps the stated time besides a version's ``valid_from``.
        last: the largest time in the log, ``_last``, of keys with a record older than the history
            retention; None = there is none. A deletion at that time has expired from the view but is in
            the log, and such a record comes after it.
    """

    follows: bool
    starts: bool
    own_time: Callable[[DataFrame], Column]
    keeps_own_time: bool
    last: DataFrame | None = None

    @classmethod
    def of(cls, node: VersionedTable, last: DataFrame | None) -> SourceOrder | None:
        """Returns the source order of a table; None if it has no effect."""
        follows = follows_source(node)
        if not follows and not deletions_yield(node):
            return None
        # The log does not keep a column of this name besides a version's time, and with deleted_when it
        # is then unknown which deletions have a stated time.
        named = node.timestamp in node.schema.names and node.timestamp.lower() == TIMESTAMP
        has_time = F.lit(node.tombstone is not None)

        def own_time(rows: DataFrame) -> Column:
            if named:
                return F.when(has_time | ~F.col(IS_TOMBSTONE), F.col(TIMESTAMP))
            return time_of(node, rows)

        return cls(follows, node.start is not None, own_time, not named, last)

    def without_repeated(
        self,
        records: DataFrame,
        newest: DataFrame | None,
        *,
        key: Sequence[str],
        values: Sequence[str],
        order: Sequence[str],
    ) -> DataFrame:
        """Marks records that restate a key's current content (``_restates``) and change nothing:
        ``nothing_new``.

        A deletion changes nothing if the key has no row; but if the table has an initial snapshot, a
        deletion of a key without any change counts. A row changes nothing if its values, except
        ``timestamp``, equal the key's current ones.

        Plan: the shuffle by key is one that ``versioned_table.put`` needs.

        Args:
            records: with their outcome.
            newest: the current versions before the run; None = none.
        """
        if not self.follows or RESTATES not in records.columns:
            return records
        known = with_row_before(records, newest, key=key, values=values)
        kinds = {f.name: f.dataType for f in known.schema.fields}
        new = [comparable(F.col(f"`{v}`"), kinds[v]) for v in values]
        held = [comparable(F.col(BEFORE)[v], kinds[v]) for v in values]
        names = [f"v{i}" for i in range(len(values))]
        alive = ~F.col(IS_TOMBSTONE)
        row = F.struct(alive.alias("alive"), *[v.alias(n) for v, n in zip(new, names, strict=True)])
        there = F.struct(
            F.col(BEFORE).isNotNull().alias("alive"),
            *[v.alias(n) for v, n in zip(held, names, strict=True)],
        )
        there = F.when(F.col(NEWEST).isNotNull(), there) if self.starts else there
        applied = _is_change(records)
        before = W.partitionBy(*key).orderBy(*order).rowsBetween(W.unboundedPreceding, -1)
        rows = known.withColumn(_SEEN, F.last(F.when(applied, row), ignorenulls=True).over(before))
        rows = rows.withColumn(_SEEN, F.coalesce(F.col(_SEEN), there))
        same = reduce(
            lambda found, pair: found & pair[0].eqNullSafe(F.col(_SEEN)[pair[1]]),
            zip(new, names, strict=True),
            F.col(_SEEN)["alive"],
        )
        repeats = F.when(alive, same).otherwise(~F.col(_SEEN)["alive"])
        nothing = applied & F.coalesce(F.col(RESTATES), F.lit(False)) & repeats
        outcome = F.when(nothing, Outcome.NOTHING_NEW).otherwise(F.col(OUTCOME))
        return rows.withColumn(OUTCOME, outcome).drop(_SEEN, BEFORE, NEWEST)

    def with_last(self, records: DataFrame, *, key: Sequence[str]) -> DataFrame:
        """Adds the largest time in the log of keys that the view no longer contains.

        Args:
            records: of ``with_row_before``.
        """
        if self.last is None:
            return records
        joined = records.join(self.last, list(key), "left")
        return joined.withColumn(NEWEST, F.coalesce(NEWEST, LAST)).drop(LAST)

    def in_force_again(
        self,
        records: DataFrame,
        newest: DataFrame | None,
        *,
        key: Sequence[str],
        order: Sequence[str],
    ) -> DataFrame:
        """Adds, after each record that is older than its key's newest version and replaces it, a row of
        its values at that version's time.

        In source order the record came after that version, so it is valid again from then on. Versions
        between the record and that time keep their intervals. A row of an initial snapshot came before
        the changes and gets no such row.

        Args:
            records: with their outcome, ``_so_far`` (the time of the key's newest version before the
                record) and ``is_latest``.
            newest: the current versions before the run; None = none.

        Returns:
            the records with ``propagated_from`` (INT) = 0, and the added rows with ``propagated_from``
            = 1, which are their key's latest.
        """
        older = ~F.col(IS_LATEST)
        if not self.follows:
            records = self._with_yielding(records, newest, key=key, order=order)
            older = F.col(_YIELDS)
        places = F.when(_is_change(records) & older, F.array(F.lit(0), F.lit(1))).otherwise(
            F.array(F.lit(0))
        )
        again = F.col(PROPAGATED_FROM) == 1
        every = records.withColumn(PROPAGATED_FROM, F.explode(places)).withColumns(
            {
                TIMESTAMP: F.when(again, F.col(SO_FAR)).otherwise(F.col(TIMESTAMP)),
                IS_LATEST: F.col(IS_LATEST) | again,
            }
        )
        return every.drop(_YIELDS)

    def _with_yielding(
        self,
        records: DataFrame,
        newest: DataFrame | None,
        *,
        key: Sequence[str],
        order: Sequence[str],
    ) -> DataFrame:
        """Adds ``_yields``: whether the version at a key's newest time yields to a later, older record,
        because that time was not stated.

        The version yields if it is a deletion without a time of its own, which has its message's time;
        or if this rule put it at that time and it is not newer by its own time; if the log does not
        keep its own time, it does not yield again. A deletion without a time of its own makes any
        version yield, because it arrived later.

        Plan: windows by key, in the order that ``versioned_table.put`` needs.
        """
        own = records.withColumn(_OWN, self.own_time(records))
        if newest is None:
            nothing = F.lit(None).cast("timestamp")
            own = own.withColumns({_HELD_OWN: nothing, _ASSUMED: F.lit(False)})
        else:
            own_of_newest = self.own_time(newest)
            assumed = F.coalesce(own_of_newest != F.col(VALID_FROM), F.lit(True))
            keys = [F.col(f"`{k}`") for k in key]
            held = newest.select(*keys, own_of_newest.alias(_HELD_OWN), assumed.alias(_ASSUMED))
            own = own.join(held, list(key), "left")
        applied = _is_change(records)
        deletes = applied & F.col(IS_TOMBSTONE) & F.col(_OWN).isNull()
        # As of each record, by the earlier records of its key in this run: _GONE, the place of the last
        # deletion without a time of its own; _AHEAD, the place of the last record that became the
        # newest; _SINCE, the largest own time after that deletion.
        in_turn = W.partitionBy(*key).orderBy(*order)
        before = in_turn.rowsBetween(W.unboundedPreceding, -1)
        rows = own.withColumn(_PLACE, F.row_number().over(in_turn))
        gone = F.max(F.when(deletes, F.col(_PLACE))).over(before)
        rows = rows.withColumn(_GONE, F.coalesce(gone, F.lit(0)))
        stated = F.when(applied & F.col(_OWN).isNotNull(), F.struct(_GONE, _OWN))
        rows = rows.withColumns(
            {
                _AHEAD: F.max(F.when(F.col(IS_LATEST), F.col(_PLACE))).over(before),
                _SINCE: F.max(stated).over(before),
            }
        )
        since = F.when(F.col(_SINCE)[_GONE] == F.col(_GONE), F.col(_SINCE)[_OWN])
        first = F.col(_GONE) == 0
        since = F.when(first, F.greatest(since, F.col(_HELD_OWN))).otherwise(since)
        assumed = F.when(first, F.col(_ASSUMED) & F.col(_AHEAD).isNull()).otherwise(
            F.col(_AHEAD).isNull() | (F.col(_GONE) >= F.col(_AHEAD))
        )
        newer = since.isNull()
        newer = newer | (F.col(_OWN) >= since) if self.keeps_own_time else newer
        newer = F.col(_OWN).isNotNull() & newer
        yields = ~F.col(IS_LATEST) & (deletes | (applied & assumed & newer))
        helpers = [_OWN, _HELD_OWN, _ASSUMED, _PLACE, _GONE, _AHEAD, _SINCE]
        return rows.withColumn(_YIELDS, F.coalesce(yields, F.lit(False))).drop(*helpers)


def _is_change(records: DataFrame) -> Column:
    """Returns whether a record is applied and no row of an initial snapshot."""
    applied = F.col(OUTCOME) == Outcome.APPLIED
    return applied & ~F.col(START) if START in records.columns else applied
