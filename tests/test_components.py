"""Topologies in YAML equal those in Python, and errors point to the line in the file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl
import pytest
from dagster.components.testing import create_defs_folder_sandbox
from pyspark.sql.types import StringType, StructField, StructType, TimestampType

from vt_dagster.components import TopologyComponent
from vt_dagster.components.topology_component import CONCEPTS, as_duration
from vt_dagster.orchestration.resources import declared_nodes
from vt_dagster.sources.files_source import FilesSource
from vt_dagster.sources.kafka_source import KafkaSource
from vt_dagster.topology.model import Stream, Table, VersionedTable

# Dagster's components warn that they are a beta or a preview.
pytestmark = [
    pytest.mark.filterwarnings("ignore::dagster_shared.utils.warnings.BetaWarning"),
    pytest.mark.filterwarnings("ignore::dagster_shared.utils.warnings.PreviewWarning"),
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20"),
]

SHOP = """\
type: vt_dagster.components.TopologyComponent
attributes:
  warehouse: {warehouse}
  spark: {{master: "local[2]"}}
  assets:
    - name: priced_orders
      group: joined
      left_join:
        left: orders
        right: prices
        grace_period: 1h
        select: [left.*, right.price, right.valid_from as priced_from]
    - name: followed
      left_join:
        {{left: orders, right: prices, corrected_for: 7d, key: ordered_at, select: right.price}}
    - name: prices
      description: What things cost.
      owners: team:shop
      versioned_table:
        key: product
        columns:
          product: string
          price: {{type: double, ge: 0, nullable: true, description: in euros}}
          at: timestamp
          unit: {{type: string, nullable: true, isin: [kg, piece]}}
        timestamp: at
        tombstone: price is null
        history_retention: "{{{{ env.RETENTION }}}}"
        source:
          files: {{path: {landing}/prices, format: csv}}
        sensor: {{running: true, minimum_interval_seconds: 60}}
    - name: clicks
      stream:
        key: product
        columns: {{product: string, n: int}}
        source:
          kafka:
            cluster:
              bootstrap_servers: broker:9093
              security_protocol: SASL_SSL
              username: shop
              password: "{{{{ env.KAFKA_PASSWORD }}}}"
            topic: [clicks, taps]
            key: {{raw: {{column: product}}}}
            value: {{debezium: {{format: {{avro: {{registry: {{url: "http://registry:8081"}}}}}}}}}}
            start: latest
            recorded_at: append_time
        sensor: {{minimum_records: 1000, maximum_wait: 2m}}
    - name: orders
      stream:
        key: product
        columns: {{product: string, ordered_at: timestamp, amount: "decimal(10,2)", tags: array<int>}}
        timestamp: ordered_at
        unique_by: [product, ordered_at]
        within: 7d
        source:
          files: {{path: {landing}/orders, recorded_at: ordered_at}}
    - name: products
      table:
        key: product
        schema: .schemas.Product
        timestamp: at
        source: {{files: {{path: {landing}/products}}}}
    - name: cheap
      filter: {{input: prices, predicate: price < 100}}
    - name: dear
      filter_not: {{input: prices, predicate: price < 100}}
    - name: euros
      map_values:
        input: prices
        select: price * 0.9 as price
        materialized: {{}}
    - name: remembered
      map_values:
        input: prices
        select: [price, unit]
        materialized: {{history_retention: 1d}}
    - name: listed
      outer_join: {{left: products, right: prices, emit: per_run, select: [left.maker, right.price]}}
    - name: made
      join: {{left: products, right: makers, foreign_key: maker, select: [right.country]}}
    - name: makers
      table:
        key: maker
        columns: {{maker: string, country: string, at: timestamp}}
        timestamp: at
        source: {{files: {{path: {landing}/makers}}}}
    - name: by_maker
      aggregate:
        input: listed
        group_by: maker
        aggregates: {{n: count(*), mean: avg(price)}}
    - name: hourly
      aggregate:
        input: orders
        window:
          tumbling: {{size: 1h, grace: 5m}}
        aggregates: {{n: count(*), amount: sum(amount)}}
    - name: daily
      aggregate:
        input: orders
        window:
          tumbling: {{size: 1 day, zone: Europe/Berlin, grace: 2h}}
        aggregates: {{n: count(*)}}
    - name: hopping
      aggregate:
        input: orders
        group_by: product
        window:
          hopping: {{size: 1h, advance: 10m}}
        aggregates: {{n: count(*)}}
    - name: final
      suppress:
        input: hourly
        until: window_closes
    - name: alerts
      suppress:
        input: by_maker
        until:
          time_limit: {{duration: 10m, max_records: 10, when_full: shut_down}}
    - name: reports
      to_stream: {{input: alerts}}
    - name: sessions
      aggregate:
        input: reports
        window:
          session: {{gap: 2h}}
        aggregates: {{n: count(*)}}
    - name: sliding
      aggregate:
        input: orders
        window:
          sliding: {{time_difference: 10m, grace: 1m, retention: 1h}}
        aggregates: {{n: count(*)}}
    - name: board
      to_table: {{input: orders, materialized: {{history_retention: 1d}}}}
"""
SCHEMAS = """
import pandera.pyspark as pa
import pyspark.sql.types as T

class Product(pa.DataFrameModel):
    product: T.StringType
    maker: T.StringType
    at: T.TimestampType

class Order(pa.DataFrameModel):
    product: T.StringType
    amount: T.IntegerType
    ordered_at: T.TimestampType
"""


RESOURCES = """
import dagster as dg
from vt_dagster import build_resources

@dg.definitions
def resources():
    return dg.Definitions(resources=build_resources("here"))
"""


@contextmanager
def project(text: str, python: str = "") -> Iterator[dg.Definitions]:
    """The definitions of a project with a ``defs.yaml``."""
    with create_defs_folder_sandbox() as box:
        (box.defs_folder_path / "schemas.py").write_text(SCHEMAS)
        (box.defs_folder_path / "resources.py").write_text(python)
        folder = box.defs_folder_path / "shop"
        folder.mkdir(parents=True)
        (folder / "defs.yaml").write_text(text)
        with box.build_all_defs() as defs:
            yield defs


@pytest.fixture(autouse=True)
def _retention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RETENTION", "30d")
    monkeypatch.setenv("KAFKA_PASSWORD", "sesame")


@pytest.fixture
def shop(tmp_path: Path) -> str:
    return SHOP.format(warehouse=tmp_path / "warehouse", landing=tmp_path / "landing")


def test_yaml_project_has_all_definitions(shop: str) -> None:
    with project(shop) as defs:
        dg.Definitions.validate_loadable(defs)
        graph = defs.resolve_asset_graph()
        names = set(re.findall(r"- name: (\w+)", shop))
        assert {k.to_user_string() for k in graph.get_all_asset_keys()} == names
        assert {k.asset_key.to_user_string() for k in graph.asset_check_keys} == names
        prices = graph.get(dg.AssetKey("prices"))
        assert prices.owners == ["team:shop"]
        assert (prices.description or "").startswith("What things cost.")
        assert prices.metadata["vt_dagster/history_retention"] == "30 days"
        columns = {c.name: c for c in prices.metadata["dagster/column_schema"].columns}
        assert columns["price"].type == "double"
        assert columns["price"].description == "in euros"
        clicks = graph.get(dg.AssetKey("clicks")).metadata
        assert clicks["vt_dagster/source"] == "records of the Kafka topics clicks, taps"
        assert "sesame" not in str(clicks)
        about = graph.get(dg.AssetKey("orders")).metadata
        told = (about["vt_dagster/unique_by"], about["vt_dagster/within"])
        assert told == ("product, ordered_at", "7 days")
        orders = about["dagster/column_schema"].columns
        assert {"amount": "decimal(10,2)", "tags": "array<int>"}.items() <= {
            c.name: c.type for c in orders
        }.items()
        joined = graph.get(dg.AssetKey("priced_orders"))
        assert joined.group_name == "joined"
        assert joined.metadata["vt_dagster/grace_period"] == "1 hour"
        assert {k.to_user_string() for k in joined.parent_keys} == {"orders", "prices"}
        followed = graph.get(dg.AssetKey("followed"))
        assert followed.metadata["vt_dagster/corrected_for"] == "7 days"
        assert followed.metadata["dagster/column_schema"].columns[0].name == "ordered_at"
        assert graph.get(dg.AssetKey("euros")).metadata["vt_dagster/kind"] == "Table"
        assert graph.get(dg.AssetKey("cheap")).metadata["vt_dagster/kind"] == "VersionedTable"
        daily = graph.get(dg.AssetKey("daily")).description or ""
        assert "tumbling windows of 1 day in Europe/Berlin, grace 2 hours" in daily
        sensor = defs.resolve_sensor_def("prices_sensor")
        assert sensor.default_status == dg.DefaultSensorStatus.RUNNING
        assert sensor.minimum_interval_seconds == 60
        other = defs.resolve_sensor_def("orders_sensor")
        assert other.default_status == dg.DefaultSensorStatus.STOPPED


SPECS = """
type: vt_dagster.components.TopologyComponent
attributes:
  warehouse: {warehouse}
  assets:
    - name: prices
      key_prefix: [shop, eu]
      stream:
        key: product
        columns: {{product: string, at: timestamp}}
        timestamp: at
        source:
          files: {{path: landing}}
post_processing:
  assets:
    - target: "key:shop/eu/prices"
      attributes:
        tags: {{tier: gold}}
        kinds: [parquet]
        automation_condition: "{{{{ dg.AutomationCondition.eager() }}}}"
"""


def test_asset_specs_in_yaml(tmp_path: Path) -> None:
    """Key prefixes are set in the topology. Tags, kinds and conditions are set by Dagster's
    post-processing."""
    with project(SPECS.format(warehouse=tmp_path / "warehouse")) as defs:
        dg.Definitions.validate_loadable(defs)
        (spec,) = defs.resolve_all_asset_specs()
        assert spec.key == dg.AssetKey(["shop", "eu", "prices"])
        assert spec.tags["tier"] == "gold"
        assert "parquet" in spec.kinds
        assert spec.automation_condition == dg.AutomationCondition.eager()
        assert spec.code_version


SOURCES = """
type: vt_dagster.components.TopologyComponent
attributes:
  warehouse: {warehouse}
  assets:
    - name: rows
      stream:
        key: product
        columns: &columns {{product: string, at: timestamp, n: int}}
        renamed: {{product_id: product}}
        timestamp: at
        source:
          delta: {{path: raw/rows, mode: append, start: 3, upstream: raw/rows}}
    - name: dumps
      table:
        key: product
        columns: *columns
        source:
          snapshots: {{path: raw/dumps, dump_time: "dump_%Y-%m-%d", max_shrink: 0.2, ignore: [n]}}
    - name: rates
      versioned_table:
        key: product
        columns: *columns
        timestamp: at
        history_retention: 1d
        ready: 2026-03-02T00:00:00Z
        source:
          asset: {{key: raw/rates, as_type: polars.DataFrame, metadata: {{columns: [n]}}}}
    - name: items
      versioned_table:
        key: product
        columns: *columns
        timestamp: at
        history_retention: 1d
        only_columns: changed
        ignore_null_updates: true
        source: {{files: {{path: raw/items}}}}
        start: {{snapshots: {{path: raw/all, dump_time: modified, optional: [n], upstream: raw/all}}}}
    - name: days
      stream:
        key: product
        columns: *columns
        timestamp: at
        source:
          asset: {{key: raw/days, partitions_def: .resources.DAILY, partition_mapping: .resources.SAME}}
"""
DAYS = """
import dagster as dg
DAILY = dg.DailyPartitionsDefinition("2026-03-02")
SAME = dg.TimeWindowPartitionMapping()

@dg.definitions
def upstream():
    days = dg.AssetSpec(["raw", "days"], partitions_def=DAILY)
    return dg.Definitions(assets=[days, dg.AssetSpec(["raw", "rates"])])
"""


def test_sources_in_yaml(tmp_path: Path) -> None:
    """Each source can be declared in YAML. An object that YAML cannot express is given by its Python
    path."""
    text = SOURCES.format(warehouse=tmp_path / "warehouse")
    with project(text, DAYS) as defs:
        dg.Definitions.validate_loadable(defs)
        graph = defs.resolve_asset_graph()
        parents = {
            name: {k.to_user_string() for k in graph.get(dg.AssetKey(name)).parent_keys}
            for name in ("rows", "dumps", "rates", "items", "days")
        }
        expected = {"rows": {"raw/rows"}, "dumps": set(), "rates": {"raw/rates"}, "days": {"raw/days"}}
        expected["items"] = {"raw/all"}
        assert parents == expected
        assert graph.get(dg.AssetKey("days")).partitions_def == dg.DailyPartitionsDefinition(
            "2026-03-02"
        )
        assert {s.name for s in defs.sensors or ()} == {
            *("rows_sensor", "dumps_sensor", "items_sensor"),
        }
        (asset,) = (
            a
            for a in defs.resolve_asset_graph().assets_defs
            if isinstance(a, dg.AssetsDefinition) and dg.AssetKey("rates") in a.keys
        )
        (taken,) = asset.op.ins.values()
        assert taken.dagster_type.typing_type is pl.DataFrame
        assert (taken.metadata or {})["columns"] == ["n"]
        ready = asset.metadata_by_key[dg.AssetKey("rates")]["vt_dagster/ready"]
        assert ready == "2026-03-02 00:00:00+00:00"
        (items,) = (a for a in graph.assets_defs if dg.AssetKey("items") in a.keys)
        said = items.metadata_by_key[dg.AssetKey("items")]
        assert said["vt_dagster/only_columns"] == "changed"
        assert said["vt_dagster/ignore_null_updates"] == "all"


def test_asset_source_refuses_start_and_sensor(tmp_path: Path) -> None:
    text = SOURCES.format(warehouse=tmp_path / "warehouse")
    given = text.replace("metadata: {columns: [n]}}\n", "start: x}\n        sensor: {running: true}\n")
    assert "'start' is not known here; expected key, as_type" in errors(given)
    assert "expected no sensor, since Dagster tracks the upstream asset itself" in errors(
        given.replace(", start: x", "")
    )


def errors(text: str) -> str:
    """The messages of an error and its causes."""
    with pytest.raises(Exception) as caught, project(text) as defs:  # noqa: PT011 - Dagster's own
        dg.Definitions.validate_loadable(defs)
    said: list[str] = []
    error: BaseException | None = caught.value
    while error is not None:
        said.append(str(error))
        error = error.__cause__ or error.__context__
    return "\n".join(said)


BROKEN = {
    "unknown setting": (
        "history_retention:",
        "hist_retention:",
        "'hist_retention' is not known here; did you mean 'history_retention'? expected",
    ),
    "missing setting": (
        'history_retention: "{{ env.RETENTION }}"',
        "partitions: 2",
        "'history_retention' is missing",
    ),
    "length of time": (
        "grace_period: 1h",
        "grace_period: 1x",
        "expected a length of time like 7d, 1h30m or 250ms (units: w, d, h, m, s, ms), got '1x",
    ),
    "grace": (
        "grace_period: 1h",
        "grace_period: 40d",
        "the grace period 40 days, 0:00:00 is longer than the history retention 30 days",
    ),
    "template": ("{{ env.RETENTION }}", "{{ nowhere.x }}", "'nowhere' not found in scope"),
    "unset variable": (
        "{{ env.RETENTION }}",
        "{{ env.NOT_SET }}",
        "expected a value of {{ env.NOT_SET }}, got none; set the environment variable",
    ),
    "variable within a text": (
        "bootstrap_servers: broker:9093",
        'bootstrap_servers: "{{ env.NOT_THERE }}:9093"',
        "expected a value of {{ env.NOT_THERE }}:9093, got none; set the environment variable",
    ),
    "variable within a filter": (
        "bootstrap_servers: broker:9093",
        'bootstrap_servers: "{{- env.NOT_THERE | lower }}:9093"',
        "expected a value of {{- env.NOT_THERE | lower }}:9093, got none; set the environment",
    ),
    "part of the context": (
        "bootstrap_servers: broker:9093",
        'bootstrap_servers: "{{ context.nowhere }}:9093"',
        "nowhere",
    ),
    "name within a text": (
        "bootstrap_servers: broker:9093",
        'bootstrap_servers: "{{ nowhere }}:9093"',
        "expected names in {{ nowhere }}:9093 among automation_condition, context, ",
    ),
    "rendered": ("{{ env.RETENTION }}", "{{ 'long' + 'er' }}", "expected a length of time like 7d"),
    "key": ("key: product", "key: produkt", "key columns ['produkt'] are not in the schema"),
    "input": ("left: orders", "left: order", "expected one of the assets of this file (alerts, board,"),
    "path": (
        "left: orders",
        "left: my.own.orders",
        "left: expected the Python path of an object, like my_project.schemas.Price",
    ),
    "no node": (
        "left: orders",
        "left: os.path.sep",
        "expected os.path.sep to be a Stream or Table, got str",
    ),
    "no schema": (".schemas.Product", ".schemas.Produkt", "got '.schemas.Produkt'"),
    "type of column": (
        "at: timestamp\n          unit",
        "at: timestam\n          unit",
        "column 'at' has the type 'timestam'; expected string, boolean,",
    ),
    "check of column": ("ge: 0", "gee: 0", "'gee' is not known here; did you mean 'ge'?"),
    "digits": ("decimal(10,2)", "decimal(5,9)", "expected decimal(p,s) with 1 to 38 digits, of which"),
    "too many digits": (
        "decimal(10,2)",
        "decimal(39,2)",
        "column 'amount' has the type 'decimal(39,2)'",
    ),
    "half a range": (
        "ge: 0",
        "in_range: [1]",
        "checks of the column 'price' that pandera takes, got",
    ),
    "empty range": ("ge: 0", "in_range: [5, 1]", "max_value = 1 defines an empty interval!; correct"),
    "no number": (
        "ge: 0",
        "ge: zero",
        "expected ge of the column 'price' to compare with numbers, got ",
    ),
    "no numbers": ("ge: 0", "isin: [1, a]", "expected isin of the column 'price' to compare with"),
    "start of topics": (
        "start: latest",
        "start: now",
        "expected earliest, latest or a time like 2024-06-01T00:00:00Z, got 'now'",
    ),
    "until": (
        "until: window_closes",
        "until: never",
        "expected one of time_limit, window_closes, got 'never'",
    ),
    "empty": (
        "until: window_closes",
        "until:",
        "until is empty: set a value, {} for defaults, or remove it",
    ),
    "size": ("size: 1h, grace", "size: 0h, grace", "size must be longer than 0"),
    "zone": (
        "size: 1h, grace: 5m",
        "size: 1 day, zone: Europe/Berln",
        "did you mean 'Europe/Berlin'?",
    ),
    "size of a zone": (
        "size: 1h, grace: 5m",
        "size: 24h, zone: Europe/Berlin",
        "size must be one of 1 day, 1 week, 1 month as text",
    ),
    "size in no units": ("size: 1h, grace", "size: 2 days, grace", "expected a length of time like 7d"),
    "zone of other windows": ("advance: 10m", "advance: 10m, zone: UTC", "'zone' is not known here; "),
    "format": ("format: csv", "format: xml", "Input should be 'jsonl', 'csv' or 'parquet'"),
    "share": ("format: csv", "max_bad_share: 3", "max_bad_share must be between 0 and 1, got 3"),
    "boolean as a number": (
        'history_retention: "{{ env.RETENTION }}"',
        'history_retention: "{{ env.RETENTION }}"\n        partitions: true',
        "expected a number, got true",
    ),
    "boolean as a share": ("format: csv", "max_bad_share: true", "expected a number, got true"),
    "number as a time": ("start: latest", "start: 5", "expected earliest, latest or a time like"),
    "boolean as an offset": ("start: latest", "start: {clicks: {0: true}}", "a number, got true"),
    "bound": ("ge: 0", "ge: true", "expected ge of the column 'price' to compare with numbers, got "),
    "concept": ("      filter:", "      filtr:", "'filtr' is not known here; did you mean 'filter'?"),
    "no concept": (
        "      filter: {",
        "      group: x # {",
        "expected one of stream, table, versioned_table, join",
    ),
    "two concepts": (
        "      to_stream: {input: alerts}",
        "      to_stream: {input: alerts}\n      to_table: {input: orders}",
        "got to_table and to_stream",
    ),
    "kind of input": (
        "filter: {input: prices",
        "filter: {input: orders",
        "filter needs a Table, got the Stream 'orders'",
    ),
    "twice": ("- name: dear", "- name: cheap", "two assets have the name 'cheap'; rename one of them"),
    "circle": ("input: hourly", "input: final", "final -> final is a cycle; break it"),
    "column": ("right.price,", "right.prise,", "'prices' has no column 'prise'"),
    "window of a table": (
        "input: listed",
        "input: listed\n        window: {session: {gap: 1h}}",
        "window needs a stream, but 'listed' is a table",
    ),
    "aggregate": ("n: count(*), amount: sum", "n: median(n), amount: sum", "'n' is 'median(n)'"),
    "not of streams": (
        "grace_period: 1h",
        "foreign_key: unit",
        "the left_join of a Stream, here 'orders', has no foreign_key; remove it",
    ),
    "not of windows": (
        "size: 1h, grace: 5m}",
        "size: 1h, grace: 5m}\n        materialized: {}",
        "the aggregate of a Stream, here 'orders', has no materialized",
    ),
    "columns and schema": (
        "schema: .schemas.Product",
        "partitions: 1",
        "expected either columns or schema, got neither",
    ),
    "interval": (
        "minimum_interval_seconds: 60",
        "minimum_interval_seconds: -60",
        "prices: expected minimum_interval_seconds of its sensor to be 0 or more, got -60; correct it",
    ),
    "group of asset": (
        "- name: prices\n",
        "- name: prices\n      group: a b\n",
        'prices: "a b" is not a valid asset group name',
    ),
    "key prefix": (
        "- name: prices\n",
        "- name: prices\n      key_prefix: shop/e u\n",
        "'e u' is not a name for a key prefix",
    ),
    "sensor": ("minimum_interval_seconds: 60", "interval: 60", "'interval' is not known here; "),
    "a part of a setting": (
        "minimum_interval_seconds: 60",
        "interval: 60",
        "did you mean 'minimum_interval_seconds'? expected",
    ),
    "time of record": (
        "recorded_at: ordered_at",
        "recorded_at: order_at",
        "type timestamp (['ordered_at']), got 'order_at'; correct it",
    ),
    "suppress": (
        "input: by_maker",
        "input: prices",
        "suppress would lose versions of the versioned table 'prices'",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_error_names_yaml_line(shop: str, name: str) -> None:
    old, new, said = BROKEN[name]
    assert old in shop
    text = shop.replace(old, new, 1)
    message = errors(text)
    assert said in message
    places = {int(n) for n in re.findall(r"shop/defs\.yaml:(\d+)", message)}
    lines = text.splitlines()
    first = 1 + shop[: shop.index(old)].count("\n")
    exact = range(first, first + new.count("\n") + 1)
    begin = max(i for i, line in enumerate(lines, 1) if i <= exact[-1] and "- name" in line)
    assert places, message
    assert places & set(range(begin, exact[-1] + 1) if name in NEAR else exact), (places, exact)


NEAR = {
    "missing setting",
    "no concept",
    "two concepts",
    "columns and schema",
    "kind of input",
    "suppress",
    "until",
    "empty",
}
"""If a setting is missing or settings do not fit together, the error points to a line of the asset."""


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("7d", timedelta(days=7)),
        ("1h30m", timedelta(minutes=90)),
        ("1h 30m", timedelta(minutes=90)),
        ("2w", timedelta(days=14)),
        ("250ms", timedelta(milliseconds=250)),
        ("1.5h", timedelta(minutes=90)),
        ("0s", timedelta(0)),
    ],
)
def test_duration_texts(text: str, length: timedelta) -> None:
    assert as_duration(text) == length


@pytest.mark.parametrize("text", ["", "7", "d", "7 days", "-1h", "1h1h", "P1D", 90])
def test_invalid_duration_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        as_duration(text)


def test_negative_bound_of_stream_join_in_yaml(shop: str) -> None:
    """One of ``before`` and ``after`` may be negative, in Python and in YAML."""
    text = f"""{shop}    - name: answered
      join: {{left: orders, right: clicks, before: 2h, after: -1h, select: [left.amount, right.n]}}
"""
    with project(text) as defs:
        answered = defs.resolve_asset_graph().get(dg.AssetKey("answered"))
        bounds = [answered.metadata[f"vt_dagster/{name}"] for name in ("before", "after")]
        assert bounds == ["2 hours", "minus 1 hour"]


def test_options_in_yaml_are_no_texts(shop: str) -> None:
    """Numbers and booleans of an option are accepted, and shares as numbers, as in Python."""
    text = shop.replace(
        "/prices, format: csv}", "/prices, format: csv, options: {header: false, maxColumns: 50}}"
    ).replace(
        "bootstrap_servers:", "options: {socket.timeout.ms: 5000}\n              bootstrap_servers:"
    )
    limits = "alerts: [{to: 'os.path:join', quarantine_share: 0.01, late_share: 0.1%}]"
    with project(text.replace("  assets:", f"  {limits}\n  assets:", 1)) as defs:
        sources = {node.name: node.source for node, _ in declared_nodes(defs)}
        assert isinstance(prices := sources["prices"], FilesSource)
        assert isinstance(clicks := sources["clicks"], KafkaSource)
        assert prices.options == {"header": "false", "maxColumns": "50"}
        assert clicks.cluster.options == {"socket.timeout.ms": "5000"}


def test_templates_of_other_values_than_texts(shop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment variable may provide a number, a boolean, a choice, or a key prefix."""
    for name, value in {"RUNNING": "true", "SECONDS": "90", "FORMAT": "csv", "PLACE": "a/b"}.items():
        monkeypatch.setenv(name, value)
    text = shop.replace("running: true", 'running: "{{ env.RUNNING }}"')
    text = text.replace("minimum_interval_seconds: 60", 'minimum_interval_seconds: "{{ env.SECONDS }}"')
    text = text.replace("format: csv", 'format: "{{ env.FORMAT }}"')
    text = text.replace("- name: makers", '- name: makers\n      key_prefix: "{{ env.PLACE }}"')
    with project(text) as defs:
        sensor = defs.resolve_sensor_def("prices_sensor")
        assert (sensor.minimum_interval_seconds, sensor.default_status.value) == (90, "RUNNING")
        nodes = {node.name: node for node, _ in declared_nodes(defs)}
        assert isinstance(prices := nodes["prices"].source, FilesSource)
        assert prices.format == "csv"
        assert nodes["makers"].path == ("a", "b", "makers")
    place = "{{ context.project_root }}{% if env.NOT_SET %}/{{ env.NOT_SET }}{% endif %}"
    place += "/{{ nowhere | default('lake') }}"
    with project(re.sub("warehouse: .*", f'warehouse: "{place}"', text, count=1)) as defs:
        resources: Any = defs.resources
        found = Path(resources["vt_dagster_warehouse"].path)
        assert (found.name, found.is_absolute()) == ("lake", True)
    monkeypatch.setenv("SECONDS", "soon")
    assert "minimum_interval_seconds: Input should be a valid integer" in errors(text)


@pytest.mark.parametrize(
    ("given", "start"),
    [
        ("2024-06-01T00:00:00Z", datetime(2024, 6, 1, tzinfo=timezone.utc)),
        ("{clicks: {0: 5}, taps: {0: 7, 1: 0}}", {"clicks": {0: 5}, "taps": {0: 7, 1: 0}}),
        ('{clicks: {"0": 5}}', {"clicks": {0: 5}}),
        ("earliest", "earliest"),
    ],
)
def test_start_of_topics_in_yaml(shop: str, given: str, start: Any) -> None:
    """A source of topics begins at a word, a time or offsets, as in Python."""
    with project(shop.replace("start: latest", f"start: {given}")) as defs:
        sources = {node.name: node.source for node, _ in declared_nodes(defs)}
        assert isinstance(clicks := sources["clicks"], KafkaSource)
        assert clicks.start == start


def test_yaml_has_every_python_parameter() -> None:
    """YAML has all settings of Python, also those that are added later."""
    for name, kind in (("stream", Stream), ("table", Table), ("versioned_table", VersionedTable)):
        fields = set(CONCEPTS[name].yaml.model_fields)
        assert fields - {"columns", "sensor"} == set(kind.__dataclass_fields__) - {
            *("name", "description", "group", "owners", "key_prefix", "freshness"),
            "log_retention",
            *("operator", "contract"),
        }
        assert CONCEPTS[name].yaml.model_fields["key"].description


def test_yaml_guide_loads() -> None:
    page = Path(__file__).parent.parent / "docs" / "guides" / "yaml.md"
    guide = page.read_text(encoding="utf-8")
    found = re.search(r"# Topologies in YAML.*?```yaml\n(.*?)```", guide, re.DOTALL)
    assert found is not None
    with project(found.group(1).replace("my_project.schemas", ".schemas")) as defs:
        dg.Definitions.validate_loadable(defs)
        names = {k.to_user_string() for k in defs.resolve_asset_graph().get_all_asset_keys()}
        assert names == {"prices", "orders", "priced_orders", "hourly", "final"}
    for name in CONCEPTS:
        assert f"`{name}`" in guide


def test_scaffold() -> None:
    with create_defs_folder_sandbox() as box:
        made = box.scaffold_component(component_cls=TopologyComponent)
        assert "versioned_table" in (made / "defs.yaml").read_text()
        with box.build_all_defs() as defs:
            dg.Definitions.validate_loadable(defs)
            assert defs.resolve_asset_graph().get_all_asset_keys() == {dg.AssetKey("prices")}


def test_files_with_same_warehouse_share_resources(shop: str, tmp_path: Path) -> None:
    """Two files with the same warehouse are merged. One of them declares maintenance and a log
    retention."""
    other = f"""\
type: vt_dagster.components.TopologyComponent
attributes:
  warehouse: {tmp_path / "warehouse"}
  spark: {{master: "local[2]"}}
  maintenance: {{}}
  assets:
    - name: others
      log_retention: 90d
      table:
        key: k
        columns: {{k: string, at: timestamp}}
        timestamp: at
        source: {{files: {{path: landing}}}}
"""
    with project(f"{shop}---\n{other}") as defs:
        dg.Definitions.validate_loadable(defs)
        others = defs.resolve_asset_graph().get(dg.AssetKey("others"))
        assert others.metadata["vt_dagster/log_retention"] == "90 days"
        assert defs.resolve_job_def("maintenance").has_node("maintain")


def test_catalog_in_yaml(tmp_path: Path) -> None:
    text = f"""\
type: vt_dagster.components.TopologyComponent
attributes:
  warehouse: {tmp_path / "warehouse"}
  catalog: lake.bronze
  assets:
    - name: others
      table:
        key: k
        columns: {{k: string, at: timestamp}}
        timestamp: at
        source: {{files: {{path: landing}}}}
"""
    with project(text) as defs:
        resources: Any = defs.resources
        assert resources["vt_dagster_warehouse"].catalog == "lake.bronze"
    alone = "\n".join(line for line in text.splitlines() if "warehouse:" not in line)
    assert "attributes.catalog: expected warehouse in the same file, got none" in errors(alone)
    said = errors(text.replace("lake.bronze", "a b"))
    assert "attributes.catalog: WarehouseResource: expected catalog to be a schema" in said


def test_invalid_resources_name_their_line() -> None:
    text = """\
type: vt_dagster.components.TopologyComponent
attributes:
  warehouse: here
  spark: {spark_config: {spark.driver.memory: 2g}}
  assets:
    - name: others
      table:
        key: k
        columns: {k: string, at: timestamp}
        timestamp: at
        source: {files: {path: landing}}
"""
    for given in ('""', '" "', "~/lake", "foo://lake"):
        said = errors(text.replace("here", given))
        assert "attributes.warehouse: warehouse: expected a directory" in said, given
    for given in ("[2g]", "{a: 2g}", "null"):
        said = errors(text.replace("2g", given))
        assert "attributes.spark: SparkResource: expected spark.driver.memory of spark_config" in said
    assert "attributes.spark: SparkResource: expected master" in errors(
        text.replace("{spark_config", '{master: "", spark_config')
    )
    alone = text.replace("  warehouse: here\n", "")
    assert "attributes.spark: expected warehouse in the same file, got none" in errors(alone)
    with project(text.replace("2g", "2024-01-01")) as defs:
        resources: Any = defs.resources
        assert resources["vt_dagster_spark"].spark_config == {"spark.driver.memory": "2024-01-01"}


def test_python_inputs_in_yaml() -> None:
    """A stream or table declared in Python can be an input in YAML. YAML creates no asset for it."""
    text = """\
type: vt_dagster.components.TopologyComponent
attributes:
  assets:
    - name: long
      filter: {input: tests.test_components.WORDS, predicate: length(word) > 9}
"""
    with project(text, RESOURCES) as defs:
        dg.Definitions.validate_loadable(defs)
        graph = defs.resolve_asset_graph()
        assert {k.to_user_string() for k in graph.materializable_asset_keys} == {"long"}
        assert {k.to_user_string() for k in graph.external_asset_keys} == {"words"}


PARTITION_SENSORS = """\
type: vt_dagster.components.TopologyComponent
attributes:
  warehouse: here
  assets:
    - name: prices
      versioned_table:
        key: product
        columns: {product: string, at: timestamp}
        timestamp: at
        history_retention: 30d
        source: {files: {path: landing}}
  partition_sensors:
    - report: tests.test_components.daily
      reads: prices
      running: true
"""


@dg.asset(
    partitions_def=dg.DailyPartitionsDefinition("2024-01-01"),
    ins={"prices": dg.AssetIn(metadata={"vt_dagster/as_of": "partition_end"})},
)
def daily(prices: pl.DataFrame) -> None: ...


def test_partition_sensors_in_yaml() -> None:
    its = "import dagster as dg\nfrom tests.test_components import daily\n"
    its += "@dg.definitions\ndef its():\n    return dg.Definitions(assets=[daily])\n"
    with project(PARTITION_SENSORS, its) as defs:
        dg.Definitions.validate_loadable(defs)
        sensor = defs.resolve_sensor_def("daily_partitions_of_prices")
        assert sensor.default_status == dg.DefaultSensorStatus.RUNNING
    for old, new, said in (
        ("test_components.daily", "test_components.WORDS", "expected report to be the Python path of"),
        ("components.daily", "components.weekly", "got 'tests.test_components.weekly'"),
        ("reads: prices", "reads: rates", "expected one of the assets of this file (prices)"),
        ("reads: prices", "reads: tests.test_components.WORDS", "got the Table 'words'"),
        ("running: true", "runing: true", "'runing' is not known here; did you mean"),
    ):
        assert old in PARTITION_SENSORS
        message = errors(PARTITION_SENSORS.replace(old, new))
        assert said in message
        assert re.search(r"shop/defs\.yaml:1[2-6]", message)


ALERTS = """\
type: vt_dagster.components.TopologyComponent
attributes:
  warehouse: here
  assets:
    - name: prices
      versioned_table:
        key: product
        columns: {product: string, at: timestamp}
        timestamp: at
        history_retention: 30d
        source: {files: {path: landing}}
    - name: cheap
      filter: {input: prices, predicate: "product < 'c'"}
  alerts:
    - to: tests.test_components:send
      freshness: 2h
      quarantine_share: 1%
      running: true
    - name: cheap_alerts
      assets: cheap
      late_share: 0.1%
      to: tests.test_components.send
"""


def send(alert: object) -> None: ...


def test_alerts_in_yaml() -> None:
    with project(ALERTS) as defs:
        dg.Definitions.validate_loadable(defs)
        found = {key.to_user_string() for key in defs.resolve_asset_graph().asset_check_keys}
        assert {
            *("prices:is_fresh", "cheap:is_fresh", "prices:few_records_are_quarantined"),
            "cheap:few_results_are_wrong",
        } <= found
        assert "prices:few_results_are_wrong" not in found
        assert defs.resolve_sensor_def("alerts").default_status == dg.DefaultSensorStatus.RUNNING
        assert defs.resolve_sensor_def("cheap_alerts")
    for old, new, said in (
        ("components:send", "components:page", "got 'tests.test_components.page'"),
        ("components:send", "components:ALERTS", "expected a function that takes an Alert (to), got"),
        ("freshness: 2h", "freshness: 0h", "expected at_most to be a positive timedelta"),
        ("quarantine_share: 1%", "quarantine_share: 1e", "expected a share of the results"),
        ("assets: cheap", "assets: dear", "expected one of the assets of this file (cheap, prices)"),
        ("late_share: 0.1%", "waiting: 3", "expected streams or tables to which waiting applies"),
        ("late_share: 0.1%", "latte_share: 0.1%", "is not known here; did you mean 'late_share'?"),
    ):
        assert old in ALERTS
        message = errors(ALERTS.replace(old, new))
        assert said in message
        assert re.search(r"shop/defs\.yaml:(1[4-9]|2[0-3])", message)


WORDS = Table(
    "words",
    key="word",
    schema=StructType([StructField("word", StringType()), StructField("at", TimestampType())]),
    timestamp="at",
)
