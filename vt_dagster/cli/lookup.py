"""``vt-dagster get`` and ``history``: a key's row and its versions, without Spark."""

from __future__ import annotations

import json
from collections.abc import Sequence
from shlex import quote
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Column
from rich.table import Table as TextTable
from rich.text import Text

from vt_dagster.columns import (
    IS_TOMBSTONE,
    OFFSET,
    PARTITION,
    RECORDED_AT,
    TIMESTAMP,
    VALID_FROM,
    VALID_TO,
)
from vt_dagster.errors import StorageError
from vt_dagster.storage.arrow_reader import arrival_order, asset_names, look_up
from vt_dagster.storage.values import texts
from vt_dagster.topology.durations import at_clock

Warehouse = Annotated[
    str,
    typer.Option(
        help="Directory or URL of the tables.", envvar="VT_DAGSTER_WAREHOUSE", show_default=True
    ),
]
DefinedWarehouse = Annotated[
    str | None,
    typer.Option(
        "--warehouse",
        help="Directory or URL of the tables; without it that of the definitions, or data/warehouse.",
        envvar="VT_DAGSTER_WAREHOUSE",
    ),
]
_KEY = typer.Option("--key", help="Value of the key; repeat it for a composite key.")
Key = Annotated[list[str], _KEY]
OptionalKey = Annotated[list[str] | None, _KEY]
Known = Annotated[
    str | None,
    typer.Option("--as-known-at", help="A time: use only records committed up to it (inclusive)."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, one line for each row.")]


def get(
    table: Annotated[str, typer.Argument(help="The table or stream that has the key.")],
    key: Key,
    as_of: Annotated[
        str | None,
        typer.Option(
            help="A time like 2013-07-01T12:00:00Z (inclusive; UTC), or now: the clock's time, for "
            "tables with future-dated rows."
        ),
    ] = None,
    partial: Annotated[
        bool,
        typer.Option(help="If the history begins after --as-of: print a current row valid by then."),
    ] = False,
    as_known_at: Known = None,
    as_json: AsJson = False,
    warehouse: Warehouse = "data/warehouse",
) -> None:
    """Print the row of a key: the current one, or the one that was valid at a time (--as-of); of a
    stream the last record."""
    as_of = at_clock(as_of)
    _require_asset(warehouse, table)
    found = look_up(warehouse, table, None, key, as_of, partial, as_known_at)
    if found.num_rows > 1:  # a stream: its last record
        found = found.take(np.lexsort(arrival_order(found))[-1:])
    rows = texts(found.slice(0, 1))
    when = f" as of {as_of}" if as_of else ""
    when += f" as known at {as_known_at}" if as_known_at else ""
    _require(rows, table, key, "no value for", when)
    if as_json:
        _print_json(rows)
        return
    width = max(len(c) for c in rows[0])
    for name, value in rows[0].items():
        typer.echo(f"{name:<{width}}  {shown(value)}")


def history(
    table: Annotated[str, typer.Argument(help="The versioned table that has the key.")],
    key: Key,
    limit: Annotated[
        int, typer.Option(min=1, help="Maximum number of versions; the newest ones are shown.")
    ] = 50,
    as_known_at: Known = None,
    as_json: AsJson = False,
    warehouse: Warehouse = "data/warehouse",
) -> None:
    """Print the timeline of a key: its versions, oldest first."""
    _require_asset(warehouse, table)
    rows = look_up(warehouse, table, "versions", key, as_known_at=as_known_at)
    newest = texts(rows.sort_by([(VALID_FROM, "ascending")]))[-limit:]
    _require(newest, table, key, "no version of")
    if as_json:
        _print_json(newest)
        return
    ours = {IS_TOMBSTONE, OFFSET, PARTITION, RECORDED_AT, TIMESTAMP, VALID_FROM, VALID_TO}
    value = Column("value", overflow="fold")  # else a long word would be cut
    # Text, so that rich does not read brackets in a value as markup.
    title = Text(f"{table} {'/'.join(key)}: valid from (inclusive) to (exclusive), UTC")
    text = TextTable("valid from", "valid to", value, "recorded at", title=title)
    for row in newest:
        values = [f"{c}={shown(v)}" for c, v in row.items() if c not in ours]
        cells = (
            shown(row[VALID_FROM]),
            "now" if row[VALID_TO] is None else shown(row[VALID_TO]),
            "(deleted)" if row[IS_TOMBSTONE] else "  ".join(values),
            shown(row.get(RECORDED_AT) or "not recorded"),
        )
        text.add_row(*map(Text, cells))
    Console().print(text)


def _print_json(rows: Sequence[dict[str, Any]]) -> None:
    """Prints a line of JSON for each row: times as text in UTC, decimals and bytes as text."""
    for row in rows:
        typer.echo(json_text(row))


def json_text(value: Any, indent: int | None = None) -> str:
    """Returns a value as JSON; NaN and infinities, which JSON lacks, become texts, as in Spark."""
    plain = json.loads(json.dumps(value, default=str), parse_constant=str)
    return json.dumps(plain, indent=indent, ensure_ascii=False)


def _require_asset(warehouse: str, table: str) -> None:
    names = asset_names(warehouse)
    if not names:
        raise StorageError(
            f"expected {table!r} in the warehouse {warehouse}, but nothing was ever committed there; "
            f"run it first (vt-dagster run {quote(table)}), or choose another warehouse with "
            "--warehouse"
        )
    if table not in names:
        raise StorageError(
            f"expected one of {names} in {warehouse}, got {table!r}; choose one of them, or another "
            "warehouse with --warehouse"
        )


def _require(rows: Sequence[Any], table: str, key: list[str], what: str, when: str = "") -> None:
    """Exits with 1 if there are no rows, and prints the command that explains why."""
    if not rows:
        keys = " ".join(f"--key {quote(value)}" for value in key)
        why = f"vt-dagster explain {table} {keys} shows why"
        typer.echo(f"{table} has {what} {'/'.join(key)}{when}; {why}", err=True)
        raise typer.Exit(1)


def shown(value: Any) -> str:
    """Returns a value as text; None as ``null``."""
    return "null" if value is None else str(value)
