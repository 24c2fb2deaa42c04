"""Of which assets no page tells what another length would have cost: why, and what does."""

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
    """Why the cost of other lengths cannot be told from the logs alone.

    Args:
        why: in sentences.
        settings: the lengths that ``vt-dagster what-if`` can try.
    """

    why: str
    settings: tuple[str, ...]


_SESSIONS = LatenessUnsupported(
    "A session is what its records make of it: one that comes in time may join two sessions, and one "
    "that is dropped leaves two. So what another grace lets in changes the windows of other records, "
    "and cannot be counted record by record, as it is for tumbling and hopping windows.",
    ("window.grace",),
)
_SLIDING = LatenessUnsupported(
    "A sliding window begins or ends at a record: one that is dropped takes its windows with it. So "
    "what another grace lets in changes which windows there are, and cannot be counted record by "
    "record, as it is for tumbling and hopping windows.",
    ("window.grace",),
)
_CORRECTED = LatenessUnsupported(
    "Its rows follow what they are joined with: one that goes out too early is corrected by a later "
    "run. So no length makes it wrong, but for what comes later than corrected_for: such rows are "
    "counted here, and are in quarantine with the record that came too late.",
    ("corrected_for", "grace_period"),
)
_CORRECTED_STREAMS = LatenessUnsupported(
    "That a record has no match is taken back when its match comes. So no grace makes a row wrong, but "
    "for what comes later than corrected_for: it is counted here, and is in quarantine.",
    ("corrected_for", "grace"),
)
_AS_KNOWN = LatenessUnsupported(
    "It is joined by what was known at a time of each record's own (as_known). What comes later than "
    "that is left out on purpose, so nothing is wrong by what is known now.",
    ("as_known",),
)
_BY_SOURCE = LatenessUnsupported(
    "It follows the order of its source: each record is taken, however old its timestamp is. So no "
    "record of it is late, whatever its history retention is.",
    (),
)
_OPERATORS = {"CorrectedJoin": _CORRECTED, "CorrectedStreamJoin": _CORRECTED_STREAMS}
_WINDOWS = {"SessionWindow": _SESSIONS, "SlidingWindow": _SLIDING}


def no_cost(shape: Shape) -> LatenessUnsupported | None:
    """Why an asset has no cost of other lengths; None = ``lateness`` tells it, or it has none."""
    if shape.ordered_by_source:
        return _BY_SOURCE
    meaning, operator = shape.meaning, shape.meaning.get("operator", "")
    if operator == "WindowedAggregate":
        return _WINDOWS.get(meaning.get("window", "").partition("(")[0])
    if operator == "StreamTableJoin" and "as_known" in meaning:
        return _AS_KNOWN
    return _OPERATORS.get(operator)


def came_late(totals: Mapping[str, int]) -> dict[str, int]:
    """What an asset's runs have counted of what came late, in words."""
    return {said: totals[name] for name, said in _COUNTS.items() if name in totals}
