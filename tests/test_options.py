"""The registry of options: what is derived from an option, and which consumer reads a table with it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import MISSING, fields
from datetime import datetime, timedelta
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import dagster as dg
import numpy
import pandera.pyspark as pa
import pytest
from pyspark.sql.types import IntegerType, StringType, StructField, StructType, TimestampType
from typing_extensions import Required

from vt_dagster import (
    Aggregator,
    DeltaSource,
    FeatureView,
    FilesSource,
    Materialized,
    SnapshotSource,
    Stream,
    Table,
    TopologyError,
    TumblingWindow,
    UntilWindowCloses,
    VersionedTable,
    WarehouseResource,
    build_checks,
    build_maintenance,
    build_resources,
    build_sensor,
    build_training_set,
    explain,
    lateness,
    read,
)
from vt_dagster.components.topology_component import CONCEPTS, AssetPart, described
from vt_dagster.errors import StorageError, VtDagsterError
from vt_dagster.kafka import Json, KafkaCluster, KafkaSource, Protobuf
from vt_dagster.orchestration.decorators import (
    StreamAttributes,
    TableAttributes,
    VersionedTableAttributes,
)
from vt_dagster.orchestration.io_manager import AS_OF
from vt_dagster.orchestration.metadata import definition_metadata
from vt_dagster.orchestration.sensors import build_partition_sensor
from vt_dagster.orchestration.translator import code_version
from vt_dagster.provenance.lateness import require_computable
from vt_dagster.storage.commit_log import Shape
from vt_dagster.storage.schema_evolution import shape_of
from vt_dagster.topology.feature_views import TrainingSet
from vt_dagster.topology.options import OPTIONS, Consumer, Option

DAY = timedelta(days=1)
SCHEMA = StructType(
    [
        StructField("k", StringType()),
        StructField("v", StringType()),
        StructField("n", IntegerType()),
        StructField("till", TimestampType()),
        StructField("at", TimestampType()),
    ]
)


class Checked(pa.DataFrameModel):
    """``SCHEMA`` with a check."""

    k: StringType
    v: StringType = pa.Field(nullable=True)
    n: IntegerType = pa.Field(nullable=True, ge=0)
    till: TimestampType = pa.Field(nullable=True)
    at: TimestampType


WIDER = StructType([*SCHEMA.fields, StructField("w", StringType())])
NO_OPTIONS = {"name", "operator", "contract"}

VALUES: dict[str, Any] = {
    "key": ["k", "v"],
    "schema": WIDER,
    "timestamp": "till",
    "tombstone": "n < 0",
    "partitions": 3,
    "partition_by": "length(k)",
    "source": FilesSource("other"),
    "null_key": "keep",
    "description": "Prices.",
    "group": "shop",
    "owners": ["team:shop"],
    "key_prefix": "shop",
    "freshness": "every_run",
    "renamed": {"before": "v"},
    "log_retention": DAY,
    "unique_by": ["v"],
    "within": DAY,
    "on_contract_break": "quarantine",
    "broadcast": True,
    "deleted_when": "n < 0",
    "deleted_at": "till",
    "history_retention": 2 * DAY,
    "segment_interval": DAY,
    "ready": "initial_load",
    "tie_break": "n",
    "valid_until": "till",
    "start": SnapshotSource("dumps", dump_time="modified"),
    "new_version_on": ["v"],
    "only_columns": ["v"],
    "ignore_null_updates": True,
}
"""A value of each option, other than its default."""
OF_STREAMS = ("null_key", "unique_by", "within")
"""Options of streams: a table has them too, but refuses them."""


def with_required_option(option: str) -> dict[str, Any]:
    """Returns an option's value, with that of the other option that it needs."""
    pair = ("unique_by", "within")
    return {name: VALUES[name] for name in (pair if option in pair else (option,) if option else ())}


def schema_for(option: str) -> Any:
    """The schema of a node with an option."""
    return Checked if option == "on_contract_break" else SCHEMA


def declared(option: str = "", **more: Any) -> Stream:
    """A node with one more option: a ``VersionedTable``, which has most options, if it allows this."""
    about: dict[str, Any] = {"key": "k", "schema": schema_for(option), "timestamp": "at", **more}
    about |= {"source": FilesSource("landing")} if "source" not in more else {}
    about |= with_required_option(option)
    if option == "broadcast":
        return Table("prices", **about)
    if option in OF_STREAMS:
        return Stream("prices", **about)
    return VersionedTable("prices", **{"history_retention": DAY, **about})


def without(node: Stream) -> Stream:
    """The same kind of node without the option."""
    about: dict[str, Any] = {"key": "k", "schema": SCHEMA, "timestamp": "at"}
    about |= {"history_retention": DAY} if isinstance(node, VersionedTable) else {}
    return type(node)("prices", source=FilesSource("landing"), **about)


def each(of: Any = lambda option: True) -> Any:
    found = [option for option in OPTIONS if of(option)]
    return pytest.mark.parametrize("option", found, ids=lambda option: option.name)


def test_each_field_is_an_option() -> None:
    names = [option.name for option in OPTIONS]
    assert len(set(names)) == len(names)
    assert set(names) == {f.name for f in fields(VersionedTable)} - NO_OPTIONS == set(VALUES)


def test_decorators_and_yaml_have_each_option() -> None:
    """A decorated function is the source of its table, so there is no ``source``; it has no changes
    that a ``start`` snapshot could precede."""
    of_function = {"name", "ins", "deps", "partitions_def", "required_resource_keys"}
    of_function |= {"max_bad_share", "max_clock_skew"}
    not_of = {Stream: {"freshness"}, Table: set[str](), VersionedTable: {"start", "broadcast"}}
    kinds = {Stream: StreamAttributes, Table: TableAttributes, VersionedTable: VersionedTableAttributes}
    concepts = {Stream: "stream", Table: "table", VersionedTable: "versioned_table"}
    shown = {*AssetPart.model_fields}
    for kind, attributes in kinds.items():
        names = {f.name for f in fields(kind)} - NO_OPTIONS
        assert set(get_type_hints(attributes)) == names - {"source"} - not_of[kind] | of_function
        hints = get_type_hints(attributes, include_extras=True)
        required = {f.name for f in fields(kind) if f.default is f.default_factory is MISSING}
        assert {n for n, hint in hints.items() if get_origin(hint) is Required} == required - {"name"}
        assert names <= {*CONCEPTS[concepts[kind]].yaml.model_fields} | shown


@each()
def test_each_option_has_description(option: Option) -> None:
    assert described(VersionedTable, option.name)


def test_code_version_ignores_sql_layout() -> None:
    def made(timestamp: str, condition: str) -> str:
        schema = StructType([*SCHEMA.fields, StructField("x", StringType())])
        node = Table("t", key="k", schema=schema, timestamp=timestamp, deleted_when=condition)
        return code_version(node) + code_version(node.filter(condition, name="f"))

    first = made("coalesce(at, at)", "x = 'a  b' AND k > 1")
    assert first == made("coalesce( at,\n at ) -- the time", "x='a  b' /* both */\n AND k>1")
    assert first != made("coalesce(at, at)", "x = 'a b' AND k > 1")


@each()
def test_code_version_changes_with_record_options(option: Option) -> None:
    node = declared(option.name)
    # ``deleted_when`` is an alias, stored as ``tombstone``.
    defines = option.defines_records or option.name == "deleted_when"
    assert (code_version(node) != code_version(without(node))) == defines


@each()
def test_metadata_shows_option(option: Option) -> None:
    now, before = (definition_metadata(n) for n in (declared(option.name), without(declared())))
    name = f"vt_dagster/{option.name}"
    assert (name in now) == option.shown
    if option.shown and option.name not in ("key", "source", "history_retention"):
        assert name not in before


def test_values_are_shown_as_text() -> None:
    shown = {"deleted_at": "till", "tie_break": "n", "new_version_on": "v", "only_columns": "v"}
    shown |= {"ignore_null_updates": "all", "history_retention": "2 days", "log_retention": "1 day"}
    shown |= {
        "key": "k, v",
        "unique_by": "v",
        "within": "1 day",
        "source": VALUES["source"].describe(),
        "ready": "initial_load",
    }
    shown |= {"on_contract_break": "quarantine"}
    shown |= {"start": VALUES["start"].describe(), "valid_until": "till"}
    assert set(shown) == {option.name for option in OPTIONS if option.shown}
    for name, text in shown.items():
        assert definition_metadata(declared(name))[f"vt_dagster/{name}"] == text


@each(lambda option: option.in_commit)
def test_commit_stores_option(option: Option) -> None:
    shape = Shape.model_validate_json(shape_of(declared(option.name)).model_dump_json())
    value = VALUES[option.name]
    assert getattr(shape, option.name) == value
    assert getattr(shape_of(declared()), option.name) is None


# -- the matrix of options and consumers ---------------------------------------------------------------

OTHER = VersionedTable("other", key="k", schema=SCHEMA, timestamp="at", history_retention=DAY)
ORDERS = Stream("orders", key="k", schema=SCHEMA, timestamp="at")
JOINED: dict[str, Any] = {"name": "m", "select": ["left.k"]}
KEPT = Materialized(history_retention=DAY)


def report_of(table: Stream) -> dg.AssetsDefinition:
    as_of = dg.AssetIn(dg.AssetKey(table.path), metadata={AS_OF: "partition_end"})

    @dg.asset(partitions_def=dg.DailyPartitionsDefinition("2024-01-01"), ins={"rows": as_of})
    def report(rows: Any) -> None: ...

    return report


def history(one: Any, other: Any) -> Any:
    return one.join(other, history="complete", **JOINED)


BUILD: dict[Consumer, list[Callable[[Any], Any]]] = {
    Consumer.STREAM_TABLE_JOIN: [
        lambda t: ORDERS.join(t, **JOINED),
        lambda t: ORDERS.left_join(t, max_age=DAY, at="before", **JOINED),
        lambda t: ORDERS.left_join(t, grace_period=DAY, **JOINED),
    ],
    Consumer.AS_KNOWN: [
        lambda t: ORDERS.join(t, as_known="when_recorded", **JOINED),
        lambda t: ORDERS.join(t, as_known=DAY, **JOINED),
        lambda t: FeatureView(t),
    ],
    Consumer.CORRECTED_JOIN: [
        lambda t: ORDERS.join(t, corrected_for=DAY, **JOINED),
        lambda t: ORDERS.left_join(t, corrected_for=DAY, **JOINED),
    ],
    Consumer.TABLE_JOIN: [
        lambda t: t.join(OTHER, **JOINED),
        lambda t: OTHER.left_join(t, **JOINED),
        lambda t: OTHER.outer_join(t, **JOINED),
    ],
    Consumer.HISTORY_JOIN: [lambda t: history(t, OTHER), lambda t: history(OTHER, t)],
    Consumer.FOREIGN_KEY_JOIN: [
        lambda t: t.join(OTHER, foreign_key="v", **JOINED),
        lambda t: OTHER.left_join(t, foreign_key="v", **JOINED),
    ],
    Consumer.GROUP_BY: [
        lambda t: t.group_by("v").count(name="m"),
        lambda t: t.group_by("k").aggregate(Aggregator(max, min), select=["v as x"], name="m"),
    ],
    Consumer.FILTER: [
        lambda t: t.filter("k > 'a'", name="m"),
        lambda t: t.filter_not("v is null", name="m", materialized=KEPT),
    ],
    Consumer.MAP_VALUES: [lambda t: t.map_values("*", name="m")],
    Consumer.TO_STREAM: [lambda t: t.to_stream(name="m")],
    Consumer.TRAINING_SET: [
        lambda t: TrainingSet(
            "m", ORDERS, (FeatureView(t, columns=["n"], as_known="now", prefix="of_"),)
        )
    ],
    Consumer.SPINE: [lambda t: TrainingSet("m", t, (FeatureView(OTHER, prefix="of_"),))],
    Consumer.PARTITION_SENSOR: [lambda t: build_partition_sensor(report_of(t), reads=t)],
    Consumer.LATENESS: [lambda t: require_computable("m", t.name, shape_of(t))],
}
"""Functions that build each consumer of a node."""

LOST: dict[Consumer, list[Callable[[Any], Any]]] = {
    Consumer.TABLE_JOIN: [
        lambda t: t.join(OTHER, name="m", select=["left.n"]),
        lambda t: OTHER.outer_join(t, name="m", select=["coalesce(right.n, 1) as one"]),
    ],
    Consumer.GROUP_BY: [
        lambda t: t.group_by("v").sum("n", name="m"),
        lambda t: t.group_by("v").aggregate(Aggregator(max, min), name="m"),
    ],
    Consumer.FILTER: [lambda t: t.filter("true", name="m", materialized=Materialized())],
    Consumer.MAP_VALUES: [
        lambda t: t.map_values("n", name="m"),
        lambda t: t.map_values("*", name="m", materialized=Materialized()),
    ],
}
"""Functions whose consumers do not meet the condition for reading or keeping an option."""


@cache
def read_by(spine: bool, name: str) -> Stream | None:
    """A node with the option, for a consumer to read or as a spine; None if no node of that kind has
    the option."""
    if not spine:
        node = declared(name)
        return node if isinstance(node, VersionedTable) else None
    if name not in {f.name for f in fields(Stream)} - {"freshness"}:
        return None
    about: dict[str, Any] = {"key": "k", "schema": schema_for(name), "timestamp": "at"}
    return Stream("prices", **(about | with_required_option(name)))


CELLS = [
    pytest.param(option, consumer, id=f"{option.name}-{consumer.name}")
    for option in OPTIONS
    for consumer in Consumer
    if option.name != "key" and read_by(consumer is Consumer.SPINE, option.name) is not None
]
"""The option ``key`` is left out: no other input has the key of its example value."""


@pytest.mark.parametrize(("option", "consumer"), CELLS)
def test_consumer_reads_or_refuses_option(option: Option, consumer: Consumer) -> None:
    node = read_by(consumer is Consumer.SPINE, option.name)
    assert node is not None
    refusal = option.refused.get(consumer)
    for build in BUILD[consumer]:
        if refusal is None:
            made = build(node)
            if consumer in option.kept_if:
                assert getattr(made, option.name) == getattr(node, option.name)
            continue
        with pytest.raises((TopologyError, StorageError)) as error:
            build(node)
        for part in (option.name, refusal.why, refusal.instead):
            assert part in str(error.value)
    for build in LOST[consumer] if {consumer} & {*option.kept_if, *option.read_if} else ():
        with pytest.raises(TopologyError, match=option.name):
            build(node)


def test_matrix_lists_each_refusal() -> None:
    assert set(BUILD) == set(Consumer)
    walked = {one.id for one in CELLS}
    told = [(o, [*o.refused, *o.read_if, *o.kept_if]) for o in OPTIONS]
    assert walked >= {f"{o.name}-{consumer.name}" for o, some in told for consumer in some}


@each(lambda option: option.not_of_results)
def test_operator_result_refuses_option(option: Option) -> None:
    about = {option.name: VALUES[option.name]}
    with pytest.raises(TopologyError, match="the result of an operator") as error:
        declared().filter("true", name="m", **about)  # type: ignore[attr-defined]
    assert f"m: {option.name} needs a table with a source" in str(error.value)
    assert option.not_of_results in str(error.value)


@each(lambda option: option.not_of_states)
def test_snapshot_source_refuses_option(option: Option) -> None:
    with pytest.raises(TopologyError, match="a source of changes") as error:
        declared(option.name, source=SnapshotSource("dumps", dump_time="modified"))
    assert f"prices: {option.name} needs" in str(error.value)
    assert option.not_of_states in str(error.value)


@each(lambda option: option.excludes)
def test_excluded_option_is_refused(option: Option) -> None:
    for other, why in option.excludes.items():
        with pytest.raises(TopologyError, match=f"does not allow {other}") as error:
            declared(option.name, **{other: VALUES[other]})
        assert why in str(error.value)


# Values of another type

WRONG: list[Any] = [
    *(5, -1, 1.5, True, "", " ", None, b"b", [1], ("k", None), [], {}, {1: 2}, object(), SCHEMA),
    *(timedelta(days=-1), datetime(2026, 1, 1), lambda: None),
]
CLUSTER = KafkaCluster("localhost:9092")
GROUPS = OTHER.group_by("v")
RECORDS = Stream("records", key="k", schema=SCHEMA, timestamp="at")
WINDOWS = RECORDS.group_by().windowed_by(TumblingWindow(DAY))


def fields_of(one: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Returns the type and the values of a declaration, to declare it again."""
    return type(one), {f.name: getattr(one, f.name) for f in fields(one)}


DECLARE: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "stream": (RECORDS.left_join, {"other": OTHER, "name": "j", "select": ["left.*"], "at": "before"}),
    "corrected": (
        RECORDS.left_join,
        {"other": OTHER, "name": "j", "select": "left.*", "corrected_for": DAY, "key": "n"},
    ),
    "streams": (RECORDS.join, {"other": RECORDS, "name": "j", "select": ["left.n"], "within": DAY}),
    "tables": (OTHER.join, {"table": OTHER, "name": "j", "select": ["left.*"], "materialized": None}),
    "foreign key": (OTHER.join, {"table": OTHER, "name": "j", "select": "left.*", "foreign_key": "v"}),
    "filter": (OTHER.filter, {"predicate": "n > 1", "name": "f"}),
    "map_values": (lambda one, name: OTHER.map_values(one, name=name), {"one": "n", "name": "m"}),
    "select_key": (
        lambda key, **more: RECORDS.select_key(key, name="s", **more),
        {"key": "v", "partitions": 2, "partition_by": None},
    ),
    "merge": (lambda one: RECORDS.merge(one, name="m"), {"one": RECORDS}),
    "aggregate": (GROUPS.aggregate, {"aggregates": {"n": "count(*)"}, "name": "g", "select": "v"}),
    "group_by": (lambda key: OTHER.group_by(key).count(name="g"), {"key": "v"}),
    "windowed_by": (
        lambda window: RECORDS.group_by().windowed_by(window).count(name="w"),
        {"window": TumblingWindow(DAY)},
    ),
    "suppress": (WINDOWS.count(name="w").suppress, {"until": UntilWindowCloses(), "name": "s"}),
    **{
        type(one).__name__: fields_of(one)
        for one in (
            *(OTHER, FeatureView(OTHER), FilesSource("files"), DeltaSource("delta")),
            *(SnapshotSource("dumps", dump_time="modified"), CLUSTER, TumblingWindow(DAY)),
            *(KafkaSource(CLUSTER, "topic", value=Json()), Json()),
        )
    },
}


@pytest.mark.parametrize("kind", DECLARE)
def test_value_of_wrong_type_is_refused_when_definitions_load(kind: str) -> None:
    """Each value is accepted or raises an error of the library; any other error fails the test."""
    declare, about = DECLARE[kind]
    for option in about:
        for value in WRONG:
            with suppress(VtDagsterError):
                declare(**{**about, option: value})


def test_message_names_asset_option_and_type() -> None:
    def refused(declare: Callable[..., Any], **about: Any) -> str:
        with pytest.raises(VtDagsterError) as error:
            declare(**about)
        return str(error.value)

    text = "prices: expected key to be a list of texts, got 5; correct it"
    assert refused(declared, key=5) == text
    assert "expected tombstone to be a text or None, got 5" in refused(declared, tombstone=5)
    assert "expected tombstone to be a SQL condition, got ' '" in refused(declared, tombstone=" ")
    assert "j: expected select to be a list of texts, got 5" in refused(
        RECORDS.left_join, other=OTHER, name="j", select=5
    )
    assert "g: expected aggregates to be a mapping or an Aggregator, got [1]" in refused(
        GROUPS.aggregate, aggregates=[1], name="g"
    )
    assert "expected recursive to be True or False, got 'no'" in refused(
        FilesSource, path="files", recursive="no"
    )
    assert "build_sensor: expected minimum_records to be a whole number, got '5'" in refused(
        build_sensor, node=declared(), minimum_records="5"
    )
    assert "build_checks: expected node to be a Stream, got 5" in refused(build_checks, node=5)
    assert "build_maintenance: expected keep to be a timedelta, got '7 days'" in refused(
        build_maintenance, keep="7 days"
    )
    for function, more, text in (
        (read, {"as_of": 5}, "read: expected as_of to be a text or a date or None, got 5"),
        (explain, {"most": "x"}, "explain: expected most to be a whole number, got 'x'"),
        (lateness, {"grace": [5]}, "expected grace to be a list, each element a text or a timedelta"),
    ):
        assert text in refused(function, table="prices", **more)
        assert "expected table to be the name of an asset" in refused(function, table=5)
    secret = refused(KafkaCluster, bootstrap_servers="localhost:9092", password=b"secret")
    assert "expected password to be a text or None, got a value of type bytes" in secret


def test_equivalent_value_types_are_accepted() -> None:
    """NumPy numbers, paths, dictionary views, and resources configured at launch are accepted."""
    made = declared(partitions=numpy.int64(4), key_prefix=("shop",), key={"k": 1}.keys())
    assert (type(made.partitions), made.partitions, made.key) == (int, 4, ("k",))
    files = FilesSource(Path("in"), max_files_per_run=numpy.int32(3), max_bad_share=Decimal("0.5"))
    assert (type(files.max_files_per_run), files.max_bad_share) == (int, 0.5)
    cluster = KafkaCluster(
        "localhost:9092",
        security_protocol="SSL",
        ca_location=Path("ca.pem"),
        options={"session.timeout.ms": 45_000, "allow.auto.create.topics": False},
    )
    assert cluster.ca_location == "ca.pem"
    assert {*cluster.options.values()} == {"45000", "false"}
    assert Protobuf(Path("of.desc"), "Price").descriptor == "of.desc"
    assert KafkaSource(cluster, {"topic": 1}.keys(), value=Json()).topic == ("topic",)
    views = {"v": FeatureView(OTHER, columns=(c for c in ("v", "n")))}
    spine = Stream("spine", key="k", schema=StructType([SCHEMA["k"], SCHEMA["at"]]), timestamp="at")
    build_training_set(spine, views.values(), name="features", to=Path("features"))
    build_maintenance(exports=[Path("exports")])
    at_launch = WarehouseResource.configure_at_launch()
    assert at_launch in build_resources(at_launch).values()
    place = (numpy.int32(0), numpy.int64(17))
    with pytest.raises(StorageError, match="nowhere"):
        explain("prices", offset=place, warehouse=Path("nowhere"), most=numpy.int64(5))
