"""Damaged, lost and restored tables: no run continues with only a part of its input. The tests follow
the advice of each message literally."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from fsspec.implementations.local import LocalFileSystem
from pyspark.sql import SparkSession

from tests.storage.test_commit_format import edit
from tests.storage.topology import EPOCH, Topology
from vt_dagster.errors import ClockWarning, ConcurrentRunError, StorageError, StoreUnavailableError
from vt_dagster.runs import commit_document as run_commit
from vt_dagster.runs.erase import erase
from vt_dagster.runs.export import ExportRun, export_of
from vt_dagster.runs.replay import replay, swap
from vt_dagster.runs.restate import restate
from vt_dagster.runs.run import Run, run_once
from vt_dagster.runs.truncate_log import truncate_logs
from vt_dagster.storage import arrow_reader, delta, parquet
from vt_dagster.storage.asset_store import AssetStore, stores_of
from vt_dagster.storage.read import read
from vt_dagster.storage.rewrite import purge

pytestmark = pytest.mark.usefixtures("few_rows")

NAMES = ("rates", "orders", "priced")


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Path:
    """Two batches of each of ``NAMES``; ``backup`` is the warehouse after the first."""
    topology = Topology(tmp_path_factory.mktemp("damage"))
    topology.land("rates", "1.jsonl", [("a", 1, 0), ("b", 1, 1), (None, 1, 1)])
    topology.land("orders", "1.jsonl", [("a", 1, 1), ("b", 2, 4)])
    for name in NAMES:
        topology.run(name, spark)
    shutil.copytree(topology.warehouse, topology.root / "backup")
    topology.land("rates", "2.jsonl", [("a", 2, 5), ("c", 2, 6), (None, 2, 6)])
    topology.land("orders", "2.jsonl", [("a", 3, 6), ("c", 4, 7)])
    for name in NAMES:
        topology.run(name, spark)
    return topology.root


@pytest.fixture
def topology(template: Path, tmp_path: Path) -> Topology:
    shutil.copytree(template, tmp_path / "copy")
    return Topology(tmp_path / "copy")


def folder(topology: Topology, *parts: str) -> Path:
    return Path(topology.warehouse, *parts)


def newest_file(table: Path) -> Path:
    """The newest data file of a table's newest version; of a view, one with current rows."""
    places = [file.place for file in delta.files(str(table), wanted=delta.current)]
    return max((table / place for place in places), key=lambda path: path.stat().st_mtime)


def newest_commit(table: Path) -> Path:
    return max((table / "_delta_log").glob("*.json"))


def rows(topology: Topology, name: str, what: str = "log") -> list[Any]:
    found = read(name, warehouse=topology.warehouse, what=what)
    return sorted(map(repr, found.drop_columns(["recorded_at", "partition", "offset"]).to_pylist()))


def truncate_to_nothing(path: Path) -> None:
    path.write_bytes(b"")


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def write_other_columns(path: Path) -> None:
    """A valid file with other columns."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"k": ["a"]}), path)  # pyright: ignore


@pytest.mark.parametrize("failing", [0, 1])
def test_unavailable_store_is_no_damaged_table(
    topology: Topology, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """A rebuild leaves the view as it is, and a truncation of logs fails instead of going on, whether
    the first listing fails or the second."""
    store, ls = topology.store("rates", spark), LocalFileSystem.ls
    files = sorted(folder(topology, "rates", "view").rglob("*"))
    rates = replace(topology.rates, log_retention=timedelta(0))

    def fails_in(table: str) -> Callable[..., Any]:
        calls = itertools.count()

        def fails(fs: LocalFileSystem, path: str, *args: Any, **about: Any) -> Any:
            if path.endswith(f"{table}/_delta_log") and next(calls) == failing:
                raise OSError(5, "Input/output error")
            return ls(fs, path, *args, **about)

        return fails

    got = r"expected to list .*Input/output error"
    with monkeypatch.context() as patched:
        patched.setattr(LocalFileSystem, "ls", fails_in("view"))
        with pytest.raises(StoreUnavailableError, match=got):
            store.rebuild_view()
        patched.setattr(LocalFileSystem, "ls", fails_in("view"))
        with pytest.raises(StoreUnavailableError, match=got):
            delta.open_table(store.view_path, to_read=True)
        patched.setattr(LocalFileSystem, "ls", fails_in("log"))
        with pytest.raises(StoreUnavailableError, match=got), parquet.writing(store.log_path):
            _ = delta.versions(store.log_path), delta.versions(store.log_path)
        patched.setattr(LocalFileSystem, "ls", fails_in("log"))
        with pytest.raises(StoreUnavailableError, match=got):
            truncate_logs(topology.warehouse, spark, [rates])
    assert files
    assert sorted(folder(topology, "rates", "view").rglob("*")) == files


@pytest.mark.parametrize("table", ["log", "view"])
def test_damaged_data_file_is_reported_by_each_reader(
    topology: Topology, spark: SparkSession, table: str
) -> None:
    """Each reader names a damaged file and the way out, and no run commits. Spark alone would read an
    empty file as no rows, and report the other damages as a Java stack trace."""
    topology.land("orders", "3.jsonl", [("a", 5, 8)])
    topology.run("orders", spark)
    file = newest_file(folder(topology, "rates" if table == "view" else "orders", table))
    name = "rates" if table == "view" else "orders"
    for crc in file.parent.glob(".*.crc"):
        crc.unlink()
    said = re.escape(str(file.relative_to(folder(topology, name, table))))
    way = "vt-dagster rebuild rates" if table == "view" else "Restore the file from a backup"
    reader = "rates" if table == "view" else "priced"
    consumer = topology.priced if table == "log" else topology.rates
    topology.land("rates", "3.jsonl", [("a", 5, 8)])
    before, content = topology.store(reader, spark).head(), file.read_bytes()
    for damage in (truncate_to_nothing, cut_in_half, write_other_columns, Path.unlink):
        file.write_bytes(content)
        damage(file)
        for use in (
            lambda: run_once(consumer, stores_of(topology.warehouse, spark)),
            lambda: topology.store(name, spark).read(),
            lambda: read(name, warehouse=topology.warehouse),
        ):
            with pytest.raises(StorageError, match=rf"^{name}: expected the data file {said}.*{way}"):
                use()
        assert topology.store(reader, spark).head() == before
    if table == "view":
        topology.store("rates", spark).rebuild_view()
    else:
        file.write_bytes(content)
    assert run_once(consumer, stores_of(topology.warehouse, spark)).commit is not None


def test_damaged_state_is_reported(topology: Topology, spark: SparkSession) -> None:
    commit = topology.run("counts", spark).commit
    assert commit is not None
    assert commit.state
    state = next(folder(topology, "counts", "attempts", commit.attempt, "state").glob("*.parquet"))
    content = state.read_bytes()
    topology.land("orders", "3.jsonl", [("b", 1, 8)])
    topology.run("orders", spark)
    for damage in (truncate_to_nothing, cut_in_half, Path.unlink):
        damage(state)
        with pytest.raises(
            StorageError, match=r"counts: expected the data that batch 1 staged.*replay"
        ):
            topology.run("counts", spark)
        state.write_bytes(content)
    for crc in state.parent.glob(".*.crc"):
        crc.unlink()
    assert topology.run("counts", spark).commit is not None


def test_damaged_consumed_file_list_is_reported(topology: Topology, spark: SparkSession) -> None:
    head = topology.store("orders", spark).head()
    assert head is not None
    consumed = folder(topology, "orders", "attempts", head.commit.attempt, "files.json.gz")
    content = consumed.read_bytes()
    topology.land("orders", "3.jsonl", [("a", 5, 8)])
    for damage in (truncate_to_nothing, cut_in_half, Path.unlink):
        damage(consumed)
        with pytest.raises(StorageError, match=r"orders: expected the data that batch 2 staged"):
            topology.run("orders", spark)
        consumed.write_bytes(content)
    assert topology.run("orders", spark).commit is not None


def test_damaged_base_of_truncated_log_is_reported(topology: Topology, spark: SparkSession) -> None:
    """Without the view, only the base has the truncated rows of the log. Reads and runs name a damaged
    file of the base."""
    rates = replace(topology.rates, log_retention=timedelta(0))
    assert truncate_logs(topology.warehouse, spark, [rates]) == {"rates": 4}
    shutil.rmtree(folder(topology, "rates", "view"))
    wanted = read("rates", warehouse=topology.warehouse, what="versions").num_rows
    (file,) = folder(topology, "rates", "bases").glob("*/*/*.parquet")
    content = file.read_bytes()
    for crc in file.parent.glob(".*.crc"):
        crc.unlink()
    topology.land("rates", "3.jsonl", [("a", 9, 9)])
    for damage in (truncate_to_nothing, cut_in_half, Path.unlink):
        damage(file)
        for use in (
            lambda: run_once(rates, stores_of(topology.warehouse, spark)),
            lambda: topology.store("rates", spark).read(),
            lambda: read("rates", warehouse=topology.warehouse),
        ):
            with pytest.raises(StorageError, match=rf"^rates: expected the data file .*{file.name}"):
                use()
        file.write_bytes(content)
    assert topology.store("rates", spark).read("versions").count() == wanted


def test_files_with_wrong_row_count_are_refused(
    topology: Topology, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run commits nothing if Spark loses rows, or computes them twice, between gate and files."""
    write_files = parquet._write_files  # pyright: ignore
    topology.land("orders", "3.jsonl", [("a", 5, 8), ("b", 6, 8)])
    for change in (lambda rows: rows.limit(1), lambda rows: rows.union(rows)):

        def changed(rows: Any, *rest: Any, change: Callable[[Any], Any] = change) -> None:
            write_files(change(rows), *rest)

        monkeypatch.setattr(parquet, "_write_files", changed)
        with pytest.raises(StorageError, match=r"orders: expected 2 rows in the files .* got [14]: "):
            topology.run("orders", spark)
    monkeypatch.undo()
    assert topology.run("orders", spark).commit is not None
    assert len(rows(topology, "orders")) == 6


def test_files_of_uncommitted_task_attempt_are_ignored(
    topology: Topology, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second attempt of a task, which still runs when the job is done, leaves such files. Neither
    runs nor reads take rows from them."""
    write_files = parquet._write_files  # pyright: ignore
    stage = AssetStore._stage  # pyright: ignore
    topology.land("rates", "3.jsonl", [("a", 7, 7), ("d", 6, 8), (None, 1, 1)])
    beside = Topology(topology.root / "beside")
    shutil.copytree(topology.warehouse, beside.warehouse)
    (beside.root / "rates").symlink_to(topology.root / "rates")
    beside.run("rates", spark)

    def leave_behind(place: Path, half: bool) -> None:
        attempt = place / "_temporary" / "0" / "_temporary" / "attempt_1_m_0_1"
        for file in [*place.rglob("*.parquet")]:
            there = attempt / file.relative_to(place)
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, there)
            if half:
                cut_in_half(there)

    def written(rows: Any, place: str, parted: bool) -> None:
        write_files(rows, place, parted)
        leave_behind(Path(place), half=not parted)

    def staged(store: AssetStore, attempt: str, what: str, rows: Any) -> None:
        stage(store, attempt, what, rows)
        place = folder(topology, "rates", "attempts", attempt, what)
        leave_behind(place, half=True)
        store._note_staged(attempt, what)  # pyright: ignore
        shutil.rmtree(place / "_temporary")

    monkeypatch.setattr(parquet, "_write_files", written)
    monkeypatch.setattr(AssetStore, "_stage", staged)
    assert topology.run("rates", spark).commit is not None
    monkeypatch.undo()
    for what in ("log", "versions", "current"):
        assert rows(topology, "rates", what) == rows(beside, "rates", what)


# ----------------------------------------------------------------------------------- restored backups


def restore(topology: Topology, *names: str) -> None:
    for name in names:
        shutil.rmtree(folder(topology, name))
        shutil.copytree(topology.root / "backup" / name, folder(topology, name))


def test_consumers_refuse_restored_log(topology: Topology, spark: SparkSession) -> None:
    """Consumers of a restored log refuse to run, even when it has as many batches and offsets again."""
    export = ExportRun(
        export_of(topology.orders, "log", str(topology.root / "x")), topology.warehouse, spark
    )
    current = ExportRun(
        export_of(topology.rates, None, str(topology.root / "y")), topology.warehouse, spark
    )
    export.run()
    current.run()
    restore(topology, "orders", "rates")
    consumers: list[Callable[[], object]] = [
        lambda: topology.run("priced", spark),
        export.run,
        current.run,
    ]
    for consume in consumers:
        with pytest.raises(StorageError, match="its last batch is 1: the log was restored"):
            consume()
    # Other records get the same offsets.
    (topology.root / "orders" / "2.jsonl").unlink()
    (topology.root / "rates" / "2.jsonl").unlink()
    topology.land("orders", "3.jsonl", [("z", 3, 6), ("y", 4, 7)])
    topology.land("rates", "3.jsonl", [("z", 2, 5), ("y", 2, 6), (None, 2, 6)])
    for _ in range(2):
        topology.run("orders", spark)
        topology.run("rates", spark)
        for consume in consumers:
            with pytest.raises(StorageError, match="that batch was written by another run"):
                consume()
        topology.land("orders", "4.jsonl", [("x", 3, 8)])
        topology.land("rates", "4.jsonl", [("x", 3, 8)])
    # Each way out, as its message says.
    replay(topology.warehouse, topology.priced, "priced2", spark)
    swap(topology.warehouse, "priced", "priced2")
    assert topology.run("priced", spark).commit is None
    done = topology.store("priced", spark).head()
    assert done is not None
    assert done.commit.totals["in"] == 5
    for run, where in ((export, "x"), (current, "y")):
        shutil.rmtree(topology.root / where)
        assert run.run() is not None
    assert spark.read.format("delta").load(str(topology.root / "x")).count() == 5


def test_restored_warehouse_continues(topology: Topology, spark: SparkSession) -> None:
    wanted = {name: rows(topology, name) for name in NAMES}
    restore(topology, *NAMES)
    for name in NAMES:
        topology.run(name, spark)
    assert {name: rows(topology, name) for name in NAMES} == wanted


def test_view_and_quarantine_follow_restored_log(topology: Topology, spark: SparkSession) -> None:
    """Only the log is restored: the view is rebuilt, and the quarantine follows the log's runs."""
    wanted = rows(topology, "rates", "versions")
    for part in ("log", "attempts"):
        shutil.rmtree(folder(topology, "rates", part))
        shutil.copytree(topology.root / "backup" / "rates" / part, folder(topology, "rates", part))
    for spark_too in (True, False):
        there = (
            topology.store("rates", spark).read("versions").count()
            if spark_too
            else read("rates", warehouse=topology.warehouse, what="versions").num_rows
        )
        assert there == 2
    topology.land("rates", "3.jsonl", [(None, 9, 9)])
    for _ in range(2):
        topology.run("rates", spark)
        store = topology.store("rates", spark)
        assert rows(topology, "rates", "versions") == wanted
        quarantine = store.quarantine()
        assert quarantine is not None
        found = sorted((r["batch"], json.loads(r["raw"])["n"]) for r in quarantine.collect())
        assert found == [(1, 1), (2, 2), (2, 9)]


# ------------------------------------------------------------------------------------- damaged commits


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        *(("orders", 0), ("rates", -1)),
        *(
            pytest.param(name, lines, marks=pytest.mark.endurance)
            for name, lines in (("orders", 1), ("orders", -1), ("rates", 0), ("rates", 1))
        ),
    ],
)
def test_truncated_newest_commit(
    topology: Topology, spark: SparkSession, name: str, lines: int
) -> None:
    """The commit file ends after some whole lines. The advice of the message repairs the log."""
    wanted = {one: rows(topology, one) for one in NAMES}
    versions = rows(topology, "rates", "versions")
    table = folder(topology, name, "log")
    if lines == 0:
        DeltaTable(str(table)).create_checkpoint()
    newest = newest_commit(table)
    newest.write_text("".join(newest.read_text().splitlines(keepends=True)[:lines]))
    for use in (
        lambda: topology.run(name, spark),
        lambda: topology.run("priced", spark),
        lambda: topology.store(name, spark).read(),
        lambda: read(name, warehouse=topology.warehouse),
    ):
        with pytest.raises(
            StorageError, match=rf"{newest.name} is truncated.*move it away.*run again"
        ) as told:
            use()
    moved = [newest.name, *re.findall(r"'((?:\d{20}|_last)[^']*)'", str(told.value))]
    for one in moved:
        (newest.parent / one).rename(topology.root / one)
    topology.run(name, spark)
    assert rows(topology, name) == wanted[name]
    assert rows(topology, "rates", "versions") == versions
    if name == "orders":  # of rates it reads only the view
        with pytest.raises(StorageError, match="that batch was written by another run"):
            topology.run("priced", spark)
    topology.land(name, "3.jsonl", [("a", 9, 9)])
    assert topology.run(name, spark).commit is not None
    assert topology.run(name, spark).commit is None


def test_truncated_newest_commit_of_view(topology: Topology, spark: SparkSession) -> None:
    wanted = rows(topology, "rates", "versions")
    truncate_to_nothing(newest_commit(folder(topology, "rates", "view")))
    with pytest.raises(StorageError, match=r"is truncated.*vt-dagster rebuild rates"):
        topology.run("rates", spark)
    topology.store("rates", spark).rebuild_view()
    assert rows(topology, "rates", "versions") == wanted


def test_commit_of_other_format_stops_runs(topology: Topology, spark: SparkSession) -> None:
    """No run reads such a log or appends to it. Once the asset is moved away, a run starts it again."""
    log = folder(topology, "orders", "log")
    edit(log, 1, format=2, release="9.9.0")
    before = sorted(path.name for path in (log / "_delta_log").iterdir())
    topology.land("orders", "3.jsonl", [("a", 5, 8)])
    for name in ("orders", "priced"):
        with pytest.raises(StorageError) as refused:
            topology.run(name, spark)
        assert "got format 2 in version 1" in str(refused.value)
        assert "written by vt_dagster 9.9.0" in str(refused.value)
    assert sorted(path.name for path in (log / "_delta_log").iterdir()) == before
    found = re.search(r"or move (\S+) away and materialize the asset again", str(refused.value))
    assert found is not None
    shutil.move(found[1], topology.root / "away")
    topology.run("orders", spark)
    assert len(rows(topology, "orders")) == 5


def test_lost_commit_files_are_detected_by_row_counts(topology: Topology, spark: SparkSession) -> None:
    """A reader compares the row counts of the log's statistics with the offsets of its last commit."""
    first = min((folder(topology, "orders", "log", "_delta_log")).glob("*.json"))
    lines = first.read_text().splitlines(keepends=True)
    first.write_text("".join(line for line in lines if not line.startswith('{"add"')))
    topology.land("orders", "3.jsonl", [("a", 9, 9)])
    topology.run("orders", spark)
    with pytest.raises(StorageError, match=r"orders: expected 5 rows .*, but they have 3"):
        topology.run("priced", spark)


# ------------------------------------------------------------------------------------ concurrent runs


def test_run_suspended_past_maintenance_is_refused(
    topology: Topology, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right before its commit, a run checks that its data files and its staged attempt still exist."""
    commit = parquet._commit  # pyright: ignore
    for what in ("files", "attempt"):
        topology.land("orders", f"{what}.jsonl", [("d", 7, 9)])
        head = topology.store("orders", spark).head()

        def slept(path: str, *rest: Any, what: str = what) -> None:
            if path.endswith("orders/log"):
                if what == "files":
                    purge(path, batch=99)
                else:
                    attempts = folder(topology, "orders", "attempts")
                    shutil.rmtree(max(attempts.iterdir(), key=lambda one: one.stat().st_mtime))
            commit(path, *rest)

        monkeypatch.setattr(parquet, "_commit", slept)
        with pytest.raises(ConcurrentRunError, match="Nothing was committed: run again"):
            topology.run("orders", spark)
        monkeypatch.setattr(parquet, "_commit", commit)
        after = topology.store("orders", spark).head()
        assert head is not None
        assert after is not None
        assert after.commit == head.commit
    assert topology.run("orders", spark).commit is not None
    assert topology.store("orders", spark).read().count() == 6


def test_rewrite_suspended_past_maintenance_is_refused(
    topology: Topology, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A truncation and an erase check this too: the next run needs the data that they stage."""
    commit = parquet._commit  # pyright: ignore
    rates = replace(topology.rates, log_retention=timedelta(0))
    head = topology.store("rates", spark).head()

    def slept(path: str, *rest: Any) -> None:
        if path.endswith("rates/log"):
            attempts = folder(topology, "rates", "attempts")
            shutil.rmtree(max(attempts.iterdir(), key=lambda one: one.stat().st_mtime))
        commit(path, *rest)

    told: list[str] = []
    about: dict[str, Any] = {"key": ["a"], "reason": "asked to", "among": topology.nodes}
    with monkeypatch.context() as patch:
        patch.setattr(parquet, "_commit", slept)
        assert truncate_logs(topology.warehouse, spark, [rates], tell=told.append) == {}
        with pytest.raises(ConcurrentRunError, match="Nothing was committed: run again"):
            erase(topology.warehouse, topology.rates, spark, **about)
    assert "Nothing was committed: run again" in told[0]
    assert topology.store("rates", spark).head() == head
    topology.land("rates", "3.jsonl", [("a", 9, 9)])
    assert topology.run("rates", spark).commit is not None


def restore_orders(topology: Topology, _: SparkSession) -> None:
    restore(topology, "orders")


def swap_orders(topology: Topology, spark: SparkSession) -> None:
    replay(topology.warehouse, topology.orders, "orders2", spark)
    swap(topology.warehouse, "orders", "orders2")


def restate_orders(topology: Topology, spark: SparkSession) -> None:
    restate(topology.warehouse, topology.orders, EPOCH, spark, topology.nodes)


@pytest.mark.parametrize(
    "exchange",
    [
        restore_orders,
        *(pytest.param(one, marks=pytest.mark.endurance) for one in (restate_orders, swap_orders)),
    ],
)
def test_log_swapped_during_run(
    topology: Topology,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    exchange: Callable[[Topology, SparkSession], None],
) -> None:
    """Such a run commits nothing, because its offsets belong to the old log."""
    topology.land("orders", "3.jsonl", [("d", 5, 9)])
    read_records = Run.read

    def exchanged(run: Run) -> Any:
        monkeypatch.setattr(Run, "read", read_records)
        exchange(topology, spark)
        return run.read()

    monkeypatch.setattr(Run, "read", exchanged)
    with pytest.raises(ConcurrentRunError, match=r"swapped, restated or restored .* during the run"):
        topology.run("orders", spark)
    topology.run("orders", spark)
    topology.run("orders", spark)
    found = topology.store("orders", spark).read("log").collect()
    assert sorted(row["n"] for row in found) == [1, 2, 3, 4, 5]
    assert sorted(row["offset"] for row in found) == [0, 1, 2, 3, 4]


@pytest.fixture(scope="module")
def template_with_rates2(
    template: Path, tmp_path_factory: pytest.TempPathFactory, spark: SparkSession
) -> Path:
    """``rates2`` has the records of ``rates`` and one more, from a single run."""
    root = shutil.copytree(template, tmp_path_factory.mktemp("with_rates2") / "copy")
    topology = Topology(root)
    topology.land("rates", "3.jsonl", [("a", 3, 8)])
    run_once(replace(topology.rates, name="rates2"), stores_of(topology.warehouse, spark))
    return root


@pytest.fixture
def topology_with_rates2(template_with_rates2: Path, tmp_path: Path) -> Topology:
    return Topology(shutil.copytree(template_with_rates2, tmp_path / "copy"))


def test_log_swapped_during_read(
    topology_with_rates2: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read returns rows of one log only. The same version has other rows in the other log, because
    that has fewer runs."""
    topology = topology_with_rates2
    head_of = arrow_reader.head_of

    def exchanged(warehouse: str, name: str) -> Any:
        head = head_of(warehouse, name)
        monkeypatch.setattr(arrow_reader, "head_of", head_of)
        swap(topology.warehouse, "rates", "rates2")
        return head

    for what in ("log", "versions", "current") * 2:
        asked: dict[str, Any] = {"warehouse": topology.warehouse, "what": what}
        monkeypatch.setattr(arrow_reader, "head_of", exchanged)
        found = read("rates", **asked)
        assert found.equals(read("rates", **asked)), what
    head = exchanged(topology.warehouse, "rates")  # as a caller that stores which head it read
    with pytest.raises(ConcurrentRunError, match="swapped or restated during the read; read again"):
        arrow_reader.look_up(topology.warehouse, "rates", head=head)


def test_log_swapped_during_spark_read(
    topology_with_rates2: Topology, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    topology = topology_with_rates2
    read_rows, store = parquet.read, topology.store("rates", spark)

    def exchanged(*args: Any, **more: Any) -> Any:
        monkeypatch.setattr(parquet, "read", read_rows)
        swap(topology.warehouse, "rates", "rates2")
        return read_rows(*args, **more)

    for what in ("log", "versions", "current") * 2:
        monkeypatch.setattr(parquet, "read", exchanged)
        found = store.read(what).collect()
        assert sorted(map(repr, found)) == sorted(map(repr, store.read(what).collect())), what
    at = store.snapshot()
    monkeypatch.setattr(parquet, "read", exchanged)
    with pytest.raises(ConcurrentRunError, match="swapped or restated during the read; read again"):
        store.read("current", at=at)


def test_input_swapped_during_run(
    topology: Topology, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a run commits nothing: it has pinned versions and offsets of one log, not of the other."""
    topology.land("orders", "3.jsonl", [("d", 5, 9)])
    stores, files = stores_of(topology.warehouse, spark), [f"{n}.jsonl" for n in (1, 2, 3)]
    for name, runs in (("orders", [files]), ("at_once", [files]), ("alike", [[f] for f in files])):
        for only in runs:
            run_once(replace(topology.orders, name=name), stores, only=only)
    to, read_rows = str(topology.root / "exported"), parquet.read
    export = ExportRun(export_of(topology.orders, "log", to), topology.warehouse, spark)

    for other, said in (("at_once", "it was swapped .* during the read"), ("alike", "got another log")):

        def exchanged(*args: Any, other: str = other, **more: Any) -> Any:
            monkeypatch.setattr(parquet, "read", read_rows)
            swap(topology.warehouse, "orders", other)
            return read_rows(*args, **more)

        for run in (lambda: topology.run("priced", spark), export.run):
            monkeypatch.setattr(parquet, "read", exchanged)
            with pytest.raises(ConcurrentRunError, match=f"orders.*{said}.*again"):
                run()
            swap(topology.warehouse, "orders", other)
    assert topology.run("priced", spark).commit is not None
    assert export.run() is not None


def test_run_overtaken_by_two_others(
    topology: Topology, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two runs have removed the state that the first would continue from. Its error says to run
    again, not to restore anything."""
    topology.run("counts", spark)
    topology.land("orders", "3.jsonl", [("a", 5, 8)])
    topology.run("orders", spark)
    read_records = Run.read

    def overtaken(run: Run) -> Any:
        monkeypatch.setattr(Run, "read", read_records)
        topology.run("counts", spark)
        topology.land("orders", "4.jsonl", [("b", 6, 9)])
        topology.run("orders", spark)
        topology.run("counts", spark)
        return run.read()

    monkeypatch.setattr(Run, "read", overtaken)
    with pytest.raises(
        ConcurrentRunError, match=r"another run, an erase or a swap has committed since.*[Rr]un again"
    ):
        topology.run("counts", spark)
    assert topology.run("counts", spark).commit is None


def test_version_erased_during_run(
    topology: Topology, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run stops if an erase removes a version that it reads; the next run consumes all records."""
    topology.land("orders", "3.jsonl", [("d", 5, 9)])
    topology.run("orders", spark)
    read_records = Run.read

    def erased(run: Run) -> Any:
        monkeypatch.setattr(Run, "read", read_records)
        topology.land("orders", "4.jsonl", [("e", 6, 9)])
        topology.run("orders", spark)
        purge(str(folder(topology, "orders", "log")), batch=4)
        return run.read()

    monkeypatch.setattr(Run, "read", erased)
    with pytest.raises(ConcurrentRunError, match=r"orders: expected version 2 of .* run again"):
        topology.run("priced", spark)
    topology.run("priced", spark)
    taken = topology.store("priced", spark).head()
    assert taken is not None
    assert taken.commit.totals["in"] == 6


def test_run_between_renames_of_swap(topology: Topology, spark: SparkSession) -> None:
    """A run between the two renames of a swap does not start from an empty table. A swap does not
    overwrite a directory that another program creates in between."""
    wanted = rows(topology, "orders")
    replay(topology.warehouse, topology.orders, "orders2", spark)
    folder(topology, "orders").rename(folder(topology, "_orders.swap.orders2"))
    for use in (
        lambda: topology.run("orders", spark),
        lambda: topology.store("orders", spark).read(),
        lambda: read("orders", warehouse=topology.warehouse),
    ):
        with pytest.raises(StorageError, match="run vt-dagster swap again with the same arguments"):
            use()
    folder(topology, "orders").mkdir()
    with pytest.raises(StorageError, match=r"both exist .* move the one away .* and run it again"):
        swap(topology.warehouse, "orders", "orders2")
    folder(topology, "orders").rmdir()
    swap(topology.warehouse, "orders", "orders2")
    assert rows(topology, "orders") == wanted
    assert read("orders2", warehouse=topology.warehouse).num_rows == len(wanted)

    folder(topology, "orders.restate", "old").mkdir(parents=True)
    folder(topology, "orders").rename(folder(topology, "orders.restate", "old", "orders"))
    with pytest.raises(StorageError, match="run vt-dagster restate again with the same arguments"):
        topology.run("orders", spark)


def test_next_run_writes_missing_quarantine_once(
    topology: Topology, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second process writes the first run's quarantine rows and two batches more. The first run
    still reports its commit, and each quarantined row is written once."""
    topology.land("rates", "3.jsonl", [("d", 7, 9), (None, 3, 9)])
    commit = AssetStore.commit

    def overtaken(store: AssetStore, *rest: Any) -> Any:
        monkeypatch.setattr(AssetStore, "commit", commit)
        head = commit(store, *rest)
        for batch in (4, 5):
            topology.land("rates", f"{batch}.jsonl", [("d", batch, 9), (None, batch, 9)])
            topology.run("rates", spark)
        return head

    unpublished = AssetStore._unpublished  # pyright: ignore

    def late(store: AssetStore, head: Any) -> Any:
        """Both processes check which batches lack quarantine rows, before either writes them."""
        found = unpublished(store, head)
        if not seen:
            seen.append(head)
            topology.store("rates", spark).catch_up()
        return found

    seen: list[Any] = []
    monkeypatch.setattr(AssetStore, "commit", overtaken)
    receipt = topology.run("rates", spark)
    assert receipt.commit is not None
    assert receipt.commit.batch == 3
    topology.land("rates", "6.jsonl", [("d", 6, 9), (None, 6, 9)])
    monkeypatch.setattr(AssetStore, "_unpublished", late)
    receipt = topology.run("rates", spark)
    assert receipt.commit is not None
    assert seen
    monkeypatch.undo()
    quarantine = topology.store("rates", spark).quarantine()
    assert quarantine is not None
    found = sorted((r["batch"], json.loads(r["raw"])["n"]) for r in quarantine.collect())
    assert found == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 6)]


def test_clock_that_was_ahead(
    topology: Topology, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, ahead = time.time_ns, 40 * 86_400 * 10**9
    told: list[str] = []

    def landed(file: str, number: int) -> None:
        topology.land("orders", f"{file}.jsonl", [("a", number, 9)])
        run_once(topology.orders, stores_of(topology.warehouse, spark, told.append))

    at = datetime.now(timezone.utc).isoformat()
    monkeypatch.setattr(run_commit.time, "time_ns", lambda: now() + ahead)
    landed("3", 3)
    monkeypatch.undo()
    assert not [line for line in told if "clock" in line]
    with pytest.warns(ClockWarning, match=r"orders: as_known_at .* omits runs"):
        read("orders", warehouse=topology.warehouse, as_known_at=datetime.now(timezone.utc))
    landed("4", 4)
    (said,) = [line for line in told if "! expected this machine's clock to be after" in line]
    assert "reads as of now include it" in said
    instant = datetime.now(timezone.utc).isoformat()
    with pytest.warns(ClockWarning, match="omits runs that were committed by then"):
        read("orders", warehouse=topology.warehouse, as_known_at=instant)
    with pytest.warns(ClockWarning, match="omits runs that were committed by then"):
        topology.store("orders", spark).read(as_known_at=instant)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ClockWarning)
        read("orders", warehouse=topology.warehouse, as_known_at=at)


def test_checkpoint_without_commits_stops_run(topology: Topology, spark: SparkSession) -> None:
    """The checkpoint shows that the asset has run, so no run starts it from the beginning."""
    table = folder(topology, "orders", "log")
    DeltaTable(str(table)).create_checkpoint()
    for commit in (table / "_delta_log").glob("*.json"):
        commit.unlink()
    topology.land("orders", "3.jsonl", [("d", 5, 9)])
    for use in (
        lambda: topology.run("orders", spark),
        lambda: topology.run("priced", spark),
        lambda: topology.store("orders", spark).read(),
        lambda: read("orders", warehouse=topology.warehouse),
    ):
        with pytest.raises(StorageError, match=r"orders: expected the commits .* got only checkpoints"):
            use()


@pytest.mark.parametrize(
    "damage",
    [
        cut_in_half,
        *(pytest.param(d, marks=pytest.mark.endurance) for d in (truncate_to_nothing, Path.unlink)),
    ],
)
def test_damaged_checkpoint_is_reported(
    topology: Topology, spark: SparkSession, damage: Callable[[Path], None]
) -> None:
    """All commits still exist, so the message advises to move the checkpoint away."""
    wanted = rows(topology, "rates", "versions")
    for part in ("log", "view"):
        table = folder(topology, "rates", part)
        DeltaTable(str(table)).create_checkpoint()
        damage(next((table / "_delta_log").glob("*.checkpoint.parquet")))
    topology.land("rates", "3.jsonl", [("a", 2, 5)])
    for part in ("view", "log"):
        with pytest.raises(StorageError, match=r"All its commits exist.*move \[") as told:
            topology.run("rates", spark)
        for name in re.findall(r"'([\w.]*checkpoint[\w.]*)'", str(told.value)):
            (folder(topology, "rates", part, "_delta_log") / name).rename(topology.root / name)
    assert topology.run("rates", spark).commit is not None
    assert rows(topology, "rates", "versions") == wanted


class Canceled(BaseException):
    """Like Dagster's ``DagsterExecutionInterruptedError``, not a ``KeyboardInterrupt``."""


def test_canceled_call_does_not_shift_jvm_answers(spark: Any) -> None:
    """The JVM's late answer to a canceled call is not taken as the answer to the next call."""

    def cancel(*_: object) -> None:
        raise Canceled

    def run() -> None:
        try:
            spark._jvm.java.lang.Thread.sleep(600)
        finally:  # a run releases its cached rows
            assert spark.range(3).count() == 3

    before = signal.signal(signal.SIGALRM, cancel)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Canceled):
            run()
        assert spark.range(4).count() == 4
    finally:
        signal.signal(signal.SIGALRM, before)
