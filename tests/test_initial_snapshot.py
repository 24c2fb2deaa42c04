"""A table that starts with a snapshot and takes the changes of its source."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest
from deltalake import write_deltalake
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from pyspark.sql.types import StringType, StructField, StructType, TimestampType

from tests.market import materialized, run
from vt_dagster import (
    DeltaSource,
    FilesSource,
    SnapshotSource,
    Stream,
    TopologyError,
    VersionedTable,
    WarehouseResource,
    build_asset,
    build_sensor,
    explain,
    lateness,
)
from vt_dagster.errors import ContractError, SourceError
from vt_dagster.orchestration.translator import code_version
from vt_dagster.runs.audit import audit
from vt_dagster.runs.run import Run, run_once
from vt_dagster.storage.asset_store import AssetStore, stores_of

pytestmark = pytest.mark.usefixtures("few_rows")


DAY = timedelta(days=1)
BEGIN = datetime(2024, 1, 1, tzinfo=timezone.utc)
SCHEMA = StructType(
    [
        StructField("k", StringType()),
        StructField("v", StringType()),
        StructField("at", TimestampType()),
    ]
)
TAKEN = 10
"""The time of the snapshot, in seconds after BEGIN."""
Version = tuple[Any, ...]


def at(second: int) -> datetime:
    return BEGIN + timedelta(seconds=second)


@dataclass
class Accounts:
    """``table`` takes changes and starts with a snapshot. ``alone`` takes only the changes."""

    root: Path
    spark: SparkSession
    about: dict[str, Any] = field(default_factory=dict[str, Any])
    files: dict[str, Any] = field(default_factory=dict[str, Any])
    dump: dict[str, Any] = field(default_factory=dict[str, Any])
    table: VersionedTable = field(init=False)
    alone: VersionedTable = field(init=False)

    def __post_init__(self) -> None:
        for name in ("changes", "dump"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        start = SnapshotSource(
            str(self.root / "dump"), "jsonl", **{"dump_time": "%Y-%m-%dT%H%M%SZ", **self.dump}
        )
        about = {"key": "k", "schema": SCHEMA, "timestamp": "at", "history_retention": DAY}
        about |= {"deleted_when": "op = 'D'", "partitions": 2, **self.about}
        source = FilesSource(str(self.root / "changes"), **self.files)
        self.alone = VersionedTable("alone", **about, source=source)
        self.table = VersionedTable("accounts", **{"start": start, **about}, source=source)
        self.stores = stores_of(str(self.root / "warehouse"), self.spark)

    def land(self, name: str, *changes: tuple[str, int, str | None]) -> None:
        """Writes a file of changes. A change: key, second, value (None = the key is deleted)."""
        lines = [
            json.dumps({"k": k, "v": v, "at": at(t).isoformat(), "op": "U" if v else "D"})
            for k, t, v in changes
        ]
        (self.root / "changes" / f"{name}.jsonl").write_text("\n".join(lines))

    def snapshot(self, *rows: Any, second: int = TAKEN) -> None:
        """Writes the snapshot. A row: key, value, perhaps the second of its own time; or a raw line."""
        lines = [
            row
            if isinstance(row, str)
            else json.dumps(
                {"k": row[0], "v": row[1], **({"at": at(row[2]).isoformat()} if row[2:] else {})}
            )
            for row in rows
        ]
        name = f"{at(second):%Y-%m-%dT%H%M%SZ}.jsonl"
        (self.root / "dump" / name).write_text("\n".join(lines))

    def take(self, table: VersionedTable | None = None, **asked: Any) -> dict[str, int]:
        """Runs a table once. Returns the counts of the commit, empty if nothing is new."""
        commit = run_once(table or self.table, self.stores, **asked).commit
        return {} if commit is None else commit.counts

    def store(self, table: VersionedTable | None = None) -> AssetStore:
        store = self.stores(table or self.table)
        assert isinstance(store, AssetStore)
        return store

    def versions(self, table: VersionedTable | None = None) -> list[Version]:
        rows = self.store(table).read("versions").collect()
        return sorted((r["k"], second(r["valid_from"]), second(r["valid_to"]), r["v"]) for r in rows)


def second(moment: datetime | None) -> Any:
    if moment is None:
        return float("inf")
    return round((moment.astimezone(timezone.utc) - BEGIN).total_seconds())


def value_as_of(versions: Sequence[Version], key: str, moment: int) -> str | None:
    """The value of a key as of a time, None if it has none."""
    found = [v for k, begin, end, v in versions if k == key and begin <= moment < end]
    assert len(found) <= 1
    return found[0] if found else None


@pytest.fixture
def accounts(tmp_path: Path, spark: SparkSession) -> Accounts:
    return Accounts(tmp_path, spark)


def test_snapshot_then_changes(accounts: Accounts) -> None:
    """A key without changes, keys with a change before or after the snapshot, and a deleted key."""
    accounts.land("1", ("b", 12, "b12"), ("c", 4, "c4"), ("d", 3, "d3"), ("d", 7, None))
    accounts.snapshot(("a", "a0"), ("b", "b0"), ("c", "c4"), ("d", "d3"))
    counts = accounts.take()
    assert counts == {"in": 8, "applied": 6, "late": 0, "covered": 2, "quarantined": 0}
    expected = [
        ("a", 10, float("inf"), "a0"),
        ("b", 10, 12, "b0"),
        ("b", 12, float("inf"), "b12"),
        ("c", 4, float("inf"), "c4"),
        ("d", 3, 7, "d3"),
        ("d", 7, float("inf"), None),
    ]
    assert accounts.versions() == expected
    # The snapshot is taken once, and later changes win.
    assert accounts.take() == {}
    accounts.land("2", ("a", 11, "a11"), ("e", 1, "e1"))
    assert accounts.take()["in"] == 2
    assert accounts.versions()[:2] == [("a", 10, 11, "a0"), ("a", 11, float("inf"), "a11")]
    assert [one.name for one in audit(accounts.store()) if not one.passed] == []


Changes = list[tuple[int, str | None, bool]]
"""The changes of a key: second, value, and whether the change arrives after the snapshot's run."""
CHANGES = st.lists(
    st.tuples(st.integers(2, 18), st.sampled_from(["x", "y", "z", None]), st.booleans()),
    max_size=4,
    unique_by=lambda one: one[0],
)


KEY = st.tuples(st.booleans(), st.booleans(), CHANGES)


@given(keys=st.lists(KEY, min_size=60, max_size=60))
@settings(
    max_examples=1,
    phases=[Phase.generate],  # shrinking would take long, and an example has many cases
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.large_base_example],
)
def test_snapshot_and_changes_equal_changes_alone(
    spark: SparkSession,
    tmp_path_factory: pytest.TempPathFactory,
    keys: list[tuple[bool, bool, Changes]],
) -> None:
    """Each key is a separate case: whether it exists before the first change, whether its row of the
    snapshot has its own time, and its changes, some of which arrive only after the snapshot."""
    one = Accounts(tmp_path_factory.mktemp("start"), spark)
    named = {f"k{i}": about for i, about in enumerate(keys)}
    every = [(key, *change) for key, (_, _, own) in named.items() for change in own]
    truth = [(key, 0, "before") for key, (there, _, _) in named.items() if there]
    truth += [(key, t, v) for key, t, v, _ in every]

    def true(key: str, moment: int) -> tuple[int, str | None]:
        return max(((t, v) for k, t, v in truth if k == key and t <= moment), default=(0, None))

    one.land("1", *[r[:3] for r in every if not r[3]])
    rows = [("always", 0, "there", True)]
    rows += [(key, *true(key, TAKEN), timed) for key, (_, timed, _) in named.items()]
    one.snapshot(*[(k, v, t) if timed else (k, v) for k, t, v, timed in rows if v is not None])
    one.take()
    one.land("2", *[r[:3] for r in every if r[3]])
    one.take()
    one.take(one.alone)
    ours, theirs = one.versions(), one.versions(one.alone)
    for key, (_, timed, own) in named.items():
        first = min((t for t, _, _ in own), default=99)
        for moment in range(first, 20):
            assert value_as_of(ours, key, moment) == value_as_of(theirs, key, moment), (key, moment)
        for moment in range(TAKEN, 20):
            assert value_as_of(ours, key, moment) == true(key, moment)[1], (key, moment)
        before = min((t for t, _, late in own if not late), default=99)
        if first <= TAKEN and (timed or before <= TAKEN):  # then each version is equal too
            assert [v for v in ours if v[0] == key] == [v for v in theirs if v[0] == key]


def test_snapshot_is_applied_after_changes_of_first_run(tmp_path: Path, spark: SparkSession) -> None:
    """However changes are split into runs, a row of the snapshot is not applied before a change of the
    initial load that covers it."""
    one = Accounts(tmp_path, spark, {"ready": "initial_load"}, {"max_files_per_run": 1})
    for n in (1, 2, 3):
        one.land(str(n), ("a", n, f"a{n}"), (f"b{n}", n, None))
    one.snapshot(("a", "a3"), ("b2", "gone"), ("z", "z0"))
    one.take()
    one.land("4", ("z", 12, "z12"))
    assert "covered" in one.take()
    ready = [store.commit.ready_at for store in (one.store().head(),) if store]
    assert ready == [None]
    assert one.take()["covered"] == 2
    head = one.store().head()
    assert head is not None
    assert head.commit.ready_at is not None
    assert head.commit.start is not None
    assert (head.commit.start.batch, sum(e - s for s, e in head.commit.start.offsets.values())) == (
        3,
        1,
    )
    assert one.take()["covered"] == 0
    versions = one.versions()
    assert [v for v in versions if v[0] == "a"] == [
        *[("a", n, n + 1, f"a{n}") for n in (1, 2)],
        ("a", 3, float("inf"), "a3"),
    ]
    assert [v[3] for v in versions if v[0] == "b2"] == [None]
    assert [v[1:] for v in versions if v[0] == "z"] == [(10, 12, "z0"), (12, float("inf"), "z12")]
    # ``start`` is declared later, for a table that has already run.
    bare = replace(one.alone, source=replace(one.alone.source, max_files_per_run=None))
    one.take(bare)
    later = replace(one.table, name="alone", ready=None)
    assert one.take(later)["covered"] == 2
    assert [v for v in one.versions(later) if v[0] != "z"] == [v for v in versions if v[0] != "z"]


def test_snapshot_rows_are_never_late(tmp_path: Path, spark: SparkSession) -> None:
    """The snapshot's rows are still valid, so none is late. At equal times, a change counts."""
    one = Accounts(tmp_path, spark, {"history_retention": timedelta(seconds=5)})
    one.land("1", ("b", 100, "b"), ("c", 100, "c"))
    one.snapshot(("a", "old", 1), ("b", "b", 2), ("c", "other", 100), ("d", "d"))
    assert one.take()["late"] == 0
    current = {r["k"]: (r["v"], second(r["at"])) for r in one.store().read("current").collect()}
    assert current == {"a": ("old", 1), "b": ("b", 100), "c": ("c", 100), "d": ("d", TAKEN)}
    told = lateness("accounts", grace=["1s"], warehouse=str(tmp_path / "warehouse"))
    assert {(choice.of, choice.late) for choice in told.choices} == {(5, 0)}


@pytest.mark.parametrize("place", ["commit", "catch_up"])
def test_killed_run_takes_snapshot_once(
    accounts: Accounts, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """If a run is killed before its commit, or just after it, the snapshot is still taken once,
    together with the changes."""
    accounts.land("1", ("b", 3, "b3"))
    accounts.snapshot(("a", "a0"), ("b", "b3"))
    killed = Run.pin(accounts.table, accounts.stores)
    results = killed.operate(killed.read())

    def dies(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(AssetStore, place, dies)
        with pytest.raises(KeyboardInterrupt):
            killed.commit(results)
    assert accounts.take() == ({"in": 3, **_FATES} if place == "commit" else {})
    assert accounts.versions() == [("a", 10, float("inf"), "a0"), ("b", 3, float("inf"), "b3")]
    assert accounts.store().read("log").count() == 2
    head = accounts.store().head()
    assert head is not None
    assert (head.commit.batch, head.commit.inputs) == (1, {"files": {0: 1}})


_FATES = {"applied": 2, "late": 0, "covered": 1, "quarantined": 0}


def test_explain_origin_of_snapshot_rows(accounts: Accounts) -> None:
    accounts.land("1", ("b", 3, "b3"))
    accounts.snapshot(("a", "a0"), ("b", "b3"))
    accounts.take()
    warehouse = str(accounts.root / "warehouse")

    def told(key: str) -> tuple[str, tuple[str, ...]]:
        origin = explain("accounts", warehouse=warehouse, key=key).origin
        assert origin is not None
        return origin.kind, origin.names

    assert told("a") == ("snapshot", (f"2024-01-01T000010Z.jsonl in {accounts.root / 'dump'}",))
    kind, (name,) = told("b")
    assert (kind, name.rpartition("/")[2]) == ("files", "1.jsonl")


def test_bad_rows_of_snapshot_and_changes(tmp_path: Path, spark: SparkSession) -> None:
    """The changes and the snapshot each have their own allowed share of bad rows. The quarantine has
    bad rows with their source."""
    one = Accounts(tmp_path, spark, files={"max_bad_share": 0.4}, dump={"max_bad_share": 0.5})
    (tmp_path / "changes" / "1.jsonl").write_text('{"k": "b", "at": "2024-01-01T00:00:03Z"}\n')
    one.snapshot("?", ("a", "a0"))
    assert one.take()["quarantined"] == 1
    rejected = one.store().quarantine()
    assert rejected is not None
    found = [(r["source"], r["reason"], r["raw"]) for r in rejected.collect()]
    assert found == [("2024-01-01T000010Z.jsonl", "unreadable", "?")]
    other = replace(one.table, name="other")
    (tmp_path / "changes" / "2.jsonl").write_text("?\n?\n?\n")
    with pytest.raises(ContractError, match=r"3 of 4 records are bad \(75.0%\)"):
        one.take(other)
    (tmp_path / "changes" / "2.jsonl").unlink()
    one.snapshot("?", "?", ("a", "a0"))
    with pytest.raises(ContractError, match="2 of 3 rows are bad"):
        one.take(other)
    one.snapshot(("a", "a0"), ("a", "a1"))
    with pytest.raises(SourceError, match="share their key"):
        one.take(other)
    one.snapshot(("a", "a0"), second=11)
    with pytest.raises(SourceError, match=r"expected one dump to start with in .*, found 2: 2024"):
        one.take(other)


@pytest.mark.parametrize("told", ["file_time", "at"])
def test_system_time_of_snapshot_rows(tmp_path: Path, spark: SparkSession, told: str) -> None:
    """Rows of the snapshot are recorded at the time of their run, changes at the time that
    ``recorded_at`` gives."""
    one = Accounts(tmp_path, spark, files={"recorded_at": told})
    one.land("1", ("b", 3, "b3"))
    one.snapshot(("a", "a0"), ("b", "b3"))
    before = datetime.now(timezone.utc)
    if told == "file_time":
        os.utime(tmp_path / "changes" / "1.jsonl", (at(5).timestamp(),) * 2)
    assert one.take()["covered"] == 1
    rows = one.store().read("log").collect()
    times = {r["k"]: r["recorded_at"].astimezone(timezone.utc) for r in rows}
    assert times["b"] == at(5 if told == "file_time" else 3)
    assert times["a"] >= before


def test_snapshot_from_delta_version(tmp_path: Path, spark: SparkSession) -> None:
    """A version of a Delta table is the start of a table whose changes are files. It may lack a column
    of the files."""
    path = str(tmp_path / "crm")
    kinds = pa.schema([("k", pa.string()), ("v", pa.string()), ("at", pa.timestamp("us", "UTC"))])
    for value in ("first", "second"):
        rows = {"k": ["a", "b"], "v": [value, value], "at": [at(10), at(10)]}
        write_deltalake(path, pa.table(rows, kinds), mode="overwrite")
    start = DeltaSource(path, mode="snapshots", start=0)
    one = Accounts(tmp_path, spark, {"start": start})
    one.table = replace(one.table, start=start)
    one.land("1", ("b", 5, "b5"))
    assert one.take()["covered"] == 1
    assert one.versions() == [("a", 10, float("inf"), "first"), ("b", 5, float("inf"), "b5")]
    head = one.store().head()
    assert head is not None
    assert head.commit.start is not None
    assert head.commit.start.what == f"version 0 of {path}"


def test_snapshot_start_in_dagster(accounts: Accounts) -> None:
    """The sensor requests a run for the snapshot alone. The run's log and metadata report it."""
    accounts.snapshot(("a", "a0"))
    start: Any = accounts.table.start
    table = replace(accounts.table, start=replace(start, upstream="crm/export"))
    asset, warehouse = build_asset(table), accounts.root / "warehouse"
    assert dg.AssetKey(["crm", "export"]) in asset.dependency_keys
    metadata = asset.metadata_by_key[dg.AssetKey("accounts")]
    assert metadata["vt_dagster/start"] == f"jsonl dumps {accounts.root / 'dump'}/*"
    resources = {"vt_dagster_warehouse": WarehouseResource(path=str(warehouse))}

    def tick() -> Any:
        return build_sensor(table).evaluate_tick(dg.build_sensor_context(resources=resources))

    (request,) = tick().run_requests
    instance, config = dg.DagsterInstance.ephemeral(), request.run_config
    result = run([asset], warehouse, instance=instance, run_config=config, raise_on_error=True)
    assert materialized(result, "accounts")["records_applied"] == 1
    assert "takes the dump 2024-01-01T000010Z.jsonl" in str(
        [entry.user_message for entry in instance.all_logs(result.run_id)]
    )
    assert not tick().run_requests
    assert accounts.versions() == [("a", 10, float("inf"), "a0")]


def test_invalid_start_is_refused(accounts: Accounts) -> None:
    dumps = accounts.table.start
    for about, said in (
        ({"start": FilesSource("dump")}, "a source of snapshots"),
        ({"start": DeltaSource("crm", mode="changes")}, "a source of snapshots"),
        ({"source": None}, "start needs a source of changes"),
        ({"source": dumps}, "start needs a source of changes"),
        ({"start": replace(dumps, ignore=["no"])}, "ignore must name value columns"),
        ({"start": replace(dumps, optional=["k"])}, "expected optional columns"),
    ):
        with pytest.raises(TopologyError, match=said) as error:
            replace(accounts.table, **about)
        assert str(error.value).startswith("accounts: ")
    assert code_version(accounts.table) != code_version(replace(accounts.table, start=None))
    assert not hasattr(Stream("s", key="k", schema=SCHEMA, timestamp="at"), "start")
