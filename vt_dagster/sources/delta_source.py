"""An external Delta table as a source: each of its versions is consumed once.

The asset's own commits store the next version, the table's id and the commit time of the last consumed
version. These detect a table that was replaced or restored.
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
from vt_dagster.storage.delta import address
from vt_dagster.topology.durations import in_utc

Mode = Literal["append", "changes", "snapshots"]
_UPKEEP = 100
"""A run without row changes commits its position only after this many versions, so that it moves past
them before Delta cleans up their commits."""


@dataclass(frozen=True)
class _Place:
    """The version at which a run begins.

    Args:
        first: the first version (inclusive).
        whole: whether the run takes the whole table at that version instead of the commit's changes.
        gap: an accepted range of missing versions, end exclusive; None = none.
    """

    first: int
    whole: bool
    gap: tuple[int, int] | None = None


@dataclass(frozen=True)
class DeltaSource:
    """An external Delta table, written by another process.

    Without a column ``timestamp`` in the schema, a record's timestamp is the commit time of its version
    by the writer's clock; for a tombstone always. Records arrive in order of version, and within a
    version by file and row (``append``), or by the key's hash and key. A compaction (OPTIMIZE) gives no
    records.

    Args:
        path: the table's directory or URL, readable by both Spark and ``deltalake``.
        mode: ``append``: the appended rows; a commit that removes or rewrites rows is refused.
            ``changes``: the change data feed, which must be enabled: inserts and updates are upserts;
            deletes are tombstones, and so is the old key of an update that changes the key.
            ``snapshots``: the newest version is the whole state, and the records are the difference to
            the asset's table, as for :class:`SnapshotSource`; versions in between are skipped, unless
            ``max_versions_per_run=1``. The last two modes are for tables only.
        start: where the first run begins. ``current``: all rows of the newest version, then the commits
            after it. ``earliest``: the oldest available version. A number: the changes of that version
            (inclusive; ``snapshots``: its state).
        max_versions_per_run: the limit of versions with row changes per run; None = no limit.
        ignore, max_shrink, on_duplicate: for comparisons of a whole state, as for
            :class:`SnapshotSource`.
        max_bad_share: a run with a larger share of quarantined records fails before its commit.
        max_clock_skew: how far ahead of this machine's clock a timestamp may be.
        upstream: the key of the asset that writes the table, ``shop/export``: a Dagster dependency of
            this asset.
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
        """Whether only tables can have this source."""
        return self.mode != "append"

    @property
    def orders_changes(self) -> bool:
        """Whether the records are changes of a table: the last one of a key is its current row."""
        return self.mode != "append"

    @property
    def restates(self) -> bool:
        """Whether a record may repeat the current row: a row marked as deleted is in each version."""
        return self.whole

    @property
    def whole(self) -> bool:
        """Whether the source gives whole states instead of changes."""
        return self.mode == "snapshots"

    def limits(self, accepted: bool) -> Limits:
        """Returns the limits within which a whole state is accepted."""
        shares = self.max_shrink, self.max_bad_share
        return Limits(*shares, self.on_duplicate, self.ignore, accepted)

    def describe(self) -> str:
        """Returns a description of the source, for metadata and messages."""
        what = {"append": "appended rows", "changes": "changes", "snapshots": "versions"}[self.mode]
        return f"{what} of the Delta table {self.path}"

    def check(self, name: str, key: Sequence[str], schema: StructType) -> None:
        """Checks ``ignore`` against the schema; missing columns of the table show when it is read."""
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
        """Pins the versions of a run. Does not use Spark.

        Args:
            before: the asset's last commit; None = no commit yet.
            version: the last version to read (inclusive); None = the newest.
            accept_gap: continue although versions are gone or the table was replaced: ``append`` with
                the first available commit, or from ``start``; other modes with the difference to the
                current table. In ``append``, also skip a commit that rewrites rows.
            accept_shrink: whether a whole state may be empty, or delete more than ``max_shrink``.
            consumed: not used; the commit holds the version.

        Raises:
            RecordsGoneError: unconsumed versions are gone, or the table was replaced.
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
        """Returns the run config with the newest version. Does not use Spark."""
        pinned = self.pin(before)
        if pinned.empty:
            return News()
        number = pinned.end - pinned.first
        return News({"version": pinned.end - 1}, f"{number:,} new version(s)")

    def _bounded(self, table: ForeignTable, first: int, newest: int) -> list[Change]:
        """Returns the commits up to a version, limited by ``max_versions_per_run``."""
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
                f"{self.path}: {said}. Run once with accept_gap: true to continue "
                f"{'without them' if self.mode == 'append' else 'with the table as it is now'} (the "
                "commit records the gap), or reprocess into a new asset"
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
                    f"{self.path}: expected the commits from version {self.start} on, got commits from "
                    f"version {table.first_commit(table.version)} on; choose a later start or 'current'"
                )
            return _Place(self.start, False)
        if self.start == "current":
            return _Place(table.version, True)
        first = table.first_state()
        return _Place(first, first > 0 and self.mode != "snapshots")

    def _missing(self, table: ForeignTable, known: str, first: int) -> str | None:
        """Returns a description of what is missing after a version, for messages; None = nothing."""
        before, _, time = known.rpartition("@")
        if before != table.id:
            return (
                f"the table was replaced since version {first - 1} was consumed (its id was {before}, "
                f"now {table.id}): its versions refer to other rows"
            )
        if table.version < first - 1:
            return (
                f"consumed up to version {first - 1}, but the table ends at {table.version}: it was "
                "restored to an earlier state"
            )
        last = table.time(first - 1)
        if last is not None and time and last != int(time):
            return (
                f"version {first - 1} was committed at {in_utc(int(time))} when it was consumed, now "
                f"at {in_utc(last)}: the table was restored to an earlier state and got other commits"
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
                "which mode='append' does not support; nothing was committed. Set mode='changes' (with "
                f"{FEED}) or mode='snapshots' of the source, or run once with accept_gap: true to skip "
                "that commit"
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
                    f"feed: expected {FEED}=true, got {on}. Enable it (ALTER TABLE … SET "
                    f"TBLPROPERTIES ({FEED} = true)); to skip that version, set mode='snapshots' for "
                    "one run, or create a new asset with start='current'"
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
