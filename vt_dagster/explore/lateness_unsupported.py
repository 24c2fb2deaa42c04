"""Assets for which the cost of other lengths cannot be computed: the reason, and the alternative."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vt_dagster.storage.commit_log import Shape

_COUNTS = {
    "late": "late records",
    "late_records_dropped": "records whose windows had closed",
    "expired_window_records_dropped": "updates of windows that had closed",
    "corrected": "rows that were corrected",
    "corrections_too_late": "rows whose correction came too late: they are in quarantine",
}


@dataclass(frozen=True)
class LatenessUnsupported:
    """Why the cost of other lengths cannot be computed from the logs alone.

    Args:
        why: the reason, in full sentences.
        settings: the options that ``vt-dagster what-if`` can try.
    """

    why: str
    settings: tuple[str, ...]


_SESSIONS = LatenessUnsupported(
    "The records of a session define its window: a record that comes in time may merge two sessions, "
    "and a dropped record leaves two. So another grace changes the windows of other records, and its "
    "cost cannot be counted record by record as for tumbling and hopping windows.",
    ("window.grace",),
)
_SLIDING = LatenessUnsupported(
    "A sliding window begins or ends at a record: the windows of a dropped record do not exist. So "
    "another grace changes which windows exist, and its cost cannot be counted record by record as "
    "for tumbling and hopping windows.",
    ("window.grace",),
)
_CORRECTED = LatenessUnsupported(
    "A later run corrects each row that was joined too early. So no length makes a row wrong, except "
    "for table records that come later than corrected_for: the rows that they would correct are "
    "counted here, and are in quarantine with the record that came too late.",
    ("corrected_for", "grace_period"),
)
_CORRECTED_STREAMS = LatenessUnsupported(
    "A row without a match is retracted when its match comes. So no grace makes a row wrong, except "
    "for records that come later than corrected_for: they are counted here, and are in quarantine.",
    ("corrected_for", "grace"),
)
_AS_KNOWN = LatenessUnsupported(
    "With as_known, each record is joined with the versions that were recorded up to a system time of "
    "its own. Versions recorded later are left out on purpose, so none of them makes a row wrong.",
    ("as_known",),
)
_BY_SOURCE = LatenessUnsupported(
    "It follows the order of its source and accepts each record, however old its timestamp is. So no "
    "record is late for any history retention.",
    (),
)
_OPERATORS = {"CorrectedJoin": _CORRECTED, "CorrectedStreamJoin": _CORRECTED_STREAMS}
_WINDOWS = {"SessionWindow": _SESSIONS, "SlidingWindow": _SLIDING}


def no_cost(shape: Shape) -> LatenessUnsupported | None:
    """Returns why the cost of other lengths cannot be computed; None = ``lateness`` computes it, or the
    asset has no such length."""
    if shape.ordered_by_source:
        return _BY_SOURCE
    meaning, operator = shape.meaning, shape.meaning.get("operator", "")
    if operator == "WindowedAggregate":
        return _WINDOWS.get(meaning.get("window", "").partition("(")[0])
    if operator == "StreamTableJoin" and "as_known" in meaning:
        return _AS_KNOWN
    return _OPERATORS.get(operator)


def came_late(totals: Mapping[str, int]) -> dict[str, int]:
    """Returns an asset's counts of late records, by description."""
    return {said: totals[name] for name, said in _COUNTS.items() if name in totals}
