"""``lateness``: the cost of other grace periods or history retentions. No Spark.

Reads the logs in order of arrival, and the commits: each commit records the offsets that its run
consumed and the versions of tables that it read. So no definitions are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from vt_dagster.errors import StorageError
from vt_dagster.provenance.explain_stream_table_join import grace_of
from vt_dagster.provenance.join_lateness import LateJoin
from vt_dagster.provenance.lateness_results import Choice, Lateness
from vt_dagster.provenance.log_reader import Log
from vt_dagster.provenance.retention_lateness import LateRecords
from vt_dagster.provenance.window_lateness import LateWindows
from vt_dagster.topology.durations import parse_length, spoken

GRACES = ("0s", "1m", "10m", "1h", "6h", "1d")
RETENTIONS = ("0s", "1h", "6h", "1d", "7d", "30d")
_JOIN, _WINDOWS = "StreamTableJoin", "WindowedAggregate"


def lateness(
    table: Any,
    *,
    grace: Sequence[str | timedelta] = (),
    at_most: str | float | None = None,
    warehouse: str = "data/warehouse",
) -> Lateness:
    """Computes how many results of an asset would be wrong or late with other lengths. No Spark.

    The length is the grace period of a join of a stream with a versioned table, the grace of tumbling
    or hopping windows, or the history retention of a versioned table. The numbers are those of the
    asset's runs with that length: each run consumes the same records and reads the same tables.

    Args:
        table: an asset's name (with a key prefix: ``shop/prices``), or the stream or table itself.
        grace: the lengths, as timedeltas or texts like ``10m``; empty = a default list and the declared
            length. If ``table`` is a name, the length of the last run is used as the declared one,
            where it is known.
        at_most: the maximum share of wrong results, like ``"0.1%"`` or 0.001: the result then suggests
            the shortest length that meets it.
        warehouse: the directory or URL of the tables.

    Raises:
        StorageError: there is no such asset, its inputs are missing, or it has no such length.
        ContractError: a text in ``grace`` is not a length.
    """
    name = table if isinstance(table, str) else "/".join(table.path)
    log, share = Log.open(str(warehouse), name), parse_share(at_most)
    asked = [one if isinstance(one, timedelta) else parse_length(one) for one in grace]
    operator = log.meaning.get("operator", "source")
    found: LateJoin | LateWindows | LateRecords
    declared, notes = None, list[str]()
    if operator == _JOIN:
        found, what = LateJoin(log, *_inputs(log, "left", "right")), "grace_period"
        join = getattr(table, "operator", None)
        declared = _declared_grace(log) if join is None else join.grace_period or timedelta(0)
    elif operator == _WINDOWS:
        found, what = LateWindows(log, *_inputs(log, "source")), "grace"
        window = getattr(getattr(table, "operator", None), "window", None)
        declared = getattr(window, "grace", None)
    elif log.head.shape.ordered_by_source:
        raise StorageError(
            f"{name} follows the order of its source and accepts each record, however old: no record "
            "is late for any history_retention; use lateness for the joins and windows that read it"
        )
    elif log.head.shape.kind == "versioned":
        found, what = LateRecords(log), "history_retention"
        declared = log.head.shape.retention()
    else:
        raise StorageError(
            f"{name} is made by {operator}: expected a join of a stream with a versioned table whose "
            "results are not corrected, an aggregate by tumbling or hopping windows, or a versioned "
            "table"
        )
    declared = declared if isinstance(declared, timedelta) else None
    usual = RETENTIONS if what == "history_retention" else GRACES
    lengths = {*asked} or {*map(parse_length, usual)}
    if declared is not None and (share is not None or not asked):
        lengths.add(declared)
    choices = found.cost(sorted(lengths))
    suggested = None
    if share is not None:
        best = found.smallest(share)
        if best is None:
            notes.append(_hopeless(found))
        else:
            suggested, choices = best.length, [*choices, best]
    notes += _notes(found, choices)
    by_length = {one.length: replace(one, declared=one.length == declared) for one in choices}
    ordered = tuple(by_length[one] for one in sorted(by_length))
    return Lateness(name, operator, what, ordered, share, suggested, tuple(notes))


def parse_share(at_most: str | float | None) -> float | None:
    """Returns a share of results, 0 to 1; None for None.

    Raises:
        StorageError: ``at_most`` is not a share.
    """
    if at_most is None:
        return None
    text = str(at_most).strip()
    try:
        found = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        found = -1.0
    if not 0 <= found <= 1 or (isinstance(at_most, str) and not text.endswith("%")):
        raise StorageError(
            f"expected a share of the results like '0.1%', or a number from 0 to 1, got {at_most!r}"
        )
    return found


def _inputs(log: Log, *places: str) -> list[Log]:
    found: list[Log] = []
    for name in (log.meaning[place] for place in places):
        one = log.input(name)
        if one is None:
            raise StorageError(
                f"{log.name}: expected the log of its input {name} in {log.warehouse}, found none, or "
                "not the log that it was made of"
            )
        found.append(one)
    return found


def _declared_grace(log: Log) -> timedelta | None:
    commit = log.commit
    told = {grace_of(commit, p) for p in commit.emitted_up_to}
    return told.pop() if len(told) == 1 else None


def _hopeless(found: LateJoin | LateWindows | LateRecords) -> str:
    if isinstance(found, LateRecords):
        return "no retention is suggested: how late the refused records were is not known"
    return (
        "no grace period is suggested: too many versions of the table had expired; a longer "
        "history retention would have kept them"
    )


def _notes(found: LateJoin | LateWindows | LateRecords, choices: Sequence[Choice]) -> list[str]:
    if isinstance(found, LateRecords):
        doubtful = found.doubtful([one.length for one in choices])
        return [
            f"the number refused with {spoken(one)} is an upper bound: how late each refused record "
            "was is known only to the precision of its run"
            for one in sorted(doubtful)
        ]
    if isinstance(found, LateJoin):
        retention = found.table.head.shape.retention()
        longer = [
            c.length for c in choices if isinstance(retention, timedelta) and c.length > retention
        ]
        notes = [
            f"{spoken(one)} is longer than the history retention {spoken(retention)} of "
            f"{found.table.name}: lengthen that with it"
            for one in longer
        ]
        first = found.runs[0].batch
        if first > 1:
            notes.append(
                f"the commits of the runs before run {first} are gone: they are counted as a part of it"
            )
        return notes
    return []
