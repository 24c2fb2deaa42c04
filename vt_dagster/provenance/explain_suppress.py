"""Explains suppress: the emitted update, since when the key was held, and the replaced updates."""

from __future__ import annotations

from collections.abc import Sequence

from vt_dagster import rules
from vt_dagster.columns import WINDOW_END
from vt_dagster.provenance.explain_request import Derivation, ExplainRequest
from vt_dagster.provenance.explain_windows import bounds_of, left_out
from vt_dagster.provenance.explanation import Reasoning, Record
from vt_dagster.provenance.log_reader import Log, as_time
from vt_dagster.storage.commit_log import Commit


def suppress(request: ExplainRequest) -> Derivation:
    """Returns the update that suppress emitted as a result, see ``core.suppress``."""
    name, log, told = request.meaning["source"], request.log, request.reasoning
    source = request.inputs[name]
    same = source.same_key(request.record.values)
    place = request.record.partition
    updates = source.records(same, end={place: request.end(name).get(place, 0)})
    mine = [one for one in updates if _is(one, request.record)]
    if not mine:
        told.notes.append(f"its update of {name} is gone")
        return Derivation()
    before = [one for one in request.results(every=True) if one.offset < request.record.offset]
    since = _held_since(updates, before, mine)
    out = next((one for one in mine if one.offset >= since.offset), mine[-1])
    out = _last_alike(updates, out)
    now = request.commit.stream_time.get(place)
    moment = "not known" if now is None else str(as_time(now))
    told.decide(rules.SUPPRESSED, f"since {since}, of {since.timestamp}; it kept that update's place")
    if now is not None and closes(log) and bounds_of(request.record)[1] <= now:
        told.decide(
            rules.WINDOW_CLOSED,
            f"its window ended at {_end(request.record)}; at the end of run {request.commit.batch} "
            "stream "
            f"time was {moment}",
        )
    else:
        told.decide(
            rules.RELEASED,
            f"at the end of run {request.commit.batch} stream time was {moment}: past the time of its "
            "place and the time limit, or the buffer was full",
        )
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


def closes(log: Log) -> bool:
    """Returns whether a suppress waits until windows close."""
    return WINDOW_END in log.key


def _end(record: Record) -> str:
    return str(as_time(bounds_of(record)[1]))


def held(
    log: Log, source: Log, name: str, updates: Sequence[Record], reasoning: Reasoning
) -> list[Record]:
    """Returns the update that suppress holds for a key without a result; empty = no update consumed.

    Args:
        updates: the key's updates, in order.
    """
    taken = [one for one in updates if one.offset < log.head.inputs.get(name, {}).get(one.partition, 0)]
    if not taken:
        reasoning.notes.append(f"no run of {log.name} has consumed a record of this key yet")
        return []
    first, last = taken[0], taken[-1]
    commit = log.taken_by(name, first.partition, first.offset)
    moment = log.head.stream_time.get(first.partition)
    now = "not known" if moment is None else str(as_time(moment))
    reasoning.decide(
        rules.SUPPRESSED,
        f"{len(taken)} updates since run {_batch(commit)}: the first is of {first.timestamp}, the "
        f"last, {last}, of {last.timestamp}; stream time is {now}",
    )
    return [last]


def _batch(commit: Commit | None) -> str:
    return "not known" if commit is None else str(commit.batch)
