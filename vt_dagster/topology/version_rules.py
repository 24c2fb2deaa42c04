"""The rules of versions of a versioned table, defined once: the declaration and each commit have them.

Times are epoch microseconds, or arrays of them. ``core.versioned_table`` has the rules as Spark plans,
``storage.arrow_reader`` as operations on arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from vt_dagster.topology.durations import Duration, in_micros, length_at

EVER = -(2**63)
"""Earlier than every time, epoch microseconds."""


@dataclass(frozen=True)
class VersionRules:
    """The rules of one versioned table.

    Args:
        key: the key columns.
        history_retention, tie_break, valid_until, new_version_on: see ``VersionedTable``.
        earlier: earlier names of columns, by column.
    """

    key: Sequence[str]
    history_retention: Duration
    tie_break: str | None = None
    valid_until: str | None = None
    new_version_on: Sequence[str] | None = None
    earlier: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])

    @property
    def always_provided(self) -> list[str]:
        """The columns that each partial update provides with ``tie_break``, which decides for each
        column: that column and ``valid_until``. Empty without ``tie_break``."""
        if self.tie_break is None:
            return []
        return [self.tie_break, *([] if self.valid_until is None else [self.valid_until])]

    def horizons(self, stream_time: Mapping[int, int]) -> dict[int, int]:
        """Returns by partition the time from which on (inclusive) the table answers: stream time less
        the history retention.

        Source: KIP-889 "history retention", FORMAT 4.1.4; kip889-expired-get.
        """
        return {p: now - self.retention_micros(p) for p, now in stream_time.items()}

    def horizon(self, stream_time: Mapping[int, int]) -> int:
        """Returns the time from which on (inclusive) the table answers for every key; before its first
        record that is every time."""
        return max(self.horizons(stream_time).values(), default=EVER)

    def retention_micros(self, partition: int) -> int:
        """Returns the history retention of a partition, microseconds."""
        return length_at(self.history_retention, partition) // timedelta(microseconds=1)

    def same_versions(self, new_version_on: Sequence[str] | None) -> bool:
        """Returns whether an earlier ``new_version_on`` makes the same versions; its columns may have
        been renamed since."""
        now = {old: new for new, before in self.earlier.items() for old in before}
        then = None if new_version_on is None else [now.get(c, c) for c in new_version_on]
        return then == self.stored()["new_version_on"]

    def stored(self) -> dict[str, Any]:
        """Returns the rules that decide which rows a view has, as its checkpoint stores them."""
        on = self.new_version_on
        return {
            "history_retention": in_micros(self.history_retention),
            "new_version_on": None if on is None else list(on),
        }


def valid_until_of(node: Any) -> str | None:
    """Returns the ``valid_until`` column of a stream or table, if any."""
    return None if node.version_rules is None else node.version_rules.valid_until


def new_version_on_of(node: Any) -> Sequence[str] | None:
    """Returns the columns that define a version of a stream or table; None = every record is one."""
    return None if node.version_rules is None else node.version_rules.new_version_on


def expired(begin: Any, end: Any, is_tombstone: Any, horizon: Any) -> Any:
    """Returns whether a version has expired: it ended at or before the horizon. A tombstone from before
    the horizon has expired too, since no later record can be accepted before it; also a superseded one:
    otherwise the result would depend on when its successor was folded in.

    Args:
        begin, end: when it begins (inclusive) and ends (exclusive), as arrays or Spark columns; of a
            current version a time after all others, or null.

    Source: FORMAT 4.1.4, 4.1.5; kip889-expired-get.
    """
    return (end <= horizon) | (is_tombstone & (begin < horizon))
