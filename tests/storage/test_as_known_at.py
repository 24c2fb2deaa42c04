"""Valid time and system time: a read ``as_known_at`` a time gives what the tables gave at that time."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, write_deltalake
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

import vt_dagster
from tests.storage.topology import EPOCH, Topology
from vt_dagster.columns import RECORDED_AT
from vt_dagster.errors import StorageError
from vt_dagster.explore.table_diff import Side, table_diff
from vt_dagster.runs.replay import replay
from vt_dagster.runs.run import run_once
from vt_dagster.sources.files_source import FilesSource
from vt_dagster.storage import arrow_reader, commit_log, delta, view
from vt_dagster.storage.asset_store import stores_of
from vt_dagster.storage.commit_log import Checkpoint, Commit, Shape
from vt_dagster.storage.maintenance import remove_commits
from vt_dagster.topology.durations import in_utc
from vt_dagster.topology.model import Table

pytestmark = pytest.mark.usefixtures("few_rows")

MINUTE = 60_000_000
START = int(EPOCH.timestamp()) * 1_000_000
FIRST = START + 1_000 * MINUTE
"""The runs of a log below are recorded one minute apart, from one minute after this time on."""
RETENTION = 10 * MINUTE

Record = tuple[str, int | None, int]
"""A key, a value (null: a deletion), and a timestamp in minutes."""
record = st.tuples(st.sampled_from("abc"), st.sampled_from([None, 1, 2]), st.integers(0, 40))
runs = st.lists(st.tuples(st.lists(record, max_size=5), st.booleans()), min_size=2, max_size=7)
"""The records of each run, and whether the view is written at the end of it."""


def moment(micros: int) -> str:
    return in_utc(micros)


def sorted_rows(rows: pa.Table) -> list[tuple[Any, ...]]:
    columns = sorted(rows.column_names)
    values = [rows.column(c).to_pylist() for c in columns]
    return sorted(zip(*values, strict=True), key=repr)


def read_rows(warehouse: str, name: str, known: str | None, **asked: Any) -> Any:
    """The rows of a read, or the text of its error."""
    try:
        rows = vt_dagster.read(name, warehouse=warehouse, as_known_at=known, **asked)
    except StorageError as error:
        return str(error)
    return sorted_rows(rows)


def read_requests(kind: str) -> list[dict[str, Any]]:
    asked: list[dict[str, Any]] = [{"what": "log"}, {"what": "log", "key": "a"}]
    if kind != "stream":
        asked += [{}, {"key": "b"}]
    if kind == "versioned":
        times = [moment(START + minutes * MINUTE) for minutes in (0, 7, 15, 22, 31, 40)]
        asked += [{"what": "versions"}]
        asked += [{"as_of": t, "partial": partial} for t in times for partial in (True, False)]
        asked += [{"as_of": times[2], "key": "a", "partial": True}]
    return asked


@dataclass
class Log:
    """Writes a log as runs do, without Spark: the rules of ``put``, record by record."""

    root: Path
    kind: Any
    noted: bool = True
    stream_time: dict[int, int] = field(default_factory=dict[int, int])
    offsets: dict[int, int] = field(default_factory=dict[int, int])
    newest: dict[str, int] = field(default_factory=dict[str, int])
    disorder: dict[int, int] = field(default_factory=dict[int, int])
    batch: int = 0

    @property
    def recorded(self) -> int:
        """The time at which the last run was recorded."""
        return FIRST + self.batch * MINUTE

    def run(self, records: Sequence[Record]) -> Commit:
        self.batch += 1
        rows = [row for r in records if (row := self._put(*r)) is not None]
        length = RETENTION if self.kind == "versioned" else None
        commit = Commit(
            asset="t",
            batch=self.batch,
            attempt=f"attempt-{self.batch}",
            shape=Shape(kind=self.kind, key=["k"], history_retention=length),
            log="attempt-1",
            recorded_at=self.recorded,
            next_offset=self.offsets,
            stream_time=self.stream_time,
            disorder=self.disorder,
        )
        time = pa.timestamp("us", "UTC")
        kinds = [("k", pa.string()), ("n", pa.int32()), ("timestamp", time), ("partition", pa.int32())]
        kinds += [("offset", pa.int64()), ("is_tombstone", pa.bool_()), ("is_latest", pa.bool_())]
        kinds += [("recorded_at", time)] if self.noted else []
        told = commit.model_dump(exclude=set() if self.noted else {"recorded_at"})
        self._write("log", pa.Table.from_pylist(rows, schema=pa.schema(kinds)), told, "append")
        return commit

    def _put(self, k: str, n: int | None, minutes: int) -> dict[str, Any] | None:
        home, at = ord(k) % 2, START + minutes * MINUTE
        now = self.stream_time.get(home, at)
        if self.kind == "versioned" and at < now - RETENTION:
            return None
        self.stream_time[home] = max(now, at)
        offset = self.offsets.get(home, 0)
        self.offsets[home] = offset + 1
        latest = self.newest.setdefault(k, at) <= at
        self.newest[k] = max(self.newest[k], at)
        if not latest:
            self.disorder[self.batch] = min(self.disorder.get(self.batch, at), at)
        row = {"k": k, "n": n, "timestamp": at, "partition": home, "offset": offset}
        return {**row, "is_tombstone": n is None, "is_latest": latest, "recorded_at": self.recorded}

    def write_view(self, commit: Commit) -> None:
        what = "versions" if self.kind == "versioned" else "current"
        rows = arrow_reader.look_up(str(self.root), "t", what)
        then = Checkpoint(
            asset="t",
            batch=commit.batch,
            attempt=f"view-{commit.batch}",
            next_offset=commit.next_offset,
            stream_time=commit.stream_time,
            history_retention=commit.shape.history_retention,
        )
        self._write("view", rows, then.model_dump(), "overwrite")

    def _write(self, table: str, rows: pa.Table, document: dict[str, Any], mode: Any) -> None:
        told = {"userMetadata": json.dumps({delta.MARK: delta.with_format(document)})}
        about = CommitProperties(custom_metadata=told)
        path = self.root / "t" / table
        write_deltalake(path, rows, mode=mode, commit_properties=about, configuration=QUIET)


QUIET = {"delta.enableExpiredLogCleanup": "false"}


@contextmanager
def temporary_log(kind: str, noted: bool = True) -> Iterator[Log]:
    with TemporaryDirectory() as root:
        yield Log(Path(root), kind, noted)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["versioned", "table", "stream"])
@settings(max_examples=3, deadline=None)
@given(runs, st.integers(0, 6))
def test_as_known_at_equals_copy_of_that_time(
    kind: str, drawn: list[tuple[list[Record], bool]], cleaned: int
) -> None:
    """Records are out of order, late, deleted, replaced or expired. A read as known at the time of a
    run, or shortly before the next, gives the rows of then. The view is of any batch; maintenance has
    removed commits."""
    with temporary_log(kind) as log:
        root, then = str(log.root), list[tuple[int, list[Any]]]()
        for number, (records, with_view) in enumerate(drawn):
            commit = log.run(records)
            if with_view and kind != "stream":
                log.write_view(commit)
            if number == cleaned:
                DeltaTable(log.root / "t" / "log").create_checkpoint()
            then.append((log.recorded, [read_rows(root, "t", None, **q) for q in read_requests(kind)]))
        remove_commits(str(log.root / "t" / "log"), timedelta(0))
        left = delta.versions(str(log.root / "t" / "log"))
        assert left[0] == min(cleaned, len(drawn)) if cleaned < len(drawn) else not left[0]
        for recorded, answers in then:
            for known in (recorded, recorded + MINUTE - 1):
                found = [read_rows(root, "t", moment(known), **q) for q in read_requests(kind)]
                assert found == answers, moment(known)
        assert "no data existed before it" in read_rows(root, "t", moment(then[0][0] - 1))


def expected_versions(rows: Sequence[dict[str, Any]], now: dict[int, int]) -> Counter[Any]:
    """The versions of a log by FORMAT 4.1: ``k, n, valid_from, valid_to`` (n is null: deleted)."""
    found = Counter[Any]()
    for k in {row["k"] for row in rows}:
        at = {row["timestamp"]: row["n"] for row in rows if row["k"] == k}
        horizon = now[ord(k) % 2] - RETENTION
        for begin, end in zip(sorted(at), [*sorted(at)[1:], None], strict=True):
            if (end or horizon + 1) > horizon and (at[begin] is not None or begin >= horizon):
                found[k, at[begin], begin, end] += 1
    return found


def expected_gets(versions: Counter[Any], at: int, now: dict[int, int]) -> Counter[Any]:
    """The rows as of a time by FORMAT 4.1.4: before the horizon, only versions still current."""
    return Counter(
        (k, n, begin, end)
        for k, n, begin, end in versions
        if n is not None and begin <= at
        if end is None or (at < end and at >= now[ord(k) % 2] - RETENTION)
    )


@pytest.mark.parametrize("seed", range(3))
def test_versions_as_known_at_and_diffs_follow_format_rules(seed: int) -> None:
    chance, then = random.Random(seed), list[tuple[int, dict[int, int], Counter[Any]]]()

    def known(at: int, **asked: Any) -> Counter[Any]:
        rows = vt_dagster.read("t", warehouse=root, as_known_at=moment(at), **asked).to_pylist()
        times = [[micros_of(row[c]) for c in ("valid_from", "valid_to")] for row in rows]
        return Counter((row["k"], row["n"], *of) for row, of in zip(rows, times, strict=True))

    with temporary_log("versioned") as log:
        root, records = str(log.root), list[dict[str, Any]]()
        for run in range(4):
            some = [
                (chance.choice("abc"), chance.choice([None, 1, 2]), 6 * run + chance.randint(-6, 6))
                for _ in range(8)
            ]
            commit = log.run(some)
            records = vt_dagster.read("t", warehouse=root, what="log").to_pylist()
            records = [{**row, "timestamp": micros_of(row["timestamp"])} for row in records]
            records.sort(key=lambda row: (row["partition"], row["offset"]))
            now = dict(log.stream_time)
            then.append((log.recorded, now, expected_versions(records, now)))
            if chance.random() < 0.5:
                log.write_view(commit)
        for recorded, now, versions in then:
            assert known(recorded, what="versions") == versions
            edges = {h + more for h in (t - RETENTION for t in now.values()) for more in (-1, 0, 1)}
            for at in edges | {t for _, _, t, _ in versions}:
                about: dict[str, Any] = {"as_of": moment(at), "partial": True}
                assert known(recorded, **about) == expected_gets(versions, at, now)
            for other, _, others in then:
                told = table_diff(root, Side("t", moment(recorded)), Side("t", moment(other)))
                assert told.rows == (versions.total(), others.total())
                assert told.only == ((versions - others).total(), (others - versions).total())


def micros_of(time: datetime | None) -> int | None:
    return None if time is None else (time - EPOCH) // timedelta(microseconds=1) + START


def test_as_known_at_before_first_commit_is_refused(tmp_path: Path) -> None:
    log = Log(tmp_path, "table")
    log.run([("a", 1, 1)])
    asked: dict[str, Any] = {"warehouse": str(tmp_path), "as_known_at": "2020-01-01T00:00:00"}
    with pytest.raises(StorageError) as refused:
        vt_dagster.read("t", **asked)
    assert str(refused.value) == (
        "t: expected as_known_at at or after the first known commit, got 2020-01-01T00:00:00Z, but "
        "that commit was recorded at 2020-01-01T16:41:00Z: no data existed before it; use a later time"
    )
    # A future time means now.
    assert vt_dagster.read("t", **{**asked, "as_known_at": "2300-01-01"}).num_rows == 1
    # An earlier release has removed, without an archive, the commits of the times before.
    log.run([("a", 2, 2)])
    log.run([("a", 3, 3)])
    (tmp_path / "t" / "log" / "_delta_log" / f"{0:020}.json").unlink()
    with pytest.raises(StorageError, match="16:42:00Z: an earlier maintenance has"):
        vt_dagster.read("t", **asked)


def test_as_known_at_bisects_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The read finds the commit by bisection, and opens no file of a later time."""
    log = Log(tmp_path, "table")
    for minute in range(40):
        log.run([("a", minute, minute)])
    read, opened = list[int](), list[str]()
    ours, files = delta.our_commit, delta.files_of

    def told(path: str, version: int) -> Any:
        read.append(version)
        return ours(path, version)

    def listed(*asked: Any) -> Any:
        found = files(*asked)
        opened.extend(file.place for file in found)
        return found

    monkeypatch.setattr(delta, "our_commit", told)
    monkeypatch.setattr(delta, "files_of", listed)
    rows = vt_dagster.read("t", warehouse=str(tmp_path), as_known_at=moment(FIRST + 7 * MINUTE))
    assert rows.column("n").to_pylist() == [6]
    assert (len(read), len(opened)) == (len(set(read)), 7)
    assert len(read) <= 7


def land_all(topology: Topology) -> Iterator[None]:
    """Lands five files: the third has a record of minute 8, out of order, which splits the version from
    5 to 10. The fourth has a deletion and an old record. The last expires all before minute 20."""
    files = [
        [("a", 1, 0), ("a", 2, 5), ("b", 1, 1)],
        [("a", 3, 10), ("b", 2, 9)],
        [("a", 9, 8)],
        [("b", None, 12), ("a", 4, 1)],
        [("a", 5, 30)],
    ]
    for number, records in enumerate(files):
        topology.land("rates", f"{number}.jsonl", records)
        yield


@pytest.fixture(scope="module")
def recorded_log(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Topology, list[tuple[int, list[Any]]]]:
    """``rates`` and a plain table of the same records, with the answers after each run."""
    topology = Topology(tmp_path_factory.mktemp("known"))
    plain = plain_of(topology)
    then = list[tuple[int, list[Any]]]()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(view, "SEGMENT_ROWS", 2)
        patched.setattr(view, "EACH_RUN", 0)
        patched.setattr(view, "SHARE", 0.5)
        for number, _ in enumerate(land_all(topology)):
            topology.run("rates", spark)
            if number in (0, 3):
                run_once(plain, stores_of(topology.warehouse, spark))
            head = topology.store("rates", spark).head()
            assert head is not None
            then.append((head.commit.recorded_at, read_all_requests(topology)))
    return topology, then


def plain_of(topology: Topology) -> Table:
    source = FilesSource(str(topology.root / "rates"), max_bad_share=1.0)
    about: dict[str, Any] = {"tombstone": "n is null", "source": source}
    return Table("plain", key="k", schema=topology.rates.schema, **about)


def read_all_requests(topology: Topology, known: str | None = None) -> list[Any]:
    return [read_rows(topology.warehouse, "rates", known, **q) for q in read_requests("versioned")]


def as_of_8(topology: Topology, known: int) -> list[int]:
    about = {"as_of": moment(START + 8 * MINUTE), "as_known_at": moment(known), "partial": True}
    rows = vt_dagster.read("rates", warehouse=topology.warehouse, key="a", into="arrow", **about)
    return rows.column("n").to_pylist()


def test_late_record_changes_past_reads(
    recorded_log: tuple[Topology, list[tuple[int, list[Any]]]],
) -> None:
    topology, then = recorded_log
    before, after = then[1][0], then[2][0]
    assert (as_of_8(topology, before), as_of_8(topology, after)) == ([2], [9])
    assert as_of_8(topology, after - 1) == [2]
    assert as_of_8(topology, then[4][0]) == []  # its history had expired by then
    current = [
        sorted(
            vt_dagster.read("rates", warehouse=topology.warehouse, as_known_at=moment(t))[
                "n"
            ].to_pylist()
        )
        for t, _ in then
    ]
    assert current == [[1, 2], [2, 3], [2, 3], [3], [5]]


def test_each_row_has_its_system_time(
    recorded_log: tuple[Topology, list[tuple[int, list[Any]]]],
) -> None:
    topology, then = recorded_log
    rows = vt_dagster.read("rates", warehouse=topology.warehouse, what="log")
    times = {int(t.timestamp() * 1e6 + 0.5) for t in rows.column(RECORDED_AT).to_pylist()}
    assert times == {t for t, _ in then}
    assert [t for t, _ in then] == sorted(times)
    versions = vt_dagster.read("rates", warehouse=topology.warehouse, what="versions")
    of_log = {(r["partition"], r["offset"]): r[RECORDED_AT] for r in rows.to_pylist()}
    for row in versions.to_pylist():
        assert row[RECORDED_AT] == of_log[row["partition"], row["offset"]]


def test_replay_keeps_system_times(
    recorded_log: tuple[Topology, list[tuple[int, list[Any]]]], spark: SparkSession, tmp_path: Path
) -> None:
    """A replay keeps ``recorded_at`` of each record, unless ``keep_recorded=False``. Here maintenance
    has removed some commits of the original."""
    topology, then = recorded_log
    warehouse = shutil.copytree(topology.warehouse, tmp_path / "copy")
    DeltaTable(warehouse / "rates" / "log").create_checkpoint()
    remove_commits(str(warehouse / "rates" / "log"), timedelta(0))
    again = replay(str(warehouse), topology.rates, "again", spark)
    assert [one.recorded_at for one in commit_log.commits(again.root)] == [t for t, _ in then]
    for recorded, answers in then:
        found = [
            read_rows(str(warehouse), "again", moment(recorded), **q)
            for q in read_requests("versioned")
        ]
        assert [str(one).replace("again", "rates") for one in found] == [str(one) for one in answers]
    now = replay(str(warehouse), topology.rates, "now", spark, keep_recorded=False)
    (commit,) = commit_log.commits(now.root)
    assert commit.recorded_at > then[-1][0]


@pytest.mark.parametrize("maintained", [False, True])
def test_spark_equals_arrow(
    recorded_log: tuple[Topology, list[tuple[int, list[Any]]]],
    spark: SparkSession,
    tmp_path: Path,
    maintained: bool,
) -> None:
    """Spark and Arrow give the same answers, also after compaction and the removal of commits."""
    topology, then = recorded_log
    if maintained:
        topology = Topology(Path(shutil.copytree(topology.root, tmp_path / "copy")))
        for part in ("log", "view"):
            path = f"{topology.warehouse}/rates/{part}"
            table = DeltaTable(path)
            table.create_checkpoint()
            table.optimize.compact()
            table.vacuum(0, dry_run=False, enforce_retention_duration=False)
            remove_commits(path, timedelta(0))
        assert len(list(commit_log.commits(f"{topology.warehouse}/rates"))) == 5
        assert len(delta.versions(f"{topology.warehouse}/rates/log")) < 5
    store = topology.store("rates", spark)
    for recorded, answers in then:
        assert read_all_requests(topology, moment(recorded)) == answers
    for recorded, answers in then[1::2] if maintained else then[::2]:
        for asked, expected in list(zip(read_requests("versioned"), answers, strict=True))[::3]:
            if isinstance(expected, str) or "key" in asked:
                continue
            asked = {"what": None, "as_of": None, "partial": False, **asked}
            assert sorted_rows(store.read(**asked, as_known_at=moment(recorded)).toArrow()) == expected
    known = {"warehouse": topology.warehouse, "as_known_at": moment(then[2][0])}
    by_spark = vt_dagster.read("plain", into="spark", **known)
    assert sorted_rows(by_spark.toArrow()) == sorted_rows(vt_dagster.read("plain", **known))


def test_log_without_recorded_at_uses_delta_time(tmp_path: Path, spark: SparkSession) -> None:
    """The commits of a log without ``recorded_at`` have Delta's time; the next run adds the column."""
    topology = Topology(tmp_path)
    log = Log(tmp_path / "made", "versioned", noted=False)
    for records in ([("a", 1, 1)], [("a", 2, 3), ("b", 1, 3)]):
        log.write_view(log.run(records))
    shutil.copytree(tmp_path / "made" / "t", tmp_path / "warehouse" / "rates")
    first, second = commit_log.commits(f"{topology.warehouse}/rates")
    assert first.recorded_at <= second.recorded_at
    then = read_all_requests(topology)
    topology.land("rates", "1.jsonl", [("a", 9, 2), ("c", 1, 4)])
    receipt = topology.run("rates", spark)
    assert receipt.commit is not None
    assert receipt.commit.recorded_at > second.recorded_at
    rows = vt_dagster.read("rates", warehouse=topology.warehouse, what="versions")
    noted = {(r["k"], r["n"]): r[RECORDED_AT] is not None for r in rows.to_pylist()}
    assert noted == {("a", 1): False, ("a", 9): True, ("a", 2): False, ("b", 1): False, ("c", 1): True}
    now = read_all_requests(topology, moment(receipt.commit.recorded_at - 1))
    # The old rows now have the column, with null.
    assert [len(one) for one in now] == [len(one) for one in then]
    in_stream = topology.store("rates", spark).read("versions", as_known_at=moment(second.recorded_at))
    assert in_stream.count() == len(then[4])


def test_recorded_at_never_goes_back(tmp_path: Path, spark: SparkSession) -> None:
    """If the clock is behind the last commit's time, a commit is still recorded after the last one."""
    topology = Topology(tmp_path)
    topology.land("orders", "1.jsonl", [("a", 1, 1)])
    ahead = 4_102_444_800 * 10**9  # 2100
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("vt_dagster.runs.commit_document.time.time_ns", lambda: ahead)
        topology.run("orders", spark)
    topology.land("orders", "2.jsonl", [("a", 2, 2)])
    topology.run("orders", spark)
    first, second = commit_log.commits(f"{topology.warehouse}/orders")
    assert (first.recorded_at, second.recorded_at) == (ahead // 1000, ahead // 1000 + 1)


def test_key_lookup_as_known_at_needs_no_jvm(
    recorded_log: tuple[Topology, list[tuple[int, list[Any]]]],
) -> None:
    topology, then = recorded_log
    code = (
        "import sys, vt_dagster\n"
        f"rows = vt_dagster.read('rates', warehouse={topology.warehouse!r}, key='a', "
        f"as_known_at={moment(then[1][0])!r})\n"
        "assert rows.column('n').to_pylist() == [3]\n"
        "assert 'pyspark' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
