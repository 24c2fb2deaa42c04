"""The names of the columns that vt_dagster adds to a user's own, in one place.

Every log row carries ``timestamp, partition, offset, is_tombstone``, a table's log also
``is_latest``; a versioned table's view adds ``valid_from`` and ``valid_to``.
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
IS_LATEST = "is_latest"
"""False where a table's record was out of order for its key on arrival. BOOLEAN."""
IS_LATE = "is_late"
"""True where a join with grace joined the record at once, since it came after its grace period."""
VALID_FROM = "valid_from"
"""Start of a version, inclusive: the record's timestamp."""
VALID_TO = "valid_to"
"""End of a version, exclusive: the next version's ``valid_from``; null = current."""

ARRIVAL = "_arrival"
"""Order of arrival of a record within its input: BIGINT. Only inside a run."""
FATE = "_fate"
"""What became of a record in a run, one of the ``Fate`` names. Only inside a run."""

LOG_COLUMNS = (TIMESTAMP, PARTITION, OFFSET, IS_TOMBSTONE)
RESERVED = frozenset({PARTITION, OFFSET, IS_TOMBSTONE, IS_LATEST, IS_LATE, VALID_FROM, VALID_TO})
