"""``vt-dagster``: look into tables, check them in CI, run the demo, compare with Kafka Streams."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, MapType, StructType

from vt_dagster.cli.check import check
from vt_dagster.columns import IS_TOMBSTONE, OFFSET, PARTITION, TIMESTAMP, VALID_FROM, VALID_TO
from vt_dagster.conformance import conformance
from vt_dagster.core.versioned import key_range
from vt_dagster.errors import StorageError, TopologyError, VtDagsterError
from vt_dagster.runs import replay as replays
from vt_dagster.sources.kafka_messages import as_offsets
from vt_dagster.spark.session import FEW_QUERIES, build_session
from vt_dagster.storage.store import AssetStore, asset_names
from vt_dagster.topology.durations import parse_time
from vt_dagster.topology.model import Stream, Table

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
def demo(
    kafka: Annotated[
        bool,
        typer.Option("--kafka", help="Through topics of a Kafka broker, which it starts and ends."),
    ] = False,
) -> None:
    """Run the worked example of a checkout: a year of flights with the weather as of departure."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        if kafka:
            from assets.kafka_demo import run
        else:
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
    partial: Annotated[
        bool, typer.Option(help="Of a time before the history: the row, where it is still there.")
    ] = False,
    warehouse: Warehouse = "data/warehouse",
) -> None:
    """Print the row of a key: the current one, or the one as of a time."""
    rows = _texts(_of_key(warehouse, table, key, None, as_of, partial).limit(1)).collect()
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
    from rich.text import Text

    rows = _of_key(warehouse, table, key, "versions")
    newest = rows.orderBy(rows[VALID_FROM].desc()).limit(limit)
    newest = list(reversed(_texts(newest).collect()))
    if not newest:
        typer.echo(f"{table} has no version of {'/'.join(key)}", err=True)
        raise typer.Exit(1)
    ours = {IS_TOMBSTONE, OFFSET, PARTITION, TIMESTAMP, VALID_FROM, VALID_TO}
    # What is in a table is text, not markup, whatever brackets it has.
    text = TextTable(title=Text(f"{table} {'/'.join(key)}: valid from (inclusive) to (exclusive), UTC"))
    for column in ("valid from", "valid to", "value"):
        text.add_column(column)
    for row in newest:
        values = [f"{c}={_text(v)}" for c, v in row.asDict().items() if c not in ours]
        cells = (
            _text(row[VALID_FROM]),
            "now" if row[VALID_TO] is None else _text(row[VALID_TO]),
            "(deleted)" if row[IS_TOMBSTONE] else "  ".join(values),
        )
        text.add_row(*map(Text, cells))
    Console().print(text)


@app.command()
def replay(
    asset: Annotated[str, typer.Argument(help="The live asset.")],
    into: Annotated[str, typer.Option(help="The name of the new tables.")],
    module: Annotated[
        str, typer.Option(help="The module that has the asset's stream or table as a variable.")
    ],
    start_time: Annotated[
        str | None, typer.Option("--from", help="Of a topic: begin at a time (inclusive); UTC.")
    ] = None,
    start_offsets: Annotated[
        str | None, typer.Option("--from-offsets", help='Of topics: {"topic": {"0": 100}}.')
    ] = None,
    warehouse: Warehouse = "data/warehouse",
) -> None:
    """Make an asset anew beside the live one, as far as that has come; then compare and swap."""
    node = _node(module, asset)
    start: Any = None if start_offsets is None else as_offsets(start_offsets)
    if start_time is not None:
        start = datetime.fromtimestamp(parse_time(start_time) / 1e6, tz=timezone.utc)
    spark = build_session("vt-dagster")
    done = replays.replay(warehouse, node, into, spark, start, tell=typer.echo).head()
    assert done is not None
    typer.echo(f"{into}: {done.commit.totals.get('in', 0)} records in {done.commit.batch} runs")


@app.command()
def compare(one: str, other: str, warehouse: Warehouse = "data/warehouse") -> None:
    """Tell what two assets hold that is not the same; exits with 1 where they differ."""
    spark = build_session("vt-dagster")
    stores = [AssetStore.open(warehouse, name, spark) for name in (one, other)]
    found = replays.compare(*stores)
    typer.echo(f"{found.missing} rows only in {one}, {found.extra} only in {other}")
    for row in found.rows.orderBy("row").limit(20).collect():
        name, times = (one, row[1]) if row[1] > 0 else (other, -row[1])
        typer.echo(f"  only in {name}{f' ({times} times)' if times > 1 else ''}: {row[0]}")
    raise typer.Exit(1 if found.missing or found.extra else 0)


@app.command()
def swap(live: str, other: str, warehouse: Warehouse = "data/warehouse") -> None:
    """Give two assets each other's name, while nothing runs: a replay becomes the live one."""
    replays.swap(warehouse, live, other)
    typer.echo(f"{live} is what {other} was, and {other} is what {live} was")


def _node(module: str, name: str) -> Stream:
    sys.path.insert(0, str(Path.cwd()))
    found = {v.name: v for v in vars(import_module(module)).values() if isinstance(v, Stream)}
    if name not in found:
        raise TopologyError(f"expected one of {sorted(found)} in {module}, got {name!r}")
    return found[name]


def _of_key(
    warehouse: str,
    table: str,
    key: list[str],
    what: str | None,
    as_of: str | None = None,
    partial: bool = False,
) -> DataFrame:
    names = asset_names(warehouse)
    if table not in names:
        raise StorageError(f"expected one of {names} in {warehouse}, got {table!r}")
    store = AssetStore.open(warehouse, table, build_session("vt-dagster", conf=FEW_QUERIES))
    if len(key) != len(store.node.key):
        raise StorageError(
            f"{table} has the key {list(store.node.key)}: give --key once for each, got {key}"
        )
    rows = store.read(what, as_of, partial)
    _check_key(store, rows, key)
    return key_range(rows, key=store.node.key, lower=key, upper=key)


def _check_key(store: AssetStore, rows: DataFrame, values: Sequence[str]) -> None:
    """Whether a text can be the value of each key column."""
    kinds = {name: rows.schema[name].dataType for name in store.node.key}
    path = store.view_path if isinstance(store.node, Table) else store.log_path
    for name, kind in kinds.items():
        if isinstance(kind, ArrayType | MapType | StructType):
            raise StorageError(
                "expected a key that can be written as plain texts, but the key column "
                f"{name} is of type {kind.simpleString()}; read the Delta table {path} with "
                "Spark, and select the row there"
            )
    # Only whether it can be: Python has not every value of Spark's, such as the year 12345.
    texts = [F.lit(text).try_cast(kind) for text, kind in zip(values, kinds.values(), strict=True)]
    (can_be,) = rows.sparkSession.range(1).select(*[text.isNotNull() for text in texts]).collect()
    for (name, kind), value, can in zip(kinds.items(), values, can_be, strict=True):
        if not can:
            raise StorageError(
                f"expected --key as a {kind.simpleString()} for {name}, got {value!r}; write it as "
                "Spark casts a text to that type"
            )


def _texts(rows: DataFrame) -> DataFrame:
    """Times as texts, which Spark makes in UTC: Python has neither this zone nor every year."""
    times = [n for n, kind in rows.dtypes if "timestamp" in kind or "date" in kind]
    return rows.withColumns({n: F.col(f"`{n}`").cast("string") for n in times})


def _text(value: Any) -> str:
    return "null" if value is None else str(value)


def main() -> None:
    """Entry point: an error that we raise on purpose is a sentence, not a stack trace."""
    try:
        app()
    except VtDagsterError as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(2) from None
