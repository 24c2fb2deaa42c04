"""Change feeds: which records are deletions, and which of several records of one time counts."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession
from pyspark.sql.types import LongType, MapType, StringType, StructField, StructType, TimestampType
from pyspark.sql.utils import is_remote

from tests.market import messages, run
from tests.test_user_faults import landing
from vt_dagster import FilesSource, Stream, Table, TopologyError, VersionedTable, build_asset
from vt_dagster.components.topology_component import CONCEPTS
from vt_dagster.orchestration.decorators import VersionedTableAttributes
from vt_dagster.orchestration.translator import code_version
from vt_dagster.runs.audit import audit
from vt_dagster.storage.asset_store import AssetStore
from vt_dagster.testing import TopologyTestDriver

pytestmark = pytest.mark.usefixtures("few_rows")


DAY = timedelta(days=1)
SCHEMA = StructType(
    [
        StructField("k", StringType()),
        StructField("v", StringType()),
        StructField("lsn", LongType()),
        StructField("timestamp", TimestampType()),
    ]
)
ABOUT: dict[str, Any] = {"key": "k", "schema": SCHEMA}


def table(**more: Any) -> VersionedTable:
    return VersionedTable("customers", **{**ABOUT, "history_retention": DAY, **more})


def put(k: str, v: str | None, at: Any, **more: Any) -> dict[str, Any]:
    return {"k": k, "v": v, "timestamp": at, **more}


def versions(driver: TopologyTestDriver, name: str = "customers") -> list[tuple[Any, ...]]:
    """The versions as key, start in milliseconds, and value; None = a deletion."""
    found = driver.versions(name)
    return [
        (r["k"], r["valid_from"].timestamp() * 1000, None if r["is_tombstone"] else r["v"])
        for r in found
    ]


# -- deletions ---------------------------------------------------------------------------------------


def test_deleted_when_uses_undeclared_column(spark: SparkSession) -> None:
    """A column that only ``deleted_when`` uses is not in the table. A null in it is no deletion."""
    driver = TopologyTestDriver(table(deleted_when="op = 'D'"), spark=spark)
    driver.pipe("customers", put("a", "x", 1, op="I"), put("b", "y", 2), put("a", "x", 5, op="D"))
    driver.pipe("customers", put("a", "z", 3, op="U"), put("c", None, 4, op="D"))
    assert versions(driver) == [
        ("a", 1, "x"),
        ("a", 3, "z"),
        ("a", 5, None),
        ("b", 2, "y"),
        ("c", 4, None),
    ]
    assert [(r["k"], r["v"]) for r in driver.table("customers")] == [("b", "y")]
    assert "op" not in driver.read("customers")[0]


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_deleted_when_on_files(tmp_path: Path, spark: SparkSession, form: Any) -> None:
    rows = [put("a", "x", 1, op="r"), put("a", None, 2, op="d"), put("b", "y", 3, op="r")]
    for r in rows:
        r["timestamp"] = f"2024-01-01T00:00:0{r['timestamp']}Z"
    content = "\n".join(json.dumps(r) for r in rows)
    if form == "csv":
        content = "k,v,timestamp,op\n" + "\n".join(
            f"{r['k']},{r['v'] or ''},{r['timestamp']},{r['op']}" for r in rows
        )
    schema = StructType([f for f in SCHEMA.fields if f.name != "lsn"])
    source = FilesSource(str(landing(tmp_path, jan=content.encode())), format=form)
    node = table(schema=schema, deleted_when="op = 'd'", source=source)
    result = run([build_asset(node)], tmp_path / "warehouse")
    assert result.success, messages(result)
    store = AssetStore(str(tmp_path / "warehouse"), node, spark)
    assert [(r["k"], r["v"]) for r in store.read().collect()] == [("b", "y")]
    assert "op" not in store.read("versions").columns


def test_deleted_when_analysis_error_is_not_logged(
    spark: SparkSession, capfd: pytest.CaptureFixture[str]
) -> None:
    """The library lets Spark analyze ``deleted_when``. A failed analysis is not logged, even if it is
    the first error of the process. Later errors of Spark are logged as before."""
    logging.Logger.manager.loggerDict.pop("SQLQueryContextLogger", None)
    driver = TopologyTestDriver(table(deleted_when="gone_since is not null"), spark=spark)
    driver.pipe("customers", put("a", "x", 1, gone_since=None))
    assert "UNRESOLVED_COLUMN" not in capfd.readouterr().err
    with pytest.raises(AnalysisException):
        spark.range(1).where("nothing = 1")
    if not is_remote():
        assert "UNRESOLVED_COLUMN" in capfd.readouterr().err


def test_invalid_deleted_when_is_refused(spark: SparkSession) -> None:
    for condition, said in {
        "op =": "which Spark refuses: Syntax error",
        "k": "which is string",
        "count(*) > 1": "which Spark refuses",
        "no_such(k)": "which Spark refuses",
        "lsns = 1": "similar to 'lsn'",
        "name is null": "which was renamed to 'v'",
        "__deleted = 'true'": "names '__deleted', a name that vt_dagster reserves",
    }.items():
        node = table(tombstone=condition, renamed={"name": "v"})
        driver = TopologyTestDriver(node, spark=spark)
        with pytest.raises(TopologyError) as error:
            driver.pipe("customers", put("a", "x", 1))
        assert said in str(error.value)
        assert condition in str(error.value)
        assert "customers: " in str(error.value)


def test_deleted_when_and_tombstone_are_equal() -> None:
    assert table(deleted_when="v is null") == table(tombstone="v is null")
    assert replace(table(deleted_when="v is null"), tombstone=None) == table()
    assert code_version(table(deleted_when="v is null")) != code_version(table())
    for wrong, said in ({"tombstone": "v is null"}, "remove one, or combine"), ({}, "op = 'D'"):
        with pytest.raises(TopologyError, match=said):
            table(deleted_when="lsn = 1" if wrong else " ", **wrong)
    assert not hasattr(Stream("s", **ABOUT), "deleted_when")
    assert Table("t", **ABOUT, deleted_when="v is null").tombstone == "v is null"


# -- ties --------------------------------------------------------------------------------------------


def _expected(records: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    best: dict[tuple[str, int], dict[str, Any]] = {}
    for r in sorted(records, key=lambda r: -1 if r["lsn"] is None else r["lsn"]):
        best[r["k"], r["timestamp"]] = r
    return [(k, at, r["v"]) for (k, at), r in sorted(best.items())]


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.endurance) for seed in range(1, 4))]
)
def test_tie_break_is_independent_of_arrival_order(spark: SparkSession, seed: int) -> None:
    """The versions of the table and of its operators depend neither on the order of arrival nor on how
    the records are split into runs."""
    random = Random(seed)
    records = [
        put(k, random.choice(["x", "y", "z", None]), at, lsn=lsn)
        for k in "ab"
        for at in (1, 2, 3)
        for lsn in random.sample([None, 0, 7, 10, 200], 3)
    ]
    random.shuffle(records)
    node = table(tie_break="lsn", deleted_when="v is null")
    kept = node.filter("v <> 'x'", name="kept")
    bare = node.map_values("v", name="bare")
    driver = TopologyTestDriver(kept, bare, spark=spark)
    cuts = [0, *sorted(random.sample(range(1, len(records)), 2)), len(records)]
    for start, end in pairwise(cuts):
        driver.pipe("customers", *records[start:end])
    expected = _expected(records)
    assert versions(driver) == versions(driver, "bare") == expected
    assert [(k, at, None if v == "x" else v) for k, at, v in expected] == versions(driver, "kept")
    told = driver.metrics("customers")
    assert told["applied"] + told.get("lost_tie", 0) == len(records)
    current = {r["k"]: r["v"] for r in driver.table("customers")}
    assert current == {k: v for k, at, v in expected if at == 3 and v is not None}


def test_equal_tie_break_falls_back_to_arrival_order(spark: SparkSession) -> None:
    driver = TopologyTestDriver(table(tie_break="lsn"), spark=spark)
    driver.pipe("customers", put("a", "x", 1, lsn=3), put("a", "y", 1, lsn=3), put("a", "o", 1, lsn=2))
    assert versions(driver) == [("a", 1, "y")]
    driver.pipe("customers", put("a", "z", 1, lsn=3), put("a", "o", 1))
    assert versions(driver) == [("a", 1, "z")]
    assert [r["old"] and r["old"]["v"] for r in driver.read("customers")] == [None, "x", "y"]


def test_late_tie_winner_corrects_joined_rows(spark: SparkSession) -> None:
    sales = Stream("sales", key="k", schema=StructType([SCHEMA["k"], SCHEMA["timestamp"]]))
    joined = sales.left_join(
        table(tie_break="lsn"),
        name="joined",
        select=["right.v"],
        corrected_for=DAY,
    )
    driver = TopologyTestDriver(joined, spark=spark)
    driver.pipe("customers", put("a", "x", 1, lsn=5), put("a", "later", 9, lsn=1))
    driver.pipe("sales", {"k": "a", "timestamp": 2})
    driver.pipe("customers", put("a", "y", 1, lsn=4))
    assert [r["v"] for r in driver.table("joined")] == ["x"]
    driver.pipe("customers", put("a", "z", 1, lsn=6))
    assert [r["v"] for r in driver.table("joined")] == ["z"]


def test_tie_break_on_delta(tmp_path: Path, spark: SparkSession) -> None:
    """Ties are decided across runs. A record that loses is in the quarantine, and the audit accounts
    for every record."""
    folder = landing(tmp_path)
    node = table(tie_break="lsn", source=FilesSource(str(folder)))
    for name, lsn in ("1", 5), ("2", 9), ("3", 7):
        at = "2024-01-01T00:00:00Z"
        (folder / f"{name}.jsonl").write_text(json.dumps(put("a", name, at, lsn=lsn)))
        result = run([build_asset(node)], tmp_path / "warehouse")
        assert result.success, messages(result)
    store = AssetStore(str(tmp_path / "warehouse"), node, spark)
    assert [r["v"] for r in store.read("versions").collect()] == ["2"]
    quarantine = store.quarantine()
    assert quarantine is not None
    assert [r["reason"] for r in quarantine.collect()] == ["lost_tie"]
    assert [one.name for one in audit(store) if not one.passed] == []
    # After the option is removed, the audit still accounts for the records that it rejected.
    without = replace(node, tie_break=None)
    (folder / "4.jsonl").write_text(json.dumps(put("a", "4", "2024-01-01T00:00:00Z", lsn=1)))
    assert run([build_asset(without)], tmp_path / "warehouse").success
    store = AssetStore(str(tmp_path / "warehouse"), without, spark)
    assert [r["v"] for r in store.read("versions").collect()] == ["4"]
    assert [one.name for one in audit(store) if not one.passed] == []


def test_invalid_tie_break_is_refused() -> None:
    kinds = {"k": StringType(), "m": MapType(StringType(), StringType()), "timestamp": TimestampType()}
    maps = StructType([StructField(name, kind) for name, kind in kinds.items()])
    for wrong, said in (
        ({"tie_break": "lsm"}, "got 'lsm'"),
        ({"tie_break": "k"}, "value column"),
        ({"tie_break": "m", "schema": maps}, "values have an order"),
    ):
        with pytest.raises(TopologyError, match=said):
            table(**wrong)
    assert code_version(table(tie_break="lsn")) != code_version(table())


def test_options_in_yaml_and_decorators() -> None:
    for name in ("deleted_when", "tie_break"):
        about = CONCEPTS["versioned_table"].yaml.model_fields[name]
        assert about.description
        assert name in VersionedTableAttributes.__annotations__
    assert "deleted_when" in CONCEPTS["table"].yaml.model_fields
    assert "tie_break" not in CONCEPTS["table"].yaml.model_fields
