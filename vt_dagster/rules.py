"""The rules of record processing, each with a name and a sentence: one vocabulary for outcomes of
records (``core.arrival_order.Outcome``), quarantine reasons, explanations and the documentation.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """A rule that decides the outcome of a record.

    Args:
        name: used in counts, the quarantine and explanations.
        description: the rule, in a sentence.
    """

    name: str
    description: str

    def __str__(self) -> str:
        return self.name


RULES: dict[str, Rule] = {}
"""All rules by name."""


def _rule(name: str, description: str) -> Rule:
    RULES[name] = Rule(name, description)
    return RULES[name]


# -- outcomes: each record has exactly one ----------------------------------------------------------

APPLIED = _rule(
    "applied", "the record is in the log; in a join: it was joined, at once or out of the buffer"
)
LATE = _rule(
    "late",
    "on arrival its timestamp was behind stream time by more than the history retention (a table "
    "rejects it), the grace period (a join joins it at once) or within (a stream with unique_by "
    "rejects it, unless it is a duplicate)",
)
LOST_TIE = _rule(
    "lost_tie",
    "the table has a record of the same key and timestamp with a larger value of tie_break: the record "
    "is not applied; a partial update only if there is one for each column that it provides",
)
DUPLICATE = _rule(
    "duplicate",
    "an earlier record of its partition has the same value of unique_by, and stream time is at most "
    "within ahead of the latest such record: the record is not applied",
)
CARRIED = _rule(
    "carried",
    "not a new record: an existing version that enters the log again, because an earlier-dated record "
    "changed it: a late partial update also applies to this version; or the source sent that record "
    "after this version, so its value is valid again from the version's time on",
)
COVERED = _rule(
    "covered",
    "a row of the table's start snapshot whose key has a change at or before the row's time: the row "
    "is not applied",
)
NOTHING_NEW = _rule(
    "nothing_new",
    "the source repeats what the table has for the key: Debezium with a null message after a deletion "
    "or a snapshot row (op r) with the same values, a dump with a row that deleted_when matches and "
    "that is not in the table; the record is not applied",
)
WAITING = _rule(
    "waiting", "stream time has not passed its timestamp by the grace period: the record is buffered"
)
DROPPED = _rule("dropped", "unusable: the record lacks a key or a value, or is out of order")
NO_RESULT = _rule("no_result", "the operator processed the record and produced no result")
AGAIN = _rule(
    "again", "not a new record: an earlier run joined it, and it is re-joined because its table changed"
)
TOO_LATE = _rule(
    "too_late",
    "a previously joined record whose correction came too late: the row can no longer change; in a "
    "join of two streams: a record that came too late",
)
CHANGE = _rule("change", "a record of a table, which may correct previously joined rows")
KEPT = _rule("kept", "not a new record: state of the operator from earlier runs, kept for the next run")
QUARANTINED = _rule("quarantined", "not a valid record: the row is kept aside with the reason")

# -- quarantine reasons: why a row is not a valid record -----------------------------------------

UNREADABLE = _rule("unreadable", "the row does not match the schema")
UNREADABLE_FILE = _rule("unreadable_file", "the whole file cannot be read")
UNKNOWN_SCHEMA = _rule("unknown_schema", "the registry does not have the message's schema")
NULL_KEY = _rule("null_key", "a column of the key is null")
NULL_TIMESTAMP = _rule("null_timestamp", "the timestamp is null or cannot be computed")
FUTURE_TIMESTAMP = _rule(
    "future_timestamp", "the timestamp is more than max_clock_skew ahead of the clock"
)
IMPOSSIBLE_TIMESTAMP = _rule("impossible_timestamp", "the timestamp is outside the years 1 to 9999")
NULL_RECORDED_AT = _rule("null_recorded_at", "the source has no system time for the row")
FUTURE_RECORDED_AT = _rule(
    "future_recorded_at", "the system time is more than max_clock_skew ahead of the clock"
)
NULL_PARTITION = _rule("null_partition", "partition_by is null or cannot be computed")
NULL_TOMBSTONE = _rule("null_tombstone", "the tombstone condition cannot be computed")
UNKNOWN_COLUMNS = _rule(
    "unknown_columns", "only_columns does not name the columns that the record provides"
)
BROKEN_CONTRACT = _rule(
    "broken_contract",
    "the row breaks row-wise checks of its pandera model, with on_contract_break='quarantine'; the "
    "reason names the checks and their columns",
)
DUPLICATE_KEY = _rule("duplicate_key", "the key occurs twice in a dump")

# -- decisions of operators ----------------------------------------------------------------------

OUT_OF_ORDER = _rule(
    "out_of_order",
    "its timestamp is before that of its key's latest record: the record is inserted at its place in "
    "the history and triggers no result of a table-table join or an aggregate",
)
TRIGGERED = _rule(
    "triggered",
    "the record that produced the result: a change of either side of a table-table join, or an update "
    "of a group or a window",
)
REPLACED = _rule("replaced", "a later record of the same key and timestamp replaced it")
REPEATED = _rule(
    "repeated",
    "its values equal those of the version before it in the columns of new_version_on: the record "
    "makes no version",
)
AS_OF = _rule(
    "as_of",
    "the version of the key that is valid at the record's timestamp: from valid_from (inclusive) to "
    "valid_to (exclusive)",
)
NEXT = _rule(
    "next",
    "the first version of the key with a value that starts at the record's timestamp or after (a join "
    "with at='at_or_after'), or only after (at='after')",
)
NEAREST = _rule(
    "nearest",
    "the version that starts nearest to the record's timestamp: either the one that is valid at that "
    "time or the first one that starts after it; the earlier one if both are equally near (a join with "
    "at='nearest')",
)
FIRST_VERSION = _rule(
    "first_version",
    "the record is from before all versions of its key: the first version with a value matches (a join "
    "with before_first='first_version')",
)
OTHER_TIME = _rule("other_time", "the version is valid at other times than the record's timestamp")
RECORDED_SINCE = _rule("recorded_since", "the version was recorded after the run's lookup")
LATEST = _rule("latest", "the row of the key at the time of the lookup")
NO_MATCH = _rule("no_match", "the other side has no row of the key at that time: nulls, or no result")
MATCHED = _rule(
    "matched",
    "two records of a key match: the right one is in the window before and after the left one",
)
TOO_OLD = _rule(
    "too_old",
    "the version began more than max_age before the record, or after it in a join that looks ahead: "
    "treated as no match",
)
DELETED = _rule("deleted", "the version valid at that time is a tombstone: treated as no match")
ENDED = _rule("ended", "the version had ended by its valid_until: treated as no match")
HORIZON = _rule(
    "horizon",
    "the record is older than the table's stream time - history retention: only the current version "
    "can still match",
)
EXPIRED = _rule("expired", "the version ended at stream time - history retention or before")
RELEASED = _rule(
    "released",
    "the record waited until stream time reached its timestamp + grace period (of suppress: + time "
    "limit), and was emitted",
)
WINDOW_CLOSED = _rule(
    "window_closed",
    "stream time has passed the end of its window by the grace period",
)
SUPPRESSED = _rule("suppressed", "the update is held until a time limit, or until its window closes")
CORRECTED = _rule("corrected", "records that came later give another result than the one given before")

_COUNTED = (
    *(APPLIED, CARRIED, LATE, LOST_TIE, DUPLICATE, COVERED, NOTHING_NEW, DROPPED, WAITING, QUARANTINED),
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
"""The metrics of a materialization that count a rule's decisions, by metric name."""
