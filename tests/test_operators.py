"""Operators as users declare and run them: refused definitions, results, and what a run reports."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any

import dagster as dg
import pandera.pyspark as pandera
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import (
    ArrayType,
    DoubleType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from tests.market import messages
from vt_dagster import (
    Aggregator,
    FilesSource,
    HoppingWindow,
    Materialized,
    SessionWindow,
    SlidingWindow,
    SparkResource,
    Stream,
    Table,
    TopologyError,
    TumblingWindow,
    UntilTimeLimit,
    UntilWindowCloses,
    VersionedTable,
    build_definitions,
    explain,
)
from vt_dagster.errors import ContractError
from vt_dagster.kafka import KafkaCluster, KafkaSource
from vt_dagster.runs import pin
from vt_dagster.runs.audit import checks_of
from vt_dagster.runs.run import run_once
from vt_dagster.storage.arrow_reader import look_up
from vt_dagster.storage.asset_store import AssetStore, stores_of
from vt_dagster.testing import TopologyTestDriver

pytestmark = pytest.mark.usefixtures("few_rows")

HOUR = timedelta(hours=1)
SCHEMA = StructType(
    [
        StructField("k", StringType()),
        StructField("g", StringType()),
        StructField("n", LongType()),
        StructField("timestamp", TimestampType()),
    ]
)
ABOUT: dict[str, Any] = {"key": "k", "schema": SCHEMA, "tombstone": "n is null"}


def versioned(name: str = "prices", **more: Any) -> VersionedTable:
    return VersionedTable(name, **{**ABOUT, "history_retention": 24 * HOUR, **more})


def plain(name: str = "rates") -> Table:
    return Table(name, **ABOUT)


def stream() -> Stream:
    return Stream("sales", **ABOUT)


def windows(window: Any = None) -> Table:
    return stream().group_by().windowed_by(window or TumblingWindow(HOUR)).count(name="hourly")


def keyed_by_zeros() -> Table:
    fields = [*SCHEMA.fields, StructField("a-b", LongType()), StructField("null", LongType())]
    return Table("odd", key="k", schema=StructType(fields))


TIME = ["m", "no value column named 'timestamp'", "remove the column, or rename it"]
REFUSED: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "a value called timestamp": (
        lambda: plain().map_values("cast(n as timestamp) as timestamp", name="m"),
        TIME,
    ),
    "an aggregate called timestamp": (
        lambda: plain().group_by("g").aggregate({"Timestamp": "count(*)"}, name="m"),
        [*TIME, "['Timestamp']"],
    ),
    "an element called timestamp": (
        lambda: stream().flat_map_values("array(n)", column="timestamp", name="m"),
        TIME,
    ),
    "a group of a time": (
        lambda: plain().group_by("timestamp").count(name="m"),
        ["m", "a key without 'timestamp'"],
    ),
    "an odd column in an expression": (
        lambda: keyed_by_zeros().map_values("a-b as x", name="m"),
        ["m", "'a-b' is the name of a column", "in backticks, '`a-b`'", "'(a-b)'"],
    ),
    "an odd column in an aggregate": (
        lambda: keyed_by_zeros().group_by("g").sum("null", name="m"),
        ["m", "'null' is the name of a column", "in backticks"],
    ),
    "an odd foreign key": (
        lambda: keyed_by_zeros().join(versioned(key="n"), foreign_key="a-b", name="m"),
        ["m", "'a-b' is the name of a column", "in backticks"],
    ),
    "a foreign key of a side": (
        lambda: plain().join(versioned(), foreign_key="left.g", name="m"),
        ["m", "'left.g'", "only use columns of 'rates'", "remove the prefix"],
    ),
    "suppress on a versioned table": (
        lambda: versioned().suppress(UntilTimeLimit(HOUR), name="quiet"),
        ["quiet", "'prices'", "versioned", "Materialized()"],
    ),
    "suppress on an inherited versioned table": (
        lambda: versioned().filter("n > 1", name="f").suppress(UntilTimeLimit(HOUR), name="quiet"),
        ["quiet", "'f'", "versioned"],
    ),
    "final results that are not final": (
        lambda: windows().suppress(UntilWindowCloses(when_full="emit_early"), name="final"),  # type: ignore[arg-type]
        ["final", "final results only", "shut_down"],
    ),
    "window closes without windows": (
        lambda: plain().suppress(UntilWindowCloses(), name="final"),
        ["final", "'rates'", "no windows", "UntilTimeLimit"],
    ),
    "limit without a limit": (
        lambda: plain().suppress(
            UntilTimeLimit(HOUR, max_records=3, when_full="unbounded"), name="quiet"
        ),
        ["quiet", "max_records", "unbounded"],
    ),
    "limit as a boolean": (
        lambda: plain().suppress(UntilTimeLimit(HOUR, max_records=True), name="quiet"),
        ["quiet", "max_records must be a number, 0 or more, got True"],
    ),
    "versioned broadcast": (lambda: versioned(broadcast=True), ["prices", "broadcast", "plain Table"]),
    "grace of tables": (
        lambda: plain().join(versioned(), name="both", grace_period=HOUR),
        ["both", "'rates'", "'prices'", "remove grace_period"],
    ),
    "grace on a join's result": (
        lambda: stream().join(
            versioned().join(versioned("other"), name="both"), name="x", grace_period=HOUR
        ),
        ["x", "'both'", "not versioned"],
    ),
    "grace on an unversioned store between": (
        lambda: stream().join(
            versioned().filter("n > 1", name="f", materialized=Materialized()),
            name="x",
            grace_period=HOUR,
        ),
        ["x", "'f'", "not versioned"],
    ),
    "stream as a table": (
        lambda: plain().join(stream(), name="both"),  # type: ignore[arg-type]
        ["both", "right side of a table-table join", "Stream 'sales'", "to_table"],
    ),
    "keys of two types": (
        lambda: plain().join(Table("byn", key="n", schema=SCHEMA), name="both"),
        ["both", "rates has (k string)", "byn has (n bigint)"],
    ),
    "foreign key of another type": (
        lambda: plain().join(versioned(), name="both", foreign_key="n"),
        ["both", "['n']", "['bigint']", "['string']", "cast(n as string)"],
    ),
    "foreign key of another length": (
        lambda: plain().join(versioned(), name="both", foreign_key=["k", "g"]),
        ["both", "one expression for each key column", "'prices'"],
    ),
    "aggregate that cannot be undone": (
        lambda: plain().group_by("g").aggregate({"least": "min(n)"}, name="groups"),
        ["groups", "cannot subtract", "count, sum and avg"],
    ),
    "an unknown aggregate": (
        lambda: plain().group_by("g").aggregate({"x": "median(n)"}, name="groups"),
        ["groups", "median"],
    ),
    "group by nothing": (lambda: plain().group_by().count(name="groups"), ["groups", "group_by needs"]),
    "group by what is not there": (
        lambda: plain().group_by("region").count(name="groups"),
        ["groups", "'rates' has no column 'region'"],
    ),
    "filter without a condition": (lambda: plain().filter(" ", name="f"), ["f", "SQL condition"]),
    "a value in the key's place": (
        lambda: plain().map_values("upper(k) as k", name="m"),
        ["m", "'k' is a key column and cannot change"],
    ),
    "windows of a table": (
        lambda: Stream.group_by(plain()).windowed_by(TumblingWindow(HOUR)).count(name="w"),
        ["w", "'rates' is a table", "to_stream"],
    ),
    "windows of no length": (lambda: TumblingWindow(timedelta(0)), ["size must be longer than 0"]),
    "windows with holes": (lambda: HoppingWindow(HOUR, 2 * HOUR), ["advance", "longer than the size"]),
    "sessions forgotten early": (
        lambda: SessionWindow(HOUR, HOUR, retention=HOUR),
        ["retention", "shorter than gap + grace"],
    ),
    "sliding windows forgotten early": (
        lambda: SlidingWindow(HOUR, HOUR, retention=2 * HOUR),
        ["retention", "shorter than 2 * time_difference + grace"],
    ),
    "one result a run of a versioned table": (
        lambda: plain().join(
            plain("others"), name="both", emit="per_run", materialized=Materialized(HOUR)
        ),
        ["both", "per_run", "versioned"],
    ),
    "table of a table": (lambda: plain().to_table(name="again"), ["again", "is already a table"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_when_definitions_load(name: str) -> None:
    make, said = REFUSED[name]
    with pytest.raises(TopologyError) as caught:
        make()
    for part in said:
        assert part in str(caught.value)


def test_which_results_are_versioned() -> None:
    table = versioned()
    assert table.filter("n > 1", name="f").versioned
    assert table.map_values("n + 1 as n", name="m").filter("n > 1", name="f").versioned
    assert not table.filter("n > 1", name="f", materialized=Materialized()).versioned
    assert not table.join(versioned("other"), name="j", select=["left.n"]).versioned
    kept = Materialized(history_retention=HOUR)
    assert table.join(versioned("other"), name="j", select=["left.n"], materialized=kept).versioned
    assert plain().filter("n > 1", name="f", materialized=kept).versioned
    assert not table.group_by("g").count(name="c").versioned
    changes = table.to_stream(name="s")
    assert not changes.versioned
    assert not changes.to_table(name="t").versioned
    again = changes.to_table(name="t", materialized=kept)
    assert isinstance(again, VersionedTable)
    assert again.history_retention == HOUR


def test_checks_of_operator_results() -> None:
    def names(node: Stream) -> list[str]:
        return [check.name for check in checks_of(node)]

    both = versioned().join(versioned("other"), name="both", select=["left.n"])
    assert "timestamps_do_not_decrease" in names(both)
    loose = plain().join(versioned("other"), name="both", select=["left.n"])
    assert "timestamps_do_not_decrease" not in names(loose)
    assert "timestamps_do_not_decrease" in names(plain().group_by("g").count(name="c"))
    assert "one_result_per_window" in names(windows().suppress(UntilWindowCloses(), name="final"))


def at(minute: float) -> int:
    return int(minute * 60_000)


@pytest.mark.slow
def test_emit_per_run_keeps_last_update(spark: SparkSession) -> None:
    grouped = plain().group_by("g")
    every = grouped.aggregate({"total": "sum(n)"}, name="every")
    last = grouped.aggregate({"total": "sum(n)"}, name="last", emit="per_run")
    driver = TopologyTestDriver(every, last, spark=spark)
    driver.pipe(
        "rates",
        {"k": "a", "g": "x", "n": 1, "timestamp": at(1)},
        {"k": "b", "g": "x", "n": 2, "timestamp": at(2)},
        {"k": "a", "g": "y", "n": 4, "timestamp": at(3)},
    )
    driver.pipe("rates", {"k": "b", "g": "x", "n": 3, "timestamp": at(4)})
    assert [(r["g"], r["total"]) for r in driver.read("every")] == [
        ("x", 1),
        ("x", 3),
        ("x", 2),
        ("y", 4),
        ("x", 3),
    ]
    rows = driver.read("last")
    assert [(r["g"], r["total"]) for r in rows] == [("x", 2), ("y", 4), ("x", 3)]
    assert [r["old"] and r["old"]["total"] for r in rows] == [None, None, 2]
    assert driver.table("last") == [
        {**r, "offset": s["offset"]}
        for r, s in zip(driver.table("every"), driver.table("last"), strict=True)
    ]


@pytest.mark.slow
def test_custom_aggregator(spark: SparkSession) -> None:
    def add(row: dict[str, Any], names: dict[str, Any]) -> dict[str, Any]:
        return {"names": sorted([*names["names"], row["k"]])}

    def take(row: dict[str, Any], names: dict[str, Any]) -> dict[str, Any]:
        return {"names": [n for n in names["names"] if n != row["k"]]}

    schema = StructType([StructField("names", ArrayType(StringType()))])
    names = Aggregator(add, take, lambda: {"names": []}, schema)
    driver = TopologyTestDriver(plain().group_by("g").aggregate(names, name="groups"), spark=spark)
    driver.pipe("rates", *({"k": k, "g": "x", "n": 1, "timestamp": at(1)} for k in ("b", "a")))
    driver.pipe("rates", {"k": "a", "g": "y", "n": 1, "timestamp": at(2)})
    assert [(r["g"], r["names"]) for r in driver.table("groups")] == [("x", ["b"]), ("y", ["a"])]


def joined_names(adder: Any, subtractor: Any = None, initializer: Any = None) -> Table:
    """The names of each group, by an ``Aggregator`` of the given functions."""
    schema = StructType([StructField("names", ArrayType(StringType()))])
    initializer = initializer or (lambda: {"names": []})
    names = Aggregator(adder, subtractor or adder, initializer, schema)
    return plain().group_by("g").aggregate(names, name="groups")


def test_aggregator_may_mutate_aggregate(spark: SparkSession) -> None:
    """Python code often changes its argument. Each result must have the aggregate of its time, and each
    group a separate aggregate."""
    empty: dict[str, Any] = {"names": []}

    def add(row: dict[str, Any], names: dict[str, Any]) -> dict[str, Any]:
        names["names"].append(row["k"])
        return names

    def take(row: dict[str, Any], names: dict[str, Any]) -> dict[str, Any]:
        names["names"].remove(row["k"])
        return names

    groups = joined_names(add, take, lambda: empty)
    driver = TopologyTestDriver(groups, spark=spark)
    one = {"n": 1, "timestamp": at(1)}
    driver.pipe("rates", *({"k": k, "g": g, **one} for k, g in ("bx", "ax", "cy", "ay")))
    assert [(r["g"], r["names"]) for r in driver.read("groups")] == [
        ("x", ["b"]),
        ("x", ["b", "a"]),
        ("y", ["c"]),
        ("x", ["b"]),
        ("y", ["c", "a"]),
    ]


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda row, names: row["k"] + 1, "add raised TypeError: can only concatenate str"),
        (lambda row, names: {**names, "nmes": 1}, "add returned a dict with nmes"),
        (lambda row, names: [row["k"]], "add returned a list"),
        (lambda row, names: {"names": 5}, "aggregates of another type: Could not convert 5"),
    ],
)
def test_failing_aggregator_is_named(spark: SparkSession, made: Any, said: str) -> None:
    def add(row: dict[str, Any], names: dict[str, Any]) -> Any:
        return made(row, names)

    driver = TopologyTestDriver(joined_names(add), spark=spark)
    with pytest.raises(ContractError) as failed:
        driver.pipe("rates", {"k": "a", "g": "x", "n": 1, "timestamp": at(1)})
    message = str(failed.value)
    assert message.startswith(
        "groups: expected its Aggregator to return dicts of names array<string>, got: "
    )
    assert said in message
    assert message.endswith("; nothing was committed. Correct the functions, then run again")


def test_undeclared_aggregate_fields_are_refused(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrow drops fields that a struct's type lacks, at any depth, so such a result is refused. A small
    run on a large table computes it before the commit, with the same message."""

    class Totals(pandera.DataFrameModel):
        of: ArrayType(StructType([StructField("n", IntegerType())]))  # pyright: ignore[reportInvalidTypeForm]

    def add(row: dict[str, Any], totals: dict[str, Any]) -> dict[str, Any]:
        return {"of": [*totals["of"], {"n": row["n"], **({"m": 1} if row["n"] > 1 else {})}]}

    totals = Aggregator(add, add, lambda: {"of": []}, Totals)
    driver = TopologyTestDriver(plain().group_by("g").aggregate(totals, name="groups"), spark=spark)
    driver.pipe("rates", {"k": "a", "g": "x", "n": 1, "timestamp": at(1)})
    assert [r["of"] for r in driver.read("groups")] == [[{"n": 1}]]
    for many_rows in (pin.MANY_ROWS, -1):
        monkeypatch.setattr(pin, "MANY_ROWS", many_rows)
        with pytest.raises(ContractError, match=r"add returned a dict with of\.m; nothing was comm"):
            driver.pipe("rates", {"k": "b", "g": "x", "n": 2, "timestamp": at(1)})


def test_trailing_comments_in_expressions(spark: SparkSession) -> None:
    large = plain().filter("n > 1 -- large", name="large")
    small = plain().filter_not("n > 1 -- large", name="small")
    sums = {"mean": "avg(n -- of all\n)", "there": "count(n -- (all\n)", "total": "sum(n) -- )"}
    with pytest.raises(TopologyError, match="not an aggregate"):
        plain().group_by("g").aggregate(sums, name="groups")
    del sums["total"]
    groups = plain().group_by("g").aggregate(sums, name="groups")
    driver = TopologyTestDriver(large, small, groups, spark=spark)
    driver.pipe(
        "rates",
        *({"k": k, "g": "x", "n": n, "timestamp": at(1)} for k, n in zip("ab", (1, 2), strict=True)),
    )
    assert [r["k"] for r in driver.table("large")] == ["b"]
    assert [r["k"] for r in driver.table("small")] == ["a"]
    assert [(r["mean"], r["there"]) for r in driver.table("groups")] == [(1.5, 2)]


def test_adder_without_return_is_refused() -> None:
    def add(row: dict[str, Any], names: dict[str, Any]) -> Any:
        names["names"].append(row["k"])

    def returns(row: dict[str, Any], names: dict[str, Any]) -> Any:
        names["names"].append(row["k"])
        if row["k"] is None:
            return None
        return names

    def chooses(row: dict[str, Any], names: dict[str, Any]) -> Any:
        return names if row["k"] else None

    with pytest.raises(TopologyError) as forgot:
        joined_names(add)
    assert str(forgot.value) == (
        "groups: expected the adder of its Aggregator to return the aggregate, but "
        "test_adder_without_return_is_refused.<locals>.add returns no value, and so no group would "
        "have a row; end it with return and the aggregate"
    )
    assert all(joined_names(one) for one in (returns, chooses, partial(add), lambda row, names: names))


def test_aggregator_of_a_stream_is_refused() -> None:
    schema = StructType([StructField("k", StringType()), StructField("at", TimestampType())])
    clicks = Stream("clicks", source=FilesSource("/clicks"), schema=schema, key="k", timestamp="at")
    last = Aggregator(lambda row, total: row, lambda row, total: total)
    windows = clicks.group_by().windowed_by(TumblingWindow(HOUR))
    for groups in (clicks.group_by(), windows):
        with pytest.raises(
            TopologyError, match=r"totals: expected SQL aggregates of a stream.*to_table"
        ):
            groups.aggregate(last, name="totals")


@pytest.mark.parametrize(
    ("expression", "kind", "value"),
    [
        ("cast(n as double) / cast(2 as int)", "void", 0.5),
        ("cast(n as string) = cast('1' as string)", "void", True),
        ("cast(cast(n as string) || ')' as string)", "string", "1)"),
    ],
)
def test_type_of_expression_with_casts(
    spark: SparkSession, expression: str, kind: str, value: Any
) -> None:
    """An expression with two casts does not have the type of the last one."""
    mapped = plain().map_values(f"{expression} as x", name="mapped")
    assert mapped.schema["x"].dataType.typeName() == kind
    driver = TopologyTestDriver(mapped, spark=spark)
    driver.pipe("rates", {"k": "a", "n": 1, "timestamp": at(1)})
    assert [r["x"] for r in driver.read("mapped")] == [value]


def test_windows_are_clamped_to_python_range(spark: SparkSession) -> None:
    """The zero time of Go and .NET is in windows that start in the year 0. Python has no such year, so
    the first and the last possible time limit the bounds."""
    first, last = datetime(1, 1, 1, tzinfo=timezone.utc), datetime.max.replace(tzinfo=timezone.utc)
    kinds = {
        "weekly": TumblingWindow(7 * 24 * HOUR),
        "monthly": TumblingWindow("1 month", zone="Asia/Tokyo"),
        "hopping": HoppingWindow(2 * HOUR, advance=HOUR),
    }
    grouped = stream().group_by("k")
    counts = [grouped.windowed_by(window).count(name=name) for name, window in kinds.items()]
    driver = TopologyTestDriver(*counts, spark=spark)
    for k, moment in (("first", first), ("last", last - HOUR), ("last", last), ("last", last)):
        driver.pipe("sales", {"k": k, "g": "x", "n": 1, "timestamp": moment})
    for name, size in {"weekly": 1, "monthly": 1, "hopping": 2}.items():
        found = driver.table(name)
        starts = [r["window_start"] for r in found if r["k"] == "first"]
        newest = [r for r in found if r["k"] == "last"][-size:]
        assert (len(starts), starts[0]) == (size, first)
        assert {r["window_end"] for r in newest} == {last}
        assert [r["count"] for r in newest] == ([3] if size == 1 else [3, 2])


def definitions(root: Path, limit: int) -> dg.Definitions:
    sales = Stream("sales", source=FilesSource(str(root / "sales")), **ABOUT)
    hourly = (
        sales.group_by("g")
        .windowed_by(TumblingWindow(HOUR, timedelta(minutes=10)))
        .aggregate({"n": "count(*)", "mean": "avg(n)"}, name="hourly")
    )
    final = hourly.suppress(UntilWindowCloses(max_records=limit, when_full="shut_down"), name="final")
    job = dg.define_asset_job("main")
    spark = SparkResource(master="local[2]")
    made = build_definitions(final, warehouse=str(root / "warehouse"), spark=spark)
    return dg.Definitions.merge(made, dg.Definitions(jobs=[job]))


def execute(root: Path, limit: int) -> tuple[dg.ExecuteInProcessResult, dict[str, dict[str, Any]]]:
    job = definitions(root, limit).resolve_job_def("main")
    with dg.DagsterInstance.ephemeral() as instance:
        result = job.execute_in_process(instance=instance, raise_on_error=False)
    said = {
        e.asset_key.to_user_string(): {k: v.value for k, v in e.materialization.metadata.items()}
        for e in result.get_asset_materialization_events()
        if e.asset_key
    }
    return result, said


def land(root: Path, name: str, *records: tuple[str, str, int, float]) -> None:
    (root / "sales").mkdir(exist_ok=True)
    lines = [
        json.dumps(
            {"k": k, "g": g, "n": n, "timestamp": f"2026-01-01T{int(t):02}:{int(t % 1 * 60):02}:00Z"}
        )
        for k, g, n, t in records
    ]
    (root / "sales" / name).write_text("\n".join(lines) + "\n")


@pytest.mark.slow
def test_full_buffer_fails_run_until_enlarged(spark: SparkSession, tmp_path: Path) -> None:
    land(tmp_path, "1.jsonl", ("a", "x", 1, 1.1), ("b", "y", 3, 1.2), ("c", "z", 5, 1.3))
    result, said = execute(tmp_path, limit=2)
    assert not result.success
    told = messages(result)
    for part in ("final", "max_records=2", "got 3", "nothing is lost", "Raise the limit"):
        assert part in told
    assert said["hourly"]["records_out"] == 3
    assert "final" not in said
    assert not (tmp_path / "warehouse" / "final" / "log").exists()

    result, said = execute(tmp_path, limit=3)
    assert result.success, messages(result)
    assert (said["final"]["records_in"], said["final"]["records_out"]) == (3, 0)
    assert said["final"]["suppression_buffer_count_current"] == 3
    assert said["final"]["suppression_buffer_size_current"] > 0

    # 3 o'clock closes the windows of 1 o'clock; a late record of 1:30 finds its window closed
    land(tmp_path, "2.jsonl", ("a", "x", 7, 1.5), ("a", "x", 9, 3.0), ("a", "x", 1, 1.5))
    result, said = execute(tmp_path, limit=3)
    assert result.success, messages(result)
    hourly, final = said["hourly"], said["final"]
    assert (hourly["records_in"], hourly["records_out"], hourly["records_dropped"]) == (3, 2, 1)
    assert hourly["late_records_dropped"] == 1
    assert hourly["expired_window_records_dropped"] == 1
    assert hourly["record_lateness_max_seconds"] == 1.5 * 3600
    assert hourly["record_lateness_avg_seconds"] == 1800
    assert (final["records_out"], final["suppression_emit"]) == (3, 3)
    assert final["suppression_buffer_count_current"] == 1
    assert final["suppression_buffer_count_max"] == 3
    assert final["suppression_buffer_count_avg"] == 2
    failed = [e for e in result.get_asset_check_evaluations() if not e.passed]
    assert failed == []

    node = definitions(tmp_path, 3).resolve_asset_graph()
    assert node.get(dg.AssetKey("final")).group_name == "default"
    rows = AssetStore.open(str(tmp_path / "warehouse"), "final", spark).read("log").collect()
    assert sorted((r["g"], r["n"], r["mean"]) for r in rows) == [
        ("x", 2, 4.0),
        ("y", 1, 3.0),
        ("z", 1, 5.0),
    ]


@pytest.mark.slow
def test_reduce_equals_sum(spark: SparkSession) -> None:
    """``reduce`` with two functions of rows gives the results of ``sum(n)`` (FORMAT 4.8)."""

    def add(row: dict[str, Any], sum_: dict[str, Any]) -> dict[str, Any]:
        return {**sum_, "n": sum_["n"] + row["n"]}

    def take(row: dict[str, Any], sum_: dict[str, Any]) -> dict[str, Any]:
        return {**sum_, "n": sum_["n"] - row["n"]}

    grouped = plain().group_by("g")
    reduced = grouped.reduce(add, take, name="reduced", select=["n"])
    summed = grouped.sum("n", name="summed", column="n")
    driver = TopologyTestDriver(reduced, summed, spark=spark)
    driver.pipe(
        "rates",
        {"k": "a", "g": "x", "n": 1, "timestamp": at(5)},
        {"k": "b", "g": "x", "n": 2, "timestamp": at(2)},  # the group's time does not go back
        {"k": "a", "g": "x", "n": 4, "timestamp": at(6)},  # within the group: one result
    )
    driver.pipe(
        "rates",
        {"k": "b", "g": "y", "n": 8, "timestamp": at(7)},  # moves: the old group first
        {"k": "a", "g": "x", "n": None, "timestamp": at(8)},  # x becomes empty, and stays
        {"k": "c", "g": "x", "n": None, "timestamp": at(9)},  # never existed: no result
        {"k": "d", "g": None, "n": 3, "timestamp": at(9)},  # belongs to no group
        {"k": "e", "g": "x", "n": 16, "timestamp": at(10)},
    )

    def told(name: str) -> list[tuple[Any, ...]]:
        return [(r["g"], r["n"], r["timestamp"].minute) for r in driver.read(name)]

    results = told("reduced")
    assert results == [
        ("x", 1, 5),
        ("x", 3, 5),
        ("x", 6, 6),
        ("x", 4, 7),
        ("y", 8, 7),
        ("x", 0, 8),
        ("x", 16, 10),
    ]
    assert told("summed") == results
    assert [(r["g"], r["n"]) for r in driver.table("reduced")] == [("x", 16), ("y", 8)]


def test_nan_and_zero_keys_compare_like_spark(spark: SparkSession) -> None:
    """All NaN values are one key, and so are the two zeros, also in a struct."""
    inner = StructType([StructField("x", DoubleType())])
    number, nested = StructField("d", DoubleType()), StructField("s", inner)
    source = Table("rates", key="k", schema=StructType([*SCHEMA.fields, number, nested]))

    def add(row: dict[str, Any], sum_: dict[str, Any]) -> dict[str, Any]:
        return {**sum_, "n": sum_["n"] + row["n"]}

    nodes = [source.group_by(c).reduce(add, add, name=f"by_{c}", select=["n"]) for c in ("d", "s")]
    driver = TopologyTestDriver(*nodes, spark=spark)

    def row(k: str, d: float, n: int) -> dict[str, Any]:
        return {"k": k, "n": n, "d": d, "s": {"x": d}, "timestamp": at(5)}

    nan = float("nan")
    driver.pipe("rates", row("a", nan, 1), row("b", -0.0, 10), row("c", nan, 2), row("d", 0.0, 20))
    driver.pipe("rates", row("e", nan, 4), row("f", -nan, 8), row("g", 0.0, 40), row("h", -0.0, 80))
    for name in ("by_d", "by_s"):
        assert [r["n"] for r in driver.read(name)] == [1, 10, 3, 30, 7, 15, 70, 150]
        assert sorted(r["n"] for r in driver.table(name)) == [15, 150]


def test_versioned_filter_treats_zeros_as_one_key(spark: SparkSession) -> None:
    fields = [StructField("k", DoubleType()), *SCHEMA.fields[1:]]
    source = Table("rates", key="k", schema=StructType(fields), tombstone="n is null")
    kept = source.filter("n > 1", name="kept", materialized=Materialized(timedelta(days=1)))
    driver = TopologyTestDriver(kept, spark=spark)
    zeros = [(0.0, 2), (-0.0, 1), (0.0, 1)]
    driver.pipe("rates", *({"k": k, "g": "", "n": n, "timestamp": at(5)} for k, n in zeros))
    assert [r["is_tombstone"] for r in driver.read("kept")] == [False, True]


@pytest.mark.slow
def test_final_results_after_time_limit_suppress(spark: SparkSession) -> None:
    minute = timedelta(minutes=1)
    quiet = windows(TumblingWindow(HOUR, 10 * minute)).suppress(
        UntilTimeLimit(5 * minute), name="quiet"
    )
    final = quiet.suppress(UntilWindowCloses(), name="final")
    driver = TopologyTestDriver(final, spark=spark)

    def piped(*minutes: float) -> None:
        driver.pipe("sales", *({"k": "a", "g": "x", "n": 1, "timestamp": at(m)} for m in minutes))

    piped(1, 2, 3, 30, 59, 61)
    # The window is still open for the record at 58; the record at 75 closes it.
    piped(58, 75, 90, 130, 140, 200, 260)
    rows = [(r["window_start"].hour, r["count"]) for r in driver.read("final")]
    hours = [hour for hour, _ in rows]
    assert hours == sorted(set(hours)), "each window comes once"
    assert {0, 1, 2} <= set(hours)
    updates = [(r["window_start"].hour, r["count"]) for r in driver.read("quiet")]
    assert len(updates) > len(rows)
    for hour, count in rows:  # the last update that the first suppression emitted
        assert count == max(n for h, n in updates if h == hour)


def test_key_in_different_partitions_of_sides(spark: SparkSession) -> None:
    """All results of a key are in one partition, so that the last one counts, whichever side changed.
    This holds for joins of tables, plain and versioned, and for merged streams."""
    keyed, at = StructField("k", StringType()), StructField("timestamp", TimestampType())
    left, right = (StructType([keyed, StructField(c, LongType()), at]) for c in ("a", "b"))

    def sides(kind: Any, other: StructType, **more: Any) -> list[Any]:
        return [
            kind(f"{side}_{kind.__name__}", key="k", schema=schema, partitions=partitions, **more)
            for side, schema, partitions in (("one", left, 1), ("other", other, 4))
        ]

    streams, tables = sides(Stream, left), sides(Table, right)
    versions = sides(VersionedTable, right, history_retention=timedelta(days=1))
    made = {
        "a": [streams[0].merge(streams[1], name="both").to_table(name="merged")],
        "b": [one.outer_join(other, name=f"of_{one.name}") for one, other in (tables, versions)],
    }
    driver = TopologyTestDriver(*made["a"], *made["b"], spark=spark)
    keys = [f"k{n}" for n in range(8)]
    then = [{"k": k, "a": n, "timestamp": 2} for n, k in enumerate(keys)]
    values = [(streams, "a"), (tables, "b"), (versions, "b")]
    driver.run(
        {
            **{other.name: [{"k": k, c: 0, "timestamp": 1} for k in keys] for (_, other), c in values},
            **{one.name: then for (one, _), _ in values},
        }
    )
    driver.run(
        {
            other.name: [{"k": k, c: 10 + n, "timestamp": 3} for n, k in enumerate(keys)]
            for (_, other), c in values
        }
    )
    for column, nodes in made.items():
        for node in nodes:
            found = [(r["k"], r[column]) for r in driver.table(node.name)]
            assert found == [(k, 10 + n) for n, k in enumerate(keys)], node.name
            homes = {(r["k"], r["partition"]) for r in driver.read(node.name)}
            assert len(homes) == len(keys), node.name
            assert len({partition for _, partition in homes}) > 1 or node.partitions == 1


@pytest.mark.parametrize("kind", ["plain", "versioned"])
def test_source_with_added_partitions_keeps_latest_record(
    spark: SparkSession, tmp_path: Path, kind: str
) -> None:
    """The record that was recorded last counts, even if its offset is smaller than an earlier one's."""
    landing = tmp_path / "landing"
    landing.mkdir()
    kinds = {"k": StringType(), "price": LongType(), "timestamp": TimestampType()}
    columns = StructType([StructField(name, type_) for name, type_ in kinds.items()])
    history = {"history_retention": timedelta(days=1)} if kind == "versioned" else {}
    about: dict[str, Any] = {"key": "k", "schema": columns, "freshness": timedelta(days=1), **history}
    node = (VersionedTable if history else Table)("prices", source=FilesSource(str(landing)), **about)
    stores = stores_of(str(tmp_path / "warehouse"), spark)
    for number, partitions in enumerate((1, 4)):
        rows = [{"k": f"k{n}", "price": number, "timestamp": "2024-06-01T00:00:00Z"} for n in range(8)]
        (landing / f"{number}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        run_once(replace(node, partitions=partitions), stores)
        tail = stores(node).read("current").collect()
        assert {row["price"] for row in tail} == {number}
        found = look_up(str(tmp_path / "warehouse"), "prices", "current")
        assert set(found.column("price").to_pylist()) == {number}
    assert len({row["partition"] for row in tail}) > 1
    for k in sorted({row["k"] for row in tail}):
        told = explain("prices", key=k, warehouse=str(tmp_path / "warehouse"))
        assert told.record is not None
        assert told.record.values["price"] == 1
        assert "replaced" not in {decision.rule for decision in told.decisions}
    stores(node).rebuild_view()
    assert {row["price"] for row in stores(node).read("current").collect()} == {1}


def test_which_sources_are_copartitioned() -> None:
    """Topics are assumed to be partitioned alike, as in Kafka Streams; a topic and files are not."""
    cluster = KafkaCluster("localhost:9092")

    def table(name: str, source: Any = None, key: str = "k", **about: Any) -> Table:
        kinds = {key: StringType(), name: LongType(), "timestamp": TimestampType()}
        columns = StructType([StructField(c, type_) for c, type_ in kinds.items()])
        return Table(name, key=key, schema=columns, source=source, **about)

    topics = [table(name, KafkaSource(cluster, name)) for name in ("a", "b")]
    files = [table(name, FilesSource(name)) for name in ("c", "d")]
    assert topics[0].join(topics[1], name="e").operator.copartitioned
    assert files[0].join(files[1], name="e").operator.copartitioned
    assert not topics[0].join(files[0], name="e").operator.copartitioned
    chosen = table("f", partition_by="length(k)", partitions=3)
    same = table("g", key="other", partition_by="length(other)", partitions=3)
    assert chosen.join(same, name="e", select=["left.*", "right.g"]).operator.copartitioned
    assert not chosen.join(files[0], name="e").operator.copartitioned
    # Results follow their inputs: a filter keeps the partitions, another key gives others.
    assert topics[0].filter("a > 0", name="h").partitioning == topics[1].partitioning
    assert topics[0].join(files[0], name="e").partitioning == files[0].partitioning
    by_reference = topics[0].left_join(files[0], name="e", foreign_key="k")
    assert by_reference.partitioning == topics[0].partitioning
