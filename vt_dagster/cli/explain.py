"""``vt-dagster explain``, ``lateness`` and ``explore``, without Spark.

How a row was made; the cost of other grace periods or history retentions; a local web page on a
warehouse.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table as TextTable
from rich.text import Text

from vt_dagster.cli.lookup import Known, OptionalKey, Warehouse, json_text
from vt_dagster.errors import DefinitionsError, counted
from vt_dagster.provenance.explain import MOST
from vt_dagster.provenance.explain import explain as explained
from vt_dagster.provenance.explain_request import Candidate, Explanation, Origin, Record
from vt_dagster.provenance.lateness import Choice, Lateness, share
from vt_dagster.provenance.lateness import lateness as find_lateness
from vt_dagster.provenance.lateness import picture as drawn
from vt_dagster.rules import RULES
from vt_dagster.storage.delta import require_writable
from vt_dagster.topology.durations import spoken

_VALUES = 12
"""The number of values shown per record; --json has all."""


def explain(
    table: Annotated[str, typer.Argument(help="The asset that has the row.")],
    key: OptionalKey = None,
    at: Annotated[
        str | None,
        typer.Option(
            help="The key's newest record up to a time (inclusive), like 2013-07-01T12:00:00Z."
        ),
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
        int,
        typer.Option(
            min=1, help="Maximum number of input records of a row; the newest ones are shown."
        ),
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
        typer.echo(json_text(found.as_json(), indent=2))
    else:
        for line in _lines(found):
            typer.echo(line)
        every = ((*one.rules, *(c.rule for c in one.candidates)) for one in found.walk())
        for name in dict.fromkeys(rule for some in every for rule in some):
            typer.echo(f"{name}: {RULES[name].description}")
    raise typer.Exit(0 if found.record is not None else 1)


def _lines(one: Explanation, indent: str = "") -> Iterator[str]:
    record = one.record
    place = "" if record is None else f" {record.place}"
    yield f"{indent}{one.asset}{place} ({one.operator})"
    inner = indent + "  "
    if record is not None:
        yield f"{inner}{_record_text(record)}"
    if one.written is not None:
        run = f" ({one.written.run_id})" if one.written.run_id else ""
        yield f"{inner}run {one.written.batch}{run}, recorded at {_time(one.written.recorded_at)}"
    for decision in one.decisions:
        yield f"{inner}{decision.rule}: {decision.because}"
    for note in one.notes:
        yield f"{inner}{note}"
    if one.origin is not None:
        yield f"{inner}{_origin_text(one.origin)}"
    for row in one.rejected:
        yield f"{inner}quarantine: {row.source} {row.position}: {row.reason}: {row.raw}"
    if one.candidates:
        yield f"{inner}candidates, of {one.candidates_in_all:,} in all:"
        yield from (f"{inner}{_candidate(c)}" for c in one.candidates)
    if one.made_of:
        count = f" {one.made_of_in_all:,} records, of which" if one.more else ""
        yield f"{inner}{'inputs' if record is None else 'made from'}{count}"
        for part in one.made_of:
            yield from _lines(part, inner + "  ")


def _record_text(record: Record) -> str:
    if record.is_tombstone:
        return f"a tombstone of {_time(record.timestamp)}"
    shown = [f"{c}={v}" for c, v in list(record.values.items())[:_VALUES]]
    more = len(record.values) - len(shown)
    text = "  ".join([*shown, f"and {more} more" if more else ""]).rstrip()
    return f"of {_time(record.timestamp)}: {text}"


def _origin_text(origin: Origin) -> str:
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
    state = "deleted" if record.is_tombstone else f"recorded at {_time(record.recorded_at)}"
    return f"{mark} {record.place}{valid}  {state}  {one.rule}"


def _time(moment: datetime | None) -> Any:
    return "no known time" if moment is None else f"{moment:%Y-%m-%d %H:%M:%S}"


# Lateness


_UNITS = (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1))
_RESULTS = {"grace_period": "wrong", "grace": "lack records"}


def lateness(
    table: Annotated[str, typer.Argument(help="A join, an aggregate by windows, or a table.")],
    grace: Annotated[
        str, typer.Option(help="Grace periods, like 0s,1m,10m,1h; for a table: history retentions.")
    ] = "",
    at_most: Annotated[
        str | None,
        typer.Option(help="Allowed percentage of wrong results: suggest the shortest length."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    picture: Annotated[Path | None, typer.Option(help="Write a picture to an SVG file.")] = None,
    warehouse: Warehouse = "data/warehouse",
) -> None:
    """Compute the wrong results that other grace periods or history retentions would have given.

    With --at-most, exits with 1 if the length of the last run has more wrong results, or if every
    length has more.
    """
    if picture is not None:
        require_writable(picture)
    lengths = [one.strip() for one in grace.split(",") if one.strip()]
    found = find_lateness(table, grace=lengths, at_most=at_most, warehouse=warehouse)
    if picture is not None:
        picture.write_text(drawn(found), encoding="utf-8")
    if as_json:
        typer.echo(json_text(found.as_json(), indent=2))
    else:
        _print_lateness(found)
    raise typer.Exit(0 if found.passed else 1)


def _print_lateness(found: Lateness) -> None:
    what = found.what.replace("_", " ")
    several = found.what == "grace_period"
    wrong = _RESULTS.get(found.what, "refused")
    title = f"{found.asset} ({found.operator}): the cost of its {what}"
    names = [what, "total", wrong, "share"]
    if several:
        names += ["late", "waiting: mean", "waiting: max", "waiting: now", "delay: p50", "delay: p99"]
    names += ["late records", "updates dropped"] if found.what == "grace" else []
    console, rows = Console(), [_cells(found, one) for one in found.choices]
    table = _table(title, names, rows)
    if _width(console, table) > console.width:  # else numbers would be truncated
        (first, *others), *columns = zip(names, *rows, strict=True)
        table = _table(title, [first, *others], columns)
        console.width = max(console.width, _width(console, table))
    console.print(table)
    for line in _lateness_lines(found):
        typer.echo(line)


def _width(console: Console, table: TextTable) -> int:
    """Returns the width at which no cell is truncated."""
    return console.measure(table, options=console.options.update(max_width=10_000)).maximum


def _table(title: str, names: Sequence[str], rows: Iterable[Sequence[str]]) -> TextTable:
    """Returns a table of texts and numbers that are not wrapped."""
    table = TextTable(title=Text(title))
    table.add_column(names[0], no_wrap=True)
    for name in names[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _cells(found: Lateness, one: Choice) -> list[str]:
    marks = " *" * one.declared + " >" * (one.length == found.suggested)
    cells = [f"{_short(one.length)}{marks}", f"{one.of:,}", f"{one.wrong:,}", share(one.share)]
    if found.what == "grace_period":
        average = 0.0 if one.waiting_average is None else one.waiting_average
        cells += [f"{one.late:,}", f"{average:,.1f}", f"{one.waiting_most:,}", f"{one.waiting:,}"]
        late = one.later
        cells += ["-", "-"] if late is None else [_short(late.p50), _short(late.p99)]
    elif found.what == "grace":
        cells += [f"{one.late:,}", f"{one.dropped:,}"]
    return cells


def _short(length: timedelta) -> str:
    """Returns a length as ``--grace`` accepts it, rounded to seconds unless it is shorter than one."""
    rest, text = round(length.total_seconds()), ""
    if not rest:
        return spoken(length) if length else "0s"
    for unit, seconds in _UNITS:
        many, rest = divmod(rest, seconds)
        text += f"{many}{unit}" if many else ""
    return text


def _lateness_lines(found: Lateness) -> list[str]:
    lines: list[str] = []
    expired = max((one.expired or 0 for one in found.choices), default=0)
    if expired:
        lines.append(
            f"up to {counted(expired, 'is wrong because its', 'are wrong because their')} version was "
            "past the table's history retention"
        )
    if any(one.declared for one in found.choices):
        lines.append("* declared")
    if found.at_most is not None and found.suggested is not None:
        what = found.what.replace("_", " ")
        lines.append(
            f"> at most {share(found.at_most)} wrong: the shortest {what} is {found.suggestion}"
        )
    return [*lines, *found.notes]


# Explore


HOST = "127.0.0.1"


def explore(
    warehouse: Annotated[
        str, typer.Argument(help="Directory or URL of the tables.", envvar="VT_DAGSTER_WAREHOUSE")
    ] = "data/warehouse",
    port: Annotated[int, typer.Option(help="Port on localhost; 0 = any free port.")] = 3001,
) -> None:
    """Serve a local web page on a warehouse: tables, a key's history, explanations, lateness. It is
    read-only and listens on localhost only."""
    try:
        # Imported here: an optional extra that takes seconds to import.
        application: Any = import_module("vt_dagster.explore.app").application
        uvicorn: Any = import_module("uvicorn")
    except ModuleNotFoundError as error:
        raise DefinitionsError(
            f"expected the packages of the extra 'explore', got no {error.name}: install "
            "vt-dagster[explore]"
        ) from None
    pages = application(warehouse)
    with socket.socket() as place:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            place.bind((HOST, port))
            place.listen()
        except (OSError, OverflowError) as error:
            raise DefinitionsError(
                f"expected a free port on this machine, got {port}: {error}; set another --port"
            ) from None
        typer.echo(f"http://{HOST}:{place.getsockname()[1]} shows {warehouse}; stop it with Ctrl+C")
        server = uvicorn.Server(uvicorn.Config(pages, log_level="warning", server_header=False))
        server.run(sockets=[place])
