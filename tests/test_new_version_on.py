"""``new_version_on``: only a change of these columns starts a new version."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from random import Random
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import (
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from vt_dagster import (
    FeatureView,
    FilesSource,
    Materialized,
    Stream,
    TopologyError,
    VersionedTable,
    explain,
    lateness,
)
from vt_dagster.core import versioned_table
from vt_dagster.core.log_columns import arrow_schema, view_schema
from vt_dagster.errors import StorageError
from vt_dagster.explore.key_history import key_history
from vt_dagster.orchestration.metadata import Lane, _add_versions
from vt_dagster.orchestration.sensors import _require_reader
from vt_dagster.orchestration.translator import code_version
from vt_dagster.runs.audit import audit
from vt_dagster.runs.run import run_once
from vt_dagster.runs.training_set_run import TrainingRun
from vt_dagster.runs.truncate_log import truncate_logs
from vt_dagster.storage import view as view_module
from vt_dagster.storage.arrow_reader import fold, look_up
from vt_dagster.storage.asset_store import stores_of
from vt_dagster.testing import TopologyTestDriver
from vt_dagster.topology.feature_views import TrainingSet

pytestmark = pytest.mark.usefixtures("few_rows")


RETENTION = timedelta(seconds=20)
START = datetime(2024, 6, 1, tzinfo=timezone.utc)
ON = ("tier", "city")
PLACE = "partition int, offset long, is_tombstone boolean"
SCHEMA = StructType(
    [
        StructField("k", StringType()),
        StructField("tier", StringType()),
        StructField("city", StringType()),
        StructField("n", IntegerType()),
        StructField("timestamp", TimestampType()),
    ]
)


@dataclass(frozen=True)
class Change:
    """A record of the table; a deletion has neither ``tier`` nor ``city``."""

    k: str
    second: int
    n: int
    tier: str | None = None
    city: str | None = None
    deleted: bool = False

    @property
    def row(self) -> dict[str, Any]:
        values = {"tier": self.tier, "city": self.city, "n": None if self.deleted else self.n}
        return {"k": self.k, **values, "timestamp": at(self.second)}


def at(second: int) -> datetime:
    return START + timedelta(seconds=second)


def seconds(moment: datetime | None) -> int | None:
    return None if moment is None else round((moment - START).total_seconds())


Version = tuple[Any, ...]
"""Key, tier, city, n, begin, end, whether it is a deletion."""


def expected(arrived: Sequence[Change], retention: int) -> list[Version]:
    """Returns the versions by the definition: from all accepted records, in order of their times."""
    now: int | None = None
    there: dict[tuple[str, int], Change] = {}
    for one in arrived:
        if now is None or one.second >= now - retention:
            there[one.k, one.second] = one
            now = one.second if now is None else max(now, one.second)
    versions: list[Version] = []
    for key in sorted({k for k, _ in there}):
        own = [one for (k, _), one in sorted(there.items()) if k == key]
        opening = [
            one
            for before, one in zip([None, *own], own, strict=False)
            if before is None
            or before.deleted
            or one.deleted
            or (before.tier, before.city) != (one.tier, one.city)
        ]
        for one, after in zip(opening, [*opening[1:], None], strict=True):
            end = None if after is None else after.second
            horizon = (now or 0) - retention
            if (end is not None and end <= horizon) or (one.deleted and one.second < horizon):
                continue
            values = (None, None, None) if one.deleted else (one.tier, one.city, one.n)
            versions.append((key, *values, one.second, end, one.deleted))
    return versions


def as_of(versions: Sequence[Version], key: str, second: int, horizon: int) -> Version | None:
    for one in versions:
        begin, end, deleted = one[4:]
        if one[0] == key and begin <= second and (end is None or (second < end and second >= horizon)):
            return None if deleted else one
    return None


def random_changes(random: Random, key: str, n: int, last: int) -> list[Change]:
    """Random records with repeats, ties, deletions, nulls, and late ones."""
    found = list[Change]()
    for i in range(n):
        tier, city = random.choice("xyy"), random.choice(["p", "p", None])
        gone = random.random() < 0.15
        change = Change(key, random.randrange(last), i, tier, city)
        found.append(Change(key, change.second, i, deleted=True) if gone else change)
    return found


def version_rows(rows: Any) -> list[Version]:
    found = rows.toArrow() if isinstance(rows, DataFrame) else rows
    versions: list[Version] = [
        (
            *(r[c] for c in ("k", "tier", "city", "n")),
            *(seconds(r[c]) for c in ("valid_from", "valid_to")),
            r["is_tombstone"],
        )
        for r in found.to_pylist()
    ]
    return sorted(versions, key=lambda v: (v[0], v[4]))


def test_partial_folds_equal_definition_for_any_order(spark: SparkSession) -> None:
    """Records of many keys are folded in parts. Each fold gets only the existing rows that it needs."""
    random, arrived = Random(7), list[Change]()
    for n in range(50):
        arrived += random_changes(random, f"k{n:03}", random.randint(1, 12), 60)
    random.shuffle(arrived)
    arrived.sort(key=lambda one: one.second + random.choice([0, 0, 10, 30]))
    columns = StructType([*SCHEMA.fields, *StructType.fromDDL(PLACE).fields])
    accepted, now = list[tuple[Change, dict[str, Any]]](), -1
    for one in arrived:
        if one.second >= now - 20:
            place = {"partition": 0, "offset": len(accepted), "is_tombstone": one.deleted}
            accepted.append((one, {**one.row, **place}))
            now = max(now, one.second)
    view: pa.Table | None = None
    cuts = [0, *sorted(random.sample(range(1, len(accepted)), 2)), len(accepted)]
    for start, end in itertools.pairwise(cuts):
        part = pa.Table.from_pylist([row for _, row in accepted[start:end]], arrow_schema(columns))
        now = max(one.second for one, _ in accepted[:end])
        horizon, left, before = F.lit(at(now - 20)), None, None
        earlier = view
        if view is not None:
            there = {}
            for row in view.to_pylist():
                there.setdefault(row["k"], []).append(row)
            # The smallest input: current versions, and those that end after a late record of the key.
            since = {}
            for one, _ in accepted[start:end]:
                newest = max((r["valid_from"] for r in there.get(one.k, [])), default=None)
                if newest is not None and at(one.second) < newest:
                    since[one.k] = min(since.get(one.k, newest), at(one.second))
            needed = [
                r["valid_to"] is None or (r["k"] in since and r["valid_to"] > since[r["k"]])
                for r in view.to_pylist()
            ]
            before, left = view.filter(pa.array(needed)), view.filter(pa.array([not n for n in needed]))
        rows = versioned_table.fold(
            None if before is None else spark.createDataFrame(before),
            spark.createDataFrame(part, columns),
            key=["k"],
            horizon=horizon,
            new_version_on=ON,
        ).toArrow()
        whole = rows if left is None else pa.concat_tables([left.select(rows.column_names), rows])
        view = versioned_table.drop_expired(spark.createDataFrame(whole), horizon).toArrow()
        model = expected([one for one, _ in accepted[:end]], 20)
        found = version_rows(versioned_table.collapse_repeats(spark.createDataFrame(view), ["k"], ON))
        assert found == model
        # Without Spark: from all existing rows, and from the smallest input.
        limits = {0: int(at(now - 20).timestamp() * 1e6)}
        without = version_rows(fold(earlier, part, ["k"], limits, ON))
        assert without == model
        some = version_rows(fold(before, part, ["k"], limits, ON))
        assert {*some} <= {*model}
        assert {one for one in model if one[5] is None} <= {*some}
    assert len(model) < len(accepted) / 2


def table(**more: Any) -> VersionedTable:
    about = {"key": "k", "schema": SCHEMA, "history_retention": RETENTION, "tombstone": "n is null"}
    return VersionedTable("accounts", **{**about, "new_version_on": ON, **more})


def stream(**more: Any) -> Stream:
    about = {"key": "k", "schema": StructType([SCHEMA["k"], SCHEMA["timestamp"]])}
    return Stream("sales", **{**about, **more})


WIDE = StructType(
    [
        *SCHEMA.fields,
        StructField("till", TimestampType()),
        StructField("notes", MapType(StringType(), StringType())),
    ]
)
JOINED = ["right.tier", "right.n", "right.valid_from as since", "right.valid_to as until"]


def test_late_record_splits_repeated_versions(spark: SparkSession) -> None:
    accounts = table(history_retention=timedelta(hours=1))
    names = accounts.map_values("tier", "city", "n * 10 as tens", name="names")
    known = accounts.filter("tier <> 'z'", name="known")
    joins = [
        stream().left_join(accounts, name="joined", select=JOINED),
        stream().left_join(names, name="named", select=["right.tens"]),
        stream().left_join(known, name="kept", select=["right.n"]),
        stream().left_join(accounts, name="young", select=["right.n"], max_age=timedelta(seconds=20)),
    ]
    driver = TopologyTestDriver(*joins, spark=spark)

    def versions(name: str = "accounts") -> list[tuple[Any, ...]]:
        rows = driver.versions(name)
        return [(r["tier"], r["n"], seconds(r["valid_from"]), seconds(r["valid_to"])) for r in rows]

    def asked(*times: int) -> dict[str, list[Any]]:
        for one in joins:
            driver.read(one.name)
        driver.pipe("sales", *[{"k": "a", "timestamp": at(t)} for t in times])
        return {one.name: driver.read(one.name) for one in joins}

    def put(*records: tuple[str | None, int, int]) -> None:
        rows = [{"k": "a", "tier": t, "n": n, "timestamp": at(second)} for t, n, second in records]
        driver.pipe("accounts", *rows)

    put(("x", 1, 10), ("x", 2, 20), ("x", 3, 40), (None, 4, 50), (None, 5, 60))
    assert versions() == [("x", 1, 10, 50), (None, 4, 50, None)]
    found = asked(9, 45, 70)
    assert [(r["n"], seconds(r["since"]), seconds(r["until"])) for r in found["joined"]] == [
        (None, None, None),
        (1, 10, 50),
        (4, 50, None),
    ]
    assert [r["tens"] for r in found["named"]] == [None, 10, 40]
    # A condition that is null does not hold.
    assert [r["n"] for r in found["kept"]] == [None, 1, None]
    # The age counts from the start of the version.
    assert [r["n"] for r in found["young"]] == [None, None, 4]
    assert driver.store("accounts").get("a")["n"] == 4  # type: ignore[index]
    assert driver.store("accounts").get("a", at(45))["valid_from"] == at(10)  # type: ignore[index]

    # Another value comes in between: the record after it, so far a repeat, starts a new version.
    put(("z", 6, 30))
    assert versions() == [("x", 1, 10, 30), ("z", 6, 30, 40), ("x", 3, 40, 50), (None, 4, 50, None)]
    found = asked(25, 30, 45)
    assert [r["n"] for r in found["joined"]] == [1, 6, 3]
    assert [r["tens"] for r in found["named"]] == [10, 60, 30]
    assert [r["n"] for r in found["kept"]] == [1, None, 3]
    # When that value is replaced, the two versions are one again; an earlier repeat moves its start.
    put(("x", 7, 30), ("x", 0, 5))
    assert versions() == [("x", 0, 5, 50), (None, 4, 50, None)]
    assert [r["tens"] for r in driver.versions("names")] == [0, 40]
    # A deletion ends a version; the next record starts a new one.
    driver = TopologyTestDriver(accounts, spark=spark)
    put(
        *(("x", 1, 10), ("x", 2, 20), ("x", 3, 40), (None, 4, 50), (None, 5, 60)),
        *(("z", 6, 30), ("x", 7, 30), ("x", 0, 5)),
    )
    driver.pipe("accounts", {"k": "a", "timestamp": at(15), "is_tombstone": True})
    assert versions() == [("x", 0, 5, 15), (None, None, 15, 20), ("x", 2, 20, 50), (None, 4, 50, None)]
    store = driver.store("accounts")
    assert store.put("a", {"tier": "x", "n": 8}, at(25)) == at(50)
    assert store.delete("a", at(70))["n"] == 4  # type: ignore[index]
    assert store.get("a") is None


def test_every_reader_returns_same_versions(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers with and without Spark find the same versions: in a view that has all rows of its log,
    and in one that lags behind, whose segments are read in part."""
    monkeypatch.setattr(view_module, "SEGMENT_ROWS", 8)
    random, arrived = Random(3), list[Change]()
    for n in range(16):
        arrived += random_changes(random, f"k{n:02}", random.randint(1, 10), 60)
    random.shuffle(arrived)
    arrived.sort(key=lambda one: one.second + random.choice([0, 0, 10, 30]))
    for name in ("accounts", "sales"):
        (tmp_path / name).mkdir()
    source, warehouse = FilesSource(str(tmp_path / "accounts")), str(tmp_path / "warehouse")
    accounts = table(source=source, partitions=1)
    sales = stream(source=FilesSource(str(tmp_path / "sales")), partitions=1)
    joined = sales.left_join(accounts, name="joined", select=["left.k", *JOINED])
    stores = stores_of(warehouse, spark)

    def land(name: str, file: int, rows: Sequence[dict[str, Any]]) -> None:
        lines = "\n".join(json.dumps(r, default=datetime.isoformat) for r in rows)
        (tmp_path / name / f"{file}.jsonl").write_text(lines)

    cuts = [0, random.randrange(len(arrived) // 3, len(arrived)), len(arrived)]
    for file, (start, end) in enumerate(itertools.pairwise(cuts)):
        land("accounts", file, [one.row for one in arrived[start:end]])
        # After the second run, the view lags behind its log.
        freshness: Any = timedelta(days=1) if file else "every_run"
        node = replace(accounts, freshness=freshness)
        run_once(node, stores)
        store, model = stores(node), expected(arrived[:end], 20)
        now = max(one.second for one in arrived[:end])
        live = [one for one in model if one[5] is None and not one[6]]
        then = [as_of(model, one[0], now - 10, now - 20) for one in model]
        asked = at(now - 10).isoformat()
        assert version_rows(store.read("versions")) == model
        assert version_rows(look_up(warehouse, "accounts", "versions")) == model
        assert (
            version_rows(store.read("current")) == version_rows(look_up(warehouse, "accounts")) == live
        )
        was = sorted({one for one in then if one is not None})
        assert version_rows(store.read("current", asked)) == was
        assert version_rows(look_up(warehouse, "accounts", as_of=asked)) == was
        assert [one.name for one in audit(store) if not one.passed] == []
    times = [(f"k{n:02}", second) for n in range(16) for second in (now - 15, now - 3, now + 1)]
    land("sales", 0, [{"k": k, "timestamp": at(second)} for k, second in times])
    run_once(sales, stores)
    run_once(joined, stores)
    found = stores(joined).read().select("k", "timestamp", "n", "since", "until").toArrow().to_pylist()
    answers = {(k, s): as_of(model, k, s, now - 20) for k, s in times}
    nothing = (None,) * 3
    told_by_join = {
        (r["k"], seconds(r["timestamp"])): (r["n"], seconds(r["since"]), seconds(r["until"]))
        for r in found
    }
    assert told_by_join == {p: nothing if one is None else one[3:6] for p, one in answers.items()}
    # Another ``new_version_on`` rebuilds the view from the log.
    other = table(source=source, partitions=1, new_version_on=["city"])
    by_city = [replace(one, tier="") for one in arrived]
    tiers = [(*one[:1], *one[2:]) for one in expected(by_city, 20)]
    assert [(*one[:1], *one[2:]) for one in version_rows(stores(other).read("versions"))] == tiers
    stores(other).catch_up(now=True)
    assert [(*one[:1], *one[2:]) for one in version_rows(stores(other).read("versions"))] == tiers
    every = table(source=source, partitions=1, new_version_on=None)
    stores(every).catch_up(now=True)
    rows = stores(every).read("versions")
    assert "old" not in rows.columns
    assert rows.count() > len(model)


class Live:
    """Tables and sales that read files, and the runs of these and of their joins."""

    def __init__(self, root: Path, spark: SparkSession) -> None:
        self.root, self.spark, self.files = root, spark, itertools.count()
        self.warehouse = str(root / "warehouse")
        for name in ("accounts", "sales"):
            (root / name).mkdir()

    def table(self, **more: Any) -> VersionedTable:
        source = FilesSource(str(self.root / "accounts"))
        return table(source=source, partitions=1, history_retention=timedelta(hours=1), **more)

    def sales(self) -> Stream:
        return stream(source=FilesSource(str(self.root / "sales")), partitions=1)

    def run(self, node: Stream, *rows: dict[str, Any], at_: int | None = None) -> None:
        lines = "\n".join(json.dumps({"k": "a", **r}, default=datetime.isoformat) for r in rows)
        if rows:
            (self.root / node.name / f"{next(self.files)}.jsonl").write_text(lines)
        run_once(node, stores_of(self.warehouse, self.spark), recorded_at=at_)

    def versions(self, node: VersionedTable, n: str = "n", tier: str = "tier") -> list[tuple[Any, ...]]:
        """Returns the versions; both readers must give the same rows."""
        store = stores_of(self.warehouse, self.spark)(node)
        here, there = store.read("versions").toArrow(), look_up(self.warehouse, node.name, "versions")
        rows = [sorted(map(repr, r.select(here.column_names).to_pylist())) for r in (here, there)]
        assert rows[0] == rows[1]
        told = here.sort_by("valid_from").to_pylist()
        return [(r[tier], r[n], seconds(r["valid_from"]), seconds(r["valid_to"])) for r in told]


def change(tier: str, n: int, second: int, **more: Any) -> dict[str, Any]:
    return {"tier": tier, "n": n, "timestamp": at(second), **more}


def test_explain_repeat_that_a_repeat_replaced(spark: SparkSession, tmp_path: Path) -> None:
    live = Live(tmp_path, spark)
    live.run(live.table(), change("x", 0, 10), change("x", 1, 20), change("x", 2, 20))
    found = explain("accounts", warehouse=live.warehouse, offset="0:1")
    last = found.decisions[-1]
    assert (last.rule, last.because) == (
        "replaced",
        "offset 0:2 has the same timestamp and came later",
    )


def test_explain_repeated_record(spark: SparkSession, tmp_path: Path) -> None:
    live = Live(tmp_path, spark)
    accounts, sales = live.table(), live.sales()
    joined = sales.left_join(accounts, name="joined", select=["right.n"])
    live.run(accounts, change("x", 0, 10), change("x", 1, 20), change("y", 2, 40))
    live.run(sales, {"timestamp": at(30)})
    live.run(joined)

    def why(name: str, offset: int) -> tuple[str, dict[int, str]]:
        found = explain(name, warehouse=live.warehouse, offset=f"0:{offset}")
        return found.decisions[-1].rule, {c.record.offset: c.rule for c in found.candidates}

    assert why("joined", 0) == ("as_of", {0: "as_of", 2: "other_time"})
    assert [why("accounts", n)[0] for n in range(3)] == ["applied", "repeated", "applied"]
    # A late record is now the first of its version, and the join would find it.
    live.run(accounts, change("x", 3, 5))
    assert why("joined", 0) == ("corrected", {3: "recorded_since", 0: "as_of", 2: "other_time"})
    assert [why("accounts", n)[0] for n in range(4)] == [
        "repeated",
        "repeated",
        "applied",
        "out_of_order",
    ]
    # A record in between splits the version: the repeat after it starts a new one.
    live.run(accounts, change("z", 4, 15))
    rule, rules = why("joined", 0)
    assert (rule, rules[1], rules[4]) == ("corrected", "repeated", "recorded_since")
    assert [why("accounts", n)[0] for n in range(2)] == ["repeated", "applied"]
    known = key_history(live.warehouse, "accounts", ["a"], None, None, None)
    lanes = {("a",): Lane("a")}
    store = stores_of(live.warehouse, spark)(accounts)
    _add_versions(lanes, store, accounts)  # type: ignore[arg-type]
    begins = [seconds(datetime.fromtimestamp(b[0] / 1e6, timezone.utc)) for b in lanes[("a",)].bars]
    assert sorted(begins) == [5, 15, 20, 40]
    spans = [(one.record.offset, one.end is None) for one in known.spans]
    assert spans == [(3, False), (4, False), (1, False), (2, True)]
    with pytest.raises(StorageError, match="new_version_on"):
        lateness("joined", warehouse=live.warehouse)


def test_versions_survive_rename_and_truncation(spark: SparkSession, tmp_path: Path) -> None:
    """The view's value of the version before a row follows renamed columns, and survives a truncation
    of the log."""
    live = Live(tmp_path, spark)
    hour = 3_600_000_000
    live.run(live.table(), change("x", 0, 10), change("x", 1, 20), at_=hour)
    fields = [f for f in SCHEMA.fields if f.name != "n"]
    more = [StructField("amount", LongType()), StructField("note", StringType())]
    wide = live.table(
        schema=StructType([*fields, *more]),
        renamed={"n": "amount"},
        tombstone="amount is null",
        freshness=timedelta(days=1),
        log_retention=timedelta(hours=1),
    )
    live.run(wide, {"tier": "x", "amount": 2**40, "note": "!", "timestamp": at(30)}, at_=2 * hour)
    assert live.versions(wide, "amount") == [("x", 0, 10, None)]
    stores = stores_of(live.warehouse, spark)
    stores(wide).catch_up(now=True)
    assert live.versions(wide, "amount") == [("x", 0, 10, None)]
    live.run(wide, change("y", 3, 25) | {"amount": 3}, at_=3 * hour)
    assert live.versions(wide, "amount") == [("x", 0, 10, 25), ("y", 3, 25, 30), ("x", 2**40, 30, None)]
    assert [one.name for one in audit(stores(wide)) if not one.passed] == []
    assert truncate_logs(live.warehouse, spark, [wide], now=3 * hour + 1) == {"accounts": 3}
    stores(wide).rebuild_view()
    assert live.versions(wide, "amount") == [("x", 0, 10, 25), ("y", 3, 25, 30), ("x", 2**40, 30, None)]
    with pytest.raises(StorageError, match="its rows as of then were stored with the earlier value"):
        stores(replace(wide, new_version_on=["city"])).read("versions")
    # A renamed column gives the same versions, also from rows before the truncation.
    columns = [StructField("level" if f.name == "tier" else f.name, f.dataType) for f in wide.schema]
    on = ["level" if c == "tier" else c for c in wide.new_version_on or ()]
    names = {"n": "amount", "tier": "level"}
    named = replace(wide, schema=StructType(columns), new_version_on=on, renamed=names)
    live.run(named, {"level": "x", "amount": 4, "timestamp": at(40)}, at_=4 * hour)
    there = [("x", 0, 10, 25), ("y", 3, 25, 30), ("x", 2**40, 30, None)]
    assert live.versions(named, "amount", "level") == there
    stores(named).rebuild_view()
    assert live.versions(named, "amount", "level") == there


def test_expired_tombstone_does_not_revive_row(spark: SparkSession, tmp_path: Path) -> None:
    """The row's tombstone has expired, but a file of the view still contains the row."""
    live = Live(tmp_path, spark)
    plain = replace(live.table(new_version_on=None), history_retention=timedelta(seconds=20))
    live.run(plain, change("x", 1, 3), {"timestamp": at(4)})
    live.run(plain, change("other", 1, 30) | {"k": "b"})
    live.run(replace(plain, freshness=timedelta(days=1)), change("y", 2, 21))
    assert live.versions(plain) == [("y", 2, 21, None), ("other", 1, 30, None)]


# -- what follows versions -----------------------------------------------------------------------------

PLACES = StructType([SCHEMA["k"], StructField("name", StringType()), SCHEMA["timestamp"]])


@dataclass(frozen=True)
class Joined:
    """A result of a join of the accounts with their names, or a group of accounts."""

    key: Any
    values: tuple[Any, ...] | None
    second: int


class Followed:
    """The results by the definition, record by record: a record that repeats its version has none."""

    def __init__(self, left: bool) -> None:
        self.left = left
        self.newest: dict[str, dict[str, Change]] = {"accounts": {}, "names": {}}
        self.now: dict[str, int] = {}
        self.joined: list[Joined] = []
        self.counted: list[Joined] = []
        self._times: dict[Any, int] = {}
        self._groups: dict[Any, int] = {}
        self._ends: dict[Any, int] = {}

    def put(self, name: str, one: Change) -> None:
        now = self.now.get(name, one.second)
        if one.second < now - 20:
            return
        self.now[name] = max(now, one.second)
        old = self.newest[name].get(one.k)
        if old is not None and one.second < old.second:
            return
        self.newest[name][one.k] = one
        before = None if old is None or old.deleted else old
        after = None if one.deleted else one
        told = [None if row is None else (row.tier, row.city) for row in (before, after)]
        if name == "accounts" and told[0] is not None and told[0] == told[1]:
            return
        self._join(name, one, before)
        if name == "accounts":
            self._count(one, before, after)

    def _join(self, name: str, one: Change, before: Change | None) -> None:
        account, place = (self.newest[n].get(one.k) for n in ("accounts", "names"))
        account = None if account is None or account.deleted else account
        place = None if place is None or place.deleted else place
        other = place if name == "accounts" else account
        if self.left:
            says = account or (name == "accounts" and (place or before))
            gone = account is None
        else:
            says, gone = other, account is None or place is None
        if not says:
            return
        second = max([one.second] if other is None else [one.second, other.second])
        # Results of two versioned tables never go back in time.
        second = self._times[one.k] = max(second, self._times.get(one.k, second))
        values = None if gone else (account.tier, account.city, place.tier if place else None)  # type: ignore[union-attr]
        self.joined.append(Joined(one.k, values, second))

    def _count(self, one: Change, before: Change | None, after: Change | None) -> None:
        for gone, there in (
            ((before, None), (None, after))
            if (before is None or after is None or before.tier != after.tier)
            else ((before, after),)
        ):
            if gone is None and there is None:
                continue
            tier = (gone or there).tier  # type: ignore[union-attr]
            self._groups[tier] = self._groups.get(tier, 0) + (there is not None) - (gone is not None)
            second = self._ends[tier] = max(one.second, self._ends.get(tier, one.second))
            self.counted.append(Joined(tier, (self._groups[tier],), second))


@pytest.mark.parametrize(
    "left", [True, pytest.param(False, marks=pytest.mark.endurance)], ids=["left", "inner"]
)
def test_joins_and_aggregates_use_versions(spark: SparkSession, left: bool) -> None:
    """Joins and aggregates follow versions for any order of arrival and any runs, with late records,
    ties, deletions, and nulls."""
    random = Random(f"followed {left}")
    names = VersionedTable(
        "names", key="k", schema=PLACES, history_retention=RETENTION, tombstone="name is null"
    )
    accounts = table()
    chosen = ["left.k", "left.tier", "left.city", "right.name"]
    join = accounts.left_join if left else accounts.join
    joined = join(names, name="joined", select=chosen)
    counted = accounts.group_by("tier").count(name="counted")
    driver, model = TopologyTestDriver(joined, counted, spark=spark), Followed(left)
    arrived: dict[str, list[Change]] = {}
    for name in ("accounts", "names"):
        some = [one for n in range(6) for one in random_changes(random, f"k{n}", 9, 60)]
        random.shuffle(some)
        arrived[name] = sorted(some, key=lambda one: one.second + random.choice([0, 0, 10, 30]))
    for start in (0, 27):
        for name in ("names", "accounts"):
            part = arrived[name][start : start + 27]
            for one in part:
                model.put(name, one)
            rows = [one.row for one in part]
            if name == "names":
                rows = [{"k": r["k"], "name": r["tier"], "timestamp": r["timestamp"]} for r in rows]
            driver.pipe(name, *rows)
    found = [
        Joined(
            r["k"],
            None if r["is_tombstone"] else (r["tier"], r["city"], r["name"]),
            seconds(r["timestamp"]) or 0,
        )
        for r in driver.read("joined")
    ]
    assert found == model.joined
    groups = [
        Joined(r["tier"], (r["count"],), seconds(r["timestamp"]) or 0) for r in driver.read("counted")
    ]
    assert groups == model.counted
    repeats = len(arrived["accounts"]) - len({(one.k, one.second) for one in arrived["accounts"]})
    assert repeats
    assert 10 < len(found) < 80


def test_explain_names_first_record_of_version(spark: SparkSession, tmp_path: Path) -> None:
    """The explanation names no record that repeats the version: such a record has no result."""
    live = Live(tmp_path, spark)
    accounts, sales = live.table(), live.sales()
    counted = accounts.group_by("tier").count(name="counted")
    seen = sales.to_table(name="seen")
    joined = accounts.left_join(seen, name="joined", select=["left.k", "left.tier"])
    live.run(accounts, change("x", 0, 10), change("x", 1, 20), change("y", 2, 40))
    live.run(sales, {"timestamp": at(30)})
    for node in (seen, counted, joined):
        live.run(node)

    def triggers(name: str) -> list[str]:
        rows = look_up(live.warehouse, name, "log").num_rows
        found = [explain(name, warehouse=live.warehouse, offset=f"0:{n}") for n in range(rows)]
        told = [d.because for one in found for d in one.decisions if d.rule == "triggered"]
        return [because.split(",")[0] for because in told]

    assert triggers("counted") == ["accounts 0:0", "accounts 0:2", "accounts 0:2"]
    assert triggers("joined") == ["accounts 0:0", "seen 0:0", "accounts 0:2"]


def test_training_set_uses_versions(spark: SparkSession, tmp_path: Path) -> None:
    """A training set has the version as of each row's time, from all recorded rows. ``max_age`` is the
    age of the version, not of a record."""
    live, random = Live(tmp_path, spark), Random(11)
    accounts, sales = replace(live.table(), history_retention=RETENTION), live.sales()
    arrived = random_changes(random, "a", 25, 60)
    arrived.sort(key=lambda one: one.second + random.choice([0, 0, 10, 15]))
    live.run(accounts, *[one.row for one in arrived])
    now = max(one.second for one in arrived)
    times = range(now - 19, now + 5)
    live.run(sales, *[{"timestamp": at(second)} for second in times])
    model = expected(arrived, 20)
    views = [
        FeatureView(accounts, columns=["n", "valid_from"], as_known="now"),
        FeatureView(
            accounts, columns=["n"], as_known="now", max_age=timedelta(seconds=6), prefix="young_"
        ),
    ]
    declared = TrainingSet("examples", sales, tuple(views))
    TrainingRun(declared, str(tmp_path / "set"), live.warehouse, spark).run()
    found = spark.read.format("delta").load(str(tmp_path / "set")).toArrow().to_pylist()
    answers = {seconds(r["timestamp"]): (r["n"], seconds(r["valid_from"]), r["young_n"]) for r in found}
    right: dict[int | None, tuple[Any, ...]] = {}
    for second in times:
        version = as_of(model, "a", second, now - 20)
        begin = None if version is None else version[4]
        young = version is not None and second - version[4] <= 6
        n = None if version is None else version[3]
        right[second] = (n, begin, n if young else None)
    assert answers == right
    assert len({n for n, _, _ in right.values()}) > 2


def test_record_based_consumers_are_refused() -> None:
    accounts, other = table(), VersionedTable("o", key="k", schema=SCHEMA, history_retention=RETENTION)

    @dg.asset(partitions_def=dg.DailyPartitionsDefinition("2024-01-01"))
    def report() -> None: ...

    for make, said in (
        (lambda: accounts.join(other, name="m", select=["left.n"]), "a table-table join to use only"),
        (
            lambda: other.join(accounts, name="m", select=["right.timestamp as t"]),
            "got \\['timestamp'\\]",
        ),
        (lambda: other.join(accounts, name="m", history="complete"), "a table-table join"),
        (lambda: accounts.join(other, foreign_key="city", name="m"), "a foreign-key join"),
        (lambda: accounts.group_by("n").count(name="m"), "group_by to use only"),
        (lambda: accounts.group_by("city").sum("n", name="m"), "group_by to use only"),
        (lambda: accounts.group_by("year(timestamp) as y").count(name="m"), "got \\['timestamp'\\]"),
        (lambda: stream().join(accounts, name="m", corrected_for=RETENTION), "corrected_for"),
        (lambda: stream().join(accounts, name="m", as_known="when_recorded"), "what was known"),
        (lambda: FeatureView(accounts), "what was known"),
        (lambda: accounts.to_stream(name="m"), "to_stream"),
        (lambda: accounts.map_values("tier", name="m"), "without \\['city'\\]"),
        (lambda: accounts.map_values("n as tier", "city", name="m"), "without \\['tier'\\]"),
        (lambda: accounts.map_values("upper(tier) as tier", "city", name="m"), "without \\['tier'\\]"),
        (lambda: accounts.filter("n > 1", name="m"), "got one over \\['n'\\]"),
        (lambda: accounts.filter("year(timestamp) > 1", name="m"), "got one over \\['timestamp'\\]"),
        (lambda: accounts.filter("true", name="m", materialized=Materialized()), "without versions"),
        (lambda: _require_reader(report, accounts), "partitions with a schedule"),
        (lambda: table(new_version_on=[]), "a list of value columns"),
        (lambda: table(new_version_on="tier"), "a list of value columns"),
        (lambda: table(new_version_on=["tier", "tier"]), "a list of value columns"),
        (lambda: table(new_version_on=["k"]), "to name value columns"),
        (lambda: table(new_version_on=["no"]), "to name value columns"),
        (lambda: table(new_version_on=["tier"], schema=WIDE, valid_until="till"), "valid_until"),
        (lambda: table(new_version_on=["notes"], schema=WIDE), "can be compared"),
    ):
        with pytest.raises(TopologyError, match=said) as error:
            make()
        assert "new_version_on" in str(error.value)
    kept = Materialized(history_retention=RETENTION)
    mapped = accounts.map_values("*", name="m", materialized=kept)
    assert mapped.new_version_on == ON  # type: ignore[attr-defined]
    assert accounts.filter("city = 'p'", name="f").new_version_on == ON  # type: ignore[attr-defined]
    assert table(new_version_on=["till"], schema=WIDE, valid_until="till").new_version_on == ("till",)
    assert code_version(table()) != code_version(table(new_version_on=None))
    without = view_schema(table(new_version_on=None))
    assert [c for c in view_schema(table()).names if c not in without.names] == ["old"]
