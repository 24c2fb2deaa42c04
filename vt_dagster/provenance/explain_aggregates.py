"""Explains rows of aggregates, of windows, and of suppress.

- Aggregates without windows: the rows or records of a group.
- Windowed aggregates: the records of a window, and those that came too late for it.
- suppress: the emitted update, the time from which on its key waited, and the replaced updates.

A closed window never opens again: its records in order of arrival are first accepted, then all late.
The results of a run show how many records it accepted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from vt_dagster import rules
from vt_dagster.columns import (
    IS_LATEST,
    IS_TOMBSTONE,
    OFFSET,
    OLD,
    PARTITION,
    RECORDED_AT,
    TIMESTAMP,
    WINDOW_END,
    WINDOW_START,
)
from vt_dagster.errors import counted
from vt_dagster.provenance.explain_request import (
    Arrivals,
    Candidate,
    Derivation,
    ExplainRequest,
    Log,
    Place,
    Reasoning,
    Record,
    between,
    both,
    places,
    places_of,
    time_if_known,
    triggering_update,
)
from vt_dagster.provenance.expressions import Group, replaced_rows
from vt_dagster.storage.arrow_reader import equals_old, values_by_partition
from vt_dagster.storage.values import as_key
from vt_dagster.topology import specification as spec
from vt_dagster.topology.durations import as_time

_OURS = (TIMESTAMP, IS_TOMBSTONE, RECORDED_AT)


AggregateSpec = spec.StreamAggregateSpec | spec.TableAggregateSpec | spec.WindowedAggregateSpec
_LATE = "late_records_dropped"
"""A run's count of records whose windows were closed."""
WindowRequest = ExplainRequest[spec.WindowedAggregateSpec]


def keys_of(operator: AggregateSpec, source: Log) -> Sequence[tuple[str, str]]:
    """Returns the (name, SQL expression) pairs of an aggregate's key, without the window."""
    return operator.group_key or [(c, c) for c in source.key]


def needs_spark(request: ExplainRequest[AggregateSpec]) -> Derivation:
    """Returns no inputs, with a note that computing the group's key needs Spark."""
    request.note(
        f"the group {', '.join(map(str, request.specification.group_key))} cannot be computed without "
        f"Spark: explain the rows of {request.source.name} by key"
    )
    return Derivation()


def members(
    request: ExplainRequest[Any],
    found: Sequence[Place],
    also: Iterable[Place] = (),
    count: int | None = None,
) -> Derivation:
    """Returns a group's newest records and the number of all.

    Args:
        found: the places of the group's records, in order of arrival.
        also: places of further records to return in any case.
        count: the number of all records, if ``found`` has only a part; None = its length.
    """
    extra = set(also)
    count = len(found) if count is None else count
    shown = [*found[-request.most :]]
    order = {place: i for i, place in enumerate(found)}
    records = request.source.at({*shown, *extra})
    records.sort(key=lambda one: (order.get(one.place, -1), one.place))
    if count > len(shown):
        request.note(f"the newest {len(shown)} of the {count:,} records that are included")
    return Derivation([(request.source, one) for one in records], count + len(extra - {*found}))


def stream_aggregate(request: ExplainRequest[spec.StreamAggregateSpec]) -> Derivation:
    """Returns the stream records in a group, see ``core.aggregates``."""
    name, source = request.specification.source, request.source
    group = Group(source, keys_of(request.specification, source), request.record.values)
    rows = source.rows(group.condition(), end=request.end(name), only=[*_OURS, *group.columns])
    inside = group.has(rows)
    if inside is None:
        return needs_spark(request)
    rows = rows.filter(pa.array(inside & ~rows.column(IS_TOMBSTONE).to_numpy()))
    before = values_by_partition(rows, request.start(name), 0) > rows.column(OFFSET).to_numpy()
    entries = narrow(source, rows.filter(pa.array(~before)))
    rekeyed = bool(request.specification.group_key)
    new = _in_order(request, entries, rekeyed)
    gone = request.misses(name, here=not rekeyed)
    erased = rekeyed and _loses_trigger(request, new) and request.misses_erased(name)
    place = None if gone or erased else triggering_update(request, _times(request, new))
    unknown = gone or (place is None and request.misses_results)
    new = [] if unknown else new if place is None else new[: place + 1]
    earlier = rows.filter(pa.array(before)).sort_by([(RECORDED_AT, "ascending"), (OFFSET, "ascending")])
    count = earlier.num_rows + len(new)
    gone = gone or request.misses_earlier(name, here=not rekeyed)
    if rekeyed and not erased and request.misses_earlier_erased(name):
        gone = True
        request.note(f"records of {name} were erased: which of them its group had is not known")
    if place is not None:
        number = "" if gone else f", record number {count} of its group"
        request.decide(rules.TRIGGERED, f"{new[place]}{number}")
    shown = earlier.slice(max(0, earlier.num_rows - request.most))
    taken = places_of(shown) + places(new)
    if request.log.versioned:
        request.note(
            "records that the result refused as older than its history retention may be among these"
        )
    return members(request, taken, count=count)


def _loses_trigger(request: ExplainRequest[AggregateSpec], updates: Sequence[Record]) -> bool:
    """Returns whether a run's updates may lack the one that triggered the result, and not show it: they
    show it if there is a result for each."""
    is_each = request.of_run.emit == "every_update" and not request.log.versioned
    return not is_each or len(request.run_results) < len(updates)


def _in_order(
    request: ExplainRequest[AggregateSpec], records: Sequence[Record], merges: bool = True
) -> list[Record]:
    """Returns records of the only input in the order in which runs consume them, see ``Arrivals``."""
    arrivals = Arrivals(request, [request.specification.source], merges)
    return [one for _, one in arrivals.sorted([(0, one) for one in records])]


def narrow(source: Log, rows: pa.Table) -> list[Record]:
    """Returns records of a log without their values."""
    ours = [c for c in rows.column_names if c in (*_OURS, IS_LATEST, PARTITION, OFFSET)]
    return source.as_records(rows.select(ours))


def _times(request: ExplainRequest[Any], updates: Sequence[Record]) -> list[tuple[int, bool]]:
    """Returns (timestamp, False) for each update of a group; timestamps never decrease."""
    newest, times = request.newest_before, list[tuple[int, bool]]()
    for one in updates:
        newest = one.micros if newest is None else max(one.micros, newest)
        times.append((newest, False))
    return times


# ------------------------------------------------------------------------------------------ of tables


def table_aggregate(request: ExplainRequest[spec.TableAggregateSpec]) -> Derivation:
    """Returns the table rows in a group, see ``core.aggregates``."""
    name, source = request.specification.source, request.source
    group = Group(source, keys_of(request.specification, source), request.record.values)
    on = source.head.shape.new_version_on or ()
    columns = [*dict.fromkeys((*_OURS, IS_LATEST, OLD, *source.key, *group.columns, *on))]
    rows = source.rows(group.condition(replaced=True), end=request.end(name), only=columns)
    if source.versioned:
        rows = rows.filter(rows.column(IS_LATEST))
    if on:
        # A deletion has no values that could repeat a version.
        repeats = ~rows.column(IS_TOMBSTONE).to_numpy() & equals_old(rows, on)
        rows = rows.filter(pa.array(~repeats))
    new, old = group.has(rows), group.has(replaced_rows(rows))
    if new is None or old is None:
        return needs_spark(request)
    new &= ~rows.column(IS_TOMBSTONE).to_numpy()
    old &= ~rows.column(OLD).is_null().to_numpy()
    rows = rows.append_column("_in", pa.array(new)).filter(pa.array(new | old))
    if isinstance(request.specification.aggregates, spec.AggregatorSpec):
        request.note(
            "functions of its own: rows that have left the group may still affect the result, if "
            "their subtractor does not undo their contribution"
        )
    changes = narrow(source, rows)
    keys = list(zip(*(map(repr, rows.column(c).to_pylist()) for c in source.key), strict=True))
    about = {
        one.place: (key, inside)
        for one, key, inside in zip(changes, keys, rows.column("_in").to_pylist(), strict=True)
    }
    ordered = _in_order(request, changes)
    earlier = [one for one in ordered if not request.is_new(name, one)]
    fresh = ordered[len(earlier) :]
    gone = request.misses(name)
    if request.specification.group_key and _loses_trigger(request, fresh):
        gone = request.misses_erased(name) or gone
    place = None if gone else triggering_update(request, _times(request, fresh))
    if place is None and not gone:
        request.note(
            "the change that triggered it is ambiguous: these rows are in the group after its run"
        )
    elif place is not None:
        request.decide(rules.TRIGGERED, f"{fresh[place]}, of {fresh[place].timestamp}")
    fresh = [] if gone else fresh if place is None else fresh[: place + 1]
    taken = [*earlier, *fresh]
    return _rows_in(request, taken, about, whole=not gone)


def _rows_in(
    request: ExplainRequest[Any],
    taken: Sequence[Record],
    about: Mapping[Place, tuple[Any, bool]],
    whole: bool,
) -> Derivation:
    """Returns the rows that are in a group after some changes.

    The group's timestamp is the maximum over all changes, also over those of rows that have left. If a
    removed row has that timestamp, or was removed by the last change, the result includes that row and
    the change that removed it. That is not known unless ``whole``: the run's changes are among them.
    """
    inside: dict[Any, Place] = {}
    before: dict[Place, Place | None] = {}
    last: dict[Any, Place] = {}
    for one in taken:
        key, is_in = about[one.place]
        before[one.place], last[key] = inside.pop(key, None), one.place
        if is_in:
            inside[key] = one.place
    newest = max(taken, key=lambda one: one.timestamp, default=None)
    also: set[Place | None] = set()
    for one in (newest, taken[-1] if taken else None) if whole else ():
        if one is not None and one.place not in inside.values():
            key, _ = about[one.place]
            also |= {one.place, before[one.place], last[key], before[last[key]]}
    if also:
        request.note("its timestamp, or its last change, comes from a row that has left the group")
    return members(request, list(inside.values()), [place for place in also if place is not None])


# Explain windows


_MILLISECOND = 1000
Bounds = tuple[int, int]
"""Start and end of a window, epoch microseconds."""
Merge = tuple[Sequence[Bounds], Bounds, Record]
"""The sessions that a record replaced, the new session, and the result of the new session."""


def windowed_aggregate(request: WindowRequest) -> Derivation:
    """Returns the stream records of a window, see ``core.windowed_aggregate``."""
    kind = request.specification.window.kind
    start, end = bounds_of(request.record.values)
    merges = _merges(request, start, end) if kind == "session" else []
    if merges and request.record.is_tombstone:
        after = (merged for _, merged, one in merges if one.offset > request.record.offset)
        merges = _merges(request, *next(after, (start, end)))
    starts, ends = ([start, *(one[1][i] for one in merges)] for i in (0, 1))
    found = _of_key(request, min(starts) - _MILLISECOND, max([end, *ends]) + _MILLISECOND)
    if found is None:
        return needs_spark(request)
    if kind == "session":
        return _session(request, found, merges)
    return _fixed(request, found, sliding=kind == "sliding")


def _of_key(request: WindowRequest, start: int, end: int) -> list[Record] | None:
    """Returns the records of the window's key between two times (inclusive, epoch microseconds) that
    any run has consumed, in order of arrival, without values; None = computing the key needs Spark."""
    source, rekeyed = request.source, bool(request.specification.group_key)
    taken = request.log.head.inputs.get(request.specification.source, {})
    if not rekeyed:  # without a new key, each partition has its own windows
        taken = {p: o for p, o in taken.items() if p == request.record.partition}
    group = Group(source, keys_of(request.specification, source), request.record.values)
    near = both(group.condition(), between(start, end))
    rows = source.rows(near, end=taken, only=[*_OURS, *group.columns])
    inside = group.has(rows)
    if inside is None:
        return None
    return _in_order(request, narrow(source, rows.filter(pa.array(inside))), rekeyed)


def bounds_of(values: Mapping[str, object]) -> Bounds:
    """Returns start and end of the window of a result's values, epoch microseconds."""
    ends = (as_key(c, values[c], pa.timestamp("us")) for c in (WINDOW_START, WINDOW_END))
    start, end = (one.cast(pa.int64()).as_py() for one in ends)
    return start, end


# ------------------------------------------------------------------------- tumbling, hopping, sliding


def _fixed(request: WindowRequest, found: Sequence[Record], sliding: bool) -> Derivation:
    start, end = bounds_of(request.record.values)
    near = [one for one in found if not sliding or not one.is_tombstone]
    near = [one for one in near if start <= _time_in_window(one, sliding) < end + sliding]
    name, rekeyed = request.specification.source, bool(request.specification.group_key)
    missing: int | None = 0
    taken = None
    since = start - _MILLISECOND * sliding
    if not (request.misses(name, since, here=not rekeyed) or (rekeyed and request.misses_erased(name))):
        earlier = request.misses_earlier(name, since, here=not rekeyed)
        if earlier or (rekeyed and request.misses_earlier_erased(name)):
            missing = _count_missing(request, near, sliding)
        taken = _count_accepted_by_then(request, near, sliding, missing)
    if taken is not None and any(request.turn(name, one) == 2 for one in near[: max(0, taken)]):
        request.note("input records of its run are gone: the one that triggered it is not known")
        taken = None
    if taken is None:
        return members(request, places(one for one in near if request.turn(name, one) == 0))
    inside = near[:taken]
    if inside:
        number = "" if missing is None else f", record number {taken + missing} of its window"
        request.decide(rules.TRIGGERED, f"{inside[-1]}{number}")
    late = near[_count_accepted_until_now(request, near, sliding, missing) :]
    left = _just_left(request, found, inside, start, end) if sliding else []
    return _with_late(request, places(inside), late, left, missing or 0)


def _just_left(
    request: WindowRequest, found: Sequence[Record], inside: Sequence[Record], start: int, end: int
) -> list[Place]:
    """Returns the record one millisecond before a sliding window; empty if a record is at its end."""
    if any(_time_in_window(one, True) == end for one in inside):
        return []
    for one in found:
        if not one.is_tombstone and _time_in_window(one, True) == start - _MILLISECOND:
            request.note(f"its window starts a millisecond after {one}, which is not in it")
            return [one.place]
    return []


def _time_in_window(record: Record, sliding: bool) -> int:
    return record.micros // _MILLISECOND * _MILLISECOND if sliding else record.micros


def _count_missing(request: WindowRequest, near: Sequence[Record], sliding: bool) -> int | None:
    """Returns how many of the records that the window had before the run are gone; None = not known."""
    before = [one for one in request.results(every=True) if one.offset < request.first_result]
    there = sum(request.turn(request.specification.source, one) == 0 for one in near)
    if request.misses_results or (not before and (sliding or there)):
        return None
    counted = _counted(replace(request, record=before[-1])) if before else 0
    return None if counted is None else counted - there


def _count_accepted_by_then(
    request: WindowRequest, near: Sequence[Record], sliding: bool, missing: int | None
) -> int | None:
    """Returns how many of the records the window contains at the explained result; None = not known.

    Args:
        missing: the number of the window's earlier records that are gone; None = not known.
    """
    counted = _counted(request)
    if counted is not None:
        return None if missing is None else counted - missing
    name = request.specification.source
    earlier = sum(request.turn(name, one) == 0 for one in near)
    new = [one for one in near if request.is_new(name, one)]
    results = request.run_results
    if request.misses_results and len(results) > 1:
        request.note(f"other results of its run are gone{request.log.limit}")
        return None
    place = [one.offset for one in results].index(request.record.offset)
    last_only = request.of_run.emit == "per_run" or request.misses_results
    once = len(results) <= 1 < len(new) and last_only
    if once and not sliding and request.commit.counts.get(_LATE) == 0:
        return earlier + len(new)
    if sliding or once:
        request.note(
            "which records of its run came too late for the window is not known: its aggregates have "
            "no count(*)"
        )
        return earlier + len(new)
    return earlier + place + 1


def _counted(request: WindowRequest) -> int | None:
    """Returns the result's own count of records; None = it has no ``count(*)``."""
    for column, sql in request.specification.aggregates:
        value = request.record.values.get(column)
        if value is not None and sql.replace(" ", "").lower() in ("count(*)", "count(1)"):
            return int(value)
    return None


def _count_accepted_until_now(
    request: WindowRequest, near: Sequence[Record], sliding: bool, missing: int | None
) -> int:
    """Returns how many of the records the window contains as of the last commit; all if that is not
    known, see :func:`_count_accepted_by_then`."""
    end = request.here(request.log.commit.next_offset)
    every = request.log.records(request.same_key(request.log), end=end)
    if missing is None:
        return len(near)
    counted = _counted(replace(request, record=every[-1]))
    if counted is not None:
        return counted - missing
    cut = request.log.head.kept_from(request.record.partition)
    each_update = request.of_run.emit == "every_update" and not cut
    return len(every) - missing if each_update and not sliding else len(near)


def _with_late(
    request: WindowRequest,
    inside: Sequence[Place],
    late: Sequence[Record],
    left: Sequence[Place] = (),
    missing: int = 0,
) -> Derivation:
    """Returns the records of a window, and the newest records that came too late.

    Args:
        missing: the number of the window's records that are gone.
    """
    made = members(request, inside, left, len(inside) + missing)
    if not late:
        return made
    one, many = "record arrived after that, and is", "records arrived after that, and are"
    request.decide(rules.WINDOW_CLOSED, f"{counted(len(late), one, many)} not included")
    shown = left_out(request.source, late[-request.most :])
    return Derivation(made.parts, made.count, shown, len(late))


# ------------------------------------------------------------------------------------------- sessions


def _session(request: WindowRequest, found: Sequence[Record], merges: Sequence[Merge]) -> Derivation:
    """Returns the records of a session, from the results of its key: each accepted record emits
    tombstones for the sessions that it replaces, then the new session. For a tombstone: the records
    of the session, and the record that replaced it.

    If records or results of earlier runs are gone, only those from this run on are paired."""
    start, end = bounds_of(request.record.values)
    name, rekeyed = request.specification.source, bool(request.specification.group_key)
    starts, ends = ([start, *(one[1][i] for one in merges)] for i in (0, 1))
    near = [one for one in found if min(starts) <= one.micros <= max([end, *ends])]
    taken = [one for one in near if request.turn(name, one) < 2 and start <= one.micros <= end]
    earlier = places(one for one in taken if not request.is_new(name, one))
    if request.misses(name, min(starts), here=not rekeyed):
        return members(request, earlier)
    if rekeyed and request.misses_erased(name):
        return members(request, places(taken))
    cut = request.misses_earlier(name, min(starts), here=not rekeyed)
    cut = cut or (rekeyed and request.misses_earlier_erased(name))
    until = {request.record.partition: (0, request.record.offset + 1)}
    if request.log.truncated(until, min(starts)):
        request.note(f"results of {request.log.name} are gone{request.log.limit}")
        cut = True
    known = list[Place]()
    if cut:
        known = earlier
        near = [one for one in near if request.turn(name, one) > 0]
        merges = [merge for merge in merges if merge[-1].offset >= request.first_result]
    live: dict[Bounds, list[Place]] = {}
    inside: list[Place] = []
    late: list[Record] = []
    gone = request.record.is_tombstone
    made_by = next((r.place for _, _, r in merges if r.offset >= request.record.offset), None)
    rest = iter(merges)
    ahead = next(rest, None)
    for one in near:
        if ahead is None or not _makes(one.micros, ahead[0], ahead[1]):
            late.append(one)
            continue
        replaced, merged, result = ahead
        before = live.get((start, end), [])
        parts = [place for old in {*replaced, merged} for place in live.pop(old, [])]
        live[merged] = [*parts, one.place]
        if result.place == made_by:
            inside = [*known, *before, one.place] if gone else [*known, *live[merged]]
            did = "" if cut else f", record number {len(inside)} of its session"
            if gone:
                bounds = map(as_time, merged)
                did = ", which made it a part of the session from {} to {}".format(*bounds)
            request.decide(rules.TRIGGERED, f"{one}{did}")
        ahead = next(rest, None)
    if not inside:
        request.note(
            "its run did not keep each update: which of its records came too late is not known"
        )
        return members(request, places(taken))
    order = {one.place: i for i, one in enumerate(found)}
    inside.sort(key=order.__getitem__)
    late = [one for one in late if start <= one.micros <= end]
    return _with_late(request, inside, late)


def _makes(moment: int, replaced: Sequence[Bounds], merged: Bounds) -> bool:
    """Whether a record at this time and the replaced sessions make up the merged session."""
    starts, ends = ([moment, *(one[i] for one in replaced)] for i in (0, 1))
    return (min(starts), max(ends)) == merged


def _merges(request: WindowRequest, start: int, end: int) -> list[Merge]:
    """Returns every merge of the key that gave a session overlapping the time span, in order: the
    replaced sessions, the new session and its result."""
    log = request.log
    keys = [(k, k) for k in log.key if k not in (WINDOW_START, WINDOW_END)]
    of_key = Group(log, keys, request.record.values).condition()
    near = both(of_key, between(start, end, WINDOW_START, WINDOW_END))
    results = log.records(near, end=request.here(log.commit.next_offset))
    found: list[Merge] = []
    replaced: list[Bounds] = []
    for one in results:
        bounds = bounds_of(one.values)
        if one.is_tombstone:
            replaced.append(bounds)
        else:
            found.append((replaced, bounds, one))
            replaced = []
    return found


def left_out(
    source: Log, found: Sequence[Record], rule: rules.Rule = rules.WINDOW_CLOSED
) -> list[Candidate]:
    """Returns records that are not in a result as candidates with the rule."""
    records = source.at(places(found))
    return [Candidate.left_out(one, rule) for one in records]


def too_late(
    log: Log,
    operator: spec.WindowedAggregateSpec,
    source: Log,
    key: Sequence[object],
    most: int,
    reasoning: Reasoning,
) -> list[Candidate]:
    """Returns the newest records that came too late for a window without a row.

    Args:
        source: the log of the input, as of the time of ``log``.
        key: the result's key; the last two values are the window's start and end.
        most: maximum number of records.
    """
    values = dict(zip(log.key, key, strict=True))
    group = Group(source, keys_of(operator, source), values)
    start, end = bounds_of(values)
    of_window = both(group.condition(), between(start, end - 1))
    rows = source.rows(of_window, only=[TIMESTAMP, IS_TOMBSTONE, *group.columns])
    inside = group.has(rows)
    there = [] if inside is None else narrow(source, rows.filter(pa.array(inside)))
    near, unread = list[Record](), list[Record]()
    for one in there:
        (near if log.has_consumed(operator.source, one) else unread).append(one)
    limit = source.limit if source.truncated(source.ranges, start) else ""
    if there and limit:
        reasoning.note(f"records of {source.name} in this window may be gone{limit}")
    if not there:
        reasoning.note(f"{source.name} has no record in this window{limit}")
    elif unread:
        reasoning.note(f"no run of {log.name} has read {unread[-1]} yet")
    if not near:
        return []
    reasoning.decide(
        rules.WINDOW_CLOSED,
        f"{counted(len(near), 'record')} of {source.name} in it arrived after that, and none before",
    )
    return left_out(source, near[-most:])


# Explain suppress


def suppress(request: ExplainRequest[spec.SuppressSpec]) -> Derivation:
    """Returns the update that suppress emitted as a result, see ``core.suppress``."""
    name, source, reasoning = request.specification.source, request.source, request.reasoning
    same = source.same_key(request.record.values)
    updates = source.records(same, end=request.here(request.end(name)))
    mine = [one for one in updates if _is(one, request.record)]
    if not mine:
        reasoning.note(f"its update of {name} is gone{source.limit}")
        return Derivation()
    before = [one for one in request.results(every=True) if one.offset < request.record.offset]
    since = _held_since(updates, before, mine)
    out = next((one for one in mine if one.offset >= since.offset), mine[-1])
    out = _last_alike(updates, out)
    now = request.commit.stream_time.get(request.record.partition)
    end_of_run = f"at the end of run {request.commit.batch} stream time was {time_if_known(now)}"
    buffered = f"buffered since {since}, of {since.timestamp}, and emitted in the place of that update"
    if since.offset < source.head.kept_from(since.partition):
        buffered = "emitted in the place of its first buffered update"
        reasoning.note(f"records of {name} are gone, so that one is not known{source.limit}")
    reasoning.decide(rules.SUPPRESSED, buffered)
    closes = isinstance(request.of_run.until, spec.WindowClosesSpec)
    end = bounds_of(request.record.values)[1] if closes else None
    if now is not None and end is not None and end <= now:
        reasoning.decide(rules.WINDOW_CLOSED, f"its window ended at {as_time(end)}; {end_of_run}")
    else:
        why = "past the first buffered update's timestamp + time limit, or the buffer was full"
        reasoning.decide(rules.RELEASED, f"{end_of_run}: {why}")
    replaced = [one for one in updates if since.offset <= one.offset < out.offset]
    shown = left_out(source, replaced[-request.most :], rules.REPLACED)
    return Derivation([(source, out)], None, shown, len(replaced))


def _is(update: Record, result: Record) -> bool:
    if update.timestamp != result.timestamp or update.is_tombstone != result.is_tombstone:
        return False
    shared = [c for c in result.values if c in update.values]
    return result.is_tombstone or all(update.values[c] == result.values[c] for c in shared)


def _held_since(updates: Sequence[Record], before: Sequence[Record], mine: Sequence[Record]) -> Record:
    """Returns the first update of the key after its previous result was emitted."""
    last = -1
    for result in before:
        alike = [one.offset for one in updates if one.offset > last and _is(one, result)]
        last = alike[0] if alike else last
    return next((one for one in updates if last < one.offset <= mine[-1].offset), mine[-1])


def _last_alike(updates: Sequence[Record], out: Record) -> Record:
    """Returns the last of consecutive equal updates: it replaced the others."""
    for one in updates:
        if one.offset > out.offset:
            if not _is(one, out):
                break
            out = one
    return out


def held(
    log: Log, source: Log, name: str, updates: Sequence[Record], reasoning: Reasoning
) -> list[Record]:
    """Returns the update that suppress holds for a key without a result; empty = no update consumed.

    Args:
        updates: the key's updates, in order.
    """
    taken = [one for one in updates if log.has_consumed(name, one)]
    if not taken:
        reasoning.note(f"no run of {log.name} has consumed a record of this key yet")
        return []
    first, last = taken[0], taken[-1]
    commit = log.taken_by(name, *first.place)
    batch = "not known" if commit is None else commit.batch
    now = time_if_known(log.commit.stream_time.get(first.partition))
    many = counted(len(taken), "update")
    held = f"{many} since run {batch}: the first is of {first.timestamp}, the last"
    if first.offset < source.head.kept_from(first.partition):
        reasoning.note(f"records of {name} are gone, so the first update is not known{source.limit}")
        held = "its last update"
    reasoning.decide(rules.SUPPRESSED, f"{held}, {last}, of {last.timestamp}; stream time is {now}")
    return [last]
