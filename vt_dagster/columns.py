"""The names of the columns that vt_dagster adds to a user's own, in one place.

Every log row carries ``timestamp, partition, offset, is_tombstone, recorded_at``, a table's log also
``is_latest`` and ``old``; a versioned table's view adds ``valid_from`` and ``valid_to``.
"""

from __future__ import annotations

TIMESTAMP = "timestamp"
"""When the record was true: TIMESTAMP, UTC, microseconds."""
PARTITION = "partition"
"""The partition the record came in: INT. Stream time is kept per partition."""
OFFSET = "offset"
"""Gap-free position within the partition of a log: BIGINT, from 0."""
IS_TOMBSTONE = "is_tombstone"
"""True where the record's value is null: a deletion in a table. BOOLEAN."""
RECORDED_AT = "recorded_at"
"""When the record came into the log: TIMESTAMP, UTC, microseconds; one value a commit, ascending from
commit to commit. Null where it is from before that was noted. A run adds it as it commits: operators do
not see it."""
IS_LATEST = "is_latest"
"""False where a table's record was out of order for its key on arrival. BOOLEAN."""
IS_LATE = "is_late"
"""True where a join with grace joined the record at once, since it came after its grace period."""
VALID_FROM = "valid_from"
"""Start of a version, inclusive: the record's timestamp."""
VALID_TO = "valid_to"
"""End of a version, exclusive: the next version's ``valid_from``; null = current."""
WAS = "vt_dagster.was"
"""In the metadata of a table's field: the names that the column had before, the newest first. Rows of
before have it under these."""
SEGMENT = "history_segment"
"""The part of a versioned table's view that a row is stored in: INT, a Delta partition; null = current.
The library's own reads leave it out."""

OLD = "old"
"""In a table's log: STRUCT of the value columns and ``timestamp`` of the key's row before this record;
null where there was none."""
WINDOW_START = "window_start"
"""Start of a window, inclusive; part of the key of a windowed result."""
WINDOW_END = "window_end"
"""End of a window, exclusive; a session's is the timestamp of its last record, inclusive, and a
sliding window's its start + time difference, inclusive."""

REVISION = "revision"
"""Of a corrected join: how often a row has been corrected, INT; 0 = as it was joined first."""
CAUSE = "cause"
"""Of a corrected join: STRUCT ``table, partition, offset`` of the record that corrected a row; null
where it came with its stream record."""
IS_FINAL = "is_final"
"""Of a corrected join, where its rows are read: whether a row can no longer change. BOOLEAN."""
FINAL = "final"
"""The mark of a commit that tells it: the time from which on rows of a partition can, inclusive."""
PROVIDED_COLUMNS = "provided_columns"
"""Of a table whose records may say a part of their row: the value columns that a row's own records
gave, ARRAY<STRING>; null = all."""
PROPAGATED_FROM = "propagated_from"
"""Of the same, INT: 0 for a record; a version that a late record changed is in the log once more, with
the number of such rows since that record: which is at ``offset - propagated_from``."""
LEFT_PARTITION, LEFT_OFFSET = "left_partition", "left_offset"
"""Of a corrected join: where the row's record is in the stream's log, INT and BIGINT."""
RIGHT_PARTITION, RIGHT_OFFSET = "right_partition", "right_offset"
"""The same of the right side, where that is a stream too; -1 where a side has no record."""

ARRIVAL = "_arrival"
"""Order of arrival of a record: BIGINT. Its offset, or where inputs are merged the stream time of its
input as of the record. Only inside a run."""
INPUT = "_input"
"""Which input of an operator a record came from: INT, 0 = left. Only inside a run."""
HOME = "_home"
"""The partition of the input that a record came from: INT. Only inside a run."""
SEQUENCE = "_sequence"
"""The offset in the input that a record came from: BIGINT. Only inside a run."""
ORDER = (ARRIVAL, INPUT, HOME, SEQUENCE)
"""The order in which a run takes its records; total."""
TURN = "_turn"
"""The order among several results of one record; any type that can be ordered. Only inside a run."""
OUTCOME = "_outcome"
"""What became of a record in a run, one of the ``Outcome`` names. Only inside a run."""

LOG_COLUMNS = (TIMESTAMP, PARTITION, OFFSET, IS_TOMBSTONE)
RESERVED = frozenset(
    {
        *(PARTITION, OFFSET, IS_TOMBSTONE, RECORDED_AT, IS_LATEST, IS_LATE, VALID_FROM, VALID_TO),
        *(OLD, SEGMENT),
    }
)
