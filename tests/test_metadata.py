"""Metadata of materializations: the numbers that Dagster plots, and counts that add up."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from assets.topology import PUBLISHED, flights_with_weather, weather
from tests.market import Market, materialized, observed, record, run
from vt_dagster import Stream, build_asset, build_checks
from vt_dagster.orchestration import metadata
from vt_dagster.orchestration.metadata import as_time, describe, summary
from vt_dagster.topology.durations import in_utc, parse_time, spoken
from vt_dagster.topology.model import topological


def commits(market: Market) -> set[str]:
    """The commits of all tables."""
    found = market.warehouse.glob("*/*/_delta_log/*.json")
    return {str(path.relative_to(market.warehouse)) for path in found}


def moment(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=timezone.utc).timestamp()


def test_versioned_table_metadata(market: Market) -> None:
    first, second = (materialized(r, "prices") for r in market.results)
    expected = {
        "versions": {"batch": 1, "log": 0, "view": 0},
        "records_in": 8,
        "records_applied": 6,
        "records_late": 0,
        "records_quarantined": 2,
        "dagster/row_count": 5,
        "log_rows": 6,
        "positions": {"files": {"0": 8}},
        "taken": {"files": {"0": [0, 8]}},
        "stream_time": moment("2024-01-01T06:00"),
        "retention_horizon": moment("2023-12-31T06:00"),
        "dagster/uri": str(market.warehouse / "prices" / "view"),
        "dagster/table_name": "prices",
    }
    assert {name: first[name] for name in expected} == expected
    expected = {
        "versions": {"batch": 2, "log": 1, "view": 1},
        "records_in": 3,
        "records_applied": 2,
        "records_late": 1,
        "records_quarantined": 0,
        "dagster/row_count": 7,
        "log_rows": 8,
        "positions": {"files": {"0": 11}},
        "stream_time": moment("2024-01-02T05:00"),
    }
    assert {name: second[name] for name in expected} == expected
    assert second["seconds"] > 0


def test_retention_horizon_is_answered_in_each_partition(market: Market) -> None:
    """A read as of a time needs the history of the partition that is furthest ahead."""
    node = replace(market.prices, name="spread", partitions=4)
    shown = materialized(run([build_asset(node)], market.warehouse), "spread")
    head = market.store(node).head()
    assert head is not None
    assert len({*head.commit.stream_time.values()}) > 1
    assert shown["retention_horizon"] == shown["stream_time"] - 86_400


def test_join_metadata(market: Market) -> None:
    first, second = (materialized(r, "priced") for r in market.results)
    expected = {
        "records_in": 2,
        "records_out": 1,
        "records_late": 0,
        "records_waiting": 1,
        "versions": {"batch": 1, "log": 0},
        "positions": {"sales": {"0": 2}},
        "read_versions": {"sales/log": 0, "prices/view": 0},
        "dagster/row_count": 1,
        "stream_time": moment("2024-01-01T05:00"),
        "dagster/uri": str(market.warehouse / "priced" / "log"),
    }
    assert {name: first[name] for name in expected} == expected
    expected = {
        "records_in": 3,
        "records_out": 3,
        "records_late": 1,
        "records_waiting": 1,
        "positions": {"sales": {"0": 5}},
        "taken": {"sales": {"0": [2, 5]}},
        "dagster/row_count": 4,
    }
    assert {name: second[name] for name in expected} == expected
    rows = market.store(market.priced).read("log").orderBy("offset").collect()
    # s3 was released at the end of the run; s4 was late, and joined as of its own timestamp.
    assert [(r["v"], r["price"], r["is_late"]) for r in rows] == [
        ("s1", "p2 again", False),
        ("s2", "q1", False),
        ("s4, late", "q1", True),
        ("s3", "p3", False),
    ]


def plotted(result: dg.ExecuteInProcessResult, name: str) -> dict[str, Any]:
    """Returns the numbers in the metadata of a materialization: Dagster plots each."""
    (said,) = (
        e.materialization.metadata
        for e in result.get_asset_materialization_events()
        if e.asset_key == dg.AssetKey(name)
    )
    numbers = (dg.IntMetadataValue, dg.FloatMetadataValue)
    return {label: value.value for label, value in said.items() if isinstance(value, numbers)}


def test_plotted_numbers_can_change(market: Market, tmp_path: Path) -> None:
    """No counter of runs is plotted, and no count that can only be zero. A count whose zero is
    information, as for alerts, is plotted at zero too."""
    always = {"seconds", "dagster/row_count", "log_rows", "records_in"}
    source = always | {"records_applied", "records_quarantined"}
    first, second = market.results
    # only a versioned table can refuse a record as late
    assert set(plotted(first, "prices")) == source | {"records_late"}
    assert set(plotted(first, "rates")) == set(plotted(first, "sales")) == source
    of_join = always | {"records_out", "records_late", "records_waiting"}
    assert set(plotted(first, "priced")) == set(plotted(second, "priced")) == of_join
    # A sale before the first price of its key is unmatched. From then on, runs report the number.
    copy = market.copy(tmp_path / "copy")
    made = [build_asset(node) for node in (copy.sales, copy.prices, copy.priced)]
    about: Any = {"warehouse": copy.warehouse, "instance": copy.instance}
    copy.land("sales", "3.jsonl", record("c", "s6", "2 09:00"), record("c", "s7", "2 12:00"))
    assert plotted(run(made, **about), "priced")["records_unmatched"] == 1
    copy.land("prices", "4.jsonl", record("c", "p8", "2 11:00"))
    copy.land("sales", "4.jsonl", record("a", "s8", "2 15:00"))
    assert plotted(run(made, **about), "priced")["records_unmatched"] == 0


def test_times_outside_python_range(market: Market) -> None:
    year_one = dg.MetadataValue.timestamp(datetime(1, 1, 1, tzinfo=timezone.utc))
    assert as_time(-62_135_596_800_000_000) == year_one
    assert as_time(-62_135_596_800_000_001) == dg.MetadataValue.text("before the year 1")
    assert as_time(253_402_300_800_000_000) == dg.MetadataValue.text("after the year 9999")


@pytest.mark.parametrize("text", ["0001-01-01T00:00:00Z", "0999-12-31T23:59:59.000001Z"])
def test_times_before_year_1000_round_trip(text: str) -> None:
    assert in_utc(parse_time(text)) == text


def test_definitions_have_columns_and_lineage(market: Market) -> None:
    prices = build_asset(market.prices).metadata_by_key[dg.AssetKey("prices")]
    schema = prices["dagster/column_schema"]
    assert [(c.name, c.type) for c in schema.columns] == [
        ("k", "string"),
        ("v", "string"),
        ("at", "timestamp"),
        ("timestamp", "timestamp"),
        ("partition", "int"),
        ("offset", "bigint"),
        ("is_tombstone", "boolean"),
        ("recorded_at", "timestamp"),
        ("valid_from", "timestamp"),
        ("valid_to", "timestamp"),
    ]
    store = market.store(market.prices)
    view = store.view_at(store.snapshot())
    assert sorted(c.name for c in schema.columns) == sorted(view.columns)
    priced = build_asset(market.priced).metadata_by_key[dg.AssetKey("priced")]
    lineage = priced["dagster/column_lineage"].deps_by_column
    assert lineage["price"] == [dg.TableColumnDep(dg.AssetKey("prices"), "v")]
    assert lineage["v"] == [dg.TableColumnDep(dg.AssetKey("sales"), "v")]
    of_run = materialized(market.results[0], "priced")["dagster/column_lineage"]
    assert of_run.deps_by_column == lineage
    log = market.store(market.priced).read("log")
    assert [c.name for c in priced["dagster/column_schema"].columns] == log.columns


def test_explore_link_in_metadata(monkeypatch: Any) -> None:
    assert "vt_dagster/explore" not in metadata.definition_metadata(weather)
    monkeypatch.setenv(metadata.EXPLORE, "http://127.0.0.1:3001/")
    link = metadata.definition_metadata(weather)["vt_dagster/explore"]
    assert link.url == "http://127.0.0.1:3001/table/weather"
    said = "[Explore its keys and rows](http://127.0.0.1:3001/table/weather)"
    assert describe(weather).endswith(said)


def test_idle_run_makes_no_commit(market: Market, tmp_path: Path) -> None:
    copy = market.copy(tmp_path / "copy")
    before = commits(copy)
    result = copy.run()
    assert result.success
    assert commits(copy) == before
    assert len(before) > 10
    for name in ("prices", "rates", "sales", "priced"):
        assert observed(result, name)["versions"] == {"batch": 1 if name == "rates" else 2}
    before = materialized(market.results[-1], "priced")
    assert observed(result, "priced")["positions"] == before["positions"]


def test_result_columns_are_described() -> None:
    def told(node: Stream) -> dict[str, str | None]:
        columns = (
            build_asset(node).metadata_by_key[dg.AssetKey(node.name)]["dagster/column_schema"].columns
        )
        return {c.name: c.description for c in columns}

    assert told(weather)["wind_speed"] == "Wind speed, mph"
    assert told(flights_with_weather)["wind_speed"] == "Wind speed, mph (from weather.wind_speed)"
    assert told(flights_with_weather)["timestamp"] == "valid time of the record, UTC"
    began = told(flights_with_weather)["weather_from"]
    assert began == "start of the version, inclusive, UTC (from weather.valid_from)"


def test_descriptions_name_row_key_and_time() -> None:
    for node in topological(PUBLISHED):
        said = node.description or ""
        assert "row" in said, node.name
        assert all(f"`{column}`" in said for column in node.key), node.name
        assert re.search(r"time|hour|since", said), node.name
        assert "same" not in said, f"{node.name}: the same as what? A reader sees it alone"
        assert summary(node) == said, "the user's own, alone"
        about = metadata.definition_metadata(node)["vt_dagster/about"]
        assert about.md_str == describe(node)
        assert len(about.md_str) < metadata.SHOWN_AT_ONCE
    told = describe(weather)
    assert "one row for each version of a key (`origin`)" in told
    assert "Its time, `timestamp`, is `time_hour`." in told
    assert "Its time, " not in describe(flights_with_weather)


def test_default_description_is_one_line() -> None:
    """The line is the operator's description without the grace period; ``describe`` has that too."""
    assert summary(replace(weather, description=None)) == "Versions by origin, kept 150 days."
    joined = replace(flights_with_weather, description=None)
    assert summary(joined) == "flights, each record with weather as of its timestamp."
    assert "; waits 6 hours" in describe(joined)


def test_metadata_describes_checks() -> None:
    """The metadata describe each check. Its spec has no description: no room in ``dg list defs``."""
    told = metadata.definition_metadata(weather)["vt_dagster/checks"].md_str
    checks = build_checks(weather).check_specs
    assert len(checks) > 5
    for check in checks:
        assert check.description is None
        assert f"- `{check.name}`: " in told


def test_durations_are_spoken() -> None:
    assert spoken(timedelta(days=30)) == "30 days"
    assert spoken(timedelta(days=1, hours=6)) == "1 day 6 hours"
    assert spoken(timedelta(minutes=1, seconds=30)) == "1 minute 30 seconds"
    assert spoken(timedelta(milliseconds=250, microseconds=7)) == "250 ms 7 µs"
    assert spoken(timedelta(0)) == "0 seconds"
    assert "own" in spoken({0: timedelta(1)})
