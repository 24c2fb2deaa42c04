"""Explanations of each operator's rows: the named records give the row; no other record changes it.

The tests cover what the random chains of ``test_explain_random`` lack: joins and groups of streams,
corrected joins, and joins by what was known. ``storage/test_corrected_stream_join_on_delta.py`` covers
corrected joins of streams. The model of ``tests.core.reference`` shares no code with the operators. It
computes a row twice: from the records that the explanation names, and from all records up to the one
that triggered the result.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from tests.core.reference.stream_join import as_here
from tests.core.reference_model import complete
from tests.explain_warehouse import (
    COUNTED,
    EPOCH,
    LONG,
    MINUTE,
    ONCE,
    ROUNDS,
    SCHEMA,
    WINDOWS,
    WITHIN,
    Warehouse,
)
from vt_dagster import (
    FilesSource,
    Stream,
    TumblingWindow,
    UntilWindowCloses,
    VersionedTable,
    explain,
    read,
)
from vt_dagster.provenance.explain import Explainer
from vt_dagster.provenance.explain_request import Explanation
from vt_dagster.runs.erase import erase
from vt_dagster.runs.run import run_once
from vt_dagster.spark.settings import small_run
from vt_dagster.storage.asset_store import stores_of

ROWS = 40
IN_ORDER = [("partition", "ascending"), ("offset", "ascending")]
Row = dict[str, Any]
Place = tuple[str, int, int]
"""An asset, and a partition and an offset of its log; streams have one partition."""


@pytest.fixture(scope="module")
def warehouse(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Warehouse:
    found = Warehouse(tmp_path_factory.mktemp("explained"))
    with small_run(spark):
        found.build(spark)
    return found


def logs_of(path: str, names: Sequence[str]) -> dict[str, list[Row]]:
    return {
        name: read(name, what="log", warehouse=path).sort_by(IN_ORDER).to_pylist() for name in names
    }


# -------------------------------------------------------------------------------------- in the model


def millis(moment: datetime) -> int:
    return (moment - EPOCH) // timedelta(milliseconds=1)


def value_of(group: str | None, number: int | None) -> str | None:
    return None if number is None else f"{group}|{number}"


def pair_of(row: Row) -> str | None:
    if row["is_tombstone"]:
        return None
    left, right = (value_of(row[f"{side}g"], row[f"{side}n"]) for side in "lr")
    return f"({left or 'null'},{right or 'null'})"


VERSIONED = {"versioned": True, "history_retention": LONG // timedelta(milliseconds=1)}
PLAIN = {"versioned": False}
TABLES = {"left": VERSIONED, "right": PLAIN}


@dataclass(frozen=True)
class Case:
    """An operator in the model.

    Args:
        inputs: the assets, by the model's name of each input, in order.
        value: converts a result row to the model's value; for an aggregate, the value of a column.
        number: whether a record's value is only its number, without a group.
        key: the column that is the model's key.
    """

    operator: str
    config: Mapping[str, Any]
    inputs: Mapping[str, str]
    value: Callable[[Row], Any] = pair_of
    number: bool = False
    key: str = "k"

    def run(self, records: Sequence[tuple[str, Row]]) -> list[Row]:
        """Returns what the model emits for records of assets."""
        names = {asset: name for name, asset in self.inputs.items()}
        given = [
            {
                "input": names[asset],
                "key": row["k"],
                "value": (None if row["n"] is None else str(row["n"]))
                if self.number
                else value_of(row["g"], row["n"]),
                "timestamp": millis(row["timestamp"]),
            }
            for asset, row in records
        ]
        scenario = {"operator": self.operator, "config": self.config, "records": given}
        if self.operator == "stream_stream_join":
            # A record of another key advances stream time, so that records without a match are emitted.
            end = max(r["timestamp"] for r in given) + 10**8
            given.append({"input": "left", "key": "end", "value": "x|0", "timestamp": end})
            return as_here(scenario).emitted
        return complete(scenario)["expected"]

    def is_of(self, entry: Row, row: Row) -> bool:
        """Whether an entry of the model has the key (and window) of a row."""
        ends = ("window_start", "window_end")
        return entry["key"] == row[self.key] and all(
            entry[c] == millis(row[c]) for c in ends if c in entry
        )


def join(kind: str, left: str, right: str, operator: str = "table_table_join") -> Case:
    config = {"kind": kind, "left": TABLES[left], "right": TABLES[right]}
    return Case(operator, config, {"left": left, "right": right})


def total(row: Row) -> Any:
    return None if row["is_tombstone"] else str(row["sum"])


def aggregate(source: str) -> Case:
    config = {"table": TABLES[source], "group_by": "prefix", "aggregate": "sum"}
    return Case("table_aggregate", config, {"table": source}, total, key="g")


def windowed(name: str) -> Case:
    window, config = WINDOWS[name], {"type": name}
    for told, own in (("size", "size"), ("size", "time_difference")):
        if hasattr(window, own):
            config[told] = getattr(window, own) // timedelta(milliseconds=1)
    if name == "session":
        config["gap"] = config.pop("size", None) or MINUTE // timedelta(milliseconds=1)
    config["grace"] = MINUTE // timedelta(milliseconds=1)
    told = {"window": config, "aggregate": "sum", "suppress": None}
    return Case("windowed_aggregate", told, {"stream": "clicks"}, total, number=True)


def of_streams(kind: str) -> Case:
    config = {n: v // timedelta(milliseconds=1) for n, v in WITHIN.items()} | {"kind": kind}
    return Case("stream_stream_join", config, {"left": "clicks", "right": "views"})


CASES = {
    "outer": join("outer", "left", "right"),
    "refers": join("inner", "left", "right", "foreign_key_join"),
    "of_left": aggregate("left"),
    **{name: windowed(name) for name in WINDOWS},
    "either": of_streams("outer"),
}


def arrivals(name: str, logs: Mapping[str, list[Row]]) -> list[tuple[str, Row]]:
    """Returns all records of a case's inputs in the order in which runs process them: by round, then by
    the largest timestamp so far in their partition, the left input first."""
    case = CASES[name]
    found: list[tuple[tuple[int, ...], str, Row]] = []
    for side, asset in enumerate(case.inputs.values()):
        rounds = sorted({row["recorded_at"] for row in logs[asset]})
        assert len(rounds) == (1 if asset in ONCE else ROUNDS)
        so_far: dict[tuple[int, int], int] = {}
        for row in logs[asset]:
            run = 0 if name in ONCE else rounds.index(row["recorded_at"]), row["partition"]
            so_far[run] = max(so_far.get(run, 0), millis(row["timestamp"]))
            place = (run[0], so_far[run], side, row["partition"], row["offset"])
            found.append((place, asset, row))
    return [(asset, row) for _, asset, row in sorted(found, key=lambda one: one[0])]


def place_of(asset: str, row: Row) -> Place:
    return asset, row["partition"], row["offset"]


def offset_of(row: Row) -> tuple[int, int]:
    return row["partition"], row["offset"]


def named_places(told: Explanation) -> list[Place]:
    records = [(one.asset, one.record) for one in told.made_of if one.record is not None]
    return [(asset, record.partition, record.offset) for asset, record in records]


def last_of(case: Case, emitted: Sequence[Row], row: Row) -> tuple[Any, int] | None:
    mine = [e for e in emitted if case.is_of(e, row)]
    return (mine[-1]["value"], mine[-1]["timestamp"]) if mine else None


@pytest.mark.parametrize("name", CASES)
def test_named_records_alone_give_row(warehouse: Warehouse, name: str) -> None:
    case = CASES[name]
    logs = logs_of(warehouse.path, [name, *case.inputs.values()])
    explainer, every = Explainer(warehouse.path), arrivals(name, logs)
    rows = logs[name]
    asked = random.Random(name).sample(rows, min(ROWS, len(rows)))
    assert len(asked) >= 15
    for row in asked:
        told = explainer.explain(name, offset=offset_of(row))
        places = set(named_places(told))
        assert places, told
        assert told.made_of_in_all == len(told.made_of)
        wanted = case.value(row), millis(row["timestamp"])
        order = [(asset, r) for asset, r in every if place_of(asset, r) in places]
        if row["is_tombstone"] and name == "session":
            # The record that merged the session may emit one with the same bounds right after it.
            gave = [e for e in case.run(order) if case.is_of(e, row)]
            assert wanted in [(e["value"], e["timestamp"]) for e in gave[-2:]], told
            continue
        assert last_of(case, case.run(order), row) == wanted, told
        if case.operator == "stream_stream_join":
            got = case.run(every)
            assert wanted in [(e["value"], e["timestamp"]) for e in got], told
            continue
        end = every.index(order[-1]) + 1
        assert last_of(case, case.run(every[:end]), row) == wanted, told


def test_explain_group_names_all_records(warehouse: Warehouse) -> None:
    """A group of a stream: the explanation names all its records with a value, up to the one that
    triggered the row."""
    logs = logs_of(warehouse.path, ["of_clicks", "clicks"])
    explainer, few = Explainer(warehouse.path), Explainer(warehouse.path, most=2)
    for row in logs["of_clicks"]:
        told = explainer.explain("of_clicks", offset=offset_of(row))
        mine = [logs["clicks"][offset] for _, _, offset in named_places(told)]
        assert sum(r["n"] for r in mine) == row["sum"]
        assert max(r["timestamp"] for r in mine) == row["timestamp"]
        assert told.made_of_in_all == len(mine) == row["count"]
        assert {r["g"] for r in mine} == {row["g"]}
    newest = few.explain("of_clicks", offset=(0, logs["of_clicks"][-1]["offset"]))
    assert (len(newest.made_of), newest.more) == (2, logs["of_clicks"][-1]["count"] - 2)
    assert "the newest 2 of the" in " ".join(newest.notes)


@pytest.mark.parametrize(
    ("name", "source", "rule"),
    [("final", "tumbling", "window_closed"), ("limited", "of_clicks", "released")],
)
def test_explain_suppressed_updates(warehouse: Warehouse, name: str, source: str, rule: str) -> None:
    """The explanation names the emitted update, the last one held; the replaced ones are candidates."""
    logs, explainer = logs_of(warehouse.path, [name, source]), Explainer(warehouse.path)
    assert logs[name]
    for row in logs[name]:
        told = explainer.explain(name, offset=(0, row["offset"]))
        ((asset, _, offset),) = named_places(told)
        own = [c for c in logs[source][0] if c in row and c not in ("offset", "recorded_at", "old")]
        assert asset == source
        assert {c: logs[source][offset][c] for c in own} == {c: row[c] for c in own}
        assert told.rules[:2] == ("suppressed", rule)
        assert {c.rule for c in told.candidates} <= {"replaced"}
        assert all(c.record.offset < offset for c in told.candidates)
    held = explainer.explain(name, key=["nobody", *["2020-01-01"] * 2][: 3 if name == "final" else 1])
    assert held.record is None
    assert "no run of" in " ".join(held.notes)


def test_explain_update_still_suppressed(warehouse: Warehouse) -> None:
    logs, explainer = logs_of(warehouse.path, ["final", "tumbling"]), Explainer(warehouse.path)
    out = {(row["k"], row["window_start"]) for row in logs["final"]}
    waits = [r for r in logs["tumbling"] if (r["k"], r["window_start"]) not in out]
    assert waits
    key = [waits[-1]["k"], *(str(waits[-1][c]) for c in ("window_start", "window_end"))]
    told = explainer.explain("final", key=key)
    assert told.record is None
    assert told.rules == ("suppressed",)
    assert named_places(told) == [place_of("tumbling", waits[-1])]


def test_explain_dropped_late_records(warehouse: Warehouse) -> None:
    """A record of a window's time that is not in the window came too late. The model drops at least as
    many records."""
    case = CASES["tumbling"]
    logs, explainer = logs_of(warehouse.path, ["tumbling", "clicks"]), Explainer(warehouse.path)
    last = {(row["k"], row["window_start"]): row for row in logs["tumbling"]}
    late = 0
    for row in last.values():
        told = explainer.explain("tumbling", offset=(0, row["offset"]))
        inside = {offset for _, _, offset in named_places(told)}
        out = {c.record.offset for c in told.candidates if c.rule == "window_closed"}
        there = {
            r["offset"]
            for r in logs["clicks"]
            if r["k"] == row["k"] and row["window_start"] <= r["timestamp"] < row["window_end"]
        }
        assert inside | out == there
        assert told.candidates_in_all == len(out)
        late += len(out)
    assert late
    emitted = case.run(arrivals("tumbling", logs))
    assert len(logs["clicks"]) - len(emitted) >= late


def test_explain_window_with_only_late_records(warehouse: Warehouse) -> None:
    logs, explainer = logs_of(warehouse.path, ["tumbling", "clicks"]), Explainer(warehouse.path)
    size = WINDOWS["tumbling"].size
    assert isinstance(size, timedelta)
    there = {(row["k"], row["window_start"]) for row in logs["tumbling"]}
    starts = {r["offset"]: EPOCH + (r["timestamp"] - EPOCH) // size * size for r in logs["clicks"]}
    missed = [r for r in logs["clicks"] if (r["k"], starts[r["offset"]]) not in there]
    assert missed
    for row in missed:
        start = starts[row["offset"]]
        told = explainer.explain("tumbling", key=[row["k"], str(start), str(start + size)])
        assert (told.record, told.rules) == (None, ("window_closed",))
        assert row["offset"] in {c.record.offset for c in told.candidates}


@pytest.mark.parametrize("name", ["corrected", "strict"])
def test_explain_matched_version(warehouse: Warehouse, name: str) -> None:
    """The named version gives the row; the explanation of a corrected row names the cause."""
    logs, explainer = logs_of(warehouse.path, [name, "clicks", "left"]), Explainer(warehouse.path)
    seen: set[str] = set()
    versions = {offset_of(row): row for row in logs["left"]}
    for row in logs[name]:
        told = explainer.explain(name, offset=(0, row["offset"]))
        seen |= set(told.rules)
        parts = {asset: place for asset, *place in named_places(told)}
        click = logs["clicks"][parts["clicks"][1]]
        assert (click["g"], click["n"], click["timestamp"]) == (row["lg"], row["ln"], row["timestamp"])
        if row["rn"] is None:
            assert not {"as_of"} & set(told.rules)
            continue
        partition, offset = parts["left"]
        version = versions[partition, offset]
        assert (version["g"], version["n"], version["k"]) == (row["rg"], row["rn"], click["k"])
        assert "as_of" in told.rules
        if name == "strict":
            age = click["timestamp"] - version["timestamp"]
            assert timedelta(0) < age <= 2 * MINUTE
            assert version["recorded_at"] <= click["recorded_at"]
    assert "as_of" in seen
    assert seen & {"no_match", "deleted"}
    if name == "corrected":
        again = [row for row in logs[name] if row["cause"] is not None]
        assert again
        cause = again[-1]["cause"]
        told = explainer.explain(name, offset=(0, again[-1]["offset"]))
        because = {d.rule: d.because for d in told.decisions}["corrected"]
        assert (
            because
            == f"revision {again[-1]['revision']}, by left {cause['partition']}:{cause['offset']}"
        )
        assert any(note.startswith("revision 0 at ") for note in told.notes)


def test_explain_version_beyond_max_age(warehouse: Warehouse) -> None:
    """A version that ``max_age`` excludes is named as a candidate, and is no part of the row."""
    logs, explainer = logs_of(warehouse.path, ["strict", "left"]), Explainer(warehouse.path)
    rows = [r for r in logs["strict"] if r["rn"] is None]
    found = [explainer.explain("strict", offset=(0, row["offset"])) for row in rows]
    old = [one for one in found if "too_old" in one.rules]
    assert old
    for one in old:
        assert [part.asset for part in one.made_of] == ["clicks"]
        assert any(c.rule == "too_old" and not c.chosen for c in one.candidates)


def test_explain_walks_to_sources(warehouse: Warehouse) -> None:
    explainer = Explainer(warehouse.path)
    told = explainer.explain("limited", offset=(0, 0))
    walked = list(told.walk())
    assert {one.asset for one in walked} == {"limited", "of_clicks", "clicks"}
    assert all(one.origin is not None for one in walked if one.asset == "clicks")
    known = {one.record.place for one in walked if one.asset == "clicks" and one.record is not None}
    assert len(known) == told.made_of[0].made_of_in_all


@pytest.mark.parametrize(
    ("name", "asked", "said"),
    [
        ("outer", {"key": "nobody"}, "there is no record of nobody"),
        ("of_left", {"key": "nobody"}, "no run has read a record of it; its inputs are left"),
        ("tumbling", {"key": ["a", "1999-01-01", "1999-01-02"]}, "clicks has no record in this window"),
        ("either", {"key": "nobody"}, "there is no record of nobody"),
        ("refers", {"offset": "0:9999"}, "has the offsets 0 to"),
        ("corrected", {"key": ["0", "9999"]}, "there is no record of 0/9999"),
    ],
)
def test_explain_rows_that_never_existed(
    warehouse: Warehouse, name: str, asked: dict[str, Any], said: str
) -> None:
    told = Explainer(warehouse.path).explain(name, **asked)
    assert told.record is None
    assert said in " ".join(told.notes)


def right_table(root: Path) -> VersionedTable:
    """The table that joins look up, from files in ``right``."""
    return VersionedTable(
        "right",
        key="k",
        schema=SCHEMA,
        history_retention=timedelta(days=1),
        source=FilesSource(str(root / "right")),
    )


@pytest.mark.usefixtures("few_rows")
def test_explain_rows_that_no_run_has_made_yet(spark: SparkSession, tmp_path: Path) -> None:
    """A record that is not consumed, or was not consumed at a system time, is neither too late nor
    without a match."""
    path = str(tmp_path / "warehouse")
    left = Stream("left", key="k", schema=SCHEMA, source=FilesSource(str(tmp_path / "left")))
    right = right_table(tmp_path)
    kept = right.filter("n > 0", name="kept")
    hourly = left.group_by().windowed_by(TumblingWindow(timedelta(hours=1))).count(name="hourly")
    made = [
        left.join(right, name="joined", select=["left.n", "right.n as m"]),
        hourly,
        hourly.suppress(UntilWindowCloses(), name="final"),
        left.group_by().count(name="counted"),
        kept,
        right.join(kept, name="both", select=["left.n", "right.n as m"]),
    ]

    def run(key: str, *nodes: Stream) -> None:
        for node in (left, right):
            (tmp_path / node.name).mkdir(exist_ok=True)
            row = {"k": key, "g": "x", "n": 1, "timestamp": EPOCH.isoformat()}
            (tmp_path / node.name / f"{key}.jsonl").write_text(json.dumps(row))
        for node in nodes:
            run_once(node, stores_of(path, spark))

    def said(name: str, **more: Any) -> str:
        window = (EPOCH, EPOCH + timedelta(hours=1)) if name in ("hourly", "final") else ()
        told = Explainer(path).explain(name, key=("b", *window), **more)
        assert (told.record, told.rules) == (None, ()), name
        return " ".join(told.notes)

    run("a", left, right, *made)
    first = read("both", what="log", warehouse=path)["recorded_at"][0].as_py()
    run("b", left, right)
    reads = "no run of {} has read {} 0:1 yet"
    assert reads.format("joined", "left") in said("joined")
    assert reads.format("hourly", "left") in said("hourly")
    assert reads.format("kept", "right") in said("kept")
    assert reads.format("both", "right") in said("both")
    for consumed in (False, True):
        if consumed:
            run("c", *made)
        assert "left has no record in this window" in said("hourly", as_known_at=first)
        assert "no run of final has consumed" in said("final", as_known_at=first)
        assert "no run has read a record of it" in said("counted", as_known_at=first)
        for name, up in (("joined", "left"), ("kept", "right"), ("both", "right")):
            told = Explainer(path).explain(name, key="b", as_known_at=first)
            assert (told.rules, told.made_of[0].asset, told.made_of[0].record) == ((), up, None)


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("key", [("id",), ()])
def test_explain_missing_rows_of_a_corrected_join(
    spark: SparkSession, tmp_path: Path, key: tuple[str, ...]
) -> None:
    """The key of a corrected join identifies a stream record: it waits, is in quarantine, was not
    consumed yet, or does not exist."""
    path, landing = str(tmp_path / "warehouse"), tmp_path / "orders"
    orders = Stream(
        "orders",
        key="k",
        schema=StructType.fromDDL("id STRING, k STRING, n INT, timestamp TIMESTAMP"),
        source=FilesSource(str(landing), max_bad_share=1.0),
    )
    right = right_table(tmp_path)
    select = ["left.*", "right.n as m"]
    day, hour = timedelta(days=1), timedelta(hours=1)
    corrected: Any = orders.left_join(
        right, name="corrected", grace_period=hour, corrected_for=day, key=key, select=select
    )

    def put(name: str, *rows: dict[str, Any]) -> None:
        (tmp_path / name).mkdir(exist_ok=True)
        there = tmp_path / name / f"{len([*(tmp_path / name).iterdir()])}.jsonl"
        there.write_text("\n".join(json.dumps({"timestamp": EPOCH.isoformat(), **r}) for r in rows))

    stores = stores_of(path, spark)
    put("right", {"k": "a", "g": "x", "n": 1})
    put("orders", {"id": "first", "k": "a", "n": 1}, {"id": "bad", "k": "a", "n": "one"})
    for node in (orders, right, corrected):
        run_once(node, stores)
    put("orders", {"id": "second", "k": "a", "n": 2})
    run_once(orders, stores)
    for id, place, rules, said in (
        ("first", 0, ("waiting",), "corrected has no such row"),
        ("second", 1, (), "no run of corrected has read orders 0:1 yet"),
        ("bad", None, ("unreadable",), "orders has no record of it"),
        ("nobody", None, (), "orders has no record of it"),
    ):
        if place is None and not key:
            continue
        told = explain("corrected", key=(id,) if key else (0, place), warehouse=path)
        assert told.record is None
        assert told.rules == rules, id
        assert said in " ".join(told.notes)
        made = [one.record.offset for one in told.made_of if one.record is not None]
        assert made == ([] if place is None else [place])


@pytest.mark.usefixtures("few_rows")
def test_explain_erased_or_expired_rows(spark: SparkSession, tmp_path: Path) -> None:
    """After an erase, an explanation says that rows are gone, where, and which results count them."""
    landing, path = tmp_path / "rates", str(tmp_path / "warehouse")
    landing.mkdir()
    rows = [("a", 1, 0), ("a", 2, 5), ("gone", 3, 6), ("a", 4, 30)]
    lines = [
        json.dumps({"k": k, "g": "x", "n": n, "timestamp": (EPOCH + t * MINUTE).isoformat()})
        for k, n, t in rows
    ]
    (landing / "0.jsonl").write_text("\n".join(lines))
    rates = VersionedTable(
        "rates",
        key="k",
        schema=SCHEMA,
        history_retention=10 * MINUTE,
        source=FilesSource(str(landing)),
    )
    sizes: Any = rates.group_by("g").aggregate(COUNTED, name="sizes")
    stores = stores_of(path, spark)
    for node in (rates, sizes):
        run_once(node, stores)
    assert "expired" in explain("rates", offset="0:0", warehouse=path).rules
    before = explain("sizes", offset="0:2", warehouse=path)
    assert [one.record.values["n"] for one in before.made_of if one.record is not None] == [2, 3]
    erase(path, rates, spark, key=["gone"], reason="a test", among=[sizes])
    told = explain("rates", key="gone", warehouse=path)
    assert told.record is None
    assert "1 row of its log was erased: this may be one of them" in " ".join(told.notes)
    place = explain("rates", offset="0:2", warehouse=path)
    assert place.record is None
    assert "it was erased" in " ".join(place.notes)
    after = explain("sizes", offset="0:2", warehouse=path)
    assert after.record is not None
    assert after.record.values["count"] == 2
    assert [one.record.values["n"] for one in after.made_of if one.record is not None] == [4]
    assert "input records of its run are gone" in " ".join(after.notes)
