"""The join methods of a stream: with a table, or with another stream within a time window.

``Stream`` and ``Table`` in ``vt_dagster.topology.model`` inherit them. This module cannot import those
classes (import cycle), so they are type variables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, TypeVar, overload

from vt_dagster.errors import TopologyError
from vt_dagster.topology.durations import Duration
from vt_dagster.topology.node import Node
from vt_dagster.topology.operators import (
    CorrectedJoin,
    CorrectedStreamJoin,
    JoinKind,
    StreamStreamJoin,
    StreamTableJoin,
)
from vt_dagster.topology.operators.stream_table_join import AsKnown, At

S = TypeVar("S")
"""``Stream``."""
T = TypeVar("T")
"""``Table``."""


@dataclass(frozen=True)
class _Window:
    """The time settings of a stream-stream join."""

    within: Duration | None
    before: Duration | None
    after: Duration | None
    grace: Duration | None

    def ends(self, name: str) -> tuple[Duration, Duration, Duration]:
        """Returns before, after and grace."""
        if self.within is None and self.before is None and self.after is None:
            raise TopologyError(
                f"{name}: a join of two streams needs a time window, got none: set "
                "within=timedelta(hours=1), or before and after"
            )
        nothing = timedelta(0) if self.within is None else self.within
        before = nothing if self.before is None else self.before
        after = nothing if self.after is None else self.after
        return before, after, timedelta(0) if self.grace is None else self.grace

    def refuse_beside_table(self, name: str, table: Node) -> None:
        """Raises TopologyError if any is set for a join with a table."""
        given = [what for what, value in vars(self).items() if value is not None]
        if given:
            raise TopologyError(
                f"{name}: {' and '.join(given)} is only for a join of two streams, but {table.name!r} "
                f"is a {type(table).__name__}: remove it, or use grace_period to wait for table records"
            )


@dataclass(frozen=True)
class _Promise:
    """The settings of a corrected join."""

    corrected_for: Duration | None = None
    key: str | Sequence[str] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (self.key,) if isinstance(self.key, str) else tuple(self.key)

    def refuse(self, name: str, where: str) -> None:
        """Raises TopologyError if any is set for another kind of join."""
        given = [what for what, value in vars(self).items() if value not in (None, ())]
        if given:
            raise TopologyError(
                f"{name}: {' and '.join(given)} is only for a corrected join with a versioned table, "
                f"not for {where}: remove it, or set corrected_for=timedelta(days=7)"
            )


@dataclass(frozen=True)
class _Match:
    """The settings by which a stream-table join chooses versions."""

    as_known: AsKnown
    max_age: timedelta | None
    at: At

    def refuse(self, name: str, where: str) -> None:
        """Raises TopologyError if any is set for another kind of join."""
        given = [what for what, value in vars(self).items() if value != getattr(_KAFKAS, what)]
        if given:
            raise TopologyError(
                f"{name}: {' and '.join(given)} is only for a join of a stream with a versioned table, "
                f"not for {where}: remove it"
            )


_KAFKAS = _Match("now", None, "at_or_before")


class StreamJoins(Generic[S, T]):
    """The joins of a stream."""

    name: str

    @overload
    def join(
        self,
        other: T,
        *,
        name: str,
        select: Sequence[str] = ...,
        grace_period: Duration | None = None,
        as_known: AsKnown = "now",
        max_age: timedelta | None = None,
        at: At = "at_or_before",
        **shown: Any,
    ) -> S: ...

    @overload
    def join(
        self,
        other: T,
        *,
        name: str,
        corrected_for: timedelta,
        key: str | Sequence[str] = (),
        select: Sequence[str] = ...,
        grace_period: Duration | None = None,
        **shown: Any,
    ) -> T: ...

    @overload
    def join(
        self,
        other: S,
        *,
        name: str,
        select: Sequence[str] = ...,
        within: Duration | None = None,
        before: Duration | None = None,
        after: Duration | None = None,
        grace: Duration | None = None,
        **shown: Any,
    ) -> S: ...

    def join(
        self,
        other: S,
        *,
        name: str,
        select: Sequence[str] = ("left.*", "right.*"),
        grace_period: Duration | None = None,
        corrected_for: Duration | None = None,
        key: str | Sequence[str] = (),
        as_known: AsKnown = "now",
        max_age: timedelta | None = None,
        at: At = "at_or_before",
        within: Duration | None = None,
        before: Duration | None = None,
        after: Duration | None = None,
        grace: Duration | None = None,
        **shown: Any,
    ) -> S | T:
        """Inner join with a table as of each record's timestamp, see ``StreamTableJoin``; or with a
        stream within a time window, see ``StreamStreamJoin``. With ``corrected_for`` late matches
        correct the result, which is a table: see ``CorrectedJoin`` and ``CorrectedStreamJoin``.

        Args:
            grace_period: join with a table: how long a record waits for table records.
            corrected_for: join with a versioned table: how long late table records correct the result;
                left or outer join with a stream: how late a match may be and still retract the
                unmatched row.
            key: corrected join with a table: columns that identify a record; none: its partition and
                offset.
            as_known: join with a versioned table: which versions can match: now, when_recorded, or a
                duration: those recorded no later than that after the record's timestamp.
            max_age: join with a versioned table: how long before the record a version may start
                (inclusive).
            at: join with a versioned table: match versions that start at_or_before or before the
                record's timestamp.
            within: join with a stream: how far before and after a record its matches may lie.
            before, after: join with a stream: as ``within``, for one direction; may be negative.
                Default: ``within``, else 0.
            grace: join with a stream: how late a record may be and still find every match; default 0.
            shown: description, group, owners and key_prefix of the result.
        """
        about, match = _Window(within, before, after, grace), _Match(as_known, max_age, at)
        told = about, _Promise(corrected_for, key), match
        made = self._joined("inner", other, name, tuple(select), grace_period, *told)
        return made.result(**shown)

    @overload
    def left_join(
        self,
        other: T,
        *,
        name: str,
        select: Sequence[str] = ...,
        grace_period: Duration | None = None,
        as_known: AsKnown = "now",
        max_age: timedelta | None = None,
        at: At = "at_or_before",
        **shown: Any,
    ) -> S: ...

    @overload
    def left_join(
        self,
        other: T,
        *,
        name: str,
        corrected_for: timedelta,
        key: str | Sequence[str] = (),
        select: Sequence[str] = ...,
        grace_period: Duration | None = None,
        **shown: Any,
    ) -> T: ...

    @overload
    def left_join(
        self,
        other: S,
        *,
        name: str,
        select: Sequence[str] = ...,
        within: Duration | None = None,
        before: Duration | None = None,
        after: Duration | None = None,
        grace: Duration | None = None,
        **shown: Any,
    ) -> S: ...

    @overload
    def left_join(
        self,
        other: S,
        *,
        name: str,
        corrected_for: Duration,
        select: Sequence[str] = ...,
        within: Duration | None = None,
        before: Duration | None = None,
        after: Duration | None = None,
        grace: Duration | None = None,
        **shown: Any,
    ) -> T: ...

    def left_join(
        self,
        other: S,
        *,
        name: str,
        select: Sequence[str] = ("left.*", "right.*"),
        grace_period: Duration | None = None,
        corrected_for: Duration | None = None,
        key: str | Sequence[str] = (),
        as_known: AsKnown = "now",
        max_age: timedelta | None = None,
        at: At = "at_or_before",
        within: Duration | None = None,
        before: Duration | None = None,
        after: Duration | None = None,
        grace: Duration | None = None,
        **shown: Any,
    ) -> S | T:
        """Left join with a table or a stream; see :meth:`join`."""
        about, match = _Window(within, before, after, grace), _Match(as_known, max_age, at)
        told = about, _Promise(corrected_for, key), match
        made = self._joined("left", other, name, tuple(select), grace_period, *told)
        return made.result(**shown)

    @overload
    def outer_join(
        self,
        other: S,
        *,
        name: str,
        select: Sequence[str] = ...,
        within: Duration | None = None,
        before: Duration | None = None,
        after: Duration | None = None,
        grace: Duration | None = None,
        **shown: Any,
    ) -> S: ...

    @overload
    def outer_join(
        self,
        other: S,
        *,
        name: str,
        corrected_for: Duration,
        select: Sequence[str] = ...,
        within: Duration | None = None,
        before: Duration | None = None,
        after: Duration | None = None,
        grace: Duration | None = None,
        **shown: Any,
    ) -> T: ...

    def outer_join(
        self,
        other: S,
        *,
        name: str,
        select: Sequence[str] = ("left.*", "right.*"),
        within: Duration | None = None,
        before: Duration | None = None,
        after: Duration | None = None,
        grace: Duration | None = None,
        corrected_for: Duration | None = None,
        **shown: Any,
    ) -> S | T:
        """Outer join with a stream; see :meth:`join`."""
        about, promise = _Window(within, before, after, grace), _Promise(corrected_for)
        made = self._joined("outer", other, name, tuple(select), None, about, promise)
        return made.result(**shown)

    def _joined(
        self,
        kind: JoinKind,
        other: Any,
        name: str,
        select: tuple[str, ...],
        grace_period: Duration | None,
        about: _Window,
        promise: _Promise = _Promise(),
        match: _Match = _KAFKAS,
    ) -> StreamTableJoin | StreamStreamJoin:
        if not isinstance(other, Node):
            raise TopologyError(
                f"{name}: expected a stream or a table to join {self.name!r} with, got {other!r}"
            )
        if other.is_table:
            about.refuse_beside_table(name, other)
            if promise.corrected_for is not None:
                match.refuse(name, "a corrected join, which follows all versions")
                told = {"corrected_for": promise.corrected_for, "key": promise.names}
                return CorrectedJoin(self, other, kind, name, select, grace_period, **told)
            promise.refuse(name, "a join without corrected_for")
            return StreamTableJoin(self, other, kind, name, select, grace_period, **vars(match))
        match.refuse(name, f"a join with {other.name!r}, a stream")
        if grace_period is not None:
            raise TopologyError(
                f"{name}: grace_period is only for joins with a table, but {other.name!r} is a stream: "
                "remove it, and set grace, the allowed lateness of both streams"
            )
        if promise.corrected_for is None:
            promise.refuse(name, f"a join with {other.name!r}, a stream")
            return StreamStreamJoin(self, other, kind, name, select, *about.ends(name))
        if promise.names:
            raise TopologyError(
                f"{name}: key= is only for joins with a table, but {other.name!r} is a stream; "
                "stream-stream rows are keyed by the positions of both records: remove key="
            )
        return CorrectedStreamJoin(
            self, other, kind, name, select, *about.ends(name), promise.corrected_for
        )
