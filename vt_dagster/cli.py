"""``vt-dagster``: look into tables, check them in CI, run the demo, compare with Kafka Streams."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from vt_dagster.ci import check
from vt_dagster.conformance import conformance
from vt_dagster.errors import VtDagsterError

app = typer.Typer(
    help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)

app.command()(conformance)
app.command()(check)

Warehouse = Annotated[
    str,
    typer.Option(
        help="Directory or URL of the tables.", envvar="VT_DAGSTER_WAREHOUSE", show_default=True
    ),
]
Key = Annotated[
    list[str], typer.Option("--key", help="Value of the key; repeat it for a composite key.")
]


@app.command()
def demo() -> None:
    """Run the worked example of a checkout: a year of flights with the weather as of departure."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        from assets.demo import run
    except ModuleNotFoundError as error:
        raise VtDagsterError(
            "the demo is part of a checkout of vt_dagster, not of the installed package: run it "
            f"in the checkout's directory with the extra 'demo' installed ({error})"
        ) from None
    run()


@app.command()
def get(
    table: str,
    key: Key,
    as_of: Annotated[
        str | None, typer.Option(help="A time like 2013-07-01T12:00:00Z (inclusive); UTC.")
    ] = None,
    warehouse: Warehouse = "data/warehouse",
) -> None:
    """Print the row of a key: the current one, or the one as of a time."""
    rows = _of_key(warehouse, table, key, None, as_of).limit(1).collect()
    if not rows:
        when = f" as of {as_of}" if as_of else ""
        typer.echo(f"{table} has no value for {'/'.join(key)}{when}", err=True)
        raise typer.Exit(1)
    width = max(len(c) for c in rows[0].asDict())
    for name, value in rows[0].asDict().items():
        typer.echo(f"{name:<{width}}  {_text(value)}")


@app.command()
def history(
    table: str,
    key: Key,
    limit: Annotated[int, typer.Option(help="The newest so many versions.")] = 50,
    warehouse: Warehouse = "data/warehouse",
) -> None:
    """Print the timeline of a key: its versions, oldest first."""
    from rich.console import Console
    from rich.table import Table as TextTable

    from vt_dagster.columns import IS_TOMBSTONE, OFFSET, PARTITION, TIMESTAMP, VALID_FROM, VALID_TO

    rows = _of_key(warehouse, table, key, "versions", None)
    newest = list(reversed(rows.orderBy(rows[VALID_FROM].desc()).limit(limit).collect()))
    if not newest:
        typer.echo(f"{table} has no version of {'/'.join(key)}", err=True)
        raise typer.Exit(1)
    ours = {IS_TOMBSTONE, OFFSET, PARTITION, TIMESTAMP, VALID_FROM, VALID_TO}
    text = TextTable(title=f"{table} {'/'.join(key)}: valid from (inclusive) to (exclusive), UTC")
    for column in ("valid from", "valid to", "value"):
        text.add_column(column)
    for row in newest:
        values = [f"{c}={_text(v)}" for c, v in row.asDict().items() if c not in ours]
        text.add_row(
            _text(row[VALID_FROM]),
            "now" if row[VALID_TO] is None else _text(row[VALID_TO]),
            "(deleted)" if row[IS_TOMBSTONE] else "  ".join(values),
        )
    Console().print(text)


def _of_key(warehouse: str, table: str, key: list[str], what: str | None, as_of: str | None) -> Any:
    from vt_dagster.core.versioned import key_range
    from vt_dagster.errors import StorageError
    from vt_dagster.session import build_session
    from vt_dagster.storage.store import AssetStore, asset_names

    names = asset_names(warehouse)
    if table not in names:
        raise StorageError(f"expected one of {names} in {warehouse}, got {table!r}")
    store = AssetStore.open(warehouse, table, build_session("vt-dagster"))
    if len(key) != len(store.node.key):
        raise StorageError(
            f"{table} has the key {list(store.node.key)}: give --key once for each, got {key}"
        )
    rows = store.read(what, as_of)
    return key_range(rows, key=store.node.key, lower=key, upper=key)


def _text(value: Any) -> str:
    if value is None:
        return "null"
    return f"{value:%Y-%m-%d %H:%M:%S}" if hasattr(value, "hour") else str(value)


def main() -> None:
    """Entry point: an error that we raise on purpose is a sentence, not a stack trace."""
    os.environ.setdefault("TZ", "UTC")
    try:
        app()
    except VtDagsterError as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
