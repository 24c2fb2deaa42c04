"""A log's commit, and the snapshot of a stream or table as of a commit. No Spark."""

from __future__ import annotations

from dataclasses import dataclass

from vt_dagster.storage.commit_log import Commit
from vt_dagster.storage.view import Base


@dataclass(frozen=True)
class Head:
    """A commit of a log: the last one or an earlier one.

    Args:
        version: a Delta version that contains the commit's rows; for the last commit, its own version.
        later: whether that version also contains rows of later commits.
    """

    version: int
    commit: Commit
    later: bool = False


@dataclass(frozen=True)
class Snapshot:
    """A stream or table as of one commit: a table's view, and the log's tail that the view lacks.

    Args:
        head: the log's commit; None before the first.
        base: the view that the tail is folded into; None = no view (always for streams): all rows are
            read from the log.
    """

    head: Head | None = None
    base: Base | None = None

    @property
    def stream_time(self) -> dict[int, int]:
        """Stream time by partition, epoch microseconds."""
        return {} if self.head is None else self.head.commit.stream_time

    @property
    def total(self) -> int:
        """Records of the log."""
        return 0 if self.head is None else self.head.commit.total

    @property
    def tail(self) -> int:
        """Number of log records that are not in the view."""
        return self.total - (0 if self.base is None else self.base.checkpoint.total)

    def reach(self, moment: int | None = None) -> int:
        """Returns an upper bound of the rows that are current or may end after a time, tail included.

        Args:
            moment: epoch microseconds; None = count current rows only.
        """
        return self.tail + (0 if self.base is None else self.base.reach(moment))
