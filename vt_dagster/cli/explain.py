"""``vt-dagster explain``: shows how a row was made, without Spark."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Annotated, Any

import typer

from vt_dagster.cli.lookup import Known, Warehouse
from vt_dagster.provenance.explain import MOST
from vt_dagster.provenance.explain import explain as explained
from vt_dagster.provenance.explain_request import Candidate, Explanation, Origin, Record
from vt_dagster.rules import RULES

_VALUES = 12
"""The number of values shown per record; --json has all."""


def explain(
    table: Annotated[str, typer.Argument(help="The asset that has the row.")],
    key: Annotated[
        list[str] | None,
        typer.Option("--key", help="Value of the key; repeat it for a composite key."),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(help="The key's newest record up to a time like 2013-07-01T12:00:00Z; UTC."),
    ] = None,
    offset: Annotated[
        str | None, typer.Option(help="The record at PARTITION:OFFSET of the asset's log.")
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(help="The one record that meets a SQL condition; needs the package duckdb."),
    ] = None,
    as_known_at: Known = None,
    most: Annotated[
        int, typer.Option(help="Number of input records of a row to show, the newest.")
    ] = MOST,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    warehouse: Warehouse = "data/warehouse",
) -> None:
    """Explain a row: the records it was made from and the rules that decided, down to the sources.

    Exits with 1 if there is no such row, and explains why.
    """
    found = explained(
        table,
        key=key,
        at=at,
        offset=offset,
        where=where,
        as_known_at=as_known_at,
        warehouse=warehouse,
        most=most,
    )
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=2, ensure_ascii=False))
    else:
        for line in _lines(found):
            typer.echo(line)
        for name in dict.fromkeys(rule for one in found.walk() for rule in _rules(one)):
            typer.echo(f"{name}: {RULES[name].description}")
    raise typer.Exit(0 if found.record is not None else 1)


def _rules(one: Explanation) -> tuple[str, ...]:
    return (*one.rules, *(c.rule for c in one.candidates))


def _lines(one: Explanation, indent: str = "") -> Iterator[str]:
    record = one.record
    place = "" if record is None else f" {record.partition}:{record.offset}"
    yield f"{indent}{one.asset}{place} ({one.operator})"
    inner = indent + "  "
    if record is not None:
        yield f"{inner}{_told(record)}"
    if one.written is not None:
        run = f" ({one.written.run_id})" if one.written.run_id else ""
        yield f"{inner}run {one.written.batch}{run}, recorded at {_time(one.written.recorded_at)}"
    for decision in one.decisions:
        yield f"{inner}{decision.rule}: {decision.because}"
    for note in one.notes:
        yield f"{inner}{note}"
    if one.origin is not None:
        yield f"{inner}{_from(one.origin)}"
    for row in one.rejected:
        yield f"{inner}quarantine: {row.source} {row.position}: {row.reason}: {row.raw}"
    if one.candidates:
        yield f"{inner}candidates, of {one.candidates_in_all:,} in all:"
        yield from (f"{inner}{_candidate(c)}" for c in one.candidates)
    if one.made_of:
        yield f"{inner}made from {f'{one.made_of_in_all:,}, of which' if one.more else ''}".rstrip()
        for part in one.made_of:
            yield from _lines(part, inner + "  ")


def _told(record: Record) -> str:
    if record.is_tombstone:
        return f"a tombstone of {_time(record.timestamp)}"
    shown = [f"{c}={v}" for c, v in list(record.values.items())[:_VALUES]]
    more = len(record.values) - len(shown)
    said = "  ".join([*shown, f"and {more} more" if more else ""]).rstrip()
    return f"of {_time(record.timestamp)}: {said}"


def _from(origin: Origin) -> str:
    names = ", ".join(origin.names[:5])
    more = f" and {origin.count - 5} more" if origin.count > 5 else ""
    if origin.position is not None:
        return f"from {origin.kind} {names}, offset {origin.position}"
    taken = "" if origin.start is None else f", positions {origin.start} to {origin.end} (exclusive)"
    return f"from {origin.kind}{taken}: {names}{more}"


def _candidate(one: Candidate) -> str:
    mark = "->" if one.chosen else "=>" if one.chosen_now else "  "
    valid = ""
    if one.valid_from is not None:
        end = one.valid_to if one.known else one.valid_to_now
        valid = f" {_time(one.valid_from)} to {_time(end) if end else 'now'}"
    record = one.record
    said = "deleted" if record.is_tombstone else f"recorded at {_time(record.recorded_at)}"
    return f"{mark} {record.partition}:{record.offset}{valid}  {said}  {one.rule}"


def _time(moment: datetime | None) -> Any:
    return "no known time" if moment is None else f"{moment:%Y-%m-%d %H:%M:%S}"
