"""A log's commit, and a stream or table as of one. No Spark."""

from __future__ import annotations

from dataclasses import dataclass

from vt_dagster.storage.commit_log import Commit
from vt_dagster.storage.view import Base


@dataclass(frozen=True)
class Head:
    """A commit of a log, the last one or an earlier.

    Args:
        version: a Delta version that has its rows: of the last commit the one that it made.
        later: whether that version has rows of later commits as well.
    """

    version: int
    commit: Commit
    later: bool = False


@dataclass(frozen=True)
class Snapshot:
    """A stream or table as of one commit, as one reads it: a table's view, and the tail of the log that
    is not in it yet.

    Args:
        head: the log's commit; None before the first.
        base: the view that the tail is folded onto; None = there is none, or a stream has none: all is
            in the log.
    """

    head: Head | None = None
    base: Base | None = None

    @property
    def stream_time(self) -> dict[int, int]:
        """Of each partition, epoch microseconds."""
        return {} if self.head is None else self.head.commit.stream_time

    @property
    def total(self) -> int:
        """Records of the log."""
        return 0 if self.head is None else self.head.commit.total

    @property
    def tail(self) -> int:
        """How many of them are not in the view."""
        return self.total - (0 if self.base is None else self.base.checkpoint.total)

    def reach(self, moment: int | None = None) -> int:
        """How many rows are current, or may end after a time, with those of the tail; None = are
        current. More or less, and not less."""
        return self.tail + (0 if self.base is None else self.base.reach(moment))
