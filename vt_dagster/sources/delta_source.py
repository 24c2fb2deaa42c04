"""A Delta table that somebody else writes, as a source: each of its versions is consumed once.

The position is the next version, in the asset's own commits, with the table's id and the time of the
last version that was consumed: another table in its place, or one that was put back, is seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

from pyspark.sql.types import StructType

from vt_dagster.errors import RecordsGoneError, SourceError
from vt_dagster.sources.base import News, require_limits
from vt_dagster.sources.delta_log import FEED, Change, ForeignTable
from vt_dagster.sources.dump_limits import Limits, OnDuplicate, check_ignored
from vt_dagster.sources.pinned_versions import DELTA, PinnedState, PinnedVersions
from vt_dagster.storage.commit_log import Commit
from vt_dagster.storage.shared_paths import address
from vt_dagster.topology.durations import in_utc

Mode = Literal["append", "changes", "snapshots"]
_UPKEEP = 100
"""After so many versions that change no row a run moves the position over them, lest their commits are
cleaned up before it does."""


@dataclass(frozen=True)
class _Place:
    """Where a run begins.

    Args:
        first: the version: the first commit that is taken, or whose state is.
        whole: whether its state is taken, not what its commit did.
        gap: versions that are gone, and accepted to be; None = none.
    """

    first: int
    whole: bool
    gap: tuple[int, int] | None = None


@dataclass(frozen=True)
class DeltaSource:
    """A Delta table that somebody else writes.

    Without a column ``timestamp`` in the schema a record's timestamp is when its version was committed,
    by the writer's clock; a tombstone's always is. Order of arrival is by version; within one by file
    and row (``append``), or by the key's hash and key. A compaction (OPTIMIZE) gives nothing.

    Args:
        path: the table's directory or URL, which Spark and ``deltalake`` both can read.
        mode: ``append``: the rows that were appended; a commit that removes or rewrites rows is
            refused. ``changes``: its change data feed, which must be on: what is inserted, or is there
            after an update, is put; what is deleted is a tombstone, and so is the old key of an update
            that changes it. ``snapshots``: its newest version is the whole state, and the records are
            the difference to what the table holds, as of :class:`SnapshotSource`; versions in between
            are passed over, unless ``max_versions_per_run=1`` takes each. The last two are for tables.
        start: where the first run begins. ``current``: with all rows of the newest version; then come
            the commits after it. ``earliest``: with the oldest version that is still there. A number:
            with what that version's commit did (``snapshots``: with its state).
        max_versions_per_run: so many that change rows at most; None = all that are there.
        ignore, max_shrink, on_duplicate: where a whole state is compared, as of
            :class:`SnapshotSource`.
        max_bad_share: a run with a larger share of quarantined records fails before its commit.
        max_clock_skew: how far in the future a timestamp may lie, by this machine's clock.
        upstream: the key of the asset that writes the table, ``shop/export``: a dependency of this one
            in Dagster.
    """

    path: str
    mode: Mode = "append"
    start: Literal["current", "earliest"] | int = field(default="current", kw_only=True)
    max_versions_per_run: int | None = field(default=None, kw_only=True)
    ignore: Sequence[str] = field(default=(), kw_only=True)
    max_shrink: float = field(default=0.5, kw_only=True)
    on_duplicate: OnDuplicate = field(default="fail", kw_only=True)
    max_bad_share: float = field(default=0.1, kw_only=True)
    max_clock_skew: timedelta = field(default=timedelta(days=1), kw_only=True)
    upstream: str | None = field(default=None, kw_only=True)

    gives_timestamp = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", address(self.path))
        if self.mode not in ("append", "changes", "snapshots"):
            raise SourceError(
                f"mode of {self.path!r} must be 'append', 'changes' or 'snapshots', got {self.mode!r}"
            )
        start: object = self.start
        number = isinstance(start, int) and not isinstance(start, bool) and start >= 0
        if not number and start not in ("current", "earliest"):
            raise SourceError(
                f"start of {self.path!r} must be 'current', 'earliest' or a version, got {start!r}"
            )
        if self.max_versions_per_run is not None and self.max_versions_per_run < 1:
            raise SourceError(
                f"max_versions_per_run must be 1 or more, got {self.max_versions_per_run}"
            )
        object.__setattr__(self, "ignore", tuple(self.ignore))
        require_limits(self.max_bad_share, self.max_clock_skew)
        self.limits(False).check(repr(self.path))

    @property
    def tables_only(self) -> bool:
        """Whether a stream cannot have it."""
        return self.mode != "append"

    @property
    def orders_changes(self) -> bool:
        """Whether the last record of a key, by order, is what the table that it reads holds of it."""
        return self.mode != "append"

    @property
    def restates(self) -> bool:
        """Whether a record may say what is known: a row marked as deleted is in each version."""
        return self.whole

    @property
    def whole(self) -> bool:
        """Whether it says what is true, not what has changed."""
        return self.mode == "snapshots"

    def limits(self, accepted: bool) -> Limits:
        """Within which a whole state is believed."""
        shares = self.max_shrink, self.max_bad_share
        return Limits(*shares, self.on_duplicate, self.ignore, accepted)

    def describe(self) -> str:
        """What is read, for descriptions and messages."""
        what = {"append": "appended rows", "changes": "changes", "snapshots": "versions"}[self.mode]
        return f"{what} of the Delta table {self.path}"

    def check(self, name: str, key: Sequence[str], schema: StructType) -> None:
        """Refuses columns to ignore that are none; what the table lacks shows when it is read."""
        check_ignored(name, self.ignore, key, schema)

    # -- versions --------------------------------------------------------------------------------

    def pin(
        self,
        before: Commit | None,
        version: int | None = None,
        accept_gap: bool = False,
        accept_shrink: bool = False,
        *,
        consumed: Mapping[str, Any] = {},
    ) -> PinnedVersions:
        """The versions that a run takes after a commit. Does not use Spark.

        Args:
            before: the asset's last commit; None = there is none.
            version: the last one that is asked for (inclusive); None = the newest.
            accept_gap: go on where versions are gone, or another table is there: ``append`` with the
                first commit that is there, or from ``start`` on; otherwise with the difference of the
                table as it is. Of ``append``, also leave out a commit that rewrites rows.
            accept_shrink: a whole state may be empty, or delete more than ``max_shrink``.
            consumed: of no use; versions tell.

        Raises:
            RecordsGoneError: versions are gone that were not consumed, or another table is there.
            SourceError: there is no table; a commit rewrites rows, or has no change data feed.
        """
        table = ForeignTable(str(self.path))
        place = self._place(table, before, accept_gap)
        newest = table.version if version is None else min(version, table.version)
        if place.whole:
            return self._state(table, place, place.first, accept_shrink)
        if self.mode == "snapshots" and table.first_commit(newest) > place.first:
            return self._state(table, place, newest, accept_shrink)
        changes, gap = self._bounded(table, place.first, newest), place.gap
        if self.mode == "snapshots":
            newest = max((c.version for c in changes if c.changes_rows), default=-1)
            if newest < 0:
                return self._pinned(PinnedVersions, table, place, gap, changes)
            return self._state(table, place, newest, accept_shrink)
        if self.mode == "append":
            table.require_plain_files(max(newest, 0))
            changes, gap = self._appended(changes, gap, accept_gap)
        else:
            self._require_feed(table, place.first, changes)
        return self._pinned(PinnedVersions, table, place, gap, changes)

    def news(self, before: Commit | None, consumed: Mapping[str, Any]) -> News:
        """The newest version. Does not use Spark."""
        pinned = self.pin(before)
        if pinned.empty:
            return News()
        number = pinned.end - pinned.first
        return News({"version": pinned.end - 1}, f"{number:,} new version(s)")

    def _bounded(self, table: ForeignTable, first: int, newest: int) -> list[Change]:
        """What the commits up to a version did, with as many that change rows as a run may take."""
        found: list[Change] = []
        taken = 0
        for version in range(first, newest + 1):
            change = table.change(version)
            taken += change.changes_rows
            if self.max_versions_per_run is not None and taken > self.max_versions_per_run:
                break
            found.append(change)
        return found

    def _place(self, table: ForeignTable, before: Commit | None, accept_gap: bool) -> _Place:
        known = None if before is None else before.topics.get(DELTA)
        if before is None or known is None:
            return self._beginning(table)
        first = before.inputs[DELTA][0]
        said = self._missing(table, known, first)
        if said is None:
            return _Place(first, False)
        if not accept_gap:
            raise RecordsGoneError(
                f"{self.path}: {said}. Run once with accept_gap: true to go on "
                f"{'without them' if self.mode == 'append' else 'with the table as it is now'}, which "
                "the commit then records; or reprocess into a new asset"
            )
        if self.mode != "append":
            return _Place(table.version, True, (first, table.version + 1))
        if table.version >= first and known.startswith(f"{table.id}@"):
            there = table.first_commit(table.version)
            return _Place(there, False, (first, max(first, there)))
        begun = self._beginning(table)
        return _Place(begun.first, begun.whole, (first, first))

    def _beginning(self, table: ForeignTable) -> _Place:
        if isinstance(self.start, int):
            if self.mode != "snapshots" and table.first_commit(table.version) > self.start:
                raise RecordsGoneError(
                    f"{self.path}: expected the commits from version {self.start} on, the first one "
                    f"that is still there is {table.first_commit(table.version)}; choose a later "
                    "start, or 'current'"
                )
            return _Place(self.start, False)
        if self.start == "current":
            return _Place(table.version, True)
        first = table.first_state()
        return _Place(first, first > 0 and self.mode != "snapshots")

    def _missing(self, table: ForeignTable, known: str, first: int) -> str | None:
        """What is not there any more of what comes after a position; None = all is."""
        before, _, time = known.rpartition("@")
        if before != table.id:
            return (
                f"another table has taken its place since version {first - 1} was consumed (its id was "
                f"{before}, is {table.id}): its versions mean other rows"
            )
        if table.version < first - 1:
            return (
                f"consumed up to version {first - 1}, but the table ends at {table.version}: it was "
                "put back to an earlier state"
            )
        last = table.time(first - 1)
        if last is not None and time and last != int(time):
            return (
                f"version {first - 1} was committed at {in_utc(int(time))} when it was consumed, and "
                f"is of {in_utc(last)} now: the table was put back and went on otherwise"
            )
        there = table.first_commit(table.version)
        if self.mode == "snapshots" or there <= first:
            return None
        return (
            f"the commits of versions {first} to {there - 1} were cleaned up before they were consumed "
            "(delta.logRetentionDuration has passed)"
        )

    def _appended(
        self, changes: list[Change], gap: tuple[int, int] | None, accept_gap: bool
    ) -> tuple[list[Change], tuple[int, int] | None]:
        rewrites = next((c for c in changes if c.removes), None)
        if rewrites is None:
            return changes, gap
        version = rewrites.version
        if not accept_gap or gap is not None:
            raise SourceError(
                f"{self.path}: version {version} ({rewrites.operation}) removes or rewrites rows, "
                "which mode='append' does not follow; nothing was committed. Set mode='changes' (with "
                f"{FEED}) or mode='snapshots' of the source; or run once with accept_gap: true to "
                "leave that commit out"
            )
        kept = [c for c in changes if c.version < version]
        left_out = Change(version, rewrites.time, rewrites.operation, (), False, 0, None)
        return [*kept, left_out], (version, version + 1)

    def _require_feed(self, table: ForeignTable, first: int, changes: Sequence[Change]) -> None:
        if not changes:
            return
        on = table.properties(max(first - 1, 0)).get(FEED) if first else None
        for change in changes:
            if change.properties is not None:
                on = change.properties.get(FEED)
            if change.changes_rows and str(on).lower() != "true":
                raise SourceError(
                    f"{self.path}: version {change.version} ({change.operation}) has no change data "
                    f"feed: expected {FEED}=true, got {on}. Switch it on (ALTER TABLE … SET "
                    f"TBLPROPERTIES ({FEED} = true)); to go on over that version, set "
                    "mode='snapshots' for a run, or begin a new asset with start='current'"
                )

    def _state(
        self, table: ForeignTable, place: _Place, version: int, accept_shrink: bool
    ) -> PinnedVersions:
        kind = PinnedVersions if self.mode == "append" else PinnedState
        limits = self.limits(accept_shrink)
        return self._pinned(kind, table, place, place.gap, [], state=version, limits=limits)

    def _pinned(
        self,
        kind: type[PinnedVersions],
        table: ForeignTable,
        place: _Place,
        gap: tuple[int, int] | None,
        changes: Sequence[Change],
        **state: Any,
    ) -> PinnedVersions:
        version: int | None = state.get("state")
        end = place.first + len(changes) if version is None else version + 1
        told = None if version is None else table.time(version)
        time = changes[-1].time if changes else told
        upkeep = version is None and not any(c.changes_rows for c in changes)
        idle = upkeep and gap is None and len(changes) < _UPKEEP
        return kind(
            table,
            self.mode,
            place.first if version is None or not place.whole else 0,
            place.first if idle else end,
            changes=() if idle else tuple(changes),
            time=time,
            gap=gap,
            max_bad_share=1.0 if kind is PinnedState else self.max_bad_share,
            max_clock_skew=self.max_clock_skew,
            **state,
        )
