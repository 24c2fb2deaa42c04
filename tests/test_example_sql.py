"""The example of SQL models: each model selects the rows that other readers of the tables return."""

from __future__ import annotations

import importlib
import re
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl
import pyspark.sql.types as T
import pytest
from pyspark.sql import SparkSession

from tests.conftest import ROOT
from tests.log_writer import LogWriter, moment
from tests.market import QUIET, materialized
from tests.test_example_payments import lines_of
from vt_dagster import VersionedTable, read

pytestmark = pytest.mark.usefixtures("few_rows")

README = ROOT / "examples" / "sql" / "README.md"
NOON = "2026-03-02T12:00:00Z"


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example as ``python -m examples.sql`` loads it, with its data in the test's directory."""
    monkeypatch.setenv("EXAMPLE_DATA", str(tmp_path / "sql"))
    monkeypatch.setenv("COLUMNS", "200")
    for name in [name for name in sys.modules if name.startswith("examples.sql")]:
        monkeypatch.delitem(sys.modules, name)
    return importlib.import_module("examples.sql.__main__")


def expected_rows(warehouse: str) -> dict[str, list[tuple[Any, ...]]]:
    """Computes the rows of each model from Spark's readers, without SQL."""

    def rows(name: str, **how: Any) -> list[dict[str, Any]]:
        found = read(name, warehouse=warehouse, into="spark", **how).toArrow()
        return found.to_pylist()

    now = rows("priced_orders")
    revenue: dict[str, list[float]] = {}
    for row in now:
        revenue.setdefault(row["product"], []).append(row["quantity"] * (row["price"] or 0.0))
    changes = [
        (row["order_id"], row["product"], row["old"]["price"], row["price"], row["quantity"])
        for row in rows("priced_orders", what="log")
        if row["revision"]
    ]
    later: dict[str, float] = {}
    for _, product, was, became, quantity in changes:
        later[product] = later.get(product, 0.0) + quantity * (became - was)
    prices = rows("prices", as_of=NOON)
    return {
        "price_list": sorted((r["product"], r["price"], r["valid_from"]) for r in prices),
        "revenue": sorted((p, len(some), sum(some)) for p, some in revenue.items()),
        "corrections": sorted((*one[:4], one[4] * (one[3] - one[2])) for one in changes),
        "revenue_corrected": sorted(
            (p, sum(some), sum(some) - later.get(p, 0.0)) for p, some in revenue.items()
        ),
    }


def test_models_equal_other_readers(
    spark: SparkSession, example: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Models and readers agree after the first delivery, after the second, and after an idle run."""
    warehouse = str(example.DATA / "warehouse")
    said, counts = "", []
    for number, delivery in enumerate(example.DELIVERIES, 1):
        example.land(delivery)
        example.make()
        found = {name: [tuple(r.values()) for r in example.rows_of(name)] for name in MODELS}
        assert found == expected_rows(warehouse), number
        counts.append(len(found["corrections"]))
        print(f"delivery {number}")
        example.show_all()
        said += capsys.readouterr().out
    assert counts == [0, 1]
    page = re.search(r"```text\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert page is not None
    assert lines_of(said) == lines_of(page.group(1))
    # The stored view, which another engine would read, lacks the newest log rows; the model has them.
    stored = pl.read_delta(f"{warehouse}/prices/view")
    assert 1.5 not in stored["price"]
    assert 1.5 in pl.read_parquet(example.RESULTS / "price_list.parquet")["price"]
    before = {name: example.rows_of(name) for name in MODELS}
    example.make()
    assert {name: example.rows_of(name) for name in MODELS} == before


MODELS = ("price_list", "revenue", "corrections", "revenue_corrected")


def test_models_after_killed_run(example: Any, tmp_path: Path) -> None:
    """A run that is killed after its commit leaves log rows that the view lacks: models select them."""
    definitions: Any = importlib.import_module("examples.sql.definitions")
    (tmp_path / "now.sql").write_text("select k, v from prices order by k")
    (tmp_path / "noon.sql").write_text(
        "select k, v, valid_to from prices_versions where v is not null and valid_from <= "
        "timestamptz '2024-01-01 00:12+00' order by k, valid_from"
    )
    (tmp_path / "both.sql").write_text(
        "with l as (select count(*) n from prices_log) select l.n, now.k from now, l order by k"
    )
    text, time = T.StringType(), T.TimestampType()
    schema = T.StructType([T.StructField(n, t) for n, t in (("k", text), ("v", text), ("at", time))])
    prices = VersionedTable(
        "prices", key="k", schema=schema, timestamp="at", history_retention=timedelta(days=1)
    )
    where: Any = {"warehouse": tmp_path / "warehouse", "results": tmp_path / "results"}
    models = definitions.build_models(tmp_path, [prices], **where)

    def made() -> list[list[tuple[Any, ...]]]:
        result = dg.materialize(models, run_config=QUIET)
        assert materialized(result, "both")["dagster/row_count"] > 0
        names = ("now", "noon", "both")
        return [pl.read_parquet(where["results"] / f"{name}.parquet").rows() for name in names]

    log = LogWriter(where["warehouse"])
    log.run([("a", "1", 0), ("b", "2", 5)], recorded=6)
    assert made() == [
        [("a", "1"), ("b", "2")],
        [("a", "1", None), ("b", "2", None)],
        [(2, "a"), (2, "b")],
    ]
    log.run([("a", "3", 20), ("a", "late", 10), ("b", None, 30)], recorded=31)
    assert made() == [
        [("a", "3")],
        [("a", "1", moment(10)), ("a", "late", moment(20)), ("b", "2", moment(30))],
        [(5, "a")],
    ]


def test_lineage_equals_query_inputs(example: Any) -> None:
    graph = example.defs.resolve_asset_graph()
    found = {
        name: {key.to_user_string() for key in graph.get(dg.AssetKey(name)).parent_keys}
        for name in MODELS
    }
    assert found == {
        "price_list": {"prices"},
        "revenue": {"priced_orders"},
        "corrections": {"priced_orders"},
        "revenue_corrected": {"revenue", "corrections"},
    }


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("select * from prizes", r"x\.sql: expected the names of tables and models, got \['prizes'\]"),
        ("select * from orders_log", r"got \['orders_log'\]; choose of \['orders', 'x'\]"),
        ("delete from orders", r"x\.sql: expected one SELECT, got: Only SELECT"),
        ("select 1; select 2", r"expected one SELECT, got: 2 statements"),
        ("select from from", r"expected one SELECT, got: syntax error"),
    ],
)
def test_invalid_query_is_refused_when_definitions_load(
    example: Any, tmp_path: Path, query: str, said: str
) -> None:
    (tmp_path / "x.sql").write_text(query)
    definitions: Any = importlib.import_module("examples.sql.definitions")
    where: Any = {"warehouse": tmp_path, "results": tmp_path}
    with pytest.raises(ValueError, match=said):
        definitions.build_models(tmp_path, [definitions.orders], **where)
