"""The rules that decide something, each with its name and a sentence: one vocabulary for what becomes
of a record (``core.arrival_order.Outcome``), the reasons of the quarantine, explanations and the
documentation.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """A rule that decides what becomes of a record.

    Args:
        name: as counts, the quarantine and explanations have it.
        says: what it decides, in a sentence.
    """

    name: str
    says: str

    def __str__(self) -> str:
        return self.name


RULES: dict[str, Rule] = {}
"""All rules by name."""


def _rule(name: str, says: str) -> Rule:
    RULES[name] = Rule(name, says)
    return RULES[name]


# -- what becomes of a record: each has one of these outcomes ---------------------------------------

APPLIED = _rule("applied", "it is in the log; of a join: it was joined, at once or out of the buffer")
LATE = _rule(
    "late",
    "it came when stream time was past its timestamp by more than the history retention (a table "
    "refuses it) or the grace period (a join joins it at once)",
)
LOST_TIE = _rule(
    "lost_tie",
    "its table has a record of its key and timestamp with a larger value of tie_break: it is not "
    "applied",
)
CARRIED = _rule(
    "carried",
    "no record: a record also changes this later version, which is in the log once more: what a late "
    "record says of a part of its row holds in it too; or the source sent the record after the version "
    "and gave it an earlier time, so it is in force again from the version's time on",
)
COVERED = _rule(
    "covered",
    "a row of the snapshot that its table starts with, of a key of which the changes tell a record of "
    "that time or before: it is not applied",
)
NOTHING_NEW = _rule(
    "nothing_new",
    "the source says again what the table has of the key: Debezium by a null message after a deletion "
    "or a snapshot's row (op r) with the same values, a dump by a row that deleted_when holds for and "
    "the table has not got; it is not applied",
)
WAITING = _rule("waiting", "stream time has not passed its timestamp by the grace period: it is held")
DROPPED = _rule("dropped", "there is no use for it: it lacks a key or value, or is out of order")
NO_RESULT = _rule("no_result", "the operator took it, and had nothing to say")
AGAIN = _rule("again", "no new record: it was joined in a run before, and is looked up anew")
TOO_LATE = _rule(
    "too_late",
    "the same, for which a record of the table came too late: the row can no longer change; of two "
    "streams, a record that came so late",
)
CHANGE = _rule("change", "a record of a table, which may correct what has been joined")
KEPT = _rule("kept", "no record: what an operator knows from before, and keeps for the next run")
QUARANTINED = _rule("quarantined", "it is no record, and is kept aside with its reason")

# -- why a row is no record ----------------------------------------------------------------------

UNREADABLE = _rule("unreadable", "the row cannot be read as the schema says")
UNREADABLE_FILE = _rule("unreadable_file", "the file cannot be read as a whole")
UNKNOWN_SCHEMA = _rule("unknown_schema", "the registry does not have the schema that the message names")
NULL_KEY = _rule("null_key", "a column of the key is null")
NULL_TIMESTAMP = _rule("null_timestamp", "the timestamp is null, or cannot be computed")
FUTURE_TIMESTAMP = _rule(
    "future_timestamp", "the timestamp is further than max_clock_skew ahead of the clock"
)
IMPOSSIBLE_TIMESTAMP = _rule("impossible_timestamp", "the timestamp is outside the years 1 to 9999")
NULL_RECORDED_AT = _rule("null_recorded_at", "the source does not tell when it has recorded the row")
FUTURE_RECORDED_AT = _rule(
    "future_recorded_at", "the time of record is further than max_clock_skew ahead of the clock"
)
NULL_PARTITION = _rule("null_partition", "partition_by gives null, or cannot be computed")
NULL_TOMBSTONE = _rule("null_tombstone", "the tombstone condition cannot be computed")
UNKNOWN_COLUMNS = _rule("unknown_columns", "only_columns does not tell which columns the record says")
DUPLICATE_KEY = _rule("duplicate_key", "the key is there twice in a dump")

# -- what decides in an operator -----------------------------------------------------------------

OUT_OF_ORDER = _rule(
    "out_of_order",
    "its timestamp is before that of its key's latest record: it is put in its place in the history "
    "and triggers no result of a table-table join or an aggregate",
)
TRIGGERED = _rule(
    "triggered",
    "the record that the result came with: a change of either side of a join of tables, or what "
    "updated a group or a window",
)
REPLACED = _rule("replaced", "a later record of the key and the same timestamp took its place")
REPEATED = _rule(
    "repeated",
    "it has the values of the version before it in the columns of new_version_on: it makes no version",
)
AS_OF = _rule(
    "as_of",
    "the version of the key that is valid at the record's timestamp: from valid_from (inclusive) to "
    "valid_to (exclusive)",
)
OTHER_TIME = _rule("other_time", "the version is valid at other times than the record's timestamp")
RECORDED_SINCE = _rule("recorded_since", "it was recorded after the run had looked")
LATEST = _rule("latest", "the row that the key has when it is looked at")
NO_MATCH = _rule("no_match", "the other side has no row of the key then: nulls, or no result")
MATCHED = _rule(
    "matched",
    "two records of a key match: the right one is in the window before and after the left one",
)
TOO_OLD = _rule(
    "too_old", "the version began longer before the record than max_age: as without a match"
)
DELETED = _rule("deleted", "the version that is valid then is a tombstone: as without a match")
ENDED = _rule("ended", "the version had ended by then, by its valid_until: as without a match")
HORIZON = _rule(
    "horizon",
    "the record is older than stream time - history retention of the table: only the current version "
    "may still answer",
)
EXPIRED = _rule("expired", "the version ended at stream time - history retention or before")
RELEASED = _rule(
    "released",
    "it waited until stream time was its timestamp + grace period (of suppress: time limit) or later, "
    "and went out",
)
WINDOW_CLOSED = _rule(
    "window_closed",
    "stream time has passed the end of its window by the grace period",
)
SUPPRESSED = _rule("suppressed", "the update is held until a time limit, or until its window closes")
CORRECTED = _rule(
    "corrected", "what has been recorded since gives another answer than the one that was given then"
)

_COUNTED = (
    *(APPLIED, CARRIED, LATE, LOST_TIE, COVERED, NOTHING_NEW, DROPPED, WAITING, QUARANTINED),
    CORRECTED,
)
METRICS = {
    **{f"records_{rule}": rule for rule in _COUNTED},
    "records_unmatched": NO_MATCH,
    "records_corrections_too_late": TOO_LATE,
    "late_records_dropped": WINDOW_CLOSED,
    "expired_window_records_dropped": WINDOW_CLOSED,
    "suppression_emit": RELEASED,
}
"""The numbers of a materialization that count what a rule decided, by their names."""
