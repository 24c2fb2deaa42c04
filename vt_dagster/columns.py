"""The names of the columns that vt_dagster adds to the user's columns.

Every log row has ``timestamp, partition, offset, is_tombstone, recorded_at``, a table's log also
``is_latest`` and ``old``; a versioned table's view adds ``valid_from`` and ``valid_to``.
"""

from __future__ import annotations

TIMESTAMP = "timestamp"
"""Valid time: the time from which the record is true. TIMESTAMP, UTC, microseconds."""
PARTITION = "partition"
"""The partition of the record: INT. Stream time is kept per partition."""
OFFSET = "offset"
"""Gap-free position within the partition of a log: BIGINT, from 0."""
IS_TOMBSTONE = "is_tombstone"
"""True where the record's value is null: a deletion in a table. BOOLEAN."""
RECORDED_AT = "recorded_at"
"""System time: when the log recorded the record. TIMESTAMP, UTC, microseconds; ascending from commit to
commit. One value per commit, unless the source provides the system times. Null in rows that were
written without this column. A run adds it at its commit: operators do not see it."""
IS_LATEST = "is_latest"
"""False for a table's record that was out of order for its key on arrival. BOOLEAN."""
IS_LATE = "is_late"
"""True for a record that arrived later than the grace period allows and was joined at once. BOOLEAN."""
VALID_FROM = "valid_from"
"""Start of a version, inclusive: the record's timestamp."""
VALID_TO = "valid_to"
"""End of a version, exclusive: the next version's ``valid_from``; null = current."""
WAS = "vt_dagster.was"
"""In the metadata of a table's field: the former names of the column, newest first. Rows from before a
rename have the column under these names."""
SEGMENT = "history_segment"
"""The segment of a versioned table's view that holds a row: INT, a Delta partition; null = current.
The library's own reads leave the column out."""

OLD = "old"
"""In a table's log: STRUCT of the value columns and ``timestamp`` of the key's row before this record;
null where the key had no row."""
WINDOW_START = "window_start"
"""Start of a window, inclusive; part of the key of a windowed result."""
WINDOW_END = "window_end"
"""End of a window, exclusive; for a session: the timestamp of its last record, inclusive; for a sliding
window: its start + time difference, inclusive."""

REVISION = "revision"
"""In a corrected join: how often a row was corrected, INT; 0 = the first result."""
CAUSE = "cause"
"""In a corrected join: STRUCT ``table, partition, offset`` of the record that corrected a row; null
where the row came with its stream record."""
IS_FINAL = "is_final"
"""In reads of a corrected join: whether a row can no longer change. BOOLEAN."""
FINAL = "final"
"""A commit's watermark of a corrected join: per partition, the time (inclusive) from which rows can
still change."""
CLOSED_UP_TO = "closed"
"""A commit's watermark of a windowed aggregate: per partition, the time up to which windows have
closed."""
PROVIDED_COLUMNS = "provided_columns"
"""In a table with partial updates: the value columns that a row's own records provided, ARRAY<STRING>;
null = all."""
PROPAGATED_FROM = "propagated_from"
"""In a table with partial updates, INT: 0 for a record. A version that a late record changed is in the
log again, after that record: 1 for the first such version, 2 for the second, and so on. The late record
is at ``offset - propagated_from``."""
BY_COLUMN = "_by_column"
"""In a table with partial updates and ``tie_break``: the suffix of a column whose name begins with that
of ``tie_break``. A MAP from the names of columns to the ``tie_break`` of the record that provides each,
if that is smaller than the row's own; null = none."""
LEFT_PARTITION, LEFT_OFFSET = "left_partition", "left_offset"
"""In a corrected join: the position of the row's record in the stream's log, INT and BIGINT."""
RIGHT_PARTITION, RIGHT_OFFSET = "right_partition", "right_offset"
"""In a corrected join of two streams: the position of the right record in its log, INT and BIGINT; -1
if a side has no record."""

ARRIVAL = "_arrival"
"""Order of arrival of a record: BIGINT. Its offset; where inputs are merged, the stream time of its
input at the record. Only inside a run."""
INPUT = "_input"
"""The input of an operator that a record came from: INT, 0 = left. Only inside a run."""
INPUT_PARTITION = "_input_partition"
"""The partition of the input that a record came from: INT. Only inside a run."""
INPUT_OFFSET = "_input_offset"
"""The record's offset in its input, or another number in that order: BIGINT. Only inside a run."""
ORDER = (ARRIVAL, INPUT, INPUT_PARTITION, INPUT_OFFSET)
"""The order in which a run processes its records; total."""
TURN = "_turn"
"""The order among several results of one record; any type that can be ordered. Only inside a run."""
EMITTED_AT = "_emitted_at"
"""In a join with a grace period, the time up to which the buffer has emitted records when it emits this
one: the record's own timestamp if it waited. In a join of two streams, the stream time at which a
record without a match is emitted. BIGINT, epoch microseconds. Only inside a run."""
AT_ONCE = "_at_once"
"""In a join with a grace period, the arrival of a record that is emitted when it arrives, after waiting
records that are due by then: BIGINT; -1 for a record that waited. Only inside a run."""
OUTCOME = "_outcome"
"""The outcome of a record in a run, a name of ``Outcome``. Only inside a run."""

LOG_COLUMNS = (TIMESTAMP, PARTITION, OFFSET, IS_TOMBSTONE)
RESERVED = frozenset(
    {
        *(PARTITION, OFFSET, IS_TOMBSTONE, RECORDED_AT, IS_LATEST, IS_LATE, VALID_FROM, VALID_TO),
        *(OLD, SEGMENT),
    }
)
