"""``what_if`` reports how a full replay of the changed declaration differs from the live tables."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import StructField, StructType
from typer.testing import CliRunner

from tests.market import RECORD, Market, lines
from vt_dagster import FilesSource, HoppingWindow, Stream, VersionedTable
from vt_dagster.cli import app
from vt_dagster.cli import tables as of_commands
from vt_dagster.errors import StorageError, TopologyError
from vt_dagster.runs.replay import compare, replay
from vt_dagster.runs.run import run_once
from vt_dagster.runs.what_if import Changes, this_host, what_if
from vt_dagster.storage.asset_store import AssetStore, stores_of
from vt_dagster.topology.model import with_settings

pytestmark = pytest.mark.usefixtures("few_rows")

LONG = timedelta(days=2)


def with_long_history(market: Market) -> Stream:
    """The join of sales with prices, whose history retention covers all sales."""
    return market.sales.left_join(
        replace(market.prices, history_retention=LONG),
        name="priced",
        select=["left.*", "right.v as price"],
        grace_period=timedelta(hours=1),
    )


def all_files(market: Market) -> set[Path]:
    return {path for path in Path(market.warehouse).rglob("*") if path.is_file()}


def rows_of(store: Any, *columns: str) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(row[c] for c in columns) for row in store.read("log").collect())


def test_what_if_equals_full_replay(market: Market, tmp_path: Path) -> None:
    """The differences are those of a full replay, for a new column, a changed value, and a changed
    history retention of an input."""
    copy = market.copy(tmp_path)
    warehouse = str(copy.warehouse)
    longer = replace(copy.prices, history_retention=LONG)
    changed = copy.sales.left_join(
        longer,
        name="priced",
        select=["left.*", "upper(right.v) as price", "right.valid_from as since"],
        grace_period=timedelta(minutes=30),
    )
    # A killed process has left this directory: no process has this id.
    left = Path(warehouse) / f"what-if.{this_host()}.{2**30}.0a1b2c3d"
    there = all_files(copy)
    left.mkdir()
    found = what_if(warehouse, changed, copy.spark)
    assert all_files(copy) == there
    assert not left.exists()
    assert found.remade == ("prices", "priced")
    assert (found.columns_added, found.columns_removed) == (("since",), ())
    anew = replay(warehouse, longer, "longer", copy.spark).node
    whole = replay(
        warehouse,
        copy.sales.left_join(
            anew,
            name="priced",
            select=["left.*", "upper(right.v) as price"],
            grace_period=timedelta(minutes=30),
        ),
        "whole",
        copy.spark,
    )
    before = rows_of(copy.store(copy.priced), "k", "timestamp", "price")
    after = rows_of(whole, "k", "timestamp", "price")
    assert (found.rows_before, found.rows_after) == (before.total(), after.total())
    gone, new = before - after, after - before
    places = [Counter((k, at) for k, at, _ in some.elements()) for some in (gone, new)]
    changes = (places[0] & places[1]).total()
    assert found.changed == changes > 0
    assert (found.removed, found.added) == (gone.total() - changes, new.total() - changes)
    assert found.keys == len({k for k, _, _ in (gone + new)})
    assert found.examples
    assert {(one.before is None, one.after is None) for one in found.examples} <= {
        (False, False),
        (False, True),
        (True, False),
    }
    assert 0 < found.share <= 1


def test_renamed_columns_are_compared(market: Market, tmp_path: Path) -> None:
    copy = market.copy(tmp_path)
    names = {"k": "product", "v": "price"}
    schema = StructType([StructField(names.get(f.name, f.name), f.dataType) for f in RECORD])
    about: dict[str, Any] = {"schema": schema, "key": "product", "tombstone": "price is null"}
    renamed = replace(copy.prices, **about, renamed=names)
    found = what_if(copy.warehouse, renamed, copy.spark)
    assert (found.columns_added, found.columns_removed) == ((), ())
    assert found.share == 0


def test_failed_what_if_is_cleaned_up(market: Market, tmp_path: Path) -> None:
    copy = market.copy(tmp_path)
    there = all_files(copy)

    def tell(line: str) -> None:
        raise KeyboardInterrupt(line)

    with pytest.raises(KeyboardInterrupt):
        what_if(str(copy.warehouse), with_long_history(copy), copy.spark, tell=tell)
    assert all_files(copy) == there
    with pytest.raises(StorageError, match="also must name inputs to replay, some of"):
        what_if(str(copy.warehouse), copy.priced, copy.spark, also=["nobody"])


def test_refused_if_versions_have_expired(market: Market, tmp_path: Path) -> None:
    """A replay cannot find prices that expired from the table's history after the live run joined them.
    what_if refuses such a replay instead of reporting these rows as differences."""
    copy = market.copy(tmp_path)
    there, warehouse = all_files(copy), str(copy.warehouse)
    forgotten = (
        "the history of prices covers all records to join again, got records of sales from "
        "2024-01-01T03:00"
    )
    with pytest.raises(StorageError, match=forgotten):
        what_if(warehouse, with_settings(copy.priced, {"grace_period": "2h"}), copy.spark)
    with pytest.raises(StorageError, match="Declare a longer history_retention of the table, and"):
        what_if(warehouse, copy.priced, copy.spark, also=["prices"])
    assert all_files(copy) == there


def test_change_budget_fails_command(market: Market, monkeypatch: pytest.MonkeyPatch) -> None:
    module, asked = type(sys)("market_module"), list[Any]()
    vars(module).update(priced=market.priced)
    monkeypatch.setitem(sys.modules, "market_module", module)

    def tried(_: str, node: Any, *__: Any, **___: Any) -> Changes:
        asked.append(node.operator.grace_period)
        return Changes("priced", ("priced",), 100, 100, added=0, removed=0, changed=2, keys=2)

    monkeypatch.setattr(of_commands.trial, "what_if", tried)
    monkeypatch.setattr(of_commands, "build_session", lambda _: market.spark)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    command = ["what-if", "priced", "--module", "market_module", "--set", "grace_period=2h"]
    for budget, code in (([], 0), (["--budget", "2%"], 0), (["--budget", "1.9%"], 1)):
        told = CliRunner().invoke(app, [*command, *budget])
        assert told.exit_code == code, told.output
        assert "2 rows change, 0 are added, 0 removed (2 %), of 2 keys" in told.output
    assert set(asked) == {timedelta(hours=2)}

    def planned(_: str, nodes: Any, *__: Any, **___: Any) -> list[Changes]:
        return [tried(_, nodes[0]), replace(tried(_, nodes[0]), asset="other", changed=0)]

    monkeypatch.setattr(of_commands.trial, "what_if_planned", planned)
    for budget, code in (("2%", 0), ("1.9%", 1)):
        command = ["what-if", "--planned", "--json", "--module", "market_module", "--budget", budget]
        told = CliRunner().invoke(app, command)
        assert told.exit_code == code, told.output
        shares = [(one["asset"], one["share"]) for one in json.loads(told.output)["assets"]]
        assert shares == [("priced", 0.02), ("other", 0.0)]


def test_submillisecond_differences_are_reported(spark: SparkSession, tmp_path: Path) -> None:
    """A comparison that truncates times to milliseconds would report these tables as equal."""
    made: list[AssetStore] = []
    for name, times in (("one", ("000100", "000300")), ("other", ("000100", "000301"))):
        (tmp_path / name).mkdir()
        rows = [{"k": "a", "v": "x", "at": f"2024-01-01T00:00:00.{time}Z"} for time in times]
        (tmp_path / name / "1.json").write_text(lines(*rows))
        node = VersionedTable(
            name,
            key="k",
            timestamp="at",
            schema=RECORD,
            history_retention=LONG,
            source=FilesSource(str(tmp_path / name)),
        )
        stores = stores_of(str(tmp_path / "warehouse"), spark)
        run_once(node, stores)
        made.append(stores(node))
    found = compare(*made)
    # The first version differs in its end, the second in its start.
    assert (found.missing, found.extra) == (2, 2)


def test_settings_from_command_line(market: Market) -> None:
    changed: Any = with_settings(
        market.priced,
        {"grace_period": "2h", "select": '["left.*", "right.v as cost"]', "kind": "inner"},
    )
    assert changed.operator.grace_period == timedelta(hours=2)
    assert changed.operator.kind == "inner"
    assert changed.schema.names == ["k", "v", "at", "cost"]
    shorter: Any = with_settings(market.prices, {"history_retention": "1h", "partitions": "3"})
    assert (shorter.history_retention, shorter.partitions) == (timedelta(hours=1), 3)
    hour = timedelta(hours=1)
    windows = market.sales.group_by().windowed_by(HoppingWindow(hour, hour / 2)).count(name="windows")
    wider: Any = with_settings(windows, {"window.grace": "5m", "window.size": "2h"})
    assert wider.operator.window == HoppingWindow(2 * hour, hour / 2, timedelta(minutes=5))
    for settings, said in (
        ({"grace": "1h"}, "priced: expected one of the settings .*'grace_period'.*, got 'grace'"),
        ({"kind.of": "1h"}, "priced: expected the name of one setting, got 'kind.of'"),
    ):
        with pytest.raises(TopologyError, match=said):
            with_settings(market.priced, settings)
