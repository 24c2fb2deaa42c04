"""Explanations: the records that an explanation names give the explained row, if the operator alone
processes them."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import IntegerType, StringType, StructField, StructType, TimestampType
from typer.testing import CliRunner

from vt_dagster import FilesSource, Materialized, Stream, TumblingWindow, VersionedTable, explain, read
from vt_dagster.cli import app
from vt_dagster.errors import StorageError
from vt_dagster.provenance.explain_request import Explanation
from vt_dagster.runs.run import run_once
from vt_dagster.spark.settings import small_run
from vt_dagster.storage.asset_store import stores_of
from vt_dagster.testing import TopologyTestDriver
from vt_dagster.topology.model import Table, topological

EPOCH = datetime(2020, 1, 1, tzinfo=timezone.utc)
TIMES = StructField("timestamp", TimestampType())
VALUES = [StructField("k", StringType()), StructField("n", IntegerType())]
SCHEMA = StructType([*VALUES, TIMES])
GRACE, RETENTION, LONG = timedelta(minutes=2), timedelta(minutes=10), timedelta(days=1)
JOINED = ["left.*", "right.n as rate", "right.valid_from as since"]
Landed = tuple[str | None, int | None, float]
ROWS, RECORDS = 12, 24
"""The number of rows explained of each asset, and of random records landed in each file."""
ONCE = ("returns", "matched", "plain", "doubled", "events", "both", "by_number", "newest", "signed")
"""Assets that run only in the second round, which takes the records of both rounds at once."""
FIRST = {
    "rates": ([("z", 1, 1), ("z", 2, 9), ("y", 1, 1)], []),
    "orders": ([("z", 1, 3), ("z", 2, 3), ("w", 1, 19), ("v", None, 19), ("z", 8, 10)], []),
    "returns": ([], []),
}
SECOND = {
    "rates": ([("z", 3, 2), ("y", 2, 1)], [("x", 1, 20), ("late", 1, 0), (None, 1, 20)]),
    "orders": ([("z", 3, 3), ("w", 2, 30), ("u", 1, 2)], [("t", 1, 50)]),
    "returns": ([("z", 1, 20)], []),
}
"""Records that land before and after the random ones of the keys a to c: (key, number, minutes)."""


@dataclass
class Chain:
    """Three sources, and an operator of each kind that can be explained."""

    root: Path
    nodes: dict[str, Stream] = field(default_factory=dict[str, Stream])

    def __post_init__(self) -> None:
        def source(name: str) -> FilesSource:
            (self.root / name).mkdir(parents=True)
            return FilesSource(str(self.root / name), max_bad_share=1.0)

        def stream(name: str) -> Stream:
            return Stream(
                name, key="k", schema=SCHEMA, tombstone="n is null", partitions=2, source=source(name)
            )

        rates = VersionedTable(
            "rates",
            key="k",
            schema=SCHEMA,
            tombstone="n is null",
            history_retention=RETENTION,
            source=source("rates"),
        )
        self.nodes = {
            n.name: n for n in topological(operators(stream("orders"), stream("returns"), rates))
        }

    @property
    def warehouse(self) -> str:
        return str(self.root / "warehouse")

    def land(
        self, file: str, records: Mapping[str, list[tuple[str | None, int | None, float]]]
    ) -> None:
        for name, some in records.items():
            lines = [
                json.dumps({"k": k, "n": n, "timestamp": (EPOCH + timedelta(minutes=t)).isoformat()})
                for k, n, t in some
            ]
            (self.root / name / file).write_text("".join(f"{line}\n" for line in lines))

    def explain(self, name: str, **asked: Any) -> Explanation:
        return explain(name, warehouse=self.warehouse, **asked)


def operators(orders: Stream, returns: Stream, rates: Table) -> list[Stream]:
    """Returns an operator of each kind over three sources."""
    priced = orders.left_join(rates, name="priced", select=JOINED, grace_period=GRACE)
    cheap = rates.filter("n < 5", name="cheap")
    plain = rates.filter("n < 5", name="plain", materialized=Materialized())
    return [
        priced,
        cheap,
        orders.join(rates, name="matched", select=JOINED),
        plain.map_values("n * 2 as m", name="doubled"),
        cheap.to_stream(name="events"),
        orders.merge(returns, name="both"),
        returns.select_key("coalesce(n, 0) as of_n", name="by_number"),
        orders.flat_map_values("array(n, -n)", column="m", name="signed"),
        priced.to_table(name="newest", materialized=Materialized(history_retention=LONG)),
    ]


def random_records(chance: random.Random, hour: float) -> list[Landed]:
    """Random records, out of order, many with a timestamp that another record has too."""
    return [
        (chance.choice("abc"), chance.choice([None, *range(9)]), hour + chance.randrange(8))
        for _ in range(RECORDS)
    ]


@pytest.fixture(scope="module")
def chain(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    found, chance = Chain(tmp_path_factory.mktemp("explain")), random.Random(24)
    stores = stores_of(found.warehouse, spark)
    with small_run(spark):
        for number, (fixed, hour) in enumerate(((FIRST, 1), (SECOND, 6)), 1):
            found.land(
                f"{number}.jsonl",
                {
                    name: [*first, *random_records(chance, hour), *last]
                    for name, (first, last) in fixed.items()
                },
            )
            for name, node in found.nodes.items():
                if name not in ONCE or number == 2:
                    run_once(node, stores, run_id=f"the run {number}")
    return found


# ----------------------------------------------------------------------------------- by recomputing


def logs_of(chain: Chain) -> dict[str, dict[tuple[int, int], dict[str, Any]]]:
    return {
        name: {
            (row["partition"], row["offset"]): row
            for row in read(name, what="log", warehouse=chain.warehouse).to_pylist()
        }
        for name in chain.nodes
    }


def input_records(found: Explanation) -> Iterator[tuple[str, tuple[int, int]]]:
    for one in found.made_of:
        assert one.record is not None
        yield one.asset, (one.record.partition, one.record.offset)


def test_named_records_give_row(chain: Chain, spark: SparkSession) -> None:
    logs, chance = logs_of(chain), random.Random(7)
    asked = {
        name: chance.sample(sorted(logs[name]), min(ROWS, len(logs[name])))
        for name, node in chain.nodes.items()
        if node.operator is not None
    }
    found = {
        (name, place): chain.explain(name, offset=place)
        for name, places in asked.items()
        for place in places
    }
    assert len(found) > 80
    alone = Alone(chain, spark)
    for (name, _), told in found.items():
        alone.take(name, told, logs)
    results = alone.results()
    for case, ((name, place), told) in enumerate(found.items()):
        row, values = logs[name][place], chain.nodes[name].schema.names
        wanted = [row["timestamp"], row["is_tombstone"], *([row[c] for c in values])]
        gave = [
            [r["timestamp"], r["is_tombstone"], *(r[c] for c in values)] for r in results[name][case]
        ]
        assert gave, told
        if name == "signed" or len([n for n in told.notes if "cannot be told apart" in n]):
            assert wanted in gave, told
        else:
            assert gave[-1] == wanted, told


class Alone:
    """Each operator alone, over separate sources in which each case has its own key."""

    def __init__(self, chain: Chain, spark: SparkSession) -> None:
        self.cases = 0
        self.records: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.spark = spark
        self.nodes: dict[str, Stream] = {}
        self.sources: dict[str, Stream] = {}
        for node in chain.nodes.values():
            for up in node.inputs:
                self.sources.setdefault(up.name, source_like(up))
        mine = self.sources
        orders, rates = mine["orders"], mine["rates"]
        assert isinstance(rates, VersionedTable)
        plain, cheap = mine["plain"], mine["cheap"]
        assert isinstance(plain, Table)
        assert isinstance(cheap, Table)
        self.nodes = {
            "priced": orders.left_join(rates, name="priced_", select=JOINED),
            "cheap": rates.filter("n < 5", name="cheap_"),
            "matched": orders.join(rates, name="matched_", select=JOINED),
            "plain": rates.filter("n < 5", name="plain_", materialized=Materialized()),
            "doubled": plain.map_values("n * 2 as m", name="doubled_"),
            "events": cheap.to_stream(name="events_"),
            "both": orders.merge(mine["returns"], name="both_"),
            "by_number": mine["returns"].select_key(
                "case", "coalesce(n, 0) as of_n", name="by_number_"
            ),
            "signed": orders.flat_map_values("array(n, -n)", column="m", name="signed_"),
            "newest": mine["priced"].to_table(
                name="newest_", materialized=Materialized(history_retention=timedelta(days=9000))
            ),
        }

    def take(self, name: str, told: Explanation, logs: Mapping[str, Any]) -> None:
        """Adds a case: the records that an explanation names, and the versions that it calls valid at
        other times (``other_time``)."""
        places = list(input_records(told))
        joined = {
            (c.record.asset, (c.record.partition, c.record.offset))
            for c in told.candidates
            if c.known and c.rule == "other_time"
        }
        for asset, place in [*places, *sorted(joined)]:
            row = logs[asset][place]
            kept = {c: v for c, v in row.items() if c in self.sources[asset].schema.names}
            times = {"timestamp": row["timestamp"], "is_tombstone": row["is_tombstone"]}
            self.records[asset].append({**kept, **times, "case": f"{name} {self.cases}"})
        self.cases += 1

    def results(self) -> dict[str, dict[int, list[dict[str, Any]]]]:
        driver = TopologyTestDriver(*self.nodes.values(), spark=self.spark)
        driver.run({self.sources[name].name: some for name, some in self.records.items()})
        found: dict[str, dict[int, list[dict[str, Any]]]] = {}
        for name, node in self.nodes.items():
            found[name] = defaultdict(list)
            for row in driver.read(node.name):
                asked, case = row["case"].split()
                if asked == name:
                    found[name][int(case)].append(row)
        return found


def source_like(node: Stream) -> Stream:
    """A source with the columns and the kind of ``node``, and the case as part of its key."""
    own = [f for f in node.schema.fields if f.name != "timestamp"]
    about: dict[str, Any] = {
        "key": ["case", *node.key],
        "schema": StructType([StructField("case", StringType()), *own, TIMES]),
    }
    if isinstance(node, VersionedTable):
        return VersionedTable(node.name, **about, history_retention=timedelta(days=9000))
    return (Table if isinstance(node, Table) else Stream)(node.name, **about)


# ------------------------------------------------------------------------------------- what it tells


def test_explain_late_table_record(chain: Chain) -> None:
    first, second = (e for e in (chain.explain("priced", where=f"k = 'z' and n = {n}") for n in (1, 2)))
    assert first.record is not None
    assert first.record.values["rate"] == 1
    assert first.rules == ("released", "as_of", "corrected")
    assert "rates" in first.decisions[-1].because
    (then,) = (c for c in first.candidates if c.chosen)
    (now,) = (c for c in first.candidates if c.chosen_now)
    assert (then.record.values["n"], now.record.values["n"]) == (1, 3)
    assert then.valid_to == EPOCH + timedelta(minutes=9)
    assert then.valid_to_now == EPOCH + timedelta(minutes=2)
    assert (now.known, now.rule) == (False, "recorded_since")
    assert second.made_of[0].record != first.made_of[0].record
    third = chain.explain("priced", where="k = 'z' and n = 3")
    assert third.rules == ("late", "expired")
    assert "with a longer history retention of rates, the match would be rates 0:" in third.notes[-1]
    assert third.record is not None
    assert third.record.values["rate"] is None
    assert third.written is not None
    assert (third.written.batch, third.written.run_id) == (2, "the run 2")
    assert third.written.recorded_at == third.record.recorded_at


def test_explain_record_that_waited(chain: Chain) -> None:
    found = chain.explain("priced", where="k = 'w' and n = 1")
    assert found.rules == ("released", "no_match")
    assert "read by run 1, " in found.decisions[0].because
    assert "at least 2 minutes after its timestamp" in found.decisions[0].because
    waits = chain.explain("priced", key="t")
    assert waits.record is None
    assert waits.rules == ("waiting",)
    assert "waits since run 2, until stream time is " in waits.decisions[0].because
    assert [one.asset for one in waits.made_of] == ["orders"]


def test_explain_source_rows(chain: Chain) -> None:
    put = chain.explain("rates", key="z")
    assert put.record is not None
    assert put.record.values["n"] == 2
    assert put.rules == ("applied",)
    assert put.origin is not None
    assert [Path(n).name for n in put.origin.names] == ["1.jsonl"]
    disorder = chain.explain("rates", key="z", at="2020-01-01T00:02:30Z")
    assert disorder.record is not None
    assert disorder.record.values["n"] == 3
    assert disorder.rules[0] == "out_of_order"
    assert disorder.origin is not None
    assert [Path(n).name for n in disorder.origin.names] == ["2.jsonl"]
    replaced = chain.explain("rates", where="k = 'y' and n = 1")
    assert "replaced" in replaced.rules
    earlier = chain.explain("rates", key="z", at="2020-01-01T00:02:30Z", as_known_at=_first(chain))
    assert earlier.record is not None
    assert earlier.record.values["n"] == 1


def _first(chain: Chain) -> datetime:
    found = chain.explain("rates", offset="0:0").record
    assert found is not None
    assert found.recorded_at is not None
    return found.recorded_at


def test_explain_walks_to_sources(chain: Chain) -> None:
    found = chain.explain("newest", key="z")
    assert [one.asset for one in found.walk()] == ["newest", "priced", "orders", "rates"]
    plain = found.as_json()
    assert plain["made_of"][0]["made_of"][1]["asset"] == "rates"
    assert json.loads(json.dumps(plain)) == plain


@pytest.mark.parametrize(
    ("name", "asked", "rules", "said"),
    [
        ("rates", {"key": "nobody"}, (), "there is no record of nobody"),
        ("rates", {"key": "late"}, ("late",), "there is no record of late"),
        ("rates", {"key": "z", "at": "2019-01-01"}, (), "its first record of z is of 2020-01-01"),
        ("rates", {"offset": "7:1"}, (), "its log has no partition 7"),
        ("rates", {"offset": "0:100000"}, (), "has the offsets 0 to"),
        ("rates", {"where": "n = 77"}, (), "no record meets 'n = 77'"),
        ("priced", {"key": "v"}, ("dropped",), "there is no record of v"),
        ("matched", {"key": "u"}, ("no_match",), "there is no record of u"),
        ("cheap", {"key": "nobody"}, (), "there is no record of nobody"),
    ],
)
def test_explain_missing_rows(
    chain: Chain, name: str, asked: dict[str, Any], rules: tuple[str, ...], said: str
) -> None:
    found = chain.explain(name, **asked)
    assert found.record is None
    assert found.rules == rules
    assert said in " ".join(found.notes)
    if rules == ("late",):
        (row,) = found.rejected
        assert (row.reason, row.position, row.batch) == ("late", RECORDS + 4, 2)
        assert '"late"' in row.raw


@pytest.mark.parametrize(
    ("name", "asked", "said"),
    [
        ("nothing", {"key": "a"}, "found no log there"),
        ("rates", {}, "give --key, --offset or --where"),
        ("rates", {"key": ["a", "b"]}, "expected --key once for each column"),
        ("rates", {"offset": "17"}, "expected an offset as PARTITION:OFFSET"),
        ("rates", {"where": "k = 'a'"}, "give --offset"),
        ("rates", {"where": "nowhere = 1"}, "expected a SQL condition over"),
        ("rates", {"key": "z", "as_known_at": "2000-01-01"}, "no data existed before it"),
    ],
)
def test_invalid_requests_are_refused(
    chain: Chain, name: str, asked: dict[str, Any], said: str
) -> None:
    with pytest.raises(StorageError, match=said):
        chain.explain(name, **asked)


def test_explain_command(chain: Chain) -> None:
    command = ["explain", "priced", "--where", "k = 'z' and n = 1", "--warehouse", chain.warehouse]
    told = CliRunner().invoke(app, command)
    assert told.exit_code == 0, told.output
    assert "priced 0:" in told.output or "priced 1:" in told.output
    assert "corrected: with what is known now, the match would be rates 0:" in told.output
    assert "the run 1" in told.output
    assert "recorded_since: the version was recorded after the run's lookup" in told.output
    same = json.loads(CliRunner().invoke(app, [*command, "--json"]).output)
    assert same == chain.explain("priced", where="k = 'z' and n = 1").as_json()
    absent = CliRunner().invoke(
        app, ["explain", "rates", "--key", "late", "--warehouse", chain.warehouse]
    )
    assert absent.exit_code == 1
    assert "quarantine: 2.jsonl" in absent.output
    unknown = CliRunner().invoke(
        app, ["explain", "priced", "--key", "nobody", "--warehouse", chain.warehouse]
    )
    assert "\n  inputs\n" in unknown.output
    assert "made from" not in unknown.output


def test_explain_windows_without_dropped_records(tmp_path: Path, spark: SparkSession) -> None:
    """A window emits one result per run, without ``count(*)``. If a run dropped no record, the
    explanation names all records of the window."""
    landing, warehouse = tmp_path / "landing", str(tmp_path / "warehouse")
    landing.mkdir()
    schema = StructType([StructField("k", StringType()), StructField("n", IntegerType())])
    about: dict[str, Any] = {"schema": schema, "timestamp": "timestamp_seconds(n)"}
    stream = Stream("s", key="k", source=FilesSource(str(landing)), **about)
    window = TumblingWindow(timedelta(seconds=10), grace=timedelta(seconds=5))
    sums = stream.group_by().windowed_by(window)
    node = sums.aggregate({"total": "sum(n)"}, name="w", emit="per_run")
    stores, arrived = stores_of(warehouse, spark), list[int]()
    with small_run(spark):
        for run, times in enumerate(([1, 3], [4, 2, 12], [20, 5, 13, 21], [22, 23])):
            arrived += times
            rows = "".join(json.dumps({"k": "k", "n": n}) + "\n" for n in times)
            (landing / f"{run}.jsonl").write_text(rows)
            run_once(stream, stores)
            run_once(node, stores)
    told = {}
    for offset in range(6):
        found = explain("w", offset=(0, offset), warehouse=warehouse)
        values = [part.record.values["n"] for part in found.made_of]
        told[offset] = found.record.values["total"], values, bool(found.notes)
    assert told == {
        0: (4, [1, 3], False),
        1: (10, [1, 3, 4, 2], False),
        2: (12, [12], False),
        3: (25, [12, 13], False),
        4: (41, [20, 21], True),  # another window dropped a record
        5: (86, [20, 21, 22, 23], False),
    }
