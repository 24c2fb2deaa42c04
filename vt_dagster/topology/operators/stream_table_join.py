"""The stream-table join: each record joined with the table as of the record's timestamp.

A corrected join updates its results when late table records arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeAlias, get_args

from pyspark.sql.types import IntegerType, LongType, StructField, StructType

from vt_dagster.columns import (
    CAUSE,
    IS_LATE,
    LEFT_OFFSET,
    LEFT_PARTITION,
    OFFSET,
    PARTITION,
    REVISION,
    TIMESTAMP,
    VALID_FROM,
    VALID_TO,
)
from vt_dagster.errors import TopologyError
from vt_dagster.topology.durations import Duration, check_duration, longest, pairs, spoken
from vt_dagster.topology.expressions import Projection, Side
from vt_dagster.topology.node import Node, listed
from vt_dagster.topology.operators.base import Join, check_keys, check_kind, make_stream, make_table
from vt_dagster.topology.options import Consumer, require_readable
from vt_dagster.topology.specification import CorrectedJoinSpec, StreamTableJoinSpec

# Stream-table join


AsKnown: TypeAlias = Literal["now", "when_recorded"] | timedelta
"""The system time by which a version must be recorded to match, see ``StreamTableJoin``."""
AtOrBefore: TypeAlias = Literal["at_or_before", "before"]
"""Whether a version that starts exactly at the record's timestamp matches."""
At: TypeAlias = Literal["at_or_before", "before", "at_or_after", "after", "nearest"]
"""Which version matches a record, by the time at which it starts, see ``StreamTableJoin``."""
BeforeFirst: TypeAlias = Literal["first_version"] | None
"""What a record from before all versions of its key matches, see ``StreamTableJoin``."""

_KAFKAS = {"as_known": "now", "max_age": None, "at": "at_or_before", "before_first": None}
"""Defaults (Kafka Streams' behaviour)."""
_BACK: tuple[At, ...] = get_args(AtOrBefore)
_EVERY_AT: tuple[At, ...] = get_args(At)


@dataclass(frozen=True)
class StreamTableJoin(Join):
    """Joins each stream record with the table as of the record's timestamp (KIP-914, KIP-923).

    Late: a record that arrives after its grace period is joined at once; if its timestamp is before the
    table's history, it matches the latest version if that is old enough, else nothing. Null key:
    dropped and counted (inner), or emitted at once with nulls (left). Tombstone: of the stream, dropped
    and counted; of the table, the key has no row from then on.

    Args:
        left: the stream; only its records trigger results, which have their key and timestamp.
        right: the table; a versioned table is read as of the record's timestamp (inclusive), a plain
            table as it is when the run starts.
        kind: ``inner``: an unmatched record emits nothing; ``left``: it is emitted with nulls.
        name: name of the result.
        select: columns of the result: ``left.*``, ``right.column``, ``right.column as name``, or
            any SQL expression over them with an alias. A versioned table also has
            ``right.valid_from`` (inclusive) and ``right.valid_to`` (exclusive), null without a match.
            The key columns are always included.
        grace_period: a record waits until stream time >= its timestamp + grace period; a record that
            arrives later is joined at once. Needs a versioned table; at most its history retention.
            None or 0: nothing waits.
        as_known: which versions of a versioned table can match, by system time. ``now``: all.
            ``when_recorded``: those recorded no later than the stream record (``recorded_at`` of both
            logs, inclusive), which a live system could have known. A duration: those recorded no later
            than timestamp + duration (inclusive) that exist when the run starts; a ``grace_period``
            lets the record wait for them. The result equals ``read(as_of=, as_known_at=)``, with the
            stream time and history retention of that system time. In a log from before ``recorded_at``
            existed, a table row counts as known from the start, and a stream record as recorded at its
            timestamp.
        max_age: of a versioned table: a version that starts more than this before the record does not
            match (exactly this much before does). With ``at_or_after``, ``after`` and ``nearest`` a
            version that starts more than this after the record does not match either. A deletion never
            reveals an older version.
        at: of a versioned table: ``at_or_before``: the latest version that starts at the record's
            timestamp or before; ``before``: only before. ``at_or_after``: the first version that starts
            at the record's timestamp or after; ``after``: only after; tombstones are passed over.
            ``nearest``: of the version that is valid at the record's timestamp and the first one that
            starts after it, the one that starts nearer to the record; of two that are equally near the
            earlier one. For a record from before the table's history these three match no later
            version. They need ``max_age`` and a ``grace_period`` at least as long: a record waits until
            stream time has reached the last time at which its match may start.
        before_first: of a versioned table, with ``at_or_before`` or ``before``. None: a record from
            before all versions of its key matches nothing. ``first_version``: it matches the first
            version of the key that has a value, whatever ``max_age`` is. The first version is the
            oldest one that the table still has: that version also matches records from before the
            table's history. A tombstone is a version: a record at its time or after matches nothing.
    """

    grace_period: Duration | None = None
    as_known: AsKnown = "now"
    max_age: timedelta | None = None
    at: At = "at_or_before"
    before_first: BeforeFirst = None

    def __post_init__(self) -> None:
        super().__post_init__()
        left, right = self.left, self.right
        if not right.is_table:
            raise TopologyError(
                f"{self.name}: the right side of a stream-table join must be a Table or a "
                f"VersionedTable, got the {type(right).__name__} {right.name!r}"
            )
        if left.is_table:
            raise TopologyError(
                f"{self.name}: the left side of a stream-table join must be a Stream, got the "
                f"{type(left).__name__} {left.name!r}"
            )
        check_kind(self.name, "stream-table join", self.kind, ("inner", "left"))
        object.__setattr__(self, "select", tuple(self.select))
        check_keys(self.name, left, right)
        require_readable(self.name, Consumer.STREAM_TABLE_JOIN, right)
        if self.grace_period is not None:
            self._check_grace(self.grace_period)
        check_match(self.name, right, self.as_known, self.max_age, self.at, _EVERY_AT)
        self._check_before_first()
        self._check_looks_ahead()
        self._check_waits_for_nothing()
        self.projection()

    @property
    def waits(self) -> bool:
        """Whether records can wait: there is a grace period and it is not 0."""
        return self.grace_period is not None and self.grace_period != type(self.grace_period)()

    @property
    def looks_ahead(self) -> bool:
        """Whether a version that starts after the record may match, apart from ``before_first``."""
        return self.at not in _BACK

    @property
    def rescan_span(self) -> dict[str, timedelta]:
        return {self.left.name: longest(self.grace_period or timedelta(0))}

    @property
    def settings(self) -> dict[str, str]:
        return {"grace_period": spoken(self.grace_period or timedelta(0)), **self._chosen}

    @property
    def specification(self) -> StreamTableJoinSpec | CorrectedJoinSpec:
        return StreamTableJoinSpec(**self._sides, **self._match)

    @property
    def _match(self) -> dict[str, Any]:
        grace = timedelta(0) if self.grace_period is None else self.grace_period
        return {"grace_period": grace, **{name: getattr(self, name) for name in _KAFKAS}}

    @property
    def _chosen(self) -> dict[str, str]:
        """The settings that differ from Kafka Streams' behaviour, for descriptions and metadata."""
        return {
            name: spoken(value) if isinstance(value, timedelta) else str(value)
            for name, kafkas in _KAFKAS.items()
            if (value := getattr(self, name)) != kafkas
        }

    @property
    def log_columns(self) -> tuple[str, ...]:
        return (IS_LATE,) if self.waits else ()

    def _check_grace(self, grace: Duration) -> None:
        check_duration(self.name, "grace_period", grace)
        kept = self.right.retention
        if kept is None:
            raise TopologyError(
                f"{self.name}: a grace period needs a versioned table, but {self.right.name!r} is "
                "not versioned: declare it as VersionedTable with a history_retention, or remove "
                "grace_period"
            )
        for partition, (period, retention) in pairs(grace, kept):
            if period > retention:
                raise TopologyError(
                    f"{self.name}: the grace period {period}{partition} is longer than the history "
                    f"retention {retention} of {self.right.name!r}; records would leave the buffer "
                    "after their versions expire: shorten grace_period or lengthen history_retention"
                )

    def _check_before_first(self) -> None:
        if self.before_first is None:
            return
        if self.before_first != "first_version":
            raise TopologyError(
                f"{self.name}: expected before_first to be 'first_version' or None, got "
                f"{self.before_first!r}; correct it, or leave it out"
            )
        if not self.right.versioned:
            raise TopologyError(
                f"{self.name}: before_first needs a versioned table, but {self.right.name!r} is not "
                "versioned, and its row matches records of any time: remove before_first"
            )
        if self.looks_ahead:
            raise TopologyError(
                f"{self.name}: before_first is only for at='at_or_before' or 'before', got "
                f"at={self.at!r}, which itself matches versions that start after the record: remove "
                "before_first"
            )
        self._check_now("before_first='first_version'")

    @property
    def _final_after(self) -> tuple[str, Duration]:
        """The setting that decides when a row is final, and its value."""
        return "grace_period", self.grace_period or timedelta(0)

    def _check_looks_ahead(self) -> None:
        if not self.looks_ahead:
            return
        option, (setting, length) = f"at={self.at!r}", self._final_after
        if self.max_age is None:
            raise TopologyError(
                f"{self.name}: {option} needs max_age, got none: without it, a matching version may "
                "start at any time after the record, so no wait is long enough; set max_age to how far "
                f"from the record a version may start, and {setting} to at least that"
            )
        for partition, (final, age) in pairs(length, self.max_age):
            if final < age:
                raise TopologyError(
                    f"{self.name}: {option} needs a {setting} of at least max_age, {age}, got "
                    f"{final}{partition}: the row would be final before its match may arrive: "
                    f"lengthen {setting} or shorten max_age"
                )
        self._check_now(option)

    def _check_now(self, option: str) -> None:
        if self.as_known != "now":
            raise TopologyError(
                f"{self.name}: {option} matches versions that start after the record, but as_known "
                "restricts only the version that is valid at its time: remove one of the two"
            )

    def _check_waits_for_nothing(self) -> None:
        if self.as_known == "when_recorded" and self.waits:
            raise TopologyError(
                f"{self.name}: as_known='when_recorded' ignores versions recorded after the stream "
                "record, so a grace period changes nothing: remove grace_period, or set as_known to a "
                "duration to also match versions recorded that much later"
            )

    def _side(self, node: Node) -> Side:
        ends = (VALID_FROM, VALID_TO) if node.versioned else ()
        return Side(node.name, tuple(node.schema.fields), (TIMESTAMP, *ends))

    def result(self, **shown: Any) -> Any:
        fields, null_key = self.projection().fields(), self.left.null_key
        return make_stream(self, self.left, fields, shown, null_key=null_key)

    def describe(self) -> str:
        how = "as of its timestamp" if self.right.versioned else "as it is when the run starts"
        missing = "; without a match it emits nothing" if self.kind == "inner" else ""
        wait = f"; waits {spoken(self.grace_period)} of stream time first" if self.grace_period else ""
        more = "".join(f"; {name} {value}" for name, value in self._chosen.items())
        return f"{self.left.name}, each record with {self.right.name} {how}{missing}{wait}{more}."


def check_match(
    name: str, table: Node, as_known: Any, max_age: Any, at: Any, allowed: Sequence[At] = _BACK
) -> None:
    """Checks the settings by which records match versions of a table.

    Args:
        allowed: the allowed values of ``at``.

    Raises:
        TopologyError: an invalid value, or a setting that this table does not support.
    """
    if at not in allowed and tuple(allowed) == _BACK:
        raise TopologyError(
            f"{name}: at={at!r} would match versions that start after the record's timestamp, which "
            "leaks the future into the result; expected 'at_or_before' or 'before'"
        )
    if at not in allowed:
        raise TopologyError(
            f"{name}: at must be {', '.join(map(repr, allowed[:-1]))} or {allowed[-1]!r}, got {at!r}"
        )
    if isinstance(as_known, timedelta):
        check_duration(name, "as_known", as_known)
    elif as_known not in ("now", "when_recorded"):
        raise TopologyError(
            f"{name}: as_known must be 'now', 'when_recorded' or a datetime.timedelta after the "
            f"record's timestamp, got {as_known!r}"
        )
    if as_known != "now":
        require_readable(name, Consumer.AS_KNOWN, table)
    if max_age is not None:
        if not isinstance(max_age, timedelta):
            raise TopologyError(
                f"{name}: max_age must be a datetime.timedelta, got {max_age!r}; write for example "
                "max_age=timedelta(hours=2)"
            )
        check_duration(name, "max_age", max_age)
    if (as_known, max_age, at) != ("now", None, "at_or_before") and not table.versioned:
        raise TopologyError(
            f"{name}: as_known, max_age and at need a versioned table, but {table.name!r} is not "
            "versioned: declare it as VersionedTable with a history_retention, or remove them"
        )


# Corrected join


_POSITION = {LEFT_PARTITION: (PARTITION, IntegerType()), LEFT_OFFSET: (OFFSET, LongType())}


@dataclass(frozen=True)
class CorrectedJoin(StreamTableJoin):
    """A stream-table join whose result is a table: one row per stream record, re-joined when a late
    table record changes the version at the stream record's timestamp.

    A record or tombstone of the table is valid from its timestamp (inclusive) to the next version of
    its key (exclusive). Previously joined stream records of that key and interval are looked up again,
    and a row whose match differs is updated: ``revision`` counts up from 0, ``cause`` names the table
    record (``table, partition, offset``; null for the first revision). With ``at_or_after``, ``after``
    and ``nearest`` it affects the records at most ``max_age`` away (inclusive): those before it, and
    with ``nearest`` also those after it.

    Late: a stream record always gets its row. A correction is too late if the row's timestamp is before
    ``stream time - corrected_for``, where stream time is either that of the row's partition before the
    run or that of the table record's partition when the table record arrived. The row then keeps its
    values. It is counted once (``corrections_too_late``, whatever the values of the table record; in a
    join that looks ahead, if that record alone would change which version matches) and listed in the
    asset's quarantine table (``too_late``) with ``source``, ``partition`` and ``position`` of its
    stream record, and ``cause``. Table records that arrived earlier still correct the row. The number
    of revisions depends on how arrivals are split into runs; the final rows do not.
    Null key: as in ``StreamTableJoin``; a record with a null in a column of ``key`` is dropped and
    counted. Tombstone: of the stream, dropped and counted; of the table, the row loses its match (left)
    or is deleted (inner).

    Args:
        corrected_for: how long a row can be corrected, in stream time; at most the table's history
            retention. It may change between runs; rows that are final stay final. With ``at_or_after``,
            ``after`` and ``nearest`` at least ``max_age``; a ``grace_period`` is then optional: without
            it, a record is joined at once, and its row is corrected when its match comes. A join that
            looks back takes no ``max_age`` and no ``before``; none takes ``as_known`` or
            ``before_first``.
        key: stream columns that identify a record; a second record with the same key fails the run.
            None: the record's partition and offset, as ``left_partition`` and ``left_offset``.
    """

    corrected_for: timedelta = timedelta(0)
    key: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", listed(self.key))
        super().__post_init__()
        unknown = [k for k in self.key if k not in self.left.schema.names]
        if unknown:
            raise TopologyError(
                f"{self.name}: key= of a corrected join needs columns of {self.left.name!r}, some of "
                f"{self.left.schema.names}, got {unknown}; correct it, or remove key= to key rows by "
                "the record's partition and offset"
            )
        require_readable(self.name, Consumer.CORRECTED_JOIN, self.right)
        self._check_promise()
        self._check_columns()

    def key_of_lookup(self, key: Sequence[str]) -> Sequence[str] | None:
        left, made = self.left, self.copied()
        return left.key if all(made.get(k) == [(left.name, k)] for k in left.key) else None

    @property
    def rescan_span(self) -> dict[str, timedelta]:
        # A late table record is at most the history retention old, and its interval ends at the next
        # version: older table versions are never needed.
        late = longest(self.right.retention or timedelta(0))
        if self.looks_ahead and self.max_age is not None:
            # It affects records up to max_age before it, whose match starts up to max_age before them.
            late += 2 * self.max_age
        return {
            self.left.name: max(self.corrected_for, *super().rescan_span.values()),
            self.right.name: late,
        }

    @property
    def _final_after(self) -> tuple[str, Duration]:
        check_duration(self.name, "corrected_for", self.corrected_for)
        return "corrected_for", self.corrected_for

    def _check_promise(self) -> None:
        check_duration(self.name, "corrected_for", self.corrected_for)
        if not self.right.versioned:
            raise TopologyError(
                f"{self.name}: corrected_for needs a versioned table, but {self.right.name!r} is not "
                "versioned and has no value as of a record's timestamp: declare it as "
                "VersionedTable with a history_retention, or remove corrected_for"
            )
        for partition, (promised, retention) in pairs(self.corrected_for, self.right.retention):
            if promised > retention:
                raise TopologyError(
                    f"{self.name}: corrected_for {promised}{partition} is longer than the history "
                    f"retention {retention} of {self.right.name!r}; corrections would need expired "
                    "versions: shorten corrected_for or lengthen history_retention"
                )

    def _check_columns(self) -> None:
        self._check_own_columns(tuple(_POSITION))
        if VALID_TO in self.projection().columns_of("right"):
            raise TopologyError(
                f"{self.name}: right.valid_to changes with every later version, so each new version "
                "would correct earlier rows; remove it from select: right.valid_from identifies the "
                "version"
            )

    def projection(self) -> Projection:
        sides = {"left": self._side(self.left), "right": self._side(self.right)}
        return Projection(self.name, self.key, sides, self.select)

    @property
    def columns(self) -> tuple[tuple[str, str], ...]:
        """The result's (name, SQL expression over ``left.*`` and ``right.*``)."""
        position = [(name, f"left.`{column}`") for name, (column, _) in _POSITION.items()]
        return (*([] if self.key else position), *self.projection().columns)

    @property
    def result_key(self) -> tuple[str, ...]:
        """The key columns of the result."""
        return self.key or tuple(_POSITION)

    @property
    def specification(self) -> CorrectedJoinSpec:
        own = {"key": self.key, "corrected_for": self.corrected_for}
        return CorrectedJoinSpec(**self._sides, **self._match, **own)

    @property
    def settings(self) -> dict[str, str]:
        return {**super().settings, "corrected_for": spoken(self.corrected_for)}

    @property
    def log_columns(self) -> tuple[str, ...]:
        return (REVISION, CAUSE, *((LEFT_OFFSET,) if self.key else ()))

    def lineage(self) -> dict[str, list[tuple[str, str]]]:
        position = {name: [(self.left.name, column)] for name, (column, _) in _POSITION.items()}
        return {**({} if self.key else position), **self.projection().lineage()}

    def result(self, **shown: Any) -> Any:
        position = [StructField(name, kind) for name, (_, kind) in _POSITION.items()]
        fields = [*([] if self.key else position), *self.projection().fields()]
        return make_table(
            self, self.left, StructType(fields), None, shown, key=self.result_key, partition_by=None
        )

    def describe(self) -> str:
        text = super().describe().removesuffix(".")
        return f"{text}; one row per record, corrected for {spoken(self.corrected_for)} of stream time."
