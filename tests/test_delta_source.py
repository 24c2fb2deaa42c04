"""Delta tables of other writers as sources: appended rows, change feeds and snapshots, by version."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote

import dagster as dg
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StringType, StructField, StructType

from tests.market import materialized, run
from vt_dagster import (
    DeltaSource,
    FilesSource,
    Stream,
    Table,
    TopologyError,
    VersionedTable,
    WarehouseResource,
    build_asset,
    build_sensor,
)
from vt_dagster.components.topology_component import AssetPart, make_asset
from vt_dagster.errors import RecordsGoneError, SourceError
from vt_dagster.provenance.explain import explain
from vt_dagster.runs.audit import audit
from vt_dagster.runs.replay import replay
from vt_dagster.runs.restate import restate
from vt_dagster.runs.run import Run, run_once
from vt_dagster.storage.asset_store import AssetStore, stores_of

pytestmark = pytest.mark.usefixtures("few_rows")


ROW = StructType(
    [
        StructField("id", StringType()),
        StructField("n", LongType()),
        StructField("day", StringType()),
    ]
)
KINDS = pa.schema([("id", pa.string()), ("n", pa.int64()), ("day", pa.string())])
FEED = {"delta.enableChangeDataFeed": "true"}
Row = tuple[Any, ...]


class Theirs:
    """A Delta table of another writer, partitioned by day."""

    def __init__(self, path: Path, **properties: str) -> None:
        self.path, self.properties = str(path), properties

    def append(self, *rows: Row, mode: Any = "append") -> None:
        columns = [[*row, None][:3] for row in rows]
        table = pa.Table.from_pylist([dict(zip(KINDS.names, r, strict=True)) for r in columns], KINDS)
        new = {"configuration": self.properties} if not Path(self.path).exists() else {}
        write_deltalake(self.path, table, mode=mode, partition_by=["day"], **new)  # type: ignore[call-overload]

    @property
    def table(self) -> DeltaTable:
        return DeltaTable(self.path)

    def times(self) -> list[int]:
        """The commit times of the versions in epoch milliseconds, newest first."""
        return [int(one["timestamp"]) for one in self.table.history()]


def table_from(name: str, theirs: Theirs, mode: Any, kind: Any = Table, **about: Any) -> Any:
    more = {"history_retention": timedelta(days=30)} if kind is VersionedTable else {}
    source = DeltaSource(theirs.path, mode, max_bad_share=0.5, **about)
    return kind(name, key="id", schema=ROW, source=source, **more)


@pytest.fixture
def take(spark: SparkSession, tmp_path: Path) -> Callable[..., dict[str, int]]:
    def one(node: Stream, **asked: Any) -> dict[str, int]:
        """Runs the node once; returns the counts of its commit, empty without new rows."""
        commit = run_once(node, stores_of(str(tmp_path / "warehouse"), spark), **asked).commit
        return {} if commit is None else commit.counts

    return one


@pytest.fixture
def store(spark: SparkSession, tmp_path: Path) -> Callable[[Stream], AssetStore]:
    return stores_of(str(tmp_path / "warehouse"), spark)


def log_of(store: AssetStore) -> list[Row]:
    rows = store.read("log").orderBy("offset").collect()
    return [(r["id"], r["n"], r["day"], r["is_tombstone"], r["timestamp"]) for r in rows]


def test_append_mode(take: Any, store: Any, tmp_path: Path) -> None:
    theirs = Theirs(tmp_path / "their table")
    theirs.append(("a", 1, "x"), ("b", 2, "é +%"))
    theirs.append(("c", 3))
    alone = table_from("alone", theirs, "append", Stream, start="earliest", max_versions_per_run=1)
    assert take(alone)["applied"] == 2
    assert take(alone)["applied"] == 1
    # a compaction changes no rows: no commit, and no row is consumed twice after it
    theirs.append(("d", 4, "x"))
    theirs.table.optimize.compact()
    assert take(alone)["applied"] == 1
    assert take(alone) == {}
    theirs.append(("d", 5, "x"), (None, 6, "x"))
    killed = Run.pin(alone, store)
    killed.operate(killed.read())
    assert take(alone, version=4) == {"in": 2, "applied": 1, "late": 0, "quarantined": 1}
    (bad,) = store(alone).quarantine().collect()
    assert (bad["reason"], bad["raw"]) == ("null_key", '{"n":6,"day":"x"}')
    assert bad["source"].startswith("version 4: part-")
    # one run over all versions gives the same log, with the times of the commits
    whole = table_from("whole", theirs, "append", Stream, start="earliest")
    assert take(whole)["in"] == 6
    assert log_of(store(whole)) == log_of(store(alone))
    found = {(r[0], r[1], r[2]): round(r[4].timestamp() * 1000) for r in log_of(store(whole))}
    times = theirs.times()[::-1]
    assert found == {
        ("a", 1, "x"): times[0],
        ("b", 2, "é +%"): times[0],
        ("c", 3, None): times[1],
        ("d", 4, "x"): times[2],
        ("d", 5, "x"): times[4],
    }
    head = store(alone).head().commit
    assert head.inputs == {"delta": {0: 5}}
    assert head.taken == {"delta": {0: (4, 5)}}
    # the current rows first, then new rows
    current = table_from("current_rows", theirs, "append")
    assert take(current)["in"] == 6
    theirs.append(("e", 7, "y"))
    assert take(current)["in"] == 1
    assert {r["id"] for r in store(current).read("current").collect()} == set("abcde")
    # a commit that rewrites rows is refused; with accept_gap it is left out, and recorded
    theirs.table.delete("id = 'a'")
    theirs.append(("f", 8, "y"))
    with pytest.raises(SourceError, match=r"version 6 \(DELETE\) removes or rewrites rows"):
        take(current)
    assert take(current, accept_gap=True)["in"] == 0
    assert store(current).head().commit.gaps == {"delta": {0: (6, 7)}}
    assert take(current)["in"] == 1
    assert all(f.offending == 0 for f in audit(store(current)))


def test_file_source_replaced_by_delta_and_back(take: Any, tmp_path: Path) -> None:
    theirs, files = Theirs(tmp_path / "theirs"), tmp_path / "files"
    files.mkdir()

    def orders(source: Any) -> Stream:
        return Stream("orders", key="id", schema=ROW, timestamp="timestamp_seconds(n)", source=source)

    of_files = orders(FilesSource(str(files)))
    of_table = orders(DeltaSource(theirs.path, "append", start="earliest"))
    for number, (file, row) in enumerate((("1.jsonl", "a"), ("2.jsonl", "b"))):
        (files / file).write_text(f'{{"id": "{row}", "n": {number}}}\n')
        assert take(of_files)["in"] == 1
        theirs.append((row.upper(), number))
        assert take(of_table)["in"] == 1
    where = str(tmp_path / "warehouse")
    told = [explain("orders", offset=(0, n), warehouse=where).origin for n in range(4)]
    names = [(one.kind, [Path(name).name for name in one.names]) for one in told if one is not None]
    versions = ("versions", ["delta"])
    assert names == [("files", ["1.jsonl"]), versions, ("files", ["2.jsonl"]), versions]


def test_append_continues_after_temporary_table_change(take: Any, store: Any, tmp_path: Path) -> None:
    """The source is changed to another table and back. Then ``append`` continues at its former position
    in the first table. ``changes`` is refused unless accepted, and then consumes the difference."""
    for mode, kind in (("append", Stream), ("changes", Table)):
        first, second = (Theirs(tmp_path / mode / name, **FEED) for name in ("first", "second"))
        first.append(("a", 1))
        second.append(("b", 2))
        here, there = (table_from(mode, one, mode, kind) for one in (first, second))
        assert take(here)["in"] == 1
        with pytest.raises(RecordsGoneError, match="the table was replaced"):
            take(there)
        assert take(there, accept_gap=True, accept_shrink=True)["in"] > 0
        first.append(("c", 3))
        second.append(("d", 4))
        if mode == "append":
            assert (take(here)["in"], take(there)["in"]) == (1, 1)
            assert [row[0] for row in log_of(store(here))] == ["a", "b", "c", "d"]
            assert take(here) == {} == take(there)
            continue
        with pytest.raises(RecordsGoneError, match="the table was replaced"):
            take(here)
        take(here, accept_gap=True, accept_shrink=True)
        assert {r["id"] for r in store(here).read("current").collect()} == {"a", "c"}


def test_initial_load_from_changed_source_kind(
    take: Any, store: Any, spark: SparkSession, tmp_path: Path
) -> None:
    """If the source of a table changes during its initial load, the load ends at the end of the new
    source."""
    theirs, files = Theirs(tmp_path / "theirs"), tmp_path / "files"
    files.mkdir()
    for name in "123":
        (files / f"{name}.jsonl").write_text(f'{{"id": "{name}", "n": {name}}}\n')
    for row in "ab":
        theirs.append((row, 9))
    first = Theirs(tmp_path / "first")
    first.append(("z", 0))

    def loaded(name: str, source: Any, **more: Any) -> VersionedTable:
        about: Any = {"key": "id", "schema": ROW, "timestamp": "timestamp_seconds(n)", **more}
        return VersionedTable(name, source=source, history_retention=timedelta(days=30), **about)

    of_files = FilesSource(str(files), max_files_per_run=1)
    of_table = DeltaSource(theirs.path, "append", start="earliest", max_versions_per_run=1)
    start: dict[str, Any] = {"start": DeltaSource(first.path, "snapshots")}
    about: tuple[dict[str, Any], ...] = ({"ready": "initial_load"}, start)
    for number, (one, other) in enumerate(((of_files, of_table), (of_table, of_files))):
        for name, more in zip(("ready", "begun"), about, strict=True):
            before, node = (loaded(f"{name}_{number}", source, **more) for source in (one, other))
            assert take(before)["in"] == 1
            done = list[bool]()
            while take(node):
                commit = store(node).head().commit
                done.append(bool(commit.ready_at) if name == "ready" else commit.start is not None)
            assert done == [False] * (len(done) - 1) + [True]
            assert len(done) == 2 + number


def test_changes_mode(take: Any, store: Any, tmp_path: Path) -> None:
    theirs = Theirs(tmp_path / "theirs", **FEED)
    theirs.append(*[(k, 1, "x") for k in "abcd"])
    alone = table_from(
        "alone", theirs, "changes", VersionedTable, start="earliest", max_versions_per_run=2
    )
    take(alone)
    theirs.table.update(predicate="id = 'a'", updates={"n": "2"})
    theirs.table.update(predicate="id = 'b'", updates={"id": "'B'"})
    theirs.table.delete("id = 'c'")
    theirs.table.optimize.compact()
    new = pa.Table.from_pylist(
        [{"id": "a", "n": 3, "day": "x"}, {"id": "e", "n": 1, "day": "y"}], KINDS
    )
    merge = theirs.table.merge(new, "t.id = s.id", source_alias="s", target_alias="t")
    merge.when_matched_update_all().when_not_matched_insert_all().when_not_matched_by_source_delete(
        "t.id = 'd'"
    ).execute()
    while take(alone):
        pass
    whole = table_from("whole", theirs, "changes", VersionedTable, start="earliest")
    take(whole)
    log = log_of(store(whole))
    assert log == log_of(store(alone))
    times = theirs.times()[::-1]
    assert sorted((r[:4] for r in log[4:]), key=str) == [
        ("B", 1, "x", False),
        ("a", 2, "x", False),
        ("a", 3, "x", False),
        ("b", None, None, True),
        ("c", None, None, True),
        ("d", None, None, True),
        ("e", 1, "y", False),
    ]
    gone = {r[0]: round(r[4].timestamp() * 1000) for r in log if r[3]}
    assert gone == {"b": times[2], "c": times[3], "d": times[-1]}
    # a row that one commit deletes and writes again is an upsert
    theirs.append(("a", 4, "x"), ("e", 1, "y"), mode="overwrite")
    while take(alone):
        pass
    rows = store(alone).read("current").collect()
    assert {(r["id"], r["n"]) for r in rows} == {("a", 4), ("e", 1)}
    assert all(f.offending == 0 for f in audit(store(alone)))


def test_changes_with_key_twice(take: Any, store: Any, tmp_path: Path) -> None:
    """A deletion of one of two rows would remove the key from the table, which the Delta table has."""
    theirs = Theirs(tmp_path / "theirs", **FEED)
    theirs.append(("a", 1, "x"))
    node = table_from("one", theirs, "changes", VersionedTable)
    quarantining = table_from("two", theirs, "changes", VersionedTable, on_duplicate="quarantine")
    for one in (node, quarantining):
        take(one)
    theirs.append(("b", 1, "x"), ("b", 2, "x"), ("c", 1, "x"), (None, 1, "x"), (None, 2, "x"))
    with pytest.raises(
        SourceError, match=r'version 1 of .* several rows with the key \{"id":"b"\}: exp'
    ):
        take(node)
    assert take(replace(quarantining, source=replace(quarantining.source, max_bad_share=0.9))) == {
        "in": 5,
        "applied": 1,
        "late": 0,
        "quarantined": 4,
    }
    reasons = [row["reason"] for row in store(quarantining).quarantine().collect()]
    assert sorted(reasons) == ["duplicate_key"] * 2 + ["null_key"] * 2
    # the way out of the message
    theirs.table.delete("id is null or (id = 'b' and n = 1)")
    assert take(table_from("one", theirs, "snapshots", VersionedTable))["applied"] == 2
    theirs.append(("d", 1, "x"))
    assert take(node)["applied"] == 1
    assert {r["id"] for r in store(node).read("current").collect()} == {"a", "b", "c", "d"}


def test_restored_delta_table(take: Any, store: Any, tmp_path: Path) -> None:
    """RESTORE is a commit like any other: the change feed has the undone changes. In mode ``append`` it
    is refused, since it rewrites rows."""
    theirs = Theirs(tmp_path / "theirs", **FEED)
    theirs.append(("a", 1, "x"), ("b", 1, "y"))
    changed = table_from("changed", theirs, "changes", VersionedTable, start="earliest")
    appended = table_from("appended", theirs, "append", Stream, start="earliest")
    take(appended)
    theirs.table.update(predicate="id = 'a'", updates={"n": "2"})
    theirs.table.delete("id = 'b'")
    theirs.append(("c", 1, "z"))
    take(changed)
    theirs.table.restore(0)
    take(changed)
    rows = store(changed).read("current").collect()
    assert {(r["id"], r["n"], r["day"]) for r in rows} == {("a", 1, "x"), ("b", 1, "y")}
    undone = sorted((r[:4] for r in log_of(store(changed))[-3:]), key=str)
    assert undone == [("a", 1, "x", False), ("b", 1, "y", False), ("c", None, None, True)]
    since = table_from("since", theirs, "append", Stream, start=4)
    for node, said in ((appended, r"version 1 \(UPDATE\)"), (since, r"version 4 \(RESTORE\)")):
        with pytest.raises(SourceError, match=f"{said} removes or rewrites rows"):
            take(node)


def test_changes_mode_requires_change_feed(take: Any, tmp_path: Path) -> None:
    theirs = Theirs(tmp_path / "theirs")
    theirs.append(("a", 1, "x"))
    node = table_from("t", theirs, "changes")
    assert take(node)["applied"] == 1  # the current rows need no feed
    theirs.append(("b", 1, "x"))
    with pytest.raises(SourceError, match=r"version 1 \(WRITE\) has no change data feed"):
        take(node)
    # mode snapshots passes that version by the difference; then the feed is used
    assert take(table_from("t", theirs, "snapshots"))["in"] == 1
    theirs.table.alter.set_table_properties(FEED)
    theirs.append(("c", 1, "x"))
    assert take(node)["in"] == 1
    with pytest.raises(TopologyError, match="expected a Table or VersionedTable, got a Stream"):
        table_from("s", theirs, "changes", Stream)
    schema = StructType([*ROW.fields, StructField("nope", StringType())])
    with pytest.raises(SourceError, match=r"expected columns \['nope'\], but version 3 has only"):
        take(Table("u", key="id", schema=schema, source=DeltaSource(theirs.path)))


def test_snapshots_mode(take: Any, store: Any, tmp_path: Path) -> None:
    theirs = Theirs(tmp_path / "theirs")
    theirs.append(("a", 1, "x"), ("b", 1, None), ("c", 1, "x"))
    newest = table_from("newest", theirs, "snapshots", VersionedTable)
    take(newest)
    theirs.append(("a", 1, "x"), ("b", 2, None), ("c", 2, "x"), mode="overwrite")
    theirs.append(("a", 1, "x"), ("b", 3, None), mode="overwrite")
    assert take(newest)["in"] == 2
    assert {r[:4] for r in log_of(store(newest))[3:]} == {
        ("b", 3, None, False),
        ("c", None, None, True),
    }
    assert take(newest) == {}
    theirs.table.optimize.compact()
    assert take(newest) == {}
    theirs.append(("z", 1, "x"), mode="overwrite")
    with pytest.raises(SourceError, match="lacks 2 of the 2 rows"):
        take(newest)
    assert take(newest, accept_shrink=True)["in"] == 3
    assert store(newest).head().commit.inputs == {"delta": {0: 4}}
    assert all(f.offending == 0 for f in audit(store(newest)))


def test_vacuumed_versions_are_reported(take: Any, store: Any, tmp_path: Path) -> None:
    theirs = Theirs(tmp_path / "theirs", **FEED)
    theirs.append(("a", 1, "x"), ("b", 1, "x"))
    stream, table = (
        table_from("s", theirs, "append", Stream),
        table_from("t", theirs, "changes", VersionedTable),
    )
    take(stream)
    take(table)
    kept = tmp_path / "backup"
    shutil.copytree(theirs.path, kept)
    theirs.append(("c", 1, "x"))
    theirs.append(("d", 1, "x"))
    theirs.table.create_checkpoint()
    log = Path(theirs.path) / "_delta_log"
    for version in (0, 1):
        (log / f"{version:020}.json").unlink()
    for node in (stream, table):
        with pytest.raises(RecordsGoneError, match="versions 1 to 1 were cleaned up"):
            take(node)
    # without the removed versions; a table consumes their rows by the difference to the current rows
    assert take(stream, accept_gap=True)["in"] == 1
    assert store(stream).head().commit.gaps == {"delta": {0: (1, 2)}}
    assert take(table, accept_gap=True)["in"] == 2
    assert {r["id"] for r in store(table).read("current").collect()} == set("abcd")
    # restored from a backup, also with new commits after it
    shutil.rmtree(theirs.path)
    shutil.copytree(kept, theirs.path)
    with pytest.raises(RecordsGoneError, match="consumed up to version 2, but the table ends at 0"):
        take(stream)
    for k in "efg":
        theirs.append((k, 1, "x"))
    with pytest.raises(
        RecordsGoneError, match="the table was restored to an earlier state and got other commits"
    ):
        take(stream)
    # another table in its place
    shutil.rmtree(theirs.path)
    theirs.append(("x", 1, "x"))
    with pytest.raises(RecordsGoneError, match="the table was replaced since version"):
        take(table)
    with pytest.raises(SourceError, match="lacks 4 of the 4 rows"):
        take(table, accept_gap=True)
    assert take(table, accept_gap=True, accept_shrink=True)["in"] == 5
    assert take(stream, accept_gap=True)["in"] == 1
    # a file that VACUUM removed
    theirs.append(("y", 1, "z"))
    shutil.rmtree(Path(theirs.path) / "day=z")
    with pytest.raises(RecordsGoneError, match=r"files of versions 1 to 1 of .* are gone"):
        take(stream)


@pytest.mark.parametrize("mode", ["append", "changes", "snapshots"])
def test_replay_and_restate_repeat_runs_of_live_table(
    take: Any, store: Any, spark: SparkSession, tmp_path: Path, mode: str
) -> None:
    """Both begin with the version that the live table began with, not with the table as it is now, and
    end where the live table ends."""
    theirs = Theirs(tmp_path / "theirs", **FEED)
    theirs.append(("a", 1, "x"), ("b", 1, "x"), ("c", 1, "x"))
    live = table_from("live", theirs, mode, VersionedTable)
    assert take(live)["in"] == 3
    if mode != "append":
        theirs.table.update(predicate="id = 'a'", updates={"n": "2"})
        assert take(live)["in"] == 1
        theirs.table.delete("id <> 'a'")
        assert take(live, accept_shrink=True)["in"] == 2
    theirs.append(("d", 1, "x"))
    assert take(live)["in"] == 1
    log, recorded = log_of(store(live)), store(live).read("log").select("recorded_at").distinct()
    times = {row[0] for row in recorded.collect()}
    theirs.append(*((k, 1, "x") for k in "efghi"))
    new = replay(str(tmp_path / "warehouse"), live, "new", spark)
    assert log_of(new) == log
    assert {r["recorded_at"] for r in new.read("log").collect()} == times
    assert restate(str(tmp_path / "warehouse"), live, "2020-01-01", spark) == ["live"]
    assert log_of(store(live)) == log
    assert take(live)["in"] == 5
    # the versions that the live table began with are gone
    theirs.table.create_checkpoint()
    for version in range(theirs.table.version()):
        (Path(theirs.path) / "_delta_log" / f"{version:020}.json").unlink()
    before = log_of(store(live))
    with pytest.raises(RecordsGoneError, match=r"expected version 0 of .*, got versions from"):
        restate(str(tmp_path / "warehouse"), live, "2020-01-01", spark)
    assert not list((tmp_path / "warehouse").glob("*.restate")), "nothing is left to complete"
    # another table in its place
    shutil.rmtree(theirs.path)
    theirs.append(("z", 1, "x"))
    with pytest.raises(RecordsGoneError, match=r"live: expected the Delta table that batch 1 consumed"):
        replay(str(tmp_path / "warehouse"), live, "newer", spark)
    with pytest.raises(RecordsGoneError, match=r"live: expected the Delta table that batch 1 consumed"):
        restate(str(tmp_path / "warehouse"), live, "2020-01-01", spark, dry_run=True)
    assert log_of(store(live)) == before


@pytest.mark.parametrize("newer", [0, 1])
def test_restate_of_table_with_initial_load(
    take: Any, store: Any, spark: SparkSession, tmp_path: Path, newer: int
) -> None:
    """The new log is loaded up to where the live one was, even if its source has more by now. So the
    assets derived from it do not wait for the rest."""
    theirs = Theirs(tmp_path / "theirs", **FEED)
    theirs.append(("a", 1, "x"))
    live = replace(table_from("live", theirs, "changes", VersionedTable), ready="initial_load")
    counted = live.group_by("id").aggregate({"c": "count(*)"}, name="counted")
    for version in range(3):
        take(live)
        take(counted)
        theirs.append((f"b{version}", 1, "x"))
    if not newer:
        take(live)
        take(counted)
    ready, old = store(live).head().commit.ready_at, store(counted).head().commit.log
    log, rows = log_of(store(live)), store(counted).read("log").count()
    warehouse = str(tmp_path / "warehouse")
    assert restate(warehouse, live, "2020-01-01", spark, among=[counted]) == ["live", "counted"]
    assert store(live).head().commit.ready_at == ready
    assert log_of(store(live)) == log
    assert store(counted).head().commit.log != old
    assert store(counted).read("log").count() == rows
    # Runs of changes are repeated in two, since their number does not change the log.
    assert store(live).head().commit.batch == 2


def test_first_run_reads_requested_version(take: Any, store: Any, tmp_path: Path) -> None:
    theirs = Theirs(tmp_path / "theirs", **FEED)
    for k in "abc":
        theirs.append((k, 1, "x"))
    for mode in ("append", "changes", "snapshots"):
        node = table_from(mode, theirs, mode)
        assert take(node, version=1)["in"] == 2
        assert store(node).head().commit.inputs == {"delta": {0: 2}}
        assert take(node)["in"] == 1


def test_changes_of_table_without_rows(take: Any, store: Any, tmp_path: Path) -> None:
    """A table that was only created has no rows yet: the first run takes its version, the next ones the
    changes after it."""
    theirs = Theirs(tmp_path / "theirs", **FEED)
    theirs.append()
    node = table_from("one", theirs, "changes", VersionedTable)
    assert take(node)["in"] == 0
    theirs.append(("a", 1, "x"))
    theirs.table.update(predicate="id = 'a'", updates={"n": "2"})
    assert take(node)["in"] == 2
    assert [r["n"] for r in store(node).read("versions").orderBy("valid_from").collect()] == [1, 2]


def test_version_is_read_after_its_files_were_compacted(take: Any, store: Any, tmp_path: Path) -> None:
    """OPTIMIZE and VACUUM remove the files of the last version with changes, but not its rows. A run of
    mode ``snapshots`` reads them, and so does one that the error of mode ``changes`` advises."""
    theirs = Theirs(tmp_path / "theirs", **FEED)
    theirs.append(("a", 1, "x"))
    snapshots = table_from("snapshots", theirs, "snapshots", VersionedTable)
    changes = table_from("changes", theirs, "changes", VersionedTable)
    assert [take(snapshots)["in"], take(changes)["in"]] == [1, 1]
    theirs.append(("b", 1, "x"))
    theirs.table.optimize.compact()
    theirs.table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    news = snapshots.source.news(store(snapshots).head().commit, {})
    assert take(snapshots, **news.config)["in"] == 1
    assert take(snapshots) == {}
    with pytest.raises(RecordsGoneError, match=r"Set mode='snapshots' of the source for one run"):
        take(changes)
    assert take(table_from("changes", theirs, "snapshots", VersionedTable))["in"] == 1
    committed = theirs.times()[::-1][1]
    for node in (snapshots, changes):
        (row,) = store(node).read("log").where("id = 'b'").collect()
        assert round(row["timestamp"].timestamp() * 1000) == committed
        assert store(node).head().commit.inputs == {"delta": {0: 2}}


def test_delta_source_in_dagster(spark: SparkSession, tmp_path: Path) -> None:
    """The asset that writes the table is upstream. The sensor requests a run for each new version."""
    theirs = Theirs(tmp_path / "theirs", **FEED)
    node = table_from("customers", theirs, "changes", VersionedTable, upstream="crm/customers")
    asset, sensor = build_asset(node), build_sensor(node)
    where = WarehouseResource(path=str(tmp_path / "warehouse"))

    def tick() -> Any:
        context = dg.build_sensor_context(resources={"vt_dagster_warehouse": where})
        said = sensor.evaluate_tick(context)
        return said.run_requests[0] if said.run_requests else said.skip_message

    assert "expected a Delta table in" in tick()

    @dg.asset(key=["crm", "customers"])
    def customers() -> None:
        """Writes a version."""
        theirs.append(("a", 1, "x"))

    done = run([customers, asset], where.path)
    assert done.success
    order = [e.step_key for e in done.get_step_success_events()]
    assert order == ["crm__customers", "customers"]
    assert materialized(done, "customers")["positions"] == {"delta": {"0": 1}}
    assert "batch 1, 1 record consumed" in tick()
    theirs.append(("b", 1, "x"))
    asked = tick()
    assert asked.run_config["ops"]["customers"]["config"] == {"version": 1}
    theirs.append(("c", 1, "x"))
    done = run([asset], where.path, run_config=asked.run_config)
    assert materialized(done, "customers")["records_in"] == 1
    assert tick().run_config["ops"]["customers"]["config"] == {"version": 2}


def test_delta_source_in_yaml() -> None:
    delta = {"path": "p", "mode": "changes", "start": "earliest", "upstream": "crm/customers"}
    dumps = {"path": "d", "format": "csv", "dump_time": "%Y-%m-%d", "ignore": "n", "max_shrink": 0.1}
    for source in ({"delta": delta}, {"delta": {**delta, "start": 3}}, {"snapshots": dumps}):
        about = {"key": "id", "columns": {"id": "string", "n": "bigint"}, "source": source}
        entry = AssetPart.model_validate({"name": "t", "table": about})
        node, _ = make_asset(entry, {}, lambda *_: None)
        (given,) = source.values()
        for name, value in given.items():
            value = str(Path(value).absolute()) if name == "path" else value
            assert getattr(node.source, name) in (value, (value,))


@pytest.mark.parametrize("mode", ["append", "changes", "snapshots"])
def test_column_added_later_reads_as_null(take: Any, store: Any, tmp_path: Path, mode: str) -> None:
    """Versions from before the new column are read with nulls in it, also one version at a time. A
    version that adds the column to existing rows only changes the rows that get a value in it."""
    path = str(tmp_path / "theirs")
    old, new = (pa.schema(list(KINDS)[:columns]) for columns in (2, 3))

    def write(kinds: pa.Schema, *rows: Row, **about: Any) -> None:
        records = [dict(zip(kinds.names, row, strict=True)) for row in rows]
        write_deltalake(path, pa.Table.from_pylist(records, kinds), **{"mode": "append", **about})

    write(old, ("a", 1), ("b", 2), ("c", 3), configuration=FEED)
    if mode == "snapshots":
        rows = ("a", 1, None), ("b", 2, "y"), ("c", 3, None), ("d", 4, "x"), ("e", 5, None)
        write(new, *rows, mode="overwrite", schema_mode="overwrite")
    else:
        write(new, ("d", 4, "x"), ("e", 5, None), schema_mode="merge")
    source = DeltaSource(path, mode, start="earliest", max_versions_per_run=1)  # type: ignore[arg-type]
    about: dict[str, Any] = {"key": "id", "schema": ROW, "history_retention": timedelta(days=30)}
    one = VersionedTable("one", **about, source=source)
    assert [take(one)["applied"] for _ in range(2)] == [3, 3 if mode == "snapshots" else 2]
    read = store(one).read("versions").orderBy("valid_from", "id").collect()
    expected = [("a", None), ("b", None), ("c", None), ("d", "x"), ("e", None)]
    if mode == "snapshots":
        expected.insert(3, ("b", "y"))
    assert [(r["id"], r["day"]) for r in read] == expected
    assert take(one) == {}


@pytest.mark.parametrize("mode", ["append", "changes", "snapshots"])
def test_versions_with_earlier_column_name(take: Any, store: Any, tmp_path: Path, mode: str) -> None:
    """Versions and files from before a renamed column have its values under the earlier name."""
    path = str(tmp_path / "theirs")

    def write(column: str, *rows: Row, **about: Any) -> None:
        records = [{"id": i, column: n, "day": day} for i, n, day in rows]
        table = pa.Table.from_pylist(records, pa.schema([KINDS[0], (column, pa.int64()), KINDS[2]]))
        write_deltalake(path, table, **{"mode": "append", **about})

    first = ("a", 1, "x"), ("b", 2, "y")
    write("m", *first, configuration=FEED, partition_by=["day"])
    if mode == "snapshots":
        write("n", *first, ("c", 3, "y"), mode="overwrite", schema_mode="overwrite")
    else:
        write("n", ("c", 3, "y"), schema_mode="merge")
    source = DeltaSource(path, cast(Any, mode), start="earliest", max_versions_per_run=1)
    about: dict[str, Any] = {"key": "id", "schema": ROW, "renamed": {"m": "n"}}
    node = VersionedTable("one", source=source, history_retention=timedelta(days=30), **about)
    assert [take(node)["in"] for _ in range(2)] == [2, 1]
    assert sorted(row[:3] for row in log_of(store(node))) == [*first, ("c", 3, "y")]


def test_columns_renamed_by_column_mapping(
    spark: SparkSession, take: Any, store: Any, tmp_path: Path
) -> None:
    """A full snapshot has the values under the new names, also before a row changes. Delta does not
    read a change feed across the rename."""
    path = str(tmp_path / "theirs")
    mapped = "'delta.columnMapping.mode' = 'name', 'delta.enableChangeDataFeed' = 'true'"
    spark.sql(
        f"CREATE TABLE delta.`{path}` (id STRING, n BIGINT, day STRING, other STRING) USING delta "
        f"TBLPROPERTIES ({mapped})"
    )
    snapshots, changes = (
        Table(mode, key="id", schema=ROW, source=DeltaSource(path, cast(Any, mode), start="earliest"))
        for mode in ("snapshots", "changes")
    )
    assert take(snapshots) == {}, "the table has no rows yet"
    spark.sql(f"INSERT INTO delta.`{path}` VALUES ('a', 1, 'x', 'y')")
    assert [take(snapshots)["applied"], take(changes)["applied"]] == [1, 1]
    spark.sql(f"ALTER TABLE delta.`{path}` DROP COLUMN day")
    spark.sql(f"ALTER TABLE delta.`{path}` RENAME COLUMN other TO day")
    assert take(snapshots)["applied"] == 1
    assert [r["day"] for r in store(snapshots).read().collect()] == ["y"]
    assert take(snapshots) == {}
    spark.sql(f"INSERT INTO delta.`{path}` VALUES ('b', 2, 'z')")
    with pytest.raises(SourceError, match=r"feed of versions 2 to 4 .* its columns were renamed"):
        take(changes)
    take(replace(changes, source=DeltaSource(path, "snapshots")))
    spark.sql(f"UPDATE delta.`{path}` SET day = 'w' WHERE id = 'b'")
    assert take(changes)["applied"] == 1
    assert {(r["id"], r["day"]) for r in store(changes).read().collect()} == {("a", "y"), ("b", "w")}


def test_texts_with_line_separators(take: Any, store: Any, tmp_path: Path) -> None:
    """The statistics in a Delta log have texts of the table as they are; Unicode has line separators
    that JSON does not escape."""
    theirs = Theirs(tmp_path / "theirs")
    theirs.append(("a\u2028b\x85c", 1, "x"))
    node = table_from("one", theirs, "append", start="earliest")
    assert take(node)["applied"] == 1
    assert [row[0] for row in log_of(store(node))] == ["a\u2028b\x85c"]


def test_partition_values_equal_delta_reader(spark: SparkSession, tmp_path: Path) -> None:
    """A partition value has the same value as in Spark's Delta reader, for each text that a Delta log
    may have for a column."""
    kinds = {
        "s": "string",
        "i": "int",
        "d": "date",
        "t": "timestamp",
        "u": "timestamp_ntz",
        "p": "decimal(10,2)",
        "b": "binary",
        "o": "boolean",
        "f": "double",
    }
    texts: dict[str, list[str | None]] = {
        "s": ["", None, 'a b%/:="+é', "__HIVE_DEFAULT_PARTITION__", "null", " "],
        "i": ["", None, "-3", "007"],
        "d": ["", None, "2024-01-05"],
        "t": ["", None, "2024-01-05 10:00:00.123456", "2024-01-05T10:00:00.123456Z"],
        "u": ["", None, "2024-01-05 10:00:00.5"],
        "p": ["", None, "1.50"],
        "b": ["", None, "éA"],
        "o": ["", None, "true", "false"],
        "f": ["", None, "1.0E-7", "NaN", "Infinity"],
    }
    path = str(tmp_path / "parted")
    columns = ", ".join(f"{name} {kind}" for name, kind in kinds.items())
    parted = ", ".join(kinds)
    spark.sql(f"create table delta.`{path}` (n int, {columns}) using delta partitioned by ({parted})")
    spark.createDataFrame([(0,)], "n int").selectExpr(
        "n", *[f"cast(null as {kind}) {name}" for name, kind in kinds.items()]
    ).write.format("delta").mode("append").save(path)
    logs = Path(path, "_delta_log")
    lines = [json.loads(line) for line in (logs / f"{1:020}.json").read_text().splitlines()]
    add = next(one for one in lines if "add" in one)
    data = Path(path, unquote(add["add"]["path"]))
    adds = list[Any]()
    for column, some in texts.items():
        for number, text in enumerate(some):
            name = f"{column}{number}.parquet"
            (Path(path) / name).write_bytes(data.read_bytes())
            values = {**dict.fromkeys(kinds), column: text}
            adds.append({"add": {**add["add"], "path": name, "partitionValues": values, "stats": None}})
    commit = {"commitInfo": {"timestamp": 1_700_000_000_000, "operation": "WRITE"}}
    (logs / f"{2:020}.json").write_text("\n".join(json.dumps(one) for one in [commit, *adds]))
    schema = StructType.fromDDL(f"n int, {columns}")
    node = Stream("parted", key="n", schema=schema, source=DeltaSource(path, start=2))
    own = DeltaSource(path, start=2).pin(None).read(spark, node)
    theirs = spark.read.format("delta").load(path)
    place = F.regexp_extract("_metadata.file_path", r"/(\w+)\.parquet", 1)
    wanted = {r["place"]: r for r in theirs.select(place.alias("place"), *kinds).collect()}
    place = F.regexp_extract("_source", r" (\w+)\.parquet", 1)
    found = {r["place"]: r for r in own.select(place.alias("place"), *kinds).collect()}
    assert len(found) == len(adds)
    for name, row in found.items():
        assert repr(row) == repr(wanted[name]), name
    assert [found[f"s{n}"]["s"] for n in range(2)] == ["", None]
    assert [found[f"b{n}"]["b"] for n in range(2)] == [bytearray(), None]


def test_struct_fields_are_matched_by_name(take: Any, store: Any, tmp_path: Path) -> None:
    inner = pa.struct([pa.field("b", pa.int64()), pa.field("a", pa.string())])
    table = pa.table({"id": ["x"], "items": pa.array([[{"b": 1, "a": "one"}]], pa.list_(inner))})
    path = str(tmp_path / "nested")
    write_deltalake(path, table)
    schema = StructType.fromDDL("id string, items array<struct<a:string,b:bigint>>")
    for mode in ("append", "snapshots"):
        source = DeltaSource(path, cast(Any, mode))
        node = Table(f"nested_{mode}", key="id", schema=schema, source=source)
        assert take(node)["applied"] == 1
        (row,) = store(node).read("current").collect()
        assert [r.asDict() for r in row["items"]] == [{"a": "one", "b": 1}]
    wrong = StructType.fromDDL("id string, items array<struct<a:string,b:string>>")
    node = Table("nested_wrong", key="id", schema=wrong, source=DeltaSource(path))
    with pytest.raises(SourceError, match=r"items\[\]\.b is bigint, expected string; correct"):
        take(node)
