"""``vt-dagster lateness``: the cost of other grace periods or history retentions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table as TextTable
from rich.text import Text

from vt_dagster.cli.lookup import Warehouse
from vt_dagster.provenance.lateness import Choice, Lateness, share
from vt_dagster.provenance.lateness import lateness as told
from vt_dagster.provenance.lateness import picture as drawn
from vt_dagster.topology.durations import spoken

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
    lengths = [one.strip() for one in grace.split(",") if one.strip()]
    found = told(table, grace=lengths, at_most=at_most, warehouse=warehouse)
    if picture is not None:
        picture.write_text(drawn(found), encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=2, ensure_ascii=False))
    else:
        _tell(found)
    raise typer.Exit(0 if found.passed else 1)


def _tell(found: Lateness) -> None:
    what = found.what.replace("_", " ")
    several = found.what == "grace_period"
    wrong = _RESULTS.get(found.what, "refused")
    title = f"{found.asset} ({found.operator}): the cost of its {what}"
    names = [what, "of", wrong, "share"]
    names += (
        ["late", "wait: mean", "wait: most", "wait: now", "later: p50", "later: p99"] if several else []
    )
    names += ["late records", "updates dropped"] if found.what == "grace" else []
    console, rows = Console(), [_cells(found, one) for one in found.choices]
    table = _table(title, names, rows)
    if _width(console, table) > console.width:  # else numbers would be truncated
        (first, *others), *columns = zip(names, *rows, strict=True)
        table = _table(title, [first, *others], columns)
        console.width = max(console.width, _width(console, table))
    console.print(table)
    for line in _lines(found):
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
    rest, told = round(length.total_seconds()), ""
    if not rest:
        return spoken(length) if length else "0s"
    for unit, seconds in _UNITS:
        many, rest = divmod(rest, seconds)
        told += f"{many}{unit}" if many else ""
    return told


def _lines(found: Lateness) -> list[str]:
    lines: list[str] = []
    expired = max((one.expired or 0 for one in found.choices), default=0)
    if expired:
        lines.append(
            f"up to {expired:,} are wrong because their version was past the table's history retention"
        )
    if any(one.declared for one in found.choices):
        lines.append("* declared")
    if found.at_most is not None and found.suggested is not None:
        what = found.what.replace("_", " ")
        lines.append(
            f"> at most {share(found.at_most)} wrong: the shortest {what} is {spoken(found.suggested)}"
        )
    return [*lines, *found.notes]
